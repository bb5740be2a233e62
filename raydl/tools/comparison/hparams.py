"""The runs of a comparison as rows of TensorBoard's page *HParams*."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raydl.config import TrainConfig
from raydl.metrics.tags import COMPARED, OF_COMPARISON
from raydl.redaction import redact
from raydl.tools.comparison.figures import Run

_OTHER_NAMES = {"accuracy": "center_accuracy"}
"""Figures whose name in ``comparison.json`` is not that of their curve."""
_ALWAYS = ("lr", "method", "period", "seed", "workers")
"""Shown even if equal for all. The page shows the first five of the alphabet by itself."""


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that the page shows, numbers or words; what has no meaning is absent."""
    config: TrainConfig = run.config
    workers = config.scaling.wanted()
    values = {
        "method": run.method,
        "strategy": run.strategy,
        "seed": run.seed,
        "workers": int(workers) if workers.isdigit() else workers,
        "batch_size": config.training.batch_size,
        "period": config.method.period,
        "beta": config.method.beta,
        "lr": config.optimizer.lr,
        "momentum": config.optimizer.momentum,
        "compression": config.exchange.compression,
        "model": config.model,
        "data": redact(config.data),
    }
    return {name: value for name, value in values.items() if value is not None}


def figures_of(run: Run, target: float) -> dict[str, float]:
    """Return a run's results; a target that was not reached is absent."""
    figures = run.as_dict(target)
    values = {tag: figures.get(_figure_of(tag)) for tag in COMPARED}
    return {tag: float(value) for tag, value in values.items() if value is not None}


def _figure_of(tag: str) -> str:
    name = tag.removeprefix("compare/")
    return _OTHER_NAMES.get(name, name)


def write_hparams(runs: Sequence[Run], target: float) -> None:
    """Write a file of settings and figures into the folder of every complete run.

    A file of an earlier report gives way to the new one: the target may be another.
    """
    done = [run for run in runs if run.figures is not None]
    columns = _columns([settings_of(run) for run in done])
    for run in done:
        for old in run.folder.glob(f"events.out.tfevents.*{OF_COMPARISON}"):
            old.unlink()
        _write_one(run, columns, target)


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings worth a column, each with one of its values, which tells its kind."""
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: next(value for value in found if value is not None)
        for name, found in values.items()
        if name in _ALWAYS or len(set(found)) > 1
    }


def _write_one(run: Run, columns: dict[str, Any], target: float) -> None:
    from torch.utils.tensorboard import FileWriter
    from torch.utils.tensorboard.summary import hparams, scalar

    experiment, _, _ = hparams(columns, dict.fromkeys(COMPARED, 0.0))
    own = {name: value for name, value in settings_of(run).items() if name in columns}
    _, settings, end = hparams(own, {})
    at = int((run.figures or {}).get("samples", 0))
    writer = FileWriter(str(run.folder), filename_suffix=OF_COMPARISON)
    for summary in (experiment, settings, end):
        writer.add_summary(summary)
    for name, value in figures_of(run, target).items():
        writer.add_summary(scalar(name, value), at)
    writer.close()
