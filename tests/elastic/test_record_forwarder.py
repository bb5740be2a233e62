"""Points of curves have the time of their event, not of its arrival at the harness."""

import dataclasses

import pytest
from recorders import FakeStore as Store
from recorders import MemoryWriter as Memory
from recorders import make_recorder as make
from recorders import record_at, report_of
from snapshots import with_progress

from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.scores import Evaluated
from raydl.elastic.record_forwarder import RecordForwarder


class RecordList:
    """A recorder that keeps its records in a list."""

    def __init__(self):
        self.records = []

    def record(self, record, reports):
        self.records.append(record)


class ForwarderHarness:
    """A record forwarder with a clock that the test sets."""

    def __init__(self):
        self.now, self.recorder = 0.0, RecordList()
        self.curves = RecordForwarder(self.recorder, lambda: self.now)

    def receive(self, now, sent_s, *records, sender="w0"):
        self.now = now
        self.curves.add_records(records, {}, sender=sender, sent_s=sent_s)

    @property
    def times(self):
        return [(r.progress.num_samples, round(r.at_s, 3)) for r in self.recorder.records]


def record_with_time(at_s, num_samples):
    return dataclasses.replace(record_at(num_samples), at_s=at_s)


def test_records_of_one_message_keep_their_own_times():
    """The worker's clock is 1000 s ahead, a message takes 10 ms."""
    harness = ForwarderHarness()
    harness.receive(
        1.01,
        1001.0,
        record_with_time(1000.2, 10),
        record_with_time(1000.6, 20),
        record_with_time(1001.0, 30),
    )
    assert harness.times == [(10, 0.21), (20, 0.61), (30, 1.01)]


def test_a_driver_that_was_suspended_places_records_by_earlier_messages():
    harness = ForwarderHarness()
    harness.receive(1.01, 1001.0)
    harness.receive(9.0, 1002.0, record_with_time(1001.5, 10))  # sent at 2.0, received at 9.0
    harness.receive(9.1, 1009.0, record_with_time(1005.0, 20), record_with_time(1009.0, 30))
    assert harness.times == [(10, 1.51), (20, 5.01), (30, 9.01)]


def test_times_never_go_back_and_never_lie_in_the_future():
    harness = ForwarderHarness()
    harness.receive(5.0, 1001.0, record_with_time(1001.0, 10))  # the first message was slow
    harness.receive(5.5, 1005.4, record_with_time(1002.0, 20), record_with_time(1006.0, 30))
    assert harness.times == [(10, 5.0), (20, 5.0), (30, 5.5)]


def test_each_process_has_its_own_clock():
    harness = ForwarderHarness()
    harness.receive(1.0, 1001.0, record_with_time(1000.9, 10), sender="center a")
    harness.receive(2.0, 51.0, record_with_time(50.9, 20), sender="center b")
    assert harness.times == [(10, 0.9), (20, 1.9)]


def test_a_clock_that_drifts_is_followed():
    harness = ForwarderHarness()
    for second in range(1, 200):
        harness.receive(second, 1000 + 0.9 * second)
    harness.receive(200.0, 1180.0, record_with_time(1180.0, 10))
    assert harness.times[0][1] > 195


# points that the recorder writes


class TimedMemory(Memory):
    """A writer that also keeps the times of its points."""

    def __init__(self):
        super().__init__()
        self.times = {}

    def scalars(self, values, *, num_samples, unix_s=None):
        super().scalars(values, num_samples=num_samples)
        self.times |= {(name, num_samples): unix_s for name in values}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    monkeypatch.setattr("raydl.run.recorder.time.time", lambda: 1e9 + now[0])
    return now


def test_speed_and_times_of_points_come_from_the_records(clock):
    recorder, _ = make(Store())
    recorder._writer = memory = TimedMemory()
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    clock[0] = 104.0
    for at_s, num_samples in ((101.0, 100), (102.0, 200), (103.0, 300)):  # received at once
        recorder.record(record_with_time(at_s, num_samples), {"w0": report_of("w0", local_step=1)})
    assert [values["throughput/samples_per_s"] for _, values in memory.points] == [100.0] * 3
    assert [memory.times["train/loss", n] for n in (100, 200, 300)] == [
        1e9 + 101, 1e9 + 102, 1e9 + 103,
    ]  # fmt: skip
    assert recorder.seconds == pytest.approx(5.0 + 3.0)  # 5 s are from an earlier start


def test_a_score_has_the_time_of_its_center(clock):
    recorder, _ = make(Store())
    recorder._writer = memory = TimedMemory()
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    for round, at_s in ((10, 101.0), (20, 105.0)):
        of_round = with_progress(
            record_with_time(at_s, 10 * round), round=round, seconds=at_s - 100.0
        )
        recorder.record(of_round, {})
    clock[0] = 130.0  # the evaluator was slow
    recorder.evaluated(
        Evaluated(Progress(round=15, num_samples=150, seconds=2.5), {"accuracy": 0.9})
    )
    assert memory.times["center/accuracy", 150] == 1e9 + 102.5
