"""Every sample counts exactly once an epoch, whatever happens to the machines.

The count is no figure of the run's own: each sample adds one to a weight of its own.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import ClusterRun, actor_pids, removable_nodes, start_cluster
from processes import stopped_processes
from safetensors.torch import load_file

from benchmarks import counting
from raydl.checkpoint.store import CheckpointStore
from raydl.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


class FaultInjector:
    """Injects faults into the processes and nodes of a run."""

    def __init__(self, cluster, run):
        self.cluster, self.run = cluster, run
        self.num_losses = 0

    def until_all_train(self, num_workers=3):
        """Wait until ``num_workers`` workers train and have completed further rounds."""
        self.run.until_training(num_workers)
        before = self.run.status()["num_samples"]
        self.run.until(lambda: self.run.status()["num_samples"] > before + 200)

    def signal(self, name, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(actor_pids(self.cluster, name)[0], number)
        self.num_losses += 1

    def act_until_logged(self, pattern, act):
        """Act, and wait until the log has one more match of a pattern."""

        def count():
            return len(re.findall(pattern, self.run.output))

        before = count()
        act()
        self.run.until(lambda: count() > before)

    def kill_worker(self):
        # The cause that is noticed first depends on how busy the node is.
        killed = "was lost: (its process was killed|the connection to it broke)"
        self.act_until_logged(killed, lambda: self.signal("WorkerActor", signal.SIGKILL))

    def halt_worker(self):
        # The cause in the log depends on whether the node answers soon, too.
        silent = "was lost: it did not answer for"
        self.act_until_logged(silent, lambda: self.signal("WorkerActor", signal.SIGSTOP))

    def kill_center(self):
        self.signal("CenterActor", signal.SIGKILL)
        self.run.until_logged("center was lost")

    def drain_node(self):
        node = removable_nodes(self.cluster)[0]
        self.cluster.add_node(num_cpus=1)
        ray = Path(sys.executable).with_name("ray")
        words = [
            ray, "drain-node", "--address", self.cluster.address, "--node-id", node.node_id,
            "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
            "--deadline-remaining-seconds", "60",
        ]  # fmt: skip

        def drain():
            subprocess.run(words, check=True, capture_output=True, timeout=60)

        self.act_until_logged(r"generation \d+: .*joins", drain)
        self.run.until_logged("draining node")
        self.cluster.remove_node(node, allow_graceful=False)

    def lose_nodes(self):
        """Lose two of three nodes, so that fewer than the minimum of workers are left."""
        self.num_losses += 2
        for node in removable_nodes(self.cluster)[:2]:
            self.cluster.remove_node(node, allow_graceful=False)
        self.run.until_logged("1 of 2 workers are left")
        self.cluster.add_node(num_cpus=1)
        self.cluster.add_node(num_cpus=1)


def counts_of(folder):
    """Return how often each sample reached the center of the newest checkpoint, and its total."""
    checkpoint, damage = CheckpointStore(Storage(str(folder))).read()
    assert damage == []
    return checkpoint.center["counts"].round().long(), checkpoint.progress.num_samples


@pytest.fixture(scope="module")
def cluster():
    """A head and three nodes for a worker each; each run leaves the same number of nodes."""
    with start_cluster(0, 1, 1, 1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "is_sync",
    [
        pytest.param(True, id="rounds"),
        pytest.param(False, id="messages", marks=pytest.mark.slow),
    ],
)
def test_every_sample_counts_once_an_epoch_whatever_happens_to_the_machines(
    cluster, tmp_path, is_sync
):
    rule = "AllProgress" if is_sync else "AllProgressByMessages"
    options = [
        "--data", counting.write_table(tmp_path / "table"),
        "--method", f"benchmarks.counting:{rule}", *counting.OPTIONS,
        "--workers", "2:3", "--elastic.lease-s", "3", "--checkpoint.every-s", "5",
    ]  # fmt: skip
    cut_off = [{"fault": "partition", "target": "rank 1", "at": "round 60", "for_s": 6}]
    folder = tmp_path / "run"
    with ClusterRun(cluster, folder, *options, "--epochs", "9999", faults=cut_off) as run:
        faults = FaultInjector(cluster, run)
        run.until_training(3)
        run.until_logged("was lost: it did not answer for")
        faults.num_losses += 1
        for inject in (
            faults.kill_worker,
            faults.halt_worker,
            faults.kill_center,
            faults.drain_node,
            faults.lose_nodes,
        ):
            faults.until_all_train()
            inject()
        faults.until_all_train()
        run.until(lambda: time.time() - (run.status().get("checkpoint_at") or 0) < 4)
        run.process.kill()  # the driver, without warning
        run.process.wait()
    session = cluster.head_node.get_session_dir_path()
    assert stopped_processes(session) == [], "a process that was stopped still exists"
    num_epochs = counts_of(folder)[1] // counting.NUM_SAMPLES + 3
    with ClusterRun(cluster, folder, *options, "--epochs", str(num_epochs), "--resume") as run:
        run.wait()
        assert run.result["samples"] == num_epochs * counting.NUM_SAMPLES
    counts = load_file(folder / "center.safetensors")["counts"].round().long()
    num_out = int((counts - num_epochs).abs().sum())
    assert num_out <= (0 if is_sync else faults.num_losses * counting.MOST_OUT), counts.tolist()
    print(f"{rule}: {num_epochs} epochs, {faults.num_losses} losses, {num_out} samples out")


def write_csv(folder):
    """Write the numbered samples as CSV, with a text to predict, and return the options for it."""
    folder.mkdir()
    for number in range(6):  # each file is a block
        first = number * counting.NUM_SAMPLES // 6
        ids = range(first, first + counting.NUM_SAMPLES // 6)
        rows = "".join(f"{n},{('even', 'odd')[n % 2]}\n" for n in ids)
        (folder / f"train-{number}.csv").write_text("id,parity\n" + rows)
    (folder / "test.csv").write_text("id,parity\n0,even\n1,odd\n")
    return "--data", str(folder), "--target", "parity", "--input.stream", "always"


@pytest.mark.slow
def test_every_row_of_a_streamed_csv_counts_once_an_epoch_though_a_worker_is_killed(
    cluster, tmp_path
):
    options = [
        *write_csv(tmp_path / "rows"), "--input.shuffle-samples", "100",
        "--method", "benchmarks.counting:AllProgress", *counting.OPTIONS,
        "--workers", "1:2", "--epochs", "5",
    ]  # fmt: skip
    killed = [{"fault": "kill", "target": "rank 1", "at": "round 20"}]
    with ClusterRun(cluster, tmp_path / "run", *options, faults=killed) as run:
        run.wait()
        assert len(run.result["faults_fired"]) == 1, run.output
    counts = load_file(tmp_path / "run/center.safetensors")["counts"].round().long()
    assert counts.tolist() == [5] * counting.NUM_SAMPLES
