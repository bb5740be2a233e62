"""The Ray actors: thin shells around plain objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from raydl.center import Snapshot, SnapshotShelf
from raydl.center_service import CenterService, make_shard
from raydl.crew import (
    Evaluated,
    Published,
    evaluate_snapshot,
    evaluated_of,
    make_evaluator_model,
)
from raydl.data import Batches, ImageSet, Normalizer
from raydl.exchange.collective import CollectiveGroup, GroupAddress, open_store
from raydl.exchange.messages import HOME, Orders, Push, Reply, Stamp
from raydl.exchange.remote import RayPost
from raydl.exchange.shard import ShardState
from raydl.membership import Membership
from raydl.reports import Outcome, WorkerReport
from raydl.worker import Job, Worker

_ASK_EVERY_S = 0.25
_START_S = 120.0
"""The longest start of a process: importing torch on a busy machine takes tens of seconds."""


@ray.remote(num_cpus=0)
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

    def open(self, job: Job, snapshot: Snapshot, others: list[ActorHandle]) -> tuple[str, int]:
        """Take in the first snapshot; return (host, port) of the store.

        Args:
            job: what the workers do.
            snapshot: what the run starts from.
            others: the actors of the other shards.
        """
        torch.set_num_threads(1)
        self._shelf.put(snapshot)
        self._others = others
        if not job.method.is_sync:
            self._service = CenterService(job, snapshot)
        return self._host, self._store.port

    def put(self, snapshot: Snapshot) -> None:
        """Take in a snapshot."""
        self._shelf.put(snapshot)

    def poll(self) -> Published:
        """Make the snapshots that are wanted; return the rounds held, and new records."""
        if self._service is None:
            return Published(self._shelf.rounds())
        for due in self._service.dispatcher.take_due():
            states = ray.get([s.state.remote() for s in self._others], timeout=_START_S)
            self._shelf.put(self._service.snapshot(due, states))
        return Published(self._shelf.rounds(), self._service.dispatcher.take_records())

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round."""
        return self._shelf.get(round)

    def newest(self) -> Snapshot:
        """Return the newest snapshot."""
        return self._shelf.newest()

    # the home shard

    def form(self, membership: Membership) -> None:
        """Begin a generation."""
        self._at_home.open(membership)

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


@ray.remote(num_cpus=0)
class ShardActor:
    """Holds one shard of the center, away from home."""

    def __init__(self, job: Job, snapshot: Snapshot, index: int) -> None:
        torch.set_num_threads(1)
        self._shard = make_shard(job, snapshot, index, None)

    def form(self, membership: Membership) -> None:
        """Begin a generation."""
        self._shard.open(membership.generation)

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
        train: ImageSet,
        normalizer: Normalizer,
        shards: list[ActorHandle],
    ) -> str:
        """Build the worker; return its node. Not in ``__init__``: errors arrive as they are."""

        def publish(snapshot: Snapshot) -> None:
            shards[HOME].put.remote(snapshot)

        torch.set_num_threads(job.config.scaling.num_threads)
        batches = Batches(train, normalizer)
        self._worker = Worker(job, worker_id, batches=batches, publish=publish)
        self._num_threads = job.config.scaling.num_threads
        self._job = job
        self._shards = shards
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @ray.method(concurrency_group="loop")
    def run(
        self,
        membership: Membership,
        address: GroupAddress,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None,
    ) -> tuple[Outcome, int]:
        """Train in one generation until all ranks decide to leave it; return why, and where."""
        torch.set_num_threads(self._num_threads)  # OpenMP counts threads per calling thread
        road = self._make_road(membership, address)
        partners = self._make_partners(membership, address)
        try:
            self._worker.join(membership, road, snapshot, own_state, partners)
            outcome = Outcome.GO_ON
            while outcome is Outcome.GO_ON:
                outcome = self._worker.run_round()
            return outcome, self._worker.round
        finally:
            road.close()
            if partners:
                partners.close()

    def _make_road(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | RayPost:
        if not self._job.method.is_sync:
            return RayPost(self._shards, timeout_s=address.timeout_s)
        rank = membership.worker_ids.index(self._worker.worker_id)
        algorithm = self._job.config.exchange.allreduce
        return CollectiveGroup(address, membership.worker_ids, rank, algorithm=algorithm)

    def _make_partners(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | None:
        size, worker_id = self._job.config.method.group_size, self._worker.worker_id
        if size == 1:
            return None
        number, workers = membership.partners_of(worker_id, size)
        place = dataclasses.replace(address, run_id=f"{address.run_id}-partners{number}")
        return CollectiveGroup(place, workers, workers.index(worker_id))

    @ray.method(concurrency_group="control")
    def report(self) -> WorkerReport:
        """Return what is new."""
        return self._worker.report()

    @ray.method(concurrency_group="control")
    def vote(self, generation: int, votes: dict[str, float]) -> None:
        """Cast votes."""
        self._worker.vote(generation, **votes)

    @ray.method(concurrency_group="control")
    def take_kept(self, round: int) -> dict[str, Any]:
        """Hand over the state kept at a round."""
        return self._worker.take_kept(round)


@ray.remote(num_cpus=0)
class EvaluatorActor:
    """Scores snapshots of the center, beside the workers."""

    def __init__(self, job: Job, test: ImageSet, normalizer: Normalizer) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._test = Batches(test, normalizer)
        self._flat = make_evaluator_model(job)

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot."""
        metrics = evaluate_snapshot(self._job, self._flat, self._test, snapshot)
        return evaluated_of(snapshot, metrics)
