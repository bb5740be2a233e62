"""A run that starts small takes in a worker when a node comes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.cluster

BOUND_S = 150


@pytest.fixture
def small_cluster():
    """One node with one CPU; the test may add more."""
    # The token that cluster and clients share; one that is there stays as it is.
    ray = Path(sys.executable).with_name("ray")
    subprocess.run([ray, "get-auth-token", "--generate"], check=True, capture_output=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
        shutdown_at_exit=False,
    )
    yield cluster
    cluster.shutdown()


def wait_for(path, words, process):
    """Wait until a log says something, while the process goes on."""
    deadline = time.monotonic() + BOUND_S
    while words not in path.read_text():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


def test_a_worker_joins_when_a_node_is_added_and_the_run_continues(small_cluster, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    words = [
        sys.executable, "-m", "raydl", "train", "--workers", "1:2", "--epochs", "400",
        "--run.progress", "plain", "--run-dir", str(run),
        "--elastic.no-leave-out-slow",  # else a stall on this machine is a generation, too
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": small_cluster.address, "RAY_AUTH_MODE": "token"}
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment)
    try:
        wait_for(log, "generation 1: w0 starts", process)
        small_cluster.add_node(num_cpus=1)
        wait_for(log, "generation 2: w1 joins", process)
        assert process.wait(timeout=BOUND_S) == 0, log.read_text()
    finally:
        process.kill()
    result = json.loads((run / "result.json").read_text())
    assert result["generations"] == 2
    assert result["workers"] == 2
    assert result["samples"] == 400 * 1438
    assert result["center_accuracy"] >= 0.97
