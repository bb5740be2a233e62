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
from raydl.core.compression import parse_codec
from raydl.core.custom_rule import check_rule, named_rule
from raydl.core.optimizers import (
    OwnOptimizer,
    check_optimizer,
    default_lr,
    ignores_zero_gradients,
    is_elementwise,
    named_optimizer,
)
from raydl.core.rules import (
    DelayedOuter,
    Elastic,
    MeanGradient,
    Outer,
    Rule,
    Sends,
    moving_rate_limit_in_turn,
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


def _check(config: TrainConfig, method: Method) -> None:
    """Raise a ConfigError if settings do not fit together."""
    _check_beta(config, method)
    _check_optimizer(config, method)
    _check_exchange(config, method)
    _check_replicas(config, method)
    _check_tuning(config, method)
    _check_steps_by_speed(config, method)
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
            f"cannot be {name} {where} on flat tensors: it depends on the shapes of parameters; "
            f"choose an elementwise optimizer, or a method with local steps",
        )
    if method.strategy == "hogwild" and name != "sgd":
        raise ConfigError("optimizer.name", f"must be sgd {where} without a lock, got {name}")
    is_whole = method.is_sync and config.exchange.fragments == 1
    for setting, lacking in (("decay_only_matrices", "shapes"), ("param_groups", "names")):
        if getattr(optimizer, setting) and not is_whole:
            raise ConfigError(
                f"optimizer.{setting}",
                f"cannot be set {where} in parts, without the {lacking} of parameters; "
                f"set exchange.fragments 1, or choose a sync method",
            )


def _check_deterministic(config: TrainConfig, method: Method) -> None:
    if not config.training.deterministic:
        return
    if method.strategy in ("async", "hogwild"):
        raise ConfigError(
            "training.deterministic",
            f"is not possible with {method.name}: its workers exchange in no fixed order; "
            f"choose a sync method or original-easgd",
        )
    if config.optimizer.lr_schedule == "plateau":
        raise ConfigError(
            "training.deterministic",
            "is not possible with optimizer.lr_schedule plateau: the time of evaluations depends "
            "on the clock; choose step",
        )
    if config.scaling.min_workers != config.scaling.max_workers:
        raise ConfigError(
            "training.deterministic",
            f"needs a fixed number of workers, got {config.scaling.wanted()}: the time at which "
            f"workers join depends on the cluster",
        )


def _beta_of(config: TrainConfig, method: Method) -> float:
    """Return the beta of the rule, which may be a user's own instance."""
    return method.rule.beta if isinstance(method.rule, Elastic) else config.method.beta


