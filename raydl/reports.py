"""What a worker tells of its training, and the books it keeps until somebody asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raydl.replica import Header


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


@dataclass(frozen=True)
class WorkerReport:
    """What a worker tells the controller when asked."""

    worker_id: str
    round: int
    records: tuple[Record, ...]
    """New since the report before."""
    kept: tuple[int, ...]
    """Rounds whose state this worker holds for a checkpoint."""
    time_parts: dict[str, float]


class Books:
    """What a worker has seen since its last record, and what it has not reported yet."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.round_s = 0.0
        self.restart(0.0, 0.0)

    def restart(self, now: float, waited_s: float) -> None:
        """Begin a new record, at a time and with the seconds waited so far."""
        self.recorded_at = now
        self.waited_s = waited_s
        self.num_rounds = 0
        self.loss_sum = self.loss_samples = 0.0

    def add(self, sums: Header) -> None:
        """Enter a round, over all workers."""
        self.num_rounds += 1
        self.loss_sum += sums.loss_sum
        self.loss_samples += sums.loss_samples

    def mean_loss(self) -> float:
        """Return the mean loss since the last record, or NaN without samples."""
        return self.loss_sum / self.loss_samples if self.loss_samples else math.nan
