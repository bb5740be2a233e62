"""What the controller commands: workers, the center and an evaluator, as one crew.

The controller sees a crew through this protocol alone. ``LocalCrew`` below plays it in this
process, for a debugger; :class:`raydl.on_ray.crew.RayCrew` plays it with Ray actors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from raydl.center import Snapshot, SnapshotShelf
from raydl.center_service import CenterService, make_shard
from raydl.data import Batches, Dataset, Normalizer
from raydl.exchange.local import LocalGroup, LocalPost
from raydl.faults import Fault
from raydl.flat import FlatModel
from raydl.job import Job
from raydl.membership import Membership
from raydl.reports import Outcome, Record, WorkerReport
from raydl.task import evaluate
from raydl.worker import Worker


@dataclass(frozen=True)
class WorkerReady:
    """A worker is up and could train."""

    worker_id: str
    node: str = ""
    """Where it runs."""


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
    """What the exchange said that did not complete."""
    num_changes: int = 0
    """Of its copy of the ledger, where it has one: of two copies of a round one may know more."""


@dataclass(frozen=True)
class Draining:
    """A worker's node will go soon."""

    worker_id: str


@dataclass(frozen=True)
class Changed:
    """The center knows the newest membership; votes for it count from now on."""


@dataclass(frozen=True)
class HandedIn:
    """The state of a worker that leaves is here."""

    worker_id: str
    state: dict[str, Any]


@dataclass(frozen=True)
class GaveUp:
    """Something that was asked for will not come, since a process went away meanwhile."""

    task: str
    """``checkpoint``, ``evaluation``, ``publication``, or ``state of w3``."""
    reason: str


@dataclass(frozen=True)
class Failed:
    """A process raised: the user's code, or a loss that is not finite."""

    name: str
    """``w3`` for a worker, ``center``, ``evaluator`` or ``checkpoint``."""
    error: Exception


@dataclass(frozen=True)
class Lost:
    """A process went away, or does not answer any more. What is left of it was ended."""

    name: str
    reason: str


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


@dataclass(frozen=True)
class Evaluated:
    """The center of a round was scored on the test set."""

    round: int
    epoch: int
    num_samples: int
    seconds: float
    """Seconds of training when the snapshot was taken."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Collected:
    """All states of a round are here."""

    snapshot: Snapshot
    workers: dict[str, dict[str, Any]]
    """By worker, in the order of the ranks."""


Event = (
    WorkerReady
    | Reported
    | RunEnded
    | Draining
    | Changed
    | HandedIn
    | GaveUp
    | Failed
    | Lost
    | Published
    | Evaluated
    | Collected
)


class Crew(Protocol):
    """The processes of a run. No call waits; what they lead to comes as events."""

    def open(self, snapshot: Snapshot) -> None:
        """Start the center with a first snapshot."""
        ...

    def ask(self, worker_id: str) -> None:
        """Ask for one more worker; it starts when the cluster has room."""
        ...

    def end(self, worker_id: str) -> None:
        """End a worker's process, or take back that it was asked for."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened, after ``timeout_s`` seconds at the latest."""
        ...

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Let the members train from the snapshot of that round on, all in a new generation.

        Args:
            membership: who trains.
            round: one that the center holds.
            own_states: from a checkpoint, by worker; one that is absent starts at the center
                or goes on with what it has in memory.
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
        """Let the workers of a generation cast votes; see :class:`raydl.talk.Header`."""
        ...

    def publish(self, worker_id: str) -> None:
        """Let a worker that has left its loop hand its copy of the center to the center."""
        ...

    def rebuild_center(self, worker_id: str | None) -> None:
        """Start the center anew: from a worker's copy, else from the newest checkpoint."""
        ...

    def hand_in(self, worker_id: str) -> None:
        """Gather the state of a worker that has left its loop."""
        ...

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on the center."""
        ...

    def evaluate(self, round: int) -> None:
        """Score the center of that round, or of a newer one."""
        ...

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Gather the states kept at that round."""
        ...

    def waiting_for(self) -> str:
        """Return what workers that are not up need, and what there is."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


def make_evaluator_model(job: Job) -> FlatModel:
    """Return a model to put snapshots into, for evaluation."""
    return FlatModel(job.task.build_model(job.shape), name=job.task.name)


def evaluate_snapshot(
    job: Job, flat: FlatModel, test: Batches, snapshot: Snapshot
) -> dict[str, float]:
    """Return the metrics of a snapshot on the test set."""
    flat.weights.copy_(torch.tensor(snapshot.weights))
    flat.buffers.copy_(torch.tensor(snapshot.buffers))
    return evaluate(
        job.task,
        flat.model,
        lambda start, stop: test.batch(np.arange(start, stop)),
        num_samples=test.num_samples,
        batch_size=job.config.evaluation.batch_size,
    )


def evaluated_of(snapshot: Snapshot, metrics: dict[str, float]) -> Evaluated:
    """Return the event that tells a snapshot's score."""
    return Evaluated(
        snapshot.round, snapshot.epoch, snapshot.num_samples, snapshot.seconds, metrics
    )


