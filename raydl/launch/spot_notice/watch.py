"""Wait for the notice, then let Ray's node drain."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from raydl.errors import RaydlError
from raydl.launch.spot_notice.clouds import MetadataError, Notice, Source

_TRY_S = (8.0, 25.0)
"""The least and the most time of one try to drain: it imports Ray, on a machine that is busy
training. In between, half of what is left, so that there is a second try."""
_PAST_S = 60.0
"""So long past its end, by a clock that may be wrong, a machine that is still there tries on."""


class DrainError(RaydlError):
    """Ray did not accept that the node drains."""


def watch(
    source: Source,
    drain: Callable[[str, float], None],
    *,
    poll_s: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    log: Callable[[str], None] = print,
) -> int:
    """Ask until there is a notice, then drain; return the exit status.

    Args:
        source: whom to ask.
        drain: called with what the cloud said and the seconds that are left.
        poll_s: seconds between two questions, and between two tries to drain.
        clock: tells the Unix time.
        sleep: waits.
        log: takes one line per event.
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
                log(f"{error}; asking again every {poll_s:g} s")
            problem = str(error)
        if notice is None:
            sleep(poll_s)
    log(f"{notice.reason}: this machine ends in {notice.ends_at - clock():.0f} s")
    return _drain_in_time(notice, drain, poll_s, clock, sleep, log)


def _drain_in_time(
    notice: Notice,
    drain: Callable[[str, float], None],
    poll_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    log: Callable[[str], None],
) -> int:
    while True:
        left_s = max(notice.ends_at - clock(), 1.0)  # a late clock is no reason not to try
        try:
            drain(notice.reason, left_s)
            log(f"the node drains, with {left_s:.0f} s left")
            return 0
        except DrainError as error:
            if clock() + poll_s >= notice.ends_at + _PAST_S:
                log(f"{error}; no time is left")
                return 1
            log(f"{error}; trying again")
            sleep(poll_s)


def longest_try_s(left_s: float) -> float:
    """Return how long one try to drain may take, in seconds, if so many are left.

    >>> longest_try_s(120), longest_try_s(30), longest_try_s(1)
    (25.0, 15.0, 8.0)
    """
    least, most = _TRY_S
    return min(most, max(least, left_s / 2))


def drain_by_command(
    reason: str, deadline_s: float, *, node_id: str | None = None, address: str | None = None
) -> None:
    """Give a Ray node notice, with ``ray drain-node``.

    Args:
        reason: why.
        deadline_s: how long the machine is still there, in seconds.
        node_id: which node, in hex; None: the one of this machine.
        address: of the cluster; None: the one that this machine belongs to.

    Raises:
        DrainError: it was refused, could not be started, or took too long.
    """
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "drain-node",
        "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", reason,
        "--deadline-remaining-seconds", str(int(deadline_s)),
        *(["--node-id", node_id] if node_id else []),
        *(["--address", address] if address else []),
    ]  # fmt: skip
    # A cluster asks for a token unless it was told not to. Without --node-id Ray joins the
    # cluster to learn its node; told where, it never starts one of its own.
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
    except OSError as error:  # no memory for one more process, say
        raise DrainError(f"ray drain-node can not be started: {error}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "nothing").splitlines()[-1]
        raise DrainError(f"ray drain-node failed: {last}") from None
