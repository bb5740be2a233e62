"""The controller against a simulated worker group with random faults.

The simulation obeys the protocol of ``raydl.core.worker_group.WorkerGroup`` without tensors: the
state of a worker is its round, that of the center a few numbers. Each run ends, whatever faults
happen in its first minute.
"""

from __future__ import annotations

import random

import pytest
from simulations import POLL_S, SimulatedGroup, run

from raydl.core.reports import Outcome
from raydl.core.worker_group import (
    Published,
)
from raydl.errors import ProcessLostError


class SimulatedRounds(SimulatedGroup):
    """A simulated group whose workers exchange all at once, in rounds."""

    is_sync = True

    def vote(self, generation, **votes):
        if generation == self.members_generation:
            self.votes |= dict.fromkeys(votes, True)

    def _published(self):
        return Published(tuple(self.rounds))

    def _is_trained(self, round):
        return round >= self.last_round

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
                if is_cut and self.random.random() < 0.3:  # it notices the broken exchange
                    self._leave(worker_id, Outcome.BROKEN)

    def _complete(self, inside):
        round = max(m.round for m in inside.values()) + 1
        is_torn = self.has_faults and self.random.random() < 0.05
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


@pytest.mark.parametrize("seed", range(15))
def test_after_a_minute_of_faults_rounds_are_trained_to_the_end(seed):
    worker_group, controller = run(SimulatedRounds, seed, last_round=400)
    assert worker_group.num_faults > 10
    assert controller.outcome is Outcome.FINISHED


@pytest.mark.parametrize("seed", range(15))
def test_rounds_that_are_stopped_at_any_time_among_faults_end(seed):
    run(SimulatedRounds, seed, last_round=400, stop_at=random.Random(seed).uniform(0.0, 40.0))


@pytest.mark.parametrize("seed", range(15))
def test_rounds_that_end_among_faults_are_all_trained(seed):
    _, controller = run(SimulatedRounds, seed, last_round=60)
    assert controller.outcome is Outcome.FINISHED


@pytest.mark.parametrize("num_workers", [(1, 100), 100])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_go_on_after_the_loss_of_most_workers_at_once(seed, num_workers):
    run(
        SimulatedRounds, seed, last_round=200, num_workers=num_workers, faults_s=0.0,
        kill_most_at=20.0, max_restarts=20,
    )  # fmt: skip


def test_losses_without_progress_end_the_run():
    with pytest.raises(ProcessLostError, match=r"more than elastic\.max_restarts"):
        run_30_seeds(max_restarts=1)


def run_30_seeds(**settings):
    for seed in range(30):
        run(SimulatedRounds, seed, last_round=400, **settings)
