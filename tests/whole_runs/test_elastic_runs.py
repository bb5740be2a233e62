"""Whole runs on several nodes continue when workers, nodes and the center are lost."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import ClusterRun, actor_pids, actor_pids_on, removable_nodes, start_cluster

from raydl.checkpoint.store import CheckpointStore
from raydl.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_TRAIN = 1438


def check_end(run, *, epochs, faults):
    """Check results that do not depend on the losses."""
    run.wait()
    assert len(run.result["faults_fired"]) == faults, run.output
    assert run.result["samples"] == epochs * NUM_TRAIN
    assert run.result["center_accuracy"] >= 0.97
    numbers = [
        int(n) for n in re.findall(r"^\[[\d:]+\] generation (\d+): ", run.output, flags=re.M)
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    assert run.result["generations"] == len(numbers)


def kill_faults(center, *, factor=1):
    """Return the faults of a run that loses two workers and twice a part of its center.

    Args:
        center: names of the first and the second part of the center to kill.
        factor: multiplies the rounds, since by messages each worker's exchange is a round.
    """
    targets = ("rank 1", center[0], "rank 0", center[1])
    return [
        {"fault": "kill", "target": target, "at": f"round {factor * round}"}
        for target, round in zip(targets, (20, 60, 110, 150), strict=True)
    ]


FEW_EVALUATIONS = ("--evaluation.every-epochs", "25")


def test_a_run_ends_after_its_workers_and_center_are_killed_and_another_run_is_unaffected(
    four_cpus, tmp_path
):
    options = [
        "--model",
        "origins:model",
        "--period",
        "4",
        "--cpus-per-worker",
        "0.5",
        *FEW_EVALUATIONS,
    ]
    broken_options = ["--epochs", "110", "--workers", "2:3", *options]
    options += ["--epochs", "60", "--workers", "2", "--method", "async-easgd"]
    faults = kill_faults(("center", "center"))
    with (
        ClusterRun(four_cpus, tmp_path / "a", *broken_options, faults=faults) as broken,
        ClusterRun(four_cpus, tmp_path / "b", *options) as whole,
    ):
        check_end(whole, epochs=60, faults=0)
        assert whole.result["generations"] == 1
        check_end(broken, epochs=110, faults=4)
        assert len(set(re.findall(r"(w\d+) was lost", broken.output))) >= 2
        assert broken.output.count("center was lost") >= 1


@pytest.mark.slow
def test_a_rebuilt_center_of_a_parameter_server_method_keeps_its_optimizers_momentum(
    four_cpus, tmp_path
):
    options = ["--method", "async-msgd", "--center-shards", "2", "--period", "4", *FEW_EVALUATIONS]
    options += ["--model", "origins:model", "--epochs", "110", "--workers", "2:3"]
    faults = kill_faults(("center", "shard 1"), factor=3)
    with ClusterRun(four_cpus, tmp_path / "run", *options, faults=faults) as run:
        check_end(run, epochs=110, faults=4)
        assert len(set(re.findall(r"(w\d+) was lost", run.output))) >= 2
        assert run.output.count("center was lost") >= 1
        rebuilds = re.findall(
            r"rebuilt from the last copy of w\d, of round (\d+); its optimizer is as it was after "
            r"([\d,]+) exchanges",
            run.output,
        )
        assert rebuilds, run.output
        for numbers in rebuilds:
            newest, kept = (int(number.replace(",", "")) for number in numbers)
            # The copy may include one exchange of each worker that the lost center had not
            # answered.
            assert 0 < kept <= newest + 3


@pytest.mark.slow
def test_a_slow_worker_is_left_out_and_comes_back_with_its_replica(four_cpus, tmp_path):
    # Usual times are known after five reports, two a second; by then some 60 rounds have passed.
    # A round of 20 s is late on any machine: leaving a worker out costs two pauses, and a pause may
    # take 4 s on a busy one.
    faults = [{"fault": "slow", "target": "rank 1", "at": "round 120", "by_s": 5, "for_s": 20}]
    options = ["--model", "origins:model", "--epochs", "9999", "--period", "4", "--workers", "2:3"]
    with ClusterRun(four_cpus, tmp_path / "run", *options, faults=faults) as run:
        # On a busy machine a worker may also be late before the fault.
        run.until_logged("fault 1: slow")
        later = r"fault 1: slow(?s:.*)(w\d+) is late and left out(?s:.*)\1 returns"
        run.until(lambda: re.search(later, run.output))
        stop(run)
        assert len(run.result["faults_fired"]) == 1


def test_a_hot_spare_takes_the_place_of_a_killed_worker_in_the_next_generation(four_cpus, tmp_path):
    options = ["--model", "origins:model", "--epochs", "9999", "--period", "4", "--workers", "2"]
    earlier = set(actor_pids(four_cpus, "WorkerActor"))
    with ClusterRun(four_cpus, tmp_path / "run", *options, "--spares", "1") as run:

        def ours():
            return set(actor_pids(four_cpus, "WorkerActor")) - earlier

        def states():
            return [worker["state"] for worker in run.status()["workers"]]

        # A spare is requested once the workers train: the first two processes are theirs.
        run.until(lambda: len(ours()) == 2)
        trains, _ = ours()
        run.until(lambda: sorted(states()) == ["ready", "training", "training"])
        os.kill(trains, signal.SIGKILL)
        run.until(lambda: re.search(r"generation 2: w[01] was lost, w2 joins", run.output))
        run.until(lambda: len(states()) == 3)  # the next spare has started
        stop(run)
        assert "OOM" not in run.output  # Ray's message about the kill is in a file


@pytest.mark.slow
def test_a_worker_cut_off_is_lost_and_replaced(four_cpus, tmp_path):
    """On one machine the driver ends its process; in ``test_partitions.py`` it lives on."""
    faults = [{"fault": "partition", "target": "rank 1", "at": "round 60", "for_s": 12}]
    options = ["--method", "async-easgd", "--period", "4", "--epochs", "300", "--workers", "2:3"]
    with ClusterRun(
        four_cpus, tmp_path / "run", *options, "--elastic.lease-s", "4", faults=faults
    ) as run:
        check_end(run, epochs=300, faults=1)
        assert re.search(r"w\d was lost: it did not answer for", run.output)


@pytest.mark.slow
def test_nodes_that_drain_or_die_are_replaced_by_others(tmp_path):
    with start_cluster(0, 1, 1, 1) as cluster:
        options = ["--model", "origins:model", "--epochs", "9999", "--period", "4"]
        with ClusterRun(cluster, tmp_path / "run", *options, "--workers", "1:3") as run:
            run.until_training(3)
            dead, drained = removable_nodes(cluster)[:2]
            (leaver,) = actor_pids_on(drained, "WorkerActor")
            cluster.add_node(num_cpus=1)
            drain(cluster, drained.node_id)
            run.until(lambda: re.search(r"generation \d+: .*w3 joins", run.output))
            cluster.remove_node(drained, allow_graceful=False)  # before its deadline
            dead.kill_raylet()
            run.until_logged("was lost: ")
            run.until_training(2)
            cluster.add_node(num_cpus=1)
            run.until_training(3)
            stop(run)
    states = CheckpointStore(Storage(str(tmp_path / "run"))).read()[0].workers
    origin = int(states["w3"].load()["replica"]["untrained"]["process"])
    assert origin == leaver, run.output  # w3 continues with the replica of the leaver


def drain(cluster, node_id):
    """Send a node a drain notice, as an operator does."""
    ray = Path(sys.executable).with_name("ray")
    subprocess.run(
        [ray, "drain-node", "--address", cluster.address, "--node-id", node_id, "--reason",
         "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds",
         "60"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def stop(run):
    """End a run after its checks."""
    run.process.terminate()
    assert run.process.wait(timeout=100) == 143, run.output
    assert "--resume" in run.output


@pytest.mark.slow
def test_a_run_below_the_minimum_of_workers_waits_logs_the_reason_and_continues(tmp_path):
    with start_cluster(0, 1, 1) as cluster:
        options = ["--epochs", "300", "--period", "4", "--workers", "2"]
        with ClusterRun(cluster, tmp_path / "run", *options) as run:
            run.until_training(2)
            cluster.remove_node(removable_nodes(cluster)[0], allow_graceful=False)
            run.until_logged("1 of 2 workers are left")
            run.until_logged("with {CPU: 1}")
            run.until(lambda: list(run.path.glob("checkpoints/*/manifest.json")))
            cluster.add_node(num_cpus=1)
            check_end(run, epochs=300, faults=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_three_quarters_of_twelve_workers_may_be_lost_within_a_second(tmp_path, method):
    """Repeat the loss ``RAYDL_MASS_LOSSES`` times, each time once all twelve train again."""
    with start_cluster(12) as cluster:
        options = ["--method", method, "--period", "4", "--epochs", "99999", "--workers", "1:12"]
        options += ["--elastic.max-restarts", "3"]  # the losses of one event count as one
        with ClusterRun(cluster, tmp_path / "run", *options) as run:
            for _ in range(int(os.environ.get("RAYDL_MASS_LOSSES", "1"))):
                run.until_training(12)
                before = run.status()["num_samples"]
                chosen = random.sample(actor_pids(cluster, "WorkerActor"), 9)
                began = time.monotonic()
                for pid in chosen:
                    os.kill(pid, signal.SIGKILL)
                assert time.monotonic() - began < 1.0
                # Usually the three remaining workers train on before the others return.
                run.until(lambda: run.status()["num_workers"] < 12)
                run.until(lambda before=before: run.status()["num_samples"] > before + 5000)
            run.until_training(12)
            stop(run)


@pytest.mark.slow
def test_the_same_losses_at_the_same_rounds_give_the_same_bits(four_cpus, tmp_path):
    faults = [
        {"fault": "kill", "target": "rank 0", "at": "round 40"},
        {"fault": "kill", "target": "w1", "at": "round 90"},
    ]
    weights = []
    for name in ("a", "b"):
        options = ["--epochs", "60", "--period", "4", "--workers", "3"]
        with ClusterRun(four_cpus, tmp_path / name, *options, faults=faults) as run:
            check_end(run, epochs=60, faults=2)
        weights.append((run.path / "center.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_worker_is_removed_by_its_id_while_the_run_continues(four_cpus, tmp_path):
    with ClusterRun(four_cpus, tmp_path / "run", "--epochs", "400", "--workers", "1:3") as run:
        run.until_training(3)
        command = [sys.executable, "-m", "raydl", "remove", str(run.path), "w1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "w1 leaves after its next exchange" in done.stdout
        run.until_training(2)
        command = [sys.executable, "-m", "raydl", "status", str(run.path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        ids = [worker["worker_id"] for worker in json.loads(done.stdout)["workers"]]
        assert "w1" not in ids
        stop(run)
