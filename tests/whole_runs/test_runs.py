"""Whole runs on Ray, as a user starts them: in processes of their own.

Two of them start a Ray of their own; the others join one cluster, which is up already.
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
from processes import descendants_of, environment_of, listeners_of, processes_that

from raydl import cli
from raydl.ray_backend import session
from raydl.tools.report.facts import read_run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

OPTIONS = [
    "--data", "digits", "--model", "lenet", "--workers", "2", "--epochs", "60",
    "--checkpoint.every-epochs", "1", "--run.progress", "plain",
]  # fmt: skip
BOUND_S = 150


class Run:
    """One ``raydl train`` in a process group of its own, with its output in a file."""

    address = ""
    """The cluster that it joins; none: it starts one for itself."""

    def __init__(self, path, *options):
        self.path = path
        self.log = path.with_suffix(".log")
        words = [sys.executable, "-m", "raydl", "train", *OPTIONS, "--run-dir", str(path), *options]
        environment = {**os.environ, **cluster_environment(self.address), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment, start_new_session=True
            )

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
        """Wait until a condition holds, while the run goes on."""
        deadline = time.monotonic() + BOUND_S
        while True:
            has_ended = self.process.poll() is not None  # before the condition is looked at
            if condition():
                return
            assert not has_ended, f"ended too soon:\n{self.output}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.output}"
            time.sleep(0.02)

    @classmethod
    def disturbed(cls, folder, number, condition, *options, goes_on_from=None):
        """Return a run that a signal ended once a condition held.

        A run takes some three seconds; where one was at its end before that, another begins.
        """
        for attempt in range(5):
            path = folder / f"run{attempt}"
            folder.mkdir(exist_ok=True)
            if goes_on_from:
                shutil.copytree(goes_on_from.path, path)
            run = cls(path, *options)
            run.until(lambda run=run: condition(run))
            run.process.send_signal(number)
            if run.wait() != 0 and not (run.path / "center.safetensors").exists():
                return run
        raise AssertionError("every run ended before the signal came")

    def listeners(self):
        """Return (process, address, port) of the sockets on which the run's processes listen."""
        found = set()
        for pid in descendants_of(self.process.pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.update((pid, *place) for place in listeners_of(pid))
        return found

    def has_begun(self):
        """Whether it has told that whole epochs are done."""
        return re.search(r"epoch (?!0\.)", self.output)

    def newest_checkpoint(self):
        """Return its round; 0: there is none."""
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
    """Runs that join a cluster."""
    return type("JoinedRun", (Run,), {"address": four_cpus.address})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted, with a Ray of its own, and on what it ever listened."""
    run = Run(tmp_path_factory.mktemp("whole") / "run")
    run.listened = set()
    while run.process.poll() is None:
        run.listened |= run.listeners()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=1.0)
    assert run.wait() == 0, run.output
    return run


def test_a_mistake_found_while_ray_starts_is_one_sentence_and_leaves_no_process(tmp_path):
    mark = f"TEST_RUN={tmp_path}"  # in the environment of all that it starts
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
    assert f"tensorboard --logdir {whole.path}" in whole.output


def test_a_run_with_a_cluster_of_its_own_can_be_reached_from_no_other_host(whole):
    assert len(whole.listened) > 10
    assert [place for place in whole.listened if not ip_address(place[1]).is_loopback] == []


def test_the_curves_of_a_run_rise_evenly_over_time(whole):
    """Workers record several times between two questions of the driver: records come together."""
    curve = read_run(str(whole.path)).curve("train/epoch")
    apart = [later - earlier > 0.005 for earlier, later in itertools.pairwise(curve.seconds)]
    assert list(curve.seconds) == sorted(curve.seconds)
    assert len(apart) > 8
    assert sum(apart) > 0.8 * len(apart), "they stand together as they were heard of"


def test_a_run_interrupted_then_killed_with_9_and_resumed_each_time_ends_with_the_same_bits(
    whole, joined, tmp_path
):
    """As does any run of its seed."""
    stopped = joined.disturbed(
        tmp_path / "stopped", signal.SIGINT, Run.has_begun, "--checkpoint.every-epochs", "1000"
    )
    assert stopped.process.returncode == 130, stopped.output
    assert stopped.newest_checkpoint() > 0
    assert "--resume" in stopped.output
    killed = joined.disturbed(
        tmp_path / "killed",
        signal.SIGKILL,
        lambda run: run.newest_checkpoint() > stopped.newest_checkpoint(),
        "--resume",
        goes_on_from=stopped,
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
    monkeypatch.setattr(session, "connect", lambda **_: True)  # to a cluster of the run's own
    assert cli.main(["train", "--workers", "500", "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "error: scaling.num_workers requests 500 workers" in told
    assert "lower scaling.num_workers or scaling.cpus_per_worker" in told
    assert "Traceback" not in told


def test_a_loss_that_explodes_names_worker_and_step(cluster, tmp_path, capsys):
    words = ["--run-dir", str(tmp_path / "run"), "--workers", "2", "--run.progress", "plain"]
    words += ["--lr", "1e20", "--optimizer.clip-grad-norm", "None"]
    assert cli.main(["train", *words]) == 1
    told = capsys.readouterr().err
    assert re.search(r"error: the loss became \S+ at local step \d+ of worker w\d", told), told
    assert "lower optimizer.lr" in told
    assert "Traceback" not in told
