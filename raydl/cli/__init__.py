"""The command line: ``raydl COMMAND``; each command is a function of its words.

A new command is a function in a file of this folder, and a row of the table below. What a
command needs of torch or Ray it imports when it runs: ``--help`` should not wait for them.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata

from raydl.cli.data import data_command
from raydl.cli.listing import list_methods, list_models
from raydl.cli.options import STOPPED, list_commands, parse_train
from raydl.cli.planning import plan
from raydl.cli.reporting import report
from raydl.cli.runs import check, remove, score, status
from raydl.cli.submitting import submit
from raydl.cli.training import train
from raydl.errors import RaydlError
from raydl.redaction import redact
from raydl.run.versions import installed_version
from raydl.text import escape_controls

__all__ = ["COMMANDS", "main", "parse_train"]

_RAY_ENDS_S = 10.0
"""The longest that this process waits for its Ray to end, in seconds, if it can not end orderly."""
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "submit": submit,
    "status": status,
    "remove": remove,
    "evaluate": score,
    "check": check,
    "report": report,
    "plan": plan,
    "data": data_command,
    "methods": list_methods,
    "models": list_models,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 done, 1 the training failed, 2 a mistake in what was asked for, 75 the machines failed and the
    same command with ``--resume`` may succeed, 130 or 143 stopped by SIGINT or SIGTERM.

    An exception of another kind is shown with its traceback, without credentials of URIs: 1.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    status = 1
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        if arguments is None:
            _end_if_a_thread_hangs(status)
    return status


def _end_if_a_thread_hangs(status: int) -> None:
    """End this process at once if a thread of it was left behind in a call that may never return.

    The orderly end of Python, and of the libraries that it has loaded, could wait for that one.
    """
    storage = sys.modules.get("raydl.storage")
    if storage is None or not storage.is_anything_given_up():
        return
    if sys.exc_info()[0] is not None:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
    ray = sys.modules.get("ray")
    if ray is not None:  # a Ray that was started for this run ends with it
        ending = threading.Thread(target=ray.shutdown, daemon=True)
        ending.start()
        ending.join(_RAY_ENDS_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(given: list[str]) -> int:
    if given == ["--version"]:
        print(f"raydl {_version()}")
        return 0
    command = COMMANDS.get(given[0]) if given else None
    if command is None:
        print(_usage(given))
        return 0 if given in ([], ["-h"], ["--help"]) else 2
    try:
        return command(given[1:])
    except RaydlError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED["SIGINT"]
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0
    except Exception:  # of the user's own code, mostly; Python would show what it quotes
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        return 1


def _version() -> str:
    try:
        return installed_version("raydl")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


def _usage(given: list[str]) -> str:
    head = "usage: raydl COMMAND [OPTIONS]     (raydl COMMAND --help for its options)"
    return list_commands(
        f"{head}\n       raydl --version", COMMANDS, given[0] if given else "--help"
    )
