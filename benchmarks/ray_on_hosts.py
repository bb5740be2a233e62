"""A Ray cluster on hosts of ``hosts.py``: a head in host 0, and a node in each other one.

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
"""The longest start of the head, or of all other nodes: some seconds where nobody else computes."""
OBJECT_STORE_BYTES = 100 << 20
PULL_MS = "600000"
"""How long a node waits for an object before it asks for it once more. By default 10 s: what takes
a thin link longer is then sent a second time beside the first (Ray's issue 56523)."""
USUAL_PULL_MS = "10000"
"""The default, for hosts that are cut off: a question that is lost with one is asked again."""
_LONGEST_FOLDER = 38
_SAID = "said"
"""What the start of a node printed, in its folder."""
_COMMON = (
    "--num-cpus", "1", "--object-store-memory", str(OBJECT_STORE_BYTES),
    "--min-worker-port", "0", "--max-worker-port", "0",
)  # fmt: skip


def start_ray(
    hosts: Hosts, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Start Ray in all hosts, one CPU each; return the environment of a driver in host 0.

    The cluster ends with the hosts.

    Args:
        hosts: entered.
        folder: of what Ray writes, a folder in it for each host; nobody removes it.
        more: what else all nodes and the driver have in their environment.

    Raises:
        RuntimeError: a node did not start; the text has what it said.
        subprocess.SubprocessError: the head did not start.
    """
    # Ray's sockets lie deep below it, and the path of a socket has 107 bytes at most.
    assert len(str(folder)) <= _LONGEST_FOLDER, f"{folder} is too long for sockets below it"
    ray = str(Path(sys.executable).with_name("ray"))
    # The token that all nodes share; one that is there stays as it is.
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
        said, _ = process.communicate(timeout=START_S)
        if process.returncode:
            raise RuntimeError(f"the node of host {host} did not start:\n{said}")
    return {**environment, "RAY_ADDRESS": address}


def rejoin_ray(
    hosts: Hosts, host: int, folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> bool:
    """Start the node of a host again if it has ended; return whether it had.

    Ray takes a node for lost that was cut off for some half a minute, and ends it when it hears of
    it again.

    Args:
        hosts: of the cluster.
        host: not that of the head.
        folder: a new one for what the node writes; its path is short.
        environment: what ``start_ray`` returned.
        timeout_s: the longest start.

    Raises:
        subprocess.SubprocessError: it did not start.
    """
    if has_ray(hosts, host):
        return False
    code = join_ray(hosts, host, folder, environment).wait(timeout=timeout_s)
    if code:
        raise subprocess.CalledProcessError(code, "ray start", (folder / _SAID).read_text())
    return True


def has_ray(hosts: Hosts, host: int) -> bool:
    """Return whether the node of a host runs."""
    return any("/raylet/raylet " in words for words in hosts.processes(host).values())


def join_ray(
    hosts: Hosts, host: int, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Begin to start the node of a host anew; return what ends, with 0, once it is up.

    Args:
        hosts: of the cluster.
        host: not that of the head.
        folder: a new one for what the node writes; its path is short.
        environment: what ``start_ray`` returned.
    """
    ray = str(Path(sys.executable).with_name("ray"))
    words = [ray, "start", "--address", environment["RAY_ADDRESS"], *_place(hosts, host, folder)]
    with (folder / _SAID).open("w") as log:
        environment = {**environment, "RAY_ADDRESS": ""}
        return hosts.popen(host, words, env=environment, stdout=log, stderr=log)


def _place(hosts: Hosts, host: int, folder: Path) -> list[str]:
    """Return the options of a host's node. Nodes that share a folder disturb one another."""
    return [
        "--node-ip-address", hosts.address(host), "--temp-dir", str(folder / str(host)), *_COMMON,
    ]  # fmt: skip
