"""The settings of a comparison, and the runs that follow from them."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from raydl.config import MethodConfig, TrainConfig
from raydl.config.checks import require, require_local
from raydl.errors import ConfigError, UnknownNameError
from raydl.tools.runs import Run, in_folder, with_settings

_BASE = TrainConfig()
_ENDS = ("samples", "seconds", "bytes", "epochs", "steps")
_EQUAL = {"method.name", "training.seed", *(f"training.{end}" for end in _ENDS)}
"""Settings that no trial may change."""


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
    tune: str = ""
    """Settings to choose for each method, as lr=0.05:0.1:0.2,period=4:16: all combinations run with
    the first seed, and the one with the best last score runs with the other seeds, too."""
    trials: int | None = None
    """Combinations of --tune to run, drawn by --seed, the same for all methods; unset: all."""
    target: float = 0.985
    """Test accuracy of the center, in (0, 1], to which time and samples are counted."""
    out: str | None = None
    """Folder of all runs and of the report; unset: runs/compare-DATE. Complete runs are kept."""
    base: Annotated[TrainConfig, tyro.conf.Fixed, tyro.conf.Suppress] = _BASE
    """The settings that all runs share."""

    def __post_init__(self) -> None:
        require(self.seeds >= 1, "seeds", "1 or more", self.seeds)
        require(self.trials is None or self.trials >= 1, "trials", "1 or more", self.trials)
        if self.trials is not None and not self.tune:
            raise ConfigError("trials", "needs --tune, the settings to try")
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


def trials_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the settings of each trial by dotted name, the same for all methods; without, ``{}``.

    Raises:
        ConfigError: if ``--tune`` has another form, or names what must be equal for all runs.
    """
    if not comparison.tune:
        return [{}]
    values: dict[str, list[Any]] = {}
    for part in comparison.tune.split(","):
        name, _, listed = (word.strip() for word in part.partition("="))
        if not name or not listed:
            rule = "NAME=VALUE:VALUE,..., as in lr=0.05:0.1:0.2,period=4:16"
            raise ConfigError("tune", f"must be {rule}, got {comparison.tune}")
        if name not in (names := _tunable()):
            raise UnknownNameError("tune", name, names)
        values[names[name]] = [_value_of(word.strip()) for word in listed.split(":")]
    grid = [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]
    if comparison.trials is None or comparison.trials >= len(grid):
        return grid
    drawn = random.Random(comparison.base.training.seed).sample(range(len(grid)), comparison.trials)
    return [grid[number] for number in sorted(drawn)]


def _value_of(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):  # a word, as int8
        return word


def _tunable() -> dict[str, str]:
    """Return the settings that may differ between trials: dotted name by dotted name and flag."""
    names: dict[str, str] = {}
    for group in ("method", "optimizer", "exchange", "training"):
        for setting in dataclasses.fields(getattr(_BASE, group)):
            name = f"{group}.{setting.name}"
            if name not in _EQUAL:
                names |= {name: name, setting.metadata.get("flag", name): name}
    return names


def plan(comparison: Comparison, out: Path) -> list[Run]:
    """Return the runs of the first seed, trial by trial; and those of the others, if known.

    With several trials the runs of the other seeds depend on the first one: see ``plan_seeds``.

    Raises:
        ConfigError: if a method is unknown, or settings contradict each other for a method.
    """
    training = comparison.base.training
    if all(getattr(training, end) is None for end in _ENDS):
        problem = "or seconds, bytes, epochs or steps must be set, the same for all methods"
        raise ConfigError("training.samples", problem)
    trials, names = trials_of(comparison), method_names(comparison.methods)
    runs = [_run(comparison, out, n, training.seed, trial) for trial in trials for n in names]
    return runs if len(trials) > 1 else [*runs, *plan_seeds(comparison, out, runs)]


def plan_seeds(comparison: Comparison, out: Path, chosen: Sequence[Run]) -> list[Run]:
    """Return runs as the chosen ones of the first seed, with the other seeds."""
    first = comparison.base.training.seed
    seeds, names = range(first + 1, first + comparison.seeds), method_names(comparison.methods)
    trials = {run.method: run.trial for run in chosen}
    return [_run(comparison, out, name, seed, trials[name]) for seed in seeds for name in names]


def _run(comparison: Comparison, out: Path, name: str, seed: int, trial: Mapping[str, Any]) -> Run:
    from raydl.methods import filled_in, resolve

    tried = {key.rpartition(".")[2]: value for key, value in trial.items()}
    parts = [name.replace(":", "."), "_".join(f"{k}-{v}" for k, v in tried.items()), f"seed-{seed}"]
    values = {"method.name": name, "training.seed": seed, **trial}
    config = with_settings(comparison.base, values, given_as="tune")
    config = in_folder(config, out.joinpath(*filter(None, parts)))
    try:
        method = resolve(config)
    except ConfigError as error:
        if name in str(error):
            raise
        raise ConfigError(error.setting, f"{error.problem} (for {name})") from error
    label = ", ".join([name, *(f"{k} {v}" for k, v in tried.items()), f"seed {seed}"])
    return Run(label, filled_in(config, method), method.strategy, trial=trial)
