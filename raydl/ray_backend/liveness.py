"""Tells a busy process from a dead one: its node reports the CPU time that it has used.

Code that holds Python's interpreter lock, a long native call or the pickling of a large state,
keeps a process from answering. It is at work all the same, and to kill it would lose that work,
again and again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from raydl.elastic.heartbeat import has_computed

_LOOK_EVERY_S = 1.0
_STALE_S = 5.0
_NUM_LOOKS = 4


@dataclass(frozen=True)
class Times:
    """A process as its kernel tells of it."""

    cpu_s: float
    """Seconds that all its threads have computed."""
    state: str
    """A letter as in ``ps``: T for stopped, Z for a zombie, D for waiting for a disk."""
    at_s: float
    """When, by the monotonic clock of its machine."""


def times_of(pid: int) -> Times | None:
    """Return the times of a process of this machine; None: there is none, or this is no Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Times(ticks / os.sysconf("SC_CLK_TCK"), fields[0], time.monotonic())


@dataclass
class _Seen:
    """Observations of one silent process."""

    asked_at: float = -1e9
    heard_at: float = -1e9
    looks: deque[Times | None] = field(default_factory=lambda: deque(maxlen=_NUM_LOOKS))


class Liveness:
    """The silent processes, and whether they are busy."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def due(self, silent: list[str], now: float) -> list[str]:
        """Return those whose times are to be asked for now; others are forgotten.

        Args:
            silent: all processes that owe an answer for some time.
            now: seconds, rising.
        """
        self._seen = {who: self._seen.get(who, _Seen()) for who in silent}
        due = [who for who, s in self._seen.items() if now - s.asked_at >= _LOOK_EVERY_S]
        for who in due:
            self._seen[who].asked_at = now
        return due

    def note(self, who: str, times: Times | None, now: float) -> None:
        """Take in what a node told of a process; None: it has none of that id."""
        seen = self._seen.get(who)
        if seen is not None:
            seen.looks.append(times)
            seen.heard_at = now

    def is_busy(self, who: str, now: float) -> bool:
        """Whether it has computed since the oldest of the newest four looks.

        No: the last is older than 5 s.
        """
        seen = self._seen.get(who)
        looks = [] if seen is None else seen.looks
        if seen is None or len(looks) < 2:
            return False
        before, newest = looks[0], looks[-1]
        if before is None or newest is None:
            return False
        span_s, used_s = newest.at_s - before.at_s, newest.cpu_s - before.cpu_s
        return now - seen.heard_at <= _STALE_S and has_computed(used_s, span_s)

    def why_silent(self, who: str, now: float) -> str:
        """Return why a process may not answer: the rest of a sentence; empty: nobody knows."""
        seen = self._seen.get(who)
        if seen is None or seen.asked_at < 0:
            return ""
        if now - seen.heard_at > _STALE_S:
            return "; nor did its node, asked how the process is"
        newest = seen.looks[-1]
        if newest is None or newest.state == "Z":
            return "; its process has ended"
        if newest.state == "T":
            return "; its process is stopped"
        if self.is_busy(who, now):
            return "; its process is busy"
        return "; its process uses no CPU: it waits for something with the interpreter lock held"
