"""Compares methods, all else equal: which runs, what came of them, what is reported.

    plan()       settings -> the runs; every one is checked before the first starts
    compare()    runs them one after another; one that fails does not stop the others
    make_rows()  their figures -> one row per method, the first at the target on top

:mod:`raydl.plots` makes text and pictures of the rows; :func:`compare` writes them down.

Runs are interleaved by seed, because machines are noisy: a slow quarter of an hour meets
every method rather than all seeds of one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydl import plots
from raydl.config import MethodConfig, RunConfig, TrainConfig, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.metrics import TIME_PARTS

if TYPE_CHECKING:
    from raydl.data import Dataset

Fit = Callable[[TrainConfig], Mapping[str, Any]]
"""Trains as the settings say and returns the figures of ``result.json``."""

_BASE = TrainConfig()
_ENDS = ("samples", "seconds", "epochs", "steps")
_STOPPED = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run methods under equal samples (or seconds, epochs), and report which came how far.

    Every option of `raydl train` may be given, too, and holds for all runs: --data, --model,
    --workers, --batch-size, --period, --lr, ... One of --samples, --seconds and --epochs must.
    """

    methods: str = "all"
    """Names, separated by commas; module:Class for a rule of your own; or all."""
    seeds: int = 3
    """Runs of each method; the first takes --seed, 0 unless set, the next one more."""
    target: float = 0.985
    """Test accuracy of the center, in (0, 1], to which time and samples are counted."""
    out: str | None = None
    """Folder of all runs and of the report; unset: runs/compare-DATE. Complete runs are kept."""
    base: Annotated[TrainConfig, tyro.conf.Fixed, tyro.conf.Suppress] = _BASE
    """The settings that all runs share."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError("seeds", f"must be 1 or more, got {self.seeds}")
        if not 0 < self.target <= 1:
            raise ConfigError("target", f"must be in (0, 1], as 0.985 is, got {self.target}")
        if self.base.method.name != MethodConfig().name:
            raise ConfigError("method.name", "is one method; a comparison takes --methods")
        run = self.base.run
        if run.resume or not run.run_dir is run.storage_path is None:
            raise ConfigError("run.run_dir", "and the like give way to --out in a comparison")


@dataclass(frozen=True)
class Run:
    """One run: what was planned, and what came of it."""

    method: str
    schedule: str
    seed: int
    config: TrainConfig
    """All settings, the method's own defaults written out."""
    figures: Mapping[str, Any] | None = None
    """What ``result.json`` says, once the run is complete."""
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
        """Return (seconds, samples) at the first evaluation that reaches it, else infinities."""
        for score in (self.figures or {}).get("evaluations", ()):
            if score["accuracy"] >= target:
                return score["seconds"], score["samples"]
        return math.inf, math.inf

    def as_dict(self, target: float) -> dict[str, Any]:
        """Return the object that ``comparison.json`` holds of it."""
        seconds, samples = (x if math.isfinite(x) else None for x in self.to_target(target))
        return {
            "method": self.method,
            "schedule": self.schedule,
            "seed": self.seed,
            "folder": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "seconds_to_target": seconds,
            "samples_to_target": samples,
            **(self.figures or {}),
        }


