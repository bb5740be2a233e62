"""raydl: elastic deep-learning training on Ray; workers may join and leave while it trains.

>>> import raydl
>>> raydl.Trainer("lenet", "digits", method="sync-easgd").fit()  # doctest: +SKIP

Public names are imported on first use, so ``import raydl`` imports neither Ray nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydl.config import (
        CheckpointConfig,
        ElasticConfig,
        EvaluationConfig,
        ExchangeConfig,
        InputConfig,
        MethodConfig,
        OptimizerConfig,
        ParamGroup,
        RunConfig,
        ScalingConfig,
        TrainConfig,
        TrainingConfig,
    )
    from raydl.core.callbacks import Callback
    from raydl.core.scores import Evaluated
    from raydl.data import DataShape
    from raydl.errors import RaydlError
    from raydl.ray_backend.attach import attach
    from raydl.ray_backend.lightning_callback import LightningCallback as LightningCallback
    from raydl.ray_backend.transformers_trainer import attach_trainer as attach_trainer
    from raydl.ray_backend.user_group import init_collective_group
    from raydl.run.result import Result
    from raydl.run.trainer import Trainer
    from raydl.tasks import (
        Classification,
        LanguageModel,
        LossFromForward,
        ModelAndLoss,
        Regression,
    )

_MODULES = {
    "Callback": "core.callbacks",
    "CheckpointConfig": "config",
    "ElasticConfig": "config",
    "EvaluationConfig": "config",
    "ExchangeConfig": "config",
    "InputConfig": "config",
    "MethodConfig": "config",
    "OptimizerConfig": "config",
    "ParamGroup": "config",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "TrainConfig": "config",
    "TrainingConfig": "config",
    "Evaluated": "core.worker_group",
    "RaydlError": "errors",
    "Classification": "tasks",
    "LanguageModel": "tasks",
    "DataShape": "data",
    "LossFromForward": "tasks",
    "ModelAndLoss": "tasks",
    "Regression": "tasks",
    "attach": "ray_backend.attach",
    "attach_trainer": "ray_backend.transformers_trainer",
    "LightningCallback": "ray_backend.lightning_callback",
    "init_collective_group": "ray_backend.user_group",
    "Result": "run.result",
    "Trainer": "run.trainer",
}

__all__ = [
    "Callback",
    "CheckpointConfig",
    "Classification",
    "DataShape",
    "ElasticConfig",
    "Evaluated",
    "EvaluationConfig",
    "ExchangeConfig",
    "InputConfig",
    "LanguageModel",
    "LossFromForward",
    "MethodConfig",
    "ModelAndLoss",
    "OptimizerConfig",
    "ParamGroup",
    "RaydlError",
    "Regression",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainConfig",
    "Trainer",
    "TrainingConfig",
    "attach",
    "init_collective_group",
]


_SUBMODULES = {"data": "raydl.data", "tune": "raydl.tools.trials"}
"""Modules that are used by their names: ``raydl.data.load``, ``raydl.tune.trainable``."""
_EXTRAS = {"LightningCallback": "lightning", "attach_trainer": "transformers"}
"""By further name, a library that is not installed with raydl; an extra has the same name."""


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use.

    Raises:
        ImportError: if the name needs a library that is not installed.
    """
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name not in _MODULES:
        raise AttributeError(f"module 'raydl' has no attribute {name!r}")
    try:
        return getattr(import_module(f"raydl.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name != _EXTRAS.get(name):
            raise
        from raydl.errors import how_to_install

        raise ImportError(
            f"raydl.{name} needs {error.name}, which is not installed; {how_to_install(error.name)}"
        ) from error


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
