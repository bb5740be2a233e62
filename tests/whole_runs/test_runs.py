"""Whole runs on Ray, as a user starts them: in processes of their own.

Three of them start a Ray of their own; the others join one cluster, which is up already.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import environment_of, processes_that

pytestmark = pytest.mark.cluster

OPTIONS = [
    "--data", "digits", "--model", "lenet", "--workers", "2", "--epochs", "60",
    "--checkpoint.every-epochs", "1", "--run.progress", "plain",
]  # fmt: skip
BOUND_S = 150


def address_of(address):
    """Return the environment of a program that joins a cluster."""
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"} if address else {}


class Run:
    """One ``raydl train`` in a process group of its own, with its output in a file."""

    address = ""
    """The cluster that it joins; none: it starts one for itself."""

    def __init__(self, path, *options, command=("-m", "raydl", "train")):
        self.path = path
        self.log = path.with_suffix(".log")
        words = [sys.executable, *command, *OPTIONS, "--run-dir", str(path), *options]
        environment = {**os.environ, **address_of(self.address), "OMP_NUM_THREADS": "1"}
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
        while not condition():
            assert self.process.poll() is None, f"ended too soon:\n{self.output}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.output}"
            time.sleep(0.02)

    @classmethod
    def disturbed(cls, folder, number, condition, *options):
        """Return a run that a signal ended once a condition held.

        A run takes some three seconds; where one was at its end before that, another begins.
        """
        for attempt in range(5):
            run = cls(folder / f"run{attempt}", *options)
            run.until(lambda run=run: condition(run))
            run.process.send_signal(number)
            if run.wait() != 0 and not (run.path / "center.safetensors").exists():
                return run
        raise AssertionError("every run ended before the signal came")

    def has_begun(self):
        """Whether it has told that whole epochs are done."""
        return re.search(r"epoch (?!0\.)", self.output)

    def has_checkpoint(self):
        return any(self.path.glob("checkpoints/round-*/manifest.json"))

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
    """A run that nothing interrupted, with a Ray of its own."""
    run = Run(tmp_path_factory.mktemp("whole") / "run")
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


def test_two_runs_with_one_seed_agree_to_the_last_digit(whole, joined, tmp_path):
    again = joined(tmp_path / "run")
    assert again.wait() == 0, again.output
    assert again.result["center_accuracy"] == whole.result["center_accuracy"]
    assert again.result["center_loss"] == whole.result["center_loss"]
    assert again.weights == whole.weights


def test_a_driver_killed_with_9_and_resumed_ends_with_the_same_bits(whole, joined, tmp_path):
    run = joined.disturbed(tmp_path, signal.SIGKILL, Run.has_checkpoint)
    assert run.process.returncode == -signal.SIGKILL, run.output
    again = joined(run.path, "--resume")
    assert again.wait() == 0, again.output
    assert "resuming from round" in again.output
    assert again.weights == whole.weights
    assert again.result["center_accuracy"] == whole.result["center_accuracy"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_with_a_checkpoint_and_the_resumed_run_ends_with_the_same_bits(
    whole, joined, tmp_path, number, status
):
    run = joined.disturbed(tmp_path, number, Run.has_begun, "--checkpoint.every-epochs", "1000")
    assert run.process.returncode == status, run.output
    assert run.has_checkpoint()
    assert "--resume" in run.output
    again = joined(run.path, "--resume")
    assert again.wait() == 0, again.output
    assert again.weights == whole.weights


def test_the_job_script_has_the_same_options(joined, tmp_path, root):
    run = joined(tmp_path / "run", "--epochs", "1", command=(str(root / "jobs/train.py"),))
    assert run.wait() == 0, run.output
    assert run.result["samples"] == 1438


def test_more_workers_than_the_machine_holds_are_refused_before_any_starts(tmp_path):
    run = Run(tmp_path / "run", "--workers", "500")
    assert run.wait() == 2
    assert "error: scaling.num_workers asks for 500 workers" in run.output
    assert "lower scaling.num_workers or scaling.cpus_per_worker" in run.output
    assert "Traceback" not in run.output


OWN_TASK = """
import sys, torch, raydl

def broken(image_shape, num_classes):
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, num_classes)
            self.calls = 0

        def forward(self, images):
            self.calls += 1
            if self.calls > 20:
                raise ZeroDivisionError("my own mistake")
            return self.linear(images.flatten(1))

    return Broken()

raydl.Trainer(
    raydl.Classification(broken), "digits", run=raydl.RunConfig(run_dir=sys.argv[1])
).fit()
"""


def test_a_users_own_exception_arrives_with_its_own_traceback(joined, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN_TASK)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env={**os.environ, **address_of(joined.address)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError: my own mistake" in done.stderr
    assert 'own.py", line' in done.stderr


def test_a_loss_that_explodes_names_worker_and_step(joined, tmp_path):
    run = joined(tmp_path / "run", "--lr", "1e20", "--optimizer.clip-grad-norm", "None")
    assert run.wait() == 1, run.output
    assert "error: the loss became" in run.output
    assert "lower optimizer.lr" in run.output
    assert "Traceback" not in run.output
