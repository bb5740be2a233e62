"""Writes the runs of a comparison as rows of TensorBoard's page *HParams*."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raydl.config import TrainConfig
from raydl.metrics.tags import COMPARED, OF_COMPARISON
from raydl.text.redaction import redact
from raydl.tools.comparison.figures import as_dict
from raydl.tools.runs import Run

_FIGURES = {"compare/accuracy": "center_accuracy"}
"""Figures by tag, where ``comparison.json`` has another name than the tag."""
_ALWAYS = ("lr", "method", "period", "seed", "workers")
"""Settings with a column even if all runs agree in them.

By default the page shows the first five columns in alphabetical order.
"""


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings of a row, numbers or strings, without those that are None."""
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
    """Return the results of a run by tag, without the target if it was not reached."""
    figures = as_dict(run, target)
    names = {tag: _FIGURES.get(tag, tag.removeprefix("compare/")) for tag in COMPARED}
    values = {tag: figures.get(name) for tag, name in names.items()}
    return {tag: float(value) for tag, value in values.items() if value is not None}


def write_hparams(runs: Sequence[Run], target: float) -> None:
    """Write an event file of settings and figures into the folder of each complete run.

    It replaces the file of an earlier report, whose target may differ.
    """
    done = [run for run in runs if run.figures is not None]
    columns = _columns([settings_of(run) for run in done])
    for run in done:
        for old in run.folder.glob(f"events.out.tfevents.*{OF_COMPARISON}"):
            old.unlink()
        _write_one(run, columns, target)


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings with a column, each with one of its values, which gives its type."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: next(value for value in values if value is not None)
        for name, values in columns.items()
        if name in _ALWAYS or len(set(values)) > 1
    }


def _write_one(run: Run, columns: dict[str, Any], target: float) -> None:
    from torch.utils.tensorboard import FileWriter
    from torch.utils.tensorboard.summary import hparams, scalar

    experiment, _, _ = hparams(columns, dict.fromkeys(COMPARED, 0.0))
    own = {name: value for name, value in settings_of(run).items() if name in columns}
    _, settings, end = hparams(own, {})
    num_samples = int((run.figures or {}).get("samples", 0))
    writer = FileWriter(str(run.folder), filename_suffix=OF_COMPARISON)
    for summary in (experiment, settings, end):
        writer.add_summary(summary)
    for name, value in figures_of(run, target).items():
        writer.add_summary(scalar(name, value), num_samples)
    writer.close()
