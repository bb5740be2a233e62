"""Workers join and leave methods with messages without disturbing the others."""

import pickle

import pytest
import torch
from coordinators import (
    Add,
    change,
    completing_request,
    enter,
    make_coordinator,
    make_shard,
    request,
    settle,
    values_of,
)
from hypothesis import given
from hypothesis import strategies as st
from scenarios import spans_of, steps_of

from raydl.core.codecs import parse_codec
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.errors import ExchangeError
from raydl.methods.easgd import Elastic
from raydl.parameter_server.coordinator import Due
from raydl.parameter_server.protocol import MessageId


def leave(coordinator, worker_id, *, generation=1):
    coordinator.leave_generation(MessageId(worker_id, generation, 9))


# claims and assignments


def test_the_claims_of_a_lost_worker_are_trained_by_the_others():
    coordinator = make_coordinator(num_samples=30, epochs=1)
    enter(coordinator, "w0")
    assert spans_of(enter(coordinator, "w1")) == [(10, 20)]
    change(coordinator, 2, "w0")
    assert spans_of(settle(coordinator, "w0")) == [(10, 20)]
    assert spans_of(settle(coordinator, "w0")) == [(20, 30)]
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED
    assert coordinator.state()["progress"].num_samples == 30


def test_the_assignments_of_remaining_workers_do_not_change():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    change(coordinator, 2, "w0", "w2")
    assert spans_of(enter(coordinator, "w2", generation=2)) == [(10, 20)]
    assignment = settle(coordinator, "w0")  # of the generation that w0 entered
    assert (spans_of(assignment), assignment.num_done) == ([(20, 30)], 10)
    assert coordinator.num_refused == 0


def test_the_next_assignment_has_the_number_of_workers_and_their_generation():
    coordinator = make_coordinator()
    assignments = [enter(coordinator, "w0")]
    change(coordinator, 2, "w0", "w1", "w2")
    assignments.append(settle(coordinator, "w0"))
    change(coordinator, 3, "w0")
    assignments.append(settle(coordinator, "w0"))
    assert [(a.num_workers, a.generation) for a in assignments] == [(2, 1), (3, 2), (1, 3)]


def test_records_and_snapshots_have_the_current_membership():
    now = [0.0]
    coordinator = make_coordinator(now=now)
    enter(coordinator, "w0")
    change(coordinator, 5, "w0", "w2")
    now[0] = 1.0
    settle(coordinator, "w0")
    (record,) = coordinator.pop_records()
    assert (record.progress.generation, record.num_workers) == (5, 2)
    assert coordinator.state()["progress"].generation == 5


def test_a_newcomer_starts_with_the_progress_of_the_others():
    """The newcomer gets their local steps and the current center."""
    now = [0.0]
    coordinator = make_coordinator(now=now)
    enter(coordinator, "w0")
    for local_step in (2, 4, 6):
        settle(coordinator, "w0", local_step=local_step)
    change(coordinator, 2, "w0", "w2")
    assert (
        coordinator.state()["progress"].local_step == 4
    )  # w1, which had not entered, took 0 steps, then 3
    change(coordinator, 3, "w2")
    coordinator.pop_records()
    enter(coordinator, "w2", generation=2)
    now[0] = 1.0
    settle(coordinator, "w2", generation=2)
    (record,) = coordinator.pop_records()
    assert record.staleness == 0


def test_local_steps_follow_the_fastest_of_the_remaining_workers():
    coordinator = make_coordinator("async-diloco", num_samples=1000, period=8)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0", step_s=0.1)
    assert steps_of(settle(coordinator, "w1", step_s=0.2)) == 4
    change(coordinator, 2, "w1")
    assert steps_of(settle(coordinator, "w1", step_s=0.2)) == 8


def test_a_vote_survives_changes_of_membership():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    change(coordinator, 2, "w0", "w2")
    coordinator.vote(1, stop=1.0)  # sent before its sender knew of the change
    assert settle(coordinator, "w0").outcome is Outcome.STOPPED
    assert enter(coordinator, "w2", generation=2).outcome is Outcome.STOPPED


# refused messages


