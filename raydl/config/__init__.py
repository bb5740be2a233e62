"""The settings of a run, as frozen dataclasses.

Each class checks its own fields; ``TrainConfig`` checks what spans several. A field's
metadata may name the short flag it has on the command line (``{"flag": "beta"}``); every
other field is reached by its dotted name (``--exchange.timeout-s``).

learning.py   what is learned and how: method, optimizer, length of the training
cluster.py    the workers: how many, how they come and go, how they exchange
input.py      how samples are read, what is done to them
run.py        the run around it: folder, checkpoints, evaluations
checks.py     what the checks are made of
"""

# The defaults are frozen, which ruff sees only for classes of the same file.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from raydl.config.cluster import ALLREDUCES, ElasticConfig, ExchangeConfig, ScalingConfig
from raydl.config.input import ON_BAD_SAMPLE, STREAMS, InputConfig
from raydl.config.learning import (
    AUTO,
    SCHEDULES,
    STRATEGIES,
    MethodConfig,
    OptimizerConfig,
    TrainingConfig,
)
from raydl.config.run import CheckpointConfig, EvaluationConfig, RunConfig
from raydl.errors import ConfigError

__all__ = [
    "ALLREDUCES",
    "AUTO",
    "ON_BAD_SAMPLE",
    "SCHEDULES",
    "STRATEGIES",
    "STREAMS",
    "CheckpointConfig",
    "ElasticConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "InputConfig",
    "MethodConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScalingConfig",
    "TrainConfig",
    "TrainingConfig",
    "from_dict",
    "to_dict",
]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of one run."""

    data: str = "digits"
    """Training data: digits, synthetic, a path or a URI (Parquet, IDX, CIFAR-10, npz, folders)."""
    model: str = "lenet"
    """The network (`raydl models` lists them), torchvision:NAME, or module:function, your own."""
    task: str = "auto"
    """The task: auto, by the data (classes of pictures, the next token of a text), or
    module:Class, a task of your own."""
    training: TrainingConfig = TrainingConfig()
    """How long, how large, from which seed."""
    method: MethodConfig = MethodConfig()
    """How the replicas meet the center."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The local step."""
    input: InputConfig = InputConfig()
    """How samples are read."""
    scaling: ScalingConfig = ScalingConfig()
    """How many workers."""
    run: RunConfig = RunConfig()
    """Where the run lives."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the center is scored."""
    exchange: ExchangeConfig = ExchangeConfig()
    """How replicas and center exchange."""
    elastic: ElasticConfig = ElasticConfig()
    """How workers come and go."""

    @property
    def exchange_device(self) -> str:
        """Where synchronous workers sum: ``cuda``, by NCCL, or ``cpu``, by gloo in host memory.

        NCCL takes a device for each worker: those that share one go by the host.
        """
        has_own = self.scaling.resources().get("GPU", 0.0) >= 1
        return "cuda" if has_own and self.exchange.resident else "cpu"


def to_dict(config: object) -> dict[str, Any]:
    """Return a configuration as nested plain values, ready for JSON."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return dataclasses.asdict(config)


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name: ``{"training.seed": 0, ...}``; an empty dict stays."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_FORMER_NAMES = {
    (MethodConfig, "schedule"): "strategy",
    (OptimizerConfig, "schedule"): "lr_schedule",
    (OptimizerConfig, "max_grad_norm"): "clip_grad_norm",
    (TrainingConfig, "accumulate"): "microbatches",
}
"""Settings by the names that earlier versions wrote to a run's ``config.json``."""


_hints_of = functools.cache(get_type_hints)


def from_dict(cls: type[_T], values: dict[str, Any]) -> _T:
    """Build a configuration from what ``to_dict`` returned, perhaps through JSON.

    Names that earlier versions wrote are understood.

    Raises:
        ConfigError: a key is no setting of this version.
    """
    hints = _hints_of(cls)  # type: ignore[arg-type]  # mypy: not Hashable, which a class is
    arguments: dict[str, Any] = {}
    for written, value in values.items():
        key = _FORMER_NAMES.get((cls, written), written)
        if key not in hints:
            raise ConfigError(key, f"is no setting of {cls.__name__}")
        if dataclasses.is_dataclass(hints[key]):
            value = from_dict(hints[key], value)
        elif isinstance(value, list):  # JSON has no tuples, and no setting is a list
            value = tuple(value)
        arguments[key] = value
    return cls(**arguments)
