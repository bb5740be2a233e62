"""The files in jobs/ run at a tiny scale and their loss falls; also as Ray jobs with a token."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from clusters import free_port, free_ports
from processes import (
    command_of,
    environment_of,
    kill_with_descendants,
    parent_of,
    processes_that,
)
from repository import ROOT

from raydl import cli
from raydl.checkpoint.store import CheckpointStore
from raydl.storage import Storage

BOUND_S = 200
TINY = ["--model", "mlp", "--data", "synthetic:256", "--run.progress", "none"]
UNTRAINED_LOSS = math.log(10)


def run_job(name, *options):
    """Run a file of jobs/ in its own process and return its output."""
    command = [sys.executable, str(ROOT / "jobs" / name), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_job_documents_its_command_result_time_and_hardware(root):
    for path in (root / "jobs").glob("*.py"):
        text = path.read_text()
        for label in ("Command:", "Expected:", "Time:", "Hardware:"):
            assert re.search(rf"^{label} +\S", text, flags=re.M), (path.name, label)
        assert f"jobs/{path.name}" in text


@pytest.mark.parametrize("before", [None, "", "/mine"])
def test_a_job_and_the_processes_that_it_starts_import_raydl_from_any_folder(
    before, root, monkeypatch
):
    """Of the driver's path, workers get only the folder of the script and the current folder."""
    for path in (root / "jobs").glob("*.py"):
        [lines] = re.findall(r"^sys\.path.*\nos\.environ.*\n", path.read_text(), flags=re.M)
        monkeypatch.setattr(sys, "path", ["/elsewhere"])
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONPATH", before)
        exec(lines, {"__file__": str(path), "Path": Path, "os": os, "sys": sys})
        assert sys.path == [str(root), "/elsewhere"], path
        expected = [str(root), before] if before else [str(root)]
        assert os.environ["PYTHONPATH"].split(os.pathsep) == expected, path


@pytest.mark.processes
def test_evaluating_a_run_gives_its_final_scores(tmp_path):
    run_job("train.py", *TINY, "--workers", 0, "--epochs", 8, "--run-dir", tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert result["center_loss"] < 0.9 * UNTRAINED_LOSS
    scores = json.loads(run_job("evaluate.py", tmp_path / "run"))
    assert scores["loss"] == pytest.approx(result["center_loss"])
    assert scores["accuracy"] == pytest.approx(result["center_accuracy"])


@pytest.mark.processes
@pytest.mark.slow
def test_weak_scaling_reports_speed_efficiency_and_time_parts(tmp_path):
    out = run_job(
        "weak_scaling.py", *TINY, "--workers", 0, "--steps", 60, "--lr", 0.1, "--out", tmp_path
    )
    assert "100%" in out
    values = json.loads((tmp_path / "weak_scaling.json").read_text())
    [row] = values["rows"]
    assert (row["workers"], row["efficiency"], row["samples"]) == (1, 1.0, 60 * 64)
    assert row["ms_per_step"]["forward_backward"] > 0
    assert row["center_loss"] < 0.9 * UNTRAINED_LOSS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workers", "1,two"], "workers must be numbers as in 1,2,4, got 1,two"),
        (
            ["--epochs", "2"],
            "training.epochs, training.samples, training.seconds and training.bytes cannot be set",
        ),
        (["--name", "x"], "run.name, run.run_dir, run.storage_path and run.resume cannot be set"),
        (["--out", "s3://b/x"], "out must be a folder of this machine, got s3://b/x"),
        (["--patience", "2"], "training.stop_at_accuracy and training.patience cannot be set"),
        (["--workers", "2,3", "--group-size", "2"], "method.group_size must divide"),
    ],
)
def test_wrong_options_of_weak_scaling_give_one_sentence(options, sentence, capsys):
    assert cli.main(["weak-scaling", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


# Ray jobs


def processes_naming(text):
    """Return the ids of all processes whose command line or environment contains a text."""
    others = processes_that(
        lambda pid: any(text in part for part in command_of(pid) + environment_of(pid))
    )
    return [pid for pid in others if pid != os.getpid()]


def until(condition, what=lambda: ""):
    """Wait until a condition returns a true value, and return that value."""
    deadline = time.monotonic() + BOUND_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out; {what()}"
        time.sleep(0.1)
    return value


class Head:
    """A head with dashboard and token, in its own home folder, and a client of it."""

    def __init__(self):
        # Not tmp_path: the paths of the sockets in it would be too long.
        self.home = Path(tempfile.mkdtemp(prefix="raydl-"))
        port, *self.ports = free_ports(4)
        self.address = f"http://127.0.0.1:{port}"
        tools = Path(sys.executable).parent
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "HOME": str(self.home),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_API_SERVER_ADDRESS": self.address,
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self):
        self.call("ray", "get-auth-token", "--generate")
        names = ("port", "dashboard-agent-listen-port", "ray-client-server-port")
        self.call(
            "ray", "start", "--head", "--num-cpus=2", "--disable-usage-stats",
            f"--dashboard-port={self.address.rpartition(':')[2]}",
            f"--temp-dir={self.home}/ray",
            *(f"--{name}={port}" for name, port in zip(names, self.ports, strict=True)),
        )  # fmt: skip
        return self

    def __exit__(self, *error):
        deadline = time.monotonic() + 30
        while (left := processes_naming(str(self.home))) and time.monotonic() < deadline:
            kill_with_descendants(left)
            time.sleep(0.1)
        shutil.rmtree(self.home, ignore_errors=True)

    def start(self, *command, log):
        """Start a command on this head, from the project's folder."""
        with log.open("a") as file:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )

    def call(self, *command):
        """Run a command that must succeed and return its output."""
        log = self.home / "call.log"
        log.unlink(missing_ok=True)
        status = self.start(*command, log=log).wait(BOUND_S)
        assert status == 0, log.read_text()
        return log.read_text()

    @contextlib.contextmanager
    def submit(self, name, *options, own=()):
        """Run ``raydl submit``, which follows its job, and yield (process, log)."""
        log = self.home / f"{name}.log"
        command = ["raydl", "submit", "--run-name", name, *own, "--", *options]
        process = self.start(*command, log=log)
        try:
            yield process, log
        finally:
            process.kill()
            process.wait(10)

    def run_of(self, name):
        return self.home / "raydl-runs" / name


