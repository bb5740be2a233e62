"""Measures figures on a noisy machine, compares them with targets, and reports them.

Cases are compared only within one run of a benchmark: each repeat runs every case once, in rotating
order, and a figure is the median over the repeats of the ratio within each repeat. The report is a
Markdown table and a line of JSON per figure::

    {"name": "efficiency.lenet.sync-easgd-p10", "value": 0.98, "target": 0.97, "is_met": true, …}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_CHOICES = ("only", "only_tls", "models", "methods", "tuned")
"""Options of benchmarks that choose a part of the cases."""


@dataclass(frozen=True)
class Spread:
    """The median, least and greatest of some values."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".3g") -> str:
        """Return "median (least to greatest)", each formatted by ``form``."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and its target."""

    name: str
    """BENCHMARK.CASE.WHAT."""
    value: Spread
    target: float | None = None
    """None: the figure has no target."""
    is_better: str = "greater"
    """``greater`` if the target is a lower bound, ``less`` if it is an upper bound."""

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target, or None without a target."""
        if self.target is None:
            return None
        if self.is_better == "greater":
            return self.value.median >= self.target
        return self.value.median <= self.target

    @classmethod
    def of_line(cls, line: str) -> Figure:
        """Return the figure of a line of JSON."""
        given = json.loads(line)
        value = Spread(given["value"], given["least"], given["greatest"])
        return cls(
            name=given["name"], value=value, target=given["target"], is_better=given["is_better"]
        )

    def line(self) -> str:
        """Return the figure as a line of JSON."""
        values = {
            "name": self.name,
            "value": _short(self.value.median),
            "target": self.target,
            "is_better": self.is_better,
            "is_met": self.is_met,
            "least": _short(self.value.least),
            "greatest": _short(self.value.greatest),
        }
        return json.dumps(values)


@dataclass
class Report:
    """The report of a benchmark: paragraphs, tables and figures."""

    name: str
    """Name of the benchmark's module."""
    command: str
    is_quick: bool
    is_part: bool = False
    """Whether only a part of the benchmark was run."""
    where: str = field(default_factory=lambda: f"{_today()}, {version()}, {machine()}")
    """The date, the commit and the machine, as the benchmark begins."""
    figures: list[Figure] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    @classmethod
    def of_command(cls, name: str, options: argparse.Namespace) -> Report:
        """Return an empty report of the benchmark that this process runs.

        Its command has no folder of the results, which is a path of this machine.
        """
        arguments = " ".join(sys.argv[1:])
        arguments = re.sub(r" *--out[ =]\S+", "", arguments).strip()
        command = f"python -m benchmarks.{name} {arguments}".rstrip()
        is_part = any(getattr(options, name, None) is not None for name in _CHOICES)
        return cls(name, command, options.quick, is_part)

    def add_table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table and print it."""
        self.add_text(_markdown(columns, rows))

    def add_speeds(self, experiment: str, speeds: Mapping[str, Sequence[float]], over: str) -> None:
        """Add a table of samples per second by case, and of their ratio to one case."""
        rows = [
            (name, Spread.of(values).text(",.0f"), ratios(values, speeds[over]).text(".2f"))
            for name, values in speeds.items()
        ]
        self.add_table((experiment, "samples/s", f"over {over}"), rows)

    def add_text(self, paragraph: str) -> None:
        """Add a paragraph and print it at once: the rest may take an hour or fail."""
        self._parts.append(paragraph)
        print(f"{paragraph}\n", flush=True)

    def add_figures(self, *figures: Figure) -> None:
        """Add figures, which are printed at the end."""
        self.figures += figures

    def close(self, out: Path | None) -> None:
        """Print the figures, and write the report to NAME.md and NAME.json in a folder, if any.

        A report of a part goes to NAME-part.md; one without figures, since all failed, is not
        written.
        """
        lines = "".join(f"{figure.line()}\n" for figure in self.figures)
        form = " (quick)" if self.is_quick else " (part)" if self.is_part else ""
        head = [f"# {self.name}{form}", f"    {self.command}", self.where]
        texts = {True: "met", False: "missed", None: ""}
        rows = [(f.name, f.value.text(), target_text(f), texts[f.is_met]) for f in self.figures]
        figures = _markdown(("figure", "median (least to greatest)", "target", ""), rows)
        print("\n\n".join([*head, figures]), end="\n\n")
        print(lines, end="", flush=True)
        if out is not None and self.figures:
            out.mkdir(parents=True, exist_ok=True)
            stem = out / f"{self.name}{'-part' if self.is_part else ''}"  # keeps the whole report
            stem.with_suffix(".md").write_text("\n\n".join([*head, *self._parts, figures]) + "\n")
            stem.with_suffix(".json").write_text(lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def options_of(doc: str | None, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """Return a parser for the options that all benchmarks have.

    Args:
        doc: docstring of the benchmark; its first line is the description.
        more: further options by name, each with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short form, in under 50 s")
    parser.add_argument("--repeats", type=int, help="repeats of each case")
    parser.add_argument("--out", type=Path, help="folder for NAME.md and NAME.json")
    for name, arguments in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    return parser


def interleaved(
    cases: Mapping[str, Callable[[], _Result]], *, repeats: int
) -> dict[str, list[_Result]]:
    """Run every case once per repeat, in rotating order, and return the results by case."""
    names, results = list(cases), dict[str, list[_Result]]()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            results.setdefault(name, []).append(cases[name]())
            print(f"  {repeat + 1}/{repeats} {name}", flush=True)
    return {name: results[name] for name in names}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread over the repeats of the ratio within each repeat."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def _today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def version() -> str:
    """Return the commit of this checkout, or raydl's version if there is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # Results of earlier benchmarks do not change the measured code.
    status = ["status", "--porcelain", "--", ":/", ":!/benchmarks/results", ":!/docs"]
    try:
        commit, changes = (
            subprocess.run([*git, *command], check=True, capture_output=True, text=True).stdout
            for command in (["rev-parse", "--short=9", "HEAD"], status)
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return f"raydl {metadata.version('elastic-raydl')}"
    return f"commit {commit.strip()}{' with changes' if changes else ''}"


def machine() -> str:
    """Return a sentence about this machine, its packages and its load."""
    import ray
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{os.cpu_count()} cores of {(models or [platform.machine()])[0]}, {gpu}"
        f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}; "
        f"load average {os.getloadavg()[0]:.1f}."
    )


def target_text(figure: Figure) -> str:
    """Return "at least 0.9", "at most 0.9", or nothing without a target."""
    if figure.target is None:
        return ""
    return f"{'at least' if figure.is_better == 'greater' else 'at most'} {figure.target:g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
