"""The worker group that the controller commands: workers, the center and an evaluator.

The controller sees a worker group through this protocol alone.
``raydl.ray_backend.worker_group.RayWorkerGroup`` implements it with Ray actors, and
``raydl.run.local_worker_group.LocalWorkerGroup`` in this process, for a debugger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from raydl.core.center import Snapshot
from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.saved_state import DistantState, SavedState
from raydl.errors import NonFiniteError
from raydl.faults import Fault


@dataclass(frozen=True)
class WorkerReady:
    """A worker is up and could train."""

    worker_id: str
    node: str = ""
    """Node that it runs on."""


@dataclass(frozen=True)
class Reported:
    """A worker answered."""

    report: WorkerReport


@dataclass(frozen=True)
class RunEnded:
    """A worker left its loop, by a decision all ranks took."""

    worker_id: str
    outcome: Outcome
    round: int
    """Of its copy of the center; -1: it has none."""
    generation: int = 0
    """The one that it entered."""
    problem: str = ""
    """Message of the failed exchange."""
    num_changes: int = 0
    """Of its copy of the ledger, where it has one: of two copies of a round one may know more."""
    copy_generation: int = 0
    """The generation that made its copy of the center; 0: the center itself did."""
    ledger_round: int | None = None
    """Up to which it knows the ledger; None: that of its copy of the center."""
    error: NonFiniteError | None = None
    """Its replica diverged, and was rolled back to the center."""


@dataclass(frozen=True)
class Draining:
    """A worker's node will go soon."""

    worker_id: str


@dataclass(frozen=True)
class Changed:
    """The center knows the newest membership; votes for it count from now on."""


@dataclass(frozen=True)
class HandedIn:
    """The state of a worker that leaves is kept: the worker itself may go."""

    worker_id: str
    state: SavedState


@dataclass(frozen=True)
class TookOver:
    """A worker that is new has what it was handed over, and starts as that replica."""

    worker_id: str


@dataclass(frozen=True)
class GaveUp:
    """Something that was asked for will not come, since a process went away meanwhile."""

    task: str
    """``checkpoint``, ``evaluation``, ``publication``, ``state of w3``, ``saved state of w3``,
    ``handover to w4``."""
    reason: str


@dataclass(frozen=True)
class Failed:
    """A process raised. Of a worker in its loop a ``RunEnded`` follows, unless it is lost."""

    name: str
    """``w3`` for a worker, ``center``, or ``evaluator``."""
    error: Exception
    """An ``InfrastructureError`` where its machine failed; else what the code there raised."""


@dataclass(frozen=True)
class Lost:
    """A process went away, or does not answer any more. What is left of it was ended."""

    name: str
    reason: str


@dataclass(frozen=True)
class Busy:
    """A process does not answer, but computes: it is waited for. Told once."""

    name: str
    silent_s: float


@dataclass(frozen=True)
class Published:
    """The center holds the snapshots of these rounds."""

    rounds: tuple[int, ...]
    records: tuple[Record, ...] = ()
    """New points of the curves, where the center keeps the books."""
    faults: tuple[tuple[int, str], ...] = ()
    """(Number in the plan, worker): the faults that workers are about to inflict on themselves."""
    is_complete: bool = True
    """Whether nothing is left to train, where the center keeps the books."""
    num_changes: int = 0
    """Of the ledger in the newest snapshot."""
    told_s: float = 0.0
    """When this was told, by the monotonic clock of the center's process."""
    process: str = ""
    """Which process that is: a center that is started again has another clock."""
    generation: int = 0
    """The newest that has begun there; 0: none has, or members come and go one by one."""
    newest_generation: int = 0
    """The one that made the newest snapshot; 0: the center itself did."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Messages that this process refused because they came too late: how many, by kind."""


@dataclass(frozen=True)
class Refused:
    """How many late messages a shard of the center, away from home, has refused so far."""

    process: str
    """Which process; a shard that is started again is another."""
    num_messages: int


