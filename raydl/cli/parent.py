"""The parent process of a driver, which sees to it that a command never ends without a word.

Some failures end the process of a driver without Python: Ray's C++ code exits with status 1 if it
loses its raylet or cannot open another file, and the kernel kills a process if memory runs out. So
a command that drives a run is a child of a process that does nothing but wait: it passes on the
signals that it gets, and turns an end without a final status into one sentence and a status that
says that the run can be resumed. It is a fork, made before anything large is imported, so it costs
milliseconds and hardly any memory.

A signal may reach both processes, as Ctrl-C does and every signal to their process group, or only
the parent. Each process has a pipe into which Python writes the numbers of the signals that arrive
(``signal.set_wakeup_fd``). The parent reads both, and passes on only what the child did not get.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from raydl.errors import WORTH_RETRYING
from raydl.ray_backend.open_files import MANY_FILES, open_file_limit

_PASSED_ON: frozenset[int] = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_TOGETHER_S = 0.1
"""Signals of one kind that reach parent and child within this time are one, in seconds."""
_report_to: int | None = None
"""In the child: the pipe for its final status."""


def run(command: Callable[[], int]) -> int:
    """Run a command in a child process and return its exit status; it calls ``report`` at its end.

    The child ends with this process. Other systems than Linux have no such bond: there the command
    runs in this process.
    """
    if sys.platform != "linux":
        return command()
    for stream in (sys.stdout, sys.stderr):  # else the child would write the text again
        if stream is not None:  # closed
            stream.flush()
    _fill_closed_streams()
    status_out, status_in = _pipe()
    arrived_out, arrived_in = _pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, no status would be kept
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _begin_child(parent, status_in, arrived_in)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return command()
    end = _wait(child, arrived_out, before)
    return _status(end, os.read(status_out, 1) if _has_bytes(status_out) else b"")


def report(status: int) -> None:
    """Tell the parent process, if there is one, with which status the command ends.

    Whatever ends this process afterwards does not change that.
    """
    if _report_to is not None:
        with suppress(BlockingIOError):
            os.write(_report_to, bytes([status & 0xFF]))


def status_of(end: SystemExit) -> int:
    """Return the exit status of a process that ends with this exception."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _fill_closed_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr.

    Else a pipe would get its number, and receive what is printed; and Ray needs a stderr.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(number, True)  # Ray's processes need them as well
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


def _begin_child(parent: int, report_to: int, arrived: int) -> None:
    """Bind this process to its parent, and let it note signals and end on them."""
    import ctypes

    global _report_to
    _report_to = report_to
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(WORTH_RETRYING)
    from raydl.ray_backend.session import end_on_signals

    signal.set_wakeup_fd(arrived, warn_on_full_buffer=False)
    end_on_signals()


def _wait(child: int, arrived: int, mask: Iterable[int]) -> int:
    """Wait for the end of the child and return its wait status; pass on signals meanwhile.

    Args:
        child: process id of the child.
        arrived: pipe with the numbers of the signals that have reached the child.
        mask: the signals to block from now on; that of the end of a child is never blocked.
    """
    own_out, own_in = _pipe()
    signal.set_wakeup_fd(own_in, warn_on_full_buffer=False)
    for number in (*_PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask} - {signal.SIGCHLD})
    waiting: dict[int, float] = {}  # by signal: when it reached this process
    in_child: dict[int, float] = {}  # by signal: when it last reached the child
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        now = time.monotonic()
        bound = max(0.0, min(waiting.values()) + _TOGETHER_S - now) if waiting else None
        select.select([own_out, arrived], [], [], bound)
        now = time.monotonic()
        for number in _read(own_out):
            if number in _PASSED_ON:
                waiting.setdefault(number, now)
        in_child |= dict.fromkeys(_read(arrived), now)
        for number, since in list(waiting.items()):
            if now >= since + _TOGETHER_S:
                del waiting[number]
                if in_child.get(number, -math.inf) < since - _TOGETHER_S:
                    os.kill(child, number)  # one that it has not handled yet stays one


def _has_bytes(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _read(fd: int) -> bytes:
    return os.read(fd, 4096) if _has_bytes(fd) else b""


def _status(end: int, reported: bytes) -> int:
    """Return the exit status for an end of the child; if it has reported none, say so.

    Args:
        end: its wait status.
        reported: the status that it reported, or nothing.
    """
    code = os.waitstatus_to_exitcode(end)
    if reported:  # Ray may end the process with 1, or by a signal, after that
        return code if code > 1 else reported[0]
    if -code in _PASSED_ON:  # nothing in the child caught it: end as it did
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    with suppress(OSError):  # a closed terminal
        print(f"error: {_sentence(code)}", file=sys.stderr, flush=True)
    return WORTH_RETRYING


def _sentence(code: int) -> str:
    """Return a sentence on a driver that has ended without a final status."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {names.get(-code, f'signal {-code}')}"
        causes = "the system does so if memory runs out, a library if it fails inside"
    else:
        how = f"ended with exit status {code}"
        causes = "Ray does so if it loses its raylet or this machine lacks memory or open files"
    limit = open_file_limit()
    if limit < MANY_FILES:
        causes += f"; only {limit} files may be open, so raise ulimit -n to {MANY_FILES} or more"
    return (
        f"the driver {how} and said no more ({causes}); the same command with --resume resumes "
        f"from the last checkpoint, if one was written"
    )
