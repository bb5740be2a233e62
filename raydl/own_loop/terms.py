"""What workers with loops of their own agree on, checked before anything starts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from raydl.config import TrainConfig, TrainingConfig, dotted, to_dict
from raydl.data import DataShape
from raydl.errors import ConfigError
from raydl.exchange.cells import cell_size
from raydl.flat import FlatModel
from raydl.job import Job
from raydl.method import check_weights
from raydl.methods import resolve
from raydl.optimizers import parameters_of
from raydl.own_rule import try_rule
from raydl.rules import Rule
from raydl.task import Batch

ENDLESS = 2**62
"""Steps of a loop that only its owner ends."""


class TheirLoop:
    """The place of a task: the user's loop knows model and loss.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def build_model(self, shape: DataShape) -> nn.Module:
        """Never asked for."""
        raise AssertionError("the model is given")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Never asked for."""
        raise AssertionError("the user's loop computes the loss")

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Never asked for."""
        raise AssertionError("the user's loop scores the model")


class Endless:
    """The order of steps: each comes once."""

    num_samples = ENDLESS
    name = "endless"

    def rows(self, epoch: int, positions: Any) -> Any:
        """Return the positions."""
        return positions

    def cuts(self, epoch: int) -> None:
        """Return None: there are no blocks."""
        return None

    def near(self, epoch: int, position: int) -> Any:
        """Return no rows: nothing is read."""
        return ()


def job_of(config: TrainConfig, model: Any, optimizer: Any, rule: Rule | None) -> Job:
    """Return what all workers do, without an end.

    Args:
        config: with the method, the workers, how they exchange, how they come and go.
        model: of the user.
        optimizer: of the user.
        rule: of the user's own, instead of the method's.

    Raises:
        ConfigError: something in it does not go together with a loop of one's own.
        ShapeError: the model has nothing to train, or not all of one kind.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", f"must be a torch.nn.Module, got a {type(model).__name__}")
    FlatModel.check(model)
    check_optimizer(optimizer, model)
    if config.scaling.min_workers < 1:
        raise ConfigError("num_workers", f"must be 1 or more, got {config.scaling.wanted()}")
    name = type(model).__name__
    method = resolve(config, rule)
    trained = [p for p in model.parameters() if p.requires_grad]
    check_weights(name, trained, config, method)
    if method.has_own_rule:
        size = sum(p.numel() for p in trained)
        fragments = config.exchange.fragments
        size = cell_size(size, num_shards=1, num_fragments=fragments)
        try_rule(method.rule, size, device=trained[0].device)
    if not method.rule.steps_replica:
        raise ConfigError(
            "method.name",
            f"can not be {method.name}: its optimizer steps at the center, and yours is here; "
            f"take local-sgd with method.period 1",
        )
    if method.finds_tuning:
        raise ConfigError("method.period", "must be a number with a loop of your own, got auto")
    for setting, value in (
        ("method.group_size", config.method.group_size),
        ("exchange.center_shards", config.exchange.center_shards),
    ):
        if value > 1:
            raise ConfigError(setting, f"must be 1 with a loop of your own, got {value}")
    return Job(config, method, TheirLoop(name), DataShape((), 0), Endless())


def endless_training() -> TrainingConfig:
    """Return the length of a training that only its owner ends: a step is a sample."""
    return TrainingConfig(steps=ENDLESS, batch_size=1)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ConfigError unless an optimizer holds a model's parameters, and no others."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError("optimizer", f"must be a torch.optim.Optimizer, got a {kind}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "optimizer", "can not be LBFGS: it asks for the loss several times in a step"
        )
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
    missing = [name for key, name in trained.items() if key not in held]
    if missing:
        raise ConfigError(
            "optimizer",
            f"does not hold {len(missing)} of the model's {len(trained)} parameters, {missing[0]} "
            f"for example; make it of model.parameters(), and call requires_grad_(False) on "
            f"those that are not trained",
        )
    others = len(held - trained.keys())
    if others:
        raise ConfigError(
            "optimizer",
            f"holds {others} parameters that are not the model's and would not be exchanged; "
            f"attach one module that has them all",
        )


def terms_of(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return what all workers of a run must agree on, by setting."""
    config = job.config
    settings = {"method": to_dict(config.method), "exchange": to_dict(config.exchange)}
    return {**dotted(settings), "num_workers": config.scaling.wanted(), "model": _layout_of(model)}


def _layout_of(model: nn.Module) -> str:
    """Return in short which tensors a model has: two models of one layout fit each other."""
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        f"{trained:,} trained parameters, {len(tensors)} tensors in all "
        f"({zlib.crc32(repr(tensors).encode()):08x})"
    )
