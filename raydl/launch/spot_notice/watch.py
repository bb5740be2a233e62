"""Waits for the notice, then drains the Ray node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from raydl.errors import RaydlError
from raydl.launch.spot_notice.clouds import MetadataError, Source

_TRY_S = (8.0, 25.0)
"""Limits of one attempt to drain: it imports Ray, on a machine that is busy training. Between them
an attempt has half of the remaining time, so that there is a second attempt."""
_PAST_S = 60.0
"""Seconds past its end for which a machine retries: its clock may be wrong."""


class DrainError(RaydlError):
    """Ray did not accept the request to drain the node."""


def watch(
    source: Source,
    drain: Callable[[str, float], None],
    *,
    poll_s: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    log: Callable[[str], None] = print,
) -> int:
    """Poll until there is a notice, then drain; return the exit status.

    Args:
        source: source of the notice.
        drain: called with the cloud's reason and the remaining seconds.
        poll_s: seconds between two polls, and between two attempts to drain.
        clock: returns the Unix time.
        sleep: waits for a number of seconds.
        log: receives one line per event.
    """
    notice, problem = None, ""
    while notice is None:
        try:
            notice = source.notice(clock())
            if problem:
                log("the metadata service answers again")
            problem = ""
        except MetadataError as error:
            if not problem:  # once, not each second
                log(f"{error}; polling every {poll_s:g} s")
            problem = str(error)
        if notice is None:
            sleep(poll_s)
    log(f"{notice.reason}: this machine ends in {notice.ends_at - clock():.0f} s")
    while True:
        left_s = max(notice.ends_at - clock(), 1.0)  # try even if the clock is past the end
        try:
            drain(notice.reason, left_s)
            log(f"the node drains, with {left_s:.0f} s left")
            return 0
        except DrainError as error:
            if clock() + poll_s >= notice.ends_at + _PAST_S:
                log(f"{error}; no time is left")
                return 1
            log(f"{error}; retrying")
            sleep(poll_s)


def longest_try_s(left_s: float) -> float:
    """Return the time-out of one attempt to drain, in seconds, if ``left_s`` remain.

    >>> longest_try_s(120), longest_try_s(30), longest_try_s(1)
    (25.0, 15.0, 8.0)
    """
    least, most = _TRY_S
    return min(most, max(least, left_s / 2))


def drain_by_command(
    reason: str, deadline_s: float, *, node_id: str | None = None, address: str | None = None
) -> None:
    """Drain a Ray node with ``ray drain-node``.

    Args:
        reason: the cloud's reason.
        deadline_s: seconds until the machine ends.
        node_id: the node, in hex; None for the one of this machine.
        address: of the cluster; None for the one of this machine.

    Raises:
        DrainError: Ray rejected the request, could not be started, or took too long.
    """
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "drain-node",
        "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", reason,
        "--deadline-remaining-seconds", str(int(deadline_s)),
        *(["--node-id", node_id] if node_id else []),
        *(["--address", address] if address else []),
    ]  # fmt: skip
    # A cluster requires a token by default. Without --node-id Ray joins the cluster to find its
    # node; given an address, it never starts a cluster of its own.
    environment = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "auto", **os.environ}
    if address:
        environment["RAY_ADDRESS"] = address
    try_s = longest_try_s(deadline_s)
    try:
        subprocess.run(
            command, check=True, timeout=try_s, env=environment, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise DrainError(f"ray drain-node did not end within {try_s:.0f} s") from None
    except OSError as error:  # for example no memory for one more process
        raise DrainError(f"ray drain-node cannot be started: {error}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "nothing").splitlines()[-1]
        raise DrainError(f"ray drain-node failed: {last}") from None
