"""The Ray actors: thin shells around plain objects."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import uuid
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from raydl.center import Snapshot, SnapshotShelf
from raydl.center_service import CenterService, OptimizerStates, make_shard
from raydl.crew import Evaluated, Published, RunEnded
from raydl.data import Batches, Prepare, Samples
from raydl.dispatcher import Due
from raydl.errors import ExchangeError
from raydl.evaluator import Evaluator
from raydl.exchange.collective import CollectiveGroup, GroupAddress, open_store
from raydl.exchange.post import HOME, CellAddress, Orders, Push, Reply, Stamp
from raydl.exchange.remote import RayPost
from raydl.exchange.shard import ShardState
from raydl.faults import Fault, Held, Injector, Partition, ProcessInflicts, inflict_here
from raydl.job import Job
from raydl.ledger import Span
from raydl.membership import Membership
from raydl.on_ray.cluster import START_S, Place, node_here
from raydl.on_ray.upkeep import freeze_objects, keep_freed_memory
from raydl.ray_session import drain_node
from raydl.reports import Outcome, WorkerReport
from raydl.worker import Worker

_ANNOUNCE_S = 5.0
_A_BYTE = 1
"""Ray puts an actor that reserves nothing on any node, whatever node or spreading was asked for."""


@ray.remote(num_cpus=0, memory=_A_BYTE)
class CenterActor:
    """Holds the committed snapshots, and the store where each generation meets.

    For methods that exchange by messages it is the home shard of the center, too: it then
    runs in as many threads as may call at once.
    """

    def __init__(self) -> None:
        self._shelf = SnapshotShelf()
        self._host = ray.util.get_node_ip_address()
        self._store = open_store(self._host)
        self._service: CenterService | None = None
        self._others: list[ActorHandle] = []
        self._faults: list[tuple[int, str]] = []
        self._process = uuid.uuid4().hex

    def open(
        self,
        job: Job,
        snapshot: Snapshot,
        others: list[ActorHandle],
        optimizer: dict[str, Any] | None = None,
    ) -> tuple[Place, Place]:
        """Take in a snapshot; return (host, port) of the store, and (node, process id).

        Args:
            job: what the workers do.
            snapshot: what the run starts from.
            others: the actors of the other shards.
            optimizer: what the optimizer of the center before remembered, for a snapshot of a
                worker's, which has no such thing.
        """
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        self._shelf.put(snapshot)
        self._others = others
        if not job.method.is_sync:
            self._service = CenterService(job, snapshot, has_neighbours=True)
        # Not always the node that was asked for: of one that it can not use Ray makes another.
        return (self._host, self._store.port), (node_here(), os.getpid())

    def put(self, snapshot: Snapshot) -> None:
        """Take in a snapshot."""
        self._shelf.put(snapshot)

    def poll(self) -> Published:
        """Make the snapshots that are wanted; return the rounds held, and new records."""
        faults, self._faults = tuple(self._faults), []
        if self._service is None:
            num_changes = self._shelf.num_changes()
            return Published(self._shelf.rounds(), faults=faults, num_changes=num_changes)
        for due in self._service.dispatcher.take_due():
            self._shelf.put(self._service.snapshot(due, self._states_of_others))
        dispatcher = self._service.dispatcher
        return Published(
            self._shelf.rounds(),
            dispatcher.take_records(),
            faults,
            dispatcher.is_complete(),
            told_s=time.monotonic(),
            process=self._process,
        )

    def _states_of_others(self) -> list[ShardState]:
        states: list[ShardState] = ray.get(
            [shard.state.remote() for shard in self._others], timeout=START_S
        )
        return states

    def optimizer_state(self) -> tuple[tuple[int, float], dict[str, Any]]:
        """Return ((exchanges settled, CPU seconds of the copy), what the optimizer remembers)."""
        began, version = time.thread_time(), self._at_home.dispatcher.version
        others = ray.get([s.optimizer_states.remote() for s in self._others], timeout=START_S)
        state = self._at_home.optimizer_state(others)
        return (version, time.thread_time() - began), state

    def note_fault(self, number: int, worker_id: str) -> None:
        """Note that a worker is about to inflict a fault on itself."""
        self._faults.append((number, worker_id))

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round."""
        return self._shelf.get(round)

    def newest(self) -> Snapshot:
        """Return the newest snapshot."""
        return self._shelf.newest()

    # the home shard

    def form(self, membership: Membership) -> tuple[int, Snapshot]:
        """Begin a generation; return its number, and what all start from."""
        opened = [shard.form.remote(membership) for shard in self._others]
        states = ray.get(opened, timeout=START_S)
        service = self._at_home
        service.open(membership)
        due = Due(service.dispatcher.version, is_kept=False)
        return membership.generation, service.snapshot(due, lambda: states)

    def change(self, membership: Membership) -> tuple[int, Snapshot]:
        """Let workers join and leave while the others train on.

        Returns:
            The generation, and what those who join start from.
        """
        changed = [shard.change.remote(membership) for shard in self._others]
        states = ray.get(changed, timeout=START_S)
        return membership.generation, self._at_home.change(membership, states)

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange."""
        self._at_home.dispatcher.dismiss(worker_id)

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return what a worker of a node may map of the home shard."""
        return self._at_home.shared_cells(worker_id) if node == node_here() else {}

    def enter(self, stamp: Stamp, local_step: int) -> Orders:
        """Return the first orders of a worker."""
        return self._at_home.dispatcher.enter(stamp, local_step)

    def exchange(self, push: Push) -> Reply:
        """Take a message."""
        return self._at_home.exchange(push)

    def take_turn(self, stamp: Stamp) -> None:
        """Wait for a worker's turn."""
        self._at_home.dispatcher.take_turn(stamp)

    def end_turn(self, stamp: Stamp) -> None:
        """End a worker's turn."""
        self._at_home.dispatcher.end_turn(stamp)

    def leave(self, stamp: Stamp) -> None:
        """Let a worker leave."""
        self._at_home.dispatcher.leave(stamp)

    def vote(self, generation: int, votes: dict[str, float]) -> None:
        """Cast votes."""
        self._at_home.dispatcher.vote(generation, **votes)

    @property
    def _at_home(self) -> CenterService:
        assert self._service is not None, "sync methods send no messages"
        return self._service


