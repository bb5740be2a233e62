"""Reduces the figures of all runs to one row per method, the fastest to the target on top."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydl.core.scores import score_of
from raydl.metrics import TIME_PARTS
from raydl.tools.runs import Run

OVER = ("seconds", "samples", "bytes", "messages")
"""What a run is measured by: the x-axes of the charts."""
BYTES = "bytes"
"""Format of a size."""
COLUMNS = {
    "seconds_to_target": ("seconds to target", "{:.2f}"),
    "samples_to_target": ("samples to target", "{:,.0f}"),
    "bytes_to_target": ("bytes to target", BYTES),
    "center_accuracy": ("final accuracy", "{:.2%}"),
    "communication_share": ("communication", "{:.0%}"),
    "rounds": ("exchanges", "{:,.0f}"),
    "period": ("local steps each", "{:,.1f}"),
    "staleness": ("staleness", "{:.2f}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "seconds": ("seconds", "{:.1f}"),
    "samples": ("samples", "{:,.0f}"),
    "bytes": ("bytes", BYTES),
    "messages": ("messages", "{:,.0f}"),
}
"""Heading and format of each figure, by its name in ``comparison.json``."""

_UNKNOWN = ("center_accuracy", "bytes", "messages")
"""Figures that are unknown if they are missing; any other is never reached."""


def at_target(run: Run, target: float) -> Mapping[str, float]:
    """Return the first score that reaches the target accuracy.

    It is empty if none does, or if the task has no accuracy.
    """
    scores = (run.figures or {}).get("evaluations", ())
    return next((score for score in scores if score.get("accuracy", -math.inf) >= target), {})


def as_dict(run: Run, target: float) -> dict[str, Any]:
    """Return the object of a run for ``comparison.json``."""
    score = at_target(run, target)
    return {
        "method": run.method,
        "strategy": run.strategy,
        "seed": run.seed,
        "trial": dict(run.trial),
        "folder": str(run.folder),
        "status": run.status,
        "reason": run.reason,
        **{f"{over}_to_target": score.get(over) for over in OVER},
        **(run.figures or {}),
    }


def last_score(run: Run) -> float:
    """Return the score of the last center, higher is better; minus infinity without one."""
    scores = (run.figures or {}).get("evaluations", ())
    return score_of(scores[-1], run.config.evaluation) if scores else -math.inf


def chosen(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of each method with the trial whose run of the first seed is the best.

    Of equal ones, and if none is complete, it is the first trial.
    """
    first = min(run.seed for run in runs)
    best: dict[str, Run] = {}
    for run in (run for run in runs if run.seed == first):
        if run.method not in best or last_score(run) > last_score(best[run.method]):
            best[run.method] = run
    return [run for run in runs if run.trial == best[run.method].trial]


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
    period: int | str | None
    lr: float
    momentum: float
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
        name: [_missing(name) if x.get(name) is None else x[name] for x in done] for name in COLUMNS
    }
    parts, config = [figures["time_parts"] for figures in done], runs[0].config
    return Row(
        method=runs[0].method,
        strategy=runs[0].strategy,
        period=config.method.period,
        lr=config.optimizer.lr or 0.0,
        momentum=config.optimizer.momentum or 0.0,
        num_runs=len(done),
        num_planned=len(runs),
        num_reached=sum(figures["seconds_to_target"] is not None for figures in done),
        figures={name: Spread.of(of_seeds) for name, of_seeds in values.items() if of_seeds},
        parts={p: statistics.fmean(x.get(p, 0.0) for x in parts) for p in TIME_PARTS}
        if parts
        else {},
        reason=next((run.reason for run in runs if run.reason), ""),
    )


def _missing(name: str) -> float:
    return -math.inf if name in _UNKNOWN else math.inf
