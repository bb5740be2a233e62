"""After a rollback or a new start, no curve shows the points that were lost."""

import shutil
from dataclasses import replace

import pytest
from old_runs import age_event_file
from recorders import FakeStore as Store
from recorders import make_recorder as make
from recorders import record_at, report_of, score_at
from snapshots import with_progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)

from raydl import cli
from raydl.core.membership import Membership
from raydl.elastic.run_state import State
from raydl.metrics import TIME_PARTS, StackHistory, TensorBoardWriter
from raydl.metrics.tensorboard import make_layout
from raydl.tools.report.events import read_history

LAYOUT = "custom_scalars__config__"


def scalars(folder, tag):
    """Return (samples, value) of a tag as TensorBoard reads a folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tensors(folder, tag):
    """Return (samples, text) of a tag as the pages of TensorBoard read a folder."""
    events = PageAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found = events.Tensors(tag)
    return [(event.step, event.tensor_proto.string_val[0]) for event in found]


def files_of(folder):
    return [path.read_bytes() for path in sorted(folder.glob("events*"))]


def record_rollback(folder, store=None):
    """Record a run whose center is lost at 40 samples and comes back as it was at 20."""
    recorder, memory = make(store or Store(), writer=TensorBoardWriter(str(folder)))
    recorder.event("generation 1: w0 starts")
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    for num_samples in (10, 20, 30, 40):
        recorder.record(record_at(num_samples), {"w0": report_of("w0", local_step=num_samples)})
        recorder.evaluated(replace(score_at(num_samples, ()), metrics={"accuracy": 0.5}))
    recorder.event("center was lost: its node went away")
    recorder.event("generation 2: the center has restarted")
    recorder.formed(Membership(2, ("w1",)), "the center has restarted")
    for num_samples in (25, 35):
        record = replace(with_progress(record_at(num_samples), generation=2), loss=0.1)
        recorder.record(record, {"w1": report_of("w1", local_step=num_samples)})
    recorder.evaluated(replace(score_at(35, ()), metrics={"accuracy": 0.9}))
    recorder.close()
    return recorder, memory


def test_the_curves_continue_where_the_center_does(tmp_path):
    record_rollback(tmp_path)
    loss = scalars(tmp_path, "train/loss")
    assert [samples for samples, _ in loss] == [10, 20, 25, 35]
    assert [value for _, value in loss] == pytest.approx([0.7, 0.7, 0.1, 0.1])
    assert [samples for samples, _ in scalars(tmp_path, "center/accuracy")] == [10, 20, 35]
    assert {text for _, text in tensors(tmp_path, LAYOUT)} == {make_layout().SerializeToString()}


def test_the_texts_of_tensorboard_report_the_rollback_and_the_members(tmp_path):
    _, memory = record_rollback(tmp_path)
    sentence = "the center was rolled back from 40 to 25 samples; the curves continue from there"
    assert memory.sentences.count(sentence) == 1
    assert tensors(tmp_path, "events/text_summary")[-1] == (25, sentence.encode())
    samples, table = tensors(tmp_path, "membership/text_summary")[-1]
    assert samples == 25
    assert b"| 2 |" in table


def test_the_report_has_one_branch_and_all_messages(tmp_path):
    record_rollback(tmp_path)
    history = read_history(files_of(tmp_path))
    loss = history.curves["train/loss"]
    assert loss.samples == (10, 20, 25, 35)
    assert loss.values == pytest.approx((0.7, 0.7, 0.1, 0.1))
    assert list(loss.seconds) == sorted(loss.seconds)
    assert history.curves["center/accuracy"].samples == (10, 20, 35)
    assert history.num_starts == 1
    assert [event.sentence for event in history.events][:3] == [
        "generation 1: w0 starts",
        "center was lost: its node went away",
        "generation 2: the center has restarted",
    ]


def test_the_result_has_no_scores_of_the_center_that_was_lost(tmp_path):
    recorder, _ = record_rollback(tmp_path)
    evaluations = recorder.figures()["evaluations"]
    assert [(e["samples"], e["accuracy"]) for e in evaluations] == [(10, 0.5), (20, 0.5), (35, 0.9)]


def test_a_run_with_a_rollback_that_is_resumed_is_shown_as_one_line(tmp_path):
    record_rollback(tmp_path / "a")
    writer = TensorBoardWriter(str(tmp_path / "b"), purge_after=25)
    writer.scalars({"train/loss": 0.05}, num_samples=30)
    writer.close()
    history = read_history([*files_of(tmp_path / "a"), *files_of(tmp_path / "b")])
    assert history.curves["train/loss"].samples == (10, 20, 25, 30)
    assert history.num_starts == 2


def test_the_chart_of_the_stack_drops_later_points():
    history = StackHistory()
    parts = dict.fromkeys(TIME_PARTS, 1.0)
    for num_samples in range(2000):
        history.add(num_samples, parts)
    history.go_back(num_samples=700)
    assert 690 < history.points[-1][0] < 700
    for num_samples in (700, 701):
        history.add(num_samples, parts)
    samples = [count for count, _ in history.points]
    assert samples == sorted(set(samples))
    assert (samples[0], samples[-2:]) == (0, [700, 701])
    history.go_back(num_samples=0)
    assert history.points == ()


def test_a_first_start_writes_a_session_mark_so_that_one_of_a_resumed_start_counts(tmp_path):
    for purge_after, points in ((None, (10, 20, 30)), (20, (25,))):
        writer = TensorBoardWriter(str(tmp_path), purge_after=purge_after)
        for num_samples in points:
            writer.text("events", f"at {num_samples}", num_samples=num_samples)
        writer.close()
        age_event_file(tmp_path)
    assert [samples for samples, _ in tensors(tmp_path, "events/text_summary")] == [10, 20, 25]


def test_a_run_that_starts_again_hides_the_earlier_attempt(tmp_path):
    run = tmp_path / "run"
    options = ["--workers", "0", "--run.progress", "none", "--model", "mlp", "--period", "2"]
    command = ["train", *options, "--data", "synthetic:96", "--run-dir", str(run)]
    assert cli.main([*command, "--epochs", "2"]) == 0
    age_event_file(run)
    shutil.rmtree(run / "checkpoints")  # as if it had been lost before its first checkpoint
    (run / "result.json").unlink()
    assert cli.main([*command, "--epochs", "1", "--resume"]) == 0
    events = [text.decode() for _, text in tensors(run, "events/text_summary")]
    assert events[0] == f"no checkpoint yet: the run starts again in {run}"
    assert events[1].startswith("generation 1: w0 starts")
    assert len(tensors(run, "settings/text_summary")) == 1
    epochs = scalars(run, "train/epoch")
    assert [value for _, value in epochs] == sorted(value for _, value in epochs)
    curve = read_history(files_of(run)).curves["train/epoch"]
    assert list(curve.values) == pytest.approx([value for _, value in epochs])
    assert curve.values[-1] == pytest.approx(1.0)


def test_the_remaining_time_is_known_only_while_samples_are_trained():
    recorder, memory = make(Store())
    recorder.record(record_at(5), {})
    recorder.show(State.TRAINING, {"training": 1})
    recorder.close()
    view = memory.views[-1]
    assert view.eta_s is None
    assert replace(view, samples_per_s=0.0).eta_s is None
    assert replace(view, samples_per_s=-3.0).eta_s is None
    assert replace(view, samples_per_s=5.0, share_done=0.5).eta_s == 1.0


def test_event_files_of_the_same_second_sort_by_age(tmp_path):
    """Readers sort files by name, with a counter at the end: a tenth start must follow a ninth."""
    names = []
    for _ in range(12):
        before = {path.name for path in tmp_path.iterdir()}
        TensorBoardWriter(str(tmp_path)).close()
        names += {path.name for path in tmp_path.iterdir()} - before
    assert names == sorted(names)
