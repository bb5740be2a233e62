"""The commands of ``raydl``: each is a function of its arguments.

A new command is a function in a file of this folder and a row of ``COMMANDS``. A command imports
torch and Ray when it runs: ``--help`` should not wait for them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata

from raydl.cli.comparing import compare, weak_scaling
from raydl.cli.completion import completion
from raydl.cli.data import data_command
from raydl.cli.listing import list_methods, list_models
from raydl.cli.options import list_commands
from raydl.cli.planning import plan
from raydl.cli.reporting import report
from raydl.cli.runs import check, list_runs, logs, remove, score, status, stop
from raydl.cli.submitting import submit
from raydl.cli.training import train
from raydl.errors import STOPPED, RaydlError, exit_status_of
from raydl.run.versions import installed_version
from raydl.text.formatting import escape_controls
from raydl.text.redaction import redact

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


def run(given: Sequence[str]) -> int:
    """Run a command, given its name and its arguments, and return its exit status."""
    given = list(given)
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
