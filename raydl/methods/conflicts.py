"""Settings that do not fit together: a table of conditions, settings and sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raydl.core.codecs import parse_codec
from raydl.core.optimizers import is_elementwise, vectors_in_state
from raydl.errors import ConfigError
from raydl.methods.easgd import Elastic, moving_rate_limit_in_turn

if TYPE_CHECKING:
    from raydl.core.method import Method


class Choice:
    """The settings of a run beside its method, as conditions and sentences name them.

    Args:
        config: settings of the run.
        method: method of the run.
    """

    def __init__(self, config: TrainConfig, method: Method) -> None:
        self.config, self.method = config, method
        self.settings: MethodConfig = config.method
        self.exchange: ExchangeConfig = config.exchange
        self.scaling: ScalingConfig = config.scaling
        self.inner: OptimizerConfig = method.inner
        self.is_deterministic = config.training.deterministic
        self.is_at_center = not method.rule.takes_steps
        """Whether the user's optimizer steps at the center."""
        self.is_ahead = method.rule.ahead
        self.needs_sgd = method.rule.needs_plain_sgd
        self.has_rounds = method.is_sync and method.has_local_steps
        rule = method.rule
        self.is_elastic = isinstance(rule, Elastic)
        self.beta = rule.beta if isinstance(rule, Elastic) else 0.0
        self.fewest = max(1, config.scaling.min_workers)
        self.steps_of_fragment = method.period // method.fragments
        self.wanted_workers = config.scaling.wanted()
        self.compression = method.compression
        self.is_compressed = parse_codec(method.compression).name != "none"

    @property
    def missing_inner(self) -> str:
        """The state that the rule shares and the optimizer lacks; or empty."""
        wanted = self.method.rule.inner
        known = vectors_in_state(self.inner, self.method.own_optimizer) if wanted else ()
        return " and ".join(name for name in wanted if name not in known)

    @property
    def uneven_count(self) -> int:
        """The number of workers that groups do not divide, or 0."""
        counts = (self.fewest, max(1, self.scaling.max_workers))
        return next((count for count in counts if count % self.settings.group_size), 0)


@dataclass(frozen=True)
class Conflict:
    """Settings that do not fit together."""

    setting: str
    """The one to change."""
    applies: Callable[[Choice], bool]
    sentence: str
    """The rest of the sentence; names in braces are attributes of the choice, ``x``."""
    of_compression: bool = False
    """Whether it concerns compressed messages only."""


_AT_CENTER = "for {x.method.name}, whose optimizer steps at the center"


def _is_in_parts(x: Choice) -> bool:
    """Whether an optimizer at the center gets parts of the vector."""
    return x.is_at_center and not (x.method.is_sync and x.method.fragments == 1)


