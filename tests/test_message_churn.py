"""Workers join and leave methods by messages; those who stay do not notice."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenarios import ALL, spans_of
from test_messages import Add, enter, make_dispatcher, make_shard, push, settle, values_of

from raydl.compression import parse_codec
from raydl.dispatcher import Due
from raydl.errors import ExchangeError
from raydl.exchange.post import Settlement, Stamp
from raydl.membership import Membership
from raydl.reports import Outcome
from raydl.rules import Elastic
from raydl.talk import Header


def change(dispatcher, generation, *worker_ids):
    dispatcher.change(Membership(generation, worker_ids))


def leave(dispatcher, worker_id, *, generation=1):
    dispatcher.leave(Stamp(worker_id, generation, 0, 9))


def settling(worker_id, sequence, values, **stamp):
    settlement = Settlement(Header(), 2, ALL, 0.1, 80)
    stamp.setdefault("generation", 1)
    return push(worker_id, sequence, values, settlement=settlement, **stamp)


def waiting(pool, call, *args):
    """Begin a call in a thread, and return once it waits for somebody."""
    future = pool.submit(call, *args)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    return future


# claims and orders


def test_what_a_lost_worker_had_claimed_is_trained_by_the_others():
    dispatcher = make_dispatcher(num_samples=30, epochs=1)
    enter(dispatcher, "w0")
    assert spans_of(enter(dispatcher, "w1")) == [(10, 20)]
    change(dispatcher, 2, "w0")
    assert spans_of(settle(dispatcher, "w0")) == [(10, 20)]
    assert spans_of(settle(dispatcher, "w0")) == [(20, 30)]
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED
    assert dispatcher.state()["num_samples"] == 30


def test_the_orders_of_those_who_stay_are_not_disturbed():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    change(dispatcher, 2, "w0", "w2")
    assert spans_of(enter(dispatcher, "w2", generation=2)) == [(10, 20)]
    orders = settle(dispatcher, "w0")  # of the generation that it entered with
    assert (spans_of(orders), orders.num_done) == ([(20, 30)], 10)
    assert dispatcher.num_refused == 0


def test_how_many_train_is_told_with_the_next_orders():
    dispatcher = make_dispatcher()
    assert enter(dispatcher, "w0").num_workers == 2
    change(dispatcher, 2, "w0", "w1", "w2")
    assert settle(dispatcher, "w0").num_workers == 3
    change(dispatcher, 3, "w0")
    assert settle(dispatcher, "w0").num_workers == 1


def test_records_and_snapshots_are_of_the_membership_of_now():
    now = [0.0]
    dispatcher = make_dispatcher(now=now)
    enter(dispatcher, "w0")
    change(dispatcher, 5, "w0", "w2")
    now[0] = 1.0
    settle(dispatcher, "w0")
    (record,) = dispatcher.take_records()
    assert (record.generation, record.num_workers) == (5, 2)
    assert dispatcher.state()["generation"] == 5


def test_a_newcomer_begins_where_the_others_are():
    """With their local steps, and knowing the center as it is."""
    now = [0.0]
    dispatcher = make_dispatcher(now=now)
    enter(dispatcher, "w0")
    for local_step in (2, 4, 6):
        settle(dispatcher, "w0", local_step=local_step)
    change(dispatcher, 2, "w0", "w2")
    assert dispatcher.state()["local_step"] == 4  # w1, who was to enter, has taken 0, then 3
    change(dispatcher, 3, "w2")
    dispatcher.take_records()
    enter(dispatcher, "w2", generation=2)
    now[0] = 1.0
    settle(dispatcher, "w2", generation=2)
    (record,) = dispatcher.take_records()
    assert record.staleness == 0


def test_local_steps_follow_the_fastest_of_those_who_are_left():
    dispatcher = make_dispatcher("async-diloco", num_samples=1000, period=8)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    settle(dispatcher, "w0", step_s=0.1)
    assert settle(dispatcher, "w1", step_s=0.2).num_steps == 4
    change(dispatcher, 2, "w1")
    assert settle(dispatcher, "w1", step_s=0.2).num_steps == 8


def test_a_vote_outlives_changes_of_membership():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    change(dispatcher, 2, "w0", "w2")
    dispatcher.vote(1, stop=1.0)  # cast before its sender knew of the change
    assert settle(dispatcher, "w0").outcome is Outcome.STOPPED
    assert enter(dispatcher, "w2", generation=2).outcome is Outcome.STOPPED


# refused


def test_a_late_message_of_a_lost_worker_is_refused_changes_nothing_and_is_counted():
    dispatcher = make_dispatcher()
    shard = make_shard(Add(), 2, settles=dispatcher)
    shard.open(Membership(1, ("w0", "w1")))
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    shard.change(Membership(7, ("w0",)))
    change(dispatcher, 7, "w0")
    reply = shard.exchange(settling("w1", 1, [1, 2]))
    assert reply.refusal == "the center refused w1: it is no longer a member (generation 7)"
    assert values_of(shard).tolist() == [0, 0]
    assert shard.num_refused == 1
    for call in (lambda s: dispatcher.enter(s, 0), dispatcher.take_turn):
        with pytest.raises(ExchangeError, match="the center refused w1: it is no longer a member"):
            call(Stamp("w1", 1, 0, 2))
    with pytest.raises(ExchangeError, match="no longer a member"):
        dispatcher.repeat(settling("w1", 1, [1, 2]))
    assert dispatcher.num_refused == 3
    dispatcher.end_turn(Stamp("w1", 1, 0, 3))  # these two are of no consequence
    leave(dispatcher, "w1")
    assert dispatcher.state()["num_samples"] == 0
    assert shard.exchange(settling("w0", 1, [1, 2])).orders.num_done == 10


def test_a_message_of_an_earlier_life_is_refused():
    dispatcher = make_dispatcher()
    shard = make_shard(Add(), 2)
    shard.open(Membership(1, ("w0", "w1")))
    enter(dispatcher, "w1")
    for generation, workers in ((2, ("w0",)), (3, ("w0", "w1"))):
        shard.change(Membership(generation, workers))
        change(dispatcher, generation, *workers)
    enter(dispatcher, "w1", generation=3)
    assert "w1: it entered generation 3, the message is of 1" in (
        shard.exchange(push("w1", 5, [1, 2], generation=1)).refusal
    )
    assert settle(dispatcher, "w1", generation=1) is None
    assert (shard.num_refused, dispatcher.num_refused) == (1, 1)
    assert dispatcher.state()["num_samples"] == 0
    # Its new life counts its messages anew.
    assert not shard.exchange(push("w1", 0, [1, 2], generation=3)).refusal
    assert settle(dispatcher, "w1", generation=3).num_done == 10
    assert values_of(shard).tolist() == [1, 2]


@pytest.mark.parametrize("codec", ["none", "topk:1"])
def test_a_worker_removed_while_its_message_is_applied_is_refused(codec):
    dispatcher = make_dispatcher()

    class Settles:
        """Removes the worker just before it settles."""

        def settle(self, message):
            shard.change(Membership(2, ("w0",)))
            change(dispatcher, 2, "w0")
            return dispatcher.settle(message)

    shard = make_shard(Add(), 2, settles=Settles(), codec=codec)
    shard.open(Membership(1, ("w0", "w1")))
    enter(dispatcher, "w1")
    message = settling("w1", 1, encoded(codec, [1, 2]), span=(0, 2))
    assert "no longer a member" in shard.exchange(message).refusal
    assert (shard.num_refused, dispatcher.num_refused) == (0, 1), "it is counted once"
    assert spans_of(enter(dispatcher, "w0")) == [(0, 10)]  # they are trained again


# the same bits at both ends


def encoded(codec, values):
    values = torch.tensor(values, dtype=torch.float32)
    return values.numpy() if codec == "none" else parse_codec(codec).encode(values).numpy()


def decoded(codec, message, size):
    return parse_codec(codec).decode(torch.tensor(message), out=torch.empty(size))


class CodedWorker:
    """The worker's end of an elastic exchange with a codec: worked by hand on tensors."""

    def __init__(self, worker_id, generation, known, codec):
        self.stamp = (worker_id, generation)
        self.codec, self.mirror, self.sequence = codec, torch.tensor(known), 0

    def exchange(self, shard, weights):
        values = encoded(self.codec, (torch.tensor(weights) - self.mirror).tolist())
        worker_id, generation = self.stamp
        span = (0, self.mirror.numel())
        reply = shard.exchange(
            push(worker_id, self.sequence, values, generation=generation, span=span)
        )
        self.sequence += 1
        assert not reply.refusal
        self.mirror += decoded(self.codec, reply.weights, self.mirror.numel())


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_newcomer_and_its_shard_begin_with_the_same_copy_of_the_center(is_locked):
    """Its first answer is the difference to that copy, though others moved the center since."""
    codec = "topk:1"  # of small whole numbers nothing is lost
    shard = make_shard(Elastic(1.0), 4, is_locked=is_locked, codec=codec)
    shard.open(Membership(1, ("w0", "w1")))
    old = CodedWorker("w0", 1, [0.0] * 4, codec)
    old.exchange(shard, [4.0, 8.0, 0.0, -4.0])  # alpha 1/2
    state = shard.change(Membership(2, ("w0", "w2")))
    assert state.weights[0].tolist() == [2, 4, 0, -2]
    new = CodedWorker("w2", 2, state.weights[0], codec)
    old.exchange(shard, [4.0, 8.0, 0.0, -6.0])  # in between
    before = values_of(shard)
    assert before.tolist() == [3, 6, 0, -4]
    new.exchange(shard, [1.0, 1.0, 1.0, 1.0])
    assert new.mirror.tolist() == before.tolist()
    assert values_of(shard).tolist() == [2, 3.5, 0.5, -1.5]
    old.exchange(shard, [0.0] * 4)  # its letters went on
    assert old.mirror.tolist() == [2, 3.5, 0.5, -1.5]


