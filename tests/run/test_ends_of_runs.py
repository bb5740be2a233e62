"""A run leaves its result, whatever stands in the way of its last files."""

import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from disks import fill
from ensembles import linear
from recorders import FakeStore as Store
from recorders import collected_round as collected
from recorders import make_recorder as make
from safetensors.torch import load_file

import raydl
from raydl.checkpoint import writer as checkpoint_writer
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.elastic import controller
from raydl.elastic.run_state import State
from raydl.errors import CheckpointError, ConfigError
from raydl.storage import Storage


def trainer(folder, *, steps=24, resume=False, **more):
    return raydl.Trainer(
        "mlp",
        "digits",
        training=raydl.TrainingConfig(steps=steps),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
        **more,
    )


def sentences(folder):
    return json.loads((folder / "status.json").read_text())["events"]


# the last files, which a full disk refuses


class Trained(Store):
    """A store that fails so many times before it takes the center, and the checkpoint."""

    def __init__(self, *, center=0, checkpoint=0):
        super().__init__()
        self.left = {"center": center, "checkpoint": checkpoint}

    def write_trained(self, center, round):
        self._write("center")

    def write(self, checkpoint):
        self._write("checkpoint")

    def _write(self, what):
        self.left[what] -= 1
        if self.left[what] >= 0:
            raise CheckpointError(f"runs/x/{what}", "could not be written: disk full")
        self.written.append(what)


@pytest.fixture
def soon(monkeypatch):
    """Failed writes are retried often, and for half a second."""
    monkeypatch.setattr(checkpoint_writer, "_RETRY_S", 0.5)
    monkeypatch.setattr(checkpoint_writer, "_RETRY_EVERY_S", 0.01)


def last(round):
    checkpoint = collected(round)
    return dataclasses.replace(checkpoint, is_last=True)


def test_the_trained_weights_are_written_before_the_last_checkpoint(soon):
    store = Trained()
    recorder, _ = make(store)
    recorder.checkpoint(last(7))
    recorder.close()
    assert store.written == ["center", "checkpoint"]


def test_the_last_files_are_retried_until_there_is_space_and_that_is_logged(soon):
    store = Trained(center=3, checkpoint=2)
    recorder, memory = make(store)
    recorder.checkpoint(last(7))
    recorder.checkpoints.wait()
    recorder.show(State.FINISHING, {})
    recorder.close()
    assert store.written == ["center", "checkpoint"]
    assert memory.sentences == [
        f"checkpoint runs/x/{what}: could not be written: disk full; retrying for 0 s"
        for what in ("center", "checkpoint")
    ]


@pytest.mark.parametrize(
    ("full", "written"), [("center", ["checkpoint"]), ("checkpoint", ["center"])]
)
def test_one_of_the_last_files_that_can_not_be_written_does_not_keep_the_other(soon, full, written):
    store = Trained(**{full: 10**9})
    recorder, _ = make(store)
    recorder.checkpoint(last(7))
    with pytest.raises(CheckpointError, match=f"runs/x/{full}"):
        recorder.close()
    assert store.written == written


class Fills(raydl.Callback):
    """Fills a disk at the first score."""

    def __init__(self, disk, *, free_after_s=None):
        self.disk, self.free_after_s = disk, free_after_s

    def evaluated(self, evaluated):
        if not (self.disk / "filled").exists():
            fill(self.disk)
            if self.free_after_s is not None:
                threading.Timer(self.free_after_s, (self.disk / "filled").unlink).start()

    def ended(self, figures):
        pass


def test_a_run_waits_for_disk_space_at_its_end(small_disk):
    fills = Fills(small_disk, free_after_s=3.0)
    trainer(small_disk / "run", steps=90, callbacks=[fills]).fit()
    assert (small_disk / "run/center.safetensors").exists()
    assert any("retrying for 60 s" in line for line in sentences(small_disk / "run"))
    assert CheckpointStore(Storage(str(small_disk / "run"))).names()


def test_a_run_without_disk_space_is_completed_once_there_is_some(small_disk, soon):
    folder = small_disk / "run"
    with pytest.raises(CheckpointError) as error:
        trainer(folder, steps=90, callbacks=[Fills(small_disk)]).fit()
    advice = "once it can be written, the same command with --resume completes the run"
    assert f"no space left on device; {advice}; the newest center is in " in str(error.value)
    elsewhere = Path(str(error.value).rpartition(" is in ")[2])
    assert load_file(elsewhere)
    shutil.rmtree(elsewhere.parent)
    (small_disk / "filled").unlink()
    result = trainer(folder, steps=90, resume=True).fit()
    assert result.metrics["center_accuracy"] > 0.5
    assert (folder / "center.safetensors").exists()
    assert (folder / "result.json").exists()


def test_the_trained_weights_are_written_if_the_last_checkpoint_was_not_known_as_such(tmp_path):
    """A checkpoint may be voted for just before the end; then it is the last one, too."""
    storage = Storage(str(tmp_path))
    recorder, _ = make(CheckpointStore(storage))
    recorder.checkpoint(last(5))  # a center that has gone on since
    recorder.checkpoint(collected(7))
    recorder.checkpoints.finish()
    recorder.close()
    store = CheckpointStore(storage)
    assert (store.has_trained(7), store.has_trained(5)) == (True, False)


