"""Programs that a benchmark starts beside itself, and the data they take."""

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
LINES_TOLD = 60
"""Of what a program said, when it failed."""
_STOP_S = 15.0
"""What a program that was asked to end has time for."""


class RunError(RuntimeError):
    """A program failed or took too long; the text has which, and the end of what it said."""


def end_cleanly() -> None:
    """Let SIGTERM end this process with all that it has started, as an error would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))


def end_sessions(started: Sequence[subprocess.Popen[Any]]) -> None:
    """End programs, each of which leads a session, and what is left of theirs.

    First by asking: a Ray that is told takes its processes with it.
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
    """Wait for all.

    Raises:
        RunError: one has failed, or not ended within so many seconds; the others may still run.
    """
    deadline = time.monotonic() + bound_s
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline or any(process.poll() for process in started):
            break
        time.sleep(0.05)
    codes = [process.poll() for process in started]
    for code, words, log in zip(codes, programs, logs, strict=True):
        if code:
            raise RunError(f"`{' '.join(words)}` failed:\n{end_of(log)}")
    for code, words, log in zip(codes, programs, logs, strict=True):
        if code is None:
            raise RunError(f"`{' '.join(words)}` took over {bound_s:.0f} s:\n{end_of(log)}")


def end_of(log: Path) -> str:
    """Return the last lines of what a program said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES_TOLD:])


def data_at(place: str) -> str:
    """Return the folder of a set, which may be given from the project's root; exit without it."""
    path = (ROOT / place).resolve()
    if not path.is_dir():
        sys.exit(f"there is no data in {place}; name a folder with --data")
    return str(path)
