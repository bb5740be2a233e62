"""Runs workers in Ray actors that only exchange, through the classes of a run.

The replica of a worker is one vector and its local step is empty, so the time of a step is the time
of an exchange with the updates of replica and center. The same process measures the limits: a bare
process group of torch, and a plain copy.

    with ray_here(), Crowd(431_080, num_workers=2) as crowd:
        crowd.enter("async-easgd")
        times = crowd.exchange("async-easgd", 100)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import ray
import torch
import torch.distributed
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.optim import Optimizer

from raydl.collective.ray_collective import CenterStore, CollectiveGroup, GroupAddress
from raydl.collective.sync_strategy import SyncStrategy, TrainedPositions
from raydl.config import MethodConfig, ScalingConfig, TrainConfig
from raydl.core.center import first_snapshot
from raydl.core.exchange import Header, StepPlan
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.replica import Replica
from raydl.core.strategy import Strategy, WorkerContext
from raydl.data import DataShape
from raydl.methods import resolve
from raydl.metrics import TimeParts
from raydl.parameter_server.async_strategy import AsyncStrategy
from raydl.parameter_server.ray_transport import RayCenterClient
from raydl.ray_backend.actors import CenterActor
from raydl.worker.user_loop import ENDLESS, Endless, UserLoop, endless_training

_BOUND_S = 120.0
"""Time-out of a call to an actor, in seconds."""
_TOGETHER_S = 0.05
"""Seconds from the calls to several workers until all of them begin simultaneously."""
_dist: Any = torch.distributed  # torch's stubs omit some documented names


class Vector(nn.Module):
    """A model of one parameter, shape [num_parameters]."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.rand(num_parameters))


class NullOptimizer(Optimizer):
    """An optimizer without effect: a local step takes no time."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of an exchange, as the mean over several exchanges."""

    whole_s: float
    """The whole exchange: sending, waiting, updating replica and center, completing the round."""
    message_s: float
    """Sending and waiting for the answer."""
    moved_s: float
    """The step without the wait for the answer: through shared memory, the update of replica and
    center."""


