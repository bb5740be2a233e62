"""Whole runs on Ray, as a user starts them: in their own processes.

Two of them start their own Ray; the others join a running cluster.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from ipaddress import ip_address

import pytest
from clusters import cluster_environment
from processes import (
    command_of,
    descendants_of,
    environment_of,
    listeners_of,
    processes_that,
)
from programs import Program

from raydl import cli
from raydl.ray_backend import session
from raydl.tools.report.facts import read_run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

OPTIONS = [
    "--data", "digits", "--model", "lenet", "--workers", "2", "--epochs", "60",
    "--checkpoint.every-epochs", "1", "--run.progress", "plain",
]  # fmt: skip
BOUND_S = 150


class TrainProcess:
    """A ``raydl train``, with its output in a file."""

    address = ""
    """Address of the cluster that it joins; empty: it starts its own."""

    def __init__(self, path, *options):
        self.path = path
        self.log = path.with_suffix(".log")
        words = ["-m", "raydl", "train", *OPTIONS, "--run-dir", str(path), *options]
        environment = {**os.environ, **cluster_environment(self.address), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = Program(words, output=log, environment=environment)

    @property
    def output(self):
        return self.log.read_text()

    def wait(self):
        """Return the exit status; a run that takes too long is killed and fails the test."""
        try:
            return self.process.wait(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no end within {BOUND_S} s:\n{self.output}") from None

    def until(self, condition):
        """Wait until a condition holds, and fail if the run ends before."""
        deadline = time.monotonic() + BOUND_S
        while True:
            has_ended = self.process.poll() is not None  # before the condition is checked
            if condition():
                return
            assert not has_ended, f"ended too soon:\n{self.output}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.output}"
            time.sleep(0.02)

    @classmethod
    def interrupted(cls, folder, number, condition, *options, resume_from=None):
        """Return a run that was ended by a signal once a condition held.

        A run takes some three seconds; if it ends before the signal, another one is started.
        """
        for attempt in range(5):
            path = folder / f"run{attempt}"
            folder.mkdir(exist_ok=True)
            if resume_from:
                shutil.copytree(resume_from.path, path)
            run = cls(path, *options)
            run.until(lambda run=run: condition(run))
            run.process.send_signal(number)
            if run.wait() != 0 and not (run.path / "center.safetensors").exists():
                return run
        raise AssertionError("every run ended before the signal came")

    def commands(self):
        """Return the command lines of the run's processes."""
        return {" ".join(command_of(pid)) for pid in descendants_of(self.process.pid)}

    def listeners(self):
        """Return (process, address, port) of the sockets on which the run's processes listen."""
        found = set()
        for pid in descendants_of(self.process.pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.update((pid, *place) for place in listeners_of(pid))
        return found

    def has_begun(self):
        """Return whether the output shows that whole epochs are done."""
        return re.search(r"epoch (?!0\.)", self.output)

    def newest_checkpoint(self):
        """Return the round of the newest checkpoint, or 0."""
        names = [path.parent.name for path in self.path.glob("checkpoints/round-*/manifest.json")]
        return max((int(re.match(r"round-(\d+)", name)[1]) for name in names), default=0)

    @property
    def result(self):
        return json.loads((self.path / "result.json").read_text())

    @property
    def weights(self):
        return (self.path / "center.safetensors").read_bytes()


@pytest.fixture(scope="module")
def joined(four_cpus):
    """Return the class of runs that join a cluster."""
    return type("JoinedRun", (TrainProcess,), {"address": four_cpus.address})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with its own Ray, and the command lines and sockets of its processes."""
    run = TrainProcess(tmp_path_factory.mktemp("whole") / "run")
    run.listened, run.command_lines = set(), set()
    while run.process.poll() is None:
        run.listened |= run.listeners()
        run.command_lines |= run.commands()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=1.0)
    assert run.wait() == 0, run.output
    return run


def test_an_error_found_while_ray_starts_is_one_sentence_and_leaves_no_process(tmp_path):
    mark = f"TEST_RUN={tmp_path}"  # in the environment of all its processes
    words = ["--data", "synthetic:40", "--batch-size", "41", "--run.progress", "plain"]
    done = subprocess.run(
        [sys.executable, "-m", "raydl", "train", "--workers", "2", *words],
        env={**os.environ, "TEST_RUN": str(tmp_path)},
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    sentence = "error: training.batch_size must be at most the 40 samples, got 41\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, sentence, "")
    deadline = time.monotonic() + 60
    while left := processes_that(lambda pid: mark in environment_of(pid)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_run_on_two_workers_reaches_its_accuracy(whole):
    assert whole.result["center_accuracy"] >= 0.97
    assert whole.result["samples"] == 60 * 1438
    assert whole.result["workers"] == 2
    assert "center test accuracy" in whole.output
    assert f"tensorboard --logdir_spec {whole.path.name}:{whole.path}" in whole.output


def test_a_run_with_its_own_cluster_cannot_be_reached_from_other_hosts(whole):
    assert len(whole.listened) > 10
    assert [place for place in whole.listened if not ip_address(place[1]).is_loopback] == []


def test_a_run_with_its_own_cluster_starts_no_program_that_it_does_not_need(whole):
    def programs(path):
        return [line for line in whole.command_lines if f"/ray/{path}" in line]

    raylets = programs("core/src/ray/raylet/raylet")
    assert raylets
    assert all(" --minimal" in line for line in raylets), "the agent has its full form"
    assert programs("dashboard/dashboard.py") == programs("autoscaler/") == []
    own = "raydl/ray_backend/setup_worker.py"
    assert all(own in line for line in raylets), "Ray's program imports Ray for each worker"


@pytest.mark.slow
def test_the_curves_of_a_run_rise_evenly_over_time(whole):
    """Workers make several records between two polls of the driver, and send them together."""
    curve = read_run(str(whole.path)).curve("train/epoch")
    apart = [later - earlier > 0.005 for earlier, later in itertools.pairwise(curve.seconds)]
    assert list(curve.seconds) == sorted(curve.seconds)
    assert len(apart) > 8
    assert sum(apart) > 0.8 * len(apart), (
        "points have the times of their arrival, not of their records"
    )


def test_a_run_interrupted_then_killed_with_9_and_resumed_each_time_ends_with_the_same_bits(
    whole, joined, tmp_path
):
    """The reference is another run with the same seed."""
    stopped = joined.interrupted(
        tmp_path / "stopped",
        signal.SIGINT,
        TrainProcess.has_begun,
        "--checkpoint.every-epochs",
        "1000",
    )
    assert stopped.process.returncode == 130, stopped.output
    assert stopped.newest_checkpoint() > 0
    assert "--resume" in stopped.output
    killed = joined.interrupted(
        tmp_path / "killed",
        signal.SIGKILL,
        lambda run: run.newest_checkpoint() > stopped.newest_checkpoint(),
        "--resume",
        resume_from=stopped,
    )
    assert killed.process.returncode == -signal.SIGKILL, killed.output
    again = joined(killed.path, "--resume")
    assert again.wait() == 0, again.output
    assert again.output.count("resuming from round") == 2
    assert again.weights == whole.weights
    for figure in ("center_accuracy", "center_loss"):
        assert again.result[figure] == whole.result[figure]


def test_more_workers_than_the_machine_holds_are_refused_before_any_starts(
    cluster, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(session, "connect", lambda **_: True)  # as if to its own cluster
    assert cli.main(["train", "--workers", "500", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "error: scaling.num_workers requests 500 workers" in error
    assert "lower scaling.num_workers or scaling.cpus_per_worker" in error
    assert "Traceback" not in error


def test_a_loss_that_explodes_names_worker_and_step(cluster, tmp_path, capsys):
    words = ["--run-dir", str(tmp_path / "run"), "--workers", "2", "--run.progress", "plain"]
    words += ["--lr", "1e20", "--optimizer.clip-grad-norm", "None"]
    assert cli.main(["train", *words]) == 1
    error = capsys.readouterr().err
    assert re.search(r"error: the loss became \S+ at local step \d+ of worker w\d", error), error
    assert "lower optimizer.lr" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_workers_that_score_the_center_train_to_the_same_bits_without_an_evaluator(whole, tmp_path):
    # On a cluster that tests share, the evaluator of the test before may still be ending.
    run = TrainProcess(tmp_path / "run", "--evaluation.by", "workers")
    commands = set()
    while run.process.poll() is None:
        commands |= run.commands()
        time.sleep(0.2)
    assert run.wait() == 0, run.output
    assert any("ray::EvaluatorActor" in line for line in whole.command_lines)
    assert any("ray::WorkerActor" in line for line in commands)
    assert not any("ray::EvaluatorActor" in line for line in commands)
    assert run.weights == whole.weights
    assert run.result["center_accuracy"] == whole.result["center_accuracy"]
    curve = read_run(str(run.path)).curve("center/accuracy")
    assert len(curve) >= 55, "of 60 epochs"
