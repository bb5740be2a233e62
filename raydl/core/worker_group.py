"""The protocol between the controller and a worker group: workers, the center, an evaluator.

``raydl.ray_backend.worker_group.RayWorkerGroup`` implements it with Ray actors,
``raydl.run.local_worker_group.LocalWorkerGroup`` within this process, for a debugger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raydl.core.center import Snapshot
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.saved_state import DistantState, SavedState
from raydl.core.scores import Evaluated
from raydl.errors import NonFiniteError
from raydl.faults import Fault


@dataclass(frozen=True)
class WorkerReady:
    """A worker has started and can train."""

    worker_id: str
    node: str = ""
    """Node of the worker."""


@dataclass(frozen=True)
class Reported:
    """A worker sent a report."""

    report: WorkerReport


@dataclass(frozen=True)
class RunEnded:
    """A worker left its training loop."""

    worker_id: str
    outcome: Outcome
    round: int
    """Round of its copy of the center, or -1 if it has none."""
    generation: int = 0
    """Generation that the worker was in."""
    problem: str = ""
    """Message of the failed exchange."""
    num_changes: int = 0
    """Changes of its copy of the ledger; of two copies of one round, one may have more."""
    copy_generation: int = 0
    """Generation that made its copy of the center; 0 if the center did."""
    ledger_round: int | None = None
    """Round of its copy of the ledger; None: the round of its copy of the center."""
    error: NonFiniteError | None = None
    """Set if its replica diverged and was rolled back to the center, or the center diverged."""
    has_bad_copy: bool = False
    """Whether its copy of the center has values that are not finite; an earlier copy is gone."""
    score: Evaluated | None = None
    """Score of the last center of the run, if the workers score it."""


@dataclass(frozen=True)
class Draining:
    """A worker's node will be removed soon."""

    worker_id: str
    left_s: float = 0.0
    """Seconds until then; 0: not known."""


@dataclass(frozen=True)
class Changed:
    """The center has received the newest membership; it counts votes for it from now on."""


@dataclass(frozen=True)
class HandedIn:
    """The state of a leaving worker is saved; its process may end."""

    worker_id: str
    state: SavedState


@dataclass(frozen=True)
class TookOver:
    """A new worker has loaded the state that was handed over to it."""

    worker_id: str


@dataclass(frozen=True)
class GaveUp:
    """A requested task failed."""

    task: str
    """``checkpoint``, ``evaluation`` or ``publication``; of a worker ``hand in``, ``hand over`` (of
    its state to the newcomer) or ``saved state`` (the one of the checkpoint)."""
    reason: str
    worker_id: str = ""
    """The worker, if it is a task of one."""


@dataclass(frozen=True)
class Failed:
    """A process raised an error. For a worker in its loop a ``RunEnded`` or ``Lost`` follows."""

    name: str
    """``w3`` for a worker, ``center``, or ``evaluator``."""
    error: Exception
    """An ``InfrastructureError`` if its machine failed, else the error of the code."""


@dataclass(frozen=True)
class Lost:
    """A process died or stopped answering, and has been killed."""

    name: str
    reason: str


@dataclass(frozen=True)
class Busy:
    """A process does not answer but uses CPU time, and is not lost yet. Reported once."""

    name: str
    silent_s: float


@dataclass(frozen=True)
class Published:
    """The center holds the snapshots of these rounds."""

    rounds: tuple[int, ...]
    records: tuple[Record, ...] = ()
    """New points of the curves, in methods in which the center makes them."""
    faults: tuple[tuple[int, str], ...] = ()
    """Faults that workers will now inflict on themselves: (number in the plan, worker id)."""
    is_complete: bool = True
    """Whether all samples are trained, in methods in which the center has the ledger."""
    num_changes: int = 0
    """Changes of the ledger in the newest snapshot."""
    sent_s: float = 0.0
    """Time of this report, by the monotonic clock of the center's process."""
    process: str = ""
    """Id of the center's process: a restarted center has another clock."""
    generation: int = 0
    """Newest generation that has begun; 0 if none has, or if members change one by one."""
    newest_generation: int = 0
    """Generation that made the newest snapshot; 0 if the center did."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of messages that this process refused because they were too late, by kind."""


