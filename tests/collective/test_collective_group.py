"""The group of one generation, with two or three ranks in threads and a center without Ray."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from members import HOST, FakeCenter, FakeRay, Ranks
from ray.exceptions import RayActorError

from raydl.collective import ray_collective as collective
from raydl.collective.key_store import SECRET
from raydl.collective.process_group import TorchGroup
from raydl.collective.ray_collective import CenterStore, GroupAddress
from raydl.collective.sync_exchange import gather_bytes
from raydl.config.tls import TlsFiles
from raydl.errors import ExchangeError, ExchangeTimeoutError

SOON_S = 10.0


@pytest.fixture
def ranks(monkeypatch):
    made = []

    def make(num_workers, **more):
        made.append(Ranks(num_workers, monkeypatch, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


# the address


def test_an_address_names_run_and_generation():
    address = GroupAddress("run-1", 12, "cuda", 2.5)
    assert str(address) == "raydl:run-1/12"


# the store


@pytest.fixture
def center():
    return FakeCenter()


@pytest.fixture
def fake_ray(monkeypatch):
    monkeypatch.setattr(collective, "ray", FakeRay())
    return collective.ray


def store_of(center, *, timeout_s=20.0, num_workers=3):
    return CenterStore(center, GroupAddress("run", 7, "cpu", timeout_s), num_workers)


def test_a_member_reads_the_keys_that_another_writes(center, fake_ray):
    one, other = store_of(center), store_of(center)
    one.set("a", b"1")
    one.set("b", b"2")
    assert other.get("a") == b"1"
    assert other.multi_get(["b", "a"]) == [b"2", b"1"]
    assert len(other.get(SECRET)) == 32
    assert other.clone() is other


def test_a_member_does_not_fetch_its_own_keys(center, fake_ray):
    store = store_of(center)
    store.set("a", b"1")
    assert store.get("a") == b"1"
    assert store.check(["a"])
    assert store.keys_present(["a"], timedelta(0)) == ["a"]
    assert center.waits == []


def test_the_first_read_of_a_ranks_key_fetches_the_keys_of_all_ranks(center, fake_ray):
    store = store_of(center)
    for rank in range(3):
        center.server.set_key("run", 7, f"0/{rank}", bytes([rank]))
    assert [store.get(f"0/{rank}") for rank in (1, 0, 2)] == [b"\1", b"\0", b"\2"]
    assert [sorted(keys) for keys, _ in center.waits] == [["0/0", "0/1", "0/2"]]


@pytest.mark.parametrize("key", ["plain", "1", "a/b", "/", "a/-1"])
def test_a_key_of_another_form_is_fetched_by_itself(center, fake_ray, key):
    center.server.set_key("run", 7, key, b"1")
    assert store_of(center).get(key) == b"1"
    assert [keys for keys, _ in center.waits] == [[key]]


def test_no_thread_of_the_center_waits_long_and_a_busy_one_may_answer_late(center, fake_ray):
    threading.Timer(0.2, center.server.set_key, ("run", 7, "a", b"1")).start()
    assert store_of(center).get("a") == b"1"
    [(_, wait_s)] = center.waits
    assert wait_s == 2.0
    assert fake_ray.timeouts == [22.0]


def test_a_wait_for_keys_is_bounded_by_the_groups_time_or_its_own(center, fake_ray):
    for store, own in [(store_of(center, timeout_s=0.2), None), (store_of(center), 0.2)]:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"did not join within 0\.2 s"):
            store.wait(["never"], own and timedelta(seconds=own))
        assert 0.2 <= time.monotonic() - began < SOON_S
    assert all(0 < wait_s <= 0.2 for _, wait_s in center.waits)


def test_a_check_of_keys_does_not_wait(center, fake_ray):
    store = store_of(center)
    assert not store.check(["a"])
    store.set("a", b"1")
    assert not store.check(["a", "b"])
    assert store.keys_present(["b", "a"], timedelta(seconds=0.05)) == ["a"]
    assert [wait_s for _, wait_s in center.waits] == [0.0, 0.0, 0.05]
    assert fake_ray.timeouts == [2.0, 2.0, 2.05]
    center.server.set_key("run", 7, "b", b"2")
    assert store.check(["a", "b"])


def test_a_center_that_does_not_answer_raises_except_in_a_check(center, fake_ray):
    center.lost = RayActorError(error_msg="it died\nlong ago")
    store = store_of(center)
    with pytest.raises(RuntimeError, match=r"the center did not answer: .*it died$"):
        store.get("a")
    assert not store.check(
        ["a"]
    )  # an error in NCCL's thread, which calls it, would end the process


def test_a_store_makes_no_call_once_the_process_has_disconnected_from_ray(
    center, fake_ray, monkeypatch
):
    """Ray would start a cluster for the call."""
    monkeypatch.setattr(collective, "_POLL_S", 0.05)
    threading.Timer(0.2, setattr, (fake_ray, "is_connected", False)).start()
    store, began = store_of(center), time.monotonic()
    with pytest.raises(RuntimeError, match="this process has disconnected from Ray"):
        store.get("never")
    assert time.monotonic() - began < SOON_S
    num_waits = len(center.waits)
    with pytest.raises(RuntimeError, match="this process has disconnected from Ray"):
        store.set("a", b"1")
    assert not store.check(["a"])
    assert len(center.waits) == num_waits


def test_a_wait_for_keys_ends_when_the_generation_is_over(center, fake_ray):
    center.server.set_key("run", 8, "a", b"1")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a later generation has begun"):
        store_of(center).get("a")
    assert time.monotonic() - began < SOON_S


# sums and gathers


def summed(group):
    tensor = torch.full((5,), 1.0 + group._rank)
    group.start_allreduce(tensor, round=1).wait()
    return tensor.tolist()


def gathered(group):
    out = torch.zeros(group.num_workers, 2)
    group.start_allgather(torch.full((2,), float(group._rank)), out, round=1).wait()
    return out.tolist()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_member_ends_with_the_sum_and_with_all_gathered_tensors(ranks, num_workers):
    members = ranks(num_workers).form_all()
    total = sum(range(1, num_workers + 1))
    assert members.each(summed) == [[float(total)] * 5] * num_workers
    expected = [[float(rank)] * 2 for rank in range(num_workers)]
    assert members.each(gathered) == [expected] * num_workers
    assert members.each(lambda group: group.num_workers) == [num_workers] * num_workers
    assert members.each(lambda group: group.report()) == [None] * num_workers


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_our_own_all_reduce_gives_the_same_sum_and_reports_its_algorithm(ranks, algorithm):
    members = ranks(3).form_all(algorithm=algorithm)
    assert members.each(lambda group: group.report()) == [None] * 3
    for _ in range(20 if algorithm == "auto" else 1):  # which tries each algorithm first
        assert members.each(summed) == [[6.0] * 5] * 3
    for report in members.each(lambda group: group.report()):
        assert (report.generation, report.num_bytes) == (7, 20)
        assert report.algorithm == algorithm or "library" in report.tried


@pytest.mark.parametrize("algorithm", ["library", "ring"])
def test_each_member_ends_with_the_bytes_of_all_of_any_length(ranks, algorithm):
    members = ranks(3).form_all(algorithm=algorithm)

    def gathered(group):
        own = bytes([250] * 3 * group._rank)
        return gather_bytes(group, group._rank, own, round=1, device=torch.device("cpu"))

    assert members.each(gathered) == [[b"", b"\xfa" * 3, b"\xfa" * 6]] * 3


def test_each_member_knows_the_node_of_each_rank(ranks):
    members = ranks(2)
    local = threading.local()
    nodes = iter(["far", "near"])
    members.ray.runtime.get_node_id = lambda: vars(local).setdefault("node", next(nodes))
    members.form_all(algorithm="auto")
    known = members.each(lambda group: group.adaptive._reducer.nodes)
    assert set(known) in ({("far", "near")}, {("near", "far")})


@pytest.mark.parametrize("algorithm", ["library", "ring"])
@pytest.mark.parametrize("is_on", ["0", "1"])
def test_rays_certificates_are_used_and_pairs_are_connected_for_our_own_all_reduce(
    ranks, monkeypatch, algorithm, is_on
):
    options = []

    def connect(group, store, **how):
        options.append(how)
        raise RuntimeError("far enough")

    monkeypatch.setattr(TorchGroup, "connect", connect)
    monkeypatch.setenv("RAY_USE_TLS", is_on)
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", name)
    assert problem_of(ranks(2).form(0, algorithm=algorithm)).problem == "far enough"
    files = TlsFiles(cert="SERVER_CERT", key="SERVER_KEY", ca="CA_CERT")
    expected = {"tls": files if is_on == "1" else None, "has_pairs": algorithm == "ring"}
    assert options == [{"host": HOST, **expected}]


# losses


def problem_of(forming):
    with pytest.raises(ExchangeError) as caught:
        forming.result(timeout=60.0)
    return caught.value


def test_a_member_that_never_joins_is_named_with_round_and_generation(ranks):
    members = ranks(3, timeout_s=1.0)
    began = time.monotonic()
    for forming in [members.form(0), members.form(2)]:
        error = problem_of(forming)
        assert isinstance(error, ExchangeTimeoutError)
        assert (error.round, error.generation, error.timeout_s) == (0, 7, 1.0)
        assert error.missing == ("w1",)
    assert time.monotonic() - began < SOON_S
    assert not any(members.is_known(rank) for rank in range(3))


def test_a_member_that_is_missing_from_a_sum_is_named_with_its_round(ranks):
    members = ranks(3, timeout_s=1.5).form_all()

    def failed(group):
        with pytest.raises(ExchangeTimeoutError) as caught:
            group.start_allreduce(torch.ones(2), round=4).wait()
        return caught.value

    both = [members.begin(rank, failed, members.groups[rank]) for rank in (0, 1)]
    for each in both:
        error = each.result(timeout=60.0)
        assert (error.round, error.generation, error.timeout_s) == (4, 7, 1.5)
        assert error.missing == ("w2",)


def test_without_the_center_late_workers_are_unknown(ranks):
    members = ranks(2, timeout_s=0.5).form_all()
    members.center.lost = RayActorError(error_msg="it died")
    [group, _] = members.groups.values()
    error = group.explain(RuntimeError("timed out"), round=3, waited_s=0.5)
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ()


def test_a_member_that_has_left_does_not_look_up_late_workers(ranks):
    members = ranks(1).form_all()
    group = members.groups[0]
    members.begin(0, group.close).result(SOON_S)
    num_waits = len(members.center.waits)
    assert group.explain(RuntimeError("timed out"), round=3, waited_s=20.0).missing == ()
    assert len(members.center.waits) == num_waits


@pytest.mark.parametrize(("waited_s", "is_late"), [(0.0, False), (17.9, False), (18.0, True)])
def test_an_error_near_the_time_out_is_a_time_out_and_an_early_one_is_one_line(
    ranks, waited_s, is_late
):
    group = ranks(1).form_all().groups[0]
    error = group.explain(RuntimeError("reset by peer\nat line 3"), round=3, waited_s=waited_s)
    assert isinstance(error, ExchangeTimeoutError) is is_late
    assert (error.round, error.generation) == (3, 7)
    if not is_late:
        assert error.problem == "reset by peer"


def test_a_member_that_leaves_fails_the_sum_of_the_others_at_once(ranks):
    members = ranks(3, timeout_s=60.0).form_all()
    began = time.monotonic()
    waits = [members.begin(r, summed, members.groups[r]) for r in (0, 1)]
    members.begin(2, members.groups[2].close).result(SOON_S)
    for waiting in waits:
        error = problem_of(waiting)
        assert (error.round, error.generation) == (1, 7)
        assert not isinstance(error, ExchangeTimeoutError)
        members.begin(waits.index(waiting), members.groups[waits.index(waiting)].close)
    assert time.monotonic() - began < SOON_S


def test_an_operation_that_cannot_begin_fails_with_its_round(ranks):
    group = ranks(1).form_all().groups[0]
    with pytest.raises(ExchangeError) as caught:
        group.start_allgather(torch.ones(2), torch.zeros(1, 3), round=5)
    assert (caught.value.round, caught.value.generation) == (5, 7)
    assert not isinstance(caught.value, ExchangeTimeoutError)


# an abandoned group


@pytest.mark.parametrize("algorithm", ["library", "auto"])
def test_a_thread_that_forms_a_group_returns_at_once_when_it_is_abandoned(ranks, algorithm):
    members = ranks(2, timeout_s=60.0)
    forming = members.form(0, algorithm=algorithm)
    began = time.monotonic()
    threading.Timer(0.2, members.abandoned[0].set).start()
    error = problem_of(forming)
    assert time.monotonic() - began < SOON_S
    assert (error.round, error.generation) == (0, 7)
    assert error.problem == "abandoned because a worker was lost or left out"
    assert not members.is_known(0)


@pytest.mark.parametrize("algorithm", ["library", "ring"])
def test_a_thread_that_waits_for_a_sum_returns_at_once_when_it_is_abandoned(ranks, algorithm):
    members = ranks(2, timeout_s=60.0).form_all(algorithm=algorithm)
    waiting = members.begin(0, summed, members.groups[0])
    began = time.monotonic()
    threading.Timer(0.2, members.abandoned[0].set).start()
    error = problem_of(waiting)
    assert (error.round, error.generation) == (1, 7)
    assert error.problem == "abandoned because a worker was lost or left out"
    members.begin(0, members.groups[0].close).result(SOON_S)
    with pytest.raises(ExchangeError):
        members.begin(1, summed, members.groups[1]).result(SOON_S)
    assert time.monotonic() - began < SOON_S


def test_a_closed_group_is_left_and_its_name_is_free(ranks):
    members = ranks(2).form_all(algorithm="ring")
    members.each(lambda group: group.close())
    for group in members.groups.values():
        assert group.torch.is_left
        assert group.torch.process_group is None
        with pytest.raises(RuntimeError):
            group.adaptive.start(torch.ones(1))  # the thread of the group has ended
    assert not any(members.is_known(rank) for rank in range(2))


class RecordingGroup:
    """A group on a device that records whether it was cut."""

    def __init__(self):
        self.is_left, self.is_cut = False, threading.Event()

    def cut(self):
        self.is_cut.set()


def watched():
    group = collective.CollectiveGroup.__new__(collective.CollectiveGroup)
    group.torch, group._abandoned = RecordingGroup(), threading.Event()
    thread = threading.Thread(target=group._cut_if_abandoned, daemon=True)
    thread.start()
    return group, thread


def test_a_device_is_freed_once_its_group_is_abandoned():
    group, thread = watched()
    assert not group.torch.is_cut.wait(0.3)
    group._abandoned.set()
    assert group.torch.is_cut.wait(SOON_S)
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_group_on_a_device_is_not_watched_after_it_was_left():
    group, thread = watched()
    group.torch.is_left = True
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert not group.torch.is_cut.is_set()


@pytest.mark.parametrize(("device", "is_watched"), [("cuda", True), ("cpu", False)])
def test_only_on_a_device_does_a_thread_of_the_group_free_it(
    ranks, monkeypatch, device, is_watched
):
    """In host memory the waiting thread notices by itself."""
    cut = threading.Event()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(TorchGroup, "connect", lambda *a, **k: None)
    monkeypatch.setattr(TorchGroup, "cut", lambda group: cut.set())
    members = ranks(1)
    members.address = GroupAddress("run", 7, device, 20.0)
    members.form_all().abandoned[0].set()
    assert cut.wait(SOON_S if is_watched else 0.3) is is_watched