def test_a_worker_that_comes_back_does_not_go_on_with_its_old_letters():
    codec = "topk:1"
    shard = make_shard(Elastic(1.0), 2, codec=codec)
    shard.open(Membership(1, ("w0", "w1")))
    CodedWorker("w0", 1, [0.0, 0.0], codec).exchange(shard, [4.0, 8.0])
    shard.change(Membership(2, ("w1",)))
    state = shard.change(Membership(3, ("w0", "w1")))
    again = CodedWorker("w0", 3, state.weights[0], codec)
    again.exchange(shard, [2.0, 4.0])
    assert again.mirror.tolist() == [2, 4]
    assert values_of(shard).tolist() == [2, 4]


# leaving


def test_a_dismissed_worker_leaves_while_the_others_go_on():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.dismiss("w1")
    dispatcher.dismiss("w9")  # unknown: nothing to do
    assert settle(dispatcher, "w0").outcome is Outcome.GO_ON
    orders = settle(dispatcher, "w1")
    assert (orders.outcome, spans_of(orders), orders.num_done) == (Outcome.LEFT, [], 20)
    leave(dispatcher, "w1")
    assert dispatcher.take_due() == []  # the run goes on
    change(dispatcher, 2, "w0")
    assert settle(dispatcher, "w0").outcome is Outcome.GO_ON
    assert dispatcher.take_due() == []


