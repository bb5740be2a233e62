"""The named methods, and the method of a run with all its settings resolved.

A method is a *rule* (what an exchange computes) under a *strategy* (which exchanges happen when),
with a period and an inner optimizer. Methods from SC17 (arXiv 1708.02983) have their names there.
``resolve`` also checks that the settings fit together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raydl.config import AUTO, MethodConfig, OptimizerConfig, TrainConfig
from raydl.core.conflicts import check_conflicts
from raydl.core.custom_codec import try_codec
from raydl.core.custom_rule import check_rule, named_rule
from raydl.core.optimizers import (
    OwnOptimizer,
    check_optimizer,
    default_lr,
    ignores_zero_gradients,
    named_optimizer,
)
from raydl.core.rules import (
    DelayedOuter,
    Elastic,
    MeanGradient,
    Outer,
    Rule,
    Sends,
)
from raydl.errors import ConfigError, ShapeError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with all its settings resolved."""

    name: str
    rule: Rule
    strategy: str
    period: int
    """Local steps between exchanges; the initial value if the workers choose it."""
    finds_tuning: bool
    """Whether the workers choose period, delay and compression from measured times."""
    overlap: bool
    steps_by_speed: bool
    """Whether slower workers take fewer local steps; the fastest takes ``period``."""
    optimizer: OptimizerConfig
    """The user's optimizer settings, completed with the defaults of the method."""
    inner: OptimizerConfig
    """Optimizer of the workers; its momentum is 0 if the momentum is at the center."""
    own_optimizer: OwnOptimizer | None = None
    """The user's optimizer function, which replaces the named optimizer."""
    has_custom_rule: bool = False
    """Whether the rule is a custom one, which is tried with the model first."""

    @property
    def is_sync(self) -> bool:
        """Whether all workers exchange at once."""
        return self.strategy == "sync"

    @property
    def has_center_optimizer(self) -> bool:
        """Whether an optimizer steps at the center."""
        makes_one = type(self.rule).make_center_optimizer is not Rule.make_center_optimizer
        return makes_one or not self.rule.steps_replica

    @property
    def has_local_steps(self) -> bool:
        """Whether replicas move between two exchanges, rather than collect gradients to send."""
        return self.rule.sends is not Sends.GRADIENT

    @property
    def needs_all_gradients(self) -> bool:
        """Whether an optimizer at the center would update a parameter without a gradient."""
        is_at_center = not self.rule.steps_replica
        return is_at_center and not ignores_zero_gradients(self.inner, self.own_optimizer)