class LocalCrew:
    """One worker in this process: every :meth:`poll` runs one round of it.

    Args:
        job: what the worker does.
        dataset: training and test set.
    """

    def __init__(self, job: Job, dataset: Dataset) -> None:
        normalizer = Normalizer.of(dataset.train)
        self._job = job
        self._train = Batches(dataset.train, normalizer)
        self._test = Batches(dataset.test, normalizer)
        self._shelf = SnapshotShelf()
        self._events: list[Event] = []
        self._running = False

    def open(self, snapshot: Snapshot) -> None:
        """Build the worker."""
        torch.set_num_threads(self._job.config.scaling.num_threads)
        self._shelf.put(snapshot)
        # The evaluation model first: building it draws from the same generator.
        self._evaluator = make_evaluator_model(self._job)
        self._worker = Worker(self._job, "w0", batches=self._train, publish=self._shelf.put)
        self._service = None if self._job.method.is_sync else CenterService(self._job, snapshot)
        self._others = [
            make_shard(self._job, snapshot, index, None)
            for index in range(1, self._job.config.exchange.center_shards)
        ]

    def ask(self, worker_id: str) -> None:
        """Say that the one worker is ready."""
        assert worker_id == "w0"
        self._events.append(WorkerReady(worker_id))

    def end(self, worker_id: str) -> None:
        """Do nothing: the worker is this process."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Run one round, if the worker trains, and return what happened."""
        if self._running:
            self._run_round()
        records: tuple[Record, ...] = ()
        if self._service:
            for due in self._service.dispatcher.take_due():
                others = [shard.state() for shard in self._others]
                self._shelf.put(self._service.snapshot(due, others))
            records = self._service.dispatcher.take_records()
        self._events.append(
            Published(self._shelf.rounds(), records, num_changes=self._shelf.num_changes())
        )
        events, self._events = self._events, []
        return events

    def _run_round(self) -> None:
        outcome = self._worker.run_round()
        report = self._worker.report()
        self._events.append(Reported(report))
        if outcome is not Outcome.GO_ON:
            self._running = False
            self._events.append(RunEnded("w0", outcome, report.round, self._generation))

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Start to train."""
        road: Any = LocalGroup(1, timeout_s=1.0, generation=membership.generation).member(0)
        if self._service:
            self._service.open(membership)
            for shard in self._others:
                shard.open(membership)
            road = LocalPost([self._service, *self._others], self._service.dispatcher)
            self._events.append(Changed())
        self._worker.join(membership, road, self._snapshot(round), own_states.get("w0"))
        self._generation = membership.generation
        self._running = True

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Do nothing: nobody joins or leaves."""

    def dismiss(self, worker_id: str) -> None:
        """Do nothing: nobody leaves."""

    def abandon(self, generation: int) -> None:
        """Do nothing: no exchange can fail."""

    def publish(self, worker_id: str) -> None:
        """Put the worker's copy of the center on the shelf."""
        self._shelf.put(self._worker.center())

    def rebuild_center(self, worker_id: str | None) -> None:
        """Do nothing: the center is this process."""

    def hand_in(self, worker_id: str) -> None:
        """Do nothing: nobody leaves."""

    def inflict(self, fault: Fault) -> None:
        """Do nothing: the center is this process."""

    def vote(self, generation: int, **votes: float) -> None:
        """Hand the votes to who decides."""
        decider = self._service.dispatcher if self._service else self._worker
        decider.vote(generation, **votes)

    def evaluate(self, round: int) -> None:
        """Score the center at once."""
        snapshot = self._snapshot(round)
        metrics = evaluate_snapshot(self._job, self._evaluator, self._test, snapshot)
        self._events.append(evaluated_of(snapshot, metrics))

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Take the worker's kept state."""
        kept = self._worker.take_kept(round)
        self._events.append(Collected(self._snapshot(round), {"w0": kept}))

    def _snapshot(self, round: int) -> Snapshot:
        snapshot = self._shelf.get(round)
        assert snapshot is not None, "the controller asks only for what is published"
        return snapshot

    def waiting_for(self) -> str:
        """Return nothing: the worker is this process."""
        return ""

    def close(self) -> None:
        """Do nothing: there is no process but this one."""
