"""The controller of methods with messages against a simulated worker group with random faults.

See ``test_controller_simulated``.
"""

import random

import pytest
from controller_harness import record
from simulations import SimulatedGroup, run

from raydl.core.reports import Outcome
from raydl.core.worker_group import Changed, Published


class SimulatedMessages(SimulatedGroup):
    """A simulated group whose workers exchange with the center one by one."""

    is_sync = False

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.opened, self.checkpoint = 0, None
        self.voters, self.dismissed = set(), set()

    def vote(self, generation, **votes):
        if not self.is_center_up or not self.opened <= generation <= self.members_generation:
            return
        self.votes |= dict.fromkeys(votes, True)
        if self.votes.pop("checkpoint", None):
            self.version += 1
            self.checkpoint, self.voters = self.version, set()

    def rebuild_center(self, worker_id):
        super().rebuild_center(worker_id)
        self.checkpoint = None

    def dismiss(self, worker_id):
        self.dismissed.add(worker_id)

    def _published(self):
        return Published(tuple(self.rounds), (record(self.version),), (), self._is_complete)

    @property
    def _is_complete(self):
        return self.done >= self.last_round

    def _is_trained(self, round):
        return self._is_complete

    def _form(self, membership, round):
        self._enter(membership, membership.worker_ids, is_new=True)

    def _change(self, membership):
        out = [w for w in membership.worker_ids if not self.workers[w].generation]
        new = [w for w in out if w not in self.members]
        self._enter(membership, new, is_new=False)

    def _enter(self, membership, new, *, is_new):
        life = self.life
        for worker_id in new:
            worker = self.workers[worker_id]
            assert not worker.generation, "it is in another loop"
            worker.generation, worker.has_entered = membership.generation, False
            worker.has_left = False

        def begin():
            if life != self.life:
                return
            if not self.is_center_up:
                for worker_id in new:
                    worker = self.workers.get(worker_id)
                    if worker and worker.generation == membership.generation:
                        self._leave(worker_id, Outcome.BROKEN, -1)
                return
            self.members, self.members_generation = membership.worker_ids, membership.generation
            if is_new:
                self.opened, self.votes, self.checkpoint = membership.generation, {}, None
            for worker_id in new:
                if worker_id in self.workers:
                    self.workers[worker_id].has_entered = True
            self.dismissed -= set(new)
            self._close_if_all_left()
            self.events.append(Changed())

        self._after((0, 3), begin)

    def _close_if_all_left(self):
        members = [self.workers.get(w) for w in self.members]
        if all(m is not None and m.has_left for m in members):
            self._put(self.version)

    def _train(self):
        for worker_id in self.members:
            worker = self.workers.get(worker_id)
            if worker is None or not worker.generation or not self._works(worker):
                continue
            if not self.is_center_up:
                if self.random.random() < 0.2:
                    self._leave(worker_id, Outcome.BROKEN)
            elif worker.has_entered and not worker.has_left:
                self._exchange(worker_id, worker)

    def _exchange(self, worker_id, worker):
        at_work = [
            w
            for w in self.members
            if w in self.workers and self.workers[w].generation and not self.workers[w].has_left
        ]
        if not worker.has_strategy or worker.round < self.version:
            worker.has_strategy = True
        if self.done < self.last_round:
            self.version, self.done = self.version + 1, self.done + 1
        worker.round, worker.done = self.version, self.done
        if self.checkpoint is not None and worker_id not in self.voters:
            self.voters.add(worker_id)
            worker.kept.add(self.checkpoint)
        outcome = self._outcome(worker_id, len(at_work))
        if outcome is not Outcome.GO_ON:
            worker.has_left = True
            self._leave(worker_id, outcome)
            self._close_if_all_left()
        if self.checkpoint is not None and self.voters >= set(at_work):
            self._put(self.checkpoint)
            self.checkpoint = None

    def _outcome(self, worker_id, num_at_work):
        # The others hold claims, so this worker runs out of samples a little earlier.
        if self.done + num_at_work - 1 >= self.last_round:
            return Outcome.FINISHED
        if self.votes.get("stop"):
            return Outcome.STOPPED
        if worker_id in self.dismissed:
            return Outcome.LEFT
        return Outcome.REGROUP if self.votes.get("regroup") else Outcome.GO_ON


@pytest.mark.parametrize("seed", range(15))
def test_after_a_minute_of_faults_a_run_by_messages_is_trained_to_the_end(seed):
    worker_group, controller = run(SimulatedMessages, seed, last_round=1500)
    assert worker_group.num_faults > 10
    assert controller.outcome is Outcome.FINISHED


@pytest.mark.parametrize("seed", range(15))
def test_a_run_by_messages_that_is_stopped_at_any_time_among_faults_ends(seed):
    run(SimulatedMessages, seed, last_round=1500, stop_at=random.Random(seed).uniform(0.0, 40.0))


@pytest.mark.parametrize("seed", range(15))
def test_a_run_by_messages_that_ends_among_faults_has_trained_all_samples(seed):
    _, controller = run(SimulatedMessages, seed, last_round=200)
    assert controller.outcome is Outcome.FINISHED


@pytest.mark.parametrize("num_workers", [(1, 100), 100])
@pytest.mark.parametrize("seed", range(4))
def test_messages_go_on_after_the_loss_of_most_workers_at_once(seed, num_workers):
    run(
        SimulatedMessages, seed, last_round=4000, num_workers=num_workers, faults_s=0.0,
        kill_most_at=20.0, max_restarts=20,
    )  # fmt: skip
