"""The recorder logs failed checkpoints, and computes speeds and shares."""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from recorders import FakeStore as Store
from recorders import collected_round as collected
from recorders import flat_model, parts, record_at, report_of, score_at
from recorders import make_recorder as make
from snapshots import with_progress

from raydl.checkpoint.totals import Totals
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.config import CheckpointConfig, TrainConfig
from raydl.core.autotune import Choice, ExchangeTuning
from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.reports import AllreduceReport, EqualReplicas
from raydl.core.scores import Evaluated
from raydl.elastic.run_state import State
from raydl.errors import CheckpointError
from raydl.metrics import TAGS, TimeParts, tag_of
from raydl.run.recorder import divergence_sentence
from raydl.storage import Storage


def test_a_checkpoint_that_fails_is_logged_and_the_next_one_is_written():
    store = Store(1)
    recorder, memory = make(store)
    recorder.checkpoint(collected(1))
    recorder.checkpoint(collected(2))
    recorder.checkpoints.wait()
    recorder.show(State.TRAINING, {"training": 2})
    recorder.close()
    assert store.written == [2]
    assert memory.sentences == [
        "checkpoint runs/x: could not be written: disk full; training continues; "
        "the next one may succeed"
    ]


def test_a_last_checkpoint_that_fails_is_an_error():
    recorder, _ = make(Store(7))
    recorder.checkpoint(collected(7))
    with pytest.raises(CheckpointError, match="disk full"):
        recorder.close()


