"""The Ray actors, thin shells around plain objects, and the crew that commands them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raydl.center import Snapshot, SnapshotShelf
from raydl.config import ScalingConfig
from raydl.crew import (
    Collected,
    Evaluated,
    Event,
    Failed,
    Lost,
    Published,
    Reported,
    RunEnded,
    WorkerReady,
    evaluate_snapshot,
    make_evaluator_model,
)
from raydl.data import Batches, Dataset, ImageSet, Normalizer
from raydl.errors import RaydlError
from raydl.exchange.collective import CollectiveGroup, GroupAddress, open_store
from raydl.membership import Membership
from raydl.reports import WorkerReport
from raydl.worker import Job, Outcome, Worker

_ASK_EVERY_S = 0.25
_START_S = 120.0
"""The longest start of a process: importing torch on a busy machine takes tens of seconds."""


@ray.remote(num_cpus=0)
class CenterActor:
    """Holds the committed snapshots and the store where each generation meets."""

    def __init__(self) -> None:
        self._shelf = SnapshotShelf()
        self._host = ray.util.get_node_ip_address()
        self._store = open_store(self._host)

    def rendezvous(self) -> tuple[str, int]:
        """Return (host, port) of the store."""
        return self._host, self._store.port

    def put(self, snapshot: Snapshot) -> None:
        """Take in a snapshot."""
        self._shelf.put(snapshot)

    def rounds(self) -> tuple[int, ...]:
        """Return the rounds held."""
        return self._shelf.rounds()

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round."""
        return self._shelf.get(round)


@ray.remote(concurrency_groups={"loop": 1, "control": 1})
class WorkerActor:
    """Hosts one :class:`Worker`: the loop in one thread, questions to it in another."""

    def setup(
        self, job: Job, worker_id: str, train: ImageSet, normalizer: Normalizer, center: ActorHandle
    ) -> None:
        """Build the worker. Not in ``__init__``, so that its errors arrive as they are."""

        def publish(snapshot: Snapshot) -> None:
            center.put.remote(snapshot)

        torch.set_num_threads(job.config.scaling.num_threads)
        batches = Batches(train, normalizer)
        self._worker = Worker(job, worker_id, batches=batches, publish=publish)
        self._num_threads = job.config.scaling.num_threads

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
        rank = membership.worker_ids.index(self._worker.worker_id)
        group = CollectiveGroup(address, membership.worker_ids, rank)
        try:
            self._worker.join(membership, group, snapshot, own_state)
            outcome = Outcome.GO_ON
            while outcome is Outcome.GO_ON:
                outcome = self._worker.run_round()
            return outcome, self._worker.round
        finally:
            group.close()

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
        return Evaluated(snapshot.round, snapshot.epoch, snapshot.num_samples, metrics)


Handler = Callable[[Any], "list[Event]"]


