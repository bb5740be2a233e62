"""The processes of this machine, from /proc."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"


def processes_that(matches: Callable[[int], bool]) -> list[int]:
    """Return the ids of the processes that meet a condition, without those that end meanwhile."""
    found = []
    for entry in PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and matches(int(entry.name)):
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line; of a process that has ended: [""]."""
    return _words_of(pid, "cmdline")


def environment_of(pid: int) -> list[str]:
    """Return the initial environment of a process: ``["HOME=/root", ...]``."""
    return _words_of(pid, "environ")


def _words_of(pid: int, name: str) -> list[str]:
    words = b""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        words = (PROC / str(pid) / name).read_bytes()
    return words.decode(errors="replace").split("\0")


def parent_of(pid: int) -> int:
    """Return the id of a process's parent; a fork server's is its raylet, which it serves."""
    words = " ".join(command_of(pid))
    server = re.match(r"raydl fork server of raylet (\d+)", words)
    return int(server[1] if server else _stat(pid)[1])


def stopped_processes(*folders: str | Path) -> list[int]:
    """Return the ids of the stopped processes that write their output below one of some folders.

    Tests that run at the same time stop processes of their own, which write elsewhere.
    """
    below = tuple(f"{folder}/" for folder in folders)
    return processes_that(
        lambda pid: (
            _stat(pid)[0] == "T" and os.readlink(PROC / str(pid) / "fd" / "1").startswith(below)
        )
    )


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident bytes of a process; None: this process."""
    fields = (PROC / str(pid or "self") / "statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def steady_growth(repeat: Callable[[int], object], times: int) -> int:
    """Return by how many bytes this process grows in each of five stretches, at the least.

    A leak grows in all of them; the allocator may take memory in any one.

    Args:
        repeat: repeats what may leak as often as its argument says.
        times: repetitions in a stretch.
    """
    growth = []
    for _ in range(5):
        before = resident_bytes()
        repeat(times)
        growth.append(resident_bytes() - before)
    return min(growth)


def descendants_of(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    children = collections.defaultdict(list)
    for other in processes_that(lambda _: True):
        with contextlib.suppress(OSError):  # it ended meanwhile
            children[parent_of(other)].append(other)
    found = [pid]
    for parent in found:
        found += children[parent]
    return found


def driver_of(command: int) -> int:
    """Return the process id of a run's driver, which is a child of the command's process."""
    words = command_of(command)
    children = processes_that(lambda pid: parent_of(pid) == command and command_of(pid) == words)
    return children[0] if children else command


def kill_with_descendants(pids: Iterable[int]) -> None:
    """Kill processes with all their descendants.

    Some of Ray's processes replace their command line and environment, so that only their parent
    tells to which cluster they belong. Without their raylet they may live on and use a whole core.
    """
    for descendant in {descendant for pid in pids for descendant in descendants_of(pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(descendant, signal.SIGKILL)


def listeners_of(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of each TCP socket on which a process listens, until it ends."""
    listening, found = {}, []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for name in ("tcp", "tcp6"):
            for line in (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN:
                    listening[f"socket:[{words[9]}]"] = _address_of(words[1])
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if (target := os.readlink(entry)) in listening:
                    found.append(listening[target])
    return sorted(found)


def _address_of(words: str) -> tuple[str, int]:
    """Return (address, port) of 0100007F:1F90, the form of /proc/net/tcp in native 32-bit words."""
    digits, port = words.split(":")
    packed = b"".join(
        int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
