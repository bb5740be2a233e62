"""A run in one process, ``--workers 0``: it has one worker, and no other machine."""

import dataclasses
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.config import TrainConfig
from raydl.run.trainer import _own_states
from raydl.storage import Storage


class FailsLater(raydl.Classification):
    """A classification whose loss raises an error at its tenth call."""

    num_calls = 0

    def loss(self, model, batch):
        self.num_calls += 1
        if self.num_calls == 10:
            raise ZeroDivisionError("my own mistake")
        return super().loss(model, batch)


def trainer(folder, *callbacks):
    return raydl.Trainer(
        "mlp",
        "synthetic:96",
        training=raydl.TrainingConfig(steps=2, batch_size=8),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(folder), progress="none"),
        callbacks=callbacks,
    )


class Switches(raydl.Callback):
    """Switches to deterministic kernels during a run, as a worker on a GPU does."""

    def evaluated(self, evaluated):
        torch.use_deterministic_algorithms(True)


def test_torchs_switch_for_deterministic_kernels_is_restored(tmp_path):
    try:
        trainer(tmp_path / "run", Switches()).fit()
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_switch_that_no_worker_changes_is_not_set_since_that_imports_torchs_compiler(
    tmp_path, monkeypatch
):
    monkeypatch.delattr(torch, "use_deterministic_algorithms")
    trainer(tmp_path / "run").fit()


@pytest.mark.parametrize("policy", ["auto", "replace"])
def test_the_error_of_the_users_code_is_raised_since_no_other_process_could_go_on(tmp_path, policy):
    trainer = raydl.Trainer(
        FailsLater("mlp"),
        "synthetic:96",
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(epochs=9, batch_size=8),
        elastic=raydl.ElasticConfig(on_worker_error=policy),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        trainer.fit()


class FailsToScore(raydl.Classification):
    """A classification whose metrics raise an error, but not in the check before the run."""

    num_calls = 0

    def metrics(self, model, batch):
        self.num_calls += 1
        if self.num_calls > 1:
            raise ZeroDivisionError("my own mistake")
        return super().metrics(model, batch)


class FailsAtTheEnd(raydl.Callback):
    """A callback that raises an error at the score of the last center."""

    def evaluated(self, evaluated):
        if evaluated.progress.num_samples == 2 * 96:
            raise ZeroDivisionError("my own mistake")


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
@pytest.mark.parametrize(
    ("task", "callbacks", "every_epochs", "is_trained"),
    [
        (FailsToScore, [], 1, False),
        (FailsToScore, [], 9, True),
        (raydl.Classification, [FailsAtTheEnd()], 1, True),
    ],
    ids=["a score", "the last score", "a callback at the last score"],
)
def test_an_error_in_a_score_loses_nothing_that_was_trained(
    tmp_path, method, task, callbacks, every_epochs, is_trained
):
    trainer = raydl.Trainer(
        task("mlp"),
        "synthetic:96",
        method=raydl.MethodConfig(name=method, period=1),
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(epochs=2, batch_size=8),
        evaluation=raydl.EvaluationConfig(every_epochs=every_epochs),
        checkpoint=raydl.CheckpointConfig(every_s=None),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
        callbacks=callbacks,
    )
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        trainer.fit()
    assert CheckpointStore(Storage(str(tmp_path / "run"))).names()
    assert (tmp_path / "run/center.safetensors").exists() == is_trained


class DivergesAtItsEnd(raydl.Classification):
    """A classification whose loss is NaN in one step."""

    num_calls, bad_call = 0, 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.num_calls += model.training
        return loss * float("nan") if self.num_calls == self.bad_call else loss


@pytest.mark.parametrize("limit", [{"epochs": 1}, {"steps": 12}])
@pytest.mark.parametrize("bad_step", [8, 9, 12])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "async-easgd"])
def test_a_run_whose_loss_is_nan_once_ends_also_if_that_was_its_last_step(
    tmp_path, method, bad_step, limit
):
    task = DivergesAtItsEnd("mlp")
    task.bad_call = bad_step + 1  # the first call is that of the check before the run
    result = raydl.Trainer(
        task,
        "synthetic:96",
        method=raydl.MethodConfig(name=method, period=4),
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(batch_size=8, **limit),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    events = json.loads((tmp_path / "run/status.json").read_text())["events"]
    assert any(f"local step {bad_step - 1} of worker w0" in str(event) for event in events)
    if "epochs" in limit:  # the limit of steps counts those that were rolled back, too
        assert result.metrics["samples"] == 96
    assert math.isfinite(result.metrics["center_loss"])
    assert result.metrics["seconds"] > 0.0
    assert all(score["seconds"] > 0.0 for score in result.metrics["evaluations"])


def test_the_one_worker_resumes_the_first_state_whatever_the_id_of_its_worker():
    start = SimpleNamespace(own_states={"w1": "first", "w2": "second"})
    in_process = TrainConfig(scaling=raydl.ScalingConfig(num_workers=0))
    assert _own_states(start, in_process) == {"w0": "first"}
    assert _own_states(SimpleNamespace(own_states={}), in_process) == {}
    two = TrainConfig(scaling=raydl.ScalingConfig(num_workers=2))
    assert _own_states(start, two) == start.own_states


class HangsUp(raydl.Callback):
    """Sends this process a signal at the first score, as often as told."""

    def __init__(self, number, times):
        self.number, self.times = number, times

    def evaluated(self, evaluated):
        for _ in range(self.times):
            signal.raise_signal(self.number)
        self.times = 0


def test_a_terminal_that_closes_stops_a_run_with_a_checkpoint(tmp_path):
    before = signal.getsignal(signal.SIGHUP)
    hangs_up = HangsUp(signal.SIGHUP, 2)  # the kernel sends it, and then the shell
    run = trainer(tmp_path / "run", hangs_up)
    run.config = dataclasses.replace(
        run.config, training=raydl.TrainingConfig(epochs=1000, batch_size=8)
    )
    result = run.fit()
    assert result.stopped_by == "SIGHUP"
    assert CheckpointStore(Storage(str(tmp_path / "run"))).read()[0] is not None
    assert signal.getsignal(signal.SIGHUP) is before
