"""Simulates the workers of a run on machines that are preempted, in simulated time.

The run's own controller manages them, so membership changes, regroupings, replacements and hot
spares are decided as in a real run. Only the durations are assumed. Time in which nothing happens
passes at once: an hour with a thousand workers takes some seconds.

A worker needs CPU time to start and to train. A machine has cores for ``workers_per_machine`` of
them; if more start or train there, as after a hot spare has taken the place of a worker of another
machine, each is slower. In a synchronous method the slowest member sets the pace of all.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    MethodConfig,
    ScalingConfig,
    TrainConfig,
)
from raydl.core.center import Snapshot
from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.saved_state import SavedState
from raydl.core.scores import Evaluated
from raydl.core.worker_group import (
    Changed,
    Collected,
    Draining,
    Event,
    HandedIn,
    Lost,
    Published,
    RunEnded,
    TookOver,
    WorkerReady,
)
from raydl.elastic.controller import Controller
from raydl.elastic.run_state import State
from raydl.faults import Fault
from raydl.methods import resolve
from raydl.tools.spot import Fleet, Preemption, SpotPrediction

_CALM_S = 1.0
"""Seconds without an event after which time passes in leaps."""
_LEAP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of a simulation."""

    num_samples: float
    """Samples that counted."""
    machine_s: float
    """Seconds that machines were up, of all machines together."""
    prediction: SpotPrediction
    num_generations: int
    events: list[str]
    """The lines of the run's log."""


def simulate(
    fleet: Fleet,
    preemptions: Sequence[Preemption],
    *,
    method: str,
    speed: Callable[[int], float],
    round_s: float,
    until_s: float,
) -> Simulated:
    """Simulate a run, from the moment at which its workers train.

    Args:
        fleet: workers, machines and durations.
        preemptions: preemptions in the order of time.
        method: name of the method.
        speed: samples per second of a number of workers that each have a core.
        round_s: seconds of a round.
        until_s: simulated seconds.
    """
    config = TrainConfig(
        method=MethodConfig(name=method),
        scaling=ScalingConfig(
            num_workers=(fleet.min_workers, fleet.num_workers),
            spares=fleet.spares,
            start_timeout_s=1e9,
        ),
        checkpoint=CheckpointConfig(every_s=None),
        elastic=ElasticConfig(max_restarts=10**9),
    )
    resolved, recorder = resolve(config), _Log()
    worker_group = SimulatedWorkerGroup(
        fleet, is_sync=resolved.is_sync, speed=speed, round_s=round_s
    )
    controller = Controller(
        worker_group, config, resolved, recorder,
        first_round=0, own_states={}, clock=lambda: worker_group.now,
    )  # fmt: skip
    while not worker_group.is_at_full_strength:
        controller.step()
    end_s = worker_group.now + until_s
    worker_group.begin(preemptions, until_s=until_s)
    while worker_group.now < end_s:
        controller.step()
    return Simulated(
        num_samples=worker_group.num_samples,
        machine_s=worker_group.machine_s,
        prediction=SpotPrediction.of(
            worker_group.num_samples / until_s,
            full_speed=speed(fleet.num_workers),
            num_machines=worker_group.machine_s / until_s,
        ),
        num_generations=controller.num_generations,
        events=recorder.sentences,
    )


@dataclass
class _Process:
    """The process of a worker."""

    machine: int
    reserves_cpu: bool
    is_ready: bool = False
    trains_from: float | None = None
    """When it begins, or began, to train; None: it is in no loop."""
    generation: int = 0
    """The generation that it entered."""

    def enter(self, generation: int, at_s: float) -> None:
        """Train from a time on."""
        self.generation, self.trains_from = generation, at_s


