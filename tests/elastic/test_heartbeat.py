"""Heartbeats find processes that do not answer in time, by a clock that the test sets."""

import pytest

from raydl.elastic.heartbeat import Heartbeats


class HeartbeatHarness:
    """Heartbeats with a lease of 10 s, checked every half second by a clock that the test sets."""

    def __init__(self):
        self.now = 0.0
        self.heartbeats = Heartbeats(10.0, clock=lambda: self.now)

    def check(self, until):
        """Check until a time; return when each expired process was first found."""
        found = {}
        while self.now < until:
            self.now += 0.5
            for process in self.heartbeats.expired():
                found.setdefault(process, self.now)
        return found


def test_a_process_that_does_not_answer_in_time_is_found():
    harness = HeartbeatHarness()
    harness.heartbeats.expect_answer("w0")
    assert harness.check(until=10.0) == {}
    assert harness.heartbeats.owed_s("w0") == 10.0
    assert harness.check(until=12.0) == {"w0": 10.5}
    assert harness.heartbeats.expired() == ["w0"], (
        "it stays expired until it answers or is given up"
    )
    harness.heartbeats.answer("w0")
    assert harness.heartbeats.expired() == []


def test_a_process_that_was_not_polled_owes_no_answer():
    harness = HeartbeatHarness()
    assert harness.check(until=60.0) == {}
    assert harness.heartbeats.owed_s("w0") == 0.0
    harness.heartbeats.answer("w0")  # a late answer


def test_an_answer_renews_the_lease():
    harness = HeartbeatHarness()
    for until in (8.0, 16.0, 24.0):
        harness.heartbeats.expect_answer("w0")
        assert harness.check(until) == {}
        harness.heartbeats.answer("w0")
        assert harness.heartbeats.owed_s("w0") == 0.0
    harness.heartbeats.expect_answer("w0")
    assert harness.check(until=40.0) == {"w0": 34.5}


def test_polling_again_does_not_renew_the_lease():
    harness = HeartbeatHarness()
    harness.heartbeats.expect_answer("w0")
    harness.check(until=6.0)
    harness.heartbeats.expect_answer("w0")
    assert harness.heartbeats.owed_s("w0") == 6.0
    assert harness.check(until=12.0) == {"w0": 10.5}


def test_each_process_has_its_own_lease():
    harness = HeartbeatHarness()
    harness.heartbeats.expect_answer("w0")
    harness.check(until=3.0)
    harness.heartbeats.expect_answer("w1")
    harness.heartbeats.expect_answer("w2")
    harness.check(until=5.0)
    harness.heartbeats.answer("w2")
    assert harness.check(until=20.0) == {"w0": 10.5, "w1": 13.5}


@pytest.mark.parametrize("away_s", [1.5, 60.0, 86400.0])
def test_leases_do_not_run_while_the_polling_process_is_suspended(away_s):
    harness = HeartbeatHarness()
    harness.heartbeats.expect_answer("w0")
    harness.check(until=4.0)
    harness.now += away_s
    assert harness.heartbeats.expired() == []
    assert harness.heartbeats.owed_s("w0") == pytest.approx(4.0)
    assert harness.check(until=away_s + 10.0) == {}
    assert harness.check(until=away_s + 12.0) == {"w0": away_s + 10.5}


def test_a_poll_after_a_long_suspension_starts_its_lease_at_that_time():
    """The time of the suspension before the poll does not count."""
    harness = HeartbeatHarness()
    harness.now = 60.0
    harness.heartbeats.expect_answer("w0")
    harness.now = 60.25
    assert harness.heartbeats.expired() == []
    assert harness.heartbeats.owed_s("w0") == pytest.approx(0.0, abs=0.25)
    assert harness.check(until=80.0) == {"w0": 70.75}


def test_the_usual_time_between_two_checks_counts():
    harness = HeartbeatHarness()
    harness.heartbeats.expect_answer("w0")
    for _ in range(10):
        harness.now += 1.0
        assert harness.heartbeats.expired() == []
    harness.now += 1.0
    assert harness.heartbeats.expired() == ["w0"]
