"""Runs on a cluster of several nodes on this machine, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from processes import command_of, descendants_of
from programs import Program
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from raydl.ray_backend import session

BOUND_S = 200


class SmallCluster(Cluster):
    """A cluster without a dashboard, whose nodes start no processes in advance.

    Its nodes are those of a cluster that a run starts for itself: the agents are without jobs and
    metrics, which saves some 3 s of CPU time on each node, and a worker process does not import Ray
    before it becomes a fork. There is no log monitor, which reads the output of all workers: in a
    cluster that many tests share it uses 10 s in ten minutes.
    """

    def add_node(self, *args: Any, **kwargs: Any) -> Any:
        with (
            session._without_dashboard(),
            session._own_setup_worker(),
            mock.patch.dict(os.environ, RAY_prestart_worker_first_driver="0"),
        ):
            return super().add_node(*args, include_log_monitor=False, **kwargs)


@contextlib.contextmanager
def start_cluster(*cpus: int, kind: type[Cluster] = SmallCluster) -> Iterator[Cluster]:
    """Yield a cluster whose head has ``cpus[0]`` CPUs, with a further node per other number."""
    _ensure_token()
    # Even without a dashboard, Ray tries its port, and leaves a socket open if that is not free.
    head = {"num_cpus": cpus[0], "include_dashboard": False, "dashboard_port": free_port()}
    cluster = kind(
        initialize_head=True,
        head_node_args=head,
        shutdown_at_exit=False,
    )
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count)
        yield cluster
    finally:
        cluster.shutdown()


def _ensure_token() -> None:
    """Create the token that cluster and clients share, unless there is one."""
    if "RAY_AUTH_TOKEN" not in os.environ and not Path("~/.ray/auth_token").expanduser().exists():
        ray = Path(sys.executable).with_name("ray")
        subprocess.run([ray, "get-auth-token", "--generate"], check=True, capture_output=True)


def free_port() -> int:
    """Return a free port that will not be assigned to others.

    The kernel assigns ephemeral ports above this range, and Ray assigns ports below it to workers.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)


def cluster_environment(address: str) -> dict[str, str]:
    """Return the environment of a program that joins a cluster; without an address: empty."""
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"} if address else {}


class ClusterRun:
    """A ``raydl train`` process on a cluster, with its output in a file."""

    def __init__(
        self,
        cluster: Cluster,
        path: Path,
        *options: str,
        faults: list[dict[str, Any]] | None = None,
        program: Sequence[str] = ("-m", "raydl"),
    ) -> None:
        self.path = path
        self.log = path.with_suffix(".log")
        words = [
            *program, "train", "--run.progress", "plain", "--run-dir", str(path), *options
        ]  # fmt: skip
        if faults:
            plan = path.with_suffix(".yaml")
            plan.write_text(yaml.safe_dump({"faults": faults}))
            words += ["--fault-plan", str(plan)]
        environment = {**os.environ, **cluster_environment(cluster.address), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = Program(words, output=log, environment=environment)

    def __enter__(self) -> ClusterRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def events(self) -> list[str]:
        """The logged events without their times, without lines of progress."""
        lines = [line.partition("] ")[2] for line in self.output.splitlines() if line[:1] == "["]
        return [line for line in lines if not line.startswith(("epoch", "step"))]

    def wait(self, bound_s: float = BOUND_S) -> None:
        """Wait for the end of the run, and fail if it fails or times out."""
        try:
            assert self.process.wait(timeout=bound_s) == 0, self.output
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run did not end within {bound_s} s:\n{self.output}"
            ) from None

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, and fail if the run ends before."""
        deadline = time.monotonic() + BOUND_S
        while True:
            has_ended = self.process.poll() is not None  # before the condition is checked
            if condition():
                return
            assert not has_ended, f"the run ended before:\n{self.output}"
            assert time.monotonic() < deadline, f"timed out:\n{self.output}"
            time.sleep(0.05)

    def until_logged(self, text: str) -> None:
        """Wait until the output contains a text."""
        self.until(lambda: text in self.output)

    def status(self) -> dict[str, Any]:
        """Return the content of ``status.json``, or an empty status."""
        try:
            status: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {"workers": [], "num_workers": 0, "state": ""}
        return status

    def until_training(self, num_workers: int) -> None:
        """Wait until ``num_workers`` workers train, by a status that is written after this call."""
        since = time.time()

        def all_train() -> bool:
            status = self.status()
            is_new = status.get("told_at", 0.0) > since
            return is_new and (status["num_workers"], status["state"]) == (num_workers, "training")

        self.until(all_train)

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        return result


def actor_pids_on(node: Any, name: str) -> list[int]:
    """Return the process ids of all actors of a class on a node."""
    raylet = node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid
    below = descendants_of(raylet)
    return [pid for pid in below if command_of(pid)[0].startswith(f"ray::{name}")]


def actor_pids(cluster: Cluster, name: str) -> list[int]:
    """Return the process ids of all actors of a class on a cluster."""
    return [pid for node in cluster.list_all_nodes() for pid in actor_pids_on(node, name)]


def removable_nodes(cluster: Cluster) -> list[Any]:
    """Return the nodes that may be removed: all but the head and the driver's node.

    If all nodes are on one machine, Ray connects a driver to any of them; the center runs there.
    """
    return [node for node in cluster.worker_nodes if not actor_pids_on(node, "CenterActor")]
