"""Heartbeats: finds processes that have not answered within their lease.

In a run the worker group calls every process at short intervals, and each answer is a heartbeat
(``ray_backend/worker_group.py``). A user's loop under ``raydl.attach`` sends its own
(``rendezvous_client.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

_AWAY_S = 1.0
"""Longest usual time between two checks, in seconds. Time beyond it extends no process's silence:
the checking process itself was suspended or starved."""

_LEAST_SHARE = 0.05
"""Share of one core that a busy process uses even on a crowded machine. Ray's own threads use about
a hundredth."""


def has_computed(cpu_s: float, span_s: float) -> bool:
    """Whether a process that used ``cpu_s`` seconds of CPU time in ``span_s`` seconds was busy."""
    return cpu_s > _LEAST_SHARE * span_s


class Heartbeats:
    """The processes that owe an answer, and since when.

    An answer renews the lease of a process. While the polling process itself is suspended or
    starved, answers may lie unread: that time does not count.

    Args:
        lease_s: the longest wait for an answer, in seconds.
        clock: seconds, rising.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._owed_since: dict[str, float] = {}
        self._checked_at = clock()

    def expect_answer(self, who: str) -> None:
        """Note that a process owes an answer from now on, unless it owes one already."""
        self._owed_since.setdefault(who, self._clock())

    def answer(self, who: str) -> None:
        """Note that a process answered, or has ended."""
        self._owed_since.pop(who, None)

    def owed_s(self, who: str) -> float:
        """Return for how many seconds a process has owed an answer, or 0 if it owes none."""
        now = self._clock()
        return now - self._owed_since.get(who, now)

    def silent(self, for_s: float) -> list[str]:
        """Return the processes that have owed an answer for more than ``for_s`` seconds."""
        return [who for who in self._owed_since if self.owed_s(who) > for_s]

    def expired(self) -> list[str]:
        """Return the processes whose lease has expired. Call it at least once a second."""
        now = self._clock()
        away_s, self._checked_at = now - self._checked_at, now
        if away_s > _AWAY_S:
            self._owed_since = {w: min(now, at + away_s) for w, at in self._owed_since.items()}
        return [who for who, at in self._owed_since.items() if now - at > self._lease_s]
