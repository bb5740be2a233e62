"""The table of named methods: which rule, under which strategy, with which defaults.

A method is a *rule* (what an exchange computes) under a *strategy* (which exchanges happen when),
with a period and an inner optimizer. Names follow SC17 (arXiv 1708.02983), where they are
from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from raydl.config import AUTO, MethodConfig, OptimizerConfig, TrainConfig
from raydl.errors import ConfigError, UnknownNameError
from raydl.method import Method, check
from raydl.optimizers import OwnOptimizer, default_lr, own_of
from raydl.own_rule import check_rule, named_rule
from raydl.rules import DelayedOuter, Elastic, MeanGradient, Outer, Rule


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One row of the table."""

    name: str
    make_rule: Callable[[MethodConfig], Rule]
    strategy: str
    sentence: str
    source: str
    """The equations, by paper."""
    period: int = 10
    """Local steps between exchanges where the user names none."""
    lr: float = 0.25
    """Learning rate where the user names none."""
    momentum: float = 0.0
    """Momentum where the user names none."""
    nesterov: bool = False
    """Look ahead along the momentum where the user does not say."""
    is_momentum_at_center: bool = False
    """The momentum is the master's, not the replicas'."""
    outer: tuple[float, float] | None = None
    """(rate, momentum) of the outer step where the user may set them."""
    overlap: bool = True
    """Weights travel while the gradient is computed."""
    by_speed: bool = False
    """Local steps in proportion to a worker's speed; the fastest takes ``period``."""


def _nesterov(config: MethodConfig) -> Rule:
    plain = Outer.from_config(config)
    return Outer(plain.lr, momentum=plain.momentum, nesterov=True)


_ROWS = (
    MethodRow(
        name="original-easgd",
        make_rule=Elastic.from_config,
        strategy="round_robin",
        period=1,
        overlap=False,
        sentence="workers take turns in rank order, one active at a time: SC17's baseline",
        source="SC17 eq. 1, and 2 for one worker",
    ),
    MethodRow(
        name="async-sgd",
        make_rule=Outer.from_config,
        strategy="async",
        period=1,
        lr=0.1,
        sentence="SGD at the master, first come first served; with a longer period Downpour",
        source="SC17, Async SGD",
    ),
    MethodRow(
        name="async-msgd",
        make_rule=Outer.from_config,
        strategy="async",
        period=1,
        lr=0.01,
        momentum=0.9,
        is_momentum_at_center=True,
        sentence="async-sgd with momentum at the master",
        source="SC17 eq. 3 and 4, at the master",
    ),
    MethodRow(
        name="hogwild-sgd",
        make_rule=Outer.from_config,
        strategy="hogwild",
        period=1,
        lr=0.1,
        sentence="async-sgd without the lock",
        source="SC17, Hogwild SGD",
    ),
    MethodRow(
        name="hogwild-msgd",
        make_rule=Outer.from_config,
        strategy="hogwild",
        period=1,
        lr=0.01,
        momentum=0.9,
        is_momentum_at_center=True,
        sentence="async-msgd without the lock",
        source="rule and schedule of SC17, joined here",
    ),
    MethodRow(
        name="async-easgd",
        make_rule=Elastic.from_config,
        strategy="async",
        sentence="each worker exchanges with the center when it is due, one at a time",
        source="SC17 eq. 1, and 2 for one worker",
    ),
    MethodRow(
        name="async-measgd",
        make_rule=Elastic.from_config,
        strategy="async",
        lr=0.025,
        momentum=0.9,
        sentence="async-easgd with momentum in the local step",
        source="SC17 eq. 5 and 6, and 2 for one worker",
    ),
    MethodRow(
        name="eamsgd",
        make_rule=Elastic.from_config,
        strategy="async",
        lr=0.005,
        momentum=0.99,
        nesterov=True,
        sentence="async-easgd with Nesterov momentum 0.99 in the local step",
        source="EASGD paper, EAMSGD",
    ),
    MethodRow(
        name="hogwild-easgd",
        make_rule=Elastic.from_config,
        strategy="hogwild",
        sentence="async-easgd without the lock",
        source="SC17 eq. 1, and 2 for one worker",
    ),
    MethodRow(
        name="hogwild-measgd",
        make_rule=Elastic.from_config,
        strategy="hogwild",
        lr=0.025,
        momentum=0.9,
        sentence="async-measgd without the lock",
        source="rule and schedule of SC17, joined here",
    ),
    MethodRow(
        name="sync-easgd",
        make_rule=Elastic.from_config,
        strategy="sync",
        sentence="all workers exchange at once with the center, hidden behind the gradient",
        source="SC17 eq. 1 and 2",
    ),
    MethodRow(
        name="sync-measgd",
        make_rule=Elastic.from_config,
        strategy="sync",
        lr=0.025,
        momentum=0.9,
        sentence="sync-easgd with momentum in the local step",
        source="SC17 eq. 2, 5 and 6",
    ),
    MethodRow(
        name="sync-sgd",
        make_rule=MeanGradient.from_config,
        strategy="sync",
        period=1,
        sentence="mean gradient of all workers: the plain data-parallel baseline",
        source="SC17, data-parallel SGD",
    ),
    MethodRow(
        name="sync-msgd",
        make_rule=MeanGradient.from_config,
        strategy="sync",
        period=1,
        lr=0.025,
        momentum=0.9,
        sentence="sync-sgd with momentum",
        source="SC17 eq. 3 and 4",
    ),
    MethodRow(
        name="local-sgd",
        make_rule=Outer.from_config,
        strategy="sync",
        outer=(1.0, 0.0),
        sentence="local steps, then the mean of all replicas",
        source="local SGD, FedAvg",
    ),
    MethodRow(
        name="diloco",
        make_rule=_nesterov,
        strategy="sync",
        period=50,
        outer=(0.7, 0.9),
        sentence="local steps, then an outer Nesterov step along the mean progress",
        source="arXiv 2311.08105",
    ),
    MethodRow(
        name="async-diloco",
        make_rule=DelayedOuter.from_config,
        strategy="async",
        period=20,
        outer=(0.7, 0.5),
        by_speed=True,
        sentence="progress applied on arrival, delayed Nesterov, local steps by speed",
        source="arXiv 2401.09135",
    ),
)

