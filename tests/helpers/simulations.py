"""Simulated worker groups with random faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from controller_harness import FakeRecorder, record, snapshot

from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    MethodConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import (
    Collected,
    Draining,
    GaveUp,
    HandedIn,
    Lost,
    Reported,
    RunEnded,
    TookOver,
    WorkerReady,
)
from raydl.elastic.controller import Controller
from raydl.elastic.run_state import State
from raydl.methods import resolve

LEASE_S = 3.0


SIZES = [1, 2, (1, 4), (2, 5), 4]


FIRST = 5
"""The first round of a simulated run."""


def run(
    kind, seed, *, last_round, stop_at=None, max_restarts=10_000, faults_s=60.0, num_workers=None,
    kill_most_at=None,
):  # fmt: skip
    """Run to the end, with faults for ``faults_s``, and return (worker group, controller)."""
    worker_group, is_sync = kind(seed, last_round=last_round, faults_s=faults_s), kind.is_sync
    recorder = FakeRecorder()
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd" if is_sync else "async-easgd"),
        scaling=ScalingConfig(
            num_workers=num_workers or SIZES[seed % len(SIZES)], start_timeout_s=500.0
        ),
        training=TrainingConfig(epochs=5),
        checkpoint=CheckpointConfig(every_s=7.0),
        elastic=ElasticConfig(lease_s=LEASE_S, max_restarts=max_restarts),
    )
    controller = Controller(
        worker_group,
        config,
        resolve(config),
        recorder,
        first_round=FIRST,
        own_states={},
        clock=lambda: worker_group.now,
    )
    for _ in range(8000):
        if kill_most_at is not None and worker_group.now >= kill_most_at:
            worker_group.kill_most()
            kill_most_at = None
        if stop_at is not None and worker_group.now >= stop_at:
            controller.request_stop("SIGTERM")
        if controller.step():
            break
    check(worker_group, controller, recorder, config.scaling)
    return worker_group, controller


def check(worker_group, controller, recorder, scaling):
    trail = "\n".join(recorder.events[-25:])
    assert controller.state is State.DONE, f"{controller.state} at {worker_group.now} s:\n{trail}"
    numbers = [membership.generation for membership in worker_group.memberships]
    assert numbers == list(range(1, len(numbers) + 1))
    formed = [e for e in recorder.events if e.startswith("generation ")]
    assert len(formed) == len(numbers) == controller.num_generations
    forgotten = worker_group.forgotten
    assert len(set(forgotten)) == len(forgotten), "the file of a replica is deleted once"
    assert {*forgotten, *worker_group.handed_over} <= set(worker_group.handed_in)
    low = (
        scaling.min_workers if worker_group.is_sync else 0
    )  # by messages lost workers are removed before the replacements join
    assert all(low <= m.num_workers <= scaling.max_workers for m in worker_group.memberships)
    assert recorder.checkpoints or not numbers, "the last state is always written"
    if controller.outcome is Outcome.FINISHED:
        assert recorder.checkpoints[-1].snapshot.progress.round >= worker_group.last_round - 1
        assert worker_group.is_trained, f"samples are left:\n{trail}"


POLL_S = 0.25


@dataclass
class SimWorker:
    is_up: bool = False
    is_dead: bool = False
    frozen_until: float = -1.0
    slow_until: float = -1.0
    reported_at: float = 0.0
    generation: int = 0
    """Generation of its loop; 0: the worker is in no loop."""
    round: int = 0
    done: int = 0
    has_strategy: bool = False
    has_entered: bool = False
    has_left: bool = False
    has_replica: bool = False
    """Whether the replica of a leaver was handed over to it."""
    kept: set[int] = field(default_factory=set)
    waiting_s: float = 0.0


class SimulatedGroup:
    """Simulated workers and a center; each poll advances the simulated time."""

    def __init__(self, seed, *, last_round, faults_s):
        self.random = random.Random(seed)
        self.now = 0.0
        self.last_round, self.faults_s = last_round, faults_s
        self.workers: dict[str, SimWorker] = {}
        self.later: list[tuple[float, object]] = []
        self.events = []
        self.memberships = []
        self.is_center_up, self.rounds, self.version, self.done = True, [FIRST], FIRST, FIRST
        self.life = 0
        self.votes: dict[str, bool] = {}
        self.members: tuple[str, ...] = ()
        self.members_generation = 0
        self.num_faults = 0
        self.is_trained = False
        """Whether nothing was left to train when states were collected last."""
        self.handed_in, self.handed_over, self.forgotten = [], [], []
        """Leavers by whose replica this happened."""

    # the protocol of a worker group

    def request_worker(self, worker_id, own_state=None):
        assert worker_id not in self.workers
        worker = self.workers[worker_id] = SimWorker()

        def start():
            if self.workers.get(worker_id) is not worker:
                return
            if self.has_faults and self.random.random() < 0.15:
                self._kill(worker_id)
            else:
                worker.is_up, worker.reported_at = True, self.now
                self.events.append(WorkerReady(worker_id, "node"))

        self._after((2, 12), start)

    def end(self, worker_id):
        self.workers.pop(worker_id, None)

    def avoid(self, node):
        return False  # there is one node

    def form(self, membership, round, own_states):
        self.memberships.append(membership)
        self._check_states(own_states)
        self._form(membership, round)

    def change(self, membership, own_states):
        self.memberships.append(membership)
        self._check_states(own_states)
        self._change(membership)

    def _check_states(self, own_states):
        for worker_id in own_states:
            assert self.workers[worker_id].has_replica, "it would wait for it"

    def waiting_for(self):
        return "more workers"

    def abandon(self, generation):
        for worker_id, worker in list(self.workers.items()):
            if worker.is_up and 0 < worker.generation <= generation:
                self._after((0, 3), self._breaker(worker_id, worker, worker.generation))

    def _breaker(self, worker_id, worker, generation):
        def break_out():
            if self.workers.get(worker_id) is not worker or worker.is_dead:
                return
            if worker.frozen_until > self.now:
                self.later.append((worker.frozen_until + POLL_S, break_out))
            elif worker.generation == generation:
                self._leave(worker_id, Outcome.BROKEN)

        return break_out

    def publish(self, worker_id):
        worker, life = self.workers[worker_id], self.life
        assert worker.has_strategy, "join comes first"
        assert not worker.generation, "not while it trains"
        round = worker.round

        def publish_round():
            if self.workers.get(worker_id) is not worker:
                return  # calls of a removed worker are dropped
            if worker.is_dead or not self.is_center_up or life != self.life:
                self.events.append(GaveUp("publication", "the worker or the center was lost"))
                return
            self._put(round)

        self._after((0, 4), publish_round)

    def rebuild_center(self, worker_id):
        self.life += 1
        life, worker = self.life, self.workers[worker_id] if worker_id else None
        self.is_center_up, self.rounds = False, []
        assert worker is None or worker.has_strategy, "join comes first"

        def start():
            if life != self.life:
                return
            if worker is not None and worker.is_dead:
                self.events.append(Lost("center", "its source was lost"))
                return
            self.is_center_up = True
            self.version = worker.round if worker else FIRST
            self.done = worker.done if worker else FIRST
            self.rounds = [self.version]
            self.members, self.votes = (), {}

        self._after((2, 8), start)

    def hand_in(self, worker_id):
        worker = self.workers[worker_id]
        assert not worker.generation, "it is in its loop"

        def send_state():
            if self.workers.get(worker_id) is worker and not worker.is_dead:
                self.handed_in.append(worker_id)
                self.events.append(HandedIn(worker_id, {"replica": worker_id}))

        self._after((0, 4), send_state)

    def hand_over(self, worker_id, state):
        worker = self.workers[worker_id]
        assert worker.is_up, "it is not up yet"
        assert not worker.has_strategy, "it has trained"
        self.handed_over.append(state["replica"])

        def load_state():
            if self.workers.get(worker_id) is not worker or worker.is_dead:
                return
            if self.has_faults and self.random.random() < 0.2:
                self.events.append(GaveUp("hand over", "it cannot be read", worker_id))
                return
            worker.has_replica = True
            self.events.append(TookOver(worker_id))

        self._after((0, 12), load_state)

    def forget(self, state):
        self.forgotten.append(state["replica"])

    def evaluate(self, round):
        life = self.life

        def score():
            if life != self.life or not self.rounds or self.random.random() < 0.1 * self.has_faults:
                self.events.append(GaveUp("evaluation", "the center was lost"))
            else:
                self.events.append(Evaluated(Progress(round=max(self.rounds)), {}))

        self._after((0, 8), score)

    def collect(self, round, worker_ids):
        life, senders = self.life, {w: self.workers[w] for w in worker_ids}

        def gather():
            if life != self.life or any(self.workers.get(w) is not s for w, s in senders.items()):
                return  # the call ended with its process
            if any(sender.is_dead for sender in senders.values()):
                self._after((0, 2), gather)
            elif round not in self.rounds:
                self.events.append(GaveUp("checkpoint", "the center was rebuilt"))
            else:
                self.is_trained = self._is_trained(round)
                self.events.append(Collected(snapshot(round), {w: {} for w in worker_ids}))

        self._after((0, 8), gather)

    # time

    @property
    def has_faults(self):
        return self.now < self.faults_s

    def _after(self, polls, act):
        self.later.append((self.now + POLL_S * self.random.randint(*polls), act))

    def poll(self, timeout_s):
        self.now += POLL_S
        due = [act for at, act in self.later if at <= self.now]
        self.later = [(at, act) for at, act in self.later if at > self.now]
        for act in due:
            act()
        if self.has_faults and self.random.random() < 0.25:
            self._inject_fault()
        self._train()
        self._report_events()
        events, self.events = self.events, []
        return events

    def _inject_fault(self):
        self.num_faults += 1
        up = [w for w, worker in self.workers.items() if worker.is_up and not worker.is_dead]
        several = self.random.sample(up, min(len(up), self.random.choice((1, 1, 2, 5))))
        kind = self.random.choice(("kill", "freeze", "slow", "drain", "center", "break"))
        if kind == "center" and self.is_center_up and self.random.random() < 0.4:
            self._lose_center()
        for worker_id in several:
            worker = self.workers[worker_id]
            if kind == "kill":
                self._kill(worker_id)
            elif kind == "freeze":
                worker.frozen_until = self.now + self.random.uniform(0.5, 2 * LEASE_S)
            elif kind == "slow":
                worker.slow_until = self.now + self.random.uniform(0.5, 20.0)
            elif kind == "drain":
                self.events.append(Draining(worker_id))
            elif kind == "break" and worker.generation:
                self._leave(worker_id, Outcome.BROKEN)

    def _kill(self, worker_id):
        worker = self.workers[worker_id]
        worker.is_dead = True

        def report_loss():
            if self.workers.get(worker_id) is worker:
                del self.workers[worker_id]
                self.events.append(Lost(worker_id, "the actor died"))

        self._after((0, 4), report_loss)

    def kill_most(self):
        """Kill three quarters of the workers within a second."""
        up = [w for w, worker in self.workers.items() if worker.is_up]
        assert len(up) >= 90, "the test is about many workers"
        for worker_id in self.random.sample(up, 3 * len(up) // 4):
            self._kill(worker_id)

    def _lose_center(self):
        life, self.is_center_up, self.rounds = self.life, False, []

        def report_loss():
            if life == self.life:
                self.events.append(Lost("center", "the actor died"))

        self._after((0, 6), report_loss)

    def _leave(self, worker_id, outcome, round=None):
        worker = self.workers[worker_id]
        generation, worker.generation, worker.waiting_s = worker.generation, 0, 0.0
        at = worker.round if round is None else round
        self.events.append(RunEnded(worker_id, outcome, at, generation, "a problem"))

    def _report_events(self):
        for worker_id, worker in list(self.workers.items()):
            if not worker.is_up or worker.is_dead:
                continue
            if worker.frozen_until > self.now:
                if self.now - worker.reported_at > LEASE_S:
                    del self.workers[worker_id]
                    self.events.append(Lost(worker_id, "it did not answer"))
                continue
            worker.reported_at = self.now
            self.events.append(Reported(self._report(worker_id, worker)))
        if self.is_center_up:
            self.events.append(self._published())

    def _report(self, worker_id, worker):
        records = (record(worker.round),) if self.is_sync and worker.has_strategy else ()
        return WorkerReport(
            worker_id,
            worker.round,
            records,
            tuple(worker.kept),
            {},
            local_step=worker.round,
            step_s=0.1,
            round_s=POLL_S,
            waiting_s=worker.waiting_s,
            generation=worker.generation,
        )

    def _put(self, round):
        self.rounds = sorted({*self.rounds, round})[-4:]

    def _works(self, worker):
        return not worker.is_dead and max(worker.frozen_until, worker.slow_until) <= self.now
