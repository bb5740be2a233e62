"""Heartbeats: finds processes that have not answered within their lease."""

from __future__ import annotations

import time
from collections.abc import Callable

_AWAY_S = 1.0
"""Between two looks; after a longer time away nobody is blamed for it."""

_LEAST_SHARE = 0.05
"""Of one core, that a busy process uses even on a crowded machine; threads of Ray's use about a
hundredth."""


def has_computed(cpu_s: float, span_s: float) -> bool:
    """Whether a process that has used so much CPU time in a span of time was busy in it."""
    return cpu_s > _LEAST_SHARE * span_s


class Heartbeats:
    """Processes that were asked for news, and since when they owe an answer.

    A process renews its lease by answering. If the one who asks was away itself, stopped or
    starved, answers may lie unread: such time does not count.

    Args:
        lease_s: the longest wait for an answer, in seconds.
        clock: seconds, rising.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._looked_at = clock()

    def expect_answer(self, who: str) -> None:
        """Note that an answer is owed from now on, if none is yet."""
        self._asked.setdefault(who, self._clock())

    def answer(self, who: str) -> None:
        """Note that the process answered, or is gone."""
        self._asked.pop(who, None)

    def owed_s(self, who: str) -> float:
        """Return for how many seconds a process has owed an answer; 0: it owes none."""
        asked_at = self._asked.get(who)
        return 0.0 if asked_at is None else self._clock() - asked_at

    def silent(self, for_s: float) -> list[str]:
        """Return the processes that have owed an answer for so many seconds."""
        return [who for who in self._asked if self.owed_s(who) > for_s]

    def expired(self) -> list[str]:
        """Return those whose lease is over. To be asked again and again."""
        now = self._clock()
        away_s, self._looked_at = now - self._looked_at, now
        if away_s > _AWAY_S:
            self._asked = {who: min(now, at + away_s) for who, at in self._asked.items()}
        return [who for who, at in self._asked.items() if now - at > self._lease_s]
