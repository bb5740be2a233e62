"""Members of a user's group: wrong arguments and wrong members are refused before any wait."""

import math
import time

import pytest
import torch

import raydl
from raydl.collective.ray_collective import GroupAddress
from raydl.errors import ConfigError, ExchangeError, ExchangeTimeoutError
from raydl.ray_backend.user_group import _wait_for_all
from raydl.ray_backend.user_group_keys import GroupKeys

A, B = ("actor-a", 11), ("actor-b", 22)


def form(members=("a", "b"), member="a", *arguments, **more):
    raydl.init_collective_group(members, member, *arguments, **{"generation": 0, **more})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"members": ["a", "a"]}, r"members must be different strings, got \['a', 'a'\]"),
        ({"members": [0, 1], "member": 0}, r"members must be different strings, got \[0, 1\]"),
        ({"member": "c"}, r"member must be one of members \['a', 'b'\], got 'c'"),
        ({"members": [], "member": "a"}, r"member must be one of members \[\], got 'a'"),
        ({"group_name": ""}, "group_name must be a string that is not empty, got ''"),
        ({"generation": -1}, "generation must be a whole number from 0 on, got -1"),
        ({"generation": 1.0}, r"generation must be a whole number from 0 on, got 1\.0"),
        ({"timeout_s": 0.0}, r"timeout_s must be above 0 and finite, in seconds, got 0\.0"),
        ({"start_timeout_s": math.inf}, "start_timeout_s must be above 0 and finite.*got inf"),
        ({"device": "gpu"}, "device must be 'cpu' or 'cuda', got 'gpu'"),
    ],
)
def test_a_wrong_argument_is_reported_with_its_limit(arguments, problem):
    with pytest.raises(ConfigError, match=f"^{problem}"):
        form(**arguments)


def test_sums_on_a_device_are_refused_on_a_cluster_with_tls(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", name)
    with pytest.raises(ConfigError, match="device must be 'cpu' with RAY_USE_TLS=1"):
        form(device="cuda")


def test_a_device_that_torch_does_not_find_is_refused_before_any_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device must be 'cpu' here: torch finds no GPU"):
        form(device="cuda")


def test_a_process_that_is_not_an_actor_is_refused():
    with pytest.raises(
        ConfigError, match="must be called inside a Ray actor; this process is not one"
    ):
        form()


# the wait for the others


class Store:
    """A store whose waits fail, some at once and some at their time-out."""

    def __init__(self, problem, *, is_late, there=None):
        self.problem, self.is_late, self.there = problem, is_late, there

    def wait(self, keys, timeout):
        if self.is_late:
            time.sleep(timeout.total_seconds())
        raise RuntimeError(self.problem)

    def keys_present(self, keys, within):
        if self.there is None:
            raise RuntimeError("the center did not answer")
        return self.there


def failure_of(store):
    with pytest.raises(ExchangeError) as caught:
        _wait_for_all(store, GroupAddress("ring", 4, "cpu", 60.0), ("a", "b", "c"), 0.05)
    return caught.value


def test_missing_members_are_named_with_the_time_out_to_raise():
    error = failure_of(Store("not there", is_late=True, there=["process/1"]))
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ("a", "c")
    assert str(error) == (
        "forming group 'ring' (generation 4) failed: timed out after 0.05 s waiting for members "
        "a, c; raise start_timeout_s of raydl.init_collective_group if they were only slow"
    )


def test_without_the_keys_a_time_out_names_no_member():
    error = failure_of(Store("not there", is_late=True))
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ()


def test_a_wait_that_a_later_generation_ends_says_so_at_once():
    error = failure_of(Store("a later generation has begun", is_late=False))
    assert type(error) is ExchangeError
    assert error.problem == (
        "a later generation has begun; form the group again, under a later generation"
    )


# the keys of a group


class FakeClock:
    def __init__(self):
        self.now, self.ended = 0.0, set()

    def __call__(self):
        return self.now

    def has_ended(self, actor_id, pid):
        return (actor_id, pid) in self.ended


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def keys(clock):
    return GroupKeys(clock.has_ended, clock)


def test_each_member_learns_the_processes_of_all(keys):
    assert keys.enter("ring", 0, ("a", "b"), 1, B) is None
    assert keys.enter("ring", 0, ("a", "b"), 0, A) is None
    found = keys.wait_for_keys("ring", 0, ["process/0", "process/1"], 0.0)
    assert (found["process/0"], found["process/1"]) == (b"actor-a 11", b"actor-b 22")


def test_a_member_of_an_earlier_generation_is_refused(keys):
    keys.enter("ring", 3, ("a",), 0, A)
    refusal = keys.enter("ring", 2, ("a", "b"), 1, B)
    assert type(refusal) is ExchangeError
    assert str(refusal) == (
        "forming group 'ring' (generation 2) failed: generation 3 has begun; form the group again, "
        "under a later generation"
    )


def test_a_member_with_a_different_list_of_members_is_refused(keys):
    keys.enter("ring", 0, ("a", "b"), 0, A)
    refusal = keys.enter("ring", 0, ("b", "a"), 0, B)
    assert str(refusal) == (
        "members must be the same for all in generation 0 of group 'ring': the first member gave "
        "['a', 'b'], got ['b', 'a']"
    )


def test_a_member_can_enter_a_generation_only_once(keys):
    keys.enter("ring", 0, ("a", "b"), 0, A)
    refusal = keys.enter("ring", 0, ("a", "b"), 0, A)
    assert str(refusal) == (
        "generation must be above 0: member 'a' of group 'ring' has entered that one already"
    )
    assert keys.enter("ring", 1, ("a", "b"), 0, A) is None


def test_groups_with_other_names_have_their_own_generations_and_keys(keys):
    keys.enter("ring", 3, ("a",), 0, A)
    assert keys.enter("other", 0, ("a", "b"), 0, A) is None
    assert "process/0" in keys.wait_for_keys("other", 0, [], 0.0)
    assert "process/0" not in keys.wait_for_keys("third", 0, [], 0.0)


def test_keys_are_unused_since_the_last_member_of_the_newest_generation_was_seen(keys, clock):
    clock.now = 7.0
    assert keys.unused_s() == 7.0  # no member has entered
    keys.enter("ring", 0, ("a", "b"), 0, A)
    keys.enter("ring", 0, ("a", "b"), 1, B)
    assert keys.unused_s() == 0.0
    keys.enter("other", 0, ("a",), 0, A)
    clock.ended = {A}
    clock.now = 20.0
    assert keys.unused_s() == 0.0
    clock.ended = {A, B}
    clock.now = 50.0
    assert keys.unused_s() == 30.0