def test_when_only_dismissed_workers_were_left_the_run_has_not_ended():
    dispatcher = make_dispatcher()
    for worker_id in ("w0", "w1"):
        dispatcher.dismiss(worker_id)
        assert enter(dispatcher, worker_id).outcome is Outcome.LEFT
        leave(dispatcher, worker_id)
    (due,) = dispatcher.take_due()
    assert not due.is_kept
    assert not dispatcher.is_complete()


def test_a_dismissed_worker_is_not_told_to_leave_alone_when_the_run_is_over():
    dispatcher = make_dispatcher(num_samples=10, epochs=1)
    enter(dispatcher, "w0")
    dispatcher.dismiss("w0")
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED


def test_a_checkpoint_is_due_when_the_worker_it_waited_for_is_lost():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.vote(1, checkpoint=1.0)
    number = settle(dispatcher, "w0").keep
    assert dispatcher.take_due() == []
    change(dispatcher, 2, "w0")
    assert dispatcher.take_due() == [Due(number, True)]
    assert settle(dispatcher, "w0").keep is None


def test_a_checkpoint_that_only_lost_workers_knew_of_is_told_to_the_others():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.vote(1, checkpoint=1.0)
    number = settle(dispatcher, "w0").keep
    change(dispatcher, 2, "w1")
    assert dispatcher.take_due() == []
    assert settle(dispatcher, "w1").keep == number
    assert dispatcher.take_due() == [Due(number, True)]


def test_the_last_snapshot_waits_for_nobody_who_is_lost():
    dispatcher = make_dispatcher(num_samples=20, epochs=1)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    settle(dispatcher, "w1")
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED
    leave(dispatcher, "w0")
    assert dispatcher.take_due() == []
    change(dispatcher, 2, "w0")  # w1 is lost between its last answer and its leave
    assert dispatcher.take_due() == [Due(2, True)]
    assert dispatcher.is_complete()
    change(dispatcher, 3, "w0")
    assert dispatcher.take_due() == []


def test_a_run_whose_last_samples_were_lost_is_not_complete_until_others_train_them():
    dispatcher = make_dispatcher(num_samples=20, epochs=1)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED  # w1 has all that is left
    leave(dispatcher, "w0")
    change(dispatcher, 2, "w0")
    assert not dispatcher.is_complete()
    change(dispatcher, 3, "w2")
    assert spans_of(enter(dispatcher, "w2", generation=3)) == [(10, 20)]
    assert settle(dispatcher, "w2", generation=3).outcome is Outcome.FINISHED
    dispatcher.take_due()
    leave(dispatcher, "w2", generation=3)
    assert dispatcher.take_due() == [Due(2, True)]
    assert dispatcher.is_complete()


