"""Measures the cost of hundreds of workers: settling, driver, regrouping, and memory under churn.

Command:   python -m benchmarks.scale        (--quick: fewer repeats, and without Ray)
           python -m benchmarks.scale --before FOLDER      (compared with an earlier checkout)

The workers are light: only the cost of managing them is measured. With ``--before`` both versions
are measured alternately, each in its own processes, and the table has the ratios.

- **settling**: CPU time in which the coordinator settles an exchange, and in which an assignment is
  pickled, with 16, 256 and 1,024 workers that exchange in random order; mean bytes of an
  assignment; and bytes of all assignments that the coordinator keeps for repeated messages.
- **driver**: CPU time of the controller with a real recorder, its event files, status and terminal,
  for one second of a run with 256 workers: two reports of each worker, four polls, five records. A
  fake worker group answers, so Ray's work is not included.
- **driver on Ray**: CPU time of a driver's process, including Ray's threads, with 32 actors that
  only answer; scaled to 256 workers.
- **regroup**: seconds in which forked processes find each other through a store, form a gloo group
  and sum 16 floats, and the connections of one of them.
- **memory**: bytes allocated by Python (``tracemalloc``) while a worker is replaced every 30 s: the
  median of the last four of 24 simulated hours over that of the eighth to twelfth; for controller
  and recorder under both kinds of methods, and for the center. Also the number of curve names.
  With 256 workers this takes half an hour.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.measure import Figure, Report, Spread, interleaved, ratios
from benchmarks.parts import parser_of_parts, write_answer
from benchmarks.programs import ROOT

WORKERS = 256
POLL_S, REPORT_S, RECORDS_S = 0.25, 0.5, 0.2
REPLACED_EVERY_S = 30.0
HOUR_S = 3600.0
_PART_S = 900.0
_RUN_S = 60.0

Values = dict[str, float]


# settling


def settling(num_workers: int, num_turns: int) -> Values:
    """Return CPU milliseconds and bytes of settling an exchange with ``num_workers`` members."""
    import numpy as np

    from raydl.config import MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
    from raydl.core.exchange import Header
    from raydl.core.membership import Membership
    from raydl.data.ledger import Ledger
    from raydl.methods import resolve
    from raydl.parameter_server.coordinator import Coordinator
    from raydl.parameter_server.protocol import Completion, MessageId, Request

    config = TrainConfig(
        method=MethodConfig(name="async-easgd", period=10),
        scaling=ScalingConfig(num_workers=num_workers),
        training=TrainingConfig(batch_size=64, epochs=1000),
    )
    coordinator = Coordinator(config, resolve(config), Ledger(1_281_167))
    ids = [f"w{rank}" for rank in range(num_workers)]
    coordinator.begin_generation(Membership(1, tuple(ids)))
    for worker_id in ids:
        coordinator.enter(MessageId(worker_id, 1, 0), 0)
    nothing, kept = np.empty(0, np.float32), {}
    shuffled, settle_s, pickle_s, num_bytes = random.Random(0), 0.0, 0.0, 0
    for turn in range(1, num_turns + 2):
        if turn == 2:  # the first turn is a warm-up
            settle_s = pickle_s = 0.0
            num_bytes = 0
        for worker_id in shuffled.sample(ids, num_workers):
            completion = Completion(Header(step_s=0.1), 10 * turn, 640 * turn, 0.1, 80)
            message_id = MessageId(worker_id, 1, turn)
            push = Request(
                message_id, (0, 0), nothing, nothing, num_workers, 0.1, completion=completion
            )
            began = time.process_time()
            assignment = coordinator.settle(push)
            settled = time.process_time()
            data = pickle.dumps(assignment, 5)
            pickle_s += time.process_time() - settled
            settle_s += settled - began
            num_bytes += len(data)
            kept[worker_id] = len(data)
    count = num_turns * num_workers
    return {
        "settle_ms": 1e3 * settle_s / count,
        "pickle_ms": 1e3 * pickle_s / count,
        "bytes": num_bytes / count,
        "kept_bytes": float(sum(kept.values())),
    }


# churn without processes


class ChurningWorkerGroup:
    """A fake worker group whose workers report progress and are lost periodically.

    Args:
        is_sync: whether a loss lets the other workers leave their loops, as in rounds.
        poll_s: simulated seconds of a poll; half of the workers answer a poll of 0.25 s.
        replaced_every_s: seconds between two losses; None: no worker is lost.
        parts: time parts that a worker reports.
    """

    def __init__(
        self,
        *,
        is_sync: bool,
        poll_s: float,
        parts: Mapping[str, float],
        replaced_every_s: float | None = None,
    ) -> None:
        self.now = 0.0
        self.num_lost = 0
        self._is_sync = is_sync
        self._poll_s = poll_s
        self._parts = parts
        self._every_s = replaced_every_s
        self._next_loss = replaced_every_s or 0.0
        self._round = 0
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self._inside: set[str] = set()
        self._workers: dict[str, None] = {}
        self._starting: list[str] = []
        self._rounds = [0]
        self._events: list[Any] = []
        self._random = random.Random(0)
        self._num_polls = 0

    def request_worker(self, worker_id: str, own_state: Any = None) -> None:
        """Add a worker that is ready at the next poll."""
        self._starting.append(worker_id)

    def end(self, worker_id: str) -> None:
        """Remove a worker."""
        self._workers.pop(worker_id, None)

    def form(self, membership: Any, round: int, own_states: Any) -> None:
        """Start a generation of all members."""
        self._generation = membership.generation
        self._members, self._inside = (), set()
        self.change(membership, own_states)

    def change(self, membership: Any, own_states: Any) -> None:
        """Replace the members, and let newcomers train."""
        from raydl.core.worker_group import Changed

        self._inside |= set(membership.worker_ids) - set(self._members)
        self._members = membership.worker_ids
        self._events.append(Changed())

    def abandon(self, generation: int) -> None:
        """End the round of all workers as broken."""
        self._leave("BROKEN")

    def vote(self, generation: int, **votes: float) -> None:
        """End the round of all workers by a vote to regroup."""
        if votes.get("regroup"):
            self._leave("REGROUP")

    def publish(self, worker_id: str) -> None:
        """Publish the round of a worker as the center's."""
        self._rounds = [self._round]

    def _leave(self, outcome: str) -> None:
        from raydl.core.reports import Outcome
        from raydl.core.worker_group import RunEnded

        ended = [w for w in self._members if w in self._inside]
        self._inside -= set(ended)
        self._rounds = [self._round]
        self._events += [
            RunEnded(w, Outcome[outcome], self._round, self._generation, "a reset") for w in ended
        ]

    def poll(self, timeout_s: float) -> list[Any]:
        """Return the events of the next ``poll_s`` simulated seconds."""
        from raydl.core.worker_group import Lost, Published, Reported, WorkerReady

        self.now += self._poll_s
        self._num_polls += 1
        for worker_id in self._starting:
            self._workers[worker_id] = None
            self._events.append(WorkerReady(worker_id, "node"))
        self._starting = []
        if self._every_s and self.now >= self._next_loss and self._inside:
            self._next_loss += self._every_s
            lost = self._random.choice(sorted(self._inside))
            self.num_lost += 1
            del self._workers[lost]
            self._inside.discard(lost)
            self._events.append(Lost(lost, "its process was killed, or crashed"))
        if self._inside:
            self._round += 1
        reports = self._reports()
        records = () if self._is_sync else self._records()
        published = Published(tuple(self._rounds), records, sent_s=self.now, process="center")
        events, self._events = self._events, []
        return [*events, *map(Reported, reports), published]

    def _reports(self) -> list[Any]:
        from raydl.core.reports import WorkerReport

        number = round(REPORT_S / self._poll_s) or 1
        due = [w for i, w in enumerate(self._workers) if i % number == self._num_polls % number]
        reports = []
        for worker_id in due:
            is_first = bool(self._members) and worker_id == self._members[0]
            records = self._records() if self._is_sync and is_first and self._inside else ()
            reports.append(
                WorkerReport(
                    worker_id, self._round, records, (), dict(self._parts), step_s=0.1,
                    generation=self._generation, local_step=10 * self._round, waited_s=0.01,
                    round_s=1.0, sent_s=self.now,
                )
            )  # fmt: skip
        return reports

    def _records(self) -> tuple[Any, ...]:
        from raydl.core.progress import Progress
        from raydl.core.reports import Record

        count = max(1, min(3, round(self._poll_s / RECORDS_S)))
        return tuple(
            Record(
                Progress(
                    round=self._round, generation=self._generation, epoch=0.1,
                    num_samples=64 * self._round + i, local_step=10 * self._round, seconds=self.now,
                ),
                num_workers=len(self._members), lr=0.1, exchange_bytes=1000, loss=1.0,
                distance=0.1, exchange_s=0.01, staleness=1.0, period=10.0, at_s=self.now,
            )
            for i in range(count)
        )  # fmt: skip

    def waiting_for(self) -> str:
        """Return a description of the missing resources."""
        return "workers"

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *arguments, **more: ""


