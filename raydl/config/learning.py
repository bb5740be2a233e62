"""Settings of the learning: method, optimizer and length of the training."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from typing import Any

from raydl.config.checks import bytes_of, require, require_positive
from raydl.errors import ConfigError, UnknownNameError

SCHEDULES = ("cosine", "linear", "constant", "step", "wsd", "plateau")
"""Learning-rate schedules."""

PRECISIONS = ("float32", "bf16")
"""Precisions of forward and backward; weights and gradients stay float32."""

AUTO = "auto"
"""The period if the workers choose it."""

STRATEGIES = ("sync", "async", "hogwild", "round_robin")
"""Exchange strategies: all workers at once; one at a time; without a lock; in rank order."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Training method: an update rule, the exchange strategy and the period."""

    name: str = field(default="sync-easgd", metadata={"flag": "method"})
    """Method: a name that `raydl methods` lists, or a rule of your own, module:Class."""
    beta: float | None = field(default=None, metadata={"flag": "beta"})
    """Elastic force of all p workers together, for elastic averaging; the moving rate of one worker
    is beta / p; unset: the method's default."""
    period: int | str | None = field(default=None, metadata={"flag": "period"})
    """Local steps between two exchanges (tau); unset: the method's default. auto: the workers
    choose period, fragments, delay and compression from measured times, to keep waiting short."""
    group_size: int = field(default=1, metadata={"flag": "group-size"})
    """Workers that share one replica by summing their gradients, on one node if they fit; each
    group exchanges with the center as one."""
    steps_by_speed: bool = field(default=False, metadata={"flag": "steps-by-speed"})
    """Give slower workers fewer local steps in a round, by their measured speeds, so that no worker
    waits for them (synchronous methods)."""
    dynamic_weights: bool = field(default=False, metadata={"flag": "dynamic-weights"})
    """If a replica is suddenly far from the center, pull it harder and let it move the center
    less."""
    strategy: str | None = None
    """Exchange strategy for a rule of your own: sync, async, hogwild or round_robin."""
    outer_lr: float | None = None
    """Learning rate of the outer step, for local-sgd and the DiLoCo family; unset: the method's
    default."""
    outer_momentum: float | None = None
    """Momentum of the outer step, in [0, 1); unset: the method's default."""
    options: str = ""
    """Settings of the method's own, as in decay=0.9,every=5: `raydl methods NAME` shows them."""

    def __post_init__(self) -> None:
        if self.beta is not None:
            require_positive("method.beta", self.beta)
        if isinstance(self.period, str):
            is_auto = self.period == AUTO
            require(is_auto, "method.period", "a whole number, or auto", self.period)
        else:
            is_long = self.period is None or self.period >= 1
            require(is_long, "method.period", "1 or more", self.period)
        require(self.group_size >= 1, "method.group_size", "1 or more", self.group_size)
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise UnknownNameError("method.strategy", self.strategy, STRATEGIES)
        if self.outer_lr is not None:
            require_positive("method.outer_lr", self.outer_lr)
        momentum = self.outer_momentum
        require(
            momentum is None or 0 <= momentum < 1, "method.outer_momentum", "in [0, 1)", momentum
        )
        assert isinstance(self.parsed_options, dict)  # raises if they cannot be parsed

    @property
    def parsed_options(self) -> dict[str, Any]:
        """Options as Python values, by name."""
        return _named_values("method.options", self.options)


_GROUPS = "optimizer.param_groups"