def test_the_training_time_does_not_fall_while_the_first_record_is_awaited(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    recorder, _ = make(Store())
    before = recorder.seconds
    now[0] = 105.0
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    assert recorder.seconds == recorder.figures()["seconds"] == before
    recorder.close()


def test_a_checkpoint_that_is_overdue_is_logged_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    config = TrainConfig(checkpoint=CheckpointConfig(every_s=60.0))
    recorder, memory = make(Store(), config=config)

    def show(at_s, state=State.TRAINING):
        now[0] = 100.0 + at_s
        recorder.show(state, {})

    for at_s in (0.0, 119.0, 121.0, 125.0):
        show(at_s)
    overdue = "no checkpoint was written for 121 s, twice checkpoint.every_s: the workers have kept"
    assert memory.sentences == [f"{overdue} no states"]
    recorder.checkpoint(collected(1))
    recorder.checkpoints.wait()
    assert recorder.checkpoint_at == pytest.approx(time.time(), abs=1.0)
    show(244.0)
    assert len(memory.sentences) == 1
    show(246.0)
    assert len(memory.sentences) == 2
    show(400.0, State.WAITING)  # with a checkpoint of the center that all workers continue from
    show(519.0)
    show(521.0)
    assert len(memory.sentences) == 3
    recorder.close()


def fails_to_copy():
    raise OSError("the curves in runs/x could not be copied: the bucket does not exist")


def test_curves_that_can_not_be_copied_are_logged_and_do_not_end_the_run():
    recorder, memory = make(Store(), after_checkpoint=fails_to_copy)
    recorder.checkpoint(collected(1))
    recorder.checkpoints.wait()
    recorder.show(State.TRAINING, {"training": 2})
    recorder.close()
    reason = "the curves in runs/x could not be copied: the bucket does not exist"
    assert memory.sentences == [
        f"{reason}; retrying with the next checkpoint",
        f"{reason}; all other files of the run are complete",
    ]


def test_samples_that_are_left_out_are_logged_less_and_less_often():
    recorder, _ = make(Store())
    messages = []
    recorder._progress.event = messages.append
    for count in range(1, 101):
        for worker_id in ("w0", "w1"):  # each record has the latest report again
            reports = {worker_id: report_of(worker_id, local_step=count, left_out=count)}
            recorder.record(record_at(count), reports)
    assert [sentence.split(";")[0] for sentence in messages[:2]] == [
        "skipped a sample that cannot be read",
        "skipped 2 samples that cannot be read",
    ]
    assert len(messages) == 8
    assert messages[0].endswith("the last: train-0.parquet, row group 3: row 2 holds no picture")
    assert recorder.figures()["left_out_samples"] == 200
    recorder.close()


def test_the_samples_of_a_worker_that_leaves_and_rejoins_are_counted_once():
    recorder, _ = make(Store())

    def train(*members, generation, **left_out):
        recorder.formed(Membership(generation, members), "a reason")
        reports = {w: report_of(w, local_step=generation, left_out=left_out[w]) for w in members}
        recorder.record(record_at(generation), reports)
        return recorder.figures()["left_out_samples"]

    assert train("w0", "w1", generation=1, w0=3, w1=5) == 8
    assert train("w0", generation=2, w0=4) == 9
    assert train("w0", "w1", generation=3, w0=4, w1=6) == 10
    recorder.close()


def test_a_chosen_tuning_is_logged_once():
    recorder, _ = make(Store())
    messages = []
    recorder._progress.event = messages.append
    first = Choice(1, ExchangeTuning(10, 9, "none"), "the link is thin")
    second = Choice(2, ExchangeTuning(20, 9, "int8", fragments=2), "the link is thinner")
    again = dataclasses.replace(second, generation=3, reason="the workers before chose it")
    for step, choice in enumerate([None, first, first, second, second, again, None], 1):
        report = report_of("w0", local_step=step, choice=choice)
        recorder.record(record_at(step), {"w0": report})
    recorder.close()
    assert messages == [
        "exchanges use period 10, delay 9: the link is thin",
        "exchanges use period 20, 2 fragments, delay 9, int8: the link is thinner",
    ]
    assert recorder.figures()["cadence"] == {
        "period": 20, "delay": 9, "compression": "int8", "fragments": 2
    }  # fmt: skip


def test_a_record_becomes_one_point_of_every_curve():
    recorder, memory = make(Store())
    recorder.follow(
        SimpleNamespace(
            refused={"snapshots": 1, "messages": 2},
            generation=1,
            pauses=SimpleNamespace(longest_s=0.0),
            num_lost_residuals=2,
            planned_faults=SimpleNamespace(fired=()),
        )
    )
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    parts = {**TimeParts().as_dict(), "forward_backward": 3.0, "device_device_parameters": 1.0}
    allreduce = AllreduceReport(1, "ring", 1000, 0.001, 0.002)
    choice = Choice(1, ExchangeTuning(20, 19, "int8"), "a thin link")
    report = report_of(
        "w0", local_step=2, parts=parts, allreduce=allreduce, choice=choice, left_out=1
    )
    recorder.record(record_at(5), {"w0": report})
    recorder.evaluated(
        Evaluated(
            Progress(round=2, num_samples=5, seconds=1.0),
            {"accuracy": 0.9, "loss": 0.3, "top5": 1.0},
        )
    )
    recorder.show(State.TRAINING, {"training": 1, "starting": 1})
    recorder.close()
    names = set().union(*[values for _, values in memory.points])
    assert {tag_of(name).name for name in names} == set(TAGS)
    assert all(num_samples == 5 for num_samples, _ in memory.points)
    view = memory.views[-1]
    assert (view.share_done, view.communication_share) == (0.25, 0.25)
    assert (view.workers["training"], view.workers["starting"]) == (1, 1)
    assert (view.train_loss, view.center_accuracy) == (0.7, 0.9)
    figures = recorder.figures()
    assert figures["seconds"] > 5.0
    assert figures["samples"] == 5
    assert figures["center_accuracy"] == 0.9
    assert figures["refused"] == {"snapshots": 1, "messages": 2}
    assert figures["lost_residuals"] == 2
    assert {p["exchange/refused"] for _, p in memory.points if "exchange/refused" in p} == {3}


def test_the_choice_of_an_all_reduce_is_logged_with_all_that_was_tried():
    recorder, memory = make(Store())
    tried = {"library": 0.0005, "ring": 0.002, "two-level": 0.001}
    library = AllreduceReport(1, "library", 1000, None, 0.0004, tried)
    for report in (library, AllreduceReport(2, "ring", 1000, 0.001, 0.002)):
        recorder.record(record_at(5), {"w0": report_of("w0", local_step=2, allreduce=report)})
    recorder.close()
    assert [text for name, _, text in memory.texts if name == "events"] == [
        "all-reduce of 1,000 bytes: library, measured 0.40 ms; the medians of the first sums: "
        "library 0.50 ms, two-level 1.00 ms, ring 2.00 ms",
        "all-reduce of 1,000 bytes: ring, measured 2.00 ms, predicted 1.00 ms",
    ]
    predictions = [p.get("exchange/allreduce_predicted_s") for _, p in memory.points]
    assert predictions == [None, 0.001]


def test_simultaneous_events_are_a_sample_apart_since_tensorboard_shows_one_per_step():
    recorder, memory = make(Store())
    recorder.event("generation 1: w0 starts")
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    recorder.event("w1 was requested")
    recorder.record(record_at(5), {})
    recorder.event("w1 joins")
    recorder.close()
    assert [(name, at) for name, at, _ in memory.texts] == [
        ("events", 0), ("membership", 0), ("events", 1), ("events", 5),
    ]  # fmt: skip
    assert "| 1 | 0 | 1: w0 | w0 starts |" in memory.texts[1][2]


def test_records_that_arrive_together_do_not_look_fast(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    recorder, memory = make(Store())
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    for at_s, num_samples in [(1.0, 100), (1.0, 200), (2.0, 300), (3.0, 400), (3.0, 500)]:
        now[0] = at_s
        recorder.record(record_at(num_samples), {})
    recorder.close()
    speeds = [values["throughput/samples_per_s"] for _, values in memory.points]
    assert speeds == [100.0, 200.0, 150.0, 100.0, 150.0]


def test_examples_are_drawn_occasionally_and_always_at_the_end():
    recorder, memory = make(Store())
    for num_samples in (2, 4, 6):
        recorder.evaluated(score_at(num_samples, (0,) * 16))
    assert memory.images == [("center/predictions", 2)]
    recorder.close()
    assert memory.images == [("center/predictions", 2), ("center/predictions", 6)]


def test_seconds_per_worker_do_not_fall_when_the_membership_changes():
    """A new generation begins with the report of one worker, and an old worker is replaced."""
    recorder, memory = make(Store())
    old = {"data_io": 100.0, "device_device_parameters": 50.0}
    reports = {w: report_of(w, local_step=1, parts=parts(**old)) for w in ("w0", "w1")}
    recorder.record(record_at(1, num_workers=2), reports)
    newcomer = report_of("w2", local_step=2, parts=parts(data_io=1.0, initialization=9.0))
    for step, present in enumerate([{"w2": newcomer}, {"w2": newcomer, "w0": reports["w0"]}], 2):
        recorder.record(record_at(step, num_workers=2), present)
    for name in ("time/data_io", "time/device_device_parameters", "time_stacked/data_io"):
        values = [values[name] for _, values in memory.points]
        assert values == sorted(values)
    assert recorder.figures()["time_parts"]["data_io"] == 100.5
    assert recorder.figures()["communication_share"] == pytest.approx(50 / 150.5)


@pytest.mark.charts
def test_the_time_parts_are_drawn_once_a_minute_and_always_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    recorder, memory = make(Store())
    for at_s in (1.0, 59.0, 61.0, 100.0, 122.0, 130.0):
        now[0] = at_s
        recorder.record(record_at(int(at_s)), {"w0": report_of("w0", local_step=int(at_s))})
        recorder.evaluated(score_at(int(at_s), ()))
    drawn = [("time/stacked", 61), ("time/stacked", 122)]
    assert memory.images == drawn
    recorder.close()
    assert memory.images == [*drawn, ("time/stacked", 130)]


def test_a_task_without_classes_shows_no_examples():
    recorder, memory = make(Store())
    recorder.evaluated(score_at(2, ()))
    recorder.close()
    assert memory.images == []


def worker_curves(points):
    return [
        {name: value for name, value in values.items() if name.startswith("worker_")}
        for _, values in points
    ]


def test_every_worker_has_curves_that_end_with_its_last_new_report():
    recorder, memory = make(Store())
    fast, slow = (report_of(w, local_step=4, step_s=s) for w, s in (("w0", 0.25), ("w1", 2.0)))
    unready = report_of("w2", local_step=0, round_s=0.0)
    recorder.record(record_at(5), {"w0": fast, "w1": slow, "w2": unready})
    recorder.record(record_at(6), {"w0": report_of("w0", local_step=8), "w1": slow})
    recorder.close()
    assert worker_curves(memory.points) == [
        {
            "worker_step_s/w0": 0.25,
            "worker_waited_s/w0": 0.5,
            "worker_step_s/w1": 2.0,
            "worker_waited_s/w1": 0.5,
        },
        {"worker_step_s/w0": 0.25, "worker_waited_s/w0": 0.5},
    ]


def test_a_name_without_a_sentence_is_not_written():
    assert tag_of("worker_step_s/w12").name == "worker_step_s/ID"
    with pytest.raises(AssertionError, match="worker_speed/w0 has no description"):
        tag_of("worker_speed/w0")


def test_a_snapshot_is_restored_from_its_checkpoint():
    flat, gathered = flat_model(), collected(3)
    checkpoint = checkpoint_of(gathered, flat, seconds=1.0)
    again = snapshot_of(checkpoint, flat)
    assert np.array_equal(again.weights, gathered.snapshot.weights)
    assert again.ledger == gathered.snapshot.ledger
    assert again.progress.round == 3


def test_a_resumed_run_continues_the_clock_of_its_end_and_its_schedule():
    """Of 3600 s on the driver's clock, 10 s were training and the rest were waits."""
    gathered = collected(3)
    gathered = dataclasses.replace(
        gathered, snapshot=with_progress(gathered.snapshot, seconds=10.0)
    )
    checkpoint = checkpoint_of(gathered, flat_model(), seconds=3600.0)
    assert checkpoint.seconds == 3600.0
    assert snapshot_of(checkpoint, flat_model()).progress.seconds == 10.0


def test_the_totals_of_a_start_are_added_to_those_of_the_checkpoint(tmp_path):
    checkpoint = checkpoint_of(
        collected(3), flat_model(), seconds=1.0,
        totals=Totals(
            evaluations=(score(1, 50, 0.5), score(9, 450, 0.9)),
            longest_pause_s=2.0,
            staleness_sum=6.0,
            period_sum=30.0,
            time_parts=parts(data_io=1.0),
            faults_fired=("fault 0: w1 dies",),
        ),
    )  # fmt: skip
    checkpoint = with_progress(checkpoint, num_samples=150)
    result = {"evaluations": [score(1, 50, 0.5), score(3, 150, 0.7), score(4, 200, 0.8)]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    before = Totals.of(checkpoint, Storage(str(tmp_path)))
    assert before.evaluations == (score(1, 50, 0.5), score(3, 150, 0.7))
    assert before.center_accuracy == 0.7
    whole = before.plus(
        evaluations=(*before.evaluations, score(6, 300, 0.75)), longest_pause_s=1.0,
        staleness_sum=3.0, period_sum=18.0,
        time_parts=parts(data_io=0.5, forward_backward=1.0), faults_fired=(),
    )  # fmt: skip
    figures = whole.figures(6)
    assert figures["center_accuracy"] == 0.75
    assert (figures["longest_pause_s"], figures["staleness"]) == (2.0, 1.5)
    assert figures["period"] == 8.0
    assert figures["time_parts"] == parts(data_io=1.5, forward_backward=1.0)
    assert figures["faults_fired"] == ["fault 0: w1 dies"]


def at_round(round, staleness=2.0):
    return dataclasses.replace(with_progress(record_at(round), round=round), staleness=staleness)


def test_rounds_after_a_checkpoint_are_not_counted_twice_after_a_resume(monkeypatch):
    """The checkpoint of round 50 is written when the run is already at round 100."""
    now = [0.0]
    monkeypatch.setattr("raydl.run.recorder.time.monotonic", lambda: now[0])
    kept = []
    recorder, _ = make(Store(), before=Totals(time_parts=parts(data_io=7.0)))
    recorder.checkpoints._store.write = kept.append
    recorder.formed(Membership(1, ("w0",)), "w0 starts")
    for round in (20, 50, 100):
        now[0] = float(round)
        report = report_of("w0", local_step=round, parts=parts(data_io=round / 10))
        recorder.record(at_round(round), {"w0": report})
    recorder.checkpoint(collected(60))
    recorder.checkpoints.wait()
    (checkpoint,) = kept
    totals = checkpoint.state["totals"]
    assert (totals["staleness_sum"], totals["period_sum"]) == (100.0, 500.0)
    assert totals["time_parts"]["data_io"] == 12.0
    assert checkpoint.seconds == 5.0 + 50.0
    assert recorder.figures()["staleness"] == 2.0


def test_rounds_that_were_lost_and_repeated_count_once():
    recorder, _ = make(Store())
    for round, staleness in ((50, 2.0), (100, 8.0), (60, 2.0), (100, 2.0)):
        recorder.record(at_round(round, staleness), {})
    assert recorder.figures()["staleness"] == 2.0


def score(round, num_samples, accuracy):
    return {"round": round, "samples": num_samples, "seconds": 1.0, "accuracy": accuracy}


@pytest.mark.parametrize("text", ["{", "[]", '{"evaluations": 3}', '{"evaluations": [7]}'])
def test_a_damaged_result_of_an_earlier_start_does_not_keep_a_run_from_going_on(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    older = dataclasses.replace(checkpoint_of(collected(3), flat_model(), seconds=1.0), state={})
    assert Totals.of(older, Storage(str(tmp_path))) == Totals()


def test_a_resumed_run_shows_its_newest_score_from_the_beginning():
    recorder, memory = make(Store(), before=Totals(evaluations=(score(3, 150, 0.7),)))
    recorder.show(State.WAITING, {"starting": 2})
    recorder.close()
    assert memory.views[-1].center_accuracy == 0.7


@pytest.mark.parametrize(
    ("first", "last", "center", "is_said"),
    [
        (2.3, 8.9e29, 9.1e29, True),
        (2.3, 23.0, None, True),
        (2.3, 22.9, None, False),
        (2.3, None, 40.0, True),
        (2.3, 40.0, 0.7, False),  # the last batches were hard
        (0.3, 0.01, 5.0, False),  # the model knows the training set by heart
        (2.3, 8.9e29, math.inf, True),
        (2.3, 0.1, 0.2, False),
        # a loss that begins near zero or below may end anywhere
        (0.001, 0.9, 0.9, False),
        (0.0, 3.0, 3.0, False),
        (-5.0, 300.0, 300.0, False),
        (5.0, -300.0, -300.0, False),
        # unknown
        (None, 8.9e29, 8.9e29, False),
        (2.3, None, None, False),
        (2.3, None, math.nan, False),
    ],
)
def test_a_loss_of_many_times_its_start_is_a_divergence(first, last, center, is_said):
    assert bool(divergence_sentence(first, last, center)) == is_said


def test_the_sentence_of_a_divergence_has_both_numbers():
    assert divergence_sentence(2.302, 8.9e29, 9.1e29) == (
        "the training has diverged: it began with a training loss of 2.3 and ended with a training "
        "loss of 8.9e+29 and a loss on the test set of 9.1e+29; lower optimizer.lr or "
        "optimizer.clip_grad_norm"
    )


def test_a_run_that_ends_with_many_times_its_first_loss_says_so_once_at_its_end():
    recorder, memory = make(Store())
    for step, loss in enumerate((2.0, 4e9, math.nan), 1):
        report = dataclasses.replace(report_of("w0", local_step=step), first_loss=2.0)
        recorder.record(record_at(step, loss=loss), {"w0": report})
    assert recorder.figures()["warnings"] == []
    recorder.conclude()
    recorder.conclude()
    [sentence] = recorder.figures()["warnings"]
    assert "began with a training loss of 2 and ended with a training loss of 4e+09" in sentence
    assert memory.sentences.count(sentence) == 1
    figures = recorder.figures()
    assert (figures["first_train_loss"], figures["last_train_loss"]) == (2.0, 4e9)


def test_the_score_of_an_earlier_center_does_not_hide_a_divergence():
    recorder, _ = make(Store())
    report = dataclasses.replace(report_of("w0", local_step=9), first_loss=2.0)
    recorder.evaluated(Evaluated(Progress(round=1, num_samples=1), {"loss": 1.9}))
    recorder.record(record_at(9, loss=4e9), {"w0": report})
    recorder.conclude()
    assert "ended with a training loss of 4e+09; lower" in recorder.figures()["warnings"][0]


def test_a_resumed_run_compares_with_its_very_first_loss():
    recorder, _ = make(Store(), before=Totals(first_loss=2.0))
    recorder.record(record_at(9, loss=4e9), {"w0": report_of("w0", local_step=9)})
    recorder.conclude()
    assert "began with a training loss of 2 " in recorder.figures()["warnings"][0]


def test_equal_replicas_are_said_once_and_stay_in_the_result():
    recorder, memory = make(Store())
    equal = EqualReplicas(("w0",), ("w1",), since_round=3)
    for step in (5, 6):
        report = dataclasses.replace(report_of("w0", local_step=step), equal_replicas=equal)
        recorder.record(record_at(step), {"w0": report})
    [sentence] = recorder.figures()["warnings"]
    assert sentence.startswith("the replicas of w0 and of w1 have been equal since round 3: they")
    assert memory.sentences.count(sentence) == 1
