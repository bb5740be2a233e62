"""One member's side of a process group: connecting, errors, and leaving."""

import os
import threading
import time
import types
import weakref
from datetime import timedelta

import pytest
import torch

from benchmarks.certificates import make_certificates
from raydl.collective import process_group
from raydl.collective.key_store import SECRET, StoreServer, proof
from raydl.collective.process_group import (
    TorchGroup,
    TunnelStore,
    dist,
    is_done,
    is_done_on_device,
    make_gloo,
    unproven_peers,
)
from raydl.collective.tls_tunnel import GLOO_HOST

SOON_S = 10.0
HOST = "127.0.0.1"
HOSTS = ("127.0.1.1", "127.0.1.2")
"""Two hosts, as the members see it; both are loopback addresses of this machine."""


class MemoryStore(dist.Store):
    """The keys of a generation, as a member sees them."""

    def __init__(self, *, timeout_s=SOON_S):
        super().__init__()
        self.server, self.timeout_s = StoreServer(), timeout_s
        self.waits = []

    def set(self, key, value):
        self.server.set_key("run", 1, key, value)

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys):
        self.wait(keys)
        found = self.server.wait_for_keys("run", 1, keys, 0.0)
        return [found[key] for key in keys]

    def wait(self, keys, timeout=None):
        self.waits.append((keys, timeout))
        timeout_s = self.timeout_s if timeout is None else timeout.total_seconds()
        if not self.server.wait_for_keys("run", 1, keys, timeout_s).keys() >= set(keys):
            raise RuntimeError("the other members did not come")

    def check(self, keys):
        return self.server.wait_for_keys("run", 1, keys, 0.0).keys() >= set(keys)

    def keys_present(self, keys, within):
        found = self.server.wait_for_keys("run", 1, list(keys), within.total_seconds())
        return [key for key in keys if key in found]


class Members:
    """The members of a group, each in its own thread."""

    def __init__(self, pool, num_workers, *, timeout_s=SOON_S):
        self.pool, self.store = pool, MemoryStore(timeout_s=timeout_s)
        self.groups = [
            TorchGroup(rank, num_workers, device="cpu", timeout_s=timeout_s)
            for rank in range(num_workers)
        ]

    def each(self, act, groups=None):
        """Return the result of each, or the text of its error."""

        def acted(group):
            try:
                return act(group)
            except RuntimeError as error:
                return str(error)

        return list(self.pool.map(acted, groups or self.groups))

    def connect(self, groups=None, hosts=None, **more):
        hosts = hosts or [HOST] * len(self.groups)
        return self.each(lambda g: g.connect(self.store, host=hosts[g._rank], **more), groups)


@pytest.fixture
def members(pool):
    made, before = [], set(threading.enumerate())

    def make(num_workers, **more):
        made.append(Members(pool, num_workers, **more))
        return made[-1]

    yield make
    for each in made:
        for group in each.groups:
            group.abort()
    pool.shutdown()
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)  # before the process ends


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), HOSTS)


def total(group):
    tensor = torch.tensor([1.0, 10.0]) * (group._rank + 1)
    group.start_allreduce(tensor).wait()
    return tensor.tolist()


@pytest.fixture
def devices(monkeypatch):
    """The devices on which gloo groups have listened: (host, whether they connect lazily)."""
    devices, create = [], dist.ProcessGroupGloo.create_device

    def noted(*, hostname, lazy_init):
        devices.append((hostname, lazy_init))
        return create(hostname=hostname, lazy_init=lazy_init)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", staticmethod(noted))
    return devices


# connecting


@pytest.mark.parametrize("has_pairs", [False, True])
def test_few_members_connect_each_with_every_other(members, devices, has_pairs):
    found = members(3)
    assert found.connect(has_pairs=has_pairs) == [None] * 3
    assert devices == [(HOST, False)] * 3
    assert found.each(total) == [[6.0, 60.0]] * 3
    assert [group._peers for group in found.groups] == [(1, 2), (0, 2), (0, 1)]


