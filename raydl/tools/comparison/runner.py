"""Runs what is compared, one after another; one that fails does not stop the others.

Runs are interleaved by seed, because machines are noisy: a slow quarter of an hour meets
every method rather than all seeds of one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydl.config import InputConfig, TrainConfig, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.redaction import redact, redact_values
from raydl.tools.comparison.figures import Run, make_rows
from raydl.tools.comparison.hparams import write_hparams
from raydl.tools.comparison.report import describe, draw, machine, markdown, print_table, sentence
from raydl.tools.comparison.settings import Comparison, plan

if TYPE_CHECKING:
    from raydl.data import Dataset

Fit = Callable[[TrainConfig], Mapping[str, Any]]
"""Trains as the settings say and returns the figures of ``result.json``."""

_STOPPED = {"SIGINT": 130, "SIGTERM": 143}


def compare(comparison: Comparison, *, fit: Fit | None = None, command: str = "") -> int:
    """Do the runs that are not complete yet, report all, and return the exit status.

    Args:
        comparison: what is compared.
        fit: does one run; None: ``train``.
        command: what the report says it was started with.

    Returns:
        0; 1 if a run failed; 130 if Ctrl-C ended it, 143 if SIGTERM did.

    Raises:
        RaydlError: what was asked for can not be done; nothing was started.
    """
    out = Path(comparison.out or time.strftime("runs/compare-%Y%m%d-%H%M%S"))
    runs = [take_complete(run) for run in plan(comparison, out)]
    if fit is None and any(run.figures is None for run in runs):
        _check_inputs(runs[0].config)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", f"{out} can not be made: {error}") from error
    print(f"{len(runs)} run(s) to {out}: {describe(comparison)}", flush=True)
    report = functools.partial(_write_report, comparison, runs, out, command)
    stopped_by = _run_all(runs, fit or train, report, comparison.target)
    rows = make_rows(runs, comparison.target)
    draw(runs, rows, comparison.target, out)
    write_hparams(runs, comparison.target)
    report()
    print_table(rows, comparison.target)
    if stopped_by:
        left = sum(run.status == "not run" for run in runs)
        print(f"stopped by {stopped_by}; the same command with --out {out} does the other {left}")
    print(
        f"  report:       {out}/comparison.md\n"
        f"  curves:       tensorboard --logdir {out}  (then #hparams, #custom_scalars)"
    )
    failed = any(run.status == "failed" for run in runs)
    return _STOPPED.get(stopped_by, 1) if stopped_by else int(failed)


def take_complete(run: Run) -> Run:
    """Return the run with its figures if its folder holds them, else as it is.

    Raises:
        ConfigError: the folder holds a complete run with other settings.
    """
    from raydl.run.folder import RunFolder

    try:
        figures = json.loads((run.folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return run
    if figures.get("stopped_by") or "evaluations" not in figures:
        return run
    before = _settings(RunFolder(run.config).read_config())
    for name, value in _settings(run.config).items():
        if before[name] != value:
            problem = f"holds {run.folder}, where {name} was {before[name]} and not {value}"
            raise ConfigError("out", f"{problem}; name another folder")
    return dataclasses.replace(run, figures=figures)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide a run's figures, by dotted name."""
    found: dict[str, Any] = {"data": config.data, "model": config.model}
    for group, value in to_dict(config).items():
        if isinstance(value, dict) and group not in ("run", "checkpoint"):
            found |= {f"{group}.{name}": setting for name, setting in value.items()}
    shown: dict[str, Any] = redact_values(found)  # as config.json has them
    return shown


def _run_all(runs: list[Run], fit: Fit, report: Callable[[], None], target: float) -> str:
    """Do what is not complete, in place; return the signal that ended it, or nothing."""
    for index, run in enumerate(runs):
        stopped_by = ""
        if run.figures is None:
            try:
                runs[index], stopped_by = _attempt(run, fit)
                report()
            except KeyboardInterrupt:
                stopped_by = "SIGINT"
        if stopped_by:
            return stopped_by
        taken = " (complete already: taken, not repeated)" if run.figures is not None else ""
        print(f"[{index + 1}/{len(runs)}] {sentence(runs[index], target)}{taken}", flush=True)
    return ""


def _attempt(run: Run, fit: Fit) -> tuple[Run, str]:
    """Return the run with its figures or the reason of its failure, and the signal if one came."""
    if any((run.folder / name).exists() for name in ("config.json", "error.txt")):
        # An attempt that did not come to its end.
        shutil.rmtree(run.folder)
    try:
        figures = fit(run.config)
    except Exception as error:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "error.txt").write_text(redact(traceback.format_exc()))
        return dataclasses.replace(run, reason=_reason(error)), ""
    stopped_by = figures.get("stopped_by", "")
    return (run if stopped_by else dataclasses.replace(run, figures=figures)), stopped_by


def train(config: TrainConfig) -> Mapping[str, Any]:
    """Do one run in this process, on the Ray it is connected to, and return its figures."""
    from raydl.run.trainer import Trainer

    trainer = Trainer.from_config(config)
    trainer.data = _dataset(config.data, config.training.seed, config.input)
    return trainer.fit().metrics


@functools.lru_cache(maxsize=1)
def _dataset(source: str, seed: int, input: InputConfig) -> Dataset:
    """Read the data once for all methods of a seed."""
    from raydl.data import load

    return load(source, seed=seed, input=input)


def _check_inputs(config: TrainConfig) -> None:
    """Raise a RaydlError for what every run would stumble over: the data, the model's name."""
    from raydl.run.trainer import Trainer

    Trainer.from_config(config)
    _dataset(config.data, config.training.seed, config.input)


def _reason(error: Exception) -> str:
    """Return one line; Ray's own errors carry a traceback, and the reason comes last."""
    lines = [line.strip() for line in redact(str(error)).splitlines() if line.strip()]
    if isinstance(error, RaydlError):
        return " ".join(lines)
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {''.join(lines)}"


def _write_report(comparison: Comparison, runs: Sequence[Run], out: Path, command: str) -> None:
    """Write ``comparison.json`` and ``comparison.md``, of all runs there are so far."""
    target = comparison.target
    values = {
        "command": command,
        "target": target,
        "machine": machine(),
        "settings": to_dict(comparison.base),
        "runs": [run.as_dict(target) for run in runs],
    }
    (out / "comparison.json").write_text(json.dumps(redact_values(values), indent=2))
    text = markdown(comparison, runs, make_rows(runs, target), out, command)
    (out / "comparison.md").write_text(redact(text))
