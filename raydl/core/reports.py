"""The reports of a worker, and the aggregator that adds up exchanges to records."""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from raydl.core.autotune import Choice
from raydl.core.exchange import Header
from raydl.core.progress import Progress
from raydl.data.loader import LeftOut
from raydl.errors import NonFiniteLossError

_RECORD_EVERY_S = 0.2
_NONE_LEFT_OUT = LeftOut()


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


class Losses:
    """The losses of a worker's local steps, read off the device once per round."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, int, Tensor]] = []
        self._sum = self._num_samples = 0.0

    def add(self, local_step: int, num_samples: int, loss: Tensor) -> None:
        """Note the mean loss of a step's samples."""
        self._unread.append((local_step, num_samples, loss))

    def read(self, worker_id: str) -> None:
        """Read what was noted.

        Args:
            worker_id: whose losses they are, for the error.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite.
        """
        for local_step, num_samples, loss in self._unread:
            value = float(loss)
            if not math.isfinite(value):
                raise NonFiniteLossError(worker_id, local_step, value)
            self._sum += value * num_samples
            self._num_samples += num_samples
        self._unread.clear()

    def pop_state(self, worker_id: str) -> dict[str, float]:
        """Read, and hand over what came since the last time."""
        self.read(worker_id)
        taken = self.state_dict()
        self._sum = self._num_samples = 0.0
        return taken

    def state_dict(self) -> dict[str, float]:
        """Return what was read and not taken: the sum of the losses, the samples behind it."""
        return {"loss_sum": self._sum, "loss_samples": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._sum, self._num_samples = state["loss_sum"], state["loss_samples"]


class Outcome(enum.Enum):
    """Next action after a round."""

    GO_ON = "go on"
    REGROUP = "regroup"
    LEFT = "left"
    """This worker alone leaves; the others go on."""
    BROKEN = "broken"
    """An exchange did not complete: somebody was lost, or left out."""
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class Record:
    """Sums over all workers since the record before; one point of the curves."""

    progress: Progress
    num_workers: int
    lr: float
    exchange_bytes: int
    loss: float
    distance: float
    exchange_s: float
    staleness: float
    period: float
    """Local steps of a worker from one exchange to its next, mean."""
    at_s: float
    """When it happened, by the monotonic clock of the process that recorded it; the driver, which
    hears of several at once, puts it on its own clock."""


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report to the controller."""

    worker_id: str
    round: int
    records: tuple[Record, ...]
    """New since the report before; of the methods in which every rank keeps the books."""
    kept: tuple[int, ...]
    """Rounds whose state this worker holds for a checkpoint."""
    time_parts: dict[str, float]
    generation: int = 0
    """The newest one that it has entered."""
    local_step: int = 0
    step_s: float = 0.0
    """Seconds per local step in the newest round, waiting not counted."""
    waited_s: float = 0.0
    """Seconds waited for exchanges in the newest round."""
    round_s: float = 0.0
    """Seconds that the newest round took."""
    waiting_s: float = 0.0
    """Seconds that the worker has been waiting for an exchange until now; 0: it computes."""
    allreduce: AllreduceReport | None = None
    """How this worker's group sums, where it chooses for itself."""
    choice: Choice | None = None
    """The exchange tuning that the workers chose."""
    left_out: LeftOut = _NONE_LEFT_OUT
    """Samples that it could not read."""
    cpu_s: float = 0.0
    """Seconds that all threads of its process have computed."""
    told_s: float = 0.0
    """When this was told, by the worker's monotonic clock."""


class RecordAggregator:
    """Adds up exchanges into records, one every 0.2 s at most.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: list[Record] = []
        self._last: Record | None = None
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._since = self._clock()
        self._sums = Header()
        self._staleness = 0.0
        self._num_messages = self._num_steps = 0

    def add(
        self, sums: Header, *, num_messages: int, num_steps: int, staleness: float = 0.0
    ) -> None:
        """Enter an exchange.

        Args:
            sums: of the headers of its messages.
            num_messages: how many they are.
            num_steps: local steps that all their workers took for it.
            staleness: exchanges of others since the workers' exchanges before.
        """
        self._sums = self._sums + sums
        self._num_messages += num_messages
        self._num_steps += num_steps
        self._staleness += staleness

    def record(
        self,
        progress: Progress,
        *,
        num_workers: int,
        lr: float,
        exchange_bytes: int,
        at_once: bool = False,
    ) -> None:
        """Close a record, unless the last one is too young.

        One without an exchange since the last one repeats that, but for the values given here.

        Args:
            progress: of the run, now.
            num_workers: workers that train.
            lr: learning rate of the newest step.
            exchange_bytes: bytes of one exchange of one worker.
            at_once: whatever the age of the last record.
        """
        if not (at_once or self.is_due):
            return
        now: dict[str, Any] = {
            "progress": progress,
            "num_workers": num_workers,
            "lr": lr,
            "exchange_bytes": exchange_bytes,
            "at_s": self._clock(),
        }
        if self._num_messages == 0:
            if self._last is not None:
                self._add(replace(self._last, **now))
            return
        sums, n = self._sums, self._num_messages
        record = Record(
            **now,
            loss=sums.loss_sum / sums.loss_samples if sums.loss_samples else math.nan,
            distance=math.sqrt(sums.distance / n),
            exchange_s=sums.waited_s / n,
            staleness=self._staleness / n,
            period=self._num_steps / n,
        )
        self._add(record)
        self._restart()

    def _add(self, record: Record) -> None:
        self._last = record
        with self._lock:
            self._records.append(record)

    @property
    def is_due(self) -> bool:
        """Whether there is something to record, and the last record is old enough."""
        return self._num_messages > 0 and self._clock() - self._since >= _RECORD_EVERY_S

    def pop_records(self) -> tuple[Record, ...]:
        """Hand over the records that nobody has taken yet."""
        with self._lock:
            records, self._records = self._records, []
        return tuple(records)
