"""Measurements go to TensorBoard, to Ray's metrics and to Grafana."""

import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from disks import fill
from old_runs import age_event_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydl import cli
from raydl.metrics import (
    COMPARED,
    STACK,
    TAGS,
    TIME_PARTS,
    MembershipTable,
    RetryingWriter,
    StackHistory,
    Tee,
    TensorBoardWriter,
    tag_of,
    time_values,
)
from raydl.metrics.tensorboard import make_layout, viewing_command
from raydl.ray_backend import ray_metrics
from raydl.ray_backend.ray_metrics import EXPORTED, RayMetrics, exported_name
from raydl.tools.report.events import read_history

LOCAL = ["--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:96"]
LOCAL += ["--period", "2"]


def test_the_categories_of_the_page_are_in_order_of_importance():
    assert [category.title for category in make_layout().category] == [
        "Accuracy and loss",
        "Throughput and workers",
        "Time in eight parts",
        "Exchange",
        "Staleness",
        "Speed of each worker",
    ]


def test_every_curve_of_the_page_is_one_that_is_written():
    charts = [chart for category in make_layout().category for chart in category.chart]
    for pattern in [tag for chart in charts for tag in chart.multiline.tag]:
        assert any(re.fullmatch(pattern, name) for name in TAGS), pattern
    for series in [series for chart in charts for series in chart.margin.series]:
        assert {series.lower, series.value, series.upper} <= set(TAGS)


def test_a_chart_has_one_curve_of_a_run_unless_its_curves_are_of_workers_or_never_cross():
    """TensorBoard gives all curves of a run one color."""
    charts = [chart for category in make_layout().category[:-1] for chart in category.chart]
    for chart in charts:
        shown = [n for n in TAGS if any(re.fullmatch(p, n) for p in chart.multiline.tag)]
        assert len(shown) == 1 or chart.margin.series, chart.title


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("runs/a", "tensorboard --logdir_spec a:runs/a"),
        ("/my runs/a", "tensorboard --logdir_spec 'a:/my runs/a'"),
        ("s3://b/runs/a", "tensorboard --logdir_spec a:s3://b/runs/a"),
        ("runs/a:b", "tensorboard --logdir runs/a:b"),
        ("runs,1/a", "tensorboard --logdir runs,1/a"),
        (".", "tensorboard --logdir ."),
    ],
)
def test_the_command_for_tensorboard_names_the_run_after_its_folder(folder, command):
    assert viewing_command(folder) == command


def test_the_stack_has_a_band_for_each_of_the_eight_parts_on_top_of_the_one_before():
    charts = [chart for category in make_layout().category for chart in category.chart]
    (bands,) = [chart.margin.series for chart in charts if chart.margin.series]
    assert [band.upper for band in bands] == [f"time_stacked/{part}" for part in STACK]
    assert [band.lower for band in bands[1:]] == [band.upper for band in bands[:-1]]
    assert set(STACK) == set(TIME_PARTS)


def test_the_heights_of_the_stack_by_hand():
    parts = {**dict.fromkeys(TIME_PARTS, 0.0), "forward_backward": 4.0, "replica_update": 1.0}
    values = time_values({**parts, "initialization": 2.0})
    assert values["time/initialization"] == 2.0
    assert values["time_stacked/ground"] == 0.0
    assert values["time_stacked/forward_backward"] == 4.0
    assert values["time_stacked/replica_update"] == 5.0
    assert values["time_stacked/data_io"] == 5.0
    assert values["time_stacked/initialization"] == 7.0


def test_a_history_of_any_length_stays_bounded_and_keeps_its_newest_point():
    history = StackHistory()
    for number in range(5000):
        history.add(number, dict.fromkeys(TIME_PARTS, float(number)))
    samples = [count for count, _ in history.points]
    assert len(samples) <= 512
    assert samples == sorted(samples)
    assert samples[-1] == 4999


