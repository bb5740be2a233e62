"""A run leaves its result even if its last files can not be written at first."""

import dataclasses
import errno
import json
import shutil
import time
from pathlib import Path

import pytest
from disks import fill
from ensembles import linear
from recorders import FakeStore as Store
from recorders import MemoryWriter
from recorders import collected_round as collected
from recorders import make_recorder as make
from safetensors.torch import load_file

import raydl
from raydl.checkpoint import writer as checkpoint_writer
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.elastic import decide
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


# the last files on a full disk


class FailingStore(Store):
    """A store whose writes of the center and of the checkpoint fail a number of times."""

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
def fast_retries(monkeypatch):
    """Retry failed writes often, for half a second."""
    monkeypatch.setattr(checkpoint_writer, "_RETRY_S", 0.5)
    monkeypatch.setattr(checkpoint_writer, "_RETRY_EVERY_S", 0.01)


def last_checkpoint(round):
    checkpoint = collected(round)
    return dataclasses.replace(checkpoint, is_last=True)


def test_the_trained_weights_are_written_before_the_last_checkpoint(fast_retries):
    store = FailingStore()
    recorder, _ = make(store)
    recorder.checkpoint(last_checkpoint(7))
    recorder.close()
    assert store.written == ["center", "checkpoint"]


def test_the_last_files_are_retried_until_there_is_space_and_that_is_logged(fast_retries):
    store = FailingStore(center=3, checkpoint=2)
    recorder, memory = make(store)
    recorder.checkpoint(last_checkpoint(7))
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
def test_a_last_file_that_can_not_be_written_does_not_prevent_the_other(
    fast_retries, full, written
):
    store = FailingStore(**{full: 10**9})
    recorder, _ = make(store)
    recorder.checkpoint(last_checkpoint(7))
    with pytest.raises(CheckpointError, match=f"runs/x/{full}"):
        recorder.close()
    assert store.written == written


def test_weights_that_could_not_be_written_for_a_minute_are_not_waited_for_again(fast_retries):
    tries = []

    class Noting(FailingStore):
        newest_round = 7  # the checkpoint is written

        def read_center(self):
            return {}, self.newest_round

        def write_trained(self, center, round):
            tries.append(time.monotonic())
            super().write_trained(center, round)

    store = Noting(center=10**9)
    recorder, _ = make(store)
    recorder.checkpoint(last_checkpoint(7))
    recorder.checkpoints.finish()
    with pytest.raises(CheckpointError, match="runs/x/center"):
        recorder.close()
    assert store.written == ["checkpoint"]
    late = [when for when in tries if when > tries[0] + 0.5]
    assert 1 <= len(late) < 5  # one to end the time, one more by finish()


class Fills(raydl.Callback):
    """A callback that fills a disk at the first score."""

    def __init__(self, disk):
        self.disk = disk

    def evaluated(self, evaluated):
        if not (self.disk / "filled").exists():
            fill(self.disk)

    def ended(self, figures):
        pass


def test_a_run_waits_for_disk_space_at_its_end(small_disk, monkeypatch):
    write = CheckpointStore.write_trained

    def write_or_free_the_disk(*arguments):
        try:
            return write(*arguments)
        except CheckpointError:
            (small_disk / "filled").unlink(missing_ok=True)
            raise

    monkeypatch.setattr(CheckpointStore, "write_trained", write_or_free_the_disk)
    trainer(small_disk / "run", steps=90, callbacks=[Fills(small_disk)]).fit()
    assert (small_disk / "run/center.safetensors").exists()
    assert any("retrying for 60 s" in line for line in sentences(small_disk / "run"))
    assert CheckpointStore(Storage(str(small_disk / "run"))).names()


def test_a_run_without_disk_space_is_completed_once_there_is_some(small_disk, fast_retries):
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


def test_the_trained_weights_are_written_if_the_last_checkpoint_was_not_marked_as_last(tmp_path):
    """A checkpoint that was voted for just before the end is also the last one."""
    storage = Storage(str(tmp_path))
    recorder, _ = make(CheckpointStore(storage))
    recorder.checkpoint(last_checkpoint(5))  # the center has been trained further since
    recorder.checkpoint(collected(7))
    recorder.checkpoints.finish()
    recorder.close()
    store = CheckpointStore(storage)
    assert (store.has_trained(7), store.has_trained(5)) == (True, False)