def _check_beta(config: TrainConfig, method: Method) -> None:
    """Hold beta within the stability limits at flat curvature; see ``rules``."""
    if not isinstance(method.rule, Elastic):
        return
    beta = _beta_of(config, method)
    if method.is_sync and beta > 1:
        raise ConfigError(
            "method.beta",
            f"must be in (0, 1] for {method.name}, got {beta}: all workers exchange at once, and "
            f"a larger value moves the center beyond the mean of the replicas",
        )
    fewest = max(1, config.scaling.min_workers)
    if beta / fewest > moving_rate_limit_in_turn():
        raise ConfigError(
            "method.beta",
            f"must be at most the {fewest} workers of the smallest membership, got {beta}: "
            f"one exchange would move a replica beyond the center",
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
        problem = f"has no meaning for {method.name}: a turn ends with its exchange"
        raise ConfigError("exchange.delay", problem)
    clips = config.optimizer.clip_grad_norm is not None and not method.rule.steps_replica
    if clips and (exchange.fragments > 1 or exchange.center_shards > 1):
        raise ConfigError(
            "optimizer.clip_grad_norm",
            f"must be None for {method.name} in fragments or shards: its gradients are clipped at "
            f"the center, where no part has the norm of the whole",
        )
    if method.is_sync and exchange.center_shards > 1:
        problem = f"has no meaning for {method.name}: every rank holds the whole center"
        raise ConfigError("exchange.center_shards", problem)
    if exchange.allreduce != "library":
        _check_allreduce(config, method)
    if config.evaluation.is_by_workers and not method.is_sync:
        problem = f"cannot be workers with {method.name}: its workers do not pause together"
        raise ConfigError("evaluation.by", problem)
    if parse_codec(exchange.compression).name != "none":
        _check_compression(config, method)
    for name in ("packed", "resident"):
        if not method.is_sync and not getattr(exchange, name):
            problem = f"can be turned off for sync methods only, not for {method.name}"
            raise ConfigError(f"exchange.{name}", problem)
    if exchange.overlap is not None and method.rule.sends is not Sends.WEIGHTS:
        problem = (
            f"has no meaning for {method.name}: its message depends on the gradient of the step"
        )
        raise ConfigError("exchange.overlap", problem)


def _check_replicas(config: TrainConfig, method: Method) -> None:
    size, scaling = config.method.group_size, config.scaling
    if config.method.dynamic_weights and size > 1:
        raise ConfigError("method.dynamic_weights", f"needs method.group_size 1, got {size}")
    if config.method.dynamic_weights and method.rule.sends is not Sends.WEIGHTS:
        problem = f"has no meaning for {method.name}: its replicas are copies of the center"
        raise ConfigError("method.dynamic_weights", problem)
    if size == 1:
        return
    if not method.is_sync or not method.has_local_steps:
        problem = f"is for sync methods with local steps, not for {method.name}"
        raise ConfigError("method.group_size", problem)
    for count in (max(1, scaling.min_workers), max(1, scaling.max_workers)):
        if count % size:
            problem = f"must divide scaling.num_workers, got {size} and {count}"
            raise ConfigError("method.group_size", problem)


def _check_tuning(config: TrainConfig, method: Method) -> None:
    if not method.finds_tuning:
        return
    if not method.is_sync or not method.has_local_steps:
        problem = f"can be auto for sync methods with local steps, not for {method.name}"
        raise ConfigError("method.period", f"{problem}; give a number")
    if config.method.group_size > 1:
        raise ConfigError("method.period", "cannot be auto with method.group_size; give a number")
    if config.training.deterministic:
        problem = "cannot be auto with training.deterministic: it depends on measured times"
        raise ConfigError("method.period", f"{problem}; give a number")


def _check_steps_by_speed(config: TrainConfig, method: Method) -> None:
    if not config.method.steps_by_speed:
        return
    setting = "method.steps_by_speed"
    if not method.is_sync:
        raise ConfigError(setting, f"is for sync methods, not for {method.name}")
    if method.finds_tuning:
        raise ConfigError(setting, "cannot be set with method.period auto; give a number")
    if method.period == 1:
        problem = f"needs several local steps in a round, but the period of {method.name} is 1"
        raise ConfigError(setting, f"{problem}; raise method.period")
    if config.method.group_size > 1:
        problem = "cannot be set with method.group_size: the workers of a group step together"
        raise ConfigError(setting, problem)
    if config.training.deterministic:
        problem = "cannot be set with training.deterministic: it depends on measured times"
        raise ConfigError(setting, problem)


def _check_allreduce(config: TrainConfig, method: Method) -> None:
    allreduce = config.exchange.allreduce
    if not method.is_sync:
        problem = f"has no meaning for {method.name}: its workers exchange with the center only"
        raise ConfigError("exchange.allreduce", problem)
    if config.exchange_device != "cpu":
        problem = f"can be {allreduce} on CPUs only: NCCL chooses its own algorithm"
        raise ConfigError("exchange.allreduce", problem)
    if config.training.deterministic and allreduce == "auto":
        raise ConfigError(
            "exchange.allreduce",
            "cannot be auto with training.deterministic: measured times would decide the order "
            "of the sums; name an algorithm",
        )


def may_compress(config: TrainConfig, method: Method) -> bool:
    """Whether the other settings allow compression in a synchronous method."""
    try:
        _check_compression(config, method)
    except ConfigError:
        return False
    return True


def _check_compression(config: TrainConfig, method: Method) -> None:
    exchange = config.exchange
    if not exchange.packed:
        problem = "cannot be turned off with exchange.compression, which needs packed messages"
        raise ConfigError("exchange.packed", problem)
    if exchange.allreduce != "library":
        raise ConfigError(
            "exchange.allreduce",
            f"has no meaning with exchange.compression {exchange.compression}: compressed messages "
            f"are gathered, not reduced",
        )
    if (beta := _beta_of(config, method)) > 1:
        raise ConfigError(
            "method.beta",
            f"must be in (0, 1] with exchange.compression, got {beta}: messages are "
            f"then differences to an older center",
        )


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
    _check(config, method)
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