def _with_optimizer(snapshot: Snapshot, optimizer: dict[str, Any] | None) -> Snapshot:
    return snapshot if optimizer is None else dataclasses.replace(snapshot, optimizer=optimizer)


@ray.remote(num_cpus=0, memory=_A_BYTE)
class ShardActor:
    """Holds one shard of the center, away from home."""

    def __init__(
        self,
        job: Job,
        snapshot: Snapshot,
        index: int,
        optimizer: dict[str, Any] | None = None,
    ) -> None:
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        self._shard = make_shard(job, snapshot, index, None, has_neighbours=True)

    def form(self, membership: Membership) -> ShardState:
        """Begin a generation; return what all start from."""
        self._shard.open(membership)
        return self._shard.state()

    def change(self, membership: Membership) -> ShardState:
        """Let workers join and leave; return what those who join start from."""
        return self._shard.change(membership)

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def optimizer_states(self) -> OptimizerStates:
        """Return what the optimizers remember, by span."""
        return self._shard.optimizer_states()

    def ping(self) -> None:
        """Answer."""

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return what a worker of a node may map."""
        return self._shard.shared_cells(worker_id) if node == node_here() else {}

    def exchange(self, push: Push) -> Reply:
        """Take a message."""
        return self._shard.exchange(push)

    def state(self) -> ShardState:
        """Return a copy of what is here."""
        return self._shard.state()


@ray.remote(concurrency_groups={"loop": 1, "control": 1})
class WorkerActor:
    """Hosts one :class:`Worker`: the loop in one thread, questions to it in another."""

    def setup(
        self,
        job: Job,
        worker_id: str,
        train: Samples,
        prepare: Prepare,
        untrained: dict[str, np.ndarray],
    ) -> Place:
        """Build the worker; return its node and process id.

        Not in ``__init__``: errors arrive as they are.
        """
        keep_freed_memory()
        torch.set_num_threads(job.config.scaling.num_threads)
        node = node_here()
        self._partition = Partition()
        self._injector = Injector(
            job.faults.for_workers,
            ProcessInflicts(self._partition, lambda s: drain_node(node, deadline_s=s)),
            self._announce,
        )
        self._worker = Worker(
            job,
            worker_id,
            batches=Batches(train, prepare),
            publish=self._publish,
            before_step=self._injector.before_step if job.faults.faults else None,
            untrained=untrained,
        )
        self._num_threads = job.config.scaling.num_threads
        self._job = job
        self._lock = threading.Lock()
        self._generation = self._abandoned_up_to = 0
        self._abandoned = threading.Event()
        freeze_objects()
        return node, os.getpid()

    def _publish(self, snapshot: Snapshot) -> None:
        self._shards[HOME].put.remote(snapshot)

    def _announce(self, fault: Fault) -> bool:
        """Tell of a fault before it comes; return whether that may have been heard."""
        noted = self._shards[HOME].note_fault.remote(fault.number, self._worker.worker_id)
        try:
            ray.get(noted, timeout=_ANNOUNCE_S)
        except RayActorError:  # the next generation knows the new center
            return False
        except RayError:
            return True
        return True

    @ray.method(concurrency_group="loop")
    def run(
        self,
        membership: Membership,
        address: GroupAddress,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None,
        shards: list[ActorHandle],
        fired: tuple[int, ...],
    ) -> RunEnded:
        """Train in one generation until this worker leaves it; return why, and where.

        Args:
            membership: who trains.
            address: where the members meet.
            snapshot: what they start from.
            own_state: what this worker starts from besides.
            shards: of the center, the home shard first.
            fired: faults of the plan that have fired.
        """
        torch.set_num_threads(self._num_threads)  # OpenMP counts threads per calling thread
        self._shards = shards
        self._injector.skip(fired)
        generation = membership.generation
        with self._lock:
            self._generation, self._abandoned = generation, threading.Event()
            if generation <= self._abandoned_up_to:  # the order came before us
                self._abandoned.set()
        try:
            outcome, problem = self._train(membership, address, snapshot, own_state), ""
        except ExchangeError as error:
            outcome, problem = Outcome.BROKEN, str(error)
        worker_id, age = self._worker.worker_id, self._worker.copy_age
        ledger_round = self._worker.ledger_round
        return RunEnded(worker_id, outcome, age[0], generation, problem, age[1], ledger_round)

    def _train(
        self,
        membership: Membership,
        address: GroupAddress,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None,
    ) -> Outcome:
        roads: list[Any] = []
        try:
            roads.append(self._make_road(membership, address))
            partners = self._make_partners(membership, address)
            roads += [partners] if partners else []
            road = Held(roads[0], self._partition.hold) if self._job.faults.faults else roads[0]
            self._worker.join(membership, road, snapshot, own_state, partners)
            outcome = Outcome.GO_ON
            while outcome is Outcome.GO_ON:
                outcome = self._worker.run_round()
            return outcome
        finally:
            # At once: peers notice by it that a member has left a broken exchange.
            for road in roads:
                road.close()

    @ray.method(concurrency_group="control")
    def abandon(self, generation: int) -> None:
        """Leave a generation at once, out of any exchange; it may not have begun yet."""
        self._partition.hold()
        with self._lock:
            self._abandoned_up_to = max(self._abandoned_up_to, generation)
            if self._generation <= generation:
                self._abandoned.set()

    def _make_road(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | RayPost:
        if not self._job.method.is_sync:
            return RayPost(self._shards, timeout_s=address.timeout_s, abandoned=self._abandoned)
        rank = membership.worker_ids.index(self._worker.worker_id)
        algorithm = self._job.config.exchange.allreduce
        return CollectiveGroup(
            address,
            membership.worker_ids,
            rank,
            algorithm=algorithm,
            abandoned=self._abandoned,
        )

    def _make_partners(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | None:
        size, worker_id = self._job.config.method.group_size, self._worker.worker_id
        if size == 1:
            return None
        number, workers = membership.partners_of(worker_id, size)
        place = dataclasses.replace(address, run_id=f"{address.run_id}-partners{number}")
        rank = workers.index(worker_id)
        return CollectiveGroup(place, workers, rank, abandoned=self._abandoned)

    @ray.method(concurrency_group="control")
    def report(self) -> WorkerReport:
        """Return what is new."""
        self._partition.hold()
        return self._worker.report()

    @ray.method(concurrency_group="control")
    def center(self) -> Snapshot:
        """Return this worker's copy of the center."""
        return self._worker.center()

    @ray.method(concurrency_group="control")
    def vote(self, generation: int, votes: dict[str, float]) -> None:
        """Cast votes."""
        self._partition.hold()
        self._worker.vote(generation, **votes)

    @ray.method(concurrency_group="control")
    def take_kept(self, round: int) -> dict[str, Any]:
        """Hand over the state kept at a round."""
        return self._worker.take_kept(round)


@ray.remote(num_cpus=0, memory=_A_BYTE, concurrency_groups={"control": 1})
class EvaluatorActor:
    """Scores snapshots of the center, beside the workers."""

    def __init__(
        self, job: Job, test: Samples, prepare: Prepare, untrained: dict[str, np.ndarray]
    ) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self._evaluator = Evaluator(job, Batches(test, prepare), untrained)

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot."""
        torch.set_num_threads(1)  # another thread than the constructor's
        return self._evaluator.evaluate(snapshot)

    @ray.method(concurrency_group="control")
    def num_scored(self) -> int:
        """Return how many samples of the center under way are scored."""
        return self._evaluator.num_scored