@dataclass(frozen=True)
class Refused:
    """Late messages that a shard of the center, other than the home shard, has refused so far."""

    process: str
    """Id of the shard's process; a restarted shard has another."""
    num_messages: int


@dataclass(frozen=True)
class Scoring:
    """The evaluator reports its progress."""

    num_samples: int
    """Test samples that it has scored for the present evaluation."""


@dataclass(frozen=True)
class Collected:
    """All states of a round are available; workers hold theirs until they are written."""

    snapshot: Snapshot
    workers: dict[str, dict[str, Any] | DistantState]
    """State of each worker, or its handle in another process, in the order of the ranks."""
    is_last: bool = False
    """Whether this is the final state of a finished run."""
    unfrozen: tuple[str, ...] = ()
    """Parameters that the models have unfrozen, to be trained when the run resumes."""
    on_loss: Callable[[str], None] | None = None
    """Called with the reason, in any thread, if a worker was lost before its state was written. By
    then the others have released theirs, and may hold the same round again."""


@dataclass(frozen=True)
class StatesLost:
    """A worker was lost before its state of a collected round was written."""

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
    """The processes of a run. Calls do not wait; their results are events."""

    def start_center(self, snapshot: Snapshot) -> None:
        """Start the center with a first snapshot."""
        ...

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Request one more worker; it starts when the cluster has free resources.

        Args:
            worker_id: a new id.
            own_state: state from a checkpoint, which the worker loads before it is ready.
        """
        ...

    def request_spare(self, worker_id: str) -> None:
        """Request a hot spare: a worker that reserves no CPU, on a node of a worker.

        Args:
            worker_id: a new id.
        """
        ...

    def end(self, worker_id: str) -> None:
        """End a worker's process, or withdraw its request."""
        ...

    def avoid(self, node: str) -> bool:
        """Start no more workers on a node; return False without effect if there is no other."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them, after ``timeout_s`` seconds at the latest."""
        ...

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Form a generation whose members train from the snapshot of a round.

        Args:
            membership: the members.
            round: a round that the center holds.
            own_states: states that workers have loaded, from a checkpoint or a leaver, by worker
                id. Other workers start at the center or keep their replica in memory.
        """
        ...

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Let workers join and leave while the others train. For methods with messages."""
        ...

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange. For methods with messages."""
        ...

    def abandon(self, generation: int) -> None:
        """Let the workers of a generation leave at once, even during an exchange."""
        ...

    def vote(self, generation: int, **votes: float) -> None:
        """Let the workers of a generation cast votes; see ``raydl.core.exchange.Header``."""
        ...

    def publish(self, worker_id: str) -> None:
        """Let a worker that has left its loop send its copy of the center to the center."""
        ...

    def rebuild_center(self, worker_id: str | None) -> str:
        """Restart the center from a worker's copy, or without one from the newest checkpoint.

        An evaluation of the lost center in progress is dropped.

        Returns:
            A sentence about the state of the center's optimizer, which no worker has; empty if it
            has none, or if the checkpoint has it.
        """
        ...

    def hand_in(self, worker_id: str) -> None:
        """Save the state of a worker that has left its loop for good to the run's storage."""
        ...

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Let a worker that has not trained yet load the saved state of a leaver."""
        ...

    def forget(self, state: SavedState) -> None:
        """Delete a saved state that was loaded or is no longer needed."""
        ...

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on the center."""
        ...

    def evaluate(self, round: int) -> None:
        """Evaluate the center of a round, or of a newer one."""
        ...

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Collect the center of a round, and let the workers hold their states of that round."""
        ...

    def waiting_for(self) -> str:
        """Return the resources that pending workers need, and those of the cluster."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