def test_an_abort_ends_all_retries(monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_RETRY_S", 600.0)
    recorder, _ = make(Trained(center=10**9, checkpoint=10**9))
    recorder.checkpoint(last(7))
    began = time.monotonic()
    recorder.checkpoints.abort()
    with pytest.raises(CheckpointError):
        recorder.close()
    assert time.monotonic() - began < 60


# a run that is trained, and has not come to its end


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that is complete."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trainer(folder).fit()
    return folder


@pytest.mark.parametrize("lacks", [["result.json"], ["center.safetensors"],
                                   ["result.json", "center.safetensors"]])  # fmt: skip
def test_a_resumed_run_that_lacks_its_end_alone_gets_it(whole, tmp_path, lacks):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in lacks:
        (folder / name).unlink()
    began = time.monotonic()
    trainer(folder, resume=True).fit()
    assert time.monotonic() - began < 30
    before, after = (json.loads((f / "result.json").read_text()) for f in (whole, folder))
    for figure in ("center_accuracy", "rounds", "samples", "stopped_by", "evaluations"):
        assert after[figure] == before[figure], figure
    assert (folder / "center.safetensors").read_bytes() == (
        whole / "center.safetensors"
    ).read_bytes()
    told = f"the run in {folder} has finished training; its missing files are written"
    assert any(told in line for line in sentences(folder))
    with pytest.raises(ConfigError, match="the run is complete"):
        trainer(folder, resume=True).fit()


def test_a_run_that_is_trained_further_has_no_old_weights(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = (folder / "center.safetensors").read_bytes()
    trainer(folder, steps=48, resume=True).fit()
    (folder / "center.safetensors").write_bytes(before)
    trainer(folder, steps=48, resume=True).fit()
    assert (folder / "center.safetensors").read_bytes() != before


@pytest.mark.parametrize("lacks", ["result.json", "center.safetensors"])
def test_a_run_that_was_good_enough_and_lacks_its_end_trains_no_further(tmp_path, lacks):
    folder = tmp_path / "run"

    def fit(*, resume):
        training = raydl.TrainingConfig(epochs=60, stop_at_accuracy=0.6)
        return raydl.Trainer(
            "mlp",
            "digits",
            training=training,
            scaling=raydl.ScalingConfig(num_workers=0),
            run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
        ).fit()

    first = fit(resume=False).metrics
    assert first["ended_by"]
    (folder / lacks).unlink()
    again = fit(resume=True).metrics
    for figure in ("rounds", "samples", "ended_by", "ended_because", "center_accuracy"):
        assert again[figure] == first[figure], figure
    assert (folder / lacks).exists()
    with pytest.raises(ConfigError, match="the run is complete: "):
        fit(resume=True)


class Hears(raydl.Callback):
    """Notes the rounds of the scores that it hears of."""

    def __init__(self):
        self.rounds = []

    def evaluated(self, evaluated):
        self.rounds.append(evaluated.progress.round)

    def ended(self, figures):
        self.rounds.append("end")


def test_callbacks_receive_a_last_score_after_a_resume(whole, tmp_path, monkeypatch):
    folder, hears = tmp_path / "run", Hears()
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    rounds = json.loads((whole / "result.json").read_text())["rounds"]
    monkeypatch.setattr(Totals, "is_scored", lambda self, round: False)
    trainer(folder, resume=True, callbacks=[hears]).fit()
    assert hears.rounds == [rounds, "end"]


def test_checkpoints_without_manifests_are_not_written_over(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    names = sorted(path.name for path in folder.glob("checkpoints/*"))
    with pytest.raises(CheckpointError) as error:
        trainer(folder, resume=True).fit()
    assert f"holds {', '.join(names)} without manifest.json, so none of them can" in str(
        error.value
    )
    for name in names:
        assert load_file(folder / f"checkpoints/{name}/center.safetensors")


# scores that take their time


class Slow(raydl.Classification):
    """Takes its time over each batch of a score."""

    def __init__(self, seconds):
        super().__init__(linear)
        self.seconds = seconds

    def metrics(self, model, batch):
        if len(batch[0]) > 2:  # not on trial
            time.sleep(self.seconds)
        return super().metrics(model, batch)


SILENCE_S = 12.0
"""Longer than an evaluator needs, on a busy machine, until its first batch."""


def slowly(folder, seconds, monkeypatch):
    monkeypatch.setattr(controller, "_SILENCE_S", SILENCE_S)
    return raydl.Trainer(
        Slow(seconds),
        "digits",
        training=raydl.TrainingConfig(steps=24),
        evaluation=raydl.EvaluationConfig(batch_size=20),  # 18 batches
        scaling=raydl.ScalingConfig(num_workers=1),
        run=raydl.RunConfig(run_dir=str(folder), progress="none"),
    ).fit()


@pytest.mark.cluster
def test_a_last_score_that_takes_longer_than_the_silence_limit_is_awaited(
    cluster, tmp_path, monkeypatch
):
    result = slowly(tmp_path / "run", 1.0, monkeypatch)
    newest = result.metrics["evaluations"][-1]
    assert newest["round"] == result.metrics["rounds"]


@pytest.mark.cluster
def test_an_evaluator_that_falls_silent_costs_the_run_its_score_alone(
    cluster, tmp_path, monkeypatch
):
    result = slowly(tmp_path / "run", 60.0, monkeypatch)
    assert result.metrics["center_accuracy"] is None
    assert (tmp_path / "run/center.safetensors").exists()
    told = f"the evaluator has scored nothing for {SILENCE_S:g} s: the run ends without a score of"
    assert any(told in line for line in sentences(tmp_path / "run"))
