"""A callback may request the end of a run; a user's callbacks are called once per score."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from accuracies import accuracy_of as accuracy
from controller_harness import BOTH, ControllerHarness, collected, report, scored
from safetensors.torch import load_file

import raydl
from raydl import cli
from raydl.checkpoint.best import FILE
from raydl.checkpoint.store import CheckpointStore
from raydl.config import (
    CheckpointConfig,
    EvaluationConfig,
    MethodConfig,
    OptimizerConfig,
    TrainingConfig,
)
from raydl.core.callbacks import Listeners, Patience, StopAtAccuracy
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.scores import Evaluated, score_of
from raydl.core.worker_group import Lost, Published
from raydl.elastic.run_state import State
from raydl.errors import ConfigError, RaydlError, ShapeError
from raydl.run.control_channel import read_status
from raydl.run.evaluate import score_run
from raydl.run.local_worker_group import LocalWorkerGroup
from raydl.run.trainer import Trainer
from raydl.storage import Storage
from raydl.tasks import Classification


def loss(value):
    return Evaluated(Progress(round=1, num_samples=10), {"loss": value})


def reasons_of(callback, *scores):
    return [callback.evaluated(score) for score in scores]


class RecordingCallback(raydl.Callback):
    """Keeps the scores that it receives, and returns the given reasons one by one."""

    def __init__(self, *reasons):
        self.scores, self.figures, self.reasons = [], [], list(reasons)

    def evaluated(self, evaluated):
        self.scores.append(evaluated)
        return self.reasons.pop(0) if self.reasons else None

    def ended(self, figures):
        self.figures.append(figures)


# the callbacks that settings add


def test_stop_at_accuracy_names_the_reached_accuracy():
    stop = StopAtAccuracy(0.9)
    assert reasons_of(stop, accuracy(0.8), accuracy(0.9)) == [None, "reached accuracy 0.9000"]
    assert reasons_of(stop, loss(0.1)) == [None]


def test_patience_counts_evaluations_in_a_row_and_a_better_one_begins_anew():
    scores = [0.5, 0.5, 0.4, 0.6, 0.6, 0.5, 0.55, 0.7]
    reasons = reasons_of(Patience(3), *map(accuracy, scores))
    assert reasons[:6] == [None] * 6
    assert reasons[6] == "no better accuracy than 0.6000 in the last 3 evaluations"
    assert reasons[7] is None


def test_patience_uses_the_loss_if_the_task_measures_no_accuracy():
    reasons = reasons_of(Patience(1), loss(2.0), loss(1.0), loss(1.5))
    assert reasons == [None, None, "no better loss than 1.0000 in the last 1 evaluation"]
    reasons = reasons_of(Patience(1), loss(-2.0), loss(-1.5))
    assert reasons == [None, "no better loss than -2.0000 in the last 1 evaluation"]


def test_patience_counts_scores_that_are_not_finite():
    reasons = reasons_of(Patience(2), loss(math.nan), accuracy(math.nan))
    assert reasons == [None, "no finite accuracy in the last 2 evaluations"]


def test_a_score_that_is_no_number_is_worse_than_any():
    assert score_of({"accuracy": math.nan}) == score_of({"loss": math.nan}) == score_of({})
    assert score_of({"loss": 1e9}) > score_of({"loss": math.nan})
    reasons = reasons_of(Patience(2), accuracy(0.1), accuracy(math.nan), accuracy(math.nan))
    assert [bool(sentence) for sentence in reasons] == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop_at_accuracy": 95}, r"training.stop_at_accuracy must be in \(0, 1\], as 0.95 is"),
        ({"patience": 0}, "training.patience must be 1 or more, got 0"),
        ({"patience": 2, "deterministic": True}, "training.patience depends on the clock"),
        ({"stop_at_accuracy": 1.0, "deterministic": True}, "stop_at_accuracy depends on the clock"),
    ],
)
def test_invalid_settings_of_callbacks_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TrainingConfig(**settings)


# how a callback ends a run


def test_every_callback_receives_each_score_without_weights_and_the_first_reason_stays():
    first, second = (
        RecordingCallback(None, True),
        RecordingCallback(None, "too late", "much too late"),
    )
    harness = ControllerHarness(callbacks=[first, second]).start()
    empty = np.empty(0, np.float32)
    for round in (1, 2, 3):
        harness.step(accuracy(0.5, round, weights=empty, buffers=empty))
    for callback in (first, second):
        assert [score.progress.round for score in callback.scores] == [1, 2, 3]
        assert all(score.weights is None for score in callback.scores)
    name = f"{__name__}:RecordingCallback"
    assert harness.log_lines[-1].startswith(
        f"{name} requested the end of the run: stopping after this round"
    )


@BOTH
def test_a_run_that_a_callback_ends_is_stopped_by_a_vote_scored_and_finished(is_sync):
    harness = ControllerHarness(is_sync=is_sync, callbacks=[StopAtAccuracy(0.5)]).start()
    assert harness.step(scored(1)) == [("vote", "stop")]
    assert harness.step(scored(2)) == []
    harness.step(*harness.end("stopped", 3, "w0", "w1"), report("w0", 3), report("w1", 3))
    calls = [*harness.step(Published((0, 3))), *harness.step()]
    assert {("collect", 3, ("w0", "w1")), ("evaluate", 3)} <= set(calls)
    harness.step(collected(3))
    assert harness.state is State.FINISHING, "the last center has no score yet"
    harness.step(scored(3))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.FINISHED)
    assert harness.controller.ended_by == "training.stop_at_accuracy 0.5"
    assert harness.controller.ended_because == "reached accuracy 0.5000"


@BOTH
def test_a_signal_before_the_end_of_the_round_still_stops_the_run(is_sync):
    harness = (
        ControllerHarness(is_sync=is_sync, callbacks=[StopAtAccuracy(0.5)]).start().after(scored(1))
    )
    harness.controller.request_stop("SIGTERM")
    assert harness.step() == []
    harness.step(*harness.end("stopped", 3, "w0", "w1"), report("w0", 3), report("w1", 3))
    harness.step(Published((0, 3)))
    harness.step(collected(3))
    harness.step()
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.STOPPED)
    assert harness.controller.ended_by == ""


@BOTH
def test_a_run_that_finished_was_ended_by_no_callback(is_sync):
    harness = ControllerHarness(is_sync=is_sync, callbacks=[StopAtAccuracy(0.5)]).start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.step(scored(9), report("w0", 9), report("w1", 9))
    harness.step(collected(9))
    harness.step()
    assert (harness.state, harness.controller.ended_by) == (State.DONE, "")


def test_a_worker_lost_while_the_run_ends_causes_no_new_generation():
    harness = ControllerHarness((1, 2), callbacks=[StopAtAccuracy(0.5)]).start().after(scored(1))
    harness.step(Lost("w1", "the actor died"))
    calls = harness.step(*harness.end("broken", 4, "w0"), Published((0, 4)))
    assert calls + harness.steps(2) == [("evaluate", 4), ("collect", 4, ("w0",))]
    assert harness.state is State.FINISHING
    harness.step(collected(4, "w0"), scored(4), report("w0", 4))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.FINISHED)
    assert harness.controller.ended_because == "reached accuracy 0.5000"


def test_an_object_that_is_no_callback_is_refused_at_once():
    with pytest.raises(
        ConfigError, match=r"callbacks must be objects .* got RecordingCallback; derive it from"
    ):
        Trainer(callbacks=[RecordingCallback])
    with pytest.raises(ConfigError, match="got function"):
        Trainer(callbacks=[lambda score: True])


def test_callbacks_are_a_list_without_coroutines():
    class Waits(raydl.Callback):
        async def evaluated(self, evaluated):
            return None

    with pytest.raises(
        ConfigError, match="callbacks must be a list, got a RecordingCallback; put it in brac"
    ):
        Trainer(callbacks=RecordingCallback())
    with pytest.raises(
        ConfigError, match="callbacks must not have async methods, got Waits; remove"
    ):
        Trainer(callbacks=[Waits()])


def test_a_callback_that_changes_its_metrics_changes_nothing_else():
    class Tidies(RecordingCallback):
        def evaluated(self, evaluated):
            super().evaluated(evaluated)
            evaluated.metrics.clear()

    first, second = Tidies(), RecordingCallback()
    harness = ControllerHarness(callbacks=[first, second]).start().after(Published((0, 1)))
    harness.step(accuracy(0.5))
    assert second.scores[0].metrics == harness.recorder.scores[0].metrics == {"accuracy": 0.5}


def test_a_callback_that_exits_is_logged_as_a_callback_and_not_as_a_signal():
    class Exits(RecordingCallback):
        def evaluated(self, evaluated):
            sys.exit("good enough")

    harness = ControllerHarness(callbacks=[Exits()]).start()
    with pytest.raises(
        RaydlError, match=r"Exits called sys.exit\('good enough'\); return a reason instead"
    ):
        harness.step(accuracy(0.5))


@BOTH
def test_a_signal_while_the_last_center_is_scored_counts(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(
        *harness.end("finished", 9, "w0", "w1"), Published((0, 9)), report("w0", 9), report("w1", 9)
    )
    harness.step(collected(9, "w0", "w1"))
    harness.step()
    assert harness.state is State.FINISHING
    harness.controller.request_stop("SIGTERM")
    harness.step()
    assert harness.state is State.DONE
    assert harness.controller.outcome is Outcome.FINISHED
    assert harness.log_lines[-1] == "SIGTERM: the run ends without a score of its last center"


def test_without_callbacks_the_end_is_not_requested():
    listeners = Listeners()
    listeners.note_score(accuracy(1.0))
    assert (listeners.ended_by, listeners.ended_because) == ("", "")


# whole runs in this process


class Scripted(Classification):
    """A task with given scores on the test set."""

    def __init__(self, *scores):
        super().__init__("mlp")
        self.scores = list(scores)

    def metrics(self, model, batch):
        num_samples = len(batch[1])
        values = {**super().metrics(model, batch)}
        is_tried = num_samples <= 2  # before the run begins
        score = 0.0 if is_tried else self.scores.pop(0)
        values["accuracy"] = torch.tensor(score * num_samples)
        return values


def trainer(run_dir, *scores, callbacks=(), resume=False, epochs=3, evaluation=None, **settings):
    return Trainer(
        Scripted(*scores) if scores else "mlp",
        "synthetic:96",
        method=MethodConfig(period=3),  # an exchange at the end of each epoch
        training=TrainingConfig(epochs=epochs, batch_size=32, **settings),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(run_dir), progress="none", resume=resume),
        checkpoint=CheckpointConfig(every_s=None, every_epochs=1, num_to_keep=9, keep_best=True),
        evaluation=evaluation or EvaluationConfig(),
        callbacks=callbacks,
    )


def test_the_best_of_a_run_survives_its_resumption_and_is_the_center_of_its_round(tmp_path):
    run = tmp_path / "run"
    result = trainer(run, 0.25, 0.75, 0.5).fit()
    assert [e["accuracy"] for e in result.metrics["evaluations"]] == [0.25, 0.75, 0.5]
    best = result.metrics["best"]
    assert best == result.metrics["evaluations"][1]
    of_round = load_file(run / f"checkpoints/round-{best['round']:08d}/center.safetensors")
    kept = load_file(run / FILE)
    assert of_round.keys() == kept.keys()
    assert all(torch.equal(of_round[key], kept[key]) for key in kept)
    written = (run / FILE).read_bytes()
    result = trainer(run, 0.7, 0.1, resume=True, epochs=5).fit()
    assert result.metrics["best"] == best
    assert (run / FILE).read_bytes() == written
    result = trainer(run, 1.0, resume=True, epochs=6).fit()
    assert result.metrics["best"] == result.metrics["evaluations"][-1]


class Dies(RecordingCallback):
    """Raises KeyboardInterrupt at the third score, as if the process ended."""

    def evaluated(self, evaluated):
        super().evaluated(evaluated)
        if len(self.scores) == 3:
            raise KeyboardInterrupt


def test_the_best_of_a_start_that_died_before_its_first_checkpoint_is_not_forgotten(tmp_path):
    run = tmp_path / "run"
    died = trainer(run, 0.25, 0.75, 0.5, callbacks=[Dies()])
    rarely = dataclasses.replace(died.config.checkpoint, every_epochs=None, every_s=600.0)
    died.config = dataclasses.replace(died.config, checkpoint=rarely)
    with pytest.raises(KeyboardInterrupt):
        died.fit()
    assert not list(run.glob("checkpoints/round-*"))
    written = (run / FILE).read_bytes()
    result = trainer(run, 0.1, 0.2, 0.15, resume=True).fit()
    assert result.metrics["best"]["accuracy"] == 0.75
    assert (run / FILE).read_bytes() == written


def test_a_users_callback_receives_each_evaluation_once_and_the_end(tmp_path):
    callback = RecordingCallback()
    result = trainer(tmp_path / "run", callbacks=[callback]).fit()
    evaluations = [{**e.progress.of_score(), **e.metrics} for e in callback.scores]
    assert evaluations == result.metrics["evaluations"]
    assert [e.progress.epoch for e in callback.scores] == [1, 2, 3]
    assert callback.figures == [result.metrics]


def test_a_custom_callback_ends_the_run_which_can_be_resumed(tmp_path):
    run = tmp_path / "run"
    result = trainer(run, callbacks=[RecordingCallback("enough")], epochs=50).fit()
    assert (result.stopped_by, result.metrics["ended_because"]) == ("", "enough")
    assert result.metrics["ended_by"] == f"{__name__}:RecordingCallback"
    assert read_status(str(run)).state == "finished: enough"
    assert (run / "center.safetensors").exists()
    before = result.metrics["samples"]
    assert before < 50 * 96
    result = trainer(run, callbacks=[RecordingCallback("enough")], epochs=50, resume=True).fit()
    assert before < result.metrics["samples"] < 50 * 96


class Broken(RecordingCallback):
    """Raises at the second score."""

    def evaluated(self, evaluated):
        super().evaluated(evaluated)
        if len(self.scores) == 2:
            raise ZeroDivisionError("in the user's own line")


def test_an_exception_in_a_callback_ends_the_run_with_its_own_traceback(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(LocalWorkerGroup, "close", lambda self: closed.append(True))
    broken = Broken()
    with pytest.raises(ZeroDivisionError, match="own line") as caught:
        trainer(tmp_path / "run", callbacks=[broken], epochs=50).fit()
    assert caught.traceback[-1].path.name == "test_callbacks.py"
    assert closed == [True]
    assert broken.figures == []
    assert read_status(str(tmp_path / "run")).state.startswith("failed: ZeroDivisionError")


def test_patience_ends_a_run_that_does_not_improve(tmp_path):
    scores = [0.5, 0.6, 0.6, 0.55, *[0.1] * 9]
    result = trainer(tmp_path / "run", *scores, epochs=50, patience=2).fit()
    assert result.metrics["ended_by"] == "training.patience 2"
    assert result.metrics["ended_because"].startswith("no better accuracy than 0.6000 in the last")
    assert 4 <= len(result.metrics["evaluations"]) <= 6
    assert result.metrics["best"]["accuracy"] == pytest.approx(0.6)


def test_stop_at_accuracy_needs_a_task_that_measures_accuracy(tmp_path):
    class LossAlone(Classification):
        def metrics(self, model, batch):
            return {"loss": super().metrics(model, batch)["loss"]}

    refused = trainer(tmp_path / "run", stop_at_accuracy=0.5)
    refused.task = LossAlone("mlp")
    with pytest.raises(ConfigError, match=r"needs a task that measures accuracy, .* measures loss"):
        refused.fit()
    assert not (tmp_path / "run").exists()


class F1(Classification):
    """Classification that also measures F1 of class 0, which follows from the means of others."""

    def metrics(self, model, batch):
        inputs, labels = batch
        predicted = model(inputs).argmax(1)
        hits = ((predicted == 0) & (labels == 0)).sum()
        both = (predicted == 0).sum() + (labels == 0).sum()
        return {**super().metrics(model, batch), "hits": hits, "both": both}

    def derived(self, means):
        return {"f1": 2 * means["hits"] / max(means["both"], 1e-9)}


def by_metric(folder, metric):
    run = trainer(folder, evaluation=EvaluationConfig(metric=metric, mode="max"))
    run.task = F1("mlp")
    return run


def test_the_best_center_of_a_run_is_that_of_a_metric_of_the_users_task(tmp_path):
    metrics = by_metric(tmp_path / "run", "f1").fit().metrics
    assert metrics["best"]["f1"] == max(one["f1"] for one in metrics["evaluations"])


def test_derived_metrics_may_be_tensors(tmp_path):
    class WithTensors(F1):
        def derived(self, means):
            return {"f1": torch.tensor(super().derived(means)["f1"])}

    run = by_metric(tmp_path / "run", "f1")
    run.task = WithTensors("mlp")
    metrics = run.fit().metrics
    assert all(type(one["f1"]) is float for one in metrics["evaluations"])
    assert (tmp_path / "run/result.json").exists()


def test_a_derived_metric_that_is_no_number_is_refused_before_the_run(tmp_path):
    class WithCurve(F1):
        def derived(self, means):
            return {"f1": torch.zeros(3)}

    run = by_metric(tmp_path / "run", "f1")
    run.task = WithCurve("mlp")
    rule = r"the derived metric f1 must be one number, but it has shape \[3\]"
    with pytest.raises(ShapeError, match=rule):
        run.fit()


def test_a_metric_that_the_task_does_not_measure_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation.metric has no 'f2'; did you mean f1\?"):
        by_metric(tmp_path / "run", "f2").fit()
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_continues_the_count_of_cuts(tmp_path):
    def cuts(*scores, **more):
        run = trainer(tmp_path / "run", *scores, **more)
        plateau = OptimizerConfig(lr_schedule="plateau", patience=0, warmup=0.0)
        run.config = dataclasses.replace(run.config, optimizer=plateau)
        run.fit()
        return newest_cuts(tmp_path / "run")

    assert cuts(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, epochs=6) == 2
    assert cuts(0.7, 0.6, 0.8, 0.9, 0.9, epochs=10, resume=True) == 3


def newest_cuts(run):
    checkpoint, _ = CheckpointStore(Storage(str(run)), keep=9).read()
    return checkpoint.state["num_cuts"]


LOCAL = ["--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:960"]


def train(run, *options):
    return cli.main(["train", *LOCAL, "--epochs", "60", "--run-dir", str(run), *options])


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_run_that_reaches_its_accuracy_reports_success(tmp_path, capsys, method):
    run = tmp_path / "run"
    options = ["--method", method, "--checkpoint.keep-best"]
    assert train(run, *options, "--stop-at-accuracy", "0.9") == 0
    text = capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert result["samples"] < 60 * 960
    assert (result["stopped_by"], result["ended_by"]) == ("", "training.stop_at_accuracy 0.9")
    assert result["ended_because"].startswith("reached accuracy ")
    assert f"  ended:        {result['ended_because']}\n" in text
    assert f"in {run}/best.safetensors\n" in text
    assert score_run(str(run), best=True)["accuracy"] == result["best"]["accuracy"] >= 0.9
    assert cli.main(["report", str(run)]) == 0
    pages = "".join(p.read_text() for p in run.glob("*.html"))
    assert "Best center accuracy" in pages
    assert result["ended_because"] in pages
    capsys.readouterr()
    assert train(run, *options, "--stop-at-accuracy", "0.9", "--resume") == 2
    sentence = f"the run is complete: {result['ended_because']}; change training.stop_at_accuracy"
    assert sentence in capsys.readouterr().err
    assert train(run, *options, "--epochs", "8", "--resume") == 0
    assert json.loads((run / "result.json").read_text())["samples"] == 8 * 960


def test_evaluate_best_without_keep_best_is_refused(tmp_path, capsys):
    assert train(tmp_path / "run", "--epochs", "1") == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["best"] is None
    assert cli.main(["evaluate", str(tmp_path / "run"), "--best"]) == 2
    assert "train with --checkpoint.keep-best" in capsys.readouterr().err
