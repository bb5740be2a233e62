"""Settings of the learning: the method, the local step, the length of the training."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from typing import Any

from raydl.config.checks import is_positive, require
from raydl.errors import ConfigError, UnknownNameError

SCHEDULES = ("cosine", "linear", "constant", "step", "plateau")
"""The courses a learning rate can take."""

PRECISIONS = ("float32", "bf16")
"""The numbers that a loss can be computed in; weights and gradients stay as they are."""

AUTO = "auto"
"""The period that the workers choose by themselves."""

STRATEGIES = ("sync", "async", "hogwild", "round_robin")
"""The strategies of exchange: all at once; one at a time; no lock; in rank order."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How the replicas meet the center."""

    name: str = field(default="sync-easgd", metadata={"flag": "method"})
    """The training method (`raydl methods` lists them), or module:Class, a rule of your own."""
    beta: float = field(default=0.9, metadata={"flag": "beta"})
    """Elastic force of all workers together; each one's moving rate is beta / p."""
    period: int | str | None = field(default=None, metadata={"flag": "period"})
    """Local steps from one exchange to the next (tau); unset: the method's own. auto: the workers
    choose it by measured times, with fragments, delay and compression, so that they wait little."""
    group_size: int = field(default=1, metadata={"flag": "group-size"})
    """Workers that share one replica by summing gradients, on one node where they fit; only
    such groups exchange with the center."""
    dynamic_weights: bool = field(default=False, metadata={"flag": "dynamic-weights"})
    """A replica that is suddenly far from the center is pulled hard and pulls little."""
    strategy: str | None = None
    """How workers exchange, for a rule of your own: sync, async, hogwild or round_robin."""
    outer_lr: float | None = None
    """Rate of the outer step, for local-sgd and the DiLoCo family; unset: the method's own."""
    outer_momentum: float | None = None
    """Momentum of the outer step, in [0, 1); unset: the method's own."""

    def __post_init__(self) -> None:
        require(is_positive(self.beta), "method.beta", "a positive number", self.beta)
        if isinstance(self.period, str):
            is_auto = self.period == AUTO
            require(is_auto, "method.period", "a whole number, or auto", self.period)
        else:
            is_long = self.period is None or self.period >= 1
            require(is_long, "method.period", "1 or more", self.period)
        require(self.group_size >= 1, "method.group_size", "1 or more", self.group_size)
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise UnknownNameError("method.strategy", self.strategy, STRATEGIES)
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

    name: str = field(default="sgd", metadata={"flag": "optimizer"})
    """An optimizer of torch.optim in lower case (sgd, adamw, rmsprop, ...), or module:function,
    your own."""
    options: str = ""
    """More of its settings, NAME=VALUE by comma: betas=(0.9,0.95),eps=1e-8."""
    lr: float | None = field(default=None, metadata={"flag": "lr"})
    """Highest learning rate (eta); unset: the method's own for sgd, as `raydl methods` lists it,
    and the optimizer's own for any other."""
    lr_schedule: str = field(default="cosine", metadata={"flag": "lr-schedule"})
    """Course of the learning rate over the run: cosine or linear (both down to 0), constant, step
    (multiplied by gamma at each milestone), plateau (whenever the center stands still)."""
    warmup: float = 0.05
    """Share of the run, in [0, 1), in which the learning rate rises from 0."""
    milestones: str = "0.5,0.75"
    """Shares of the run at which the schedule step multiplies the learning rate, by comma."""
    gamma: float = 0.1
    """Factor of the learning rate at each cut of the schedules step and plateau, in (0, 1)."""
    patience: int = 3
    """Evaluations in a row without a better center that the schedule plateau lets pass."""
    momentum: float | None = field(default=None, metadata={"flag": "momentum"})
    """Momentum (mu), in [0, 1), for optimizers that take one; unset: the method's own for sgd
    (0.9 for the M-forms, else 0), and the optimizer's own for any other."""
    nesterov: bool | None = None
    """Look ahead along the momentum (Nesterov), as EAMSGD does; unset: the method's own."""
    weight_decay: float | None = None
    """Weight decay as the optimizer means it, for sgd an L2 penalty added to the gradient; unset:
    the optimizer's own (0 for sgd, 0.01 for adamw)."""
    decay_only_matrices: bool = False
    """No weight decay on parameters of one dimension: biases, and those of normalisations."""
    clip_grad_norm: float | None = 2.0
    """Clip the gradient of each step to this L2 norm. None: do not clip."""

    def __post_init__(self) -> None:
        require(
            self.lr is None or is_positive(self.lr), "optimizer.lr", "a positive number", self.lr
        )
        require(0 <= self.warmup < 1, "optimizer.warmup", "in [0, 1)", self.warmup)
        if self.lr_schedule not in SCHEDULES:
            raise UnknownNameError("optimizer.lr_schedule", self.lr_schedule, SCHEDULES)
        require(
            self.momentum is None or 0 <= self.momentum < 1,
            "optimizer.momentum",
            "in [0, 1)",
            self.momentum,
        )
        require(
            self.weight_decay is None
            or (math.isfinite(self.weight_decay) and self.weight_decay >= 0),
            "optimizer.weight_decay",
            "0 or more",
            self.weight_decay,
        )
        require(
            self.clip_grad_norm is None or is_positive(self.clip_grad_norm),
            "optimizer.clip_grad_norm",
            "a positive number",
            self.clip_grad_norm,
        )
        self._check_lr_schedule()
        assert isinstance(self.parsed_options, dict)  # raises where they can not be read

    def _check_lr_schedule(self) -> None:
        require(0 < self.gamma < 1, "optimizer.gamma", "in (0, 1)", self.gamma)
        require(self.patience >= 0, "optimizer.patience", "0 or more", self.patience)
        shares = self.milestone_shares
        require(
            all(0 < share < 1 for share in shares) and list(shares) == sorted(set(shares)),
            "optimizer.milestones",
            "rising shares of the run in (0, 1)",
            self.milestones,
        )
        if self.lr_schedule == "step" and shares and shares[0] < self.warmup:
            raise ConfigError(
                "optimizer.milestones",
                f"must come after the warm-up of {self.warmup}, got {self.milestones}; "
                f"lower optimizer.warmup",
            )

    @property
    def milestone_shares(self) -> tuple[float, ...]:
        """The milestones as numbers."""
        try:
            return tuple(float(share) for share in self.milestones.split(",") if share.strip())
        except ValueError:
            problem = f"must be numbers by comma, as in 0.5,0.75, got {self.milestones}"
            raise ConfigError("optimizer.milestones", problem) from None

    @property
    def parsed_options(self) -> dict[str, Any]:
        """The options as Python values, by name."""
        problem = f"must be NAME=VALUE by comma, as in eps=1e-8, got {self.options}"
        try:
            call = ast.parse(f"options({self.options})", mode="eval").body
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
                raise ConfigError("optimizer.options", problem)
            options = {given.arg: ast.literal_eval(given.value) for given in call.keywords}
        except (SyntaxError, ValueError):
            raise ConfigError("optimizer.options", problem) from None
        if None in options:  # **{...}
            raise ConfigError("optimizer.options", problem)
        return {str(name): value for name, value in options.items()}


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
    stop_at_accuracy: float | None = field(default=None, metadata={"flag": "stop-at-accuracy"})
    """Accuracy of the center on the test set, in (0, 1], that ends the run before its time."""
    patience: int | None = field(default=None, metadata={"flag": "patience"})
    """Evaluations in a row without a better center that end the run before its time."""
    batch_size: int = field(default=64, metadata={"flag": "batch-size"})
    """Samples in one step of one worker."""
    microbatches: int = 1
    """Microbatches that each batch is split into; they go through the model one after the other,
    which takes less memory."""
    precision: str = field(default="float32", metadata={"flag": "precision"})
    """Numbers that the model computes in: float32, or bf16 where torch's autocast finds it safe;
    weights and gradients are float32 in both."""
    label_smoothing: float = 0.0
    """Share of each label, in [0, 1), that is spread over all classes while training."""
    seed: int = field(default=0, metadata={"flag": "seed"})
    """Seed of the initial weights, the order of the samples and all else that is random."""
    deterministic: bool = field(default=False, metadata={"flag": "deterministic"})
    """Refuse what would not give the same bits for the same seed and the same workers."""

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "samples", "patience", "batch_size", "microbatches"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"training.{name}", "1 or more", value)
        if self.microbatches > self.batch_size:
            raise ConfigError(
                "training.microbatches",
                f"must be at most the {self.batch_size} samples of a batch, "
                f"got {self.microbatches}",
            )
        if self.precision not in PRECISIONS:
            raise UnknownNameError("training.precision", self.precision, PRECISIONS)
        require(
            0 <= self.label_smoothing < 1,
            "training.label_smoothing",
            "in [0, 1)",
            self.label_smoothing,
        )
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
        self._check_stops()
        require(0 <= self.seed < 2**63, "training.seed", "in [0, 2^63)", self.seed)

    def _check_stops(self) -> None:
        accuracy = self.stop_at_accuracy
        require(
            accuracy is None or 0 < accuracy <= 1,
            "training.stop_at_accuracy",
            "in (0, 1], as 0.95 is",
            accuracy,
        )
        for name in ("seconds", "stop_at_accuracy", "patience"):
            if self.deterministic and getattr(self, name) is not None:
                raise ConfigError(
                    f"training.{name}", "depends on the clock, not with --deterministic"
                )

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train for, or None where steps, samples or seconds decide."""
        if not (self.steps is None and self.samples is None and self.seconds is None):
            return None
        return 20 if self.epochs is None else self.epochs
