"""After minutes of random faults a run ends with the accuracy of an undisturbed run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import ClusterRun, actor_pids, removable_nodes, start_cluster
from processes import driver_of, resident_bytes, stopped_processes
from safetensors.torch import load_file

from benchmarks import counting
from benchmarks.programs import ROOT
from raydl.checkpoint.store import CheckpointStore
from raydl.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

MOST_EPOCHS, FEWEST_EPOCHS = 2500, 200
TRAINED_S = 180.0
"""Enough for eight faults; the machine's speed decides how many epochs that are."""
NUM_STRIKES = int(os.environ.get("RAYDL_SOAK_STRIKES", "12"))
SEED = int(os.environ.get("RAYDL_SOAK_SEED", "0"))


class RandomFaults:
    """Injects random faults into a cluster, one at a time."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.random = random.Random(SEED)
        self.done = []
        """The faults that hit something."""

    def inject(self):
        kind = self.random.choice(["kill", "kill", "halt", "node", "drain", "center"])
        with contextlib.suppress(ProcessLookupError, IndexError):  # no process or node to hit
            getattr(self, kind)()
            self.done.append(kind)

    def kill(self):
        os.kill(self.random.choice(actor_pids(self.cluster, "WorkerActor")), signal.SIGKILL)

    def halt(self):
        os.kill(self.random.choice(actor_pids(self.cluster, "WorkerActor")), signal.SIGSTOP)

    def center(self):
        os.kill(actor_pids(self.cluster, "CenterActor")[0], signal.SIGKILL)

    def node(self):
        node = self.random.choice(removable_nodes(self.cluster))
        self.cluster.add_node(num_cpus=1)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self):
        node = self.random.choice(removable_nodes(self.cluster))
        self.cluster.add_node(num_cpus=1)
        ray = Path(sys.executable).with_name("ray")
        subprocess.run(
            [ray, "drain-node", "--address", self.cluster.address, "--node-id", node.node_id,
             "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
             "--deadline-remaining-seconds", "10"],
            check=False, capture_output=True, timeout=60,
        )  # fmt: skip
        time.sleep(10)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module", params=["sync-easgd", "async-easgd"])
def undisturbed(request, tmp_path_factory):
    """Return a method, a number of epochs, and the accuracy of an undisturbed run of so many."""
    folder, method = tmp_path_factory.mktemp(request.param), request.param
    with start_cluster(4) as cluster:
        with ClusterRun(cluster, folder / "short", *options(method, "3", 50)) as run:
            run.wait(300)
            epochs = int(50 * TRAINED_S / run.result["seconds"])
            epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, epochs))
        with ClusterRun(cluster, folder / "undisturbed", *options(method, "3", epochs)) as run:
            run.wait(600)
            return method, epochs, run.result["center_accuracy"]


def options(method, workers, epochs):
    return ["--method", method, "--period", "4", "--epochs", str(epochs), "--workers", workers,
            "--elastic.lease-s", "5", "--checkpoint.every-s", "20"]  # fmt: skip


def test_a_run_with_random_faults_ends_like_an_undisturbed_one(undisturbed, tmp_path):
    method, epochs, accuracy = undisturbed
    with start_cluster(1, 1, 1, 1) as cluster:
        faults, sizes = RandomFaults(cluster), []
        with ClusterRun(cluster, tmp_path / "run", *options(method, "2:4", epochs)) as run:
            run.until_training(4)
            while run.process.poll() is None:
                faults.inject()
                sizes.append(resident_bytes(driver_of(run.process.pid)))
                deadline = time.monotonic() + faults.random.uniform(5, 15)
                while time.monotonic() < deadline and run.process.poll() is None:
                    time.sleep(0.2)
            run.wait()
            print(method, faults.done, run.result["generations"], run.result["longest_pause_s"])
            assert run.result["samples"] == epochs * 1438
            assert run.result["center_accuracy"] >= accuracy - 0.01
            assert len(faults.done) >= 8
            settled = sizes[len(sizes) // 3]
            assert sizes[-1] < 1.2 * settled + 50e6, sizes
        session = cluster.head_node.get_session_dir_path()
        assert stopped_processes(session, tmp_path) == []


@pytest.mark.parametrize("rule", ["AllProgress", "AllProgressByMessages"])
def test_under_random_faults_every_sample_counts_once_an_epoch(rule, tmp_path, monkeypatch):
    """Each sample adds one to its own weight, so the test trusts no figure of the run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the cluster's processes
    table, folder = counting.write_table(tmp_path / "table"), tmp_path / "run"
    words = ["--data", table, "--method", f"benchmarks.counting:{rule}", *counting.OPTIONS]
    words += ["--workers", "2:4", "--elastic.lease-s", "5", "--checkpoint.every-s", "20"]
    with start_cluster(1, 1, 1, 1) as cluster:
        faults = RandomFaults(cluster)
        with ClusterRun(cluster, folder, *words, "--epochs", "99999") as run:
            run.until_training(4)
            while len(faults.done) < NUM_STRIKES:
                faults.inject()
                deadline = time.monotonic() + faults.random.uniform(5, 15)
                run.until(lambda deadline=deadline: time.monotonic() > deadline)
            run.until_training(4)
            run.process.terminate()
            assert run.process.wait(timeout=100) == 143, run.output
        kept = CheckpointStore(Storage(str(folder))).read()[0].progress.num_samples
        num_epochs = kept // counting.NUM_SAMPLES + 2
        with ClusterRun(cluster, folder, *words, "--epochs", str(num_epochs), "--resume") as run:
            run.wait()
    counts = load_file(folder / "center.safetensors")["counts"].round().long()
    num_out = int((counts - num_epochs).abs().sum())
    print(f"{rule}: {faults.done}, {num_epochs} epochs, {num_out} samples out")
    bound = 0 if rule == "AllProgress" else len(faults.done) * counting.MOST_OUT
    assert num_out <= bound, counts.tolist()