def test_a_late_message_of_a_lost_worker_is_refused_and_counted_and_changes_nothing():
    coordinator = make_coordinator()
    shard = make_shard(Add(), 2, coordinator=coordinator)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    shard.change(Membership(7, ("w0",)))
    change(coordinator, 7, "w0")
    response = shard.exchange(completing_request("w1", 1, [1, 2]))
    assert response.refusal == "the center refused w1: it is no longer a member (generation 7)"
    assert values_of(shard).tolist() == [0, 0]
    assert shard.num_refused == 1
    for call in (lambda s: coordinator.enter(s, 0), coordinator.take_turn):
        with pytest.raises(ExchangeError, match="the center refused w1: it is no longer a member"):
            call(MessageId("w1", 1, 2))
    with pytest.raises(ExchangeError, match="no longer a member"):
        coordinator.repeat(completing_request("w1", 1, [1, 2]))
    assert coordinator.num_refused == 3
    coordinator.end_turn(MessageId("w1", 1, 3))  # these two calls have no effect
    leave(coordinator, "w1")
    assert coordinator.state()["progress"].num_samples == 0
    assert shard.exchange(completing_request("w0", 1, [1, 2])).assignment.num_done == 10


def test_a_message_from_before_a_worker_entered_again_is_refused():
    coordinator = make_coordinator()
    shard = make_shard(Add(), 2)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    enter(coordinator, "w1")
    for generation, workers in ((2, ("w0",)), (3, ("w0", "w1"))):
        shard.change(Membership(generation, workers))
        change(coordinator, generation, *workers)
    enter(coordinator, "w1", generation=3)
    assert "w1: it entered generation 3, but the message is of generation 1" in (
        shard.exchange(request("w1", 5, [1, 2], generation=1)).refusal
    )
    assert settle(coordinator, "w1", generation=1) is None
    assert (shard.num_refused, coordinator.num_refused) == (1, 1)
    assert coordinator.state()["progress"].num_samples == 0
    # After entering again, w0 numbers its messages from the start.
    assert not shard.exchange(request("w1", 0, [1, 2], generation=3)).refusal
    assert settle(coordinator, "w1", generation=3).num_done == 10
    assert values_of(shard).tolist() == [1, 2]


@pytest.mark.parametrize("codec", ["none", "topk:1"])
def test_a_worker_removed_while_its_message_is_applied_is_refused(codec):
    coordinator = make_coordinator()

    class Removing:
        """A coordinator that removes the worker just before it completes the round."""

        def settle(self, message):
            shard.change(Membership(2, ("w0",)))
            change(coordinator, 2, "w0")
            return coordinator.settle(message)

    shard = make_shard(Add(), 2, coordinator=Removing(), codec=codec)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    enter(coordinator, "w1")
    message = completing_request("w1", 1, encoded(codec, [1, 2]), span=(0, 2))
    assert "no longer a member" in shard.exchange(message).refusal
    assert (shard.num_refused, coordinator.num_refused) == (0, 1), "it is counted once"
    assert spans_of(enter(coordinator, "w0")) == [(0, 10)]  # these samples are trained again


# the same bits at worker and center


def encoded(codec, values):
    values = torch.tensor(values, dtype=torch.float32)
    return values.numpy() if codec == "none" else parse_codec(codec).encode(values).numpy()


def decoded(codec, message, size):
    return parse_codec(codec).decode(torch.tensor(message), out=torch.empty(size))


class CodedWorker:
    """The worker's side of an elastic exchange with a codec, computed with plain tensors."""

    def __init__(self, worker_id, generation, known, codec):
        self.message_id = (worker_id, generation)
        self.codec, self.mirror, self.sequence = codec, torch.tensor(known), 0

    def exchange(self, shard, weights):
        values = encoded(self.codec, (torch.tensor(weights) - self.mirror).tolist())
        worker_id, generation = self.message_id
        span = (0, self.mirror.numel())
        response = shard.exchange(
            request(worker_id, self.sequence, values, generation=generation, span=span)
        )
        self.sequence += 1
        assert not response.refusal
        self.mirror += decoded(self.codec, response.weights, self.mirror.numel())


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_newcomer_and_its_shard_start_with_the_same_copy_of_the_center(is_locked):
    """The first answer is the difference to that copy, although another worker moved the center."""
    codec = "topk:1"  # lossless for small whole numbers
    shard = make_shard(Elastic(1.0), 4, is_locked=is_locked, codec=codec)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    old = CodedWorker("w0", 1, [0.0] * 4, codec)
    old.exchange(shard, [4.0, 8.0, 0.0, -4.0])  # alpha 1/2
    state = shard.change(Membership(2, ("w0", "w2")))
    assert state.weights[0].tolist() == [2, 4, 0, -2]
    new = CodedWorker("w2", 2, state.weights[0], codec)
    old.exchange(shard, [4.0, 8.0, 0.0, -6.0])  # moves the center before the newcomer's message
    before = values_of(shard)
    assert before.tolist() == [3, 6, 0, -4]
    new.exchange(shard, [1.0, 1.0, 1.0, 1.0])
    assert new.mirror.tolist() == before.tolist()
    assert values_of(shard).tolist() == [2, 3.5, 0.5, -1.5]
    old.exchange(shard, [0.0] * 4)  # the old worker's codec state continues
    assert old.mirror.tolist() == [2, 3.5, 0.5, -1.5]


