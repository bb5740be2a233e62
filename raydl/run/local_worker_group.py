"""A worker group of one worker in this process, for debuggers: ``--workers 0``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from raydl.core.center import Snapshot, SnapshotCache
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, Record
from raydl.core.saved_state import SavedState
from raydl.core.worker_group import (
    Changed,
    Collected,
    Event,
    Failed,
    Published,
    Reported,
    RunEnded,
    WorkerReady,
)
from raydl.data import Batches, Dataset, Prepare
from raydl.errors import NonFiniteError
from raydl.faults import Fault
from raydl.parameter_server.server import CenterServer, make_shard
from raydl.worker.evaluator import Evaluator
from raydl.worker.in_process import LocalCenterClient, LocalGroup
from raydl.worker.loop import Worker

_IDLE_S = 0.002
"""Wait of a poll while the worker does not train, in seconds."""


class LocalWorkerGroup:
    """One worker in this process: every ``poll`` runs one round.

    Args:
        job: the settings of the worker.
        dataset: training and test set.
        prepare: prepares samples for the model.
        non_trainable: the non-trainable state of the run's first model.
    """

    def __init__(
        self, job: Job, dataset: Dataset, prepare: Prepare, non_trainable: dict[str, np.ndarray]
    ) -> None:
        self._job = job
        self._train = Batches(dataset.train, prepare)
        self._test = Batches(dataset.test, prepare)
        self._snapshots = SnapshotCache()
        self._events: list[Event] = []
        self._running = False
        self._non_trainable = non_trainable
        self._has_worker = False
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()

    def start_center(self, snapshot: Snapshot) -> None:
        """Build the worker, the evaluator, and the center with its shards."""
        torch.set_num_threads(self._job.config.scaling.num_threads)
        self._snapshots.put(snapshot)
        # The evaluation model first: building it draws from the same generator.
        self._evaluator = Evaluator(self._job, self._test, self._non_trainable)
        self._worker = Worker(
            self._job,
            "w0",
            batches=self._train,
            publish=self._snapshots.put,
            non_trainable=self._non_trainable,
            test=self._test if self._job.config.evaluation.is_by_workers else None,
        )
        self._has_worker = True
        self._kept = snapshot
        self._start_shards(snapshot)

    def _start_shards(self, snapshot: Snapshot) -> None:
        self._center = None if self._job.method.is_sync else CenterServer(self._job, snapshot)
        self._other_shards = [
            make_shard(self._job, snapshot, index, None)
            for index in range(1, self._job.config.exchange.center_shards)
        ]

    def request_spare(self, worker_id: str) -> None:
        """Raise an error: a run in one process has no spares."""
        raise NotImplementedError("a run in one process has no spares")

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Report the one worker as ready."""
        assert worker_id == "w0"
        self._events.append(WorkerReady(worker_id))

    def end(self, worker_id: str) -> None:
        """Do nothing: the worker is this process."""

    def avoid(self, node: str) -> bool:
        """Return False: there is no other node."""
        return False

    def poll(self, timeout_s: float) -> list[Event]:
        """Run one round, if the worker trains, and return what happened."""
        if self._running:
            self._run_round()
        elif not self._events:
            time.sleep(min(timeout_s, _IDLE_S))  # the thread that writes checkpoints needs the core
        records: tuple[Record, ...] = ()
        if self._center:
            try:
                for due in self._center.coordinator.pop_due():
                    snapshot = self._center.snapshot(
                        lambda: [shard.state() for shard in self._other_shards], due
                    )
                    self._snapshots.adopt(snapshot)
            except NonFiniteError as error:
                self._events.append(Failed("center", error))
            records = self._center.coordinator.pop_records()
        self._events.append(
            Published(
                self._snapshots.rounds(),
                records,
                num_changes=self._snapshots.num_changes(),
                sent_s=time.monotonic(),
            )
        )
        events, self._events = self._events, []
        return events

    def _run_round(self) -> None:
        diverged = None
        try:
            outcome = self._worker.run_round()
        except NonFiniteError as error:
            outcome, diverged = Outcome.BROKEN, error
        except Exception as error:  # of user code: raised after a checkpoint
            self._events.append(Failed("w0", error))
            outcome = Outcome.BROKEN
        self._events.append(Reported(self._worker.report()))
        if outcome is not Outcome.GO_ON:
            self._leave_loop(outcome, diverged)

    def _leave_loop(self, outcome: Outcome, error: NonFiniteError | None = None) -> None:
        self._running = False
        round, generation = self._worker.copy_age[0], self._generation
        is_bad = self._worker.has_bad_copy
        end = RunEnded(
            "w0", outcome, round, generation,
            error=error, has_bad_copy=is_bad, score=self._worker.last_score,
        )  # fmt: skip
        self._events.append(end)

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Train from the snapshot of a round on, in a new generation."""
        if self._center:
            self._center.begin_generation(membership)
            for shard in self._other_shards:
                shard.begin_generation(membership)
            self._events.append(Changed())
        self._enter(membership, self._snapshot(round), own_states)

    def _enter(
        self, membership: Membership, snapshot: Snapshot, own_states: dict[str, Any]
    ) -> None:
        """Let the worker join a generation."""
        transport: Any = LocalGroup(1, timeout_s=1.0, generation=membership.generation).member(0)
        if self._center:
            transport = LocalCenterClient(self._center, self._other_shards)
        state = own_states.get("w0")
        own_state = state.load() if isinstance(state, SavedState) else state
        self._worker.join(membership, transport, snapshot, own_state)
        self._generation = membership.generation
        self._running = True

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Let the one worker leave after an error, or join again."""
        assert self._center
        states = [shard.change(membership) for shard in self._other_shards]
        snapshot = self._center.change(membership, states)
        self._events.append(Changed())
        if membership.worker_ids:
            self._enter(membership, snapshot, own_states)

    def dismiss(self, worker_id: str) -> None:
        """Do nothing: the one worker does not leave."""

    def abandon(self, generation: int) -> None:
        """Let the worker leave before its next round: its center has diverged."""
        if self._running:
            self._leave_loop(Outcome.BROKEN)

    def publish(self, worker_id: str) -> None:
        """Adopt the worker's copy of the center."""
        self._snapshots.adopt(self._worker.center())

    def rebuild_center(self, worker_id: str | None) -> str:
        """Restart a center that has diverged; with rounds do nothing, since each worker has it."""
        if self._center:
            snapshot = self._worker.center() if worker_id else self._kept
            self._snapshots = SnapshotCache()
            self._snapshots.put(snapshot)
            self._start_shards(snapshot)
        return ""

    def hand_in(self, worker_id: str) -> None:
        """Do nothing: the one worker does not leave."""

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Do nothing: there is no replacement."""

    def forget(self, state: SavedState) -> None:
        """Do nothing: no state was kept."""

    def inflict(self, fault: Fault) -> None:
        """Do nothing: the center is this process."""

    def vote(self, generation: int, **votes: float) -> None:
        """Pass the votes to the coordinator, or to the worker."""
        voter = self._center.coordinator if self._center else self._worker
        voter.vote(generation, **votes)

    def evaluate(self, round: int) -> None:
        """Score the center at once."""
        self._worker.stop_fetching()  # both parts may share an open file
        try:
            self._events.append(self._evaluator.evaluate(self._snapshot(round)))
        except Exception as error:  # of user code: raised after a checkpoint
            self._events.append(Failed("evaluator", error))

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Collect the center and the worker's kept state."""
        kept = self._worker.pop_kept(round)
        self._kept = self._snapshot(round)
        self._events.append(Collected(self._kept, {"w0": kept}))

    def _snapshot(self, round: int) -> Snapshot:
        snapshot = self._snapshots.get(round)
        assert snapshot is not None, "the controller uses published rounds only"
        return snapshot

    def waiting_for(self) -> str:
        """Return an empty text: the worker is this process."""
        return ""

    def close(self) -> None:
        """End the reading ahead, and restore a switch of this process; there is no other."""
        if self._has_worker:
            self._worker.stop_fetching()
        # The call imports torch's compiler, which takes a second.
        if torch.are_deterministic_algorithms_enabled() != self._was_deterministic:
            torch.use_deterministic_algorithms(self._was_deterministic)
