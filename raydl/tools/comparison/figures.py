"""Reduces the figures of all runs to one row per method, the fastest to the target on top."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raydl.metrics import TIME_PARTS
from raydl.tools.runs import Run

COLUMNS = {
    "seconds_to_target": ("seconds to target", "{:.2f}"),
    "samples_to_target": ("samples to target", "{:,.0f}"),
    "center_accuracy": ("final accuracy", "{:.2%}"),
    "communication_share": ("communication", "{:.0%}"),
    "rounds": ("exchanges", "{:,.0f}"),
    "period": ("local steps each", "{:,.1f}"),
    "staleness": ("staleness", "{:.2f}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "seconds": ("seconds", "{:.1f}"),
}
"""Heading and format of each figure, by its name in ``comparison.json``."""

_MISSING = {"center_accuracy": -math.inf}
"""Values for missing figures; infinity, which means never, for all other figures."""


def to_target(run: Run, target: float) -> tuple[float, float]:
    """Return (seconds, samples) at the first evaluation that reaches the target accuracy.

    Both are infinite if none does, or if the task has no accuracy.
    """
    for score in (run.figures or {}).get("evaluations", ()):
        if score.get("accuracy", -math.inf) >= target:
            return score["seconds"], score["samples"]
    return math.inf, math.inf


def as_dict(run: Run, target: float) -> dict[str, Any]:
    """Return the object of a run for ``comparison.json``."""
    seconds, samples = (x if math.isfinite(x) else None for x in to_target(run, target))
    return {
        "method": run.method,
        "strategy": run.strategy,
        "seed": run.seed,
        "folder": str(run.folder),
        "status": run.status,
        "reason": run.reason,
        "seconds_to_target": seconds,
        "samples_to_target": samples,
        **(run.figures or {}),
    }


@dataclass(frozen=True)
class Spread:
    """The median, least and greatest value of a figure over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value per seed; infinity means never."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """The figures of the complete runs of one method."""

    method: str
    strategy: str
    num_runs: int
    num_planned: int
    num_reached: int
    """Complete runs that reached the target."""
    figures: dict[str, Spread]
    """Spread by name in ``COLUMNS``; empty if no run is complete."""
    parts: dict[str, float]
    """The eight time parts, seconds per worker, mean over seeds."""
    reason: str
    """Why the first failed run failed."""


def make_rows(runs: Sequence[Run], target: float) -> list[Row]:
    """Return a row per method, sorted by median time to the target, then by accuracy.

    A run that never reaches the target counts as slower than all others. Methods without a
    complete run are last.
    """
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    return sorted((_row(group, target) for group in by_method.values()), key=_sort_key)


def _sort_key(row: Row) -> tuple[bool, float, float]:
    if not row.num_runs:
        return True, 0.0, 0.0
    figures = row.figures
    return False, figures["seconds_to_target"].median, -figures["center_accuracy"].median


def _row(runs: Sequence[Run], target: float) -> Row:
    done = [as_dict(run, target) for run in runs if run.figures is not None]
    values = {
        name: [_MISSING.get(name, math.inf) if x.get(name) is None else x[name] for x in done]
        for name in COLUMNS
    }
    parts = [figures["time_parts"] for figures in done]
    return Row(
        method=runs[0].method,
        strategy=runs[0].strategy,
        num_runs=len(done),
        num_planned=len(runs),
        num_reached=sum(figures["seconds_to_target"] is not None for figures in done),
        figures={name: Spread.of(of_seeds) for name, of_seeds in values.items() if of_seeds},
        parts={p: statistics.fmean(x.get(p, 0.0) for x in parts) for p in TIME_PARTS}
        if parts
        else {},
        reason=next((run.reason for run in runs if run.reason), ""),
    )
