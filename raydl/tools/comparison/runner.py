"""Executes the runs of a comparison one after another, and goes on after a failed run.

The runs of all methods with one seed come before those with the next seed: a machine that is slow
for some minutes then slows down every method, not all seeds of one method.
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
from raydl.config.run import RUNS
from raydl.errors import STOPPED, ConfigError, RaydlError
from raydl.run.lock import is_locked
from raydl.storage import Storage
from raydl.text.redaction import redact, redact_values
from raydl.tools.comparison.figures import Run, make_rows
from raydl.tools.comparison.hparams import write_hparams
from raydl.tools.comparison.report import describe, draw, machine, markdown, print_table, sentence
from raydl.tools.comparison.settings import Comparison, plan

if TYPE_CHECKING:
    from raydl.data import Dataset

Fit = Callable[[TrainConfig], Mapping[str, Any]]
"""Trains one run and returns its figures, the content of ``result.json``."""


def compare(comparison: Comparison, *, fit: Fit | None = None, command: str = "") -> int:
    """Execute the runs that are not complete yet, report all runs, and return the exit status.

    Args:
        comparison: settings of the comparison.
        fit: trains one run; None: ``train``.
        command: the command line for the report.

    Returns:
        0 after success, 1 if a run failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        RaydlError: if the settings, the data or the folder cannot be used; no run was started.
    """
    out = Path(comparison.out or time.strftime(f"{RUNS}/compare-%Y%m%d-%H%M%S"))
    runs = [load_complete(run) for run in plan(comparison, out)]
    if fit is None and any(run.figures is None for run in runs):
        _check_inputs(runs[0].config)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", f"{out} cannot be created: {error}") from error
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
        print(f"stopped by {stopped_by}; the same command with --out {out} runs the other {left}")
    print(
        f"  report:       {out}/comparison.md\n"
        f"  curves:       tensorboard --logdir {out}  (then #hparams, #custom_scalars)"
    )
    failed = any(run.status == "failed" for run in runs)
    return STOPPED.get(stopped_by, 1) if stopped_by else int(failed)


def load_complete(run: Run) -> Run:
    """Return the run with the figures of its folder, or unchanged if it is not complete.

    Raises:
        ConfigError: if the folder contains a complete run with other settings.
    """
    from raydl.checkpoint.figures import read_figures
    from raydl.run.folder import RunFolder

    try:
        figures = read_figures(Storage(str(run.folder)))
    except (OSError, ValueError):
        return run
    if figures.get("stopped_by") or not {"evaluations", "time_parts"} <= figures.keys():
        return run
    before = _settings(RunFolder(run.config).read_config())
    for name, value in _settings(run.config).items():
        if before[name] != value and (name, value) != ("model", "auto"):
            problem = f"contains {run.folder}, which has {name} {before[name]} instead of {value}"
            raise ConfigError("out", f"{problem}; name another folder")
    return dataclasses.replace(run, figures=figures)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that influence the figures, by dotted name."""
    settings: dict[str, Any] = {"data": config.data, "model": config.model}
    for group, value in to_dict(config).items():
        if isinstance(value, dict) and group not in ("run", "checkpoint"):
            settings |= {f"{group}.{name}": setting for name, setting in value.items()}
    redacted: dict[str, Any] = redact_values(settings)  # config.json is redacted, too
    return redacted


def _run_all(runs: list[Run], fit: Fit, report: Callable[[], None], target: float) -> str:
    """Execute the incomplete runs, update the list, and return the stop signal's name or ""."""
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
        note = " (already complete, not repeated)" if run.figures is not None else ""
        print(f"[{index + 1}/{len(runs)}] {sentence(runs[index], target)}{note}", flush=True)
    return ""


def _attempt(run: Run, fit: Fit) -> tuple[Run, str]:
    """Return the run with its figures or the reason of its failure, and the signal or ""."""
    if is_locked(str(run.folder)):
        raise ConfigError(
            "out", f": {run.folder} is in use by another comparison, which still trains"
        )
    run = load_complete(run)  # another comparison may have completed it since the start of this one
    if run.figures is not None:
        return run, ""
    if any((run.folder / name).exists() for name in ("config.json", "error.txt")):
        shutil.rmtree(run.folder)  # an earlier, incomplete attempt
    try:
        figures = fit(run.config)
    except Exception as error:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "error.txt").write_text(redact(traceback.format_exc()))
        return dataclasses.replace(run, reason=_reason(error)), ""
    stopped_by = figures.get("stopped_by", "")
    return (run if stopped_by else dataclasses.replace(run, figures=figures)), stopped_by


def train(config: TrainConfig) -> Mapping[str, Any]:
    """Train one run in this process, on the Ray it is connected to, and return its figures."""
    from raydl.run.trainer import Trainer

    trainer = Trainer.from_config(config)
    trainer.data = _dataset(config.data, config.training.seed, config.input, config.task)
    return trainer.fit().metrics


@functools.lru_cache(maxsize=1)
def _dataset(source: str, seed: int, input: InputConfig, task: str) -> Dataset:
    """Return the data, which all methods of a seed share."""
    from raydl.data import load

    return load(source, seed=seed, input=input, task=task)


def _check_inputs(config: TrainConfig) -> None:
    """Raise a RaydlError if the data or the model cannot be used, before the first run."""
    from raydl.run.trainer import Trainer

    Trainer.from_config(config)
    _dataset(config.data, config.training.seed, config.input, config.task)


def _reason(error: Exception) -> str:
    """Return one line; errors of Ray contain a traceback, whose last line is the reason."""
    lines = [line.strip() for line in redact(str(error)).splitlines() if line.strip()]
    if isinstance(error, RaydlError):
        return " ".join(lines)
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {''.join(lines)}"


def _write_report(comparison: Comparison, runs: Sequence[Run], out: Path, command: str) -> None:
    """Write ``comparison.json`` and ``comparison.md`` with the runs so far."""
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
