"""Curves stand at the moments at which things happened, not at those at which the driver heard."""

import dataclasses

import pytest
from recorders import FakeStore as Store
from recorders import MemoryWriter as Memory
from recorders import make_recorder as make
from recorders import record_at, report_of
from snapshots import with_progress

from raydl.core.progress import Progress
from raydl.core.worker_group import Evaluated
from raydl.elastic.record_forwarder import RecordForwarder


class Heard:
    """A recorder that remembers."""

    def __init__(self):
        self.records = []

    def record(self, record, reports):
        self.records.append(record)


class Driver:
    """Curves, and a clock to set."""

    def __init__(self):
        self.now, self.heard = 0.0, Heard()
        self.curves = RecordForwarder(self.heard, lambda: self.now)

    def hear(self, now, sent_s, *records, sender="w0"):
        self.now = now
        self.curves.add_records(records, {}, sender=sender, sent_s=sent_s)

    @property
    def moments(self):
        return [(r.progress.num_samples, round(r.at_s, 3)) for r in self.heard.records]


def happened(at_s, num_samples):
    return dataclasses.replace(record_at(num_samples), at_s=at_s)


def test_records_of_one_message_keep_their_own_times():
    """The worker's clock is 1000 s ahead, a message takes 10 ms."""
    driver = Driver()
    driver.hear(1.01, 1001.0, happened(1000.2, 10), happened(1000.6, 20), happened(1001.0, 30))
    assert driver.moments == [(10, 0.21), (20, 0.61), (30, 1.01)]


def test_a_driver_that_was_halted_places_them_by_the_messages_before():
    driver = Driver()
    driver.hear(1.01, 1001.0)
    driver.hear(9.0, 1002.0, happened(1001.5, 10))  # answered at 2.0, heard of at 9.0
    driver.hear(9.1, 1009.0, happened(1005.0, 20), happened(1009.0, 30))
    assert driver.moments == [(10, 1.51), (20, 5.01), (30, 9.01)]


def test_moments_never_go_back_and_are_never_to_come():
    driver = Driver()
    driver.hear(5.0, 1001.0, happened(1001.0, 10))  # the first message was slow
    driver.hear(5.5, 1005.4, happened(1002.0, 20), happened(1006.0, 30))
    assert driver.moments == [(10, 5.0), (20, 5.0), (30, 5.5)]


def test_every_process_has_a_clock_of_its_own():
    driver = Driver()
    driver.hear(1.0, 1001.0, happened(1000.9, 10), sender="center a")
    driver.hear(2.0, 51.0, happened(50.9, 20), sender="center b")
    assert driver.moments == [(10, 0.9), (20, 1.9)]


def test_a_clock_that_drifts_is_followed():
    driver = Driver()
    for second in range(1, 200):
        driver.hear(second, 1000 + 0.9 * second)
    driver.hear(200.0, 1180.0, happened(1180.0, 10))
    assert driver.moments[0][1] > 195


# what is written


class Timed(Memory):
    """Remembers the moments, too."""

    def __init__(self):
        super().__init__()
        self.moments = {}

    def scalars(self, values, *, num_samples, unix_s=None):
        super().scalars(values, num_samples=num_samples)
        self.moments |= {(name, num_samples): unix_s for name in values}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    monkeypatch.setattr("raydl.run.recorder.time.time", lambda: 1e9 + now[0])
    return now


def test_speed_and_times_are_those_of_the_records(clock):
    recorder, _ = make(Store())
    recorder._writer = memory = Timed()
    recorder.event("generation 1: w0 starts")
    clock[0] = 104.0
    for at_s, num_samples in ((101.0, 100), (102.0, 200), (103.0, 300)):  # heard of at once
        recorder.record(happened(at_s, num_samples), {"w0": report_of("w0", local_step=1)})
    assert [values["throughput/samples_per_s"] for _, values in memory.points] == [100.0] * 3
    assert [memory.moments["train/loss", n] for n in (100, 200, 300)] == [
        1e9 + 101, 1e9 + 102, 1e9 + 103,
    ]  # fmt: skip
    assert recorder.seconds == pytest.approx(5.0 + 3.0)  # of an earlier start 5 s


def test_a_score_stands_where_its_center_was(clock):
    recorder, _ = make(Store())
    recorder._writer = memory = Timed()
    recorder.event("generation 1: w0 starts")
    for round, at_s in ((10, 101.0), (20, 105.0)):
        of_round = with_progress(happened(at_s, 10 * round), round=round, seconds=at_s - 100.0)
        recorder.record(of_round, {})
    clock[0] = 130.0  # the evaluator was slow
    recorder.evaluated(
        Evaluated(Progress(round=15, num_samples=150, seconds=2.5), {"accuracy": 0.9})
    )
    assert memory.moments["center/accuracy", 150] == 1e9 + 102.5