CONFLICTS = (
    # The stability of elastic averaging at flat curvature; see ``rules``.
    Conflict(
        "method.beta",
        lambda x: x.is_elastic and x.method.is_sync and x.beta > 1,
        "must be in (0, 1] for {x.method.name}, got {x.beta}: all workers exchange at once, and a "
        "larger value moves the center beyond the mean of the replicas",
    ),
    Conflict(
        "method.beta",
        lambda x: x.is_elastic and x.beta / x.fewest > moving_rate_limit_in_turn(),
        "must be at most the {x.fewest} workers of the smallest membership, got {x.beta}: one "
        "exchange would move a replica beyond the center",
    ),
    # the optimizer at the center
    Conflict(
        "optimizer.name",
        lambda x: x.is_at_center and not is_elementwise(x.inner, x.method.own_optimizer),
        "cannot be {x.inner.name} " + _AT_CENTER + " on flat tensors: it depends on the shapes of "
        "parameters; choose an elementwise optimizer, or a method with local steps",
    ),
    Conflict(
        "optimizer.name",
        lambda x: x.is_at_center and x.method.strategy == "hogwild" and x.inner.name != "sgd",
        "must be sgd " + _AT_CENTER + " without a lock, got {x.inner.name}",
    ),
    Conflict(
        "optimizer.decay_only_matrices",
        lambda x: bool(x.inner.decay_only_matrices) and _is_in_parts(x),
        "cannot be set " + _AT_CENTER + " in parts, without the shapes of parameters; set "
        "exchange.fragments 1, or choose a sync method",
    ),
    Conflict(
        "optimizer.param_groups",
        lambda x: bool(x.inner.param_groups) and _is_in_parts(x),
        "cannot be set " + _AT_CENTER + " in parts, without the names of parameters; set "
        "exchange.fragments 1, or choose a sync method",
    ),
    Conflict(
        "input.skew",
        lambda x: x.config.input.skew is not None and x.scaling.max_workers < 2,
        "needs at least 2 workers in scaling.num_workers, got {x.wanted_workers}: the data differ "
        "between workers",
    ),
    Conflict(
        "run.bad_workers",
        lambda x: x.config.run.bad_workers is not None and x.scaling.max_workers < 1,
        "needs workers in processes of their own: scaling.num_workers of 1 or more, got 0",
    ),
    # the exchange
    Conflict(
        "training.bytes",
        lambda x: x.config.training.bytes is not None and x.method.is_sync and x.fewest < 2,
        "needs at least 2 workers in scaling.num_workers for {x.method.name}, got "
        "{x.wanted_workers}: one worker alone sends nothing, so that the run would not end",
    ),
    Conflict(
        "exchange.fragments",
        lambda x: x.method.fragments > x.method.period,
        "must be at most the period of {x.method.period} local steps, got {x.method.fragments}; "
        "raise method.period",
    ),
    Conflict(
        "exchange.delay",
        lambda x: 0 < x.method.delay >= x.steps_of_fragment,
        "must be less than period / fragments = {x.steps_of_fragment}, got {x.method.delay}",
    ),
    Conflict(
        "exchange.delay",
        lambda x: x.method.delay > 0 and x.method.strategy == "round_robin",
        "has no meaning for {x.method.name}: a turn ends with its exchange",
    ),
    Conflict(
        "optimizer.clip_grad_norm",
        lambda x: (
            x.is_at_center
            and x.inner.clip_grad_norm is not None
            and max(x.method.fragments, x.exchange.center_shards) > 1
        ),
        "must be None for {x.method.name} in fragments or shards: its gradients are clipped at the "
        "center, where no part has the norm of the whole",
    ),
    Conflict(
        "exchange.center_shards",
        lambda x: x.method.is_sync and x.exchange.center_shards > 1,
        "has no meaning for {x.method.name}: every rank holds the whole center",
    ),
    Conflict(
        "exchange.allreduce",
        lambda x: x.exchange.allreduce != "library" and not x.method.is_sync,
        "has no meaning for {x.method.name}: its workers exchange with the center only",
    ),
    Conflict(
        "exchange.allreduce",
        lambda x: x.exchange.allreduce != "library" and x.config.exchange_device != "cpu",
        "can be {x.exchange.allreduce} on CPUs only: NCCL chooses its own algorithm",
    ),
    Conflict(
        "exchange.allreduce",
        lambda x: x.exchange.allreduce == "auto" and x.is_deterministic,
        "cannot be auto with training.deterministic: measured times would decide the order of the "
        "sums; name an algorithm",
    ),
    Conflict(
        "evaluation.by",
        lambda x: x.config.evaluation.is_by_workers and not x.method.is_sync,
        "cannot be workers with {x.method.name}: its workers do not pause together",
    ),
    Conflict(
        "exchange.packed",
        lambda x: not x.exchange.packed,
        "cannot be turned off with exchange.compression, which needs packed messages",
        of_compression=True,
    ),
    Conflict(
        "exchange.allreduce",
        lambda x: x.exchange.allreduce != "library",
        "has no meaning with exchange.compression {x.compression}: compressed messages "
        "are gathered, not reduced",
        of_compression=True,
    ),
    Conflict(
        "method.beta",
        lambda x: x.beta > 1,
        "must be in (0, 1] with exchange.compression, got {x.beta}: messages are then differences "
        "to an older center",
        of_compression=True,
    ),
    Conflict(
        "exchange.packed",
        lambda x: not x.method.is_sync and not x.exchange.packed,
        "can be turned off for sync methods only, not for {x.method.name}",
    ),
    Conflict(
        "exchange.resident",
        lambda x: not x.method.is_sync and not x.exchange.resident,
        "can be turned off for sync methods only, not for {x.method.name}",
    ),
    Conflict(
        "exchange.compression",
        lambda x: not x.method.rule.may_compress,
        "must be none for {x.method.name}, got {x.compression}: a codec would change what the "
        "messages mean",
        of_compression=True,
    ),
    Conflict(
        "optimizer.name",
        lambda x: x.needs_sgd and x.inner.name != "sgd",
        "must be sgd for {x.method.name}, got {x.inner.name}: it takes the mean gradient from "
        "the way that a replica has gone",
    ),
    Conflict(
        "optimizer.momentum",
        lambda x: x.needs_sgd and bool(x.inner.momentum),
        "must be 0 for {x.method.name}, got {x.inner.momentum}: it takes the mean gradient from "
        "the way that a replica has gone",
    ),
    Conflict(
        "optimizer.name",
        lambda x: bool(x.missing_inner),
        "must be an optimizer with {x.missing_inner} in its state for {x.method.name}, such as "
        "adamw, got {x.inner.name}: the workers average this state",
    ),
    Conflict(
        "method.strategy",
        lambda x: bool(x.method.rule.lane_rounds) and not x.method.is_sync,
        "must be sync for {x.method.name}, some of whose lanes travel in some rounds only, got "
        "{x.method.strategy}",
    ),
    Conflict(
        "exchange.compression",
        lambda x: bool(x.method.rule.lane_rounds),
        "must be none for {x.method.name}, some of whose lanes travel in some rounds only, got "
        "{x.compression}",
        of_compression=True,
    ),
    Conflict(
        "exchange.overlap",
        lambda x: x.exchange.overlap is not None and not x.is_ahead,
        "has no meaning for {x.method.name}: its message depends on the gradient of the step",
    ),
    # who shares a replica, and how far it is trusted
    Conflict(
        "method.dynamic_weights",
        lambda x: x.settings.dynamic_weights and x.settings.group_size > 1,
        "needs method.group_size 1, got {x.settings.group_size}",
    ),
    Conflict(
        "method.dynamic_weights",
        lambda x: x.settings.dynamic_weights and not x.is_ahead,
        "has no meaning for {x.method.name}: its replicas are copies of the center",
    ),
    Conflict(
        "method.group_size",
        lambda x: x.settings.group_size > 1 and not x.has_rounds,
        "is for sync methods with local steps, not for {x.method.name}",
    ),
    Conflict(
        "method.group_size",
        lambda x: x.uneven_count > 0,
        "must divide scaling.num_workers, got {x.settings.group_size} and {x.uneven_count}",
    ),
    # the period that the workers choose, and steps by speed
    Conflict(
        "method.period",
        lambda x: x.method.finds_tuning and not x.has_rounds,
        "can be auto for sync methods with local steps, not for {x.method.name}; give a number",
    ),
    Conflict(
        "method.period",
        lambda x: x.method.finds_tuning and x.settings.group_size > 1,
        "cannot be auto with method.group_size; give a number",
    ),
    Conflict(
        "method.period",
        lambda x: x.method.finds_tuning and x.is_deterministic,
        "cannot be auto with training.deterministic: it depends on measured times; give a number",
    ),
    Conflict(
        "method.strategy",
        lambda x: x.method.rule.varies_period and not x.method.is_sync,
        "must be sync for {x.method.name}, whose period varies, got {x.method.strategy}",
    ),
    Conflict(
        "method.period",
        lambda x: x.method.rule.varies_period and x.method.finds_tuning,
        "cannot be auto for {x.method.name}, whose period varies; give a number",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and x.method.rule.varies_period,
        "has no meaning for {x.method.name}, whose period varies",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and not x.method.is_sync,
        "is for sync methods, not for {x.method.name}",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and x.method.finds_tuning,
        "cannot be set with method.period auto; give a number",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and x.method.period == 1,
        "needs several local steps in a round, but the period of {x.method.name} is 1; raise "
        "method.period",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and x.settings.group_size > 1,
        "cannot be set with method.group_size: the workers of a group step together",
    ),
    Conflict(
        "method.steps_by_speed",
        lambda x: x.settings.steps_by_speed and x.is_deterministic,
        "cannot be set with training.deterministic: it depends on measured times",
    ),
    # the same bits in each run
    Conflict(
        "training.deterministic",
        lambda x: x.is_deterministic and x.method.strategy in ("async", "hogwild"),
        "is not possible with {x.method.name}: its workers exchange in no fixed order; choose a "
        "sync method or original-easgd",
    ),
    Conflict(
        "training.deterministic",
        lambda x: x.is_deterministic and x.config.optimizer.lr_schedule == "plateau",
        "is not possible with optimizer.lr_schedule plateau: the time of evaluations depends on "
        "the clock; choose step",
    ),
    Conflict(
        "training.deterministic",
        lambda x: x.is_deterministic and x.scaling.min_workers != x.scaling.max_workers,
        "needs a fixed number of workers, got {x.wanted_workers}: the time at which workers join "
        "depends on the cluster",
    ),
)
"""In the order in which they are told."""


def check_conflicts(config: TrainConfig, method: Method) -> None:
    """Raise a ConfigError for the first settings that do not fit together."""
    choice = Choice(config, method)
    for conflict in CONFLICTS:
        if (choice.is_compressed or not conflict.of_compression) and conflict.applies(choice):
            raise ConfigError(conflict.setting, conflict.sentence.format(x=choice))


def may_compress(config: TrainConfig, method: Method) -> bool:
    """Whether the other settings allow compression in a synchronous method."""
    choice = Choice(config, method)
    return not any(c.applies(choice) for c in CONFLICTS if c.of_compression)
