"""A run's view of the Ray cluster: what fits, where processes are, how to end one."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import state
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydl.config import ScalingConfig
from raydl.errors import ResourceError
from raydl.ray_backend.liveness import Times, times_of
from raydl.ray_backend.session import draining_nodes, nodes_to_add

_LOOK_EVERY_S = 1.0
_RAY_FAILS = (RayError, RuntimeError, OSError, ValueError, AttributeError)
_OPTIONS = {"CPU": "scaling.cpus_per_worker", "GPU": "scaling.gpus_per_worker"}
_LINGER_S = 60.0
"""How long an actor stays in which nobody meets, in seconds."""
_known_to_add: list[tuple[str, dict[str, float], int]] = []

START_S = 120.0
"""The longest start of a process: importing torch on a busy machine takes tens of seconds."""
Place = tuple[str, int]
"""Location of a process: (node by hex id, process id), or (host, port)."""


class Notices:
    """The notices that nodes have got; Ray is asked once a second at most."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        """Nodes that will go soon, by hex id."""
        self._told: set[str] = set()
        self._looked_at = -math.inf

    def new(self, homes: Mapping[str, str]) -> list[str]:
        """Return the workers, of those with their nodes, whose node got notice; each once."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return []
        self._looked_at, self.nodes = now, set(draining_nodes())
        new = [w for w, node in homes.items() if node in self.nodes and w not in self._told]
        self._told = {w for w in self._told if w in homes} | set(new)
        return new


def node_here() -> str:
    """Return the id of the node that this process runs on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def kill_process(place: Place, *, home: str) -> None:
    """End a process that hears no call, on any node."""
    node, pid = place
    if node == home:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    _kill_here.options(scheduling_strategy=where).remote(pid)


def ask_times(place: Place) -> Any:
    """Ask a node for the times of a process; return the reference of the answer."""
    node, pid = place
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return _times_here.options(scheduling_strategy=where).remote(pid)


@ray.remote(num_cpus=0, max_retries=0)
def _times_here(pid: int) -> Times | None:
    return times_of(pid)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_here(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def worker_options(scaling: ScalingConfig, *, not_on: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a worker's actor.

    Args:
        scaling: what it reserves.
        not_on: nodes to stay away from, by hex id. If there is no other node, Ray would
            otherwise try a draining one again and again.
    """
    resources = scaling.resources()
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources or None,
        "scheduling_strategy": "SPREAD",
        "label_selector": {"ray.io/node-id": f"!in({','.join(not_on)})"} if not_on else None,
    }


def listed(resources: dict[str, float]) -> str:
    """Return resources as a person reads them."""
    return "{" + ", ".join(f"{k}: {v:g}" for k, v in resources.items()) + "}"


def awaited(workers: Sequence[ActorHandle], scaling: ScalingConfig) -> str:
    """Return the reason why workers of this cluster are not up yet, in one sentence."""
    num_starting = sum(place_held(worker) is not None for worker in workers)
    num_missing = len(workers) - num_starting
    parts = [f"{num_starting} that {_are(num_starting)} starting"] if num_starting else []
    if num_missing or not workers:
        parts.append(_room_for(num_missing, scaling.resources()))
    is_elastic = scaling.min_workers < scaling.max_workers
    enough = f"; {scaling.min_workers} {_are(scaling.min_workers)} enough" if is_elastic else ""
    return f"{' and '.join(parts)}{enough}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def place_held(worker: ActorHandle) -> Place | None:
    """Return where Ray has given a worker its room: its process is there, and imports torch, say.

    None: it waits for room, or Ray does not answer.
    """
    with suppress(*_RAY_FAILS):
        told = state.actor_table(worker._ray_actor_id.hex())
        if told.get("Pid"):
            return told["Address"]["NodeID"], told["Pid"]
    return None


def has_ended(actor_id: str, pid: int) -> bool:
    """Return whether a process of an actor has ended, as far as Ray knows; it may have another."""
    with suppress(*_RAY_FAILS):
        told = state.actor_table(actor_id)
        return told.get("State") in ("DEAD", "RESTARTING") or told.get("Pid", pid) != pid
    return False


def end_when_quiet(quiet_s: Callable[[], float]) -> None:
    """Let this actor end by itself once it has been quiet for a minute.

    Args:
        quiet_s: returns for how many seconds nobody has been there.
    """
    actor = ray.get_runtime_context().current_actor

    def watch() -> None:
        while (seconds := quiet_s()) < _LINGER_S:
            time.sleep(min(1.0, _LINGER_S - seconds))
        ray.kill(actor)

    threading.Thread(target=watch, daemon=True).start()


