"""Who has not answered for too long, by a clock that the test turns."""

import pytest

from raydl.elastic.heartbeat import Heartbeats


class Watch:
    """One who asks with a lease of 10 s, and looks every half second unless it is away."""

    def __init__(self):
        self.now = 0.0
        self.heartbeats = Heartbeats(10.0, clock=lambda: self.now)

    def look_on(self, until):
        """Look until then; return who was ever found, with the moment."""
        found = {}
        while self.now < until:
            self.now += 0.5
            for who in self.heartbeats.expired():
                found.setdefault(who, self.now)
        return found


def test_a_process_that_does_not_answer_in_time_is_found():
    watch = Watch()
    watch.heartbeats.expect_answer("w0")
    assert watch.look_on(until=10.0) == {}
    assert watch.heartbeats.owed_s("w0") == 10.0
    assert watch.look_on(until=12.0) == {"w0": 10.5}
    assert watch.heartbeats.expired() == ["w0"], "until it answers, or is given up"
    watch.heartbeats.answer("w0")
    assert watch.heartbeats.expired() == []


def test_a_process_that_was_not_polled_owes_no_answer():
    watch = Watch()
    assert watch.look_on(until=60.0) == {}
    assert watch.heartbeats.owed_s("w0") == 0.0
    watch.heartbeats.answer("w0")  # it may come late


def test_an_answer_renews_the_lease():
    watch = Watch()
    for until in (8.0, 16.0, 24.0):
        watch.heartbeats.expect_answer("w0")
        assert watch.look_on(until) == {}
        watch.heartbeats.answer("w0")
        assert watch.heartbeats.owed_s("w0") == 0.0
    watch.heartbeats.expect_answer("w0")
    assert watch.look_on(until=40.0) == {"w0": 34.5}


def test_asking_again_does_not():
    watch = Watch()
    watch.heartbeats.expect_answer("w0")
    watch.look_on(until=6.0)
    watch.heartbeats.expect_answer("w0")
    assert watch.heartbeats.owed_s("w0") == 6.0
    assert watch.look_on(until=12.0) == {"w0": 10.5}


def test_each_has_a_lease_of_its_own():
    watch = Watch()
    watch.heartbeats.expect_answer("w0")
    watch.look_on(until=3.0)
    watch.heartbeats.expect_answer("w1")
    watch.heartbeats.expect_answer("w2")
    watch.look_on(until=5.0)
    watch.heartbeats.answer("w2")
    assert watch.look_on(until=20.0) == {"w0": 10.5, "w1": 13.5}


@pytest.mark.parametrize("away_s", [1.5, 60.0, 86400.0])
def test_while_the_polling_process_is_suspended_no_lease_runs(away_s):
    watch = Watch()
    watch.heartbeats.expect_answer("w0")
    watch.look_on(until=4.0)
    watch.now += away_s
    assert watch.heartbeats.expired() == []
    assert watch.heartbeats.owed_s("w0") == pytest.approx(4.0)
    assert watch.look_on(until=away_s + 10.0) == {}
    assert watch.look_on(until=away_s + 12.0) == {"w0": away_s + 10.5}


def test_a_poll_at_the_end_of_a_long_suspension_starts_a_lease_then():
    """It is asked, and then looked for: the absence before is not its time."""
    watch = Watch()
    watch.now = 60.0
    watch.heartbeats.expect_answer("w0")
    watch.now = 60.25
    assert watch.heartbeats.expired() == []
    assert watch.heartbeats.owed_s("w0") == pytest.approx(0.0, abs=0.25)
    assert watch.look_on(until=80.0) == {"w0": 70.75}


def test_usual_time_between_two_looks_counts():
    watch = Watch()
    watch.heartbeats.expect_answer("w0")
    for _ in range(10):
        watch.now += 1.0
        assert watch.heartbeats.expired() == []
    watch.now += 1.0
    assert watch.heartbeats.expired() == ["w0"]
