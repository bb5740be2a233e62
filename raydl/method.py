"""One method with all its settings decided, and which settings go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raydl.compression import parse_codec
from raydl.config import OptimizerConfig, TrainConfig
from raydl.errors import ConfigError, ShapeError
from raydl.optimizers import (
    OwnOptimizer,
    check_optimizer,
    is_elementwise,
    leaves_what_has_no_gradient,
)
from raydl.rules import Elastic, Rule, Sends, moving_rate, moving_rate_limit_in_turn


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with all its settings decided."""

    name: str
    rule: Rule
    strategy: str
    period: int
    """Local steps between exchanges; where the workers choose, those that they begin with."""
    finds_tuning: bool
    """The workers choose period, delay and compression by measured times."""
    overlap: bool
    by_speed: bool
    optimizer: OptimizerConfig
    """The user's optimizer settings with the method's own filled in."""
    inner: OptimizerConfig
    """The optimizer that the workers build: without a momentum that is the master's."""
    own_optimizer: OwnOptimizer | None = None
    """The user's own, instead of the named."""
    has_own_rule: bool = False
    """The rule is the user's own, and is tried with the model."""

    @property
    def is_sync(self) -> bool:
        """Whether all workers exchange at once."""
        return self.strategy == "sync"

    @property
    def has_center_optimizer(self) -> bool:
        """Whether an optimizer at the center has state that moves with it."""
        makes_one = type(self.rule).make_center_optimizer is not Rule.make_center_optimizer
        return makes_one or not self.rule.steps_replica

    @property
    def needs_all_gradients(self) -> bool:
        """Whether an optimizer at the center would move a parameter without a gradient."""
        is_at_center = not self.rule.steps_replica
        return is_at_center and not leaves_what_has_no_gradient(self.inner, self.own_optimizer)


