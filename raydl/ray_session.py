"""Reaching a Ray cluster: the one a job runs in, or one started for this run.

Ray reads its environment when it is imported, so :func:`prepare` comes before that.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time


def prepare() -> None:
    """Decide what Ray reads from the environment at import, where the user did not.

    Does nothing in a process that has imported Ray already, or has a cluster to go to.
    """
    if "ray" in sys.modules or os.environ.get("RAY_ADDRESS"):
        return
    # A cluster and its clients must agree on authentication; say it aloud to both.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # What Ray will do by default: actors without a GPU do not see any.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def connect() -> bool:
    """Connect to Ray; return whether a cluster was started on this machine for this process.

    A process that is connected stays as it is. Else ``RAY_ADDRESS`` (which ``ray job
    submit`` sets) names the cluster; without it a local one starts, and ends with us.
    """
    import ray

    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        return False
    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    atexit.register(ray.shutdown)
    return True


def draining_nodes() -> dict[str, int]:
    """Return the nodes that got notice, by hex id: when they end, in ms of Unix time; 0: unknown.

    Ray has no public call for it; this is the one place that uses its private one.
    """
    from ray._private.state import state

    nodes: dict[str, int] = state.get_draining_nodes()
    return nodes


def drain_node(node_id: str, *, deadline_s: float) -> None:
    """Give a node notice, as `ray drain-node` does. Nothing is killed by it.

    Raises:
        RuntimeError: Ray refused.
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "raydl was asked to",
        int((time.time() + deadline_s) * 1000),
    )
    if not accepted:
        raise RuntimeError(f"node {node_id} can not be drained: {why}")
