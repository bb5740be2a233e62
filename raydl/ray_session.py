"""Reaching a Ray cluster: the one a job runs in, or one started for this run."""

from __future__ import annotations

import atexit
import logging
import os

import ray


def connect() -> bool:
    """Connect to Ray; return whether a cluster was started on this machine for this process.

    A process that is connected stays as it is. Else ``RAY_ADDRESS`` (which ``ray job
    submit`` sets) names the cluster; without it a local one starts, and ends with us.
    """
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        return False
    # A cluster's processes and its clients must agree on authentication; left unset, only
    # the processes default to tokens.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray asks for this choice aloud at every start; raydl's zero-GPU actors want the new one.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    atexit.register(ray.shutdown)
    return True
