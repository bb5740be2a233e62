"""Workers in Ray actors that do nothing but exchange, by the classes that a run uses.

A worker has a replica of one vector, whose local step is empty: what is left of a step is what an
exchange takes, the moves of replica and center with it. Beside it, in the same process, stand what
it is compared with: a process group of torch without anything around it, and a plain copy.

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
from raydl.collective.sync_strategy import SyncStrategy, Trained
from raydl.config import MethodConfig, ScalingConfig, TrainConfig
from raydl.core.center import first_snapshot
from raydl.core.exchange import Header, StepPlan
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.methods import resolve
from raydl.core.replica import Replica
from raydl.core.strategy import Strategy, WorkerContext
from raydl.data import DataShape
from raydl.metrics import TimeParts
from raydl.parameter_server.async_strategy import AsyncStrategy
from raydl.parameter_server.ray_transport import RayCenterClient
from raydl.ray_backend.actors import CenterActor
from raydl.worker.user_loop import ENDLESS, Endless, UserLoop, endless_training

_BOUND_S = 120.0
"""The longest wait for an answer of an actor, in seconds."""
_TOGETHER_S = 0.05
"""From an order to several workers until all begin at once, in seconds."""
_dist: Any = torch.distributed  # torch's stubs do not export what its documentation does


class Vector(nn.Module):
    """A model of one parameter, shape [num_parameters]."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.rand(num_parameters))


class Still(Optimizer):
    """An optimizer that moves nothing, so that a local step takes no time."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What one exchange took, in seconds: the mean over several."""

    whole_s: float
    """All of it: sent, waited for, replica and center moved, the round settled."""
    message_s: float
    """Until all has been sent and has arrived."""
    moved_s: float
    """All but the wait for an answer, and what a round takes besides: by memory, all that moves
    replica and center."""


class Party:
    """One worker: a replica, and each way in which it exchanges, by the method's name.

    Args:
        num_parameters: of its vector.
        seed: of its first values.
        environment: in which it joins the others; it may ask for TLS.
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
            make_optimizer=lambda tensors: Still(tensors, {}),
            time_parts=self._parts,
        )
        self._replica.flat.release_gradients()
        self._strategies: dict[str, Strategy] = {}
        self._num_steps = 0
        self._bare: Any = None
        self._in_steps_s = 0.0

    def place(self) -> tuple[str, int]:
        """Return the address of the host, and the process id."""
        return ray.util.get_node_ip_address(), os.getpid()

    def enter(
        self, job: Job, worker_id: str, place: GroupAddress, snapshot: Any, center: Any
    ) -> None:
        """Join the others, or the center, for a method."""
        membership = members(job.config.scaling.max_workers)
        context = WorkerContext(
            config=job.config, method=job.method, membership=membership, worker_id=worker_id,
            flat=self._replica.flat, time_parts=self._parts, cuts=job.order.cuts, feedback={},
        )  # fmt: skip
        if job.method.is_sync:
            rank = membership.worker_ids.index(worker_id)
            with mock.patch.dict(os.environ, self._environment):
                group = CollectiveGroup(place, membership.worker_ids, rank, center=center)
            strategy: Strategy = SyncStrategy(context, group, snapshot, Trained())
        else:
            client = RayCenterClient([center], timeout_s=place.timeout_s)
            strategy = AsyncStrategy(context, client, snapshot, incarnation=0, local_step=0)
        self._strategies[job.method.name] = strategy

    def enter_bare(self, place: GroupAddress, rank: int, num_workers: int, center: Any) -> None:
        """Form a process group of torch, as a program without raydl would."""
        options = _dist.ProcessGroupGloo._Options()
        host = ray.util.get_node_ip_address()  # gloo's own guess may be another interface
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=place.timeout_s)
        # Python must keep it as long as the group is
        self._store = CenterStore(center, place, num_workers)
        self._bare = _dist.ProcessGroupGloo(self._store, rank, num_workers, options)
        self._summed = torch.ones_like(self._replica.flat.weights)

    def exchange(self, method: str, count: int, begin_at: float) -> Times:
        """Exchange so many times; return the mean times of one."""
        strategy = self._strategies[method]
        _wait_until(begin_at)
        in_steps_s = self._in_steps_s
        began, waited_s = time.perf_counter(), self._waited_s()
        for _ in range(count):
            self._exchange_once(strategy)
        whole_s = (time.perf_counter() - began) / count
        if isinstance(strategy, SyncStrategy):
            strategy.pop_records()  # as a controller does; else they would pile up
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
        with mock.patch.object(exchange, "wait", self._answered(exchange.wait)):
            sums = self._replica.step_as_it_is(step_plan)
        self._in_steps_s += time.perf_counter() - began
        self._num_steps += 1
        strategy.settle(sums or Header(), self._num_steps)

    def _answered(self, wait: Callable[[], Any]) -> Callable[[], Any]:
        """Return a wait whose time counts to no step."""

        def wait_uncounted() -> Any:
            began = time.perf_counter()
            answer = wait()
            self._in_steps_s -= time.perf_counter() - began
            return answer

        return wait_uncounted

    def _waited_s(self) -> float:
        return self._parts.as_dict()["device_device_parameters"]

    def allreduce(self, count: int) -> float:
        """Return the mean seconds of the bare group's all-reduce of a vector of that size."""
        self._summed.fill_(1.0)
        began = time.perf_counter()
        for _ in range(count):
            self._bare.allreduce([self._summed]).wait()
        return (time.perf_counter() - began) / count

    def copy(self, num_floats: int, count: int, begin_at: float) -> float:
        """Return the mean seconds of a copy of so many floats, one read and one write of each."""
        source, target = torch.ones(num_floats), torch.ones(num_floats)
        _wait_until(begin_at)
        began = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        return (time.perf_counter() - began) / count