def test_a_run_of_steps_is_complete_when_everyone_present_has_taken_them():
    dispatcher = make_dispatcher(steps=4)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    settle(dispatcher, "w0", local_step=2)
    assert settle(dispatcher, "w0", local_step=4).outcome is Outcome.FINISHED
    assert not dispatcher.is_complete()
    change(dispatcher, 2, "w0")
    assert dispatcher.is_complete()


def test_a_run_of_seconds_is_complete_when_they_have_passed():
    now = [0.0]
    dispatcher = make_dispatcher(seconds=10.0, now=now)
    enter(dispatcher, "w0")
    now[0] = 9.0
    assert not dispatcher.is_complete()
    now[0] = 10.0
    assert dispatcher.is_complete()


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
def test_whoever_joins_or_is_lost_every_position_is_completed_once(
    method, num_samples, period, events
):
    dispatcher = make_dispatcher(method, num_samples=num_samples, period=period, epochs=2)
    crowd = Crowd(dispatcher)
    for kind, number in events:
        crowd.happen(kind, number)
    crowd.finish()
    expected = [(epoch, p) for epoch in range(2) for p in range(num_samples)]
    assert sorted(crowd.done) == expected
    assert dispatcher.is_complete()
    assert dispatcher.num_refused == crowd.num_late


class Crowd:
    """Workers that claim and complete positions, and check that no two hold the same one."""

    def __init__(self, dispatcher):
        self.dispatcher, self.generation = dispatcher, 1
        self.entered = {"w0": 1, "w1": 1}
        self.held, self.done, self.gone = {}, [], {}
        self.num_late = 0
        for worker_id in self.entered:
            self.take(worker_id, enter(dispatcher, worker_id))

    def take(self, worker_id, orders):
        spans = [
            (claim.epoch, p)
            for claim in orders.claims
            for start, stop in claim.spans
            for p in range(start, stop)
        ]
        taken = {p for others in self.held.values() for p in others}
        assert not taken & set(spans)
        assert not set(self.done) & set(spans)
        assert orders.num_workers == len(self.entered)
        if orders.outcome is Outcome.GO_ON:
            self.held[worker_id] = spans
        else:
            self.dispatcher.leave(Stamp(worker_id, self.entered[worker_id], 0, 9))

    def happen(self, kind, number):
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
        self.take(worker_id, settle(self.dispatcher, worker_id, generation=generation))

    def change(self):
        self.generation += 1
        self.dispatcher.change(Membership(self.generation, tuple(self.entered)))

    def join(self, worker_id):
        late = self.gone.pop(worker_id, None)
        self.entered[worker_id] = self.generation + 1
        self.change()
        generation = self.entered[worker_id]
        self.take(worker_id, enter(self.dispatcher, worker_id, generation=generation))
        if late is not None:  # what it sent in its life before arrives now
            assert settle(self.dispatcher, worker_id, generation=late) is None
            self.num_late += 1

    def lose(self, worker_id):
        self.held.pop(worker_id, None)
        self.gone[worker_id] = self.entered.pop(worker_id)
        self.change()
        assert settle(self.dispatcher, worker_id, generation=self.gone[worker_id]) is None
        self.num_late += 1

    def finish(self):
        while not self.dispatcher.is_complete():
            if not self.held:
                self.join(f"w{2 + self.generation}")
            for worker_id in sorted(self.held):
                self.settle(worker_id)


def test_orders_are_small():
    """They travel with every exchange, with the ledger in them."""
    workers = tuple(f"w{i}" for i in range(8))
    dispatcher = make_dispatcher(num_samples=60_000, period=16, workers=workers)
    for worker_id in workers:
        enter(dispatcher, worker_id)
    orders = settle(dispatcher, "w3")
    assert orders.ledger is not None
    assert len(pickle.dumps(orders)) < 1000


def test_the_clock_of_a_run_stands_while_nobody_trains():
    now = [0.0]
    dispatcher = make_dispatcher(now=now, seconds=100.0)
    now[0] = 10.0
    change(dispatcher, 2)
    now[0] = 200.0
    assert dispatcher.seconds == 10.0
    assert not dispatcher.is_complete()
    change(dispatcher, 3, "w2")
    now[0] = 205.0
    assert dispatcher.seconds == 15.0
    dispatcher.vote(3, stop=1.0)
    assert enter(dispatcher, "w2", generation=3).outcome is Outcome.STOPPED
    leave(dispatcher, "w2", generation=3)
    now[0] = 300.0
    assert dispatcher.state()["seconds"] == 15.0
