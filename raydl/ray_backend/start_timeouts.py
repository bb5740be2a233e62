"""Time-outs for processes that start.

A process that waits for resources may do so as long as the run lasts. Once a node holds it, it
imports its libraries and answers. This time-out finds a process that does not. Another one finds a
worker that answers, but whose setup does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_CHECK_EVERY_S = 5.0


class StartTimeouts:
    """The processes that have not answered a call yet, and since when a node holds each.

    Args:
        timeout_s: the longest wait for the answer of a process on a node, in seconds.
        clock: seconds, rising.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._placed_at: dict[str, float | None] = {}
        self._checked_at = clock()

    def __contains__(self, who: str) -> bool:
        """Whether a process was requested and has not answered yet."""
        return who in self._placed_at

    def begin(self, who: str) -> None:
        """Note that a process was requested."""
        self._placed_at[who] = None

    def end(self, who: str) -> None:
        """Note that a process has answered, or was given up."""
        self._placed_at.pop(who, None)

    def expired(self, is_placed: Callable[[str], bool]) -> list[tuple[str, float]]:
        """Return (process, seconds since a node holds it) of those that have timed out.

        Call it in every poll; it checks every 5 s.

        Args:
            is_placed: whether a node holds a process.
        """
        now = self._clock()
        if now - self._checked_at < _CHECK_EVERY_S:
            return []
        self._checked_at = now
        for who, placed_at in self._placed_at.items():
            if placed_at is None and is_placed(who):
                self._placed_at[who] = now
        waits = [(who, now - at) for who, at in self._placed_at.items() if at is not None]
        return [(who, waited_s) for who, waited_s in waits if waited_s > self._timeout_s]
