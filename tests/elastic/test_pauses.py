"""The longest pause is the longest time in which no worker computed, whatever they waited for."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raydl.core.reports import WorkerReport
from raydl.elastic.pauses import TrainingPauses


class Reports:
    """Reports of workers that compute at given times, each quarter of a second."""

    EVERY_S = 0.25

    def __init__(self, training):
        self.training = training
        """By worker, the (begin, end) of its computations."""
        self.pauses = TrainingPauses()

    def report(self, worker_id, now):
        """Report as a worker does: a part counts once it has ended."""
        ended = [(a, b) for a, b in self.training[worker_id] if b <= now]
        is_computing = any(a <= now < b for a, b in self.training[worker_id])
        last = max((b for _, b in ended), default=0.0)
        self.pauses.note(
            WorkerReport(
                worker_id,
                round=1,
                records=(),
                kept=(),
                local_step=len(ended),
                time_parts={"forward_backward": sum(b - a for a, b in ended)},
                idle_s=0.0 if is_computing else now - last,
            ),
            now,
        )

    def until(self, end, *, but=()):
        """Report all workers until a time, but not (worker, begin, end) of ``but``."""
        for tick in range(round(end / self.EVERY_S) + 1):
            now = tick * self.EVERY_S
            for worker_id in self.training:
                if not any(w == worker_id and a < now < b for w, a, b in but):
                    self.report(worker_id, now)
        return self.pauses.longest_s


def steps(begin, end, step_s=0.1):
    """Return computations of 90 ms with waits of 10 ms between them."""
    count = round((end - begin) / step_s)
    return [(begin + n * step_s, begin + n * step_s + 0.9 * step_s) for n in range(count)]


def test_a_wait_inside_an_exchange_for_a_lost_worker_is_a_pause():
    survivor, lost = steps(1, 10) + steps(42, 50), steps(1, 10)
    waited_s = Reports({"w0": survivor, "w1": lost}).until(50)
    assert waited_s == pytest.approx(32.0, abs=Reports.EVERY_S)


def test_while_one_worker_computes_there_is_no_pause_however_long_the_others_wait():
    long_step = [(10.0, 40.0)]
    training = {"w0": steps(1, 10) + steps(40, 50), "w1": steps(1, 10) + long_step + steps(40, 50)}
    assert Reports(training).until(50) <= Reports.EVERY_S
    assert Reports(dict(reversed(training.items()))).until(50) <= Reports.EVERY_S


def test_a_run_that_trains_all_the_time_has_no_pause():
    assert Reports({"w0": steps(1, 30), "w1": steps(1.05, 30.05)}).until(29) == 0.0


def test_time_before_the_first_and_after_the_last_step_is_no_pause():
    assert Reports({"w0": steps(20, 25)}).until(60) == 0.0


def test_a_common_wait_for_data_is_a_pause():
    waits = steps(1, 5) + steps(12, 20)
    assert Reports({"w0": waits, "w1": waits}).until(20) == pytest.approx(7, abs=Reports.EVERY_S)


def test_a_replacement_that_trains_ends_the_pause():
    training = {"w0": steps(1, 10), "w1": steps(30, 40)}
    assert Reports(training).until(40) == pytest.approx(20, abs=Reports.EVERY_S)


def test_a_worker_that_was_silent_has_trained_no_longer_than_it_has_computed():
    """Its process was halted from 10 s to 30 s, and the other one waited."""
    training = {"w0": steps(1, 10) + steps(30, 40), "w1": steps(1, 10) + steps(30, 40)}
    longest = Reports(training).until(40, but=[("w1", 10.0, 30.5)])
    assert longest == pytest.approx(20, abs=1.0)


def test_a_driver_that_is_busy_for_long_sees_no_pause():
    training = steps(1, 40, 1.0)
    assert Reports({"w0": training}).until(40, but=[("w0", 10.0, 30.0)]) < 3.0


def test_the_longest_of_many_pauses_is_kept():
    blocks = [steps(1, 3), steps(13, 15), *(steps(15 + 2 * n, 16 + 2 * n) for n in range(60))]
    longest = Reports({"w0": [part for block in blocks for part in block]}).until(140)
    assert longest == pytest.approx(10, abs=Reports.EVERY_S)


@example(lengths=[(0.0, 0.0625), (1.0, 1.0), (0.0625, 0.0625)])
@example(lengths=[(0.0, 1.0), (2.3, 0.3), (0.3, 0.05)])
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 10)), min_size=1, max_size=12))
def test_a_pause_is_never_longer_than_the_time_between_two_computations(lengths):
    """Of one worker; its computations do not overlap."""
    now, training = 0.0, []
    for wait, length in lengths:
        training.append((now + wait, now + wait + length))
        now += wait + length
    waits = [b[0] - a[1] for a, b in itertools.pairwise(training)]
    longest = Reports({"w0": training}).until(now + 1)
    assert longest <= max(waits, default=0.0) + 1e-6
    assert longest >= max(waits, default=0.0) - 2 * Reports.EVERY_S - 1e-6
