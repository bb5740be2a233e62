"""Processes that start, and how long each may take until it answers for the first time.

One that waits for room in the cluster may wait as long as the run does. Once a node holds its
process, that imports what it needs, and answers: if it does not, nothing else would tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_EVERY_S = 5.0


class StartTimeouts:
    """The processes that have not answered yet, and since when a node holds each.

    Args:
        patience_s: the longest wait for the first answer of a process that is there, in seconds.
        clock: seconds, rising.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._there_since: dict[str, float | None] = {}
        self._looked_at = clock()

    def begin(self, who: str) -> None:
        """Note that a process was asked for."""
        self._there_since[who] = None

    def end(self, who: str) -> None:
        """Note that a process has answered, or is not waited for any more."""
        self._there_since.pop(who, None)

    def look(self, is_there: Callable[[str], bool]) -> list[tuple[str, float]]:
        """Return (who, seconds) of those that have been there for too long without an answer.

        To be called again and again; it looks every 5 s.

        Args:
            is_there: whether a node holds a process.
        """
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return []
        self._looked_at = now
        for who, since in self._there_since.items():
            if since is None and is_there(who):
                self._there_since[who] = now
        waits = {who: now - (now if at is None else at) for who, at in self._there_since.items()}
        return [(who, waited_s) for who, waited_s in waits.items() if waited_s > self._patience_s]
