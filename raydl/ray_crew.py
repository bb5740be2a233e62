"""The crew of Ray actors that a controller commands."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raydl.actors import CenterActor, EvaluatorActor, ShardActor, WorkerActor
from raydl.center import Snapshot
from raydl.config import ScalingConfig
from raydl.crew import (
    Collected,
    Event,
    Failed,
    Lost,
    Published,
    Reported,
    RunEnded,
    WorkerReady,
)
from raydl.data import Dataset, Normalizer
from raydl.errors import RaydlError
from raydl.exchange.collective import GroupAddress
from raydl.membership import Membership
from raydl.reports import Outcome, WorkerReport
from raydl.worker import Job

_ASK_EVERY_S = 0.25
_START_S = 120.0
"""The longest start of a process: importing torch on a busy machine takes tens of seconds."""


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
        _send_by_value(type(job.method.rule))
        self._job = job
        self._run_id = uuid.uuid4().hex[:8]
        normalizer = Normalizer.of(dataset.train)
        self._train = ray.put(dataset.train)
        self._normalizer = ray.put(normalizer)
        threads = 1 if job.method.is_sync else 2 * job.config.scaling.max_workers + 4
        self._center = CenterActor.options(max_concurrency=threads).remote()
        self._threads = threads
        self._shards: list[ActorHandle] = [self._center]
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
        first = ray.put(snapshot)
        self._shards += [
            ShardActor.options(max_concurrency=self._threads).remote(self._job, first, index)
            for index in range(1, self._job.config.exchange.center_shards)
        ]
        options = _worker_options(scaling)
        for number in range(scaling.max_workers):
            worker_id = f"w{number}"
            worker = WorkerActor.options(**options).remote()
            self._workers[worker_id] = worker
            ref = worker.setup.remote(
                self._job, worker_id, self._train, self._normalizer, self._shards
            )
            self._expect(ref, worker_id, self._on_ready(worker_id))
        try:
            opened = self._center.open.remote(self._job, first, self._shards[1:])
            self._address = ray.get(opened, timeout=_START_S)
        except GetTimeoutError as error:
            raise RaydlError(f"the center did not start within {_START_S:.0f} s") from error

    def _on_ready(self, worker_id: str) -> Handler:
        def handle(node: str) -> list[Event]:
            self._up.add(worker_id)
            return [WorkerReady(worker_id, node)]

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
        if not any(handler is _on_poll for _, handler in self._pending.values()):
            self._expect(self._center.poll.remote(), "center", _on_poll)

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
        if not self._job.method.is_sync:
            # Workers send only to shards that know the generation.
            formed = [shard.form.remote(membership) for shard in self._shards]
            ray.get(formed, timeout=_START_S)
        for worker_id in membership.worker_ids:
            own_state = own_states.get(worker_id)
            ref = self._workers[worker_id].run.remote(membership, address, snapshot, own_state)
            self._expect(ref, worker_id, _on_end(worker_id))

    def vote(self, generation: int, **votes: float) -> None:
        """Hand the votes to who decides: the dispatcher, or all workers that are up."""
        if not self._job.method.is_sync:
            self._center.vote.remote(generation, votes)
            return
        for worker_id in self._up:
            self._workers[worker_id].vote.remote(generation, votes)

    def evaluate(self, round: int) -> None:
        """Let the evaluator score the center of a round."""
        # That of the round may be gone by now; a newer one is as good.
        ref = self._evaluator.evaluate.remote(self._center.newest.remote())
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
        for actor in (*self._workers.values(), *self._shards, self._evaluator):
            ray.kill(actor)
        self._pending.clear()


@ray.remote(num_cpus=0)
def _gather(snapshot: Snapshot, worker_ids: tuple[str, ...], *states: dict[str, Any]) -> Collected:
    return Collected(snapshot, dict(zip(worker_ids, states, strict=True)))


def _send_by_value(rule: type) -> None:
    """Let a rule of the user's own travel with its code: no node needs its module."""
    module = sys.modules[rule.__module__]
    if rule.__module__.split(".")[0] not in ("raydl", "__main__"):
        ray.cloudpickle.register_pickle_by_value(module)


def _on_report(report: WorkerReport) -> list[Event]:
    return [Reported(report)]


def _on_poll(published: Published) -> list[Event]:
    return [published]


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