def check_weights(
    model: str, parameters: Sequence[Tensor], config: TrainConfig, method: Method
) -> None:
    """Raise a ShapeError if a model's parameters can not be exchanged as a method does.

    Args:
        model: its name.
        parameters: those that are trained, all of one dtype.
        config: says how messages are shortened.
        method: of the run.
    """
    dtype = parameters[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ShapeError(model, f"must have float32 or float64 parameters, they are {dtype}")
    is_plain = method.is_sync and config.exchange.compression == "none"
    if dtype is torch.float64 and not is_plain:
        raise ShapeError(
            model,
            f"must have float32 parameters for method {config.method.name} with compression "
            f"{config.exchange.compression}, they are {dtype}",
        )
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise ShapeError(model, "must begin with finite parameters, some are NaN or infinite")


def check(config: TrainConfig, method: Method) -> None:
    """Raise a ConfigError if settings do not go together."""
    _check_beta(config, method)
    _check_optimizer(config, method)
    _check_exchange(config, method)
    _check_replicas(config, method)
    _check_tuning(config, method)
    _check_deterministic(config, method)


def _check_optimizer(config: TrainConfig, method: Method) -> None:
    optimizer, name = method.inner, method.inner.name
    check_optimizer(optimizer, method.own_optimizer)
    if method.rule.steps_replica:
        return
    where = f"for {method.name}, whose optimizer steps at the center"
    if not is_elementwise(optimizer, method.own_optimizer):
        raise ConfigError(
            "optimizer.name",
            f"can not be {name} {where} on flat tensors: it looks at the shapes of parameters; "
            f"take an elementwise one, or a method with local steps",
        )
    if method.strategy == "hogwild" and name != "sgd":
        raise ConfigError(
            "optimizer.name", f"must be sgd {where} with no lock around it, got {name}"
        )
    exchange = config.exchange
    is_whole = method.is_sync and exchange.fragments == 1
    if optimizer.decay_only_matrices and not is_whole:
        raise ConfigError(
            "optimizer.decay_only_matrices",
            f"can not be kept {where}, in parts that know no layers; "
            f"set exchange.fragments 1, or take a sync method",
        )


def _check_deterministic(config: TrainConfig, method: Method) -> None:
    if not config.training.deterministic:
        return
    if method.strategy in ("async", "hogwild"):
        raise ConfigError(
            "training.deterministic",
            f"can not be kept by {method.name}: its workers come in no fixed order; "
            f"take a sync method or original-easgd",
        )
    if config.optimizer.lr_schedule == "plateau":
        raise ConfigError(
            "training.deterministic",
            "can not be kept with optimizer.lr_schedule plateau: when the center is scored depends "
            "on the clock; take step",
        )
    if config.scaling.min_workers != config.scaling.max_workers:
        raise ConfigError(
            "training.deterministic",
            f"needs a fixed number of workers, got {config.scaling.wanted()}: when workers join "
            f"depends on the cluster",
        )


def _check_beta(config: TrainConfig, method: Method) -> None:
    """Hold beta within the stability limits at flat curvature; see ``rules``."""
    if not isinstance(method.rule, Elastic):
        return
    beta = config.method.beta
    if method.is_sync and beta > 1:
        raise ConfigError(
            "method.beta",
            f"must be in (0, 1] where all workers exchange at once, got {beta}: "
            f"more throws the center past the replicas' mean",
        )
    fewest = max(1, config.scaling.min_workers)
    if moving_rate(beta, fewest) > moving_rate_limit_in_turn():
        raise ConfigError(
            "method.beta",
            f"must be at most the {fewest} workers of the smallest membership, got {beta}: "
            f"one exchange would move more than the whole gap",
        )


def _check_exchange(config: TrainConfig, method: Method) -> None:
    exchange = config.exchange
    if exchange.fragments > method.period:
        raise ConfigError(
            "exchange.fragments",
            f"must be at most the period of {method.period} local steps, got {exchange.fragments}; "
            f"raise method.period",
        )
    if exchange.delay and exchange.delay >= method.period // exchange.fragments:
        raise ConfigError(
            "exchange.delay",
            f"must be less than period / fragments = {method.period // exchange.fragments}, "
            f"got {exchange.delay}",
        )
    if exchange.delay and method.strategy == "round_robin":
        raise ConfigError(
            "exchange.delay", f"has no meaning for {method.name}: a turn ends with its exchange"
        )
    clips = config.optimizer.clip_grad_norm is not None and not method.rule.steps_replica
    if clips and (exchange.fragments > 1 or exchange.center_shards > 1):
        raise ConfigError(
            "optimizer.clip_grad_norm",
            f"must be None for {method.name} in fragments or shards: its gradients are shortened "
            f"at the center, where no part knows the length of the whole",
        )
    if method.is_sync and exchange.center_shards > 1:
        raise ConfigError(
            "exchange.center_shards",
            f"has no meaning for {method.name}: in a sync method every rank keeps the center",
        )
    if exchange.allreduce != "library":
        _check_allreduce(config, method)
    if parse_codec(exchange.compression).name != "none":
        _check_compression(config)
    for name in ("packed", "resident"):
        if not method.is_sync and not getattr(exchange, name):
            raise ConfigError(
                f"exchange.{name}", f"can be turned off for sync methods only, not {method.name}"
            )
    if exchange.overlap is not None and method.rule.sends is not Sends.WEIGHTS:
        raise ConfigError(
            "exchange.overlap",
            f"has no meaning for {method.name}: what it sends is known only after the gradient",
        )


def _check_replicas(config: TrainConfig, method: Method) -> None:
    if config.method.dynamic_weights and config.method.group_size > 1:
        raise ConfigError(
            "method.dynamic_weights", "can not go with method.group_size: a group is one replica"
        )
    if config.method.dynamic_weights and method.rule.sends is not Sends.WEIGHTS:
        raise ConfigError(
            "method.dynamic_weights",
            f"has no meaning for {method.name}: its replicas follow the center",
        )
    size, scaling = config.method.group_size, config.scaling
    if size == 1:
        return
    if not method.is_sync or not method.rule.steps_replica:
        raise ConfigError(
            "method.group_size",
            f"is for sync methods whose replicas take steps of their own, not {method.name}",
        )
    for count in {max(1, scaling.min_workers), max(1, scaling.max_workers)}:
        if count % size:
            raise ConfigError(
                "method.group_size", f"must divide scaling.num_workers, got {size} and {count}"
            )


def _check_tuning(config: TrainConfig, method: Method) -> None:
    if not method.finds_tuning:
        return
    if not method.is_sync or not method.rule.steps_replica:
        raise ConfigError(
            "method.period",
            f"can be auto for synchronous methods with local steps, not {method.name}; give a "
            f"number",
        )
    if config.method.group_size > 1:
        raise ConfigError(
            "method.period", "can not be auto where workers share a replica; give a number"
        )
    if config.training.deterministic:
        raise ConfigError(
            "method.period", "auto chooses by measured times, not with --deterministic"
        )


def _check_allreduce(config: TrainConfig, method: Method) -> None:
    exchange = config.exchange
    if not method.is_sync:
        raise ConfigError(
            "exchange.allreduce",
            f"has no meaning for {method.name}: its workers exchange with the center alone",
        )
    if config.exchange_device != "cpu":
        raise ConfigError(
            "exchange.allreduce", f"can be {exchange.allreduce} on CPUs only; NCCL chooses itself"
        )
    if config.training.deterministic and exchange.allreduce == "auto":
        raise ConfigError(
            "exchange.allreduce",
            "auto chooses by measured times, and with that the order of the sums; "
            "name an algorithm, or leave --deterministic",
        )


def may_compress(config: TrainConfig) -> bool:
    """Whether the other settings permit shorter messages in a synchronous method."""
    try:
        _check_compression(config)
    except ConfigError:
        return False
    return True


def _check_compression(config: TrainConfig) -> None:
    exchange = config.exchange
    if not exchange.packed:
        raise ConfigError(
            "exchange.packed", "can not be turned off with exchange.compression: it packs"
        )
    if exchange.allreduce != "library":
        raise ConfigError(
            "exchange.allreduce",
            f"has no meaning with exchange.compression {exchange.compression}: "
            f"shortened messages are gathered, not summed on their way",
        )
    if config.method.beta > 1:
        raise ConfigError(
            "method.beta",
            f"must be in (0, 1] with exchange.compression, got {config.method.beta}: "
            f"differences are then to an older center",
        )