def test_memberships_are_listed_newest_first_with_their_workers():
    table = MembershipTable()
    table.add(1, ("w0", "w1"), "w0, w1 start", num_samples=0)
    table.add(2, ("w0",), "w1 was lost: a | b", num_samples=12_000)
    lines = table.markdown().splitlines()
    assert lines[0] == "| generation | from sample | workers | why |"
    assert lines[2] == "| 2 | 12,000 | 1: w0 | w1 was lost: a \\| b |"
    assert lines[3] == "| 1 | 0 | 2: w0, w1 | w0, w1 start |"


class RecordingWriter:
    """A writer that records its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **settings: self.calls.append((name, *args))


def test_all_writers_receive_all_calls():
    writers = RecordingWriter(), RecordingWriter()
    tee = Tee(*writers)
    tee.scalars({"train/lr": 0.1}, num_samples=1)
    tee.text("events", "w0 starts", num_samples=1)
    tee.image("time/stacked", np.zeros((1, 1, 3), np.uint8), num_samples=1)
    tee.flush()
    tee.close()
    names = [call[0] for call in writers[0].calls]
    assert names == ["scalars", "text", "image", "flush", "close"]
    assert [call[0] for call in writers[1].calls] == names


class FakeMetric:
    """A fake of Ray's gauges and counters that records their values."""

    by_name: dict[str, "FakeMetric"]

    def __init__(self, name, description="", tag_keys=None):
        self.name, self.description, self.tag_keys = name, description, tag_keys
        self.values = []
        FakeMetric.by_name[name] = self

    def set(self, value, tags):
        assert set(tags) == set(self.tag_keys)
        self.values.append((value, tags))

    inc = set


def with_fake_metrics(monkeypatch, clock=lambda: 0.0):
    FakeMetric.by_name = {}
    monkeypatch.setattr(ray_metrics, "Gauge", FakeMetric)
    monkeypatch.setattr(ray_metrics, "Counter", FakeMetric)
    return RayMetrics("my-run", first_sample=40, clock=clock), FakeMetric.by_name


def test_ray_gets_every_curve_under_its_own_name_with_its_sentence(monkeypatch):
    writer, metrics = with_fake_metrics(monkeypatch)
    values = {"center/accuracy": 0.5, "worker_step_s/w3": 0.25, "time_stacked/ground": 0.0}
    writer.scalars(values, num_samples=10)
    assert set(metrics) == {"raydl_samples", "raydl_center_accuracy", "raydl_worker_step_s"}
    accuracy, step = metrics["raydl_center_accuracy"], metrics["raydl_worker_step_s"]
    assert accuracy.values == [(0.5, {"run": "my-run"})]
    assert accuracy.description == TAGS["center/accuracy"].sentence
    assert step.values == [(0.25, {"run": "my-run", "worker": "w3"})]


def test_the_counter_of_samples_never_goes_back(monkeypatch):
    writer, metrics = with_fake_metrics(monkeypatch)
    for num_samples in (100, 160, 120, 200):  # a run resumed at 40, and a late score
        writer.scalars({"train/lr": 0.1}, num_samples=num_samples)
    assert [value for value, _ in metrics["raydl_samples"].values] == [60, 60, 40]


def test_a_metric_of_the_task_alone_is_a_curve_but_no_metric_of_ray(monkeypatch):
    assert tag_of("center/top5").name == "center/NAME"
    writer, metrics = with_fake_metrics(monkeypatch)
    writer.scalars({"center/top5": 0.9}, num_samples=10)
    assert set(metrics) == {"raydl_samples"}


class Disk:
    """A writer that has room for a number of points."""

    def __init__(self, room):
        self.room, self.written = room, []

    def scalars(self, values, *, num_samples, unix_s=None):
        if len(self.written) == self.room:
            raise OSError(28, "No space left on device")
        self.written.append(num_samples)

    def close(self):
        self.written.append("closed")