def _named_values(setting: str, text: str) -> dict[str, Any]:
    """Return the Python values in ``NAME=VALUE,...`` by name.

    Raises:
        ConfigError: if the text has another form.
    """
    problem = f"must be NAME=VALUE separated by commas, as in eps=1e-8, got {text}"
    try:
        call = ast.parse(f"options({text})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ConfigError(setting, problem)
        options = {given.arg: ast.literal_eval(given.value) for given in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(setting, problem) from None
    if None in options:  # **{...}
        raise ConfigError(setting, problem)
    return {str(name): value for name, value in options.items()}


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Optimizer settings for the parameters whose names match a pattern."""

    pattern: str
    """Names, as ``model.named_parameters()`` has them, in the notation of ``fnmatch``: * stands for
    any text, dots included."""
    lr_scale: float = 1.0
    """Factor of the scheduled learning rate, 0 or more."""
    weight_decay: float | None = None
    """Weight decay; unset: that of the other parameters."""
    options: str = ""
    """Further settings of the optimizer, as in ``OptimizerConfig.options``."""

    def __post_init__(self) -> None:
        require(bool(self.pattern), _GROUPS, "groups with a pattern", "an empty one")
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            is_valid = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            is_unset = name == "weight_decay" and value is None
            require(is_valid or is_unset, f"{name} of {_GROUPS}", "a number, 0 or more", value)
        for name in self.parsed_options:
            if name in ("lr_scale", "weight_decay"):
                raise ConfigError(_GROUPS, f"must not have {name} among the options: set {name}")

    @classmethod
    def parse(cls, text: str) -> ParamGroup:
        """Return a group from ``PATTERN:NAME=VALUE,...``, as in ``*.bias:weight_decay=0``.

        Raises:
            ConfigError: if the text has another form, or a value is out of range.
        """
        pattern, colon, named = text.rpartition(":")
        rule = "PATTERN:NAME=VALUE,..., as in *.bias:weight_decay=0"
        require(bool(colon), _GROUPS, rule, text)
        values = _named_values(_GROUPS, named)
        fields = {name: values.pop(name) for name in ("lr_scale", "weight_decay") if name in values}
        options = ",".join(f"{name}={value!r}" for name, value in values.items())
        return cls(pattern=pattern, options=options, **fields)

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        values = [f"lr_scale={self.lr_scale}"] if self.lr_scale != 1 else []
        values += [] if self.weight_decay is None else [f"weight_decay={self.weight_decay}"]
        return f"{self.pattern}:{','.join([*values, *filter(None, [self.options])])}"

    @property
    def parsed_options(self) -> dict[str, Any]:
        """Options as Python values, by name."""
        return _named_values(_GROUPS, self.options)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer of a replica's local steps (for the SGD methods: of the center)."""

    name: str | None = field(default=None, metadata={"flag": "optimizer"})
    """An optimizer of torch.optim in lower case (sgd, adamw, rmsprop, ...), muon for hidden
    matrices with adamw for the rest, or your own module:function; unset: the method's default
    (sgd, but muon for muloco)."""
    options: str = ""
    """Further settings of the optimizer, NAME=VALUE separated by commas:
    betas=(0.9,0.95),eps=1e-8."""
    lr: float | None = field(default=None, metadata={"flag": "lr"})
    """Peak learning rate (eta); unset: for the method's own optimizer its default (`raydl methods`
    lists it), for others the optimizer's default."""
    lr_schedule: str = field(default="cosine", metadata={"flag": "lr-schedule"})
    """Learning-rate schedule: cosine or linear (both decay to 0), constant, step (multiplied by
    gamma at each milestone), wsd (stays constant, then falls linearly to 0 in the last part),
    plateau (multiplied by gamma when the center stops improving), or your own module:function of
    the share of the run."""
    warmup: float = 0.05
    """Share of the run, in [0, 1), during which the learning rate rises from 0."""
    milestones: str = "0.5,0.75"
    """Shares of the run at which the step schedule multiplies the learning rate by gamma, separated
    by commas."""
    decay: float = 0.2
    """Share of the run, in (0, 1], over which the wsd schedule lowers the learning rate to 0; it is
    the last part of the run."""
    gamma: float = 0.1
    """Factor of the learning rate at each drop of the step and plateau schedules, in (0, 1)."""
    patience: int = 3
    """Evaluations in a row without a better center that the plateau schedule tolerates before it
    lowers the learning rate."""
    momentum: float | None = field(default=None, metadata={"flag": "momentum"})
    """Momentum (mu), in [0, 1), for optimizers that take one; unset: for sgd the method's default
    (0.9 for momentum methods, else 0), for others the optimizer's default."""
    nesterov: bool | None = None
    """Use Nesterov momentum, as EAMSGD does; unset: the method's default."""
    weight_decay: float | None = None
    """Weight decay as the optimizer defines it, for sgd an L2 penalty added to the gradient; unset:
    the optimizer's default (0 for sgd, 0.01 for adamw)."""
    decay_only_matrices: bool = False
    """Exclude one-dimensional parameters (biases, normalization) from weight decay."""
    param_groups: tuple[ParamGroup, ...] = field(default=(), metadata={"flag": "param-group"})
    """Settings for the parameters whose names match a pattern, as in "*.bias:weight_decay=0" or
    "head.*:lr_scale=10,betas=(0.9,0.95)"; lr_scale multiplies the learning rate. May be repeated:
    the first pattern that matches a name counts."""
    clip_grad_norm: float | None = 2.0
    """Clip the gradient of each step to this L2 norm. None: do not clip."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None:
                require_positive(f"optimizer.{name}", value)
        require(0 <= self.warmup < 1, "optimizer.warmup", "in [0, 1)", self.warmup)
        if self.lr_schedule not in SCHEDULES and ":" not in self.lr_schedule:
            raise UnknownNameError("optimizer.lr_schedule", self.lr_schedule, SCHEDULES)
        momentum, decay = self.momentum, self.weight_decay
        require(momentum is None or 0 <= momentum < 1, "optimizer.momentum", "in [0, 1)", momentum)
        is_decay = decay is None or (math.isfinite(decay) and decay >= 0)
        require(is_decay, "optimizer.weight_decay", "0 or more", decay)
        groups = self.param_groups
        are_groups = isinstance(groups, (list, tuple)) and all(
            isinstance(group, ParamGroup) for group in groups
        )
        require(are_groups, _GROUPS, "a list of raydl.ParamGroup", groups)
        object.__setattr__(self, "param_groups", tuple(groups))  # as from_dict returns them
        self._check_lr_schedule()
        assert isinstance(self.parsed_options, dict)  # raises if the options cannot be parsed

    def _check_lr_schedule(self) -> None:
        require(0 < self.gamma < 1, "optimizer.gamma", "in (0, 1)", self.gamma)
        require(0 < self.decay <= 1, "optimizer.decay", "in (0, 1]", self.decay)
        if self.lr_schedule == "wsd" and self.warmup + self.decay > 1:
            raise ConfigError(
                "optimizer.decay",
                f"must leave room for the warm-up of {self.warmup}, got {self.decay}; lower one",
            )
        require(self.patience >= 0, "optimizer.patience", "0 or more", self.patience)
        shares = self.milestone_shares
        require(
            all(0 < share < 1 for share in shares) and list(shares) == sorted(set(shares)),
            "optimizer.milestones",
            "increasing shares of the run in (0, 1)",
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
        """Milestones as numbers."""
        try:
            return tuple(float(share) for share in self.milestones.split(",") if share.strip())
        except ValueError:
            problem = f"must be numbers separated by commas, as in 0.5,0.75, got {self.milestones}"
            raise ConfigError("optimizer.milestones", problem) from None

    @property
    def parsed_options(self) -> dict[str, Any]:
        """Options as Python values, by name."""
        return _named_values("optimizer.options", self.options)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch size, precision and seed of the training."""

    epochs: int | None = field(default=None, metadata={"flag": "epochs"})
    """Passes over the training set by all workers together; 20 if no length is set."""
    steps: int | None = field(default=None, metadata={"flag": "steps"})
    """Local steps of each worker, instead of epochs."""
    samples: int | None = field(default=None, metadata={"flag": "samples"})
    """Samples that all workers train together, instead of epochs."""
    seconds: float | None = field(default=None, metadata={"flag": "seconds"})
    """Seconds of training, instead of epochs."""
    bytes: str | None = field(default=None, metadata={"flag": "bytes"})
    """Bytes that all workers and the center send together in exchanges, as 500MB or 2GB, instead of
    epochs."""
    stop_at_accuracy: float | None = field(default=None, metadata={"flag": "stop-at-accuracy"})
    """Test accuracy of the center, in (0, 1], that ends the run early."""
    patience: int | None = field(default=None, metadata={"flag": "patience"})
    """Evaluations in a row without a better center that end the run early."""
    batch_size: int = field(default=64, metadata={"flag": "batch-size"})
    """Samples in one local step of one worker."""
    microbatches: int = 1
    """Microbatches per batch; they pass through the model one after the other, to save memory."""
    precision: str = field(default="float32", metadata={"flag": "precision"})
    """Precision of forward and backward: float32, or bf16 where torch's autocast considers it safe;
    weights and gradients are float32 in both."""
    label_smoothing: float = 0.0
    """Share of each label, in [0, 1), that training spreads over all classes."""
    seed: int = field(default=0, metadata={"flag": "seed"})
    """Seed of the initial weights, the order of the samples and all other random numbers."""
    deterministic: bool = field(default=False, metadata={"flag": "deterministic"})
    """Refuse settings that do not give the same bits for the same seed and the same workers. No
    straggler is left out: the number of workers is fixed."""

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
        smoothing, accuracy = self.label_smoothing, self.stop_at_accuracy
        require(0 <= smoothing < 1, "training.label_smoothing", "in [0, 1)", smoothing)
        if self.seconds is not None:
            require_positive("training.seconds", self.seconds)
        lengths = ("epochs", "steps", "samples", "seconds", "bytes")
        assert self.num_bytes is None or self.num_bytes > 0  # raises if it is no size
        given = [name for name in lengths if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"training.{given[0]}", f"and training.{given[1]} exclude each other; give one"
            )
        is_share = accuracy is None or 0 < accuracy <= 1
        require(is_share, "training.stop_at_accuracy", "in (0, 1], as 0.95 is", accuracy)
        for name in ("seconds", "stop_at_accuracy", "patience"):
            if self.deterministic and getattr(self, name) is not None:
                raise ConfigError(
                    f"training.{name}", "depends on the clock; unset it with --deterministic"
                )
        require(0 <= self.seed < 2**63, "training.seed", "in [0, 2^63)", self.seed)

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train for, or None if steps, samples, seconds or bytes set the length."""
        others = (self.steps, self.samples, self.seconds, self.bytes)
        if any(length is not None for length in others):
            return None
        return 20 if self.epochs is None else self.epochs

    @property
    def num_bytes(self) -> int | None:
        """The number in ``bytes``, or None if it does not set the length."""
        return None if self.bytes is None else bytes_of("training.bytes", self.bytes)
