"""The controller against a simulated worker group in which anything may go wrong at any time.

The simulation obeys the protocol of ``raydl.core.worker_group.WorkerGroup`` and knows nothing
of tensors: a worker is a round, the center a few numbers. Whatever goes wrong for a while, the run
ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from test_control_end import FIRST, LEASE_S, run
from test_controller import record, snapshot

from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import (
    Collected,
    Draining,
    Evaluated,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Reported,
    RunEnded,
    TookOver,
    WorkerReady,
)
from raydl.errors import ProcessLostError

POLL_S = 0.25


@dataclass
class SimWorker:
    is_up: bool = False
    is_dead: bool = False
    frozen_until: float = -1.0
    slow_until: float = -1.0
    heard_at: float = 0.0
    generation: int = 0
    """Of its loop; 0: it is in none."""
    round: int = 0
    done: int = 0
    has_strategy: bool = False
    has_entered: bool = False
    has_left: bool = False
    has_replica: bool = False
    """Of one that left, handed over."""
    kept: set[int] = field(default_factory=set)
    waiting_s: float = 0.0


class SimCrew:
    """Workers and a center in memory; time goes on with every poll."""

    def __init__(self, seed, *, last_round, wild_s):
        self.random = random.Random(seed)
        self.now = 0.0
        self.last_round, self.wild_s = last_round, wild_s
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
        self.taken, self.forgotten = [], []

    # what the controller calls

    def request_worker(self, worker_id, own_state=None):
        assert worker_id not in self.workers
        worker = self.workers[worker_id] = SimWorker()

        def come_up():
            if self.workers.get(worker_id) is not worker:
                return
            if self.is_wild and self.random.random() < 0.15:
                self._kill(worker_id)
            else:
                worker.is_up, worker.heard_at = True, self.now
                self.events.append(WorkerReady(worker_id, "node"))

        self._after((2, 12), come_up)

    def end(self, worker_id):
        self.workers.pop(worker_id, None)

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

        def put():
            if self.workers.get(worker_id) is not worker:
                return  # its calls were forgotten
            if worker.is_dead or not self.is_center_up or life != self.life:
                self.events.append(GaveUp("publication", "somebody went away"))
                return
            self._put(round)

        self._after((0, 4), put)

    def rebuild_center(self, worker_id):
        self.life += 1
        life, worker = self.life, self.workers[worker_id] if worker_id else None
        self.is_center_up, self.rounds = False, []
        assert worker is None or worker.has_strategy, "join comes first"

        def come_up():
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

        self._after((2, 8), come_up)

    def hand_in(self, worker_id):
        worker = self.workers[worker_id]
        assert not worker.generation, "it is in its loop"

        def give():
            if self.workers.get(worker_id) is worker and not worker.is_dead:
                self.events.append(HandedIn(worker_id, {"replica": worker_id}))

        self._after((0, 4), give)

    def hand_over(self, worker_id, state):
        worker = self.workers[worker_id]
        assert worker.is_up, "it is not up yet"
        assert not worker.has_strategy, "it has trained"
        self.taken.append(state["replica"])

        def take():
            if self.workers.get(worker_id) is not worker or worker.is_dead:
                return
            if self.is_wild and self.random.random() < 0.2:
                self.events.append(GaveUp(f"handover to {worker_id}", "it can not be read"))
                return
            worker.has_replica = True
            self.events.append(TookOver(worker_id))

        self._after((0, 12), take)

    def forget(self, state):
        self.forgotten.append(state["replica"])

    def evaluate(self, round):
        life = self.life

        def score():
            if life != self.life or not self.rounds or self.random.random() < 0.1 * self.is_wild:
                self.events.append(GaveUp("evaluation", "the center went away"))
            else:
                self.events.append(Evaluated(max(self.rounds), 1, 1, 1.0, {}))

        self._after((0, 8), score)

    def collect(self, round, worker_ids):
        life, givers = self.life, {w: self.workers[w] for w in worker_ids}

        def gather():
            if life != self.life or any(self.workers.get(w) is not g for w, g in givers.items()):
                return  # forgotten with the process
            if any(giver.is_dead for giver in givers.values()):
                self._after((0, 2), gather)
            elif round not in self.rounds:
                self.events.append(GaveUp("checkpoint", "the center was rebuilt"))
            else:
                self.events.append(Collected(snapshot(round), {w: {} for w in worker_ids}))

        self._after((0, 8), gather)

    # time

    @property
    def is_wild(self):
        return self.now < self.wild_s

    def _after(self, polls, act):
        self.later.append((self.now + POLL_S * self.random.randint(*polls), act))

    def poll(self, timeout_s):
        self.now += POLL_S
        due = [act for at, act in self.later if at <= self.now]
        self.later = [(at, act) for at, act in self.later if at > self.now]
        for act in due:
            act()
        if self.is_wild and self.random.random() < 0.25:
            self._misfortune()
        self._train()
        self._tell_news()
        events, self.events = self.events, []
        return events

    def _misfortune(self):
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

        def tell():
            if self.workers.get(worker_id) is worker:
                del self.workers[worker_id]
                self.events.append(Lost(worker_id, "the actor died"))

        self._after((0, 4), tell)

    def lose_most(self):
        """Lose three quarters of the workers within a second."""
        up = [w for w, worker in self.workers.items() if worker.is_up]
        assert len(up) >= 90, "the test is about many"
        for worker_id in self.random.sample(up, 3 * len(up) // 4):
            self._kill(worker_id)

    def _lose_center(self):
        life, self.is_center_up, self.rounds = self.life, False, []

        def tell():
            if life == self.life:
                self.events.append(Lost("center", "the actor died"))

        self._after((0, 6), tell)

    def _leave(self, worker_id, outcome, round=None):
        worker = self.workers[worker_id]
        generation, worker.generation, worker.waiting_s = worker.generation, 0, 0.0
        at = worker.round if round is None else round
        self.events.append(RunEnded(worker_id, outcome, at, generation, "a problem"))

    def _tell_news(self):
        for worker_id, worker in list(self.workers.items()):
            if not worker.is_up or worker.is_dead:
                continue
            if worker.frozen_until > self.now:
                if self.now - worker.heard_at > LEASE_S:
                    del self.workers[worker_id]
                    self.events.append(Lost(worker_id, "it did not answer"))
                continue
            worker.heard_at = self.now
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


class SimRounds(SimCrew):
    """All exchange at once."""

    is_sync = True

    def vote(self, generation, **votes):
        if generation == self.members_generation:
            self.votes |= dict.fromkeys(votes, True)

    def _published(self):
        return Published(tuple(self.rounds))

    def _form(self, membership, round):
        self.members, self.votes = membership.worker_ids, {}
        self.members_generation = membership.generation
        assert not self.is_center_up or round in self.rounds
        for worker_id in self.members:
            worker = self.workers[worker_id]
            assert not worker.generation, "it is in another loop"
            worker.generation, worker.waiting_s = membership.generation, 0.0
            if not self.is_center_up:
                self._leave(worker_id, Outcome.BROKEN, -1)
            elif not worker.is_dead:
                worker.round, worker.done, worker.has_strategy = round, round, True

    def _train(self):
        members = {w: self.workers.get(w) for w in self.members}
        inside = {w: m for w, m in members.items() if m and m.generation == self.members_generation}
        if not inside:
            return
        if len(inside) < len(members) or not all(self._works(m) for m in inside.values()):
            self._wait(inside, is_cut=len(inside) < len(members))
            return
        self._complete(inside)

    def _wait(self, inside, *, is_cut):
        for worker_id, worker in inside.items():
            if self._works(worker):
                worker.waiting_s += POLL_S
                if is_cut and self.random.random() < 0.3:  # it hears of it by itself
                    self._leave(worker_id, Outcome.BROKEN)

    def _complete(self, inside):
        round = max(m.round for m in inside.values()) + 1
        is_torn = self.is_wild and self.random.random() < 0.05
        for worker_id, worker in inside.items():
            if is_torn and self.random.random() < 0.5:
                self._leave(worker_id, Outcome.BROKEN)
                continue
            worker.round, worker.waiting_s = round, 0.0
            if self.votes.get("checkpoint"):
                worker.kept.add(round)
            outcome = self._outcome(round)
            publishes = outcome is not Outcome.GO_ON or self.votes.get("checkpoint")
            if worker_id == self.members[0] and publishes and self.is_center_up:
                self._put(round)
            if outcome is not Outcome.GO_ON:
                self._leave(worker_id, outcome)
        self.votes.pop("checkpoint", None)

    def _outcome(self, round):
        if round >= self.last_round:
            return Outcome.FINISHED
        if self.votes.get("stop"):
            return Outcome.STOPPED
        return Outcome.REGROUP if self.votes.get("regroup") else Outcome.GO_ON


@pytest.mark.parametrize("seed", range(30))
def test_whatever_goes_wrong_for_a_minute_rounds_are_trained_to_the_end(seed):
    worker_group, controller = run(SimRounds, seed, last_round=400)
    assert worker_group.num_faults > 10
    assert controller.outcome is Outcome.FINISHED


@pytest.mark.parametrize("seed", range(30))
def test_whenever_rounds_are_stopped_among_faults_the_run_ends(seed):
    run(SimRounds, seed, last_round=400, stop_at=random.Random(seed).uniform(0.0, 40.0))


@pytest.mark.parametrize("num_workers", [(1, 100), 100])
@pytest.mark.parametrize("seed", range(20))
def test_rounds_go_on_after_the_loss_of_most_workers_at_once(seed, num_workers):
    run(
        SimRounds, seed, last_round=200, num_workers=num_workers, wild_s=0.0, storm_at=20.0,
        max_restarts=20,
    )  # fmt: skip


def test_without_any_progress_losses_end_the_run():
    with pytest.raises(ProcessLostError, match=r"more than elastic\.max_restarts"):
        run_all(max_restarts=1)


def run_all(**settings):
    for seed in range(30):
        run(SimRounds, seed, last_round=400, **settings)
