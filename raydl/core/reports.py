"""Reports of a worker, and the aggregator that sums up exchanges in records."""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raydl.core.autotune import Choice
from raydl.core.compression import LostResidual
from raydl.core.exchange import Header
from raydl.core.progress import Progress
from raydl.core.scores import Evaluated
from raydl.data.loader import LeftOut
from raydl.errors import NonFiniteLossError

_RECORD_EVERY_S = 0.2
_NONE_LEFT_OUT = LeftOut()


@dataclass(frozen=True)
class AllreduceReport:
    """Algorithm, predicted and measured time of a group's largest all-reduce."""

    generation: int
    algorithm: str
    num_bytes: int
    predicted_s: float | None
    """From the latency and bandwidth measured at the start of the generation; None for torch's own
    all-reduce."""
    measured_s: float
    """Minimum over the newest 101 all-reduces of that size, to exclude waiting for late ranks."""
    tried: dict[str, float] = field(default_factory=dict)
    """Median seconds of the first sums by each algorithm; empty if there was no choice."""


class Losses:
    """Losses of a worker's local steps, copied from the device once per round."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, float, Tensor]] = []
        self._sum = self._count = 0.0
        self.first: float | None = None
        """The loss of the first local step of the run, if it was this worker's; else None."""

    def add(self, local_step: int, count: float, loss: Tensor) -> None:
        """Add the mean loss of a step's batch, and how much the batch counts."""
        self._unread.append((local_step, count, loss))

    def read(self, worker_id: str) -> None:
        """Copy the added losses from the device and sum them.

        Args:
            worker_id: id of the worker, for the error message.

        Raises:
            NonFiniteLossError: if a loss is NaN or infinite.
        """
        if not self._unread:
            return
        device = self._unread[0][2].device  # a task may return its loss on another one
        values = torch.stack([loss.to(device) for _, _, loss in self._unread]).tolist()  # one copy
        for (local_step, count, _), value in zip(self._unread, values, strict=True):
            if not math.isfinite(value):
                raise NonFiniteLossError(worker_id, local_step, value)
            if local_step == 0 and count:
                self.first = value
            self._sum += value * count
            self._count += count
        self._unread.clear()

    def pop_state(self, worker_id: str) -> dict[str, float]:
        """Read the losses; return the sums since the last call and reset them."""
        self.read(worker_id)
        state = self.state_dict()
        self._sum = self._count = 0.0
        return state

    def state_dict(self) -> dict[str, float]:
        """Return the sum of the losses that were read, and what their samples count."""
        return {"loss_sum": self._sum, "loss_samples": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self._sum, self._count = state["loss_sum"], state["loss_samples"]


class Outcome(enum.Enum):
    """Action after a round."""

    GO_ON = "go on"
    REGROUP = "regroup"
    LEFT = "left"
    """Only this worker leaves; the others go on."""
    BROKEN = "broken"
    """An exchange did not complete: a worker was lost or left out."""
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class EqualReplicas:
    """Two replicas that stay equal although they take local steps."""

    first: tuple[str, ...]
    """Its workers; more than one share a replica with ``method.group_size``."""
    second: tuple[str, ...]
    since_round: int

    def sentence(self, advice: str) -> str:
        """Return what was found, with what to change."""
        first, second = " and ".join(self.first), " and ".join(self.second)
        return (
            f"the replicas of {first} and of {second} have been equal since round "
            f"{self.since_round}: they train the same batches, so that one of them adds nothing; "
            f"{advice}"
        )


@dataclass(frozen=True)
class Record:
    """Averages over all workers since the previous record; one point of the curves."""

    progress: Progress
    num_workers: int
    lr: float
    exchange_bytes: int
    loss: float
    distance: float
    exchange_s: float
    staleness: float
    period: float
    """Mean number of local steps of a worker between two exchanges."""
    at_s: float
    """Time of the record, by the monotonic clock of the process that made it. The driver receives
    several records at once and converts the time to its own clock."""


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report to the controller."""

    worker_id: str
    round: int
    records: tuple[Record, ...]
    """New records since the last report, in methods in which every rank makes them."""
    kept: tuple[int, ...]
    """Rounds whose state this worker holds for a checkpoint."""
    time_parts: dict[str, float]
    generation: int = 0
    """Newest generation that the worker has entered."""
    local_step: int = 0
    step_s: float = 0.0
    """Seconds per local step in the newest round, without waiting."""
    waited_s: float = 0.0
    """Seconds waited for exchanges in the newest round."""
    round_s: float = 0.0
    """Duration of the newest round in seconds."""
    waiting_s: float = 0.0
    """Seconds that the worker has waited for an exchange until now; 0 while it computes."""
    idle_s: float = 0.0
    """Seconds since the worker last computed a gradient, for whatever reason; 0 while it does."""
    allreduce: AllreduceReport | None = None
    """All-reduce of the worker's group, if raydl chooses the algorithm."""
    scores: tuple[Evaluated, ...] = ()
    """New scores of the center, if the workers score it and go on."""
    num_scored: int | None = None
    """Test samples that the worker has scored in the present pause; None: it does not score."""
    choice: Choice | None = None
    """Exchange tuning that the workers chose."""
    first_loss: float | None = None
    """Loss of the worker's step 0, the first of the run; None: it has not taken that step."""
    equal_replicas: EqualReplicas | None = None
    """Two equal replicas that the workers have found."""
    left_out: LeftOut = _NONE_LEFT_OUT
    """Samples that the worker could not read."""
    residual: float = 0.0
    """L2 norm of what its compressed messages have left out so far."""
    lost_residuals: tuple[LostResidual, ...] = ()
    """Of that, what the worker has lost since the last report."""
    ignores: str | int | None = None
    """Name or place in a batch of labels of which some are -100, so that they did not count."""
    unfrozen: tuple[str, ...] = ()
    """Parameters that its model has unfrozen and that are not trained yet."""
    cpu_s: float = 0.0
    """CPU time of all threads of the process in seconds."""
    is_starting: bool = False
    """Whether the worker waits for processes that have just started to read its samples."""
    sent_s: float = 0.0
    """Time of this report, by the worker's monotonic clock."""


class RecordAggregator:
    """Sums up exchanges in records, one every 0.2 s at most.

    Args:
        clock: monotonic clock in seconds.
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
        """Add an exchange.

        Args:
            sums: sums of the headers of its messages.
            num_messages: number of messages.
            num_steps: local steps that their workers took for it, in total.
            staleness: exchanges of other workers since the last exchanges of these workers.
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
        """Close a record, unless the previous one is too recent.

        Without an exchange since the previous record, it repeats that one with the values given
        here.

        Args:
            progress: present progress of the run.
            num_workers: workers that train.
            lr: learning rate of the newest step.
            exchange_bytes: bytes of one exchange of one worker.
            at_once: whether to ignore the age of the previous record.
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
        if self._num_messages:
            sums, n = self._sums, self._num_messages
            record = Record(
                **now,
                loss=sums.loss_sum / sums.loss_samples if sums.loss_samples else math.nan,
                distance=math.sqrt(sums.distance / n),
                exchange_s=sums.waited_s / n,
                staleness=self._staleness / n,
                period=self._num_steps / n,
            )
            self._restart()
        elif self._last is not None:
            record = replace(self._last, **now)
        else:
            return
        self._last = record
        with self._lock:
            self._records.append(record)

    @property
    def is_due(self) -> bool:
        """Whether there are exchanges to record, and the previous record is old enough."""
        return self._num_messages > 0 and self._clock() - self._since >= _RECORD_EVERY_S

    def pop_records(self) -> tuple[Record, ...]:
        """Return the records since the last call."""
        with self._lock:
            records, self._records = self._records, []
        return tuple(records)