@pytest.fixture(scope="module")
def head():
    with Head() as head:
        yield head


def checkpoints_of(run):
    return set(CheckpointStore(Storage(str(run))).names())


def result_of(run):
    return json.loads((run / "result.json").read_text())


def options_for(epochs):
    """Return the options of a run that lasts long enough to be interrupted and mostly sleeps."""
    options = f"--data digits --model origins:model --workers 1 --epochs {epochs}"
    options += " --checkpoint.every-s 1"
    return options.split()


class TestRealJobs:
    pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]  # noqa: RUF012

    def test_a_checkout_is_submitted_as_in_the_readme_and_evaluated(self, head, tmp_path):
        submit = ["ray", "job", "submit", "--working-dir", ".", "--", "python"]
        options = ["--data", "digits", "--model", "mlp", "--workers", "1", "--epochs", "3"]
        head.call(
            *submit, "jobs/train.py", *options, "--storage-path", str(tmp_path),
            "--run-dir", "runs/digits",
        )  # fmt: skip
        result = result_of(tmp_path / "digits")
        assert result["center_loss"] < 0.5 * UNTRAINED_LOSS
        out = head.call(*submit, "jobs/evaluate.py", str(tmp_path / "digits"))
        assert f'"accuracy": {result["center_accuracy"]}' in out

    @pytest.mark.slow
    def test_a_killed_driver_is_resubmitted_ctrl_c_keeps_the_job_and_a_stopped_job_resumes(
        self, head
    ):
        run, again = head.run_of("killed"), head.home / "again.log"
        long = options_for(100_000)
        with head.submit("killed", *long, own=("--retries", "1")) as (process, log):
            until(lambda: checkpoints_of(run), log.read_text)
            drivers = [
                pid
                for pid in processes_naming("raydl-runs/killed")
                if "raydl\0train" in "\0".join(command_of(pid))
            ]
            [parent] = [pid for pid in drivers if parent_of(pid) not in drivers]
            os.kill(parent, signal.SIGKILL)
            until(lambda: "resuming from round" in log.read_text(), log.read_text)
            before = checkpoints_of(run)
            until(lambda: checkpoints_of(run) - before, log.read_text)
            assert "the driver was killed (SIGKILL); resubmitting it" in log.read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(BOUND_S) == 130, log.read_text()
            job_id = re.findall(r"--follow (\S+)", log.read_text())[-1]
        follower = head.start("raydl", "submit", "--follow", job_id, log=again)
        head.call("ray", "job", "stop", job_id)
        assert follower.wait(BOUND_S) == 143, again.read_text()
        assert "SIGTERM: stopping after this round, with a checkpoint" in again.read_text()
        assert result_of(run)["stopped_by"] == "SIGTERM"
        checkpoint, sentences = CheckpointStore(Storage(str(run))).read()
        assert not sentences, "the checkpoint is intact"
        samples = checkpoint.state["ledger"]["num_samples"]
        epochs = int(result_of(run)["samples"] / samples) + 3
        with head.submit("killed", *options_for(epochs), "--resume") as (process, log):
            assert process.wait(BOUND_S) == 0, log.read_text()
            assert "resuming from round" in log.read_text()
        assert result_of(run)["samples"] == epochs * samples
        assert result_of(run)["stopped_by"] == ""

    def test_a_client_without_a_token_or_a_cluster_gets_one_sentence(self, head, tmp_path):
        bare = {**head.environment, "HOME": str(tmp_path)}
        nowhere = {**head.environment, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{free_port()}"}
        for environment, sentence in (
            (bare, "requires a token"),
            (nowhere, "no Ray cluster answers"),
        ):
            done = subprocess.run(
                ["raydl", "submit", "--", "--epochs", "1"],
                env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S,
                check=False,
            )  # fmt: skip
            assert done.returncode == 2
            assert done.stderr.startswith("error: ")
            assert sentence in done.stderr
            assert done.stderr.count("\n") == 1