def settings(method: str, num_workers: int) -> TrainConfig:
    """Return the settings of a method, by its defaults, with an exchange in every step."""
    return TrainConfig(
        method=MethodConfig(name=method, period=1),
        scaling=ScalingConfig(num_workers=num_workers),
        training=endless_training(),
    )


def members(num_workers: int) -> Membership:
    """Return the membership of so many workers."""
    return Membership(1, tuple(f"w{rank}" for rank in range(num_workers)))


def _wait_until(at: float) -> None:
    """Sleep until a time of the clock that all processes of a machine share."""
    time.sleep(max(0.0, at - time.time()))


class Crowd:
    """So many workers, and a center for each method that they have entered.

    Args:
        num_parameters: of each replica.
        num_workers: of them; all on this node, or one on each node there is.
        is_spread: one on each node, the first one with the centers on the driver's.
        environment: in which the workers join one another; it may ask for TLS.

    Ray is connected with; all actors end with the context.
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
        """By method, the actor and its process id."""
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        nodes = [here, *(node for node in others if node != here)]
        actor = ray.remote(num_cpus=0)(Party)
        self.workers = [
            actor.options(scheduling_strategy=_on(nodes[rank if is_spread else 0])).remote(
                num_parameters, rank, dict(environment)
            )
            for rank in range(num_workers)
        ]
        self._home = here
        self._run_id = uuid.uuid4().hex[:8]
        self._snapshot = ray.put(first_snapshot(FlatModel(Vector(num_parameters)), ENDLESS))
        self.pids = [pid for _, pid in _answers([w.place.remote() for w in self.workers])]

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in [*self.workers, *(center for center, _ in self.centers.values())]:
            ray.kill(actor)

    def enter(self, method: str) -> None:
        """Open a center, and let all workers join for a method; also for the bare group."""
        config = settings(method, self.num_workers)
        job = Job(config, resolve(config), UserLoop("vector"), DataShape((), 0), Endless())
        threads = 1 if job.method.is_sync else 2 * self.num_workers + 4
        actor: Any = CenterActor  # Ray's decorator gave it what no type checker sees
        center = actor.options(
            max_concurrency=threads, scheduling_strategy=_on(self._home)
        ).remote()
        opened = center.start_center.remote(job, self._snapshot, [])
        [(_, pid)] = _answers([opened])
        self.centers[method] = center, pid
        place = GroupAddress(f"{self._run_id}-{method}", 1, "cpu", _BOUND_S / 2)
        if not job.method.is_sync:
            [(_, snapshot)] = _answers([center.form.remote(members(self.num_workers))])
        else:
            snapshot = self._snapshot
        ids = members(self.num_workers).worker_ids
        _answers(
            [
                worker.enter.remote(job, worker_id, place, snapshot, center)
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
        self, method: str, count: int, *, num_workers: int | None = None, far: bool = False
    ) -> Times:
        """Let workers exchange at once; return the mean of their times.

        Args:
            method: one that they have entered.
            count: exchanges of each.
            num_workers: so many of them; None: all.
            far: the last one alone.
        """
        at = time.time() + _TOGETHER_S
        workers = self.workers[-1:] if far else self.workers[:num_workers]
        times = _answers([w.exchange.remote(method, count, at) for w in workers])
        _answers([self.centers[method][0].poll.remote()])  # takes the records, as a run does
        return Times(
            whole_s=_mean([t.whole_s for t in times]),
            message_s=_mean([t.message_s for t in times]),
            moved_s=_mean([t.moved_s for t in times]),
        )

    def allreduce(self, count: int) -> float:
        """Return the mean seconds of the bare group's all-reduce."""
        return _mean(_answers([w.allreduce.remote(count) for w in self.workers]))

    def copy(self, num_floats: int, count: int, *, num_workers: int | None = None) -> float:
        """Return the mean seconds of a copy while the first so many workers copy at once."""
        at = time.time() + _TOGETHER_S + num_floats * 1e-8
        workers = self.workers[:num_workers]
        return _mean(_answers([w.copy.remote(num_floats, count, at) for w in workers]))

    def swing_bytes(self, method: str, count: int) -> int:
        """Return the memory that comes and goes with an exchange of one worker, at its peak.

        How far the resident memory of worker and center rises above what they hold between
        exchanges; other than page faults it does not depend on the size of pages.
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
    """Let the peak of a process's memory be counted from now on; return what it holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_bytes(pid, "VmRSS")


def own_bytes(pid: int) -> int:
    """Return the memory that a process holds and shares with no other."""
    return _status_bytes(pid, "RssAnon")


def _status_bytes(pid: int, name: str) -> int:
    """Return a size that Linux tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