def test_a_writer_that_fails_is_reported_once_and_replaced_while_the_others_continue():
    messages, now, made, other = [], [0.0], [], Disk(room=9)

    def make(is_first):
        made.append(Disk(room=1 if is_first else 9))
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        return made[-1]

    curves = RetryingWriter(make, "the curves", messages.append, clock=lambda: now[0])
    both = Tee(curves, RetryingWriter(lambda _: other, "Ray", messages.append))
    for number in range(1, 9):
        now[0] = 5.0 * number  # fails at 10 s, and at 20 s when it is made again
        both.scalars({"train/lr": 0.1}, num_samples=number)
    both.close()
    assert [disk.written for disk in made] == [[1], [], [6, 7, 8, "closed"]]
    assert other.written == [*range(1, 9), "closed"]
    reason = "[Errno 28] No space left on device"
    again = "training continues, with a retry every 10 s"
    assert messages == [
        f"the curves cannot be written ({reason}); {again}", "the curves are written again"
    ]  # fmt: skip


def test_a_rollback_while_curves_cannot_be_written_hides_the_later_points():
    now, made = [0.0], []

    class Marked(Disk):
        def go_back(self, *, num_samples):
            self.written.append(f"back to {num_samples}")

    def make(is_first):
        made.append(Marked(room=1 if is_first else 9))
        return made[-1]

    curves = RetryingWriter(make, "the curves", lambda sentence: None, clock=lambda: now[0])
    for num_samples in (30, 40):  # the second fails
        curves.scalars({"train/lr": 0.1}, num_samples=num_samples)
    curves.go_back(num_samples=20)
    curves.go_back(num_samples=25)
    now[0] = 30.0
    curves.scalars({"train/lr": 0.1}, num_samples=26)
    assert made[1].written == ["back to 20", 26]


def test_a_writer_that_fails_repeatedly_is_retried_less_often():
    messages, now = [], [0.0]
    curves = RetryingWriter(
        lambda _: Disk(room=0), "the curves", messages.append, clock=lambda: now[0]
    )
    for now[0] in range(2000):
        curves.scalars({"train/lr": 0.1}, num_samples=1)
    assert len(messages) < 20


def test_the_curves_continue_after_a_full_disk(small_disk):
    """TensorBoard reads the points from before and from after the full disk."""
    folder, messages, now = small_disk / "run", [], [0.0]
    curves = RetryingWriter(
        lambda is_first: TensorBoardWriter(str(folder), goes_on=not is_first),
        "the curves",
        messages.append,
        clock=lambda: now[0],
    )
    curves.scalars({"train/loss": 1.0}, num_samples=1)
    curves.flush()
    fill(small_disk)
    for number in range(2, 400):
        curves.scalars({"train/loss": 2.0}, num_samples=number)
    curves.flush()
    for now[0] in (10.0, 20.0, 30.0):  # these retries fail
        curves.scalars({"train/loss": 2.0}, num_samples=500)
    (small_disk / "filled").unlink()
    now[0] = 60.0
    curves.scalars({"train/loss": 3.0}, num_samples=1000)
    curves.close()
    assert all(path.stat().st_size for path in folder.glob("events*"))
    points = EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    assert (points[0].step, points[-1].step) == (1, 1000)
    assert len(messages) == 2
    history = read_history([path.read_bytes() for path in sorted(folder.glob("events*"))])
    assert history.num_starts == 1, "the second file continues the first"
    assert history.curves["train/loss"].samples[-1] == 1000


def test_the_history_of_the_stack_covers_the_whole_run_in_a_bounded_number_of_points():
    history = StackHistory()
    for number in range(50_000):
        history.add(number, {})
    samples = [count for count, _ in history.points]
    assert samples == sorted(samples)
    assert (samples[0], samples[-1]) == (0, 49_999)
    assert len(samples) <= 513
    assert max(b - a for a, b in pairwise(samples)) <= 50_000 / 250


