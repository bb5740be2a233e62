"""Weak scaling: the work per worker is constant, the number of workers grows.

Efficiency is the samples/s per worker, divided by that of the first row. The batch per worker is
constant, so the total batch grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from raydl.config import TrainConfig
from raydl.config.checks import require_local
from raydl.errors import ConfigError
from raydl.tools import runs as several
from raydl.tools.runs import Fit, Run, in_folder, with_settings

_STEPS = 300
_FIGURES = (
    "samples_per_s", "seconds", "samples", "communication_share", "center_loss", "center_accuracy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WeakScaling:
    """Train with growing numbers of workers, each with the same work, and report the efficiency.

    All options of `raydl train` are accepted, too, and apply to all runs.
    """

    workers: str = "1,2"
    """Numbers of workers, separated by commas; the first one has an efficiency of 100%."""
    out: str | None = None
    """Folder of all runs and of the figures; unset: runs/weak-scaling-DATE. Complete runs are
    kept."""
    base: Annotated[TrainConfig, tyro.conf.Fixed, tyro.conf.Suppress] = TrainConfig()  # noqa: RUF009

    def __post_init__(self) -> None:
        require_local("out", self.out)

    @property
    def counts(self) -> list[int]:
        """The numbers of workers without repetitions; 0 trains in this process, as one worker."""
        try:
            counts = [int(word) for word in self.workers.split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 0:
            raise ConfigError("workers", f"must be numbers as in 1,2,4, got {self.workers}")
        return list(dict.fromkeys(counts))


def plan(scaling: WeakScaling, out: Path) -> list[Run]:
    """Return all runs.

    Raises:
        ConfigError: if a setting changes the work, or settings contradict each other for a number
            of workers.
    """
    from raydl.methods import resolve  # imports torch

    base = scaling.base
    base.run.refuse_folder("in a measurement")
    ends = ("epochs", "samples", "seconds", "bytes")
    if any(getattr(base.training, end) is not None for end in ends):
        settings = "training.epochs, training.samples, training.seconds and training.bytes"
        raise ConfigError(settings, "cannot be set, since the steps are constant; use --steps")
    if base.training.stop_at_accuracy is not None or base.training.patience is not None:
        settings = "training.stop_at_accuracy and training.patience"
        raise ConfigError(settings, "cannot be set, since the steps are constant")
    runs = []
    for count in scaling.counts:
        values = {"scaling.num_workers": count, "training.steps": base.training.steps or _STEPS}
        config = in_folder(with_settings(base, values), out / f"workers-{count}")
        resolve(config)
        runs.append(Run(f"{max(1, count)} worker(s)", config))
    return runs


def make_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each complete run; the first one has an efficiency of 1."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.figures is not None:
            rows.append(_row(run.config, run.figures, rows[0] if rows else {}))
    return rows


def _row(
    config: TrainConfig, figures: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, Any]:
    num_workers = max(1, config.scaling.max_workers)
    speed = figures["samples_per_s"] / num_workers
    parts = {part: s for part, s in figures["time_parts"].items() if part != "initialization"}
    steps = config.training.steps or _STEPS
    return {
        "workers": num_workers,
        "samples_per_s_and_worker": speed,
        "efficiency": speed / first.get("samples_per_s_and_worker", speed),
        **{name: figures[name] for name in _FIGURES},
        "ms_per_step": {part: 1e3 * seconds / steps for part, seconds in parts.items()},
    }


def measure(
    scaling: WeakScaling, *, fit: Fit | None = None, command: str = ""
) -> tuple[int, list[dict[str, Any]]]:
    """Execute the runs, and write ``weak_scaling.json`` after each.

    Args:
        scaling: the settings.
        fit: trains one run; None: ``raydl.tools.runs.train``.
        command: the command, for the file.

    Returns:
        The exit status, see ``raydl.tools.runs.exit_status``, and the rows.
    """
    out = several.folder_of(scaling.out, "weak-scaling")
    runs = several.prepare(plan(scaling, out), out, checks_data=fit is None)

    def report() -> None:
        values = {"rows": make_rows(runs)}
        several.write_json(out / "weak_scaling.json", command, scaling.base, values)

    stopped_by = several.execute(runs, fit, figures=_speed, report=report)
    report()
    status = several.exit_status(runs, stopped_by, out)
    print(f"  figures:      {out}/weak_scaling.json")
    return status, make_rows(runs)


def _speed(run: Run) -> str:
    return f"{(run.figures or {})['samples_per_s']:,.0f} samples/s"