METHODS: dict[str, MethodRow] = {row.name: row for row in _ROWS}
"""Every named method."""


def resolve(
    config: TrainConfig, rule: Rule | None = None, own_optimizer: OwnOptimizer | None = None
) -> Method:
    """Return the method that the settings name, its defaults filled in.

    Args:
        config: the run's settings.
        rule: one of the user's own, instead of the named.
        own_optimizer: likewise.

    Raises:
        UnknownNameError: no method, or no optimizer, has that name.
        ConfigError: two settings contradict each other, or a rule of the user's own is wrong.
    """
    rule = rule or named_rule(config.method)
    if rule is not None:
        check_rule(rule)
    row = _row_of(rule, config.method)
    own_optimizer = own_optimizer or own_of(config.optimizer)
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
        by_speed=row.by_speed,
        optimizer=optimizer,
        inner=dataclasses.replace(optimizer, momentum=0.0, nesterov=False)
        if row.is_momentum_at_center
        else optimizer,
        own_optimizer=own_optimizer,
        has_own_rule=rule is not None,
    )
    check(config, method)
    return method


def _row_of(rule: Rule | None, config: MethodConfig) -> MethodRow:
    if rule is not None:
        return MethodRow(
            name=config.name,
            make_rule=lambda _: rule,
            strategy=config.strategy or rule.strategy,
            period=rule.period,
            sentence=(rule.__doc__ or "").split("\n")[0],
            source="your own",
        )
    if config.name not in METHODS:
        raise UnknownNameError("method.name", config.name, METHODS)
    row = METHODS[config.name]
    if config.strategy not in (None, row.strategy):
        raise ConfigError(
            "method.strategy", f"of {row.name} is {row.strategy}; it is set for rules of your own"
        )
    return row


def _filled_optimizer(
    row: MethodRow, optimizer: OptimizerConfig, own: OwnOptimizer | None
) -> OptimizerConfig:
    is_sgd = optimizer.name == "sgd" and own is None
    momentum, nesterov, lr = optimizer.momentum, optimizer.nesterov, optimizer.lr
    if momentum is None and (is_sgd or row.momentum):  # else the optimizer's own
        momentum = row.momentum
    if nesterov is None and (is_sgd or row.nesterov):
        nesterov = row.nesterov
    if lr is None:
        lr = row.lr if is_sgd else default_lr(optimizer, own)
    if nesterov and row.is_momentum_at_center:
        raise ConfigError(
            "optimizer.nesterov", f"is for momentum at the replicas; {row.name} has the master's"
        )
    if nesterov and momentum == 0:
        raise ConfigError(
            "optimizer.nesterov", f"needs momentum; {row.name} has none: set optimizer.momentum"
        )
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
    """Return the settings with what the method decides written out, as a run records them."""
    return dataclasses.replace(
        config,
        method=dataclasses.replace(
            config.method, period=AUTO if method.finds_tuning else method.period
        ),
        optimizer=method.optimizer,
    )
