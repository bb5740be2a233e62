"""The command line: ``raydl COMMAND``.

A command that drives a run has a small parent process (``parent.py``), which starts before anything
large is imported. So this module imports little; ``commands.py`` has the commands.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from raydl.cli import parent
from raydl.errors import STOPPED
from raydl.text.redaction import redact

__all__ = ["main", "run_to_exit"]

_DRIVERS = ("train", "compare", "weak-scaling")
"""The commands that drive runs."""
_RAY_SHUTDOWN_S = 10.0
"""Longest wait for the shutdown of Ray before ``os._exit``, in seconds."""


def main(arguments: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Run a command and return its exit status.

    Status: 0 success; 1 the training failed, or an exception, printed with its traceback without
    credentials of URIs; 2 wrong options or settings; 75 the machines failed and the same command
    with ``--resume`` may succeed; 129, 130 or 143 stopped by SIGHUP, SIGINT or SIGTERM.

    Args:
        arguments: arguments without the program's name; None: those of this process.
        ends_process: whether the process ends with this command, as it does without arguments: it
            then ends also if a thread is stuck in a storage call, and a command that drives a run
            has a small parent process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = functools.partial(_run, given)
    if arguments is not None and not ends_process:
        return command()
    return run_to_exit(command, has_parent=bool(given) and given[0] in _DRIVERS)


def run_to_exit(command: Callable[[], int], *, has_parent: bool = True) -> int:
    """Run a command with which this process ends, and return its exit status.

    Args:
        command: returns its exit status.
        has_parent: whether it drives a run, and gets a parent process.
    """
    return parent.run(functools.partial(_finish, command)) if has_parent else _finish(command)


def _run(given: Sequence[str]) -> int:
    from raydl.cli import commands

    return commands.run(given)


def _finish(command: Callable[[], int]) -> int:
    status = 1
    try:
        status = command()
    except SystemExit as end:
        status = parent.status_of(end)
        raise
    except KeyboardInterrupt:  # while the command is imported: then nothing in it catches this
        status = STOPPED["SIGINT"]
        print("interrupted", file=sys.stderr)
    finally:
        parent.report(status)
        _end_if_a_thread_hangs(status)
    return status


def _end_if_a_thread_hangs(status: int) -> None:
    """Exit at once if a thread of this process is stuck in a storage call that may never return.

    The regular exit of Python or of a loaded library could wait for that thread.
    """
    storage = sys.modules.get("raydl.storage")
    if storage is None or not storage.is_anything_given_up():
        return
    if sys.exc_info()[0] is not None:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
    ray = sys.modules.get("ray")
    if ray is not None:  # a Ray that this run started must end with it
        shutdown = threading.Thread(target=ray.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(_RAY_SHUTDOWN_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
