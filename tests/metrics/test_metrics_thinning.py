"""A young run writes every record; an old one writes fewer points, each for several records."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydl.metrics import TensorBoardWriter, Thinned
from raydl.metrics.thinning import Gathered, is_due
from raydl.tools.report.events import read_history

HOUR_S, DAY_S, WEEK_S = 3600.0, 86_400.0, 604_800.0


class PointsWriter:
    """A writer that records its points and its other calls."""

    def __init__(self):
        self.points, self.others = [], []

    def scalars(self, values, *, num_samples, unix_s=None):
        self.points.append((num_samples, dict(values)))

    def text(self, name, markdown, *, num_samples, unix_s=None):
        self.others.append((name, num_samples))

    def image(self, name, pixels, *, num_samples):
        self.others.append((name, num_samples))

    def go_back(self, *, num_samples):
        self.others.append(("go back", num_samples))

    def flush(self):
        self.others.append(("flush", None))

    def close(self):
        self.others.append(("close", None))


def make_thinned(*, seconds_before=0.0):
    """Return (the thinning writer, the writer behind it, the clock's time in a list)."""
    points, now = PointsWriter(), [50.0]
    writer = Thinned(points, seconds_before=seconds_before, clock=lambda: now[0])
    return writer, points, now


def test_a_run_of_a_week_writes_fewer_than_forty_thousand_points():
    writer, points, now = make_thinned()
    num_samples = 0
    while now[0] < WEEK_S:
        gap_s = max(0.2, (now[0] - 50) / 20_000)  # at least four records for each point
        now[0] += gap_s
        num_samples += 1
        writer.scalars({"train/loss": 1.0}, num_samples=num_samples)
    assert num_samples > 100_000
    assert 30_000 < len(points.points) < 40_000


def test_a_young_run_writes_every_record():
    writer, points, now = make_thinned()
    for num_samples in range(3000):
        now[0] += 0.9 if num_samples % 3 == 0 else 0.0
        writer.scalars({"train/loss": float(num_samples)}, num_samples=num_samples)
    assert points.points == [(n, {"train/loss": float(n)}) for n in range(3000)]


@pytest.mark.parametrize(("age_s", "gap_s"), [(DAY_S, 17.28), (10 * HOUR_S, 7.2), (5000.0, 1.0)])
def test_the_gap_is_a_share_of_the_age(age_s, gap_s):
    assert is_due(100.0 + gap_s + 1e-9, 100.0, age_s=age_s)
    assert not is_due(100.0 + gap_s - 0.01, 100.0, age_s=age_s)


def test_a_point_stands_for_the_records_before_it():
    gathered = Gathered()
    gathered.add({"train/loss": 3.0, "exchange/count": 7, "worker_step_s/w0": 0.1, "train/lr": 0.2})
    gathered.add({"train/loss": 1.0, "exchange/count": 8, "worker_step_s/w1": 0.5, "train/lr": 0.1})
    gathered.add({"exchange/count": 9, "worker_step_s/w0": 0.3})  # without a loss
    assert gathered.pop_point() == {
        "train/loss": 2.0,
        "exchange/count": 9,
        "worker_step_s/w0": pytest.approx(0.2),
        "worker_step_s/w1": 0.5,
        "train/lr": 0.1,
    }
    assert not gathered


def test_the_last_record_of_an_old_run_is_written_and_nothing_between_is_lost():
    writer, points, now = make_thinned(seconds_before=DAY_S)
    for number in range(1, 101):
        now[0] += 1.0
        writer.scalars({"train/loss": float(number), "exchange/count": number}, num_samples=number)
    writer.close()
    samples = [num_samples for num_samples, _ in points.points]
    assert samples == [19, 37, 55, 73, 91, 100]
    sizes = [b - a for a, b in zip([0, *samples], samples, strict=False)]
    losses = [values["train/loss"] for _, values in points.points]
    total = sum(size * loss for size, loss in zip(sizes, losses, strict=True))
    assert total == pytest.approx(sum(range(1, 101)))
    assert [values["exchange/count"] for _, values in points.points] == samples
    assert points.others == [("close", None)]


def test_a_point_that_was_written_is_not_written_again_at_the_end():
    writer, points, _ = make_thinned()
    writer.scalars({"train/loss": 1.0}, num_samples=1)
    writer.close()
    assert len(points.points) == 1


def test_scores_texts_and_pictures_of_an_old_run_are_all_written():
    writer, points, now = make_thinned(seconds_before=WEEK_S)
    writer.scalars({"train/loss": 1.0}, num_samples=1)
    for number in (2, 3):
        now[0] += 0.5
        writer.scalars({"center/accuracy": 0.5, "center/top5": 0.9}, num_samples=number)
        writer.text("events", "w0 starts", num_samples=number)
    assert points.points == [(n, {"center/accuracy": 0.5, "center/top5": 0.9}) for n in (2, 3)]
    assert points.others == [("events", 2), ("events", 3)]


def test_a_rollback_drops_unwritten_records():
    writer, points, now = make_thinned(seconds_before=DAY_S)
    writer.scalars({"train/loss": 9.0}, num_samples=100)
    writer.go_back(num_samples=60)
    now[0] += 60.0
    writer.scalars({"train/loss": 1.0}, num_samples=60)
    writer.close()
    assert points.points == [(60, {"train/loss": 1.0})]
    assert points.others == [("go back", 60), ("close", None)]


def test_the_event_file_of_an_old_run_is_small_and_its_curve_ends_where_the_run_did(tmp_path):
    now = [0.0]
    writer = Thinned(TensorBoardWriter(str(tmp_path)), seconds_before=WEEK_S, clock=lambda: now[0])
    for number in range(1, 3001):  # ten minutes
        now[0] += 0.2
        values = {"train/loss": 1.0 + number % 2, "exchange/count": number}
        writer.scalars(values, num_samples=64 * number)
    writer.close()
    [file] = tmp_path.iterdir()
    events = EventAccumulator(str(file)).Reload()
    points = events.Scalars("train/loss")
    assert 5 <= len(points) <= 6
    assert points[-1].step == 64 * 3000
    assert [point.value for point in points] == pytest.approx([1.5] * len(points), abs=0.01)
    curves = read_history([file.read_bytes()]).curves
    assert curves["exchange/count"].values[-1] == 3000
    assert curves["train/loss"].samples == tuple(point.step for point in points)
