"""Weak scaling: the work per worker is constant, the number of workers grows.

Efficiency is the samples/s per worker, divided by that of the first row. The batch per worker is
constant, so the total batch grows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from raydl.config import TrainConfig, to_dict
from raydl.config.checks import require_local
from raydl.errors import ConfigError
from raydl.text.redaction import redact_values
from raydl.tools.comparison.report import machine
from raydl.tools.comparison.runner import train

_STEPS = 300


@dataclass(frozen=True, kw_only=True)
class WeakScaling:
    """Train with growing numbers of workers, each with the same work, and report the efficiency.

    All options of `raydl train` are accepted, too, and apply to all runs.
    """

    workers: str = "1,2"
    """Numbers of workers, separated by commas; the first one has an efficiency of 100%."""
    out: str | None = None
    """Folder of all runs and of the figures; unset: runs/weak-scaling-DATE."""
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


def plan(scaling: WeakScaling, out: Path) -> list[TrainConfig]:
    """Return the settings of all runs.

    Raises:
        ConfigError: if a setting changes the work, or settings contradict each other for a number
            of workers.
    """
    from raydl.methods import resolve  # imports torch

    base, run = scaling.base, scaling.base.run
    run.refuse_folder("in a measurement")
    ends = (base.training.epochs, base.training.samples, base.training.seconds)
    if any(end is not None for end in ends):
        settings = "training.epochs, training.samples and training.seconds"
        raise ConfigError(settings, "cannot be set, since the steps are constant; use --steps")
    if base.training.stop_at_accuracy is not None or base.training.patience is not None:
        settings = "training.stop_at_accuracy and training.patience"
        raise ConfigError(settings, "cannot be set, since the steps are constant")
    progress = "none" if run.progress == "auto" else run.progress
    configs = [
        dataclasses.replace(
            base,
            training=dataclasses.replace(base.training, steps=base.training.steps or _STEPS),
            scaling=dataclasses.replace(base.scaling, num_workers=count),
            run=dataclasses.replace(run, run_dir=str(out / f"workers-{count}"), progress=progress),
        )
        for count in scaling.counts
    ]
    for config in configs:
        resolve(config)
    return configs


def row(
    config: TrainConfig, figures: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of one run.

    Args:
        config: settings of the run.
        figures: the content of its ``result.json``.
        first: the first row; empty if this is the first row.
    """
    num_workers = max(1, config.scaling.max_workers)
    speed = figures["samples_per_s"] / num_workers
    steps = config.training.steps or _STEPS
    return {
        "workers": num_workers,
        "samples_per_s": figures["samples_per_s"],
        "samples_per_s_and_worker": speed,
        "efficiency": speed / first.get("samples_per_s_and_worker", speed),
        "seconds": figures["seconds"],
        "samples": figures["samples"],
        "communication_share": figures["communication_share"],
        "center_loss": figures["center_loss"],
        "center_accuracy": figures["center_accuracy"],
        "ms_per_step": {
            part: 1e3 * seconds / steps
            for part, seconds in figures["time_parts"].items()
            if part != "initialization"
        },
    }


def measure(
    scaling: WeakScaling, out: Path, *, command: str, report: Callable[[dict[str, Any]], None]
) -> str:
    """Execute the runs one after another, and write ``weak_scaling.json`` after each.

    Args:
        scaling: the settings.
        out: folder of the runs and of the figures.
        command: the command, for the file.
        report: called with the row of each run.

    Returns:
        The signal that stopped a run; empty: none.
    """
    rows: list[dict[str, Any]] = []
    for config in plan(scaling, out):
        figures = train(config)
        if figures["stopped_by"]:
            return str(figures["stopped_by"])
        rows.append(row(config, figures, rows[0] if rows else {}))
        report(rows[-1])
        values = {
            "command": command,
            "machine": machine(),
            "settings": to_dict(scaling.base),
            "rows": rows,
        }
        (out / "weak_scaling.json").write_text(json.dumps(redact_values(values), indent=2))
    return ""
