"""Starts a Ray cluster on hosts of ``hosts.py``: the head in host 0, a node in each other host.

with Hosts(4, mbit=100) as hosts:
    environment = start_ray(hosts, folder)
    hosts.run(0, [sys.executable, "-m", "raydl", "train"], env=environment, timeout_s=100)
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.hosts import Hosts

PORT = 6379
START_S = 100.0
"""Time-out in seconds for the start of the head, or of all other nodes; an idle machine needs a few
seconds."""
OBJECT_STORE_BYTES = 100 << 20
PULL_MS = "600000"
"""Milliseconds until a node repeats its request for an object. With Ray's default of 10 s, an
object that a thin link transfers more slowly is sent twice (Ray's issue 56523)."""
USUAL_PULL_MS = "10000"
"""Ray's default, for hosts that are cut off: a lost request is repeated."""
_LONGEST_FOLDER = 38
_LOG = "log"
"""File with the output of a node's start, in its folder."""
_COMMON = (
    "--num-cpus", "1", "--object-store-memory", str(OBJECT_STORE_BYTES),
    "--min-worker-port", "0", "--max-worker-port", "0",
)  # fmt: skip


def start_ray(
    hosts: Hosts, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Start Ray with one CPU in each host, and return the environment of a driver in host 0.

    The cluster ends with the hosts.

    Args:
        hosts: hosts whose context is entered.
        folder: folder for Ray's files, with a subfolder per host; the caller deletes it.
        more: further environment variables of all nodes and of the driver.

    Raises:
        RuntimeError: if a node did not start; with its output.
        subprocess.SubprocessError: if the head did not start.
    """
    # The folder contains Ray's sockets, whose paths may have at most 107 bytes.
    assert len(str(folder)) <= _LONGEST_FOLDER, f"{folder} is too long for sockets below it"
    ray = str(Path(sys.executable).with_name("ray"))
    # Creates the token that all nodes share, unless there is one.
    subprocess.run([ray, "get-auth-token", "--generate"], check=True, capture_output=True)
    address = f"{hosts.address(0)}:{PORT}"
    environment = {
        "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "",
        "RAY_object_manager_pull_timeout_ms": PULL_MS, **more,
    }  # fmt: skip
    head = [ray, "start", "--head", "--include-dashboard", "false", "--port", str(PORT)]
    hosts.run(0, [*head, *_place(hosts, 0, folder)], env=environment, timeout_s=START_S)
    join = [ray, "start", "--address", address]
    started = {
        host: hosts.popen(
            host, [*join, *_place(hosts, host, folder)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for host in range(1, hosts.number)
    }  # fmt: skip
    for host, process in started.items():
        output, _ = process.communicate(timeout=START_S)
        if process.returncode:
            raise RuntimeError(f"the node of host {host} did not start:\n{output}")
    return {**environment, "RAY_ADDRESS": address}


def rejoin_ray(
    hosts: Hosts, host: int, folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> bool:
    """Restart the node of a host if it has ended, and return whether it had.

    Ray declares a node dead after about half a minute without contact, and ends it when it
    reconnects.

    Args:
        hosts: hosts of the cluster.
        host: number of the host, not that of the head.
        folder: new folder for the node's files, with a short path.
        environment: the environment that ``start_ray`` returned.
        timeout_s: time-out of the start, in seconds.

    Raises:
        subprocess.SubprocessError: if the node did not start.
    """
    if has_ray(hosts, host):
        return False
    code = join_ray(hosts, host, folder, environment).wait(timeout=timeout_s)
    if code:
        raise subprocess.CalledProcessError(code, "ray start", (folder / _LOG).read_text())
    return True


def has_ray(hosts: Hosts, host: int) -> bool:
    """Return whether the node of a host runs."""
    return any("/raylet/raylet " in command for command in hosts.processes(host).values())


def join_ray(
    hosts: Hosts, host: int, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Begin to restart the node of a host; the process returned ends with 0 once the node is up.

    Args:
        hosts: hosts of the cluster.
        host: number of the host, not that of the head.
        folder: new folder for the node's files, with a short path.
        environment: the environment that ``start_ray`` returned.
    """
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--address", environment["RAY_ADDRESS"], *_place(hosts, host, folder)]
    with (folder / _LOG).open("w") as log:
        environment = {**environment, "RAY_ADDRESS": ""}
        return hosts.popen(host, command, env=environment, stdout=log, stderr=log)


def _place(hosts: Hosts, host: int, folder: Path) -> list[str]:
    """Return the options of a host's node; nodes must not share a folder."""
    return [
        "--node-ip-address", hosts.address(host), "--temp-dir", str(folder / str(host)), *_COMMON,
    ]  # fmt: skip
