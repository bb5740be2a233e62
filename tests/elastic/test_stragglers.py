"""Workers wait for a straggler for a grace period, then continue without it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydl.elastic.stragglers import StragglerDetector, late_workers

FIRST_PAUSE_S = 0.5


def stragglers_of(*rounds, pauses=()):
    stragglers = StragglerDetector()
    for number, seconds in enumerate(rounds):
        stragglers.note_round(number, seconds)
    for seconds in pauses:
        stragglers.pause(100.0, number)
        stragglers.resume(100.0 + seconds, number + 1)
    return stragglers


def test_a_round_that_several_workers_report_counts_once():
    stragglers = stragglers_of(1.0, 1.0, 1.0, 1.0)
    for _ in range(3):
        stragglers.note_round(3, 9.0)
    assert stragglers.grace_s() == math.inf
    stragglers.note_round(4, 1.0)
    assert stragglers.grace_s() == 1.0 + 2 * FIRST_PAUSE_S


def test_a_pause_lasts_from_the_first_worker_that_stops_to_the_first_that_resumes():
    stragglers = stragglers_of(*[1.0] * 5)
    for now in (5.0, 5.4):
        stragglers.pause(now, 3)
    for now in (6.0, 6.5):
        stragglers.resume(now, 4)
    assert stragglers.grace_s() == 1.0 + 2 * 1.0


def test_a_report_of_the_paused_generation_ends_no_pause():
    stragglers = stragglers_of(*[1.0] * 5)
    stragglers.pause(5.0, 3)
    stragglers.resume(5.2, 3)
    stragglers.resume(8.0, 4)
    assert stragglers.grace_s() == 1.0 + 2 * 3.0


def test_a_generation_that_breaks_before_its_first_report_ends_no_pause():
    stragglers = stragglers_of(*[1.0] * 5)
    stragglers.pause(5.0, 3)
    stragglers.pause(6.0, 4)
    stragglers.resume(6.1, 4)
    assert stragglers.grace_s() == 1.0 + 2 * FIRST_PAUSE_S
    stragglers.resume(66.0, 5)
    assert stragglers.grace_s() == 1.0 + 2 * 61.0


def test_a_wait_for_workers_does_not_measure_a_regrouping():
    stragglers = stragglers_of(1.0, 1.0, 1.0, 1.0, 1.0)
    before = stragglers.grace_s()
    stragglers.pause(5.0, 1)
    stragglers.wait_for_workers()
    stragglers.resume(305.0, 2)
    assert stragglers.grace_s() == before


def test_while_rounds_are_few_no_worker_is_left_out():
    assert stragglers_of().grace_s() == math.inf
    assert stragglers_of(1.0, 1.0, 1.0, 1.0, pauses=[2.0]).grace_s() == math.inf
    assert stragglers_of(1.0, 1.0, 1.0, 1.0, 1.0).grace_s() == 1.0 + 2 * FIRST_PAUSE_S


def test_the_grace_is_the_median_and_six_spreads_and_two_pauses():
    """Rounds of 1 to 5 s: the median is 3, the median distance from it is 1."""
    before = stragglers_of(1, 2, 3, 4, 5).grace_s()
    assert before == pytest.approx(3 + 6 * 1.4826 + 2 * FIRST_PAUSE_S)
    assert stragglers_of(5, 3, 1, 2, 4, pauses=[7]).grace_s() == pytest.approx(3 + 6 * 1.4826 + 14)


def test_one_outlier_does_not_move_the_grace():
    rounds = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    usual = stragglers_of(*rounds).grace_s()
    assert stragglers_of(*rounds, 1000.0).grace_s() == pytest.approx(usual, abs=0.31)
    assert usual < 2 + 2 * FIRST_PAUSE_S


def test_one_long_pause_among_others_does_not_move_the_grace():
    assert stragglers_of(*[1.0] * 5, pauses=[2, 500, 2]).grace_s() == 5.0


def test_only_the_newest_rounds_and_pauses_count():
    stragglers = stragglers_of(*[50.0] * 101, *[1.0] * 101, pauses=[30.0] * 5 + [2.0] * 5)
    assert stragglers.grace_s() == 5.0


@given(
    st.lists(st.floats(0.01, 10), min_size=11, max_size=40),
    st.floats(0, 1e6),
    st.lists(st.floats(0, 10), max_size=5),
)
def test_one_long_round_does_not_move_the_grace_beyond_the_usual_rounds(rounds, outlier, pauses):
    """The median lies among the usual rounds; the spread is at most their range."""
    grace_s = stragglers_of(*rounds, outlier, pauses=pauses).grace_s()
    pause_s = max(pauses, default=FIRST_PAUSE_S)
    most = max(rounds) + 6 * 1.4826 * (max(rounds) - min(rounds)) + 2 * pause_s
    assert min(rounds) <= grace_s <= most + 1e-6


@pytest.mark.parametrize(
    ("waits", "grace_s", "quorum", "late"),
    [
        # no worker, or each worker, waits
        ((), 5.0, 0.5, ()),
        ((0.0, 0.0, 0.0), 5.0, 0.5, ()),
        ((0.0, 0.0, 0.0), 0.0, 0.5, ()),
        ((9.0, 9.0, 9.0), 5.0, 0.5, ()),  # about to continue: no worker is late
        # one of three is at work
        ((4.9, 4.9, 0.0), 5.0, 0.5, ()),
        ((5.0, 5.0, 0.0), 5.0, 0.5, ()),  # no longer than the grace
        ((5.1, 5.1, 0.0), 5.0, 0.5, ("w2",)),
        ((0.0, 5.1, 5.1), 5.0, 0.5, ("w0",)),  # any rank may be late
        ((5.1, 5.1, 0.0), math.inf, 0.5, ()),
        # two of the three are needed; one has waited long, another has just arrived
        ((9.0, 0.1, 0.0), 5.0, 0.5, ()),
        ((9.0, 5.1, 0.0), 5.0, 0.5, ("w2",)),
        ((9.0, 0.0, 0.0), 5.0, 0.5, ()),
        ((9.0, 0.0, 0.0), 5.0, 0.3, ("w1", "w2")),
        # a worker that waits, however briefly, is not late
        ((9.0, 9.0, 0.1, 0.0), 5.0, 0.5, ("w3",)),
        # all workers are needed
        ((9.0, 9.0, 0.0), 5.0, 1.0, ()),
        ((9.0, 9.0, 9.0), 5.0, 1.0, ()),
        # two workers: one is half of them
        ((9.0, 0.0), 5.0, 0.5, ("w1",)),
        ((0.0, 9.0), 5.0, 0.5, ("w0",)),
        ((9.0, 0.0), 5.0, 0.51, ()),
        # a single worker
        ((0.0,), 5.0, 0.5, ()),
        ((9.0,), 5.0, 0.5, ()),
    ],
)
def test_late_workers_are_those_that_do_not_wait(waits, grace_s, quorum, late):
    waiting_s = {f"w{i}": seconds for i, seconds in enumerate(waits)}
    assert late_workers(waiting_s, grace_s=grace_s, quorum=quorum) == late


def test_a_quorum_that_floating_point_rounds_up_needs_no_further_worker():
    """7/25 of 25 workers is 7.000000000000001, and 0.55 of 100 workers is a little over 55."""
    for share, needed, count in ((7 / 25, 7, 25), (0.55, 55, 100)):
        waiting_s = {f"w{i}": 9.0 if i < needed else 0.0 for i in range(count)}
        late = late_workers(waiting_s, grace_s=1.0, quorum=share)
        assert len(late) == count - needed
        waiting_s["w0"] = 0.0
        assert late_workers(waiting_s, grace_s=1.0, quorum=share) == ()


@given(
    waits=st.lists(st.sampled_from([0.0, 0.5, 5.0]), max_size=8),
    numerator=st.integers(1, 8),
    grace_s=st.sampled_from([0.0, 1.0, 10.0, math.inf]),
)
def test_a_quorum_stays_and_only_workers_that_do_not_wait_are_left_out(waits, numerator, grace_s):
    waiting_s = {f"w{i}": seconds for i, seconds in enumerate(waits)}
    late = late_workers(waiting_s, grace_s=grace_s, quorum=numerator / 8)
    assert all(waiting_s[w] == 0.0 for w in late)
    if late:
        assert (len(waits) - len(late)) * 8 >= numerator * len(waits)
        assert sum(seconds > grace_s for seconds in waits) * 8 >= numerator * len(waits)
        assert len(late) == sum(seconds == 0.0 for seconds in waits), (
            "all late workers are left out at once"
        )
