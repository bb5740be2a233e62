"""Ray exports the curves of a run to Prometheus."""

import contextlib
import time
import urllib.request

import pytest
import ray
from clusters import start_cluster
from ray.cluster_utils import Cluster

from raydl.ray_backend.ray_metrics import RayMetrics

BOUND_S = 90

pytestmark = pytest.mark.cluster


def exported():
    """Return the lines about raydl that the nodes of the cluster export."""
    lines = []
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            lines += answer.read().decode().splitlines()
    return [line for line in lines if line.startswith("ray_raydl_") and 'run="exported"' in line]


@ray.remote(num_cpus=0)
class Driver:
    """A process that connects once, as a driver does: Ray resets its counts at each connection."""

    def measure(self):
        self.metrics = RayMetrics("exported", first_sample=10)
        self.metrics.scalars({"center/accuracy": 0.5, "worker_step_s/w3": 0.25}, num_samples=10)
        self.metrics.scalars({"center/accuracy": 0.75}, num_samples=30)


@pytest.fixture
def cluster():
    with start_cluster(1, kind=Cluster) as cluster:
        ray.init(address=cluster.address)
        yield
        ray.shutdown()


def test_the_nodes_export_the_drivers_metrics(cluster):
    driver = Driver.remote()
    ray.get(driver.measure.remote(), timeout=BOUND_S)
    expected = {
        "ray_raydl_center_accuracy": "0.75",
        "ray_raydl_worker_step_s": "0.25",
        "ray_raydl_samples_total": "20.0",
    }
    deadline, lines = time.monotonic() + BOUND_S, []
    while len(lines) < len(expected) and time.monotonic() < deadline:
        time.sleep(0.5)  # the nodes collect every few seconds
        with contextlib.suppress(OSError):  # the next attempt reads it
            lines = exported()
    found = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines}
    assert found == expected
    assert any('worker="w3"' in line for line in lines)