@dataclass(frozen=True)
class Evaluated:
    """The center of a round was scored on the test set."""

    progress: Progress
    """Of the run when the snapshot was taken."""
    metrics: dict[str, float]
    predicted: tuple[int, ...] = ()
    """The class of each example; empty: the task knows no classes."""
    weights: np.ndarray | None = None
    """Of the center, [num_parameters], where the best is kept and this may be it."""
    buffers: np.ndarray | None = None
    """[num_buffers], beside the weights."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the snapshot, beside the weights."""

    def without_center(self) -> Evaluated:
        """Return the score alone: it may be remembered, and takes no memory to speak of."""
        return dataclasses.replace(self, weights=None, buffers=None, non_trainable={})


@dataclass(frozen=True)
class Scoring:
    """The evaluator is at work."""

    num_samples: int
    """Of the test set, that it has scored of the center under way."""


@dataclass(frozen=True)
class Collected:
    """All states of a round are at hand: the workers hold theirs until they are written."""

    snapshot: Snapshot
    workers: dict[str, dict[str, Any] | DistantState]
    """By worker, in the order of the ranks: what it holds, or how it gets to its file."""
    is_last: bool = False
    """The run is finished with it: its center is what was trained."""


@dataclass(frozen=True)
class StatesLost:
    """A worker has gone whose state of a collected round was not written yet."""

    round: int
    reason: str


Event = (
    WorkerReady
    | Reported
    | RunEnded
    | Draining
    | Changed
    | HandedIn
    | TookOver
    | GaveUp
    | Failed
    | Lost
    | Busy
    | Published
    | Refused
    | Evaluated
    | Scoring
    | Collected
    | StatesLost
)


class WorkerGroup(Protocol):
    """The processes of a run. No call waits; what they lead to comes as events."""

    def start_center(self, snapshot: Snapshot) -> None:
        """Start the center with a first snapshot."""
        ...

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Ask for one more worker; it starts when the cluster has room.

        Args:
            worker_id: a new one.
            own_state: what it goes on with from a checkpoint; it is ready once it has that.
        """
        ...

    def end(self, worker_id: str) -> None:
        """End a worker's process, or take back that it was asked for."""
        ...

    def avoid(self, node: str) -> bool:
        """Start no further worker on a node; return False, and do nothing, if there is no other."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened, after ``timeout_s`` seconds at the latest."""
        ...

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Let the members train from the snapshot of that round on, all in a new generation.

        Args:
            membership: who trains.
            round: one that the center holds.
            own_states: by worker, the state that it was asked for with or handed over, and has by
                now; one that is absent starts at the center or goes on with what it has in memory.
        """
        ...

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Let workers join and leave while the others train on. Methods with messages."""
        ...

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange. Methods with messages."""
        ...

    def abandon(self, generation: int) -> None:
        """Let the workers of a generation leave at once, out of any exchange."""
        ...

    def vote(self, generation: int, **votes: float) -> None:
        """Let the workers of a generation cast votes; see ``raydl.core.exchange.Header``."""
        ...

    def publish(self, worker_id: str) -> None:
        """Let a worker that has left its loop hand its copy of the center to the center."""
        ...

    def rebuild_center(self, worker_id: str | None) -> str:
        """Start the center anew: from a worker's copy, else from the newest checkpoint.

        Returns:
            What became of the state of its optimizer, which no worker has; empty: it has none, or
            the checkpoint has it.

        The score of the center that was, if one is under way, does not come.
        """
        ...

    def hand_in(self, worker_id: str) -> None:
        """Keep the state of a worker that has left its loop for good, in the run's storage."""
        ...

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Let a worker that has not trained yet take over what another one handed in."""
        ...

    def forget(self, state: SavedState) -> None:
        """Delete what a worker handed in: it is where it is needed, or nobody will need it."""
        ...

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on the center."""
        ...

    def evaluate(self, round: int) -> None:
        """Score the center of that round, or of a newer one."""
        ...

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Gather the center of that round, and let the workers hold the states kept then."""
        ...

    def waiting_for(self) -> str:
        """Return what workers that are not up need, and what there is."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
