"""What the controller commands: workers, the center and an evaluator, as one crew.

The controller sees a crew through this protocol alone. ``LocalCrew`` below plays it in this
process, for a debugger; :class:`raydl.actors.RayCrew` plays it with Ray actors.
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
from raydl.flat import FlatModel
from raydl.membership import Membership
from raydl.reports import Outcome, Record, WorkerReport
from raydl.task import evaluate
from raydl.worker import Job, Worker


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


@dataclass(frozen=True)
class Failed:
    """A process raised: the user's code, an exchange, or a loss that is not finite."""

    name: str
    """``w3`` for a worker, ``center``, ``evaluator`` or ``checkpoint``."""
    error: Exception


@dataclass(frozen=True)
class Lost:
    """A process went away."""

    name: str
    reason: str


@dataclass(frozen=True)
class Published:
    """The center holds the snapshots of these rounds."""

    rounds: tuple[int, ...]
    records: tuple[Record, ...] = ()
    """New points of the curves, where the center keeps the books."""


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


Event = WorkerReady | Reported | RunEnded | Failed | Lost | Published | Evaluated | Collected


class Crew(Protocol):
    """The processes of a run. No call waits; what they lead to comes as events."""

    def open(self, snapshot: Snapshot) -> None:
        """Start the center with a first snapshot, and ask for all workers."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened, after ``timeout_s`` seconds at the latest."""
        ...

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Let the members train from the snapshot of that round on.

        Args:
            membership: who trains.
            round: one that the center holds.
            own_states: from a checkpoint, by worker; one that is absent starts at the center
                or goes on with what it has in memory.
        """
        ...

    def vote(self, generation: int, **votes: float) -> None:
        """Let the workers of a generation cast votes; see :class:`raydl.replica.Header`."""
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
        self._events.append(WorkerReady("w0"))

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
        self._events.append(Published(self._shelf.rounds(), records))
        events, self._events = self._events, []
        return events

    def _run_round(self) -> None:
        outcome = self._worker.run_round()
        report = self._worker.report()
        self._events.append(Reported(report))
        if outcome is not Outcome.GO_ON:
            self._running = False
            self._events.append(RunEnded("w0", outcome, report.round))

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Start to train."""
        road: Any = LocalGroup(1, timeout_s=1.0, generation=membership.generation).member(0)
        if self._service:
            self._service.open(membership)
            for shard in self._others:
                shard.open(membership.generation)
            road = LocalPost([self._service, *self._others], self._service.dispatcher)
        self._worker.join(membership, road, self._snapshot(round), own_states.get("w0"))
        self._running = True

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
