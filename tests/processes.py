"""The processes of this machine, as Linux tells of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")


def processes_that(fits: Callable[[int], bool]) -> list[int]:
    """Return the ids of all processes that fit; one that ends meanwhile does not."""
    found = []
    for entry in PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and fits(int(entry.name)):
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line."""
    return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")


def environment_of(pid: int) -> list[str]:
    """Return what a process was started with in its environment: ``["HOME=/root", ...]``."""
    return (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")


def parent_of(pid: int) -> int:
    """Return the id of the process that started a process."""
    return int(_stat(pid)[1])


def stopped_processes() -> set[int]:
    """Return the ids of all processes that are halted by a signal."""
    return set(processes_that(lambda pid: _stat(pid)[0] == "T"))


def _stat(pid: int) -> list[str]:
    """Return the fields that follow the name, which may hold spaces: state, parent, ..."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def resident_bytes(pid: int | None = None) -> int:
    """Return the memory that a process holds; None: this one."""
    fields = (PROC / str(pid or "self") / "statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
