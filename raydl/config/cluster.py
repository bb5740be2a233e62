"""The workers: how many, how they come and go, how they exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raydl.config.checks import is_positive, require
from raydl.errors import UnknownNameError

ALLREDUCES = ("library", "auto", "ring", "recursive-doubling", "two-level")
"""The ways to sum over all workers."""
ON_WORKER_ERROR = ("auto", "stop", "replace")
"""The policies for an error in one worker."""


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
    """How long the run waits for MIN workers, at its start or after losses, in seconds."""

    def __post_init__(self) -> None:
        low, high = self.min_workers, self.max_workers
        for bound in (low, high):
            is_whole = isinstance(bound, int)
            require(is_whole, "scaling.num_workers", "a whole number, or two of them", bound)
        require(low >= 0, "scaling.num_workers", "0 or more", low)
        require(low <= high, "scaling.num_workers", "MIN:MAX with MIN <= MAX", f"{low}:{high}")
        require(
            low > 0 or high == 0, "scaling.num_workers", "0, or MIN:MAX from 1 up", f"{low}:{high}"
        )
        for name in ("cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"scaling.{name}", "0 or more", value)
        require(
            is_positive(self.start_timeout_s),
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
        """The device that workers compute on: ``cpu`` or ``cuda``."""
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
class ElasticConfig:
    """How workers come and go."""

    lease_s: float = 10.0
    """A worker, or the center, that does not answer for so long is lost, in seconds."""
    leave_out_slow: bool = True
    """In synchronous methods, a worker that is late beyond what recent rounds show is left out
    until it has caught up."""
    quorum: float = 0.5
    """Least share of the workers, in (0, 1], that must stay when slow ones are left out."""
    max_restarts: int = 20
    """Replacements of lost workers in a row, without any progress of the training between them,
    before the run gives up."""
    on_worker_error: str = field(default="auto", metadata={"flag": "on-worker-error"})
    """The policy for an error in one worker. auto: a worker whose machine failed (memory, device,
    disk, network) is replaced, and an error in your own code stops the run after a checkpoint;
    stop: any error does; replace: the worker is replaced after any error."""
    max_worker_errors: int = 3
    """Errors within an hour that replace a worker: more for one worker and its replacements stop
    the run after a checkpoint; more on one node keep further workers away from it."""
    max_rollbacks: int = 3
    """How often in one epoch a replica with a loss, weights or gradients that are not finite is
    rolled back to the center; one more ends the run after a checkpoint."""
    max_busy_s: float = 600.0
    """How long a process is waited for that does not answer but uses its CPU, or that has not
    answered since it began, in seconds."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "max_busy_s"):
            value = getattr(self, name)
            require(is_positive(value), f"elastic.{name}", "a positive number of seconds", value)
        if self.on_worker_error not in ON_WORKER_ERROR:
            raise UnknownNameError("elastic.on_worker_error", self.on_worker_error, ON_WORKER_ERROR)
        for name in ("max_worker_errors", "max_rollbacks"):
            require(getattr(self, name) >= 0, f"elastic.{name}", "0 or more", getattr(self, name))
        require(0 < self.quorum <= 1, "elastic.quorum", "in (0, 1]", self.quorum)
        require(self.max_restarts >= 1, "elastic.max_restarts", "1 or more", self.max_restarts)


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
            require(value >= least, f"exchange.{name}", f"{least} or more", value)
        require(
            is_positive(self.timeout_s),
            "exchange.timeout_s",
            "a positive number of seconds",
            self.timeout_s,
        )
