"""Code that a run's folder names runs only with the user's consent."""

import dataclasses
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from repository import ROOT

from raydl import cli
from raydl.cli import runs
from raydl.config import RunConfig, TrainConfig, TrainingConfig
from raydl.errors import ConfigError, RaydlError, UntrustedCodeError
from raydl.run.evaluate import code_named, score_run
from raydl.run.folder import RunFolder
from raydl.tools.comparison.settings import Comparison, plan
from raydl.tools.runs import load_complete

pytestmark = pytest.mark.processes

SPY = """
import pathlib
pathlib.Path({seen!r}).write_text("imported")
import torch
from raydl.tasks import Classification

def net(shape, num_classes):
    inputs = shape[0] * shape[1] * shape[2]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, num_classes))

class Task(Classification):
    def __init__(self):
        super().__init__(net)
"""
BOUND_S = 60


class FolderWithCode:
    """A run's folder that names code which writes a file as soon as it is imported."""

    def __init__(self, tmp_path, name):
        self.run, self.seen = tmp_path / "run", tmp_path / "seen"
        self.module = name
        (tmp_path / f"{name}.py").write_text(SPY.format(seen=str(self.seen)))

    def set_names(self, **settings):
        """Change names in ``config.json``, as anyone can who may write to the folder."""
        path = self.run / "config.json"
        values = json.loads(path.read_text())
        for setting, value in settings.items():
            group, _, name = setting.partition("__")
            if name:
                values["config"][group][name] = value
            else:
                values["config"][group] = value
        path.write_text(json.dumps(values))

    @property
    def was_imported(self):
        return self.seen.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of the model ``spy:net``."""
    path = tmp_path_factory.mktemp("trained")
    made = FolderWithCode(path, "spy")
    options = ["--model", "spy:net", "--workers", "0", "--epochs", "1", "--run-dir", str(made.run)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", [*sys.path])
        assert cli.main(["train", *options, "--run.progress", "none", "--batch-size", "64"]) == 0
    assert made.was_imported  # the user's command named it
    del sys.modules["spy"]
    return made.run


@pytest.fixture
def folder(trained, tmp_path, monkeypatch, request):
    """A copy of the run with the model ``NAME:net``, whose module is not imported yet."""
    name = f"spy_{abs(hash(request.node.name))}"
    made = FolderWithCode(tmp_path, name)
    shutil.copytree(trained, made.run)
    made.set_names(model=f"{name}:net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return made


def test_evaluate_refuses_the_model_of_a_folder_before_it_is_imported(folder, capsys):
    capsys.readouterr()
    assert cli.main(["evaluate", "run"]) == 2
    assert not folder.was_imported
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: run/config.json names code that is not raydl's: model '{folder.module}:net'; "
        f"this command would import and run it: add --trust (in Python trust=True) if you trust "
        f"everyone who can write to the run's folder\n"
    )


def test_with_trust_the_run_of_a_foreign_model_is_evaluated(folder, capsys):
    capsys.readouterr()
    assert cli.main(["evaluate", "run", "--trust"]) == 0
    assert folder.was_imported
    result = json.loads((folder.run / "result.json").read_text())
    assert json.loads(capsys.readouterr().out)["accuracy"] == result["center_accuracy"]


def test_a_task_of_the_folder_is_refused_like_a_model(folder, capsys):
    folder.set_names(task=f"{folder.module}:Task", model="mlp")
    assert cli.main(["evaluate", "run"]) == 2
    assert not folder.was_imported
    assert f"task '{folder.module}:Task'" in capsys.readouterr().err
    assert cli.main(["evaluate", "run", "--trust"]) == 0
    assert folder.was_imported


def test_score_run_refuses_foreign_code_unless_it_is_trusted(folder):
    with pytest.raises(UntrustedCodeError) as refused:
        score_run("run")
    assert isinstance(refused.value, RaydlError)
    assert refused.value.names == (("model", f"{folder.module}:net"),)
    assert not folder.was_imported
    errors = []
    with pytest.raises(UntrustedCodeError):
        score_run("run", trust=lambda error: bool(errors.append(error)))
    assert [error.names for error in errors] == [refused.value.names]
    assert not folder.was_imported
    assert "accuracy" in score_run("run", trust=True)
    assert folder.was_imported


def test_the_code_that_the_user_agreed_to_runs_even_if_the_folder_changes_meanwhile(
    folder, tmp_path
):
    other = FolderWithCode(tmp_path, f"{folder.module}_other")
    other.seen = folder.seen

    def change_and_agree(error):
        assert error.names == (("model", f"{folder.module}:net"),)
        folder.set_names(model=f"{other.module}:net")
        return True

    assert "accuracy" in score_run("run", trust=change_and_agree)
    assert folder.module in sys.modules
    assert other.module not in sys.modules


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()),
        ({"model": "gpt-nano"}, ()),
        ({"model": "torchvision:resnet18"}, ()),
        ({"model": "torchvision.models:resnet18"}, (("model", "torchvision.models:resnet18"),)),
        ({"model": "subprocess:check_output"}, (("model", "subprocess:check_output"),)),
        ({"model": "raydl.cli:main"}, (("model", "raydl.cli:main"),)),
        ({"model": ":net"}, (("model", ":net"),)),
        ({"task": "raydl.tasks:Classification", "model": "net"}, ()),
        ({"task": "raydl.tasks:LanguageModel", "model": "os:abort"}, (("model", "os:abort"),)),
        ({"task": "raydl.tasks:ModelAndLoss", "model": "net"}, ()),
        ({"task": "mine:Task", "model": "os:abort"}, (("task", "mine:Task"),)),
        ({"task": "raydl.tasks:evaluate"}, (("task", "raydl.tasks:evaluate"),)),
        ({"task": ""}, (("task", ""),)),
    ],
)
def test_all_code_but_raydls_own_needs_trust(settings, names):
    assert code_named(TrainConfig(**settings)) == names


def test_with_a_task_of_raydl_nothing_is_imported_from_the_current_folder(folder, monkeypatch):
    folder.set_names(task="raydl.tasks:Classification", model="net")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    with pytest.raises(RaydlError, match="cannot be made again from the names Classification and"):
        score_run("run")
    assert os.getcwd() not in sys.path


def test_a_run_with_code_of_raydl_alone_needs_no_trust(tmp_path, capsys):
    run = str(tmp_path / "run")
    options = ["--model", "mlp", "--workers", "0", "--epochs", "1", "--run-dir", run]
    assert cli.main(["train", *options, "--run.progress", "none", "--batch-size", "64"]) == 0
    assert cli.main(["evaluate", run]) == 0


# the other commands


def resume(folder, *more):
    options = ["--workers", "0", "--epochs", "2", "--run-dir", "run", "--batch-size", "64"]
    return cli.main(["train", *options, "--run.progress", "none", "--resume", *more])


def test_a_resumed_run_imports_only_code_that_the_command_line_names(folder, capsys):
    assert resume(folder, "--model", "mlp") == 2
    assert "model is mlp but the run began with" in capsys.readouterr().err
    folder.set_names(model="mlp", task=f"{folder.module}:Task")
    assert resume(folder, "--model", "mlp") == 2  # the checkpoint is of another model
    folder.set_names(method__name=f"{folder.module}:net", optimizer__name=f"{folder.module}:net")
    assert resume(folder, "--model", "mlp") == 2
    assert not folder.was_imported


def test_a_resumed_run_whose_code_the_user_names_needs_no_trust(folder):
    assert resume(folder, "--model", f"{folder.module}:net") == 0
    assert folder.was_imported


@pytest.mark.parametrize(
    ("command", "exit_status"), [("status", 0), ("check", 0), ("report", 0), ("remove", 2)]
)
def test_no_other_command_imports_what_a_folder_names(command, exit_status, folder, capsys):
    spy = f"{folder.module}:net"
    folder.set_names(task=spy, method__name=spy, optimizer__name=spy, run__fault_plan=spy)
    arguments = ["w0"] if command == "remove" else []  # of a run that has ended
    assert cli.main([command, "run", *arguments]) == exit_status
    assert not folder.was_imported


def test_a_comparison_that_reads_a_complete_run_imports_nothing(folder, tmp_path):
    base = TrainConfig(model="mlp", training=TrainingConfig(epochs=1))
    (run,) = plan(Comparison(methods="sync-sgd", seeds=1, base=base), tmp_path / "out")
    config = dataclasses.replace(run.config, model=f"{folder.module}:net")
    own = RunFolder(config)
    with own.held(resume=False):
        own.write_config(config)
        own.write_result({"evaluations": [], "time_parts": {}, "stopped_by": ""})
    with pytest.raises(ConfigError, match=r"has model spy_\w+:net instead of mlp"):
        load_complete(run)
    assert not folder.was_imported


# the question at a terminal


class Terminal:
    """A pseudo-terminal with a process at one end and the test at the other."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        self.shown = ""

    def read_until(self, text):
        until = time.monotonic() + BOUND_S
        while text not in self.shown:
            assert time.monotonic() < until, self.shown
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 4096).decode(errors="replace")

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    opened = Terminal()
    yield opened
    opened.close()


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 2)])
def test_at_a_terminal_the_command_asks_and_only_a_yes_runs_the_code(
    folder, terminal, answer, status
):
    process = subprocess.Popen(
        [sys.executable, "-m", "raydl", "evaluate", "run"],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )
    try:
        terminal.read_until("run it? [y/N] ")
        assert not folder.was_imported
        assert f"run/config.json names code that is not raydl's: model '{folder.module}:net'" in (
            terminal.shown
        )
        terminal.type(answer)
        terminal.read_until('"accuracy"' if status == 0 else "add --trust")
        assert process.wait(timeout=BOUND_S) == status
    finally:
        process.kill()
        process.wait()
    assert folder.was_imported == (status == 0)


