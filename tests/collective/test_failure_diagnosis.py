"""The diagnosis of a failed operation of a user's group."""

import time

import pytest

from raydl.collective import failure_diagnosis
from raydl.collective.failure_diagnosis import FailureDiagnosis
from raydl.errors import ExchangeError, ExchangeTimeoutError

MEMBERS = ("a", "b", "c")


class FakeKeyStore:
    """The key store of a generation; with ``is_lost`` it does not answer."""

    def __init__(self):
        self.words, self.is_lost = {}, False

    def set(self, key, value):
        if not self.is_lost:
            self.words[key] = value

    def get(self, key):
        return self.words[key]

    def keys_present(self, keys, within):
        if self.is_lost:
            raise RuntimeError("the center did not answer")
        return [key for key in keys if key in self.words]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(failure_diagnosis, "_WAIT_S", 0.2)
    monkeypatch.setattr(failure_diagnosis, "_GRACE_S", 0.0)


@pytest.fixture
def keys():
    return FakeKeyStore()


def diagnosis_of(keys, rank, *, lost=()):
    return FailureDiagnosis(
        "ring",
        4,
        MEMBERS,
        rank,
        store=keys,
        timeout_s=9.0,
        has_ended=lambda rank: MEMBERS[rank] in lost,
    )


def explained(diagnosis, *, is_late=False, ranks=range(3)):
    return diagnosis.explain("reset by peer", operation=5, is_late=is_late, ranks=ranks)


def test_a_process_that_has_ended_is_named_whatever_the_statuses_are(keys):
    explained(diagnosis_of(keys, 1))
    error = explained(diagnosis_of(keys, 0, lost=["c"]))
    assert type(error) is ExchangeError
    assert (error.missing, error.round, error.generation, error.group) == (("c",), 5, 4, "ring")


def test_processes_that_end_together_are_named_together(keys):
    seen = []

    def has_ended(rank):
        seen.append(rank)
        return rank == 1 or (rank == 2 and seen.count(2) > 1)

    diagnosis = FailureDiagnosis(
        "ring", 4, MEMBERS, 0, store=keys, timeout_s=9.0, has_ended=has_ended
    )
    assert explained(diagnosis).missing == ("b", "c")


def test_a_member_that_timed_out_names_the_members_without_a_status(keys):
    explained(
        diagnosis_of(keys, 1, lost=["c"])
    )  # its operation failed when the first member gave up
    error = explained(diagnosis_of(keys, 0), is_late=True)
    assert isinstance(error, ExchangeTimeoutError)
    assert (error.missing, error.timeout_s) == (("c",), 9.0)


def test_a_member_that_fails_because_another_timed_out_names_the_same(keys):
    explained(diagnosis_of(keys, 1), is_late=True)
    error = explained(diagnosis_of(keys, 0))
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ("c",)


def test_a_message_between_two_members_needs_no_status_of_a_third(keys):
    assert explained(diagnosis_of(keys, 0), is_late=True, ranks=(0, 2)).missing == ("c",)


def test_a_member_that_left_is_named_as_such_and_is_not_missing(keys):
    diagnosis_of(keys, 2).leave()
    error = explained(diagnosis_of(keys, 0))
    assert type(error) is ExchangeError
    assert "members ['c'] left" in error.problem
    assert error.missing == ()


def test_a_member_that_leaves_after_a_failure_does_not_count_as_its_cause(keys):
    second = diagnosis_of(keys, 1)
    explained(second, is_late=True)
    second.leave()
    assert explained(diagnosis_of(keys, 0)).missing == ("c",)


def test_with_all_statuses_the_transports_message_is_reported_soon(keys, monkeypatch):
    monkeypatch.setattr(failure_diagnosis, "_WAIT_S", 100.0)
    for rank in (1, 2):
        keys.set(f"out/{rank}", b"failed")
    error = explained(diagnosis_of(keys, 0))
    assert error.problem == "reset by peer; form the group again, under a later generation"
    assert error.missing == ()


def test_without_the_key_store_the_members_that_ended_according_to_ray_are_named(keys):
    keys.is_lost = True
    assert explained(diagnosis_of(keys, 0, lost=["b"])).missing == ("b",)
    assert explained(diagnosis_of(keys, 0)).missing == ()
    assert isinstance(explained(diagnosis_of(keys, 0), is_late=True), ExchangeTimeoutError)


def test_the_wait_for_statuses_is_bounded(keys):
    began = time.monotonic()
    explained(diagnosis_of(keys, 0))
    assert 0.2 <= time.monotonic() - began < 5.0


def test_a_waiting_member_checks_one_other_member_a_second_in_turn(keys, monkeypatch):
    now, checked_ranks = [100.0], []
    monkeypatch.setattr(failure_diagnosis.time, "monotonic", lambda: now[0])

    def has_ended(rank):
        checked_ranks.append(rank)
        return len(checked_ranks) == 4

    diagnosis = FailureDiagnosis(
        "ring", 4, MEMBERS, 1, store=keys, timeout_s=9.0, has_ended=has_ended
    )
    for _ in range(6):
        diagnosis.watch()
        now[0] += 0.5
    assert checked_ranks == [2, 0, 1]
    with pytest.raises(RuntimeError, match="ended"):
        diagnosis.watch()
