"""What a worker tells of its training, and the books in which exchanges are added up."""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from raydl.replica import Header

_RECORD_EVERY_S = 0.2


@dataclass(frozen=True)
class AllreduceReport:
    """How the largest messages of a group are summed, and how long that was thought to take."""

    generation: int
    algorithm: str
    num_bytes: int
    predicted_s: float
    """By the latency and bandwidth measured at the start of the generation."""
    measured_s: float
    """Least of the newest 101 sums of that size: without waiting for ranks that came late."""


class Outcome(enum.Enum):
    """What follows a round."""

    GO_ON = "go on"
    REGROUP = "regroup"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class Record:
    """What happened since the record before, over all workers; one point of the curves."""

    round: int
    generation: int
    num_workers: int
    epoch: float
    num_samples: int
    local_step: int
    lr: float
    loss: float
    distance: float
    exchange_s: float
    exchange_bytes: int
    staleness: float


@dataclass(frozen=True)
class WorkerReport:
    """What a worker tells the controller when asked."""

    worker_id: str
    round: int
    records: tuple[Record, ...]
    """New since the report before; of the methods in which every rank keeps the books."""
    kept: tuple[int, ...]
    """Rounds whose state this worker holds for a checkpoint."""
    time_parts: dict[str, float]
    allreduce: AllreduceReport | None = None
    """How this worker's group sums, where it chooses for itself."""


@dataclass(frozen=True)
class Standing:
    """Where the run stands at a record."""

    round: int
    generation: int
    num_workers: int
    epoch: float
    num_samples: int
    local_step: int
    lr: float
    exchange_bytes: int


class Books:
    """Adds up exchanges into records, one every 0.2 s at most.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: list[Record] = []
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._since = self._clock()
        self._sums = Header()
        self._staleness = 0.0
        self._num_messages = 0

    def add(self, sums: Header, *, num_messages: int, staleness: float = 0.0) -> None:
        """Enter an exchange: the sum of the headers of its messages."""
        self._sums = self._sums + sums
        self._num_messages += num_messages
        self._staleness += staleness

    def record(self, standing: Standing, *, at_once: bool = False) -> None:
        """Close a record, unless the last one is too young; ``at_once``: whatever its age."""
        if self._num_messages == 0 or not (at_once or self._is_due()):
            return
        sums, n = self._sums, self._num_messages
        record = Record(
            **vars(standing),
            loss=sums.loss_sum / sums.loss_samples if sums.loss_samples else math.nan,
            distance=math.sqrt(sums.distance / n),
            exchange_s=sums.waited_s / n,
            staleness=self._staleness / n,
        )
        with self._lock:
            self._records.append(record)
        self._restart()

    def _is_due(self) -> bool:
        return self._clock() - self._since >= _RECORD_EVERY_S

    def take(self) -> tuple[Record, ...]:
        """Hand over the records that nobody has taken yet."""
        with self._lock:
            records, self._records = self._records, []
        return tuple(records)
