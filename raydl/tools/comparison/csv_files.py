"""Writes the table and the curves of a comparison as CSV, for other programs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydl.tools.comparison.figures import COLUMNS, Row
from raydl.tools.runs import Run


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write a row per method: settings, and median, least and greatest value of each figure.

    ``inf`` means never; a figure that is not known is empty.
    """
    _write(path, [_settings_of(row) | _figures_of(row) for row in rows])


def _settings_of(row: Row) -> dict[str, Any]:
    return {
        "method": row.method, "period": row.period, "lr": row.lr, "momentum": row.momentum,
        "strategy": row.strategy, "runs": row.num_runs, "planned": row.num_planned,
        "at_target": row.num_reached,
    }  # fmt: skip


def _figures_of(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in COLUMNS:
        spread = row.figures.get(name)
        known = (spread.median, spread.low, spread.high) if spread else (None, None, None)
        for ending, value in zip(("", "_least", "_greatest"), known, strict=True):
            column = "local_steps_each" if name == "period" else name  # the setting has that name
            values[f"{column}{ending}"] = None if value == float("-inf") else value
    return values


def write_curves(runs: Sequence[Run], path: Path) -> None:
    """Write a row per score of each run: round, samples, seconds, bytes, messages, metrics."""
    _write(
        path,
        [
            {
                "method": run.method,
                "period": run.config.method.period,
                "lr": run.config.optimizer.lr,
                "seed": run.seed,
                **{name: v for name, v in run.trial.items() if name not in _NAMED},
                **score,
            }
            for run in runs
            for score in (run.figures or {}).get("evaluations", ())
        ],
    )


_NAMED = ("method.period", "optimizer.lr")
"""Settings with columns of their own in every comparison."""


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under the names of all their values; a missing value is empty."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