def test_an_abort_ends_all_retries(monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_RETRY_S", 600.0)
    recorder, _ = make(FailingStore(center=10**9, checkpoint=10**9))
    recorder.checkpoint(last_checkpoint(7))
    began = time.monotonic()
    recorder.checkpoints.abort()
    with pytest.raises(CheckpointError):
        recorder.close()
    assert time.monotonic() - began < 60


# a run that has finished training and lacks files of its end


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    """The folder of a complete run."""
    folder = tmp_path_factory.mktemp("runs") / "complete"
    trainer(folder).fit()
    return folder


@pytest.mark.parametrize("missing", [["result.json"], ["center.safetensors"],
                                   ["result.json", "center.safetensors"]])  # fmt: skip
def test_a_resumed_run_that_lacks_only_its_last_files_writes_them(complete_run, tmp_path, missing):
    folder = tmp_path / "run"
    shutil.copytree(complete_run, folder)
    for name in missing:
        (folder / name).unlink()
    began = time.monotonic()
    trainer(folder, resume=True).fit()
    assert time.monotonic() - began < 30
    before, after = (json.loads((f / "result.json").read_text()) for f in (complete_run, folder))
    for figure in ("center_accuracy", "rounds", "samples", "stopped_by", "evaluations"):
        assert after[figure] == before[figure], figure
    assert (folder / "center.safetensors").read_bytes() == (
        complete_run / "center.safetensors"
    ).read_bytes()
    message = f"the run in {folder} has finished training; its missing files are written"
    assert any(message in line for line in sentences(folder))
    assert raydl.Result.from_path(str(folder)).metrics == after
    with pytest.raises(ConfigError, match="the run is complete"):
        trainer(folder, resume=True).fit()


def test_a_run_that_is_trained_further_replaces_its_old_weights(complete_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(complete_run, folder)
    before = (folder / "center.safetensors").read_bytes()
    trainer(folder, steps=48, resume=True).fit()
    (folder / "center.safetensors").write_bytes(before)
    trainer(folder, steps=48, resume=True).fit()
    assert (folder / "center.safetensors").read_bytes() != before


@pytest.mark.parametrize("missing", ["result.json", "center.safetensors"])
def test_a_run_that_reached_its_accuracy_and_lacks_a_last_file_trains_no_further(tmp_path, missing):
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
    (folder / missing).unlink()
    again = fit(resume=True).metrics
    for figure in ("rounds", "samples", "ended_by", "ended_because", "center_accuracy"):
        assert again[figure] == first[figure], figure
    assert (folder / missing).exists()
    with pytest.raises(ConfigError, match="the run is complete: "):
        fit(resume=True)


def test_an_error_before_the_first_record_leaves_no_panel_behind(tmp_path, monkeypatch):
    reporter, closed = MemoryWriter(), []
    monkeypatch.setattr(reporter, "close", lambda: closed.append(True))
    monkeypatch.setattr("raydl.run.trainer.make_reporter", lambda *_, **__: reporter)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("raydl.run.folder.RunFolder.write_config", fail)
    with pytest.raises(OSError, match="No space left"):
        trainer(tmp_path / "run").fit()
    assert closed == [True]


class RoundsCallback(raydl.Callback):
    """A callback that keeps the rounds of its scores."""

    def __init__(self):
        self.rounds = []

    def evaluated(self, evaluated):
        self.rounds.append(evaluated.progress.round)

    def ended(self, figures):
        self.rounds.append("end")


def test_callbacks_receive_a_last_score_after_a_resume(complete_run, tmp_path, monkeypatch):
    folder, callback = tmp_path / "run", RoundsCallback()
    shutil.copytree(complete_run, folder)
    (folder / "result.json").unlink()
    rounds = json.loads((complete_run / "result.json").read_text())["rounds"]
    monkeypatch.setattr(Totals, "is_scored", lambda self, round: False)
    trainer(folder, resume=True, callbacks=[callback]).fit()
    assert callback.rounds == [rounds, "end"]


def test_checkpoints_without_manifests_are_not_overwritten(complete_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(complete_run, folder)
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


# slow scores


class SlowTask(raydl.Classification):
    """A task that sleeps in each batch of a score."""

    def __init__(self, seconds):
        super().__init__(linear)
        self.seconds = seconds

    def metrics(self, model, batch):
        if len(batch[0]) > 2:  # not in the check before the run
            time.sleep(self.seconds)
        return super().metrics(model, batch)


SILENCE_S = 12.0
"""Longer than an evaluator takes to its first batch on a busy machine."""


def train_with_slow_scores(folder, seconds, monkeypatch):
    monkeypatch.setattr(decide, "SILENCE_S", SILENCE_S)
    return raydl.Trainer(
        SlowTask(seconds),
        "digits",
        training=raydl.TrainingConfig(steps=24),
        evaluation=raydl.EvaluationConfig(batch_size=20),  # 18 batches
        scaling=raydl.ScalingConfig(num_workers=1),
        run=raydl.RunConfig(run_dir=str(folder), progress="none"),
    ).fit()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_last_score_that_takes_longer_than_the_silence_limit_is_awaited(
    cluster, tmp_path, monkeypatch
):
    result = train_with_slow_scores(tmp_path / "run", 1.0, monkeypatch)
    newest = result.metrics["evaluations"][-1]
    assert newest["round"] == result.metrics["rounds"]


@pytest.mark.cluster
def test_an_evaluator_that_falls_silent_costs_the_run_only_its_score(
    cluster, tmp_path, monkeypatch
):
    result = train_with_slow_scores(tmp_path / "run", 60.0, monkeypatch)
    assert result.metrics["center_accuracy"] is None
    assert (tmp_path / "run/center.safetensors").exists()
    message = (
        f"the evaluator has scored nothing for {SILENCE_S:g} s: the run ends without a score of"
    )
    assert any(message in line for line in sentences(tmp_path / "run"))