def check_weights(
    model: str, parameters: Sequence[Tensor], config: TrainConfig, method: Method
) -> None:
    """Check that a method can exchange the parameters of a model.

    Args:
        model: name of the model.
        parameters: trained parameters, all of one dtype.
        config: settings of the run.
        method: method of the run.

    Raises:
        ShapeError: if their dtype or values do not permit it.
        ConfigError: if a fragment would have no parameter.
    """
    size, fragments = sum(p.numel() for p in parameters), config.exchange.fragments
    if fragments > size:
        problem = f"must be at most the {size} parameters of model {model}, got {fragments}"
        raise ConfigError("exchange.fragments", problem)
    dtype = parameters[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ShapeError(model, f"must have float32 or float64 parameters, got {dtype}")
    compression = config.exchange.compression
    if dtype is torch.float64 and not (method.is_sync and compression == "none"):
        raise ShapeError(
            model,
            f"must have float32 parameters for method {config.method.name} with compression "
            f"{compression}, got {dtype}",
        )
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise ShapeError(model, "must begin with finite parameters, but some are NaN or infinite")


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A named method with its default settings."""

    name: str
    make_rule: Callable[[MethodConfig], Rule]
    strategy: str
    sentence: str = ""
    """Description, for ``raydl methods``."""
    period: int = 10
    """Default number of local steps between exchanges."""
    lr: float = 0.25
    """Default learning rate."""
    momentum: float = 0.0
    """Default momentum."""
    nesterov: bool = False
    """Default for Nesterov momentum."""
    is_momentum_at_center: bool = False
    """Whether the momentum is at the center (the master), not at the replicas."""
    outer: tuple[float, float] | None = None
    """Default (rate, momentum) of the outer step, or None if there is none to set."""
    overlap: bool = True
    """Whether weights are sent while the gradient is computed."""
    steps_by_speed: bool = False
    """Whether slower workers always take fewer local steps."""


def _nesterov(config: MethodConfig) -> Rule:
    plain = Outer.from_config(config)
    return Outer(plain.lr, momentum=plain.momentum, nesterov=True)


_ROWS = (
    MethodRow(  # SC17 eq. 1, eq. 2 for one worker
        name="original-easgd",
        make_rule=Elastic.from_config,
        strategy="round_robin",
        period=1,
        overlap=False,
        sentence="workers take turns in rank order, one active at a time: the baseline of SC17",
    ),
    MethodRow(  # SC17, Async SGD
        name="async-sgd",
        make_rule=Outer.from_config,
        strategy="async",
        period=1,
        lr=0.1,
        sentence="SGD at the center, in order of arrival; with a longer period, Downpour",
    ),
    MethodRow(  # SC17 eq. 3 and 4, at the master
        name="async-msgd",
        make_rule=Outer.from_config,
        strategy="async",
        period=1,
        lr=0.01,
        momentum=0.9,
        is_momentum_at_center=True,
        sentence="async-sgd with momentum at the center",
    ),
    MethodRow(  # SC17, Hogwild SGD
        name="hogwild-sgd",
        make_rule=Outer.from_config,
        strategy="hogwild",
        period=1,
        lr=0.1,
        sentence="async-sgd without the lock",
    ),
    MethodRow(  # rule and strategy of SC17, combined here
        name="hogwild-msgd",
        make_rule=Outer.from_config,
        strategy="hogwild",
        period=1,
        lr=0.01,
        momentum=0.9,
        is_momentum_at_center=True,
        sentence="async-msgd without the lock",
    ),
    MethodRow(  # SC17 eq. 1, eq. 2 for one worker
        name="async-easgd",
        make_rule=Elastic.from_config,
        strategy="async",
        sentence="each worker exchanges with the center by itself, one at a time",
    ),
    MethodRow(  # SC17 eq. 5, 6, eq. 2 for one worker
        name="async-measgd",
        make_rule=Elastic.from_config,
        strategy="async",
        lr=0.025,
        momentum=0.9,
        sentence="async-easgd with momentum in the local step",
    ),
    MethodRow(  # EASGD paper, EAMSGD
        name="eamsgd",
        make_rule=Elastic.from_config,
        strategy="async",
        lr=0.005,
        momentum=0.99,
        nesterov=True,
        sentence="async-easgd with Nesterov momentum 0.99 in the local step",
    ),
    MethodRow(  # SC17 eq. 1, eq. 2 for one worker
        name="hogwild-easgd",
        make_rule=Elastic.from_config,
        strategy="hogwild",
        sentence="async-easgd without the lock",
    ),
    MethodRow(  # rule and strategy of SC17, combined here
        name="hogwild-measgd",
        make_rule=Elastic.from_config,
        strategy="hogwild",
        lr=0.025,
        momentum=0.9,
        sentence="async-measgd without the lock",
    ),
    MethodRow(  # SC17 eq. 1 and 2
        name="sync-easgd",
        make_rule=Elastic.from_config,
        strategy="sync",
        sentence="all workers exchange with the center at once, overlapped with the gradient",
    ),
    MethodRow(  # SC17 eq. 2, 5 and 6
        name="sync-measgd",
        make_rule=Elastic.from_config,
        strategy="sync",
        lr=0.025,
        momentum=0.9,
        sentence="sync-easgd with momentum in the local step",
    ),
    MethodRow(  # SC17, data-parallel SGD
        name="sync-sgd",
        make_rule=MeanGradient.from_config,
        strategy="sync",
        period=1,
        sentence="mean gradient of all workers: the plain data-parallel baseline",
    ),
    MethodRow(  # SC17 eq. 3 and 4
        name="sync-msgd",
        make_rule=MeanGradient.from_config,
        strategy="sync",
        period=1,
        lr=0.025,
        momentum=0.9,
        sentence="sync-sgd with momentum",
    ),
    MethodRow(  # local SGD, FedAvg
        name="local-sgd",
        make_rule=Outer.from_config,
        strategy="sync",
        outer=(1.0, 0.0),
        sentence="local steps, then the mean of all replicas",
    ),
    MethodRow(  # arXiv 2311.08105
        name="diloco",
        make_rule=_nesterov,
        strategy="sync",
        period=50,
        outer=(0.7, 0.9),
        sentence="local steps, then an outer Nesterov step along the mean progress",
    ),
    MethodRow(  # arXiv 2401.09135
        name="async-diloco",
        make_rule=DelayedOuter.from_config,
        strategy="async",
        period=20,
        outer=(0.7, 0.5),
        steps_by_speed=True,
        sentence="progress is applied on arrival with delayed Nesterov; "
        "faster workers take more local steps",
    ),
)

METHODS: dict[str, MethodRow] = {row.name: row for row in _ROWS}
"""Every named method."""


def resolve(
    config: TrainConfig, rule: Rule | None = None, own_optimizer: OwnOptimizer | None = None
) -> Method:
    """Return the method of a run, with defaults for all settings that are not set.

    Args:
        config: settings of the run.
        rule: custom rule, which replaces the named method.
        own_optimizer: optimizer function, which replaces the named optimizer.

    Raises:
        UnknownNameError: if there is no method or optimizer of that name.
        ConfigError: if settings contradict each other, or a custom rule is invalid.
    """
    rule = rule or named_rule(config.method)
    if rule is not None:
        check_rule(rule)
    row = _row_of(rule, config.method)
    own_optimizer = own_optimizer or named_optimizer(config.optimizer)
    optimizer = _filled_optimizer(row, config.optimizer, own_optimizer)
    method_config = _filled_method(row, config.method, optimizer)
    finds_tuning = method_config.period == AUTO
    method = Method(
        name=row.name,
        rule=row.make_rule(method_config),
        strategy=row.strategy,
        period=row.period if finds_tuning else int(method_config.period or row.period),
        finds_tuning=finds_tuning,
        overlap=row.overlap if config.exchange.overlap is None else config.exchange.overlap,
        steps_by_speed=row.steps_by_speed or config.method.steps_by_speed,
        optimizer=optimizer,
        inner=dataclasses.replace(optimizer, momentum=0.0, nesterov=False)
        if row.is_momentum_at_center
        else optimizer,
        own_optimizer=own_optimizer,
        has_custom_rule=rule is not None,
    )
    check_optimizer(method.inner, method.own_optimizer)
    check_conflicts(config, method)
    try_codec(config.exchange.compression)
    return method


def _row_of(rule: Rule | None, config: MethodConfig) -> MethodRow:
    if rule is not None:
        return MethodRow(
            name=config.name,
            make_rule=lambda _: rule,
            strategy=config.strategy or rule.strategy,
            period=rule.period,
        )
    if config.name not in METHODS:
        raise UnknownNameError("method.name", config.name, METHODS)
    row = METHODS[config.name]
    if config.strategy not in (None, row.strategy):
        problem = f"of {row.name} is {row.strategy}; set it for custom rules only"
        raise ConfigError("method.strategy", problem)
    return row


def _filled_optimizer(
    row: MethodRow, optimizer: OptimizerConfig, own: OwnOptimizer | None
) -> OptimizerConfig:
    is_sgd = optimizer.name == "sgd" and own is None
    momentum, nesterov, lr = optimizer.momentum, optimizer.nesterov, optimizer.lr
    if momentum is None and (is_sgd or row.momentum):  # else the optimizer's default
        momentum = row.momentum
    if nesterov is None and (is_sgd or row.nesterov):
        nesterov = row.nesterov
    if lr is None:
        lr = row.lr if is_sgd else default_lr(optimizer, own)
    if nesterov and row.is_momentum_at_center:
        problem = f"is for momentum at the replicas; {row.name} has it at the center"
        raise ConfigError("optimizer.nesterov", problem)
    if nesterov and momentum == 0:
        problem = f"needs momentum; {row.name} has none: set optimizer.momentum"
        raise ConfigError("optimizer.nesterov", problem)
    return dataclasses.replace(optimizer, momentum=momentum, lr=lr, nesterov=nesterov)


def _filled_method(
    row: MethodRow, config: MethodConfig, optimizer: OptimizerConfig
) -> MethodConfig:
    for name in ("outer_lr", "outer_momentum"):
        if getattr(config, name) is not None and row.outer is None and ":" not in config.name:
            raise ConfigError(f"method.{name}", f"has no meaning for {row.name}: no outer step")
    outer_lr, outer_momentum = row.outer or (1.0, 0.0)
    if row.is_momentum_at_center:
        outer_momentum = optimizer.momentum or 0.0
    return dataclasses.replace(
        config,
        period=config.period or row.period,
        outer_lr=outer_lr if config.outer_lr is None else config.outer_lr,
        outer_momentum=outer_momentum if config.outer_momentum is None else config.outer_momentum,
    )


def filled_in(config: TrainConfig, method: Method) -> TrainConfig:
    """Return the settings with the resolved values of the method, as a run records them."""
    return dataclasses.replace(
        config,
        method=dataclasses.replace(
            config.method, period=AUTO if method.finds_tuning else method.period
        ),
        optimizer=method.optimizer,
    )
