"""Settings of the workers: their number, elasticity and exchanges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from raydl.config.checks import require, require_positive
from raydl.errors import UnknownNameError

ALLREDUCES = ("library", "auto", "ring", "recursive-doubling", "two-level")
"""All-reduces of the synchronous methods."""
ON_WORKER_ERROR = ("auto", "stop", "replace")
"""Policies for an error in one worker."""


_LEAST_RESOURCE = 0.0001
"""The smallest amount of a resource that Ray counts."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """Number of workers and their resources, named as in Ray Train."""

    num_workers: int | tuple[int, int] = field(default=2, metadata={"flag": "workers"})
    """Workers: N, or MIN:MAX to train with as many as there is room for, at least MIN and at most
    MAX; 0: train in this process, without Ray."""
    cpus_per_worker: float = field(default=1.0, metadata={"flag": "cpus-per-worker"})
    """CPUs that each worker reserves; also its number of compute threads, at least one."""
    gpus_per_worker: float = field(default=0.0, metadata={"flag": "gpus-per-worker"})
    """GPUs that each worker reserves; above 0, it computes on CUDA."""
    spares: int = field(default=0, metadata={"flag": "spares"})
    """Hot spares: further workers that have started, hold model and data, and train only when a
    place becomes free. They reserve no CPU, but GPUs as every worker does."""
    use_gpu: bool = False
    """Shorthand for one GPU per worker."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Further Ray resources that each worker reserves, by name."""
    fork_server: bool = True
    """Start workers, center and evaluator as forks of one process on each node, which has imported
    Ray and torch; on Linux, with a version of Ray that raydl's tests have seen, unless the job's
    runtime environment chooses the Python of the workers."""
    start_timeout_s: float = 600.0
    """Longest wait for MIN workers, at the start or after losses, and for a started worker to be
    ready, in seconds."""

    def __post_init__(self) -> None:
        given: Any = self.num_workers
        if isinstance(given, list):
            given = tuple(given)
            object.__setattr__(self, "num_workers", given)
        bounds = given if isinstance(given, tuple) else (given, given)
        is_whole = len(bounds) == 2 and all(isinstance(bound, int) for bound in bounds)
        require(is_whole, "scaling.num_workers", "a whole number, or two of them", given)
        low, high = bounds
        require(low >= 0, "scaling.num_workers", "0 or more", low)
        require(low <= high, "scaling.num_workers", "MIN:MAX with MIN <= MAX", f"{low}:{high}")
        require(
            low > 0 or high == 0, "scaling.num_workers", "0, or MIN:MAX from 1 up", f"{low}:{high}"
        )
        require(isinstance(self.spares, int), "scaling.spares", "a whole number", self.spares)
        require(self.spares >= 0, "scaling.spares", "0 or more", self.spares)
        require(self.spares == 0 or high > 0, "scaling.spares", "0 without workers", self.spares)
        for name in ("cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"scaling.{name}", "0 or more", value)
        self._check_resources()
        require_positive(
            "scaling.start_timeout_s", self.start_timeout_s, "a positive number of seconds"
        )

    def _check_resources(self) -> None:
        """Refuse what Ray would refuse once processes of the run have started."""
        for name, value in self.resources().items():
            setting = f"scaling.resources_per_worker {name}"
            is_countable = math.isfinite(value) and value >= _LEAST_RESOURCE
            require(is_countable, setting, f"0, or {_LEAST_RESOURCE:g} or more", value)
            is_memory = name in ("memory", "object_store_memory")
            require(not is_memory, setting, "left out: a worker cannot reserve it", value)
        gpus = self.resources().get("GPU", 0.0)
        is_whole = gpus <= 1 or gpus == int(gpus)
        require(is_whole, "scaling.gpus_per_worker", "at most 1, or a whole number", gpus)

    @property
    def min_workers(self) -> int:
        """Fewest workers that train."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Most workers that train."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def device(self) -> str:
        """Device that workers compute on: ``cpu`` or ``cuda``."""
        return "cuda" if self.resources().get("GPU") else "cpu"

    @property
    def num_threads(self) -> int:
        """Compute threads of one worker."""
        return max(1, int(self.resources().get("CPU", 0)))

    def resources(self) -> dict[str, float]:
        """Return the resources that one worker reserves, by Ray's names."""
        gpus = self.gpus_per_worker or float(self.use_gpu)
        own = {"CPU": self.cpus_per_worker, "GPU": gpus}
        return {k: v for k, v in {**own, **self.resources_per_worker}.items() if v}

    def wanted(self) -> str:
        """Return the number of workers as the user writes it: ``2`` or ``2:8``."""
        low, high = self.min_workers, self.max_workers
        return str(low) if low == high else f"{low}:{high}"


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Lost workers, stragglers and errors of workers."""

    lease_s: float = 10.0
    """Seconds without an answer after which a worker or the center counts as lost."""
    max_step_s: float = 300.0
    """Longest local step of a worker that answers but uses no CPU, as in a read that stalls, in
    seconds. After that, or after 20 of its usual steps if these take longer, it is replaced."""
    leave_out_slow: bool = True
    """Leave out a straggler, a worker for which the others wait much longer than in recent rounds,
    until it has caught up (synchronous methods). A run with a fixed number of workers, as with
    --deterministic, waits for it instead."""
    quorum: float = 0.5
    """Smallest share of the workers, in (0, 1], that must stay when stragglers are left out."""
    max_restarts: int = 20
    """Replacements of lost workers in a row, without progress of the training in between, before
    the run fails."""
    on_worker_error: str = field(default="auto", metadata={"flag": "on-worker-error"})
    """Policy for an error in one worker. auto: replace a worker whose machine failed (memory,
    device, disk, network), and stop the run after a checkpoint if your own code failed; stop: stop
    after any error; replace: replace the worker after any error."""
    max_worker_errors: int = 3
    """Errors within an hour that only replace a worker. More errors of one worker and its
    replacements stop the run after a checkpoint; more errors on one node exclude the node."""
    max_rollbacks: int = 3
    """Rollbacks to the center in one epoch, of replicas with a loss, weights or gradients that are
    not finite; one more stops the run after a checkpoint. An epoch that is trained again after a
    rollback has no budget of its own."""
    max_busy_s: float = 600.0
    """Longest wait for a process that does not answer but uses its CPU, or that has not answered
    since its start, in seconds."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "max_step_s", "max_busy_s"):
            value = getattr(self, name)
            require_positive(f"elastic.{name}", value, "a positive number of seconds")
        if self.on_worker_error not in ON_WORKER_ERROR:
            raise UnknownNameError("elastic.on_worker_error", self.on_worker_error, ON_WORKER_ERROR)
        for name in ("max_worker_errors", "max_rollbacks"):
            require(getattr(self, name) >= 0, f"elastic.{name}", "0 or more", getattr(self, name))
        require(0 < self.quorum <= 1, "elastic.quorum", "in (0, 1]", self.quorum)
        require(self.max_restarts >= 1, "elastic.max_restarts", "1 or more", self.max_restarts)


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Exchanges between replicas and center."""

    timeout_s: float = 60.0
    """Longest wait for the other workers in one exchange, in seconds."""
    fragments: int | None = field(default=None, metadata={"flag": "fragments"})
    """Fragments of the parameters, exchanged in turn at different steps of a period; unset: the
    method's default, mostly 1."""
    delay: int | None = field(default=None, metadata={"flag": "exchange-delay"})
    """Local steps from the start of an exchange to its effect; 0 hides it behind one gradient;
    unset: the method's default, mostly 0."""
    overlap: bool | None = None
    """Send weights while the gradient is computed (EASGD3); unset: the method's default."""
    packed: bool = True
    """Send one message for all parameters instead of one per layer (synchronous methods)."""
    resident: bool = True
    """Keep message and center on the device (EASGD2), not in host memory (synchronous methods)."""
    allreduce: str = field(default="library", metadata={"flag": "allreduce"})
    """All-reduce of the synchronous methods: library (torch's own), ring, recursive-doubling,
    two-level, or auto (the fastest in the first exchanges, which try them in turn)."""
    compression: str | None = field(default=None, metadata={"flag": "compression"})
    """Codec of the messages: none, bf16, int8, e3m0, sign, topk:SHARE as in topk:0.01,
    chunk-topk:K[/CHUNK] as in chunk-topk:64/4096, or module:Class for one of your own; unset: the
    method's default, mostly none."""
    center_shards: int = field(default=1, metadata={"flag": "center-shards"})
    """Shards of the center, one actor each (methods that are not synchronous)."""

    def __post_init__(self) -> None:
        if self.allreduce not in ALLREDUCES:
            raise UnknownNameError("exchange.allreduce", self.allreduce, ALLREDUCES)
        for name, least in (("fragments", 1), ("delay", 0), ("center_shards", 1)):
            value = getattr(self, name)
            is_valid = value is None or value >= least  # None: the method decides
            require(is_valid, f"exchange.{name}", f"{least} or more", value)
        require_positive("exchange.timeout_s", self.timeout_s, "a positive number of seconds")