def _room_for(num_missing: int, need: Mapping[str, float]) -> str:
    """Return the resources that pending workers need, and those that this cluster has."""
    try:
        have, free = ray.cluster_resources(), ray.available_resources()
    except _RAY_FAILS:  # a sentence is not worth a run
        return f"{num_missing} more, {listed(dict(need))} each; Ray does not say what there is"
    return what_is_missing(num_missing, need, have, _nodes_to_add(), free=free)


def _nodes_to_add() -> list[tuple[str, dict[str, float], int]]:
    """Return the nodes that an autoscaler may start; cached, since this is asked often."""
    if not _known_to_add:
        with suppress(*_RAY_FAILS):
            _known_to_add.extend(nodes_to_add())
    return _known_to_add


def what_is_missing(
    num_missing: int,
    need: Mapping[str, float],
    have: Mapping[str, float],
    to_add: Iterable[tuple[str, Mapping[str, float], int]] = (),
    *,
    free: Mapping[str, float] | None = None,
) -> str:
    """Return the resources pending workers need, those present, and those still to come.

    Args:
        num_missing: workers that wait for room.
        need: what each of them reserves.
        have: what all nodes of the cluster hold together, used or not.
        to_add: the nodes that an autoscaler may start: (name, resources, how many there
            may be, below 0: any number).
        free: what of ``have`` nobody uses now; None: not known.
    """
    names = sorted({*need, "CPU", "GPU"})
    there = {n: have.get(n, 0.0) for n in names if n in need or n in have}
    sentence = (
        f"{num_missing} more worker{'s' if num_missing > 1 else ''}: needs {listed(dict(need))} "
        f"each; the cluster has {listed(there)}"
    )
    if free is not None:
        sentence += f", free {listed({n: free.get(n, 0.0) for n in there})}"
    to_add = list(to_add)
    fitting = [t for t in to_add if all(t[1].get(n, 0) >= v for n, v in need.items())]
    nodes = [
        f"{name} nodes with {listed({k: resources[k] for k in names if k in resources})}"
        f"{f', {n} in all' if n > 0 else ''}"
        for name, resources, n in fitting
    ]
    if nodes:
        return f"{sentence}; the autoscaler can add {'; or '.join(nodes)}"
    return f"{sentence}; no node the autoscaler can add is large enough" if to_add else sentence


def check_room(scaling: ScalingConfig) -> None:
    """Refuse more workers than the nodes hold, for a cluster to which nothing is added.

    Raises:
        ResourceError: it says how many they hold, and what to lower.
    """
    need, fewest = scaling.resources(), scaling.min_workers
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = _num_that_fit(need, nodes, scaling.max_workers)
    if fit >= fewest:
        return
    have = {name: sum(node.get(name, 0.0) for node in nodes) for name in need}
    scarce = [k for k, v in need.items() if _num_that_fit({k: v}, nodes, 0) < fewest]
    to_lower = ["scaling.num_workers"] if fit else []
    to_lower += [_OPTIONS.get(name, "scaling.resources_per_worker") for name in scarce]
    raise ResourceError(
        f"scaling.num_workers asks for {fewest} worker{'s' if fewest > 1 else ''} with "
        f"{listed(need)} each, this machine has {listed(have)} and holds {fit}; lower "
        f"{' or '.join(dict.fromkeys(to_lower))}"
    )


def has_room_elsewhere(scaling: ScalingConfig, not_on: Iterable[str]) -> bool:
    """Whether a node besides some, by hex id, holds a worker, or an autoscaler may add one."""
    there = [
        node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in not_on
    ]
    need = scaling.resources()
    return _num_that_fit(need, [*there, *(t[1] for t in _nodes_to_add())], 1) > 0


def _num_that_fit(
    need: Mapping[str, float], nodes: Iterable[Mapping[str, float]], unlimited: int
) -> int:
    """Return how many workers empty nodes hold; ``unlimited`` per node if one needs nothing."""
    # A sum of shares may be a little less than the whole: 0.3 is in 0.9 three times.
    fits = [[int(node.get(k, 0) / v + 1e-9) for k, v in need.items()] for node in nodes]
    return sum(min(of_node, default=unlimited) for of_node in fits)


def send_by_value(rule: type) -> None:
    """Let a rule of the user's own travel with its code: no node needs its module."""
    module = sys.modules[rule.__module__]
    if rule.__module__.split(".")[0] not in ("raydl", "__main__"):
        ray.cloudpickle.register_pickle_by_value(module)
