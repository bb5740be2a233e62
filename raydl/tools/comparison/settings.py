"""The settings of a comparison: those that all runs share, and the runs they lead to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from raydl.config import MethodConfig, RunConfig, TrainConfig
from raydl.errors import ConfigError
from raydl.tools.comparison.figures import Run

_BASE = TrainConfig()
_ENDS = ("samples", "seconds", "epochs", "steps")


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
        if run.resume or run.run_dir is not None or run.storage_path is not None:
            raise ConfigError("run.run_dir", "and the like give way to --out in a comparison")


def method_names(text: str) -> list[str]:
    """Return the methods that ``--methods`` names, each once."""
    from raydl.core.methods import METHODS  # imports torch

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
    from raydl.core.methods import filled_in, resolve

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
            runs.append(Run(name, method.strategy, seed, filled_in(config, method)))
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