@pytest.mark.parametrize(("most", "is_ring"), [(3, True), (4, False)])
def test_beyond_a_number_of_members_each_connects_with_two(
    members, devices, monkeypatch, most, is_ring
):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", most)
    found = members(4)
    assert found.connect() == [None] * 4
    assert devices == [(HOST, is_ring)] * 4
    assert found.each(total) == [[10.0, 100.0]] * 4
    neighbours = [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
    everybody = [set(range(4)) - {rank} for rank in range(4)]
    expected = neighbours if is_ring else everybody
    assert [set(group._peers) for group in found.groups] == expected


def test_members_that_send_to_any_other_make_no_ring(members, devices, monkeypatch):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", 2)
    found = members(3)
    assert found.connect(has_pairs=True) == [None] * 3
    assert devices == [(HOST, False)] * 3
    links = [group.link() for group in found.groups]
    assert [(link.rank, link.num_workers) for link in links] == [(0, 3), (1, 3), (2, 3)]


def test_a_ring_of_two_has_one_neighbour(members, monkeypatch):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", 1)
    found = members(2)
    assert found.connect() == [None] * 2
    assert [group._peers for group in found.groups] == [(1,), (0,)]
    assert found.each(total) == [[3.0, 30.0]] * 2


def test_forming_a_ring_without_a_member_times_out_and_says_so(members, monkeypatch):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", 2)
    found = members(3, timeout_s=0.5)
    began = time.monotonic()
    assert found.connect(found.groups[:2]) == ["not all members joined within 0.5 s"] * 2
    assert 0.5 <= time.monotonic() - began < SOON_S
    assert [group._peers for group in found.groups[:2]] == [(), ()], "no peer to disconnect"


@pytest.mark.parametrize("most", [1, 32])
def test_leaving_a_group_while_it_forms_is_the_reported_cause(members, monkeypatch, most):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", most)
    found = members(2)
    found.groups[0].is_left = True
    assert found.connect(found.groups if most > 1 else found.groups[:1])[0] == (
        "the group was left while it formed"
    )
    assert found.groups[0].process_group is None
    assert found.groups[0].store is None


class FailingGroup:
    """A process group whose sums fail to start."""

    def allreduce(self, tensors, options):
        raise RuntimeError("reset by peer")


@pytest.mark.parametrize(
    ("torch_group", "message"),
    [(None, "the group was left while it formed"), (FailingGroup(), "reset by peer")],
)
def test_a_ring_whose_first_sum_fails_reports_the_cause(monkeypatch, torch_group, message):
    """Another thread may leave, or a member disconnect, at any moment."""
    monkeypatch.setattr(process_group, "_MESH_UP_TO", 1)
    monkeypatch.setattr(process_group, "make_gloo", lambda *a, **k: torch_group)
    group, store = TorchGroup(0, 2, device="cpu", timeout_s=SOON_S), MemoryStore()
    store.set("0/1", b"address")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        group.connect(store, host=HOST)


def test_members_prove_that_they_know_the_secret_before_anything_else(members):
    found = members(2)

    class Other(MemoryStore):
        def get(self, key):
            return b"?" * 32 if key == SECRET else found.store.get(key)

        def set(self, key, value):
            found.store.set(key, value)

        def wait(self, keys, timeout=None):
            found.store.wait(keys, timeout)

    stores = [found.store, Other()]
    errors = found.each(lambda group: group.connect(stores[group._rank], host=HOST))
    text = (
        "not proven to be members of this generation: rank {}: another process has taken its place"
    )
    assert errors == [text.format(1), text.format(0)]


def test_all_unproven_peers_are_named(members):
    found = members(3)
    made = found.each(
        lambda g: make_gloo(
            found.store, g._rank, 3, timeout=timedelta(seconds=SOON_S), host=HOST, lazy=False
        )
    )
    secrets = [b"a", b"b", b"a"]
    bound = timedelta(seconds=SOON_S)

    def reasons(group):
        peers = [peer for peer in range(3) if peer != group._rank]
        return unproven_peers(made[group._rank], secrets[group._rank], bound, peers)

    wrong = "another process has taken its place"
    assert found.each(reasons) == [{1: wrong}, {0: wrong, 2: wrong}, {1: wrong}]


class SilentGroup:
    """A group whose peers send nothing, or whose messages fail with an error."""

    def __init__(self, rank=0, error=None):
        self._rank, self.error, self.sent, self.tags, self.waits = rank, error, {}, set(), []

    def rank(self):
        return self._rank

    def recv(self, tensors, peer, tag):
        self.tags.add(tag)
        if self.error:
            raise RuntimeError(self.error)
        return self

    def send(self, tensors, peer, tag):
        self.tags.add(tag)
        self.sent[peer] = tensors[0].numpy().tobytes()
        return self

    def wait(self, within):
        self.waits.append(within.total_seconds())
        raise RuntimeError("nothing came\nin time")


def test_a_peer_that_sends_nothing_is_reported_with_one_line_of_the_reason():
    silent = SilentGroup(rank=2)
    assert unproven_peers(silent, b"s", timedelta(seconds=5), [0, 1]) == {
        0: "nothing came",
        1: "nothing came",
    }
    assert silent.sent == {peer: proof(b"s", source=2, target=peer) for peer in (0, 1)}
    assert len(silent.tags) == 1
    assert all(4.0 < seconds <= 5.0 for seconds in silent.waits)
    failed = SilentGroup(error="hung up\nat line 3")
    assert unproven_peers(failed, b"s", timedelta(seconds=5), [1]) == {1: "hung up"}
    late = SilentGroup()
    unproven_peers(late, b"s", timedelta(seconds=-5), [1])
    assert late.waits == [0.001], "a proof that has arrived counts, however late it is read"


# TLS


@pytest.mark.parametrize("spread", ["01", "10", "011", "00"])
def test_with_certificates_members_on_any_hosts_connect_over_the_loopback(
    members, files, devices, spread
):
    found = members(len(spread))
    hosts = [HOSTS[int(at)] for at in spread]
    assert found.connect(hosts=hosts, tls=files) == [None] * len(spread)
    assert devices == [(GLOO_HOST, False)] * len(spread)
    assert len(set(map(tuple, found.each(total)))) == 1
    assert found.each(total)[0][0] == sum(range(1, len(spread) + 1))


def test_with_certificates_no_ring_is_made(members, files, devices, monkeypatch):
    monkeypatch.setattr(process_group, "_MESH_UP_TO", 1)
    found = members(2)
    assert found.connect(hosts=HOSTS, tls=files) == [None] * 2
    assert [is_lazy for _, is_lazy in devices] == [False] * 2
    assert [group._peers for group in found.groups] == [(1,), (0,)]


def test_keys_are_unchanged_once_the_group_has_formed(members, files):
    found = members(2)
    found.connect(hosts=HOSTS, tls=files)
    stores = [group.store for group in found.groups]
    stores[0].set("node/0", b"here")
    assert stores[1].get("node/0") == b"here"
    assert stores[1].multi_get(["node/0"]) == [b"here"]
    assert stores[1].check(["node/0"])
    assert not stores[1].check(["node/0", "node/1"])
    assert stores[1].keys_present(["node/1", "node/0"], timedelta(0)) == ["node/0"]
    with pytest.raises(RuntimeError, match="did not come"):
        stores[1].wait(["never"], timedelta(milliseconds=1))


def test_a_tunnel_ends_when_its_member_leaves(members, files):
    found = members(2)
    found.connect(hosts=HOSTS, tls=files)
    work = found.groups[0].start_allreduce(torch.ones(10))
    began = time.monotonic()
    found.groups[1].abort()
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - began < SOON_S / 2


def test_a_certificate_of_another_authority_raises_the_error_of_tls(members, files, tmp_path):
    others = make_certificates(tmp_path, HOSTS)
    found = members(2, timeout_s=1.0)
    errors = found.each(
        lambda g: g.connect(found.store, host=HOSTS[g._rank], tls=[files, others][g._rank])
    )
    assert errors[1].startswith("no TLS connection: ")
    assert "certificate verify failed" in errors[1]


@pytest.mark.parametrize("comes", [False, True])
def test_a_member_that_waited_in_vain_for_others_behind_a_tunnel_tells_that_it_is_here(
    members, files, monkeypatch, comes
):
    def time_out(*arguments, **more):
        raise RuntimeError("timed out")

    monkeypatch.setattr(process_group, "make_gloo", time_out)
    found = members(2, timeout_s=20.0 if comes else 0.5)
    found.connect(found.groups if comes else found.groups[:1], hosts=HOSTS, tls=files)
    store = found.groups[0].store
    store.set("late/0/0", b"here")
    assert store.check(["late/0/0"])


class FakeTunnel:
    """A tunnel that records the ports to which it forwards."""

    def __init__(self):
        self.led = []

    def forward_to(self, port):
        self.led.append(port)


def test_an_address_of_gloo_in_an_unknown_format_is_refused_before_it_is_published():
    store = TunnelStore(MemoryStore(), FakeTunnel(), 0, {})
    with pytest.raises(RuntimeError, match="TLS cannot be used with it"):
        store.set("0/0", b"")
    assert not store.check(["0/0"])


# waiting and leaving


class FakeWork:
    """An operation that ends after some polls, with or without an error."""

    def __init__(self, num_polls=0, error=""):
        self.num_polls, self.error, self.within = num_polls, error, None

    def is_completed(self):
        self.num_polls -= 1
        return self.num_polls < 0

    def wait(self, within):
        self.within = within
        if self.error:
            raise RuntimeError(self.error)


def test_an_operation_is_done_when_it_succeeds_or_fails():
    moment = timedelta(seconds=0.01)
    assert is_done(FakeWork(), moment) is True
    assert is_done(FakeWork(error="reset"), moment) is True
    assert is_done(FakeWork(num_polls=1, error="goes on"), moment) is False


class FakeTime:
    """A clock that advances only in ``sleep``."""

    def __init__(self):
        self.now, self.pauses = 100.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(
    ("num_polls", "within_s", "is_so"),
    [(0, 0.0, True), (1, 0.0, False), (20, 1.0, True), (10**9, 0.5, False)],
)
def test_an_operation_on_a_device_is_polled_often_and_within_its_bound(
    monkeypatch, num_polls, within_s, is_so
):
    monkeypatch.setattr(process_group, "time", clock := FakeTime())
    work = FakeWork(num_polls=num_polls)
    assert is_done_on_device(work, timedelta(seconds=within_s)) is is_so
    assert len(clock.pauses) == (num_polls if is_so else num_polls - work.num_polls - 1)
    assert clock.pauses[:3] == [50e-6, 100e-6, 200e-6][: len(clock.pauses)]
    assert all(pause_s == 1e-3 for pause_s in clock.pauses[5:])
    if not is_so:
        assert within_s <= clock.now - 100.0 <= within_s + 1e-3


def test_cutting_a_group_fails_its_operations_in_progress_at_once_on_both_sides(members):
    found = members(2)
    found.connect()
    peers = found.groups[1].start_allreduce(torch.ones(10))
    under_way = found.groups[0].process_group.recv([torch.ones(1)], 1, 9)
    began = time.monotonic()
    found.groups[0].cut()
    for each in (under_way, peers):
        with pytest.raises(RuntimeError):
            each.wait()
    assert time.monotonic() - began < SOON_S / 2
    assert not found.groups[0].is_left


def test_leaving_twice_or_before_connecting_does_nothing(members):
    group = members(2).groups[0]
    group.cut()
    group.abort()
    group.abort()
    assert group.is_left
    assert group.process_group is None


def test_the_tensors_of_all_members_are_gathered_by_rank(members):
    found = members(3)
    found.connect()

    def gathered(group):
        out = [torch.zeros(1) for _ in range(3)]
        group.start_allgather(torch.tensor([float(group._rank)]), out).wait()
        return [each.item() for each in out]

    assert found.each(gathered) == [[0.0, 1.0, 2.0]] * 3


def test_a_groups_operations_are_bounded_by_its_time(members):
    found = members(2, timeout_s=0.5)
    found.connect()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        found.groups[0].start_allreduce(torch.ones(10)).wait()
    assert 0.4 < time.monotonic() - began < SOON_S


# on a device


class FakeNccl:
    """A fake process group of NCCL; its members connect once ``can_connect`` is set."""

    can_connect = threading.Event()

    class Options:
        pass

    def __init__(self, store, rank, num_workers, options):
        self.made = (store, rank, num_workers)
        self.options, self.aborted = options, 0
        self.summed = []

    def allreduce(self, tensors, options):
        assert self.can_connect.wait(SOON_S)
        self.summed.append(tensors[0].tolist())
        return types.SimpleNamespace(wait=lambda: None)

    def abort(self):
        self.aborted += 1


ALL = [f"nccl/{rank}" for rank in range(40)]
SETTINGS = {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_RUNTIME_CONNECT": "0"}


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "can_connect", threading.Event())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size) * device.index)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    FakeNccl.can_connect.set()
    yield TorchGroup(1, 40, device="cuda", timeout_s=2.5)
    FakeNccl.can_connect.set()
    for name in SETTINGS:
        os.environ.pop(name, None)


