"""The Ray cluster as a run sees it: its resources, where processes are, and how to end one."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydl.config import ScalingConfig
from raydl.errors import ResourceError
from raydl.ray_backend import ray_version
from raydl.ray_backend.liveness import kill_local, start_of, times_of
from raydl.ray_backend.session import draining_nodes, nodes_to_add

_CHECK_EVERY_S = 1.0
_RAY_ERRORS = (RayError, RuntimeError, OSError, ValueError, AttributeError)
_OPTIONS = {"CPU": "scaling.cpus_per_worker", "GPU": "scaling.gpus_per_worker"}
_LINGER_S = 60.0
"""How long a rendezvous actor remains without members, in seconds."""
_known_to_add: list[tuple[str, dict[str, float], int]] = []

START_S = 120.0
"""The longest start of a process, in seconds: to import torch on a busy machine takes tens."""


class Place(NamedTuple):
    """Where a process runs."""

    node: str
    """Its node, by hex id."""
    pid: int
    start: int | None = None
    """See ``liveness.start_of``; None: not known yet, so that it cannot be killed by its id."""

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process."""
        return cls(node_here(), os.getpid(), start_of(os.getpid()))


class Notices:
    """Drain notices of nodes, requested from Ray once a second at most."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        """Nodes that drain, by hex id."""
        self._reported: set[str] = set()
        self._checked_at = -math.inf

    def new(self, homes: Mapping[str, str]) -> dict[str, float]:
        """Return the workers whose nodes drain, each once, with the seconds that they have.

        The seconds are 0 if Ray knows no deadline.

        Args:
            homes: the node of each worker, by hex id.
        """
        now = time.monotonic()
        if now - self._checked_at < _CHECK_EVERY_S:
            return {}
        deadlines = draining_nodes()
        self._checked_at, self.nodes = now, set(deadlines)
        to_unix = time.time()
        new = {
            w: max(0.0, deadlines[node] / 1000 - to_unix)
            for w, node in homes.items()
            if node in deadlines and w not in self._reported
        }
        self._reported = {w for w in self._reported if w in homes} | set(new)
        return new


def node_here() -> str:
    """Return the id of the node that this process runs on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def kill_process(place: Place, *, home: str) -> None:
    """Kill a process by its id, on any node: a stopped process receives no call.

    A process that has ended is no error, and neither is another one that has its id now.
    """
    if place.node == home:
        kill_local(place.pid, place.start)
    else:
        _on(place, kill_local, place.pid, place.start)


def request_times(place: Place) -> Any:
    """Request the times of a process from its node; return the reference of the answer."""
    return _on(place, times_of, place.pid)


def request_start(place: Place) -> Any:
    """Request from its node when a process started; return the reference of the answer."""
    return _on(place, start_of, place.pid)