def ask_at(terminal, name, *, missing=None):
    """Ask in this process at the terminal; ``missing`` names a stream that is no terminal."""
    error = UntrustedCodeError("run/config.json", (("model", name),))
    with (
        open(os.dup(terminal.slave)) as stdin,
        open(os.dup(terminal.slave), "w", buffering=1) as stdout,
        open(os.devnull, "r+") as null,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", null if missing == "stdin" else stdin)
        patch.setattr(sys, "stdout", null if missing == "stdout" else stdout)
        return runs.ask_for_trust(error)


@pytest.mark.parametrize(("answer", "is_yes"), [("y\n", True), ("n\n", False), ("\x04", False)])
def test_only_a_yes_gives_consent(terminal, answer, is_yes):
    terminal.type(answer)
    assert ask_at(terminal, "a:b") is is_yes


def test_no_answer_is_a_refusal(terminal, monkeypatch):
    monkeypatch.setattr(runs, "_ANSWER_S", 0.2)
    assert ask_at(terminal, "a:b") is False
    terminal.read_until("no answer in")


def test_control_characters_of_a_name_are_escaped(terminal):
    terminal.type("n\n")
    assert ask_at(terminal, "os:abort\x1b[2K\n\rlenet") is False
    terminal.read_until("run it?")
    assert r"model 'os:abort\x1b[2K\n\rlenet'" in terminal.shown


@pytest.mark.parametrize("missing", ["stdin", "stdout"])
def test_without_a_terminal_at_both_ends_the_command_does_not_ask(terminal, missing):
    terminal.type("y\n")
    assert ask_at(terminal, "a:b", missing=missing) is False
    assert ask_at(terminal, "a:b") is True  # the first call did not read the answer


def test_a_run_folder_that_config_json_names_is_ignored(folder, tmp_path):
    """An evaluation writes no file, neither in the folder nor where its config.json points."""
    folder.set_names(model="mlp", run={**vars(RunConfig()), "run_dir": str(tmp_path / "elsewhere")})
    before = sorted(folder.run.rglob("*"))
    with pytest.raises(RaydlError, match="does not fit"):
        score_run("run")
    assert sorted(folder.run.rglob("*")) == before
    assert not (tmp_path / "elsewhere").exists()