def test_a_worker_that_enters_again_does_not_keep_its_old_codec_state():
    codec = "topk:1"
    shard = make_shard(Elastic(1.0), 2, codec=codec)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    CodedWorker("w0", 1, [0.0, 0.0], codec).exchange(shard, [4.0, 8.0])
    shard.change(Membership(2, ("w1",)))
    state = shard.change(Membership(3, ("w0", "w1")))
    again = CodedWorker("w0", 3, state.weights[0], codec)
    again.exchange(shard, [2.0, 4.0])
    assert again.mirror.tolist() == [2, 4]
    assert values_of(shard).tolist() == [2, 4]


# leaving


def test_a_dismissed_worker_leaves_while_the_others_continue():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.dismiss("w1")
    coordinator.dismiss("w9")  # unknown: nothing to do
    assert settle(coordinator, "w0").outcome is Outcome.GO_ON
    assignment = settle(coordinator, "w1")
    assert (assignment.outcome, spans_of(assignment), assignment.num_done) == (Outcome.LEFT, [], 20)
    leave(coordinator, "w1")
    assert coordinator.pop_due() == []  # the run goes on
    change(coordinator, 2, "w0")
    assert settle(coordinator, "w0").outcome is Outcome.GO_ON
    assert coordinator.pop_due() == []


def test_a_run_with_only_dismissed_workers_has_not_ended():
    coordinator = make_coordinator()
    for worker_id in ("w0", "w1"):
        coordinator.dismiss(worker_id)
        assert enter(coordinator, worker_id).outcome is Outcome.LEFT
        leave(coordinator, worker_id)
    (due,) = coordinator.pop_due()
    assert not due.is_kept
    assert not coordinator.is_complete()


def test_a_dismissed_worker_finishes_with_the_others_when_the_run_is_over():
    coordinator = make_coordinator(num_samples=10, epochs=1)
    enter(coordinator, "w0")
    coordinator.dismiss("w0")
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED


def test_a_checkpoint_is_due_when_the_last_worker_without_it_is_lost():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.vote(1, checkpoint=1.0)
    number = settle(coordinator, "w0").keep
    assert coordinator.pop_due() == []
    change(coordinator, 2, "w0")
    assert coordinator.pop_due() == [Due(number, True)]
    assert settle(coordinator, "w0").keep is None


def test_a_checkpoint_known_to_lost_workers_only_is_kept_by_the_others():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.vote(1, checkpoint=1.0)
    number = settle(coordinator, "w0").keep
    change(coordinator, 2, "w1")
    assert coordinator.pop_due() == []
    assert settle(coordinator, "w1").keep == number
    assert coordinator.pop_due() == [Due(number, True)]


