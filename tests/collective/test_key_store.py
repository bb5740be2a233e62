"""The keys by which a generation meets, and the proof that its members are members."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from raydl.collective.key_store import SECRET, StoreServer, proof
from raydl.collective.process_group import TorchGroup, make_gloo

SOON_S = 5.0
HOST = "127.0.0.1"


@pytest.fixture
def server():
    return StoreServer()


def test_a_key_is_there_once_it_was_written(server):
    assert set(server.wait_for_keys("run", 1, [], 0.0)) == {SECRET}
    server.set_key("run", 1, "0/1", b"address")
    assert server.wait_for_keys("run", 1, ["0/1"], 0.0)["0/1"] == b"address"


def test_whoever_waits_for_keys_gets_all_of_them_as_the_last_one_comes(server, pool):
    waiting = pool.submit(server.wait_for_keys, "run", 1, ["a", "b"], SOON_S)
    server.set_key("run", 1, "a", b"1")
    server.set_key("run", 1, "c", b"3")
    assert not waiting.done()
    server.set_key("run", 1, "b", b"2")
    found = waiting.result(timeout=SOON_S)
    assert (found["a"], found["b"], found["c"]) == (b"1", b"2", b"3")


def test_a_wait_is_bounded_and_tells_what_has_come(server):
    server.set_key("run", 1, "a", b"1")
    began = time.monotonic()
    found = server.wait_for_keys("run", 1, ["a", "b"], 0.05)
    assert time.monotonic() - began < SOON_S
    assert found.keys() == {"a", SECRET}


def test_runs_and_generations_have_keys_of_their_own(server):
    server.set_key("run", 1, "a", b"1")
    server.set_key("run", 2, "a", b"2")
    server.set_key("other", 1, "a", b"3")
    places = [("run", 1), ("run", 2), ("other", 1)]
    found = [server.wait_for_keys(*place, ["a"], 0.0) for place in places]
    assert [keys["a"] for keys in found] == [b"1", b"2", b"3"]
    assert len({keys[SECRET] for keys in found}) == 3
    assert all(len(keys[SECRET]) == 32 for keys in found)


def test_the_keys_of_generations_that_are_over_are_forgotten(server, pool):
    waiting = pool.submit(server.wait_for_keys, "run", 1, ["never"], SOON_S)
    server.set_key("run", 2, "late", b"w1")
    server.set_key("run", 3, "a", b"1")
    assert waiting.result(timeout=SOON_S / 2) is None  # at once, not with the time-out
    server.set_key("run", 1, "a", b"1")
    assert server.wait_for_keys("run", 1, ["a"], 0.0) is None
    assert (
        server.wait_for_keys("run", 2, ["late"], 0.0)["late"] == b"w1"
    )  # who is late may be asked yet


def test_a_proof_holds_for_one_secret_and_one_direction():
    secret = bytes(32)
    others = [
        proof(b"x" * 32, source=0, target=1),
        proof(secret, source=1, target=0),
        proof(secret, source=0, target=11),
    ]
    assert proof(secret, source=0, target=1) not in others
    assert proof(secret, source=0, target=1) == proof(secret, source=0, target=1)


class KeysWith(dist.Store):
    """Keys that members and strangers share, but for the secret, as far as a stranger got."""

    def __init__(self, keys, secret):
        super().__init__()
        self.keys, self.secret = keys, secret

    def set(self, key, value):
        self.keys.set_key("run", 1, key, value)

    def get(self, key):
        return (
            self.secret if key == SECRET else self.keys.wait_for_keys("run", 1, [key], SOON_S)[key]
        )

    def wait(self, keys, timeout=None):
        self.keys.wait_for_keys("run", 1, keys, SOON_S)


def connected(group, store):
    """Connect; return what it raised."""
    try:
        group.connect(store, host=HOST)
    except RuntimeError as error:
        return str(error)
    return ""


def test_members_who_know_the_secret_meet(server, pool):
    groups = [TorchGroup(r, 3, device="cpu", timeout_s=SOON_S) for r in range(3)]
    stores = [KeysWith(server, b"s" * 32) for _ in groups]
    assert list(pool.map(connected, groups, stores)) == ["", "", ""]
    for group in groups:
        group.abort()


def test_a_stranger_who_took_a_ranks_place_is_refused_and_gets_nothing_but_proofs(server, pool):
    groups = [TorchGroup(r, 3, device="cpu", timeout_s=SOON_S) for r in range(3)]
    stores = [KeysWith(server, b"s" * 32), KeysWith(server, b"s" * 32), KeysWith(server, b"?" * 32)]
    for problem in list(pool.map(connected, groups, stores))[:2]:
        assert "not proven to be members" in problem
        assert "rank 2: another process has taken its place" in problem
        assert "rank 0" not in problem
        assert "rank 1" not in problem
    for group in groups:
        group.abort()


def test_a_stranger_who_says_nothing_is_refused_within_the_time_out(server, pool):
    group = TorchGroup(0, 2, device="cpu", timeout_s=1.0)
    began = time.monotonic()
    silent = pool.submit(
        make_gloo, KeysWith(server, b""), 1, 2, timeout=timedelta(seconds=SOON_S), host=HOST
    )
    assert "rank 1: " in connected(group, KeysWith(server, b"s" * 32))
    assert time.monotonic() - began < SOON_S
    silent.result(timeout=SOON_S)
    group.abort()
