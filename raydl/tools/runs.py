"""Several runs, one after another: complete ones are kept, and a failed one does not end the rest.

``raydl compare`` and ``raydl weak-scaling`` are such runs; they differ in what varies, and in the
table at the end. A trial of Ray Tune is one run with other settings (``with_settings``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydl.config import InputConfig, TrainConfig, dotted, from_dict, to_dict
from raydl.config.run import RUNS
from raydl.errors import STOPPED, ConfigError, RaydlError
from raydl.run.lock import is_locked
from raydl.run.versions import installed_version
from raydl.storage import Storage
from raydl.text.redaction import redact, redact_values

if TYPE_CHECKING:
    from raydl.data import Dataset

Fit = Callable[[TrainConfig], Mapping[str, Any]]
"""Trains one run and returns its figures, the content of ``result.json``."""


@dataclass(frozen=True)
class Run:
    """One of several runs: its settings and, once complete, its figures."""

    label: str
    """What the run has of its own, for a line: ``sync-easgd, seed 0``."""
    config: TrainConfig
    """All settings, with the defaults of the method filled in."""
    strategy: str = ""
    figures: Mapping[str, Any] | None = None
    """The content of ``result.json``; None until the run is complete."""
    reason: str = ""
    """Why the run failed, in one sentence."""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """The settings that are tried, by dotted name."""

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.config.method.name

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.training.seed

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.run.run_dir or "")

    @property
    def status(self) -> str:
        """``done``, ``failed`` or ``not run``."""
        return "done" if self.figures is not None else "failed" if self.reason else "not run"


# plan


def with_settings(
    config: TrainConfig, values: Mapping[str, Any], *, given_as: str = "param_space"
) -> TrainConfig:
    """Return the settings with other values, by dotted name: ``{"optimizer.lr": 0.1}``.

    Args:
        config: the settings.
        values: the other values.
        given_as: where the user wrote them, for the message.

    Raises:
        ConfigError: if a name is no setting, or a value has the wrong type or is out of range.
    """
    settings = to_dict(config)
    known = dotted(settings)
    for name, value in values.items():
        if name not in known:
            problem = f"has {name!r}, which is no setting; give dotted names: optimizer.lr"
            raise ConfigError(given_as, problem)
        *groups, last = name.split(".")
        inner = settings
        for group in groups:
            inner = inner[group]
        inner[last] = value
    return from_dict(TrainConfig, settings)


def in_folder(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the settings of a run in a folder, which shows no panel of its own."""
    progress = "none" if config.run.progress == "auto" else config.run.progress
    run = dataclasses.replace(config.run, run_dir=str(folder), progress=progress)
    return dataclasses.replace(config, run=run)


def folder_of(out: str | None, command: str) -> Path:
    """Return the folder of all runs: ``out``, or one with the command and the date in its name."""
    return Path(out or time.strftime(f"{RUNS}/{command}-%Y%m%d-%H%M%S"))


# execute


def prepare(runs: Sequence[Run], out: Path, *, checks_data: bool) -> list[Run]:
    """Return the runs, those in the folder with their figures, and make the folder.

    Args:
        runs: all runs.
        out: the folder of all runs.
        checks_data: whether to open the data and the model, if a run is not complete.

    Raises:
        RaydlError: if the data, the model or the folder cannot be used.
    """
    known = [load_complete(run) for run in runs]
    if checks_data and any(run.figures is None for run in known):
        _check_inputs(known[0].config)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", f"{out} cannot be created: {error}") from error
    return known


def execute(
    runs: list[Run],
    fit: Fit | None,
    *,
    figures: Callable[[Run], str],
    report: Callable[[], None],
    start: int = 0,
) -> str:
    """Execute the runs that are not complete, and update the list.

    Args:
        runs: all runs.
        fit: trains one run; None: ``train``.
        figures: returns what is printed at the end of a complete run.
        report: called after each run that was executed.
        start: index of the first run to execute.

    Returns:
        The name of the signal that stopped a run, or "".
    """
    for index, run in enumerate(runs[start:], start):
        stopped_by = ""
        if run.figures is None:
            try:
                runs[index], stopped_by = _attempt(run, fit or train)
                report()
            except KeyboardInterrupt:
                stopped_by = "SIGINT"
        if stopped_by:
            return stopped_by
        now, note = runs[index], "" if run.figures is None else " (already complete, not repeated)"
        shown = f"failed: {now.reason}" if now.figures is None else figures(now) + note
        print(f"[{index + 1}/{len(runs)}] {now.label}: {shown}", flush=True)
    return ""


def exit_status(runs: Sequence[Run], stopped_by: str, out: Path) -> int:
    """Return 0 after success, 1 if a run failed, 130 after Ctrl-C, 143 after SIGTERM."""
    if stopped_by:
        left = sum(run.status == "not run" for run in runs)
        print(f"stopped by {stopped_by}; the same command with --out {out} runs the other {left}")
        return STOPPED.get(stopped_by, 1)
    return int(any(run.status == "failed" for run in runs))


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
    settings: dict[str, Any] = {
        "data": config.data,
        "model": config.model,
        "run.bad_workers": config.run.bad_workers,
    }
    for group, value in to_dict(config).items():
        if isinstance(value, dict) and group not in ("run", "checkpoint"):
            settings |= {f"{group}.{name}": setting for name, setting in value.items()}
    redacted: dict[str, Any] = redact_values(settings)  # config.json is redacted, too
    return redacted


def _attempt(run: Run, fit: Fit) -> tuple[Run, str]:
    """Return the run with its figures or the reason of its failure, and the signal or ""."""
    if is_locked(str(run.folder)):
        raise ConfigError("out", f": {run.folder} is in use by another command, which still trains")
    run = load_complete(run)  # another command may have completed it since the start of this one
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
    """Return the data, which all runs of a seed share."""
    from raydl.data import load

    return load(source, seed=seed, input=input, task=task)


def _check_inputs(config: TrainConfig) -> None:
    """Raise a RaydlError if the data or the model cannot be used, before the first run."""
    from raydl.data.skew import order_of
    from raydl.run.trainer import Trainer

    Trainer.from_config(config)
    data = _dataset(config.data, config.training.seed, config.input, config.task)
    order_of(data.train, config)


def _reason(error: Exception) -> str:
    """Return one line; errors of Ray contain a traceback, whose last line is the reason."""
    lines = [line.strip() for line in redact(str(error)).splitlines() if line.strip()]
    if isinstance(error, RaydlError):
        return " ".join(lines)
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {''.join(lines)}"


# report


def write_json(path: Path, command: str, base: TrainConfig, values: Mapping[str, Any]) -> None:
    """Write the figures of several runs, with the command, the machine and the shared settings."""
    content = {"command": command, "machine": machine(), "settings": to_dict(base), **values}
    path.write_text(json.dumps(redact_values(content), indent=2))


def machine() -> dict[str, str]:
    """Return the system, CPUs and package versions of the driver's machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "ray", "raydl")},
    }
