"""From the settings of a run to its method, with all defaults; settings must fit together."""

from __future__ import annotations

import dataclasses

from raydl.config import AUTO, MethodConfig, OptimizerConfig, TrainConfig
from raydl.core.method import Method
from raydl.core.optimizers import OwnOptimizer, check_optimizer, default_lr, named_optimizer
from raydl.core.rules import LocalStep, Rule
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods.conflicts import check_conflicts
from raydl.methods.custom_codec import try_codec
from raydl.methods.custom_rule import check_rule, named_rule
from raydl.methods.names import METHODS
from raydl.methods.options import arguments_of


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
    own_rule = rule or named_rule(config.method)
    if own_rule is not None:
        check_rule(own_rule)
    kind = _named(config.method) if own_rule is None else type(own_rule)
    given, name = own_rule or kind, config.method.name  # an instance may differ from its class
    optimizer = config.optimizer
    if optimizer.name is None:
        optimizer = dataclasses.replace(optimizer, name=kind.local_step.optimizer)
    own_optimizer = own_optimizer or named_optimizer(optimizer)
    optimizer = _filled_optimizer(kind, name, optimizer, own_optimizer)
    finds_tuning = config.method.period == AUTO
    period = given.period if finds_tuning else int(config.method.period or given.period)
    fragments, delay = config.exchange.fragments, config.exchange.delay
    if fragments is None:
        fragments = min(given.fragments, period)
    if delay is None:
        delay = max(0, min(given.delay, period // fragments - 1))
    method = Method(
        name=name,
        rule=own_rule or _rule(kind, config.method, optimizer),
        strategy=config.method.strategy or given.strategy,
        period=period,
        finds_tuning=finds_tuning,
        overlap=kind.overlap if config.exchange.overlap is None else config.exchange.overlap,
        steps_by_speed=kind.steps_by_speed or config.method.steps_by_speed,
        optimizer=optimizer,
        inner=_inner(kind, optimizer),
        compression=config.exchange.compression or given.compression,
        fragments=fragments,
        delay=delay,
        own_optimizer=own_optimizer,
        has_custom_rule=own_rule is not None,
    )
    check_optimizer(method.inner, method.own_optimizer)
    check_conflicts(config, method)
    try_codec(method.compression)
    return method


def _named(config: MethodConfig) -> type[Rule]:
    """Return the method of a name."""
    if config.name not in METHODS:
        raise UnknownNameError("method.name", config.name, METHODS)
    kind = METHODS[config.name]
    if config.strategy not in (None, kind.strategy):
        problem = f"of {kind.name} is {kind.strategy}; set it for custom rules only"
        raise ConfigError("method.strategy", problem)
    return kind


def _rule(kind: type[Rule], config: MethodConfig, optimizer: OptimizerConfig) -> Rule:
    """Return the rule of a named method, with the arguments that the user has set."""
    arguments = arguments_of(kind, config)
    if kind.has_momentum_at_center:
        arguments["momentum"] = optimizer.momentum or 0.0
    return kind(**arguments)


def _filled_optimizer(
    kind: type[Rule], method: str, optimizer: OptimizerConfig, own: OwnOptimizer | None
) -> OptimizerConfig:
    usual = kind.local_step
    if usual.optimizer not in (optimizer.name, LocalStep.optimizer):
        usual = LocalStep()  # the method's other values are for an optimizer that is not used
    is_usual = own is None and optimizer.name == usual.optimizer
    momentum, nesterov, lr = optimizer.momentum, optimizer.nesterov, optimizer.lr
    if momentum is None and (is_usual or usual.momentum):  # else the optimizer's default
        momentum = usual.momentum
    if nesterov is None and (is_usual or usual.nesterov):
        nesterov = usual.nesterov
    if lr is None:
        lr = usual.lr if is_usual else default_lr(optimizer, own)
    if nesterov and kind.has_momentum_at_center:
        problem = f"is for momentum at the replicas; {method} has it at the center"
        raise ConfigError("optimizer.nesterov", problem)
    if nesterov and momentum == 0:
        problem = f"needs momentum; {method} has none: set optimizer.momentum"
        raise ConfigError("optimizer.nesterov", problem)
    return dataclasses.replace(optimizer, momentum=momentum, lr=lr, nesterov=nesterov)


def _inner(kind: type[Rule], optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return the settings without those that do not apply to the optimizer of a method."""
    if kind.has_momentum_at_center:
        optimizer = dataclasses.replace(optimizer, momentum=0.0, nesterov=False)
    if not kind.steps_along_gradient:
        optimizer = dataclasses.replace(optimizer, clip_grad_norm=None)
    return optimizer


def filled_in(config: TrainConfig, method: Method) -> TrainConfig:
    """Return the settings with the resolved values of the method, as a run records them."""
    return dataclasses.replace(
        config,
        method=dataclasses.replace(
            config.method, period=AUTO if method.finds_tuning else method.period
        ),
        optimizer=method.optimizer,
        exchange=dataclasses.replace(config.exchange, compression=method.compression),
    )
