"""raydl: elastic deep-learning training on Ray; workers come and go, the training goes on.

>>> import raydl
>>> raydl.Trainer("lenet", "digits", method="sync-easgd").fit()  # doctest: +SKIP

Names load on first use, so that ``import raydl`` imports neither Ray nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydl.config import (
        CheckpointConfig,
        ElasticConfig,
        EvaluationConfig,
        ExchangeConfig,
        MethodConfig,
        OptimizerConfig,
        RunConfig,
        ScalingConfig,
        TrainConfig,
        TrainingConfig,
    )
    from raydl.errors import RaydlError
    from raydl.task import Classification
    from raydl.trainer import Result, Trainer

_HOMES = {
    "CheckpointConfig": "config",
    "ElasticConfig": "config",
    "EvaluationConfig": "config",
    "ExchangeConfig": "config",
    "MethodConfig": "config",
    "OptimizerConfig": "config",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "TrainConfig": "config",
    "TrainingConfig": "config",
    "RaydlError": "errors",
    "Classification": "task",
    "Result": "trainer",
    "Trainer": "trainer",
}

__all__ = [
    "CheckpointConfig",
    "Classification",
    "ElasticConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "MethodConfig",
    "OptimizerConfig",
    "RaydlError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainConfig",
    "Trainer",
    "TrainingConfig",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raydl' has no attribute {name!r}")
    return getattr(import_module(f"raydl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
