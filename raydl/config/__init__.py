"""The settings of a run, as frozen dataclasses.

Each class checks its own fields; ``raydl.methods`` checks which settings exclude each other.
The metadata of a field may name its short option on the command line (``{"flag": "beta"}``);
every other field has its dotted name as option (``--exchange.timeout-s``). The docstring of a
field is its help text.

learning.py   method, optimizer, length of the training
cluster.py    number of workers, elasticity, exchanges
input.py      reading and augmenting samples
run.py        run folder, checkpoints, evaluations
checks.py     checks that the classes share
typed.py      values in files, compared with the types that a class names
"""

# The defaults are frozen dataclasses, which ruff sees only for classes of the same file.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from raydl.config.cluster import ALLREDUCES, ElasticConfig, ExchangeConfig, ScalingConfig
from raydl.config.input import ON_BAD_SAMPLE, STREAMS, InputConfig
from raydl.config.learning import (
    AUTO,
    SCHEDULES,
    STRATEGIES,
    MethodConfig,
    OptimizerConfig,
    ParamGroup,
    TrainingConfig,
)
from raydl.config.run import CheckpointConfig, EvaluationConfig, RunConfig
from raydl.config.typed import typed
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
    "ParamGroup",
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
    """Training data: digits, synthetic, or a path or URI (Parquet, CSV, TSV, JSON lines, a folder
    of datasets.save_to_disk, IDX, CIFAR-10, npz, text, class folders)."""
    model: str = "auto"
    """Network: auto (by the data: lenet, gpt-nano or mlp), a name that `raydl models` lists,
    torchvision:NAME, or your own module:function."""
    task: str = "auto"
    """Task: auto (by the data: classification or next-token prediction), classification,
    regression, or your own module:Class."""
    training: TrainingConfig = TrainingConfig()
    """Length, batch size, precision and seed of the training."""
    method: MethodConfig = MethodConfig()
    """Training method."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the local steps."""
    input: InputConfig = InputConfig()
    """Reading and augmenting samples."""
    scaling: ScalingConfig = ScalingConfig()
    """Number of workers and their resources."""
    run: RunConfig = RunConfig()
    """Folder, output and faults of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to write checkpoints."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When to score the center."""
    exchange: ExchangeConfig = ExchangeConfig()
    """Exchanges between replicas and center."""
    elastic: ElasticConfig = ElasticConfig()
    """Lost workers, stragglers and errors."""

    @property
    def exchange_device(self) -> str:
        """Device of the all-reduces of synchronous methods: ``cuda`` (NCCL) or ``cpu`` (gloo).

        NCCL needs one device per worker: workers that share a GPU sum in host memory.
        """
        has_own = self.scaling.resources().get("GPU", 0.0) >= 1
        return "cuda" if has_own and self.exchange.resident else "cpu"


def to_dict(config: object) -> dict[str, Any]:
    """Return a configuration as nested plain values, for JSON."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return dataclasses.asdict(config)


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name, ``{"training.seed": 0, ...}``; keep empty dicts."""
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
    (CheckpointConfig, "keep"): "num_to_keep",
}
"""Current names of settings, by class and the name that earlier versions wrote."""


_LONGEST_NAME = 100
"""Most characters of an unknown name in a message: anybody may have written the file."""
_hints_of = functools.cache(get_type_hints)


def from_dict(cls: type[_T], values: Any, prefix: str = "") -> _T:
    """Build a configuration from the values that ``to_dict`` returned, or their JSON.

    It accepts the names that earlier versions wrote.

    Args:
        cls: class of the configuration.
        values: the values.
        prefix: beginning of the dotted names of its settings.

    Raises:
        ConfigError: if a key is no setting of this version, or a value has the wrong type.
    """
    if not isinstance(values, Mapping):
        problem = f"must be settings by name, got {reprlib.repr(values)}"
        raise ConfigError(prefix.rstrip(".") or "config", problem)
    hints = _hints_of(cls)  # type: ignore[arg-type]  # mypy: not Hashable, which a class is
    arguments: dict[str, Any] = {}
    for written, value in values.items():
        key = _FORMER_NAMES.get((cls, written), str(written))
        if key not in hints:
            raise ConfigError(key[:_LONGEST_NAME], f"is no setting of {cls.__name__}")
        if dataclasses.is_dataclass(hints[key]):
            value = from_dict(hints[key], value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):  # JSON has no tuples, and no setting is a list
            kind: Any = next(iter(get_args(hints[key])), None)
            is_nested = dataclasses.is_dataclass(kind)
            value = tuple(
                from_dict(kind, v) if is_nested and isinstance(v, dict) else v for v in value
            )
        arguments[key] = _checked(hints[key], value, f"{prefix}{key}")
    if cls is MethodConfig and ":" not in str(arguments.get("name", "")):
        # Earlier versions recorded this default of beta, also for methods that have none.
        arguments = {n: v for n, v in arguments.items() if (n, v) != ("beta", 0.9)}
    return cls(**arguments)


def _checked(kind: Any, value: Any, setting: str) -> Any:
    """Return the value of a setting; raise a ConfigError if it has the wrong type."""
    try:
        typed(kind, value, setting)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise ConfigError(name, problem) from None
    return value
