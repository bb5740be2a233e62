"""Programs that a benchmark starts, and their data."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG_LINES = 60
"""Last lines of a failed program's log that an error shows."""
_STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""


class RunError(RuntimeError):
    """A program failed or took too long; the text names it, with the end of its log."""


class TimeOutError(RunError):
    """A program took too long."""


def end_cleanly() -> None:
    """Let SIGTERM raise SystemExit, so that this process ends the programs that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))


def end_sessions(started: Sequence[subprocess.Popen[Any]]) -> None:
    """End programs, each the leader of a session, and all other processes of their sessions.

    SIGTERM comes first: Ray then ends its processes itself.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STOP_S)


def wait_for(
    started: Sequence[subprocess.Popen[Any]],
    programs: Sequence[Sequence[str]],
    logs: Sequence[Path],
    *,
    bound_s: float,
) -> None:
    """Wait for the end of all programs.

    Raises:
        RunError: if a program failed; others may still run.
        TimeOutError: if one did not end within ``bound_s``.
    """
    deadline = time.monotonic() + bound_s
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline or any(process.poll() for process in started):
            break
        time.sleep(0.05)
    codes = [process.poll() for process in started]
    for code, command, log in zip(codes, programs, logs, strict=True):
        if code:
            raise RunError(f"`{' '.join(command)}` failed:\n{end_of(log)}")
    for code, command, log in zip(codes, programs, logs, strict=True):
        if code is None:
            raise TimeOutError(f"`{' '.join(command)}` took over {bound_s:.0f} s:\n{end_of(log)}")


def end_of(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def data_at(place: str) -> str:
    """Return the path of a data set, absolute or relative to the project; exit if missing."""
    path = (ROOT / place).resolve()
    if not path.is_dir():
        sys.exit(f"--data must be an existing folder, got {place}")
    return str(path)