def test_the_last_snapshot_does_not_wait_for_lost_workers():
    coordinator = make_coordinator(num_samples=20, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w1")
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED
    leave(coordinator, "w0")
    assert coordinator.pop_due() == []
    change(coordinator, 2, "w0")  # w1 is lost after its last answer, before it leaves
    assert coordinator.pop_due() == [Due(2, True)]
    assert coordinator.is_complete()
    change(coordinator, 3, "w0")
    assert coordinator.pop_due() == []


def test_a_run_whose_last_samples_were_lost_is_not_complete_until_others_train_them():
    coordinator = make_coordinator(num_samples=20, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    assert (
        settle(coordinator, "w0").outcome is Outcome.FINISHED
    )  # w1 has claimed all remaining samples
    leave(coordinator, "w0")
    change(coordinator, 2, "w0")
    assert not coordinator.is_complete()
    change(coordinator, 3, "w2")
    assert spans_of(enter(coordinator, "w2", generation=3)) == [(10, 20)]
    assert settle(coordinator, "w2", generation=3).outcome is Outcome.FINISHED
    coordinator.pop_due()
    leave(coordinator, "w2", generation=3)
    assert coordinator.pop_due() == [Due(2, True)]
    assert coordinator.is_complete()


def test_a_run_of_steps_is_complete_when_all_members_have_taken_them():
    coordinator = make_coordinator(steps=4)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0", local_step=2)
    assert settle(coordinator, "w0", local_step=4).outcome is Outcome.FINISHED
    assert not coordinator.is_complete()
    change(coordinator, 2, "w0")
    assert coordinator.is_complete()


def test_a_run_of_seconds_is_complete_when_they_have_passed():
    now = [0.0]
    coordinator = make_coordinator(seconds=10.0, now=now)
    enter(coordinator, "w0")
    now[0] = 9.0
    assert not coordinator.is_complete()
    now[0] = 10.0
    assert coordinator.is_complete()


@given(
    method=st.sampled_from(["async-easgd", "hogwild-easgd", "original-easgd"]),
    num_samples=st.integers(1, 60),
    period=st.integers(1, 3),
    events=st.lists(
        st.tuples(
            st.sampled_from(["settle", "settle", "join", "lose", "return"]), st.integers(0, 9)
        ),
        max_size=40,
    ),
)
def test_every_position_is_completed_once_whichever_workers_join_or_are_lost(
    method, num_samples, period, events
):
    coordinator = make_coordinator(method, num_samples=num_samples, period=period, epochs=2)
    group = ClaimChecker(coordinator)
    for kind, number in events:
        group.apply_event(kind, number)
    group.finish()
    expected = [(epoch, p) for epoch in range(2) for p in range(num_samples)]
    assert sorted(group.done) == expected
    assert coordinator.is_complete()
    assert coordinator.num_refused == group.num_late


class ClaimChecker:
    """Workers that claim and complete positions; checks that no two hold the same one."""

    def __init__(self, coordinator):
        self.coordinator, self.generation = coordinator, 1
        self.entered = {"w0": 1, "w1": 1}
        self.held, self.done, self.gone = {}, [], {}
        self.num_late = 0
        for worker_id in self.entered:
            self.note_claims(worker_id, enter(coordinator, worker_id))

    def note_claims(self, worker_id, assignment):
        spans = [
            (claim.epoch, p)
            for claim in assignment.claims
            for start, stop in claim.spans
            for p in range(start, stop)
        ]
        taken = {p for others in self.held.values() for p in others}
        assert not taken & set(spans)
        assert not set(self.done) & set(spans)
        assert assignment.num_workers == len(self.entered)
        if assignment.outcome is Outcome.GO_ON:
            self.held[worker_id] = spans
        else:
            self.coordinator.leave_generation(MessageId(worker_id, self.entered[worker_id], 9))

    def apply_event(self, kind, number):
        workers = sorted(self.held)
        if kind == "settle" and workers:
            self.settle(workers[number % len(workers)])
        elif kind == "lose" and self.entered:
            self.lose(sorted(self.entered)[number % len(self.entered)])
        elif kind == "join":
            self.join(f"w{2 + self.generation}")
        elif kind == "return" and self.gone:
            self.join(sorted(self.gone)[number % len(self.gone)])

    def settle(self, worker_id):
        self.done += self.held.pop(worker_id)
        generation = self.entered[worker_id]
        self.note_claims(worker_id, settle(self.coordinator, worker_id, generation=generation))

    def change(self):
        self.generation += 1
        self.coordinator.change(Membership(self.generation, tuple(self.entered)))

    def join(self, worker_id):
        late = self.gone.pop(worker_id, None)
        self.entered[worker_id] = self.generation + 1
        self.change()
        generation = self.entered[worker_id]
        self.note_claims(worker_id, enter(self.coordinator, worker_id, generation=generation))
        if late is not None:  # a message from before the worker entered again arrives now
            assert settle(self.coordinator, worker_id, generation=late) is None
            self.num_late += 1

    def lose(self, worker_id):
        self.held.pop(worker_id, None)
        self.gone[worker_id] = self.entered.pop(worker_id)
        self.change()
        assert settle(self.coordinator, worker_id, generation=self.gone[worker_id]) is None
        self.num_late += 1

    def finish(self):
        while not self.coordinator.is_complete():
            if not self.held:
                self.join(f"w{2 + self.generation}")
            for worker_id in sorted(self.held):
                self.settle(worker_id)


def test_assignments_are_small():
    """Each exchange carries one, with the ledger in it."""
    workers = tuple(f"w{i}" for i in range(8))
    coordinator = make_coordinator(num_samples=60_000, period=16, workers=workers)
    for worker_id in workers:
        enter(coordinator, worker_id)
    assignment = settle(coordinator, "w3")
    assert assignment.ledger is not None
    assert len(pickle.dumps(assignment)) < 1000


def test_the_clock_of_a_run_is_stopped_while_no_worker_trains():
    now = [0.0]
    coordinator = make_coordinator(now=now, seconds=100.0)
    now[0] = 10.0
    change(coordinator, 2)
    now[0] = 200.0
    assert coordinator.seconds == 10.0
    assert not coordinator.is_complete()
    change(coordinator, 3, "w2")
    now[0] = 205.0
    assert coordinator.seconds == 15.0
    coordinator.vote(3, stop=1.0)
    assert enter(coordinator, "w2", generation=3).outcome is Outcome.STOPPED
    leave(coordinator, "w2", generation=3)
    now[0] = 300.0
    assert coordinator.state()["progress"].seconds == 15.0