@pytest.fixture
def store():
    """A store in which the other members say that they are here."""
    store = MemoryStore()
    for key in ALL:
        if key != "nccl/1":
            store.set(key, b"here")
    return store


@pytest.mark.parametrize("tls", [None, "files"])
def test_a_group_on_a_device_uses_nccl_with_the_time_out_and_waits_that_raise(
    on_device, store, tls
):
    on_device.connect(store, host=HOST, tls=tls)
    made = on_device.process_group
    assert made.made == (store, 1, 40)
    assert made.options._timeout == timedelta(seconds=2.5)
    assert made.options.is_high_priority_stream is True
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    waits = [(ALL, timedelta(seconds=2.5))]
    assert store.waits == waits, "NCCL's connections are its own: no proofs"
    assert made.summed == [[3.0]], "connected, on the device that was current"


def test_nccl_connects_only_once_all_members_are_here(on_device, store):
    group = TorchGroup(1, 41, device="cuda", timeout_s=0.1)
    with pytest.raises(RuntimeError, match="the other members did not come"):
        group.connect(store, host=HOST)
    assert group.process_group is None
    store.set("nccl/40", b"here")
    group.connect(store, host=HOST)
    assert group.process_group.summed == [[3.0]]


@pytest.mark.parametrize(
    ("is_left", "problem"), [(True, "left while it formed"), (False, r"joined within 2\.5 s")]
)
def test_a_member_that_is_lost_while_nccl_connects_holds_up_the_others_for_a_bounded_time(
    on_device, store, is_left, problem
):
    FakeNccl.can_connect.clear()
    on_device.is_left, began = is_left, time.monotonic()
    with pytest.raises(RuntimeError, match=problem):
        on_device.connect(store, host=HOST)
    assert time.monotonic() - began < (2.0 if is_left else SOON_S)
    assert on_device.process_group is None


def test_a_group_that_connects_after_it_was_given_up_is_freed(on_device, store, monkeypatch):
    made = []
    monkeypatch.setattr(
        FakeNccl, "allreduce", lambda group, *_: made.append(weakref.ref(group)) or connected()
    )
    ended = threading.Event()

    def connected():
        assert FakeNccl.can_connect.wait(SOON_S)
        ended.set()
        return types.SimpleNamespace(wait=lambda: None)

    FakeNccl.can_connect.clear()
    on_device.is_left = True
    with pytest.raises(RuntimeError) as kept:
        on_device.connect(store, host=HOST)
    FakeNccl.can_connect.set()
    assert ended.wait(SOON_S)
    deadline = time.monotonic() + SOON_S
    while made[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made[0]() is None, "though the error is still there"
    assert "left" in str(kept.value)


def test_the_environment_can_set_how_nccl_waits(on_device, store, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    on_device.connect(store, host=HOST)
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


def test_a_group_on_a_device_is_aborted_if_cut_but_not_if_left(on_device, store):
    on_device.connect(store, host=HOST)
    made = on_device.process_group
    on_device.cut()
    assert made.aborted == 1
    on_device.abort()
    assert made.aborted == 1
    assert on_device.process_group is None
