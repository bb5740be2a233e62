"""The figures of a comparison: one row per method, the first at the target on top."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydl.config import TrainConfig
from raydl.metrics import TIME_PARTS

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
"""The figures of a row, by their names in ``comparison.json``, with heading and format."""


_ABSENT = {"center_accuracy": -math.inf}
"""The value of a figure that a run lacks, where that is not infinity, for never."""


@dataclass(frozen=True)
class Run:
    """One run: what was planned, and what came of it."""

    method: str
    strategy: str
    seed: int
    config: TrainConfig
    """All settings, the method's own defaults written out."""
    figures: Mapping[str, Any] | None = None
    """The content of ``result.json``, once the run is complete."""
    reason: str = ""
    """Why it failed, in one sentence."""

    @property
    def folder(self) -> Path:
        """Where it lives."""
        return Path(self.config.run.run_dir or "")

    @property
    def status(self) -> str:
        """``done``, ``failed`` or ``not run``."""
        return "done" if self.figures is not None else "failed" if self.reason else "not run"

    def to_target(self, target: float) -> tuple[float, float]:
        """Return (seconds, samples) at the first evaluation that reaches it, else infinities.

        A task without accuracy reaches none.
        """
        for score in (self.figures or {}).get("evaluations", ()):
            if score.get("accuracy", -math.inf) >= target:
                return score["seconds"], score["samples"]
        return math.inf, math.inf

    def as_dict(self, target: float) -> dict[str, Any]:
        """Return the object that ``comparison.json`` holds of it."""
        seconds, samples = (x if math.isfinite(x) else None for x in self.to_target(target))
        return {
            "method": self.method,
            "strategy": self.strategy,
            "seed": self.seed,
            "folder": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "seconds_to_target": seconds,
            "samples_to_target": samples,
            **(self.figures or {}),
        }


@dataclass(frozen=True)
class Spread:
    """The median of a figure over seeds, and its ends."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value per seed; infinity stands for never."""
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
    """By the names of ``COLUMNS``; empty if no run is complete."""
    parts: dict[str, float]
    """The eight time parts, seconds per worker, mean over seeds."""
    reason: str
    """Why the first run that failed did so."""


def make_rows(runs: Sequence[Run], target: float) -> list[Row]:
    """Return a row per method, by median time to the target, then accuracy; failed ones last.

    A seed that never reaches the target counts as later than all others.
    """
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    return sorted((_row(group, target) for group in by_method.values()), key=_place)


def _place(row: Row) -> tuple[bool, float, float]:
    if not row.num_runs:
        return True, 0.0, 0.0
    figures = row.figures
    return False, figures["seconds_to_target"].median, -figures["center_accuracy"].median


def _row(runs: Sequence[Run], target: float) -> Row:
    done = [run.as_dict(target) for run in runs if run.figures is not None]
    values = {
        name: [_ABSENT.get(name, math.inf) if x.get(name) is None else x[name] for x in done]
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
        parts={p: statistics.fmean(x[p] for x in parts) for p in TIME_PARTS} if parts else {},
        reason=next((run.reason for run in runs if run.reason), ""),
    )
