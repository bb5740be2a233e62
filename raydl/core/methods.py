"""The named methods, and one method with all its settings decided.

A method is a *rule* (what an exchange computes) under a *strategy* (which exchanges happen when),
with a period and an inner optimizer. Names follow SC17 (arXiv 1708.02983), where they are
from there. ``Method`` knows which settings go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raydl.config import AUTO, MethodConfig, OptimizerConfig, TrainConfig
from raydl.core.compression import parse_codec
from raydl.core.custom_rule import check_rule, named_rule
from raydl.core.optimizers import (
    OwnOptimizer,
    check_optimizer,
    default_lr,
    is_elementwise,
    leaves_what_has_no_gradient,
    own_of,
)
from raydl.core.rules import (
    DelayedOuter,
    Elastic,
    MeanGradient,
    Outer,
    Rule,
    Sends,
    moving_rate,
    moving_rate_limit_in_turn,
)
from raydl.errors import ConfigError, ShapeError, UnknownNameError


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
    has_custom_rule: bool = False
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
        has_custom_rule=rule is not None,
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