def _on(place: Place, act: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a process's node; return the reference of the answer."""
    where = NodeAffinitySchedulingStrategy(place.node, soft=False)
    return _call.options(scheduling_strategy=where).remote(act, *arguments)


@ray.remote(num_cpus=0, max_retries=0)
def _call(act: Callable[..., Any], *arguments: Any) -> Any:
    return act(*arguments)


def worker_options(scaling: ScalingConfig, *, not_on: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a worker's actor.

    Args:
        scaling: the resources that it reserves.
        not_on: nodes to avoid, by hex id. Without it, Ray would try a draining node again and
            again if it is the only one.
    """
    resources = scaling.resources()
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources or None,
        "scheduling_strategy": "SPREAD",
        "label_selector": {"ray.io/node-id": f"!in({','.join(sorted(not_on))})"}
        if not_on
        else None,
    }


def spare_options(scaling: ScalingConfig, node: str, not_on: Iterable[str]) -> dict[str, Any]:
    """Return the options of the actor of a hot spare.

    Args:
        scaling: the resources of a worker, of which a spare reserves all but CPUs.
        node: the node to start on, by hex id; empty: any.
        not_on: nodes to avoid, by hex id.
    """
    options = worker_options(scaling, not_on=not_on)
    options["num_cpus"] = 0
    if node and not options["num_gpus"] and not options["resources"]:
        options["label_selector"] = None
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return options


def listed(resources: Mapping[str, float]) -> str:
    """Return resources as text."""
    return "{" + ", ".join(f"{k}: {v:g}" for k, v in resources.items()) + "}"


def describe_pending(workers: Sequence[ActorHandle], scaling: ScalingConfig) -> str:
    """Return what the pending workers wait for, as the rest of a sentence; empty without any."""
    if not workers:
        return ""
    num_starting = sum(place_of(worker) is not None for worker in workers)
    num_missing = len(workers) - num_starting
    plural = "s" if num_starting > 1 else ""
    parts = [f"{num_starting} starting worker{plural}"] if num_starting else []
    if num_missing:
        need = scaling.resources()
        try:
            have, free = ray.cluster_resources(), ray.available_resources()
        except _RAY_ERRORS:  # no reason to fail the run
            parts.append(
                f"{_wanted(num_missing, need, 'more ')}; Ray does not report the cluster's "
                f"resources"
            )
        else:
            parts.append(what_is_missing(num_missing, need, have, _nodes_to_add(), free=free))
    fewest = scaling.min_workers
    is_elastic = fewest < scaling.max_workers
    enough = f"; {fewest} {'is' if fewest == 1 else 'are'} enough" if is_elastic else ""
    return f"{' and '.join(parts)}{enough}"


def place_of(worker: ActorHandle) -> Place | None:
    """Return the place where Ray started a worker's process, which may still import libraries.

    None: the worker waits for resources, or Ray does not answer or is of another version.
    """
    with suppress(*_RAY_ERRORS):
        actor = _known_of(worker)
        if actor.get("Pid"):
            return Place(actor["Address"]["NodeID"], actor["Pid"])
    return None


def _known_of(actor: ActorHandle | str) -> dict[str, Any]:
    """Return what Ray's control store has about an actor; empty with another version of Ray.

    Args:
        actor: its handle, or its id.
    """
    if not ray_version.is_tested():
        return {}
    from ray._private.state import state

    actor_id = actor if isinstance(actor, str) else actor._ray_actor_id.hex()
    known: dict[str, Any] = state.actor_table(actor_id)
    return known


def has_ended(actor_id: str, pid: int) -> bool:
    """Whether a process of an actor has ended, as far as Ray knows. Ray may have restarted it."""
    with suppress(*_RAY_ERRORS):
        actor = _known_of(actor_id)
        return actor.get("State") in ("DEAD", "RESTARTING") or actor.get("Pid", pid) != pid
    return False


def end_when_unused(unused_s: Callable[[], float]) -> None:
    """Let this actor end itself once it has been without members for a minute.

    Args:
        unused_s: returns the seconds without members.
    """
    actor = ray.get_runtime_context().current_actor

    def watch() -> None:
        while (seconds := unused_s()) < _LINGER_S:
            time.sleep(min(1.0, _LINGER_S - seconds))
        ray.kill(actor)

    threading.Thread(target=watch, daemon=True).start()


def _nodes_to_add() -> list[tuple[str, dict[str, float], int]]:
    """Return the nodes that an autoscaler may start; cached, since it is called often."""
    if not _known_to_add:
        with suppress(*_RAY_ERRORS):
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
    """Return the resources that pending workers need, and those that exist or may be added.

    Args:
        num_missing: workers that wait for resources.
        need: resources that each of them reserves.
        have: resources of all nodes of the cluster, used or not.
        to_add: nodes that an autoscaler may start: (name, resources, maximum number; below 0:
            unlimited).
        free: the unused part of ``have``; None: unknown.
    """
    names = sorted({*need, "CPU", "GPU"})
    present = {n: have.get(n, 0.0) for n in names if n in need or n in have}
    sentence = f"{_wanted(num_missing, need, 'more ')}; the cluster has {listed(present)}"
    if free is not None:
        sentence += f", free {listed({n: free.get(n, 0.0) for n in present})}"
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


def _wanted(count: int, need: Mapping[str, float], more: str = "") -> str:
    """Return workers and their resources: ``2 more workers with {CPU: 1} each``."""
    if count == 1:
        return f"1 {more}worker with {listed(need)}"
    return f"{count} {more}workers with {listed(need)} each"


def check_room(scaling: ScalingConfig) -> None:
    """Check that the nodes of a cluster without an autoscaler can hold the fewest workers.

    Raises:
        ResourceError: if they cannot; it says how many fit, and which setting to lower.
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
        f"scaling.num_workers requests {_wanted(fewest, need)}, but this machine has "
        f"{listed(have)}, enough for {fit}; lower "
        f"{' or '.join(dict.fromkeys(to_lower))}, or set RAY_ADDRESS=auto if a Ray cluster runs "
        f"here"
    )


def fits_elsewhere(scaling: ScalingConfig, not_on: Iterable[str]) -> bool:
    """Whether a worker fits on a node not in ``not_on``, or on one that an autoscaler may add."""
    nodes = [
        node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in not_on
    ]
    nodes += [resources for _, resources, _ in _nodes_to_add()]
    return _num_that_fit(scaling.resources(), nodes, 1) > 0


def _num_that_fit(
    need: Mapping[str, float], nodes: Iterable[Mapping[str, float]], unlimited: int
) -> int:
    """Return how many workers fit on empty nodes: ``unlimited`` per node if they need nothing."""
    # Rounded up a little, so that 0.3 fits in 0.9 three times in spite of floating point.
    fits = [[int(node.get(k, 0) / v + 1e-9) for k, v in need.items()] for node in nodes]
    return sum(min(of_node, default=unlimited) for of_node in fits)


def send_by_value(rule: type) -> None:
    """Let Ray send a user's rule with its code, so that no node needs its module."""
    module = sys.modules[rule.__module__]
    if rule.__module__.split(".")[0] not in ("raydl", "__main__"):
        ray.cloudpickle.register_pickle_by_value(module)