class RayCrew:
    """A crew of Ray actors: one center, one evaluator, and as many workers as may train.

    All workers are asked for at once; those that the cluster can not hold yet stay pending,
    which is what an autoscaler answers to.

    Args:
        job: what the workers do.
        dataset: put into shared memory once; every node holds one copy for its workers.
    """

    def __init__(self, job: Job, dataset: Dataset) -> None:
        self._job = job
        self._run_id = uuid.uuid4().hex[:8]
        normalizer = Normalizer.of(dataset.train)
        self._train = ray.put(dataset.train)
        self._normalizer = ray.put(normalizer)
        self._center = CenterActor.remote()
        self._evaluator = EvaluatorActor.remote(job, dataset.test, normalizer)
        self._workers: dict[str, ActorHandle] = {}
        self._up: set[str] = set()
        self._pending: dict[Any, tuple[str, Handler]] = {}
        self._asked_at = 0.0

    def open(self, snapshot: Snapshot) -> None:
        """Start the center and ask for all workers.

        Raises:
            RaydlError: the center did not come up.
        """
        scaling = self._job.config.scaling
        options = _worker_options(scaling)
        for number in range(scaling.max_workers):
            worker_id = f"w{number}"
            worker = WorkerActor.options(**options).remote()
            self._workers[worker_id] = worker
            ref = worker.setup.remote(
                self._job, worker_id, self._train, self._normalizer, self._center
            )
            self._expect(ref, worker_id, self._on_ready(worker_id))
        try:
            ray.get(self._center.put.remote(snapshot), timeout=_START_S)
            self._address = ray.get(self._center.rendezvous.remote(), timeout=_START_S)
        except GetTimeoutError as error:
            raise RaydlError(f"the center did not start within {_START_S:.0f} s") from error

    def _on_ready(self, worker_id: str) -> Handler:
        def handle(_: None) -> list[Event]:
            self._up.add(worker_id)
            return [WorkerReady(worker_id)]

        return handle

    def _expect(self, ref: Any, who: str, handler: Handler) -> None:
        self._pending[ref] = (who, handler)

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened."""
        self._ask()
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if ready:  # one came: take all the others that came with it
            ready, _ = ray.wait(
                list(self._pending), num_returns=len(self._pending), timeout=0, fetch_local=False
            )
        events: list[Event] = []
        for ref in ready:
            who, handler = self._pending.pop(ref)
            events += self._answer(ref, who, handler)
        return events

    def _ask(self) -> None:
        """Ask everybody for news, unless that was just done."""
        now = time.monotonic()
        if now - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = now
        asked = {who for who, handler in self._pending.values() if handler is _on_report}
        for worker_id in self._up - asked:
            self._expect(self._workers[worker_id].report.remote(), worker_id, _on_report)
        if not any(handler is _on_rounds for _, handler in self._pending.values()):
            self._expect(self._center.rounds.remote(), "center", _on_rounds)

    def _answer(self, ref: Any, who: str, handler: Handler) -> list[Event]:
        try:
            return handler(ray.get(ref))
        except RayTaskError as error:
            return [Failed(who, _original(error))]
        except RayActorError as error:
            self._up.discard(who)
            return [Lost(who, str(error).strip().splitlines()[0])]

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Let the members meet and train."""
        config = self._job.config
        address = GroupAddress(
            host=self._address[0],
            port=self._address[1],
            run_id=self._run_id,
            generation=membership.generation,
            device=config.scaling.device,
            timeout_s=config.exchange.timeout_s,
        )
        snapshot = self._center.get.remote(round)
        for worker_id in membership.worker_ids:
            own_state = own_states.get(worker_id)
            ref = self._workers[worker_id].run.remote(membership, address, snapshot, own_state)
            self._expect(ref, worker_id, _on_end(worker_id))

    def vote(self, generation: int, **votes: float) -> None:
        """Hand the votes to all workers that are up."""
        for worker_id in self._up:
            self._workers[worker_id].vote.remote(generation, votes)

    def evaluate(self, round: int) -> None:
        """Let the evaluator score the center of a round."""
        ref = self._evaluator.evaluate.remote(self._center.get.remote(round))
        self._expect(ref, "evaluator", lambda evaluated: [evaluated])

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Gather center and workers of a round."""
        states = [self._workers[w].take_kept.remote(round) for w in worker_ids]
        ref = _gather.remote(self._center.get.remote(round), worker_ids, *states)
        self._expect(ref, "checkpoint", lambda collected: [collected])

    def waiting_for(self) -> str:
        """Return what pending workers need, and what the cluster has."""
        missing = len(self._workers) - len(self._up)
        need = _listed(self._job.config.scaling.resources())
        have = _listed({k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")})
        return f"{missing} more worker(s), each needs {need}; the cluster has {have}"

    def close(self) -> None:
        """End the actors at once."""
        for actor in (*self._workers.values(), self._center, self._evaluator):
            ray.kill(actor)
        self._pending.clear()


@ray.remote(num_cpus=0)
def _gather(snapshot: Snapshot, worker_ids: tuple[str, ...], *states: dict[str, Any]) -> Collected:
    return Collected(snapshot, dict(zip(worker_ids, states, strict=True)))


def _on_report(report: WorkerReport) -> list[Event]:
    return [Reported(report)]


def _on_rounds(rounds: tuple[int, ...]) -> list[Event]:
    return [Published(rounds)]


def _on_end(worker_id: str) -> Handler:
    def handle(end: tuple[Outcome, int]) -> list[Event]:
        return [RunEnded(worker_id, *end)]

    return handle


def _original(error: RayTaskError) -> Exception:
    """Return raydl's own error as it was raised; a user's keeps Ray's text with its traceback."""
    cause = error.cause
    return cause if isinstance(cause, RaydlError) else error


def _worker_options(scaling: ScalingConfig) -> dict[str, Any]:
    resources = scaling.resources()
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources or None,
        "scheduling_strategy": "SPREAD",
    }


def _listed(resources: dict[str, float]) -> str:
    return "{" + ", ".join(f"{k}: {v:g}" for k, v in resources.items()) + "}"


def workers_that_fit(scaling: ScalingConfig) -> int:
    """Return how many workers the nodes of the cluster could hold if they were empty."""
    need = scaling.resources()
    total = 0
    for node in ray.nodes():
        if node["Alive"]:
            have = node["Resources"]
            fits = [int(have.get(k, 0) / v + 1e-9) for k, v in need.items()]
            total += min(fits, default=scaling.max_workers)
    return total