def test_the_gauges_of_a_worker_end_a_minute_after_its_last_report(monkeypatch):
    now = [0.0]
    writer, metrics = with_fake_metrics(monkeypatch, clock=lambda: now[0])
    for now[0] in (0.0, 50.0, 70.0):
        writer.scalars({"worker_step_s/w1": 0.5}, num_samples=1)
    writer.scalars({"worker_step_s/w0": 0.5}, num_samples=1)
    now[0] = 131.0
    writer.scalars({"worker_step_s/w0": 0.5}, num_samples=1)
    last, tags = metrics["raydl_worker_step_s"].values[-1]
    assert math.isnan(last)
    assert tags["worker"] == "w1"


def test_the_names_that_ray_exports_are_all_different():
    names = [exported_name(tag) for tag in EXPORTED]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"ray_raydl_[a-z_]+", name) for name in names)


def test_the_dashboard_uses_only_exported_metrics(root):
    text = (root / "cluster_configs/grafana/raydl.json").read_text()
    names = {exported_name(tag) for tag in EXPORTED}
    assert set(re.findall(r"\bray_\w+", text)) <= names
    dashboard = json.loads(text)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert all('{run=~"$run"}' in target["expr"] for target in panel["targets"])
    places = [
        {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
        for p in (panel["gridPos"] for panel in panels)
    ]
    assert sum(map(len, places)) == len(set.union(*places)), "panels overlap"


def test_the_tags_of_a_comparison_are_in_the_docs(root):
    text = (root / "docs/metrics.md").read_text()
    assert all(f"`{name}`" in text for name in COMPARED)


def train(run, *options):
    assert cli.main(["train", *LOCAL, "--run-dir", str(run), *options]) == 0


def read(run):
    accumulator = EventAccumulator(str(run), size_guidance={"tensors": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def texts(accumulator, name):
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in accumulator.Tensors(f"{name}/text_summary")
    ]


@pytest.mark.charts
def test_two_starts_in_one_folder_show_as_one_run(tmp_path):
    run = tmp_path / "run"
    train(run, "--epochs", "2")
    age_event_file(run)
    train(run, "--epochs", "4", "--resume")
    events = read(run)
    memberships = [text for _, text in texts(events, "membership")]
    assert [len(text.splitlines()) for text in memberships] == [3, 3]
    assert "| 2 | 192 | 1: w0 | w0 starts |" in memberships[1]
    steps, sentences = zip(*texts(events, "events"), strict=True)
    assert [s.partition(" from")[0] for s in sentences] == [
        "generation 1: w0 starts",
        "resuming",
        "generation 2: w0 starts",
    ]
    assert list(steps) == sorted(set(steps)), "TensorBoard shows one text for each step"
    for name in ("center/predictions", "time/stacked"):
        pictures = [event.step for event in events.Images(name)]
        assert pictures == sorted(pictures)
        assert (pictures[0] <= 192, pictures[-1]) == (True, 384)
    layouts = events.Tensors("custom_scalars__config__")
    assert {event.tensor_proto.string_val[0] for event in layouts} == {
        make_layout().SerializeToString()
    }
    curve = [event.step for event in events.Scalars("center/accuracy")]
    assert curve == sorted(set(curve))


def test_the_table_of_memberships_stays_short_with_hundreds_of_workers():
    table = MembershipTable()
    table.add(1, [f"w{i}" for i in range(256)], "start", num_samples=0)
    assert "| 1 | 0 | 256: w0 to w255 | start |" in table.markdown()
    for number in range(100):
        table.add(number, [f"w{2 * i + number}" for i in range(256)], "change", num_samples=0)
    row = table.markdown().splitlines()[2]
    assert row.startswith("| 99 | 0 | 256: w99, w101, ")
    assert "w161, 224 more | change |" in row
    assert len(table.markdown()) < 30_000
