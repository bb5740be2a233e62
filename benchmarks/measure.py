"""How a figure is taken on a noisy machine, judged and told.

Cases are compared within one run alone: each repeat takes every case once, in turning order, and a
figure is the median over the repeats of the ratio within each. What is told is a Markdown table and
a line of JSON per figure::

    {"name": "efficiency.lenet.sync-easgd-p10", "value": 0.98, "target": 0.97, "is_met": true, …}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and how far they lie apart."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".3g") -> str:
        """Return "median (least to greatest)", each in that form."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value, and what it ought to be."""

    name: str
    """BENCHMARK.CASE.WHAT."""
    value: Spread
    target: float | None = None
    """None: it is told, not judged."""
    is_better: str = "greater"
    """Which values meet the target besides the target itself: greater or less."""

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target; None: there is none."""
        if self.target is None:
            return None
        if self.is_better == "greater":
            return self.value.median >= self.target
        return self.value.median <= self.target

    def line(self) -> str:
        """Return the figure as a line of JSON."""
        facts = {
            "name": self.name,
            "value": _short(self.value.median),
            "target": self.target,
            "is_better": self.is_better,
            "is_met": self.is_met,
            "least": _short(self.value.least),
            "greatest": _short(self.value.greatest),
        }
        return json.dumps(facts)


@dataclass
class Report:
    """What a benchmark has to tell: tables, and figures."""

    name: str
    """Of the benchmark, as its file is named."""
    command: str
    is_quick: bool
    figures: list[Figure] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    @classmethod
    def of_command(cls, name: str, options: argparse.Namespace) -> Report:
        """Return the report of a benchmark that was started by its command."""
        words = " ".join(sys.argv[1:])
        return cls(name, f"python -m benchmarks.{name} {words}".rstrip(), options.quick)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table."""
        self.say(_markdown(columns, rows))

    def say(self, paragraph: str) -> None:
        """Add a paragraph, and print it at once: what comes after it may take an hour, or fail."""
        self._parts.append(paragraph)
        print(f"{paragraph}\n", flush=True)

    def judge(self, *figures: Figure) -> None:
        """Add figures."""
        self.figures += figures

    def text(self) -> str:
        """Return all of it as Markdown, the figures at the end."""
        return "\n\n".join([*self._head(), *self._parts, self._judged()]) + "\n"

    def _head(self) -> list[str]:
        title = f"# {self.name}{' (quick)' if self.is_quick else ''}"
        return [title, f"    {self.command}", machine()]

    def _judged(self) -> str:
        words = {True: "met", False: "missed", None: ""}
        rows = [(f.name, f.value.text(), _target(f), words[f.is_met]) for f in self.figures]
        return _markdown(("figure", "median (least to greatest)", "target", ""), rows)

    def close(self, out: Path | None) -> None:
        """Print the figures, and write all as NAME.md and NAME.json into a folder, if given."""
        lines = "\n".join(figure.line() for figure in self.figures) + "\n"
        print("\n\n".join([*self._head(), self._judged()]), end="\n\n")
        print(lines, end="", flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{self.name}.md").write_text(self.text())
            (out / f"{self.name}.json").write_text(lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def options_of(doc: str | None, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have.

    Args:
        doc: of the benchmark; its first line is the description.
        more: further options by name, each with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a look at it, in under 50 s")
    parser.add_argument("--repeats", type=int, help="of each case")
    parser.add_argument("--out", type=Path, help="a folder for NAME.md and NAME.json")
    for name, arguments in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    return parser


def interleaved(
    cases: Mapping[str, Callable[[], _Result]], *, repeats: int
) -> dict[str, list[_Result]]:
    """Run every case once in each repeat, in an order that turns; return the results by case."""
    names, results = list(cases), dict[str, list[_Result]]()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            results.setdefault(name, []).append(cases[name]())
            print(f"  {repeat + 1}/{repeats} {name}", flush=True)
    return {name: results[name] for name in names}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the ratio within each repeat, over the repeats."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def machine() -> str:
    """Return in one sentence what this machine is, and how busy."""
    import ray
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if "model name" in line
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, Ray {ray.__version__}; load average {os.getloadavg()[0]:.1f}."
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux
        return []


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'at least' if figure.is_better == 'greater' else 'at most'} {figure.target:g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
