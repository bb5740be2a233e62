"""The table of named methods: which rule, under which schedule, with which defaults.

A method is a *rule* (what an exchange computes) under a *schedule* (who may talk when),
with a period and an inner optimizer. Names follow SC17 (arXiv 1708.02983).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig
from raydl.errors import ConfigError, UnknownNameError
from raydl.rules import Elastic, MeanGradient, Rule


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One row of the table."""

    name: str
    make_rule: Callable[[MethodConfig], Rule]
    schedule: str
    period: int
    """Local steps between exchanges where the user names none."""
    momentum: float
    """Momentum of the optimizer where the user names none."""
    lr: float
    """Learning rate where the user names none; with momentum a tenth, for steps as long."""
    source: str
    """The equations, by paper."""
    sentence: str


def _elastic(config: MethodConfig) -> Rule:
    return Elastic(config.beta)


def _mean_gradient(config: MethodConfig) -> Rule:
    return MeanGradient()


_ROWS = (
    MethodRow(
        name="sync-easgd",
        make_rule=_elastic,
        schedule="sync",
        period=10,
        momentum=0.0,
        lr=0.25,
        source="SC17 eq. 1 and 2",
        sentence="all workers exchange at once with the center, hidden behind the gradient",
    ),
    MethodRow(
        name="sync-measgd",
        make_rule=_elastic,
        schedule="sync",
        period=10,
        momentum=0.9,
        lr=0.025,
        source="SC17 eq. 2, 5 and 6",
        sentence="sync-easgd with momentum in the local step",
    ),
    MethodRow(
        name="sync-sgd",
        make_rule=_mean_gradient,
        schedule="sync",
        period=1,
        momentum=0.0,
        lr=0.25,
        source="SC17, data-parallel SGD",
        sentence="mean gradient of all workers: the plain data-parallel baseline",
    ),
    MethodRow(
        name="sync-msgd",
        make_rule=_mean_gradient,
        schedule="sync",
        period=1,
        momentum=0.9,
        lr=0.025,
        source="SC17 eq. 3 and 4",
        sentence="sync-sgd with momentum",
    ),
)

METHODS: dict[str, MethodRow] = {row.name: row for row in _ROWS}
"""Every named method."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with all its settings decided."""

    name: str
    rule: Rule
    schedule: str
    period: int
    optimizer: OptimizerConfig
    """The user's optimizer settings with the method's own filled in."""


def resolve(config: MethodConfig, optimizer: OptimizerConfig) -> Method:
    """Return the method that the settings name, its defaults filled in.

    Raises:
        UnknownNameError: no method has that name.
        ConfigError: two settings contradict each other.
    """
    if config.name not in METHODS:
        raise UnknownNameError("method.name", config.name, METHODS)
    row = METHODS[config.name]
    momentum = row.momentum if optimizer.momentum is None else optimizer.momentum
    lr = row.lr if optimizer.lr is None else optimizer.lr
    if optimizer.nesterov and momentum == 0:
        raise ConfigError(
            "optimizer.nesterov", f"needs momentum; {row.name} has none: set optimizer.momentum"
        )
    return Method(
        name=row.name,
        rule=row.make_rule(config),
        schedule=row.schedule,
        period=row.period if config.period is None else config.period,
        optimizer=dataclasses.replace(optimizer, momentum=momentum, lr=lr),
    )


def filled_in(config: TrainConfig) -> TrainConfig:
    """Return the settings with what the method decides written out, as a run records them.

    Raises:
        UnknownNameError: no method has that name.
        ConfigError: two settings contradict each other.
    """
    method = resolve(config.method, config.optimizer)
    return dataclasses.replace(
        config,
        method=dataclasses.replace(config.method, period=method.period),
        optimizer=method.optimizer,
    )
