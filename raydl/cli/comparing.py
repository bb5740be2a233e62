"""``raydl compare`` and ``raydl weak-scaling``: several runs, with options of ``raydl train``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from raydl.cli.options import parse_train, print_table

_Own = TypeVar("_Own")


def compare(arguments: Sequence[str]) -> int:
    """Compare training methods over seeds: accuracy, time to a target, time parts."""
    from raydl.tools import comparison

    settings = parse_own(comparison.Comparison, arguments, prog="raydl compare")
    return comparison.compare(settings, command=f"raydl compare {shlex.join(arguments)}")


def weak_scaling(arguments: Sequence[str]) -> int:
    """Measure the efficiency of growing numbers of workers, each with the same work."""
    from raydl.tools.weak_scaling import WeakScaling, measure

    settings = parse_own(WeakScaling, arguments, prog="raydl weak-scaling")
    status, rows = measure(settings, command=f"raydl weak-scaling {shlex.join(arguments)}")
    if rows:
        _print(rows)
    return status


def parse_own(cls: type[_Own], arguments: Sequence[str], *, prog: str) -> _Own:
    """Return the settings for a command's own options and those of ``raydl train``."""
    own, others = tyro.cli(cls, args=list(arguments), prog=prog, return_unknown_args=True)
    settings: _Own = dataclasses.replace(own, base=parse_train(others))  # type: ignore[type-var]
    return settings


def _print(rows: list[dict[str, Any]]) -> None:
    parts = [part for part in rows[0]["ms_per_step"] if any(r["ms_per_step"][part] for r in rows)]
    head = ["workers", "samples/s", "efficiency", "communication"]
    table = [
        [
            str(r["workers"]),
            f"{r['samples_per_s']:,.0f}",
            f"{r['efficiency']:.0%}",
            f"{r['communication_share'] or 0:.0%}",
        ]
        for r in rows
    ]
    print_table(head, table, numbers=head)
    print("\nmilliseconds of a worker per local step")
    head = ["workers", *(part.replace("_", " ") for part in parts)]
    times = [[str(r["workers"]), *(f"{r['ms_per_step'][p]:.2f}" for p in parts)] for r in rows]
    print_table(head, times, numbers=head)