def method_names(text: str) -> list[str]:
    """Return the methods that ``--methods`` names, each once."""
    from raydl.methods import METHODS  # imports torch

    if text.strip() == "all":
        return list(METHODS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("methods", "names none; give names separated by commas, or all")
    return list(dict.fromkeys(names))


def plan(comparison: Comparison, out: Path) -> list[Run]:
    """Return all runs, seed by seed.

    Raises:
        ConfigError: a method is unknown, or settings do not go together for one of them.
    """
    from raydl.methods import filled_in, resolve

    training = comparison.base.training
    if all(getattr(training, end) is None for end in _ENDS):
        raise ConfigError("training.samples", "or seconds or epochs must be set, equal for all")
    runs = []
    for seed in range(training.seed, training.seed + comparison.seeds):
        for name in method_names(comparison.methods):
            config = _config_of(comparison, name, seed, out)
            try:
                method = resolve(config)
            except ConfigError as error:
                if name in str(error):
                    raise
                raise ConfigError(error.setting, f"{error.problem} (for {name})") from error
            runs.append(Run(name, method.schedule, seed, filled_in(config, method)))
    return runs


def _config_of(comparison: Comparison, name: str, seed: int, out: Path) -> TrainConfig:
    base = comparison.base
    progress = "none" if base.run.progress == "auto" else base.run.progress
    folder = out / name.replace(":", ".") / f"seed-{seed}"
    return dataclasses.replace(
        base,
        method=dataclasses.replace(base.method, name=name),
        training=dataclasses.replace(base.training, seed=seed),
        run=RunConfig(run_dir=str(folder), progress=progress),
    )


def compare(comparison: Comparison, *, fit: Fit | None = None, command: str = "") -> int:
    """Do the runs that are not complete yet, report all, and return the exit status.

    Args:
        comparison: what is compared.
        fit: does one run; None: :func:`train`.
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
    print(f"{len(runs)} run(s) to {out}: {plots.describe(comparison)}", flush=True)
    report = functools.partial(_write_report, comparison, runs, out, command)
    stopped_by = _run_all(runs, fit or train, report, comparison.target)
    _draw(comparison, runs, out)
    report()
    plots.print_table(make_rows(runs, comparison.target), comparison.target)
    if stopped_by:
        left = sum(run.status == "not run" for run in runs)
        print(f"stopped by {stopped_by}; the same command with --out {out} does the other {left}")
    print(f"  report:       {out}/comparison.md\n  curves:       tensorboard --logdir {out}")
    failed = any(run.status == "failed" for run in runs)
    return _STOPPED.get(stopped_by, 1) if stopped_by else int(failed)


def take_complete(run: Run) -> Run:
    """Return the run with its figures if its folder holds them, else as it is.

    Raises:
        ConfigError: the folder holds a complete run with other settings.
    """
    from raydl.run_folder import RunFolder

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
    """Return what decides the figures of a run, by dotted name."""
    found: dict[str, Any] = {}
    for group, value in to_dict(config).items():
        if isinstance(value, dict) and group not in ("run", "checkpoint"):
            found |= {f"{group}.{name}": setting for name, setting in value.items()}
    return found | {"data": config.data, "model": config.model}


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
        print(f"[{index + 1}/{len(runs)}] {plots.sentence(runs[index], target)}{taken}", flush=True)
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
        (run.folder / "error.txt").write_text(traceback.format_exc())
        return dataclasses.replace(run, reason=_reason(error)), ""
    stopped_by = figures.get("stopped_by", "")
    return (run if stopped_by else dataclasses.replace(run, figures=figures)), stopped_by


def train(config: TrainConfig) -> Mapping[str, Any]:
    """Do one run in this process, on the Ray it is connected to, and return its figures."""
    from raydl.trainer import Trainer

    trainer = Trainer.from_config(config)
    trainer.data = _dataset(config.data, config.training.seed)
    return trainer.fit().metrics


@functools.lru_cache(maxsize=1)
def _dataset(source: str, seed: int) -> Dataset:
    """Read the data once for all methods of a seed."""
    from raydl.data import load

    return load(source, seed=seed)


def _check_inputs(config: TrainConfig) -> None:
    """Raise a RaydlError for what every run would stumble over: the data, the model's name."""
    from raydl.trainer import Trainer

    Trainer.from_config(config)
    _dataset(config.data, config.training.seed)


def _reason(error: Exception) -> str:
    """Return one line; Ray's own errors carry a traceback, and the reason comes last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RaydlError):
        return " ".join(lines)
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {''.join(lines)}"


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
    """What the complete runs of one method came to."""

    method: str
    schedule: str
    num_runs: int
    num_planned: int
    num_reached: int
    """Complete runs that reached the target."""
    figures: dict[str, Spread]
    """By the names of ``plots.COLUMNS``; empty if no run is complete."""
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
        name: [math.inf if figures[name] is None else figures[name] for figures in done]
        for name in plots.COLUMNS
    }
    parts = [figures["time_parts"] for figures in done]
    return Row(
        method=runs[0].method,
        schedule=runs[0].schedule,
        num_runs=len(done),
        num_planned=len(runs),
        num_reached=sum(figures["seconds_to_target"] is not None for figures in done),
        figures={name: Spread.of(of_seeds) for name, of_seeds in values.items() if of_seeds},
        parts={p: statistics.fmean(x[p] for x in parts) for p in TIME_PARTS} if parts else {},
        reason=next((run.reason for run in runs if run.reason), ""),
    )


def _write_report(comparison: Comparison, runs: Sequence[Run], out: Path, command: str) -> None:
    """Write ``comparison.json`` and ``comparison.md``, of all runs there are so far."""
    target = comparison.target
    values = {
        "command": command,
        "target": target,
        "machine": plots.machine(),
        "settings": to_dict(comparison.base),
        "runs": [run.as_dict(target) for run in runs],
    }
    (out / "comparison.json").write_text(json.dumps(values, indent=2))
    text = plots.markdown(comparison, runs, make_rows(runs, target), out, command)
    (out / "comparison.md").write_text(text)


def _draw(comparison: Comparison, runs: Sequence[Run], out: Path) -> None:
    """Draw the pictures; without matplotlib say how to get it."""
    target = comparison.target
    done = [run.as_dict(target) for run in runs if run.figures is not None]
    order = [row.method for row in make_rows(runs, target)]
    try:
        if done:
            plots.draw(done, order, target, out)
    except ImportError:
        print("no pictures: matplotlib is not installed; pip install 'raydl[report]'")
