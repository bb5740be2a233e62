"""A resubmitted job resumes its run, or begins it."""

import json
import shutil

import pytest
from old_runs import age_event_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydl import cli
from raydl.cli import resume_job
from raydl.run import trainer
from raydl.run.folder import RunFolder
from raydl.run.lock import held
from raydl.run.result import Result
from raydl.storage import Storage


def train_options(run_dir):
    return [
        "--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:96",
        "--epochs", "2", "--run-dir", str(run_dir),
    ]  # fmt: skip


def test_a_resubmitted_run_resumes_from_its_checkpoint(tmp_path, capsys):
    options = train_options(tmp_path / "run")
    assert cli.main(["train", *options, "--epochs", "1"]) == 0
    assert resume_job.resume([*options, "--resume"]) == 0
    assert "(192 samples" not in capsys.readouterr().out.splitlines()[0]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_a_run_that_was_complete_when_its_driver_was_lost_ends_well(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert cli.main(["train", *train_options(run)]) == 0
    before = (run / "result.json").read_bytes()
    capsys.readouterr()
    assert resume_job.resume(train_options(run)) == 0
    assert capsys.readouterr().out == f"the run is complete: {run}\n"
    assert (run / "result.json").read_bytes() == before
    (run / "center.safetensors").unlink()  # the driver was lost before it wrote all files
    assert resume_job.resume(train_options(run)) == 0
    assert (run / "center.safetensors").exists()


def test_a_longer_run_that_was_complete_when_its_driver_was_lost_ends_well(
    tmp_path, capsys, monkeypatch
):
    run, longer = tmp_path / "run", [*train_options(tmp_path / "run"), "--resume"]
    assert cli.main(["train", *train_options(run), "--epochs", "1"]) == 0
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert resume_job.resume(longer) == 0
    capsys.readouterr()
    assert resume_job.resume(longer) == 0
    assert capsys.readouterr().out == f"the run is complete: {run}\n"
    monkeypatch.setenv("RAYDL_SUBMISSION", "another one, which has nothing to do")
    assert resume_job.resume(longer) == 2


def leave_lost_attempt(run, monkeypatch, submission):
    """Leave the folder of an attempt that was lost before its first checkpoint."""
    monkeypatch.setenv("RAYDL_SUBMISSION", submission)
    assert cli.main(["train", *train_options(run)]) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    age_event_file(run)


def test_a_run_that_was_lost_before_it_wrote_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert resume_job.resume(train_options(tmp_path / "run")) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["submission"] == "ours"


def test_a_run_that_was_lost_before_its_first_checkpoint_begins_anew(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    leave_lost_attempt(run, monkeypatch, "ours")
    (run / "notes.txt").write_text("mine")
    assert resume_job.resume([*train_options(run), "--run.progress", "plain"]) == 0
    assert capsys.readouterr().out.count(f"no checkpoint yet: the run starts again in {run}") == 1
    assert (run / "result.json").exists()
    assert (run / "notes.txt").read_text() == "mine"
    events = EventAccumulator(str(run)).Reload()
    for tag in events.Tags()["scalars"]:
        steps = [e.step for e in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag


@pytest.mark.parametrize("whose", ["another submission", "a stranger", "nobody"])
def test_a_folder_of_another_run_is_refused_and_stays_unchanged(
    tmp_path, capsys, monkeypatch, whose
):
    run = tmp_path / "run"
    if whose == "another submission":
        leave_lost_attempt(run, monkeypatch, "theirs")
    else:
        run.mkdir()
        (run / "config.json").write_text("{}" if whose == "a stranger" else "no JSON")
    (run / "notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert resume_job.resume(train_options(run)) == 2
    assert "already holds a run; add --resume to continue it, or choose" in capsys.readouterr().err
    after = {p: p.read_bytes() for p in before}
    assert {p.name: d for p, d in after.items() if p.name != "driver.lock"} == {
        p.name: d for p, d in before.items() if p.name != "driver.lock"
    }


def test_the_folder_of_a_live_driver_is_refused(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    leave_lost_attempt(run, monkeypatch, "ours")
    monkeypatch.setattr(resume_job, "LOCK_WAIT_S", 0.0)
    with held(Storage(str(run)), "run.run_dir"):
        assert resume_job.resume(train_options(run)) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_resume_without_a_run_fails_after_a_resubmission_too(tmp_path, capsys):
    assert resume_job.resume([*train_options(tmp_path / "run"), "--resume"]) == 2
    assert "no run is there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_config_of_raydl_and_a_run_that_has_not_ended(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    leave_lost_attempt(run, monkeypatch, "ours")
    (run / "result.json").write_text("{}")
    assert cli.main(["train", *train_options(run), "--resume"]) == 2
    assert "there is none to resume from" in capsys.readouterr().err
    (run / "config.json").write_text("[]")
    assert cli.main(["train", *train_options(run), "--resume"]) == 2
    assert "its config.json is not of raydl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "place"),
    [("s3://b/runs/a?region=eu", "runs/a"), ("/shared/a", "/shared/a"), ("runs/a", "runs/a")],
)
def test_a_stopped_run_is_resumed_by_its_folder_and_not_a_uri(capsys, monkeypatch, path, place):
    result = Result({"samples": 1}, path, None, "SIGTERM")
    monkeypatch.setattr(trainer.Trainer, "fit", lambda self: result)
    assert cli.main(["train"]) == 143
    assert f"the same command with --run-dir {place} --resume\n" in capsys.readouterr().out


def test_a_storage_that_fails_at_a_second_attempt_is_an_error_with_its_reason(
    tmp_path, capsys, monkeypatch
):
    def fail(self):
        raise OSError("the disk is gone")

    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    monkeypatch.setattr(RunFolder, "begun_by", fail)
    assert resume_job.resume(train_options(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error == f"error: checkpoint {tmp_path}/run: cannot be read: the disk is gone\n"
    assert resume_job.resume(["--run-dir", "s3://b/a"]) == 2
    assert capsys.readouterr().err.startswith("error: run.run_dir must be a folder, got s3://b/a; ")
