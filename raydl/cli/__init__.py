"""The command line: ``raydl COMMAND``; each command is a function of its words.

A new command is a function in a file of this folder, and a row of the table below. What a
command needs of torch or Ray it imports when it runs: ``--help`` should not wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from raydl.cli.data import data_command
from raydl.cli.listing import list_methods, list_models
from raydl.cli.options import STOPPED, SUPERSEDED, list_commands, parse_train
from raydl.cli.planning import plan
from raydl.cli.reporting import report
from raydl.cli.runs import check, remove, score, status
from raydl.cli.submitting import submit
from raydl.cli.training import train
from raydl.errors import RaydlError, SupersededError
from raydl.texts import escape_controls
from raydl.versions import installed_version

__all__ = ["COMMANDS", "main", "parse_train"]

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

    0: done; 2: a mistake in what was asked for, or the run failed; 3: another driver has taken
    the run over.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"raydl {_version()}")
        return 0
    command = COMMANDS.get(given[0]) if given else None
    if command is None:
        print(_usage(given))
        return 0 if given in ([], ["-h"], ["--help"]) else 2
    try:
        return command(given[1:])
    except SupersededError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return SUPERSEDED
    except RaydlError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED["SIGINT"]
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0


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
