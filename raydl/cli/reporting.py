"""``raydl report``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from raydl.cli.options import parse, say


@dataclasses.dataclass(frozen=True)
class _ReportOptions:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """The folders of one or more runs, paths or URIs."""
    out: str | None = None
    """The file to write, in a folder that is made if need be; else report.html, in the run's
    folder or, for several runs, here."""


def report(arguments: Sequence[str]) -> int:
    """Write one HTML page of a run, or of several, to send to somebody."""
    options = parse(_ReportOptions, arguments, prog="raydl report", description=report.__doc__)
    from raydl.errors import ConfigError
    from raydl.tools.report import write_report

    if not options.runs:
        raise ConfigError("report", "needs a run: name the folder of one, or of several")
    say(write_report(options.runs, out=options.out))
    return 0