class ExchangingWorker:
    """A worker with one replica and a strategy per method.

    Args:
        num_parameters: length of its vector.
        seed: seed of the vector's values.
        environment: environment variables while it joins a group, for example of TLS.
    """

    def __init__(self, num_parameters: int, seed: int, environment: dict[str, str]) -> None:
        self._environment = environment
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._parts = TimeParts()
        self._replica = Replica(
            FlatModel(Vector(num_parameters)),
            UserLoop("vector"),
            rule=resolve(settings("sync-easgd", 1)).rule,
            make_optimizer=lambda tensors: NullOptimizer(tensors, {}),
            time_parts=self._parts,
        )
        self._replica.flat.release_gradients()
        self._strategies: dict[str, Strategy] = {}
        self._num_steps = 0
        self._bare: Any = None
        self._in_steps_s = 0.0

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def enter(
        self, job: Job, worker_id: str, address: GroupAddress, snapshot: Any, center: Any
    ) -> None:
        """Join the group of workers or the center of a method."""
        membership = members(job.config.scaling.max_workers)
        context = WorkerContext(
            config=job.config, method=job.method, membership=membership, worker_id=worker_id,
            flat=self._replica.flat, time_parts=self._parts, cuts=job.order.cuts, feedback={},
        )  # fmt: skip
        if job.method.is_sync:
            rank = membership.worker_ids.index(worker_id)
            with mock.patch.dict(os.environ, self._environment):
                group = CollectiveGroup(address, membership.worker_ids, rank, center=center)
            strategy: Strategy = SyncStrategy(context, group, snapshot, TrainedPositions())
        else:
            client = RayCenterClient([center], timeout_s=address.timeout_s)
            strategy = AsyncStrategy(context, client, snapshot, local_step=0)
        self._strategies[job.method.name] = strategy

    def enter_bare(self, address: GroupAddress, rank: int, num_workers: int, center: Any) -> None:
        """Form a process group of torch, as a program without raydl would."""
        options = _dist.ProcessGroupGloo._Options()
        host = ray.util.get_node_ip_address()  # by default gloo may choose another interface
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=address.timeout_s)
        # The store must live as long as the group.
        self._store = CenterStore(center, address, num_workers)
        self._bare = _dist.ProcessGroupGloo(self._store, rank, num_workers, options)
        self._summed = torch.ones_like(self._replica.flat.weights)

    def exchange(self, method: str, count: int, begin_at: float) -> Times:
        """Exchange ``count`` times from a given time on, and return the mean times."""
        strategy = self._strategies[method]
        _wait_until(begin_at)
        in_steps_s = self._in_steps_s
        began, waited_s = time.perf_counter(), self._waited_s()
        for _ in range(count):
            self._exchange_once(strategy)
        whole_s = (time.perf_counter() - began) / count
        if isinstance(strategy, SyncStrategy):
            strategy.pop_records()  # as in a run: else the records would accumulate
        return Times(
            whole_s=whole_s,
            message_s=(self._waited_s() - waited_s) / count,
            moved_s=(self._in_steps_s - in_steps_s) / count,
        )

    def _exchange_once(self, strategy: Strategy) -> None:
        strategy.next_round(self._num_steps)
        strategy.begin_step(0, 0.1)
        step_plan = StepPlan.around(strategy.exchanges, [0], [0], make_header=Header)
        [exchange] = strategy.exchanges
        began = time.perf_counter()
        with mock.patch.object(exchange, "wait", self._uncounted(exchange.wait)):
            sums = self._replica.step_with_given_gradients(step_plan)
        self._in_steps_s += time.perf_counter() - began
        self._num_steps += 1
        strategy.settle(sums or Header(), self._num_steps)

    def _uncounted(self, wait: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that waits without counting the time in ``moved_s``."""

        def wait_uncounted() -> Any:
            began = time.perf_counter()
            answer = wait()
            self._in_steps_s -= time.perf_counter() - began
            return answer

        return wait_uncounted

    def _waited_s(self) -> float:
        return self._parts.as_dict()["device_device_parameters"]

    def allreduce(self, count: int) -> float:
        """Return the mean seconds of the bare group's all-reduce of the vector."""
        self._summed.fill_(1.0)
        began = time.perf_counter()
        for _ in range(count):
            self._bare.allreduce([self._summed]).wait()
        return (time.perf_counter() - began) / count

    def copy(self, num_floats: int, count: int, begin_at: float) -> float:
        """Return the mean seconds of a copy, which reads and writes each float once."""
        source, target = torch.ones(num_floats), torch.ones(num_floats)
        _wait_until(begin_at)
        began = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        return (time.perf_counter() - began) / count


def settings(method: str, num_workers: int) -> TrainConfig:
    """Return the default settings of a method, with an exchange in every step."""
    return TrainConfig(
        method=MethodConfig(name=method, period=1),
        scaling=ScalingConfig(num_workers=num_workers),
        training=endless_training(),
    )


def members(num_workers: int) -> Membership:
    """Return the first membership, of workers w0, w1, ..."""
    return Membership(1, tuple(f"w{rank}" for rank in range(num_workers)))


def _wait_until(at: float) -> None:
    """Sleep until a Unix time; processes of a machine share the clock."""
    time.sleep(max(0.0, at - time.time()))


class Crowd:
    """Workers, and a center for each method that they have entered.

    Args:
        num_parameters: length of each replica's vector.
        num_workers: number of workers.
        is_spread: place one worker per node, the first one and the centers on this node; else all
            on this node.
        environment: environment variables while workers join a group, for example of TLS.

    Ray must be connected. All actors end with the context.
    """

    def __init__(
        self,
        num_parameters: int,
        num_workers: int,
        *,
        is_spread: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.num_parameters = num_parameters
        self.num_workers = num_workers
        self.centers: dict[str, tuple[Any, int]] = {}
        """(actor, process id) by method."""
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        nodes = [here, *(node for node in others if node != here)]
        actor = ray.remote(num_cpus=0)(ExchangingWorker)
        self.workers = [
            actor.options(scheduling_strategy=_on(nodes[rank if is_spread else 0])).remote(
                num_parameters, rank, dict(environment)
            )
            for rank in range(num_workers)
        ]
        self._center_node = here
        self._run_id = uuid.uuid4().hex[:8]
        self._snapshot = ray.put(first_snapshot(FlatModel(Vector(num_parameters)), ENDLESS))
        self.pids = _answers([worker.pid.remote() for worker in self.workers])

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in [*self.workers, *(center for center, _ in self.centers.values())]:
            ray.kill(actor)

    def enter(self, method: str) -> None:
        """Start the center of a method and let all workers join; sync forms the bare group, too."""
        config = settings(method, self.num_workers)
        job = Job(config, resolve(config), UserLoop("vector"), DataShape((), 0), Endless())
        threads = 1 if job.method.is_sync else 2 * self.num_workers + 4
        actor: Any = CenterActor  # Ray's decorator adds options(), which type checkers do not see
        center = actor.options(
            max_concurrency=threads, scheduling_strategy=_on(self._center_node)
        ).remote()
        [(_, pid)] = _answers([center.start_center.remote(job, self._snapshot, [])])
        self.centers[method] = center, pid
        address = GroupAddress(f"{self._run_id}-{method}", 1, "cpu", _BOUND_S / 2)
        if not job.method.is_sync:
            [(_, snapshot)] = _answers([center.form.remote(members(self.num_workers))])
        else:
            snapshot = self._snapshot
        ids = members(self.num_workers).worker_ids
        _answers(
            [
                worker.enter.remote(job, worker_id, address, snapshot, center)
                for worker_id, worker in zip(ids, self.workers, strict=True)
            ]
        )
        if job.method.is_sync:
            bare = GroupAddress(f"{self._run_id}-bare", 1, "cpu", _BOUND_S / 2)
            ranks = enumerate(self.workers)
            _answers(
                [w.enter_bare.remote(bare, rank, self.num_workers, center) for rank, w in ranks]
            )

    def exchange(
        self, method: str, count: int, *, num_workers: int | None = None, only_last: bool = False
    ) -> Times:
        """Let workers exchange simultaneously, and return the mean of their times.

        Args:
            method: a method that they have entered.
            count: exchanges of each worker.
            num_workers: number of workers that exchange; None: all.
            only_last: whether only the last worker exchanges.
        """
        begin_at = time.time() + _TOGETHER_S
        workers = self.workers[-1:] if only_last else self.workers[:num_workers]
        times = _answers([w.exchange.remote(method, count, begin_at) for w in workers])
        _answers([self.centers[method][0].poll.remote()])  # collects the records, as in a run
        return Times(
            whole_s=_mean([t.whole_s for t in times]),
            message_s=_mean([t.message_s for t in times]),
            moved_s=_mean([t.moved_s for t in times]),
        )

    def allreduce(self, count: int) -> float:
        """Return the mean seconds of the bare group's all-reduce."""
        return _mean(_answers([w.allreduce.remote(count) for w in self.workers]))

    def copy(self, num_floats: int, count: int, *, num_workers: int | None = None) -> float:
        """Return the mean seconds of a copy while the first workers copy simultaneously."""
        begin_at = time.time() + _TOGETHER_S + num_floats * 1e-8
        workers = self.workers[:num_workers]
        return _mean(_answers([w.copy.remote(num_floats, count, begin_at) for w in workers]))

    def fresh_bytes(self, method: str, count: int) -> int:
        """Return the bytes that an exchange of one worker allocates and frees again.

        This is the peak of the resident memory of worker and center, above its value between
        exchanges. Unlike a number of page faults it does not depend on the page size.
        """
        pids = [self.pids[0], self.centers[method][1]]
        before = sum(map(_start_peak, pids))
        self.exchange(method, count, num_workers=None if method.startswith("sync") else 1)
        return max(0, sum(_status_bytes(pid, "VmHWM") for pid in pids) - before)


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _answers(references: Sequence[Any]) -> list[Any]:
    answers: list[Any] = ray.get(list(references), timeout=_BOUND_S)
    return answers


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _start_peak(pid: int) -> int:
    """Reset the peak memory of a process and return its resident memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_bytes(pid, "VmRSS")


def own_bytes(pid: int) -> int:
    """Return the bytes of a process's private memory."""
    return _status_bytes(pid, "RssAnon")


def _status_bytes(pid: int, name: str) -> int:
    """Return a size in bytes from Linux's status of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
