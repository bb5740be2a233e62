"""``raydl report``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from raydl.cli.options import parse, print_lines


@dataclasses.dataclass(frozen=True)
class _ReportOptions:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of one or more runs, as paths or URIs, or their names in runs."""
    out: str | None = None
    """File to write, whose folder is made if need be; unset: report.html, in the run's folder or,
    for several runs, in the current folder."""


def report(arguments: Sequence[str]) -> int:
    """Write one self-contained HTML page about one or more runs."""
    options = parse(_ReportOptions, arguments, prog="raydl report", description=report.__doc__)
    from raydl.errors import ConfigError
    from raydl.tools.report import write_report

    if not options.runs:
        raise ConfigError("report", "needs a run: give the folder of one or more runs")
    print_lines(write_report(options.runs, out=options.out))
    return 0
