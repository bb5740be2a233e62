"""The settings of a run, as frozen dataclasses.

Each class checks its own fields; :class:`TrainConfig` checks what spans several. A field's
metadata may name the short flag it has on the command line (``{"flag": "beta"}``); every
other field is reached by its dotted name (``--exchange.timeout-s``).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from raydl.errors import ConfigError, UnknownNameError

_T = TypeVar("_T")

SCHEDULES = ("cosine", "linear", "constant")
"""The courses a learning rate can take."""

ALLREDUCES = ("library", "auto", "ring", "recursive-doubling", "two-level")
"""The ways to sum over all workers."""

WHO_MAY_TALK = ("sync", "async", "hogwild", "round_robin")
"""The schedules of exchanges: all at once; one at a time; no lock; in rank order."""


def _require(ok: bool, setting: str, rule: str, value: object) -> None:
    if not ok:
        raise ConfigError(setting, f"must be {rule}, got {value}")


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


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
        _require(_is_positive(self.beta), "method.beta", "a positive number", self.beta)
        _require(self.period is None or self.period >= 1, "method.period", "1 or more", self.period)
        _require(self.group_size >= 1, "method.group_size", "1 or more", self.group_size)
        if self.schedule is not None and self.schedule not in WHO_MAY_TALK:
            raise UnknownNameError("method.schedule", self.schedule, WHO_MAY_TALK)
        _require(
            self.outer_lr is None or _is_positive(self.outer_lr),
            "method.outer_lr",
            "a positive number",
            self.outer_lr,
        )
        _require(
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
        _require(
            self.lr is None or _is_positive(self.lr), "optimizer.lr", "a positive number", self.lr
        )
        _require(0 <= self.warmup < 1, "optimizer.warmup", "in [0, 1)", self.warmup)
        if self.schedule not in SCHEDULES:
            raise UnknownNameError("optimizer.schedule", self.schedule, SCHEDULES)
        _require(
            self.momentum is None or 0 <= self.momentum < 1,
            "optimizer.momentum",
            "in [0, 1)",
            self.momentum,
        )
        _require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            "optimizer.weight_decay",
            "0 or more",
            self.weight_decay,
        )
        _require(
            self.max_grad_norm is None or _is_positive(self.max_grad_norm),
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
            _require(value is None or value >= 1, f"training.{name}", "1 or more", value)
        _require(
            self.seconds is None or _is_positive(self.seconds),
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
        _require(0 <= self.seed < 2**63, "training.seed", "in [0, 2^63)", self.seed)

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train for, or None where steps, samples or seconds decide."""
        if not (self.steps is None and self.samples is None and self.seconds is None):
            return None
        return 20 if self.epochs is None else self.epochs


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many workers, and what each of them holds. The words are Ray Train's."""

    num_workers: int | tuple[int, int] = field(default=2, metadata={"flag": "workers"})
    """Workers: N, or MIN:MAX to start with MIN and take more; 0: in this process, without Ray."""
    cpus_per_worker: float = field(default=1.0, metadata={"flag": "cpus-per-worker"})
    """CPUs each worker reserves; it computes with as many threads, at least one."""
    gpus_per_worker: float = field(default=0.0, metadata={"flag": "gpus-per-worker"})
    """GPUs each worker reserves; above 0 it computes on CUDA."""
    use_gpu: bool = False
    """Short for one GPU per worker."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Further Ray resources each worker reserves, by name."""
    start_timeout_s: float = 600.0
    """How long the run waits for its first MIN workers, in seconds."""

    def __post_init__(self) -> None:
        low, high = self.min_workers, self.max_workers
        _require(low >= 0, "scaling.num_workers", "0 or more", low)
        _require(low <= high, "scaling.num_workers", "MIN:MAX with MIN <= MAX", f"{low}:{high}")
        _require(
            low > 0 or high == 0, "scaling.num_workers", "0, or MIN:MAX from 1 up", f"{low}:{high}"
        )
        for name in ("cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"scaling.{name}", "0 or more", value)
        _require(
            _is_positive(self.start_timeout_s),
            "scaling.start_timeout_s",
            "a positive number of seconds",
            self.start_timeout_s,
        )

    @property
    def min_workers(self) -> int:
        """The fewest workers that train."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The most workers that train."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def device(self) -> str:
        """What the workers compute on: ``cpu`` or ``cuda``."""
        return "cuda" if self.resources().get("GPU") else "cpu"

    @property
    def num_threads(self) -> int:
        """Compute threads of one worker."""
        return max(1, int(self.resources().get("CPU", 0)))

    def resources(self) -> dict[str, float]:
        """Return all that one worker reserves, by Ray's resource names."""
        gpus = self.gpus_per_worker or float(self.use_gpu)
        own = {"CPU": self.cpus_per_worker, "GPU": gpus}
        return {k: v for k, v in {**own, **self.resources_per_worker}.items() if v}

    def wanted(self) -> str:
        """Return the number of workers as the user writes it: ``2`` or ``2:8``."""
        low, high = self.min_workers, self.max_workers
        return str(low) if low == high else f"{low}:{high}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives."""

    run_dir: str | None = field(default=None, metadata={"flag": "run-dir"})
    """Folder of the run (config, events, checkpoints, result); unset: runs/METHOD-MODEL-DATE."""
    resume: bool = field(default=False, metadata={"flag": "resume"})
    """Go on from the newest checkpoint in the run's folder."""
    storage_path: str | None = field(default=None, metadata={"flag": "storage-path"})
    """Folder or URI (s3://, gs://, …) that keeps the run, below it NAME of runs/NAME."""
    progress: str = "auto"
    """What the terminal shows: auto, panel, plain or none."""

    def __post_init__(self) -> None:
        choices = ("auto", "panel", "plain", "none")
        _require(
            self.progress in choices, "run.progress", f"one of {', '.join(choices)}", self.progress
        )
        if self.resume and self.run_dir is None:
            raise ConfigError("run.resume", "needs run.run_dir: the run to go on with")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written. The last state of a run always is."""

    every_s: float | None = 60.0
    """Seconds from one checkpoint to the next; None: not by time."""
    every_epochs: int | None = None
    """Epochs from one checkpoint to the next; None: not by epochs."""
    keep: int = 2
    """How many checkpoints are kept; older ones are deleted."""

    def __post_init__(self) -> None:
        _require(
            self.every_s is None or _is_positive(self.every_s),
            "checkpoint.every_s",
            "a positive number of seconds",
            self.every_s,
        )
        _require(
            self.every_epochs is None or self.every_epochs >= 1,
            "checkpoint.every_epochs",
            "1 or more",
            self.every_epochs,
        )
        _require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the center is scored on the test set. No worker waits for it."""

    every_epochs: int = 1
    """Epochs from one evaluation to the next."""
    every_samples: int | None = None
    """Samples, by all workers, from one evaluation to the next, instead of epochs."""
    batch_size: int = 500
    """Samples in one evaluation step."""

    def __post_init__(self) -> None:
        _require(self.every_epochs >= 1, "evaluation.every_epochs", "1 or more", self.every_epochs)
        every = self.every_samples
        _require(every is None or every >= 1, "evaluation.every_samples", "1 or more", every)
        _require(self.batch_size >= 1, "evaluation.batch_size", "1 or more", self.batch_size)


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How replicas and center exchange."""

    timeout_s: float = 60.0
    """The longest wait for the other workers in one exchange, in seconds."""
    fragments: int = field(default=1, metadata={"flag": "fragments"})
    """Parts of the parameters that exchange at different steps of a period, in turn."""
    delay: int = field(default=0, metadata={"flag": "exchange-delay"})
    """Local steps from the start of an exchange to its effect; 0: hidden behind one gradient."""
    overlap: bool | None = None
    """Weights travel while the gradient is computed (EASGD3); unset: the method's own."""
    packed: bool = True
    """One message for all parameters, rather than one per layer. Synchronous methods."""
    resident: bool = True
    """Message and center stay on the device (EASGD2), not in host memory. Synchronous methods."""
    allreduce: str = field(default="library", metadata={"flag": "allreduce"})
    """How workers sum, in synchronous methods: library (torch's own), ring, recursive-doubling,
    two-level, or auto: what is predicted to be fastest on the network as it is measured."""
    compression: str = field(default="none", metadata={"flag": "compression"})
    """How messages are shortened: none, bf16, int8, or topk:SHARE, as in topk:0.01."""
    center_shards: int = field(default=1, metadata={"flag": "center-shards"})
    """Actors that the center is spread over, for the methods that are not synchronous."""

    def __post_init__(self) -> None:
        if self.allreduce not in ALLREDUCES:
            raise UnknownNameError("exchange.allreduce", self.allreduce, ALLREDUCES)
        for name, least in (("fragments", 1), ("delay", 0), ("center_shards", 1)):
            value = getattr(self, name)
            _require(value >= least, f"exchange.{name}", f"{least} or more", value)
        _require(
            _is_positive(self.timeout_s),
            "exchange.timeout_s",
            "a positive number of seconds",
            self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of one run."""

    data: str = "digits"
    """Training data: digits, synthetic, a path or a URI (Parquet, IDX, CIFAR-10, npz, folders)."""
    model: str = "lenet"
    """The network; `raydl models` lists them."""
    training: TrainingConfig = TrainingConfig()
    """How long, how large, from which seed."""
    method: MethodConfig = MethodConfig()
    """How the replicas meet the center."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The local step."""
    scaling: ScalingConfig = ScalingConfig()
    """How many workers."""
    run: RunConfig = RunConfig()
    """Where the run lives."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the center is scored."""
    exchange: ExchangeConfig = ExchangeConfig()
    """How replicas and center exchange."""


def to_dict(config: object) -> dict[str, Any]:
    """Return a configuration as nested plain values, ready for JSON."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return dataclasses.asdict(config)


def from_dict(cls: type[_T], values: dict[str, Any]) -> _T:
    """Build a configuration from what :func:`to_dict` returned, perhaps through JSON.

    Raises:
        ConfigError: a key is no setting of this version.
    """
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(key, f"is no setting of {cls.__name__}")
        if dataclasses.is_dataclass(hints[key]):
            value = from_dict(hints[key], value)
        elif isinstance(value, list):  # JSON has no tuples, and no setting is a list
            value = tuple(value)
        arguments[key] = value
    return cls(**arguments)