class CountingWriter:
    """A writer that only collects the names of curves."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Collect the names."""
        self.names.update(values)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **more: None


class Driver:
    """A controller with its recorder and a fake worker group.

    Args:
        is_sync: whether the method is synchronous.
        num_workers: number of workers.
        writer: writer of the curves.
        folder: folder of the run; None: no status is written.
        more: arguments of ``ChurningWorkerGroup``.
    """

    def __init__(
        self, *, is_sync: bool, num_workers: int, writer: Any, folder: Path | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        import torch

        from raydl.checkpoint.best import BestCenter
        from raydl.config import (
            CheckpointConfig,
            ElasticConfig,
            MethodConfig,
            ScalingConfig,
            TrainConfig,
            TrainingConfig,
        )
        from raydl.core.center import first_snapshot
        from raydl.core.flat import FlatModel
        from raydl.elastic.controller import Controller
        from raydl.methods import resolve
        from raydl.metrics import TIME_PARTS
        from raydl.run.control_channel import ControlChannel
        from raydl.run.progress_reporter import make_reporter
        from raydl.run.recorder import RunRecorder
        from raydl.run.view import EventLog, RunView
        from raydl.storage import Storage

        config = TrainConfig(
            method=MethodConfig(name="sync-easgd" if is_sync else "async-easgd"),
            scaling=ScalingConfig(num_workers=(1, num_workers)),
            training=TrainingConfig(epochs=100_000),
            checkpoint=CheckpointConfig(every_s=None),
            elastic=ElasticConfig(max_restarts=10_000),
        )
        self.worker_group = ChurningWorkerGroup(
            is_sync=is_sync, parts=dict.fromkeys(TIME_PARTS, 1.0), **more
        )
        storage = Storage(str(folder or "runs/none"))
        flat = FlatModel(torch.nn.Linear(1, 1))
        start = first_snapshot(flat, 60_000)
        clock = lambda: self.worker_group.now  # noqa: E731
        log = EventLog(make_reporter("plain"), clock=clock)
        self.recorder = RunRecorder(
            config, num_train=60_000, start=start, seconds_before=0.0, writer=writer, progress=log,
            store=mock.Mock(), best=BestCenter(storage, flat), flat=flat, examples=mock.Mock(),
            after_checkpoint=lambda: None,
        )  # fmt: skip
        worker_group: Any = self.worker_group
        self.controller = Controller(
            worker_group,
            config,
            resolve(config),
            self.recorder,
            first_round=0,
            own_states={},
            clock=clock,
        )
        self.recorder.follow(self.controller)
        view = RunView(config, start, seconds_before=0.0, clock=clock)
        view.follow_recorder(self.recorder, log)
        view.follow(self.controller)
        self._view, self._channel = view, ControlChannel(storage) if folder else None

    def step(self) -> None:
        """Take a step of the driver's loop, as in a run."""
        self.controller.step()
        if self._channel:
            self._channel.report(self._view.status)
            self._channel.pop_requests()

    def begin(self) -> None:
        """Step until all workers train."""
        while self.controller.state.value != "training":
            self.step()


@contextlib.contextmanager
def simulated_clock(driver: Driver) -> Iterator[None]:
    """Replace the recorder's clock by the driver's simulated time."""
    clock = mock.Mock(
        monotonic=lambda: driver.worker_group.now, time=lambda: driver.worker_group.now
    )
    with mock.patch("raydl.run.recorder.time", clock):
        yield


def driving(num_workers: int, seconds: float) -> Values:
    """Return the CPU share of a driver by kind of method, without Ray's work."""
    from raydl.metrics import TensorBoardWriter, Thinned

    shares = {}
    for kind, is_sync in (("rounds", True), ("messages", False)):
        folder = Path(tempfile.mkdtemp(prefix="raydl-"))
        try:
            with open(os.devnull, "w") as out, contextlib.redirect_stdout(out):
                writer = Thinned(TensorBoardWriter(str(folder)))
                driver = Driver(
                    is_sync=is_sync, num_workers=num_workers, writer=writer, folder=folder,
                    poll_s=POLL_S,
                )  # fmt: skip
                driver.begin()
                began, until = time.process_time(), driver.worker_group.now + seconds
                while driver.worker_group.now < until:
                    driver.step()
                shares[kind] = (time.process_time() - began) / seconds
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return shares


def day(num_workers: int, hours: float, poll_s: float) -> Values:
    """Return the growth of the memory of driver and center in a day of replacements."""
    values: Values = {}
    for kind, is_sync in (("rounds", True), ("messages", False)):
        writer = CountingWriter()
        with open(os.devnull, "w") as out, contextlib.redirect_stdout(out):
            values[kind], num_lost = _growth_of_driver(
                writer, hours, is_sync=is_sync, num_workers=num_workers, poll_s=poll_s
            )
        values[f"{kind}_lost"], values[f"{kind}_names"] = num_lost, float(len(writer.names))
    values["center"] = _growth_of_center(num_workers, hours)
    return values


class MemoryGrowth:
    """Measures the growth of Python's memory from the middle of a time to its end.

    The begin does not count: memory grows there until all of the first workers have been replaced,
    which takes hours with hundreds of workers.
    """

    def __init__(self, hours: float) -> None:
        self._early = (hours / 3, hours / 2)
        self._late = (hours * 5 / 6, hours)
        self._sizes: dict[tuple[float, float], list[int]] = {self._early: [], self._late: []}
        self._next = 0.0
        tracemalloc.start()  # earlier allocations do not count

    def sample(self, hour: float) -> None:
        """Sample the memory, every ten minutes of simulated time."""
        if hour < self._next:
            return
        self._next = hour + 1 / 6
        gc.collect()
        for (begin, end), sizes in self._sizes.items():
            if begin <= hour <= end:
                sizes.append(tracemalloc.get_traced_memory()[0])

    def ratio(self) -> float:
        """Return the late median over the early one."""
        tracemalloc.stop()
        return median(self._sizes[self._late]) / median(self._sizes[self._early])


def _growth_of_driver(writer: Any, hours: float, **more: Any) -> tuple[float, float]:
    """Return (growth of the memory, lost workers) of a driver whose workers are replaced."""
    driver = Driver(writer=writer, replaced_every_s=REPLACED_EVERY_S, **more)
    with simulated_clock(driver):
        driver.begin()
        growth = MemoryGrowth(hours)
        while driver.worker_group.now < hours * HOUR_S:
            driver.step()
            growth.sample(driver.worker_group.now / HOUR_S)
    return growth.ratio(), float(driver.worker_group.num_lost)


def _growth_of_center(num_workers: int, hours: float) -> float:
    """Return the growth of the memory of a center whose members are replaced."""
    import numpy as np
    import torch

    from raydl.config import MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
    from raydl.core.center import first_snapshot
    from raydl.core.exchange import Header
    from raydl.core.flat import FlatModel
    from raydl.core.job import Job
    from raydl.core.membership import Membership
    from raydl.data import DataShape
    from raydl.methods import resolve
    from raydl.parameter_server.protocol import Completion, MessageId, Request
    from raydl.parameter_server.server import CenterServer
    from raydl.worker.user_loop import Endless, UserLoop

    config = TrainConfig(
        method=MethodConfig(name="async-easgd", period=10),
        scaling=ScalingConfig(num_workers=num_workers),
        training=TrainingConfig(batch_size=64, epochs=100_000),
    )
    job = Job(config, resolve(config), UserLoop("vector"), DataShape((), 0), Endless())
    flat = FlatModel(torch.nn.Linear(10, 1))
    server = CenterServer(job, first_snapshot(flat, 60_000))
    members = [f"w{i}" for i in range(num_workers)]
    server.begin_generation(Membership(1, tuple(members)))
    entered = dict.fromkeys(members, 1)
    trained = dict.fromkeys(members, 0)
    chance, weights, nothing = random.Random(0), np.zeros(11, np.float32), np.empty(0, np.float32)
    for worker_id in members:
        server.enter(MessageId(worker_id, 1, 0), 0)
    num_changes, growth = int(hours * HOUR_S / REPLACED_EVERY_S), MemoryGrowth(hours)
    for number in range(num_changes):
        for worker_id in chance.sample(members, min(num_workers, 16)):
            trained[worker_id] += 1
            step = trained[worker_id]
            completion = Completion(Header(step_s=0.1), 10 * step, 640 * step, 0.1, 80)
            message_id = MessageId(worker_id, entered[worker_id], step)
            server.exchange(
                Request(
                    message_id, (0, 11), weights, nothing, num_workers, 0.1, completion=completion
                )
            )
        lost, newcomer = chance.randrange(num_workers), f"w{num_workers + number}"
        del entered[members[lost]], trained[members[lost]]
        members[lost], entered[newcomer], trained[newcomer] = newcomer, number + 2, 0
        server.change(Membership(number + 2, tuple(members)), [])
        server.enter(MessageId(newcomer, number + 2, 0), 0)
        server.coordinator.pop_records()
        server.coordinator.pop_due()
        growth.sample(number / num_changes * hours)
    return growth.ratio()


# the driver on Ray


def driving_on_ray(num_workers: int, seconds: float) -> Values:
    """Return the CPU share of a driver's process with ``num_workers`` light actors."""
    import ray

    from benchmarks.parts import ray_here
    from raydl.config import MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
    from raydl.core.job import Job
    from raydl.core.reports import WorkerReport
    from raydl.core.worker_group import Changed, Published, WorkerReady
    from raydl.data import DataShape
    from raydl.elastic.controller import Controller
    from raydl.methods import resolve
    from raydl.metrics import TIME_PARTS
    from raydl.ray_backend.cluster import Place
    from raydl.ray_backend.worker_group import RayWorkerGroup
    from raydl.storage import Storage
    from raydl.worker.user_loop import Endless, UserLoop

    config = TrainConfig(
        method=MethodConfig(name="async-easgd"),
        scaling=ScalingConfig(num_workers=num_workers),
        training=TrainingConfig(epochs=5),
    )
    job = Job(config, resolve(config), UserLoop("vector"), DataShape((), 0), Endless())

    class LightWorker:
        """A worker that only reports."""

        def __init__(self, worker_id: str) -> None:
            self._worker_id, self._round = worker_id, 0
            self._parts = dict.fromkeys(TIME_PARTS, 1.0)

        @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
        def run(self) -> None:
            """Block, like the loop of a worker."""
            time.sleep(1e6)

        def report(self) -> WorkerReport:
            """Return the report of a worker."""
            self._round += 1
            return WorkerReport(self._worker_id, self._round, (), (), self._parts, step_s=0.1)

    class LightCenter:
        """A center that only answers polls."""

        def poll(self) -> Published:
            """Return the answer of a center."""
            return Published((0,))

    class LightWorkerGroup(RayWorkerGroup):
        """A worker group that polls light actors."""

        def __init__(self, workers: Mapping[str, Any]) -> None:
            actor = ray.remote(num_cpus=0)(LightCenter)
            dataset: Any = mock.Mock(train=0, test=0)
            prepare: Any = mock.Mock()
            super().__init__(job, dataset, prepare, {}, Storage(tempfile.gettempdir()))
            self._workers = dict(workers)
            self._places = dict.fromkeys(["center", *workers], Place.here())
            self._events = [WorkerReady(w) for w in workers]
            self._shards, self._is_center_up = [actor.remote()], True
            for worker_id, worker in workers.items():
                self._calls.expect(worker.run.remote(), worker_id, lambda end: [], generation=1)

        def request_worker(self, worker_id: str, own_state: Any = None) -> None:
            """Do nothing: the workers are ready."""

        def form(self, membership: Any, round: int, own_states: Any) -> None:
            """Confirm the membership."""
            self._events.append(Changed())

        def evaluate(self, round: int) -> None:
            """Do nothing: there is no model."""

    with ray_here():
        actor = ray.remote(num_cpus=0, concurrency_groups={"loop": 1})(LightWorker)
        workers = {f"w{i}": actor.remote(f"w{i}") for i in range(num_workers)}
        ray.get([w.report.remote() for w in workers.values()], timeout=_PART_S / 2)
        recorder: Any = CountingWriter()
        recorder.is_writing = False
        worker_group: Any = LightWorkerGroup(workers)
        controller = Controller(
            worker_group, config, resolve(config), recorder, first_round=0, own_states={}
        )
        deadline = time.monotonic() + _RUN_S
        while controller.state.value != "training" and time.monotonic() < deadline:
            controller.step()
        assert controller.num_workers == num_workers
        began, cpu_s, steps = time.monotonic(), time.process_time(), 0
        while time.monotonic() < began + seconds:
            controller.step()
            steps += 1
        elapsed_s = time.monotonic() - began
        share = (time.process_time() - cpu_s) / elapsed_s
        return {"share": share, "polls_s": steps / elapsed_s}


# groups


def regroup(num_workers: int) -> Values:
    """Return the seconds in which forked processes form a gloo group and sum once."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    torch.set_num_threads(1)
    bound = timedelta(seconds=_RUN_S)
    reader, writer = os.pipe()
    keeper = os.fork()
    if not keeper:  # the store has its own process, as in a run
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=bound)
        os.write(writer, str(store.port).encode())
        time.sleep(2 * _RUN_S)
        os._exit(0)
    port = int(os.read(reader, 16))
    children = [keeper]
    try:
        for rank in range(num_workers):
            child = os.fork()
            if not child:
                _run_member(dist, port, rank, num_workers, bound)
            children.append(child)
        store = dist.TCPStore("127.0.0.1", port, timeout=bound)
        _wait_for(store, "up", num_workers)
        began = time.monotonic()
        store.set("go", "1")
        _wait_for(store, "done", num_workers)
        seconds = time.monotonic() - began
        return {"seconds": seconds, "connections": float(store.get("connections"))}
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
            os.waitpid(child, 0)


def _wait_for(store: Any, key: str, count: int) -> None:
    deadline = time.monotonic() + _RUN_S
    while store.add(key, 0) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out: {store.add(key, 0)} of {count} processes are {key}")
        time.sleep(0.01)


def _run_member(dist: Any, port: int, rank: int, num_workers: int, bound: timedelta) -> None:
    """Form a group, sum, and exit the process."""
    import torch

    from raydl.collective.process_group import TorchGroup

    code = 1
    try:
        store = dist.TCPStore("127.0.0.1", port, timeout=bound)
        group = TorchGroup(rank, num_workers, device="cpu", timeout_s=_RUN_S)
        before = _num_sockets()
        store.add("up", 1)
        store.wait(["go"], bound)
        rendezvous = dist.PrefixStore("group", store)
        if rank == 0:  # in a run the center writes the secret; earlier versions ignore it
            rendezvous.set("secret", "of this generation")
        group.connect(rendezvous, host="127.0.0.1")
        tensor = torch.ones(16)
        group.start_allreduce(tensor).wait()
        assert float(tensor[0]) == num_workers
        if rank == 1:
            store.set("connections", str(_num_sockets() - before - 1))  # one socket listens
        store.add("done", 1)
        code = 0
        time.sleep(_RUN_S)
    finally:
        os._exit(code)


def _num_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


# all parts

PARTS: dict[str, Callable[[int, float], Values]] = {
    "settling": lambda p, turns: settling(p, int(turns)),
    "driver": driving,
    "driver-on-ray": driving_on_ray,
    "regroup": lambda p, _: regroup(p),
    "day": lambda p, hours: day(p, hours, 5.0),
}


class Trees:
    """This version of raydl and, if given, an earlier one, each measured in its own processes.

    Args:
        before: folder of a checkout of the earlier version.
    """

    def __init__(self, before: Path | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="raydl-"))
        self.names = ("now", *(["before"] if before else []))
        for name, raydl in (("now", ROOT), ("before", before)):
            if raydl is not None:
                (self._folder / name).mkdir()
                (self._folder / name / "raydl").symlink_to(raydl.resolve() / "raydl")
                (self._folder / name / "benchmarks").symlink_to(ROOT / "benchmarks")

    def measure(self, name: str, part: str, workers: int, amount: float) -> Values:
        """Measure a part with a version and return its values."""
        tree, answer = self._folder / name, self._folder / "answer"
        arguments = ("--part", part, "--workers", workers, "--amount", amount, "--answer", answer)
        environment = {
            **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "",
            "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(self._folder),
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.scale", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=_PART_S, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{part} of {name} failed:\n{done.stderr[-4000:]}")
        values: Values = json.loads(answer.read_text())
        return values

    def close(self) -> None:
        """Delete the folder of both versions."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Table:
    """Measures parts and adds them to a report."""

    def __init__(self, report: Report, trees: Trees, repeats: int) -> None:
        self._report = report
        self._trees = trees
        self._repeats = repeats
        self._rows: list[tuple[str, ...]] = []

    def add(
        self, part: str, workers: int, amount: float,
        targets: Mapping[str, tuple[str, float | None, float]],
    ) -> None:  # fmt: skip
        """Measure a part with each version.

        Args:
            part: name of the part, in ``PARTS``.
            workers: number of workers.
            amount: length of the measurement, in the unit of the part.
            targets: (title, upper limit or None, factor) of each value, by its name.
        """

        def case(name: str) -> Callable[[], Values]:
            return lambda: self._trees.measure(name, part, workers, amount)

        cases = {name: case(name) for name in self._trees.names}
        measured = interleaved(cases, repeats=self._repeats)
        for key, (title, most, factor) in targets.items():
            by_version = {
                name: [factor * values[key] for values in repeats]
                for name, repeats in measured.items()
            }
            now, before = by_version["now"], by_version.get("before")
            ratio = ratios(now, before).text(".2g") if before and min(before) > 0 else ""
            spread_before = Spread.of(before).text() if before else ""
            self._rows.append((title, str(workers), spread_before, Spread.of(now).text(), ratio))
            self._report.add_figures(
                Figure(
                    name=f"scale.{part}-{workers}.{key}", value=Spread.of(now),
                    target=most, is_better="less",
                )
            )  # fmt: skip

    def close(self) -> None:
        """Add the table to the report."""
        self._report.add_table(("what", "workers", "before", "now", "now over before"), self._rows)


def main() -> None:
    """Measure and report."""
    own: dict[str, dict[str, Any]] = {"workers": {"type": int}, "amount": {"type": float}}
    parser = parser_of_parts(__doc__, **own)
    parser.add_argument("--before", type=Path, help="folder of an earlier checkout to compare with")
    parser.add_argument("--only", choices=sorted(PARTS), help="measure only this part")
    options = parser.parse_args()
    if options.part:
        write_answer(options.answer, PARTS[options.part](options.workers, options.amount))
        return
    report = Report.of_command("scale", options)
    trees = Trees(options.before)
    table = Table(report, trees, options.repeats or (1 if options.quick else 5))
    left_out = {"driver-on-ray", "day"} if options.quick else set()
    try:
        for part in [options.only] if options.only else [p for p in PARTS if p not in left_out]:
            _measure(part, table, is_quick=options.quick)
        table.close()
    finally:
        trees.close()
    report.close(options.out)


def _measure(part: str, table: Table, *, is_quick: bool) -> None:
    """Measure one part with each number of workers, and compare it with its targets."""
    if part == "settling":
        for workers in (16, WORKERS, 1024):
            most_ms = 0.2 if workers == WORKERS else None
            table.add(part, workers, 3 if is_quick else 8, {
                "settle_ms": ("settling, ms of CPU", most_ms, 1.0),
                "pickle_ms": ("pickling an assignment, ms of CPU", None, 1.0),
                "bytes": ("bytes of an assignment", None, 1.0),
                "kept_bytes": ("MB of assignments kept", None, 1e-6),
            })  # fmt: skip
    elif part == "driver":
        table.add(part, WORKERS, 10.0 if is_quick else 60.0, {
            "rounds": ("driver without Ray, rounds, share of a core", 0.5, 1.0),
            "messages": ("driver without Ray, messages, share of a core", 0.5, 1.0),
        })  # fmt: skip
    elif part == "regroup":
        for workers in (64, WORKERS) if is_quick else (64, 128, WORKERS):
            table.add(part, workers, 0.0, {
                "seconds": ("regroup, s", 3.0 if workers == WORKERS else None, 1.0),
                "connections": ("connections of a process", None, 1.0),
            })  # fmt: skip
    elif part == "driver-on-ray":
        workers = 32
        table.add(part, workers, 20.0, {
            "share": (f"driver on Ray, times {WORKERS // workers}, share of a core", 0.5,
                      WORKERS / workers),
            "polls_s": ("polls a second", None, 1.0),
        })  # fmt: skip
    else:
        kinds = ("rounds", "messages")
        for workers in (16, WORKERS):
            table.add(part, workers, 24.0, {
                **{k: (f"{k}: driver's memory, late over early", 1.05, 1.0) for k in kinds},
                "center": ("center's memory, late over early", 1.05, 1.0),
                **{f"{k}_names": (f"{k}: curve names", None, 1.0) for k in kinds},
            })  # fmt: skip


if __name__ == "__main__":
    main()
