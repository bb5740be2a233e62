"""By messages a sample counts once a message that contains its training has moved the center."""

from collections import Counter

import numpy as np
import pytest
from coordinators import enter, make_coordinator, settle
from ensembles import Ensemble, linear, tiny_images
from histories import config
from scenarios import spans_of

from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.data import ImageSet
from raydl.parameter_server.coordinator import Due
from raydl.parameter_server.protocol import MessageId
from raydl.tasks import Classification

# the coordinator: batches of 5, two steps a round


def test_steps_after_a_message_count_with_the_next_one():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    first = settle(coordinator, "w0", num_trained=5)  # the message contains the first step only
    assert first.num_done == 5
    assert settle(coordinator, "w0", num_trained=15).num_done == 15


def test_unsent_steps_of_a_lost_worker_are_claimed_again():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0", num_trained=5)
    coordinator.change(Membership(2, ("w1",)))
    assert spans_of(settle(coordinator, "w1")) == [(5, 10), (20, 25)]


@pytest.mark.parametrize("method", ["async-easgd", "async-diloco", "async-sgd"])
def test_a_finished_worker_has_taken_all_its_steps(method):
    coordinator = make_coordinator(method, num_samples=20, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    for worker_id in ("w0", "w1"):
        assert settle(coordinator, worker_id, num_trained=5).outcome is Outcome.FINISHED
    assert not coordinator.is_complete()
    for worker_id in ("w0", "w1"):
        coordinator.leave_generation(MessageId(worker_id, 1, 9))
    assert coordinator.is_complete()
    assert coordinator.pop_records()[-1].progress.num_samples == 20


def test_others_train_the_last_steps_of_a_finished_worker_that_is_lost_before_it_left():
    coordinator = make_coordinator(num_samples=20, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0", num_trained=5)
    coordinator.change(Membership(2, ("w1",)))
    assert spans_of(settle(coordinator, "w1")) == [(5, 10)]


def test_a_checkpoint_counts_the_samples_trained_in_the_kept_states():
    """A worker keeps its state at the end of its round, when the next round may have begun."""
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    coordinator.change(Membership(1, ("w0",)))
    settle(coordinator, "w0", num_trained=5)
    coordinator.vote(1, checkpoint=1.0)
    kept = settle(coordinator, "w0", num_trained=15)
    assert kept.keep is not None
    assert coordinator.pop_due() == [Due(kept.keep, True)]
    assert coordinator.state()["progress"].num_samples == 15
    assert coordinator.state(is_kept=True)["progress"].num_samples == 20  # without its later claims
    settle(coordinator, "w0", num_trained=25)
    assert coordinator.state(is_kept=True)["progress"].num_samples == 25


# Replicas that send weights keep their own; all others become copies of the center.
SENT_OR_OWN = [("async-easgd", True), ("async-diloco", False), ("async-sgd", False)]


@pytest.mark.parametrize(("method", "continues"), SENT_OR_OWN)
def test_a_checkpoint_counts_unsent_steps_only_if_the_replica_continues_with_them(
    method, continues
):
    coordinator = make_coordinator(method)
    enter(coordinator, "w0")
    coordinator.change(Membership(1, ("w0",)))
    coordinator.vote(1, checkpoint=1.0)
    assert settle(coordinator, "w0", num_trained=5).keep is not None
    assert coordinator.state(is_kept=True)["progress"].num_samples == (10 if continues else 5)


@pytest.mark.parametrize(("method", "continues"), SENT_OR_OWN)
@pytest.mark.parametrize("vote", ["stop", "regroup"])
def test_unsent_steps_of_a_leaver_count_if_its_replica_continues_with_them(method, continues, vote):
    coordinator = make_coordinator(method)
    enter(coordinator, "w0")
    coordinator.change(Membership(1, ("w0",)))
    coordinator.vote(1, **{vote: 1.0})
    assert settle(coordinator, "w0", num_trained=5).outcome is not Outcome.GO_ON
    coordinator.leave_generation(MessageId("w0", 1, 9))
    assert coordinator.state()["progress"].num_samples == (10 if continues else 5)
    assert coordinator.pop_records()[-1].progress.num_samples == (10 if continues else 5)


def test_an_evaluation_that_is_due_as_a_worker_leaves_is_requested():
    coordinator = make_coordinator(num_samples=20)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w1")
    coordinator.dismiss("w0")
    assert settle(coordinator, "w0", num_trained=5).outcome is Outcome.LEFT
    assert coordinator.pop_due() == []
    coordinator.leave_generation(MessageId("w0", 1, 9))  # its last step completes the first epoch
    assert coordinator.pop_due() == [Due(coordinator.version, False)]


def test_a_vote_for_a_checkpoint_adds_no_staleness():
    now = [0.0]
    coordinator = make_coordinator(now=now)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    for _ in range(3):
        for worker_id in ("w0", "w1"):
            settle(coordinator, worker_id)
            coordinator.vote(1, checkpoint=1.0)
    now[0] = 1.0
    settle(coordinator, "w0")
    (record,) = coordinator.pop_records()
    assert record.staleness == 6 / 7  # each message but the first is behind one other exchange


# workers


class DiedInStep(Exception):
    """A worker died in a step."""


class RecordingTask(Classification):
    """Records the positions that each worker trains; one worker is lost during a step."""

    def __init__(self, model, *, dies_at):
        super().__init__(model)
        self.dies_at, self.trained = dies_at, Counter()
        self.models = []

    def loss(self, model, batch):
        if all(model is not known for known in self.models):
            self.models.append(model)
        if model is self.models[0]:
            if self.dies_at == 0:
                raise DiedInStep
            self.dies_at -= 1
        self.trained.update(batch[1].tolist())
        return super().loss(model, batch)


def test_a_snapshot_counts_no_sample_that_arrived_after_one_of_its_spans_was_copied():
    ensemble = Ensemble(config("async-sgd", epochs=9), num_workers=1).join()
    ensemble.run(1)
    before = ensemble.service.coordinator.state()

    def others():
        ensemble.run(1)
        return []

    snapshot = ensemble.service.snapshot(others, Due(0, False))
    assert snapshot.progress.num_samples == before["progress"].num_samples
    assert ensemble.center().progress.num_samples > snapshot.progress.num_samples


def run_to_end(worker):
    while worker.run_round() is Outcome.GO_ON:
        pass


@pytest.mark.parametrize("exchange", [{}, {"delay": 1}, {"fragments": 2}, {"center_shards": 2}])
@pytest.mark.parametrize("method", ["async-easgd", "async-sgd"])
@pytest.mark.parametrize("dies_at", [0, 2, 3, 4, 5, 8])
def test_no_untrained_sample_counts_as_done(method, exchange, dies_at):
    """Rounds of 3 steps: the last step is in progress when its message moves the center."""
    images = tiny_images(40)
    images = ImageSet(images.images, np.arange(40), tuple(map(str, range(40))))
    task = RecordingTask(linear, dies_at=dies_at)
    ensemble = Ensemble(
        config(method, period=3, epochs=2, exchange=exchange),
        num_workers=2,
        images=images,
        task=task,
    ).join()
    lost, stays = ensemble.workers
    with pytest.raises(DiedInStep):
        run_to_end(lost)
    membership = Membership(2, ("w1",))
    for shard in ensemble.others:
        shard.change(membership)
    ensemble.service.change(membership, [s.state() for s in ensemble.others])
    run_to_end(stays)
    assert ensemble.service.coordinator.is_complete()
    assert ensemble.service.coordinator.state()["progress"].num_samples == 80
    assert min(task.trained[n] for n in range(40)) >= 2
    # Its unsent steps are trained again: at most a round and its delay.
    assert sum(task.trained.values()) <= 80 + 2 * (3 + 1)
