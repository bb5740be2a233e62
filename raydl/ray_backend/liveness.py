"""Distinguishes a busy process from a dead one by its CPU time, which its node reports.

A process is busy if it uses CPU time, or if a thread of it is ready to run whenever it is checked:
on a crowded machine, or one whose host lends it no core, a process may wait long for a core.

Code that holds Python's interpreter lock, such as a long native call or the pickling of a large
state, keeps a process from answering. The process is working nevertheless. To kill it would lose
that work, again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from raydl.elastic.heartbeat import has_computed

_STALE_S = 5.0
_NUM_SAMPLES = 4


@dataclass(frozen=True)
class Times:
    """The state of a process, from its kernel."""

    cpu_s: float
    """CPU time of all its threads, in seconds."""
    state: str
    """A letter as in ``ps``: T for stopped, Z for a zombie, D for waiting for a disk."""
    is_runnable: bool
    """Whether a thread runs or waits for a core."""
    at_s: float
    """When it was read, by the monotonic clock of its machine, in seconds."""


def times_of(pid: int) -> Times | None:
    """Return the times of a local process, or None if it has ended or this is not Linux."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return Times(cpu_s, fields[0], _has_runnable_thread(pid), time.monotonic())


def start_of(pid: int) -> int | None:
    """Return when a local process started, in clock ticks since its machine did.

    None: it has ended, or this is not Linux.
    """
    try:
        return int(_stat_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return None


def kill_local(pid: int, start: int | None) -> None:
    """Kill a local process by its id, if it is still the one that started then.

    The id of a process that has ended may be that of another one, and not of this run.

    Args:
        pid: its id.
        start: what ``start_of`` returned for it.
    """
    if start_of(pid) == start:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_runnable_thread(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if _stat_fields(thread)[0] == "R":
                return True
    return False


def _stat_fields(stat: Path) -> list[str]:
    """Return the fields of a process or thread, from its state on."""
    return stat.read_text().rpartition(")")[2].split()


@dataclass
class _Observations:
    """The observations of one silent process."""

    requested_at: float = -1e9
    reported_at: float = -1e9
    samples: deque[Times | None] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))


class Liveness:
    """The silent processes, and whether they are busy.

    Args:
        request_every_s: seconds between two requests for the times of a process.
    """

    def __init__(self, request_every_s: float = 1.0) -> None:
        self._request_every_s = request_every_s
        self._observed: dict[str, _Observations] = {}

    def due(self, silent: list[str], now: float) -> list[str]:
        """Return the processes whose times are to be requested now; forget all others.

        Args:
            silent: all processes that have owed an answer for some time.
            now: seconds, rising.
        """
        self._observed = {who: self._observed.get(who, _Observations()) for who in silent}
        every_s = self._request_every_s
        due = [w for w, o in self._observed.items() if now - o.requested_at >= every_s]
        for who in due:
            self._observed[who].requested_at = now
        return due

    def note(self, who: str, times: Times | None, now: float) -> None:
        """Record the times of a process; None: its node has no such process."""
        observed = self._observed.get(who)
        if observed is not None:
            observed.samples.append(times)
            observed.reported_at = now

    def is_busy(self, who: str, now: float) -> bool:
        """Whether a process has computed, or was ready to, by its newest four samples.

        False if they are old.
        """
        observed = self._observed.get(who)
        if observed is None or len(observed.samples) < 2 or now - observed.reported_at > _STALE_S:
            return False
        before, newest = observed.samples[0], observed.samples[-1]
        if before is None or newest is None:
            return False
        was_runnable = all(times and times.is_runnable for times in observed.samples)
        used_s, span_s = newest.cpu_s - before.cpu_s, newest.at_s - before.at_s
        return was_runnable or has_computed(used_s, span_s)

    def why_silent(self, who: str, now: float) -> str:
        """Return why a process may not answer, as the rest of a sentence, or "" if unknown."""
        observed = self._observed.get(who)
        if observed is None or observed.requested_at < 0:
            return ""
        if now - observed.reported_at > _STALE_S:
            return "; its node does not answer either"
        newest = observed.samples[-1]
        if newest is None or newest.state == "Z":
            return "; its process has ended"
        if newest.state == "T":
            return "; its process is stopped"
        if self.is_busy(who, now):
            return "; its process is busy"
        if len(observed.samples) < 2:
            return ""
        return "; its process uses no CPU: it waits for something with the interpreter lock held"
