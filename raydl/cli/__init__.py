"""The command line: ``raydl COMMAND``; each command is a function of its arguments.

A new command is a function in a file of this folder and a row of ``COMMANDS``. A command imports
torch and Ray when it runs: ``--help`` should not wait for them.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata

from raydl.cli.comparing import compare, weak_scaling
from raydl.cli.completion import completion
from raydl.cli.data import data_command
from raydl.cli.listing import list_methods, list_models
from raydl.cli.options import list_commands, parse_train
from raydl.cli.planning import plan
from raydl.cli.reporting import report
from raydl.cli.runs import check, list_runs, logs, remove, score, status, stop
from raydl.cli.submitting import submit
from raydl.cli.training import train
from raydl.errors import STOPPED, RaydlError, exit_status_of
from raydl.redaction import redact
from raydl.run.versions import installed_version
from raydl.text import escape_controls

__all__ = ["COMMANDS", "main", "parse_train"]

_RAY_SHUTDOWN_S = 10.0
"""Longest wait for the shutdown of Ray before ``os._exit``, in seconds."""
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "submit": submit,
    "list": list_runs,
    "status": status,
    "logs": logs,
    "remove": remove,
    "stop": stop,
    "evaluate": score,
    "check": check,
    "report": report,
    "compare": compare,
    "weak-scaling": weak_scaling,
    "plan": plan,
    "data": data_command,
    "methods": list_methods,
    "models": list_models,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Run a command and return its exit status.

    Status: 0 success; 1 the training failed, or an exception, printed with its traceback without
    credentials of URIs; 2 wrong options or settings; 75 the machines failed and the same command
    with ``--resume`` may succeed; 130 or 143 stopped by SIGINT or SIGTERM.

    Args:
        arguments: arguments without the program's name; None: those of this process.
        ends_process: whether the process ends with this command, as it does without arguments: it
            then ends also if a thread is stuck in a storage call.
    """
    status = 1
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        if arguments is None or ends_process:
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


def _run(given: list[str]) -> int:
    if given == ["--version"]:
        try:
            print(f"raydl {installed_version('raydl')}")
        except metadata.PackageNotFoundError:
            print("raydl of a checkout that is not installed")
        return 0
    command = COMMANDS.get(given[0]) if given else None
    if command is None:
        usage = "usage: raydl COMMAND [OPTIONS]     (raydl COMMAND --help for its options)"
        first = given[0] if given else "--help"
        print(list_commands(f"{usage}\n       raydl --version", COMMANDS, first))
        return 0 if given in ([], ["-h"], ["--help"]) else 2
    try:
        return command(given[1:])
    except RaydlError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return exit_status_of(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED["SIGINT"]
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        sys.stderr.close()
        return 0
    except Exception:  # mostly of the user's code; Python's own traceback may show credentials
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        return 1
