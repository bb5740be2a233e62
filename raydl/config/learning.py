"""What is learned and how: the method, the local step, the length of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raydl.config.checks import is_positive, require
from raydl.errors import ConfigError, UnknownNameError

SCHEDULES = ("cosine", "linear", "constant")
"""The courses a learning rate can take."""

WHO_MAY_TALK = ("sync", "async", "hogwild", "round_robin")
"""The schedules of exchanges: all at once; one at a time; no lock; in rank order."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How the replicas meet the center."""

    name: str = field(default="sync-easgd", metadata={"flag": "method"})
    """The training method (`raydl methods` lists them), or module:Class, a rule of your own."""
    beta: float = field(default=0.9, metadata={"flag": "beta"})
    """Elastic force of all workers together; each one's moving rate is beta / p."""
    period: int | None = field(default=None, metadata={"flag": "period"})
    """Local steps from one exchange to the next (tau); unset: the method's own."""
    group_size: int = field(default=1, metadata={"flag": "group-size"})
    """Workers that share one replica by summing gradients, on one node where they fit; only
    such groups exchange with the center."""
    dynamic_weights: bool = field(default=False, metadata={"flag": "dynamic-weights"})
    """A replica that is suddenly far from the center is pulled hard and pulls little."""
    schedule: str | None = None
    """Who may talk when, for a rule of your own: sync, async, hogwild or round_robin."""
    outer_lr: float | None = None
    """Rate of the outer step, for local-sgd and the DiLoCo family; unset: the method's own."""
    outer_momentum: float | None = None
    """Momentum of the outer step, in [0, 1); unset: the method's own."""

    def __post_init__(self) -> None:
        require(is_positive(self.beta), "method.beta", "a positive number", self.beta)
        require(self.period is None or self.period >= 1, "method.period", "1 or more", self.period)
        require(self.group_size >= 1, "method.group_size", "1 or more", self.group_size)
        if self.schedule is not None and self.schedule not in WHO_MAY_TALK:
            raise UnknownNameError("method.schedule", self.schedule, WHO_MAY_TALK)
        require(
            self.outer_lr is None or is_positive(self.outer_lr),
            "method.outer_lr",
            "a positive number",
            self.outer_lr,
        )
        require(
            self.outer_momentum is None or 0 <= self.outer_momentum < 1,
            "method.outer_momentum",
            "in [0, 1)",
            self.outer_momentum,
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The local step of a replica (for the SGD methods: of the center)."""

    lr: float | None = field(default=None, metadata={"flag": "lr"})
    """Highest learning rate (eta); unset: the method's own, as `raydl methods` lists it."""
    schedule: str = field(default="cosine", metadata={"flag": "schedule"})
    """Course of the learning rate over the run: cosine or linear (both down to 0), constant."""
    warmup: float = 0.05
    """Share of the run, in [0, 1), in which the learning rate rises from 0."""
    momentum: float | None = field(default=None, metadata={"flag": "momentum"})
    """Momentum (mu), in [0, 1); unset: the method's own (0.9 for the M-forms, else 0)."""
    nesterov: bool | None = None
    """Look ahead along the momentum (Nesterov), as EAMSGD does; unset: the method's own."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""
    max_grad_norm: float | None = 2.0
    """Longest gradient of one step (L2 norm); longer ones are scaled down. None: any length."""

    def __post_init__(self) -> None:
        require(
            self.lr is None or is_positive(self.lr), "optimizer.lr", "a positive number", self.lr
        )
        require(0 <= self.warmup < 1, "optimizer.warmup", "in [0, 1)", self.warmup)
        if self.schedule not in SCHEDULES:
            raise UnknownNameError("optimizer.schedule", self.schedule, SCHEDULES)
        require(
            self.momentum is None or 0 <= self.momentum < 1,
            "optimizer.momentum",
            "in [0, 1)",
            self.momentum,
        )
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            "optimizer.weight_decay",
            "0 or more",
            self.weight_decay,
        )
        require(
            self.max_grad_norm is None or is_positive(self.max_grad_norm),
            "optimizer.max_grad_norm",
            "a positive number",
            self.max_grad_norm,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, how large, from which seed."""

    epochs: int | None = field(default=None, metadata={"flag": "epochs"})
    """Passes over the training set, by all workers together (20 where nothing else is set)."""
    steps: int | None = field(default=None, metadata={"flag": "steps"})
    """Local steps of each worker, instead of epochs."""
    samples: int | None = field(default=None, metadata={"flag": "samples"})
    """Samples by all workers together, instead of epochs."""
    seconds: float | None = field(default=None, metadata={"flag": "seconds"})
    """Seconds of training, instead of epochs."""
    batch_size: int = field(default=64, metadata={"flag": "batch-size"})
    """Samples in one step of one worker."""
    seed: int = field(default=0, metadata={"flag": "seed"})
    """Seed of the initial weights, the order of the samples and all else that is random."""
    deterministic: bool = field(default=False, metadata={"flag": "deterministic"})
    """Refuse what would not give the same bits for the same seed and the same workers."""

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "samples", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"training.{name}", "1 or more", value)
        require(
            self.seconds is None or is_positive(self.seconds),
            "training.seconds",
            "a positive number",
            self.seconds,
        )
        ends = [
            e for e in ("epochs", "steps", "samples", "seconds") if getattr(self, e) is not None
        ]
        if len(ends) > 1:
            raise ConfigError(
                f"training.{ends[0]}", f"and training.{ends[1]} exclude each other; give one"
            )
        if self.deterministic and self.seconds is not None:
            raise ConfigError("training.seconds", "depends on the clock, not with --deterministic")
        require(0 <= self.seed < 2**63, "training.seed", "in [0, 2^63)", self.seed)

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train for, or None where steps, samples or seconds decide."""
        if not (self.steps is None and self.samples is None and self.seconds is None):
            return None
        return 20 if self.epochs is None else self.epochs