@dataclass
class SimulatedWorkerGroup:
    """The processes of a run, in simulated time.

    Args:
        fleet: workers, machines and durations.
        is_sync: whether the members exchange with each other, and not with the center.
        speed: samples per second of a number of workers that each have a core.
        round_s: seconds of a round.
    """

    fleet: Fleet
    is_sync: bool
    speed: Callable[[int], float]
    round_s: float
    now: float = 0.0
    """Seconds since the start."""
    num_samples: float = 0.0
    """Samples that have counted since ``begin``."""
    machine_s: float = 0.0
    """Seconds that machines were up since ``begin``, of all machines together."""
    _processes: dict[str, _Process] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    """Workers that wait for a free place, in the order of their requests."""
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _events: list[Event] = field(default_factory=list)
    _generation: int = 0
    _is_broken: bool = False
    """Whether the members wait for a lost one, in a synchronous method."""
    _busy_at: float = 0.0
    """When something last happened."""
    _trained_s: float = 0.0
    """Seconds in which workers have trained."""
    _num_planned: int = 0

    def __post_init__(self) -> None:
        self._newest = list(range(self.fleet.num_machines))
        """The newest machine in each machine's place, by its number."""
        self._up = set(self._newest)
        """The machines that are up."""
        self._draining: dict[int, int] = {}
        """The machine that will be preempted soon, by its place; no worker is started on it."""
        self._num_machines = self.fleet.num_machines

    @property
    def is_at_full_strength(self) -> bool:
        """Whether all workers train, and all spares stand by."""
        num_ready = sum(process.is_ready for process in self._processes.values())
        is_complete = len(self._training()) == self.fleet.num_workers
        return is_complete and num_ready == self.fleet.num_workers + self.fleet.spares

    def begin(self, preemptions: Sequence[Preemption], *, until_s: float) -> None:
        """Count samples and machine time from now on, and plan the preemptions from now on."""
        self.num_samples = self.machine_s = 0.0
        self._after(until_s, lambda: None)  # no leap passes the end
        for preemption in preemptions:
            notice_s = min(self.fleet.notice_s, preemption.at_s)
            if notice_s and self.fleet.replace_s:
                self._after(preemption.at_s - notice_s, self._give_notice, preemption.machine)
            self._after(preemption.at_s, self._preempt, preemption.machine)

    # time

    def poll(self, timeout_s: float) -> list[Event]:
        """Let time pass until something happens, at most for the time-out or, in calm, a leap."""
        # The controller times how long a worker stays on a draining machine.
        is_calm = self.now - self._busy_at > _CALM_S and not self._draining
        until = self.now + (_LEAP_S if is_calm and timeout_s else timeout_s)
        if self._later:
            until = min(until, max(self.now, self._later[0][0]))
        self.advance(until)
        published = Published((self._round,), sent_s=self.now, process="center")
        events = [*self._events, published]
        self._events.clear()
        return events

    def advance(self, until: float) -> None:
        """Let time pass, with all that is planned up to then."""
        while self._later and self._later[0][0] <= until:
            at, _, act = heapq.heappop(self._later)
            self._pass(at)
            act()
            self._busy_at = self.now
        self._pass(until)

    def _pass(self, until: float) -> None:
        passed_s, speed = max(0.0, until - self.now), self._samples_per_s()
        self.num_samples += passed_s * speed
        self._trained_s += passed_s if speed else 0.0
        self.machine_s += passed_s * len(self._up)
        self.now = max(self.now, until)

    def _after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Plan a call; calls at the same time keep their order."""
        self._num_planned += 1
        call = (self.now + seconds, self._num_planned, lambda: act(*arguments))
        heapq.heappush(self._later, call)

    @property
    def _round(self) -> int:
        return int(self._trained_s / self.round_s)

    # speed

    def _training(self) -> list[_Process]:
        processes = self._processes.values()
        return [p for p in processes if p.trains_from is not None and p.trains_from <= self.now]

    def _samples_per_s(self) -> float:
        """Return the samples per second of the workers that train now."""
        training = self._training()
        if not training or (self.is_sync and self._is_broken):
            return 0.0
        load = self._load()
        cores = self.fleet.workers_per_machine
        shares = [min(1.0, cores / load[process.machine]) for process in training]
        share = min(shares) if self.is_sync else sum(shares) / len(shares)
        return share * self.speed(len(training))

    def _load(self) -> dict[int, float]:
        """Return the cores that the processes of each machine would use: they train or start."""
        load: dict[int, float] = defaultdict(float)
        for process in self._processes.values():
            if process.trains_from is not None:
                load[process.machine] += 1.0
            elif not process.is_ready:
                load[process.machine] += self.fleet.start_load
        return load

    # machines

    def _give_notice(self, place: int) -> None:
        """Announce the preemption of a machine, and order its replacement."""
        machine = self._newest[place]
        if machine in self._up and place not in self._draining:
            self._draining[place] = machine
            self._after(self.fleet.replace_s, self._replace, place)
            self._events += [
                Draining(w, self.fleet.notice_s)
                for w, p in self._processes.items()
                if p.machine == machine
            ]

    def _preempt(self, place: int) -> None:
        """Take a machine away, or a process of it; without a notice, order its replacement now."""
        machine = self._draining.pop(place, -1)
        is_announced = machine >= 0
        if not is_announced:
            machine = self._newest[place]
        there = [w for w, p in self._processes.items() if p.machine == machine]
        if not self.fleet.replace_s:  # a process that trains, if there is one
            there.sort(key=lambda w: self._processes[w].trains_from is None)
            there = there[:1]
        elif machine in self._up:
            self._up.remove(machine)
            if not is_announced:
                self._after(self.fleet.replace_s, self._replace, place)
        samples_per_s = self._samples_per_s() / max(1, len(self._training()))
        for worker_id in there:
            self._lose(worker_id, samples_per_s)
        self._place()

    def _replace(self, place: int) -> None:
        self._newest[place] = self._num_machines
        self._up.add(self._num_machines)
        self._num_machines += 1
        self._place()

    def _lose(self, worker_id: str, samples_per_s: float) -> None:
        process = self._processes[worker_id]
        if process.trains_from is not None:
            # The samples of half a round, on average, never reach an exchange.
            trained_s = max(0.0, self.now - process.trains_from)
            self.num_samples -= samples_per_s * min(self.round_s / 2, trained_s)
        del self._processes[worker_id]
        self._is_broken |= process.trains_from is not None
        self._after(
            self.fleet.detect_s, self._events.append, Lost(worker_id, "its machine was preempted")
        )

    def _place(self) -> None:
        """Start the workers that wait, as far as places are free."""
        for worker_id in list(self._waiting):
            taken = Counter(p.machine for p in self._processes.values() if p.reserves_cpu)
            usable = sorted(self._up.difference(self._draining.values()))
            free = [m for m in usable if taken[m] < self.fleet.workers_per_machine]
            if not free:
                return
            self._waiting.remove(worker_id)
            self._start(worker_id, min(free, key=lambda m: taken[m]), reserves_cpu=True)

    def _start(self, worker_id: str, machine: int, *, reserves_cpu: bool) -> None:
        process = self._processes[worker_id] = _Process(machine, reserves_cpu)
        slower = max(1.0, self._load()[machine] / self.fleet.workers_per_machine)

        def be_ready() -> None:
            if self._processes.get(worker_id) is process:
                process.is_ready = True
                self._events.append(WorkerReady(worker_id, f"machine {machine}"))

        self._after(self.fleet.start_s * slower, be_ready)

    # the calls of the controller

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Start a worker as soon as a place is free."""
        self._waiting.append(worker_id)
        self._place()

    def request_spare(self, worker_id: str) -> None:
        """Start a hot spare on the machine of a worker that has the fewest spares."""
        hosts = {p.machine for p in self._processes.values()}
        spares = Counter(p.machine for p in self._processes.values() if not p.reserves_cpu)
        machine = min(sorted(hosts), key=lambda m: spares[m], default=None)
        if machine is None:  # there is no worker now
            self._after(1.0, self._request_spare_again, worker_id)
            self._waiting.append(worker_id)
        else:
            self._start(worker_id, machine, reserves_cpu=False)

    def _request_spare_again(self, worker_id: str) -> None:
        if worker_id in self._waiting:
            self._waiting.remove(worker_id)
            self.request_spare(worker_id)

    def end(self, worker_id: str) -> None:
        """End a worker, or withdraw its request."""
        self._processes.pop(worker_id, None)
        if worker_id in self._waiting:
            self._waiting.remove(worker_id)
        self._place()

    def form(self, membership: Membership, round: int, own_states: Mapping[str, Any]) -> None:
        """Let the members train."""
        self._generation, self._is_broken = membership.generation, False
        for worker_id in membership.worker_ids:
            if worker_id in self._processes:
                self._processes[worker_id].enter(self._generation, self.now + self.fleet.join_s)
            else:  # it was lost, which is not known yet
                self._is_broken = True
        self._after(self.fleet.join_s, self._events.append, Changed())

    def change(self, membership: Membership, own_states: Mapping[str, Any]) -> None:
        """Let newcomers train beside the others."""
        self._generation = membership.generation
        for worker_id in membership.worker_ids:
            process = self._processes.get(worker_id)
            if process is not None and process.trains_from is None:
                process.enter(self._generation, self.now + self.fleet.join_s)
        self._after(self.fleet.join_s, self._events.append, Changed())

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange."""
        self._after(self.round_s / 2, self._leave, worker_id, Outcome.LEFT, self._generation)

    def abandon(self, generation: int) -> None:
        """Let the members leave the exchange that cannot complete."""
        self._after(self.fleet.detect_s, self._leave_all, Outcome.BROKEN, generation)

    def vote(self, generation: int, **votes: float) -> None:
        """Let the members leave after the round in progress."""
        if votes.get("regroup"):
            self._after(self.round_s / 2, self._leave_all, Outcome.REGROUP, generation)

    def _leave_all(self, outcome: Outcome, generation: int) -> None:
        if self.is_sync and self._is_broken and outcome is Outcome.REGROUP:
            return  # the exchange cannot complete; the controller will abandon it
        for worker_id in list(self._processes):
            self._leave(worker_id, outcome, generation)

    def _leave(self, worker_id: str, outcome: Outcome, generation: int) -> None:
        process = self._processes.get(worker_id)
        if process is None or process.trains_from is None or process.generation > generation:
            return
        process.trains_from = None
        end = RunEnded(worker_id, outcome, self._round, process.generation, "a reset")
        self._events.append(end)

    def hand_in(self, worker_id: str) -> None:
        """Save the replica of a leaver."""
        state: Any = worker_id
        self._after(self.fleet.handover_s, self._events.append, HandedIn(worker_id, state))

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Let a newcomer load the replica of a leaver."""
        self._after(self.fleet.handover_s, self._events.append, TookOver(worker_id))

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Answer with empty states."""
        nothing = np.empty(0, np.float32)
        snapshot = Snapshot(Progress(round=round), True, nothing, nothing, {}, {})
        self._after(self.fleet.detect_s, self._events.append, Collected(snapshot, {}))

    def evaluate(self, round: int) -> None:
        """Do nothing: a score changes no membership."""

    def waiting_for(self) -> str:
        """Return what pending workers need."""
        return "machines"

    def start_center(self, snapshot: Snapshot) -> None:
        """Do nothing: the center is up."""

    def avoid(self, node: str) -> bool:
        """Return False: there is no other node."""
        return False

    def publish(self, worker_id: str) -> None:
        """Do nothing: the center has the newest round."""

    def rebuild_center(self, worker_id: str | None) -> str:
        """Raise an error: the center is not lost here."""
        raise NotImplementedError("the center of a simulation is not lost")

    def forget(self, state: SavedState) -> None:
        """Do nothing: there is no file."""

    def inflict(self, fault: Fault) -> None:
        """Raise an error: a simulation has no fault plan."""
        raise NotImplementedError("a simulation has no fault plan")

    def close(self) -> None:
        """Do nothing: there are no processes."""


@dataclass
class _Log:
    """A recorder that keeps the lines of the log alone."""

    sentences: list[str] = field(default_factory=list)
    is_writing = False
    is_given_up = False

    def event(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def note(self, fact: Any) -> None:
        pass

    def formed(self, membership: Membership, reason: str) -> None:
        pass

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        pass

    def evaluated(self, evaluated: Evaluated) -> None:
        pass

    def checkpoint(self, collected: Collected) -> None:
        pass

    def show(self, state: State, workers: Mapping[str, int]) -> None:
        pass
