"""A run's name is its folder, its place below the storage path, and its name in trackers."""

import json
from pathlib import Path

import pytest

from raydl import cli
from raydl.cli.options import parse_train
from raydl.config import RunConfig, TrainConfig
from raydl.errors import ConfigError
from raydl.metrics import trackers
from raydl.run.folder import RunFolder, open_run

LOCAL = ["--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:96"]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """The working folder of the commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*options):
    return cli.main(["train", *LOCAL, *options])


def folder_of(**settings):
    return RunFolder(TrainConfig(run=RunConfig(**settings)))


def test_a_name_is_a_folder_in_runs_or_below_the_storage_path():
    plain, kept = folder_of(name="first"), folder_of(name="first", storage_path="/kept")
    assert (plain.path, plain.root) == (Path("runs/first"), "runs/first")
    assert (kept.path, kept.root) == (Path("runs/first"), "/kept/first")


def test_a_name_may_repeat_the_last_part_of_the_folder():
    both = folder_of(name="first", run_dir="/elsewhere/first", storage_path="/kept")
    assert (both.path, both.root) == (Path("/elsewhere/first"), "/kept/first")


def test_a_run_without_a_name_is_named_after_method_model_and_time():
    assert RunConfig().folder is None
    folder = RunFolder(TrainConfig(model="lenet"))
    assert folder.path.name.startswith("sync-easgd-lenet-2")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "-first", ".first", "a\nb", "first\n", "a\x1bb", "a b"]
)
def test_a_name_that_is_no_folder_or_no_part_of_a_uri_is_refused(name):
    with pytest.raises(ConfigError) as error:
        RunConfig(name=name)
    assert str(error.value) == (
        f"run.name must be a name of letters, digits, _ . and - that does not begin with . or -, "
        f"got {name!r}"
    )


def test_a_name_that_contradicts_the_folder_is_refused():
    with pytest.raises(ConfigError, match=r"run\.name must be the last part of run\.run_dir, got"):
        RunConfig(name="first", run_dir="runs/second")


@pytest.mark.parametrize("storage", [[], ["--storage-path", "kept"]])
def test_a_used_name_is_refused_and_resume_continues_its_run(working_folder, capsys, storage):
    kept = working_folder / ("kept" if storage else "runs") / "first"
    assert train("--name", "first", "--epochs", "1", *storage) == 0
    before = (kept / "result.json").read_bytes()
    capsys.readouterr()
    assert train("--name", "first", "--epochs", "2", *storage) == 2
    place = "kept/first" if storage else "runs/first"
    assert capsys.readouterr().err == (
        f"error: run.name: {place} already holds a run; add --resume to continue it, or choose "
        f"another name\n"
    )
    assert (kept / "result.json").read_bytes() == before
    assert train("--name", "first", "--epochs", "2", "--resume", *storage) == 0
    assert json.loads((kept / "result.json").read_text())["samples"] == 192
    assert json.loads((kept / "config.json").read_text())["config"]["run"]["name"] == "first"


def test_a_name_without_a_run_can_not_be_resumed(working_folder, capsys):
    assert train("--name", "frist", "--resume") == 2
    assert "runs/frist: no run is there" in capsys.readouterr().err
    assert not (working_folder / "runs").exists()


def test_commands_find_a_run_by_its_name(capsys):
    assert train("--name", "first", "--epochs", "1") == 0
    capsys.readouterr()
    assert cli.main(["list"]) == 0
    assert "first" in capsys.readouterr().out
    for command in ("status", "logs", "check", "evaluate", "report"):
        assert cli.main([command, "first"]) == 0, command
    assert Path("runs/first/report.html").exists()
    capsys.readouterr()
    assert cli.main(["stop", "first"]) == 2
    assert "has ended (finished): there is nothing to stop" in capsys.readouterr().err


def test_trackers_show_the_name(monkeypatch):
    shown = []

    def tracker(state, run_name, settings):
        shown.append((run_name, settings["run.name"]))
        return trackers.JsonLines(Path("runs/first"))

    monkeypatch.setattr(trackers, "names_of", lambda names: (names,))
    monkeypatch.setattr(trackers, "Mlflow", tracker)
    assert train("--name", "first", "--epochs", "1", "--tracker", "mlflow") == 0
    assert shown == [("first", "first")]


def test_a_folder_of_the_same_name_comes_before_a_run_in_runs(working_folder):
    for folder in ("first", "runs/first"):
        (working_folder / folder).mkdir(parents=True)
    assert open_run("first").root == "first"
    assert open_run("runs/first").root == "runs/first"


def test_the_configuration_of_a_run_starts_another_run_without_its_name():
    assert train("--name", "first", "--epochs", "1") == 0
    assert parse_train(["--config", "runs/first/config.json"]).run.name is None
    Path("run.yaml").write_text("name: second\n")
    assert parse_train(["--config", "run.yaml"]).run.name == "second"


def test_a_stopped_run_is_resumed_by_the_same_command(capsys, monkeypatch):
    from raydl.run import trainer

    run_to_end = trainer.run_to_end

    def stopped(controller, *rest, **settings):
        controller.request_stop("SIGTERM")
        run_to_end(controller, *rest, **settings)

    monkeypatch.setattr(trainer, "run_to_end", stopped)
    assert train("--name", "first", "--epochs", "9") == 143
    assert "the same command with --resume\n" in capsys.readouterr().out
