"""The settings of a comparison, and the runs that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from raydl.config import MethodConfig, TrainConfig
from raydl.config.checks import require, require_local
from raydl.errors import ConfigError
from raydl.tools.runs import Run, in_folder, with_settings

_BASE = TrainConfig()
_ENDS = ("samples", "seconds", "bytes", "epochs", "steps")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compare methods that train for equally many samples (or seconds, bytes, epochs, steps).

    All options of `raydl train` are accepted, too, and apply to all runs: --data, --model,
    --workers, --batch-size, --period, --lr, ... One of --samples, --seconds, --bytes, --epochs and
    --steps is required.
    """

    methods: str = "all"
    """Names, separated by commas; module:Class for your own rule; or all."""
    seeds: int = 3
    """Runs of each method, with seeds that count up from --seed."""
    target: float = 0.985
    """Test accuracy of the center, in (0, 1], to which time and samples are counted."""
    out: str | None = None
    """Folder of all runs and of the report; unset: runs/compare-DATE. Complete runs are kept."""
    base: Annotated[TrainConfig, tyro.conf.Fixed, tyro.conf.Suppress] = _BASE
    """The settings that all runs share."""

    def __post_init__(self) -> None:
        require(self.seeds >= 1, "seeds", "1 or more", self.seeds)
        require(0 < self.target <= 1, "target", "in (0, 1], for example 0.985", self.target)
        if self.base.method.name != MethodConfig().name:
            raise ConfigError("method.name", "cannot be set in a comparison; use --methods")
        self.base.run.refuse_folder("in a comparison")
        require_local("out", self.out)


def method_names(text: str) -> list[str]:
    """Return the methods of ``--methods``, without repetitions.

    Raises:
        ConfigError: if the text contains no name.
    """
    from raydl.methods import METHODS  # imports torch

    if text.strip() == "all":
        return list(METHODS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("methods", "is empty; give names separated by commas, or all")
    return list(dict.fromkeys(names))


def plan(comparison: Comparison, out: Path) -> list[Run]:
    """Return all runs, seed by seed.

    Raises:
        ConfigError: if a method is unknown, or settings contradict each other for a method.
    """
    from raydl.methods import filled_in, resolve

    training = comparison.base.training
    if all(getattr(training, end) is None for end in _ENDS):
        problem = "or seconds, bytes, epochs or steps must be set, the same for all methods"
        raise ConfigError("training.samples", problem)
    runs = []
    for seed in range(training.seed, training.seed + comparison.seeds):
        for name in method_names(comparison.methods):
            values = {"method.name": name, "training.seed": seed}
            folder = out / name.replace(":", ".") / f"seed-{seed}"
            config = in_folder(with_settings(comparison.base, values), folder)
            try:
                method = resolve(config)
            except ConfigError as error:
                if name in str(error):
                    raise
                raise ConfigError(error.setting, f"{error.problem} (for {name})") from error
            label = f"{name}, seed {seed}"
            runs.append(Run(label, filled_in(config, method), method.strategy))
    return runs
