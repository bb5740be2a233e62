"""Gives processes quotas of CPU time by control groups, as on machines of different speed.

    with Quotas([0.9, 0.3]) as quotas:
        quotas.add(pid, 1)      # 0.3 of a core from now on
        quotas.set(1, 0.9)      # faster again

A period of 10 ms keeps the pauses shorter than a training step. The groups are made below the root
of version 1 or 2, whichever the machine has, so this needs the rights of root.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.watching import stat_fields

_PERIOD_US = 10_000
_ROOT = Path("/sys/fs/cgroup")
_V1 = _ROOT / "cpu"
"""The CPU controller of version 1."""
_POLL_EVERY_S = 0.02
_END_S = 20.0


def may_throttle() -> bool:
    """Return whether this process may set quotas."""
    controllers = _ROOT / "cgroup.controllers"
    has_cpu = _is_v1() or (controllers.exists() and "cpu" in controllers.read_text().split())
    return has_cpu and os.access(_root(), os.W_OK)


def _is_v1() -> bool:
    return (_V1 / "cgroup.procs").exists()


def _root() -> Path:
    return _V1 if _is_v1() else _ROOT


class Quotas:
    """Control groups, each with a quota of CPU time, a tenth of a core or more.

    Args:
        shares: for each group, the cores that its processes may use together.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._groups = [_root() / f"raydl-{os.getpid()}-{number}" for number in range(len(shares))]
        self._shares = shares

    def __enter__(self) -> Quotas:
        try:
            for number, (group, share) in enumerate(zip(self._groups, self._shares, strict=True)):
                group.mkdir()
                self.set(number, share)
        except OSError as error:
            self.__exit__()
            sys.exit(f"this machine permits no CPU quotas: {error}")
        return self

    def __exit__(self, *error: object) -> None:
        for group in self._groups:
            deadline = time.monotonic() + _END_S
            while group.exists() and time.monotonic() < deadline:
                self._free_processes(group)
                with contextlib.suppress(OSError):  # a process is ending
                    group.rmdir()
                    break
                time.sleep(_POLL_EVERY_S)

    def _free_processes(self, group: Path) -> None:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (group.parent / "cgroup.procs").write_text(pid)

    def add(self, pid: int, number: int) -> None:
        """Move a process with all its threads into a group; do nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            (self._groups[number] / "cgroup.procs").write_text(str(pid))

    def set(self, number: int, share: float) -> None:
        """Set the cores that the processes of a group may use together."""
        quota = round(share * _PERIOD_US)
        if _is_v1():
            (self._groups[number] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._groups[number] / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._groups[number] / "cpu.max").write_text(f"{quota} {_PERIOD_US}")


class CpuUse:
    """The CPU time that a process uses with its quota.

    Args:
        pid: id of the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._points: list[tuple[float, float]] = []

    def note(self) -> None:
        """Note the CPU time so far; do nothing if the process has ended."""
        with contextlib.suppress(OSError):
            fields = stat_fields(self.pid)
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self._points.append((time.monotonic(), cpu_s))

    def cores(self, start_s: float, stop_s: float) -> float:
        """Return the CPU time per second in an interval, in seconds since the first note."""
        began = self._points[0][0]
        within = [point for point in self._points if start_s <= point[0] - began <= stop_s]
        (began, before), (ended, after) = within[0], within[-1]
        return (after - before) / (ended - began)


@contextlib.contextmanager
def throttled(
    pids: Callable[[], Sequence[int]],
    shares: Sequence[float],
    *,
    slow_share: float | None = None,
    every_s: float = 10.0,
) -> Iterator[list[CpuUse]]:
    """Give processes their quotas as they appear: the first share to the first, and so on.

    Yields a list that fills with the use of each process, in the order of the shares.

    Args:
        pids: returns the processes so far, in order of appearance.
        shares: the cores of each process.
        slow_share: the cores of the last process in every second interval; None: it does not
            change.
        every_s: seconds between two changes of the last process.
    """
    over = threading.Event()
    uses: list[CpuUse] = []

    def watch(quotas: Quotas) -> None:
        began: float | None = None
        was_slow = False
        while not over.wait(_POLL_EVERY_S):
            for pid in pids():
                if len(uses) < len(shares) and all(pid != use.pid for use in uses):
                    quotas.add(pid, len(uses))
                    uses.append(CpuUse(pid))
            for use in uses:
                use.note()
            if slow_share is None or len(uses) < len(shares):
                continue
            began = began or time.monotonic()
            is_slow = int((time.monotonic() - began) / every_s) % 2 == 1
            if is_slow != was_slow:  # each write refills the quota of the period
                quotas.set(len(shares) - 1, slow_share if is_slow else shares[-1])
                was_slow = is_slow

    with Quotas(shares) as quotas:
        thread = threading.Thread(target=watch, args=(quotas,), name="quotas", daemon=True)
        thread.start()
        try:
            yield uses
        finally:
            over.set()
            thread.join()
