"""Messages between a worker and the center: applied once, in order or not, and answered."""

import threading

import numpy as np
import pytest
import torch
from processes import resident_bytes
from ray.exceptions import ActorUnavailableError
from scenarios import ALL, spans_of

from raydl.compression import parse_codec
from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.dispatcher import Dispatcher, Due
from raydl.errors import ExchangeTimeoutError
from raydl.exchange import remote
from raydl.exchange.cells import cells, shard_spans
from raydl.exchange.post import Push, Settlement, Stamp
from raydl.exchange.shard import Shard
from raydl.ledger import Claim, Ledger
from raydl.membership import Membership
from raydl.methods import resolve
from raydl.optimizers import make_optimizer
from raydl.reports import Outcome
from raydl.rules import Elastic, Outer, Rule, Sends
from raydl.talk import Header


class Add(Rule):
    """c <- c + message: two updates at once show at once."""

    sends = Sends.PROGRESS

    def update_center_(self, center, total, tally, optimizer):
        center.add_(total)


def make_shard(rule, size, *, is_locked=True, spans=None, settles=None, codec="none"):
    shard = Shard(
        spans or [(0, size)],
        torch.zeros(size),
        torch.zeros(0),
        rule=rule,
        make_optimizer=make_optimizer(OptimizerConfig()),
        is_locked=is_locked,
        codec=parse_codec(codec),
        settles=settles,
    )
    shard.open(Membership(0, ("w0", "w1")))
    return shard


def push(worker_id, sequence, values, *, generation=0, incarnation=0, span=None, settlement=None):
    values = np.asarray(values)
    if values.dtype != np.uint8:  # those are a codec's
        values = values.astype(np.float32)
    return Push(
        stamp=Stamp(worker_id, generation, incarnation, sequence),
        span=span or (0, values.size),
        weights=values,
        buffers=np.empty(0, np.float32),
        num_workers=2,
        num_samples=1.0,
        lr=0.1,
        settlement=settlement,
    )


def values_of(shard):
    return np.concatenate(shard.state().weights)


# once


def test_elastic_messages_are_answered_with_the_center_before_them():
    shard = make_shard(Elastic(0.5), 2)  # alpha 1/4
    assert shard.exchange(push("w0", 0, [4, 8])).weights.tolist() == [0, 0]
    assert shard.exchange(push("w1", 0, [1, 2])).weights.tolist() == [1, 2]
    assert values_of(shard).tolist() == [1, 2]


def test_progress_is_answered_with_the_center_after_it():
    shard = make_shard(Outer(1.0), 2)
    assert shard.exchange(push("w0", 0, [1, 2])).weights.tolist() == [-1, -2]


def test_a_repeated_message_is_answered_and_changes_nothing():
    shard = make_shard(Add(), 2)
    shard.exchange(push("w0", 0, [1, 2]))
    again = shard.exchange(push("w0", 0, [1, 2]))
    assert again.weights.tolist() == [1, 2]
    assert not again.refusal
    assert shard.num_repeated == 1
    shard.exchange(push("w0", 1, [1, 2]))  # the next one counts
    shard.exchange(push("w0", 0, [1, 2], incarnation=1))  # and the first of another life
    shard.exchange(push("w1", 0, [1, 2]))  # and that of another worker
    assert values_of(shard).tolist() == [4, 8]


def test_a_message_of_a_generation_that_has_passed_is_refused_and_changes_nothing():
    shard = make_shard(Add(), 2)
    shard.open(Membership(3, ("w0", "w1")))
    reply = shard.exchange(push("w0", 0, [1, 2], generation=2))
    assert "the center refused w0: it entered generation 3" in reply.refusal
    assert values_of(shard).tolist() == [0, 0]
    assert shard.num_refused == 1


def test_hogwild_has_room_for_as_many_messages_as_come_at_one_time(monkeypatch):
    """And not one for each thread of the center, of which there are two for each worker."""
    made, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: made.append(a) or empty_like(*a, **k))
    shard = make_shard(Add(), 2, is_locked=False)
    for number in range(20):
        exchange = threading.Thread(target=shard.exchange, args=[push("w0", number, [1, 2])])
        exchange.start()
        exchange.join()
    assert values_of(shard).tolist() == [20, 40]
    assert len(made) == 1


def test_a_message_uses_up_no_memory_of_the_sender():
    shard, message = make_shard(Elastic(0.5), 3), push("w0", 0, [4, 8, 12])
    message.weights.flags.writeable = False  # as Ray hands them out
    shard.exchange(message)
    assert message.weights.tolist() == [4, 8, 12]


def test_every_parameter_is_in_one_cell_of_one_shard():
    for size, num_shards, num_fragments in [(10, 3, 4), (7, 1, 1), (5, 5, 2), (1001, 4, 7)]:
        spans = [
            s for c in cells(size, num_shards=num_shards, num_fragments=num_fragments) for s in c
        ]
        assert sorted(p for a, b in spans for p in range(a, b)) == list(range(size))
        assert len(shard_spans(size, num_shards)) == num_shards


def test_a_message_whose_answer_was_lost_is_sent_again_and_counts_once(monkeypatch):
    shard = make_shard(Add(), 2)
    answers = []

    def get(ref, timeout):
        answers.append(ref)
        if len(answers) == 1:  # the shard took the message, then the connection broke
            raise ActorUnavailableError("the connection broke", b"0" * 16)
        return ref

    monkeypatch.setattr(remote.ray, "get", get)
    monkeypatch.setattr(remote.ray, "wait", lambda refs, timeout: (refs, []))
    message = push("w0", 0, [1, 2])
    delivery = remote.RayDelivery(lambda: shard.exchange(message), 0, message.stamp, 5.0)
    assert delivery.wait().weights.tolist() == [1, 2]
    assert values_of(shard).tolist() == [1, 2]
    assert shard.num_repeated == 1


# at once


def hammer(shard, size, num_pushes):
    """Let two threads add one, many times each; return the greatest sum that is missing."""
    start = threading.Barrier(2)

    def run(worker_id):
        torch.set_num_threads(1)
        ones = np.ones(size, np.float32)
        start.wait()
        for sequence in range(num_pushes):
            shard.exchange(push(worker_id, sequence, ones))

    threads = [threading.Thread(target=run, args=(w,)) for w in ("w0", "w1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return 2 * num_pushes - values_of(shard).min()


def test_behind_the_lock_no_update_is_ever_lost():
    assert hammer(make_shard(Add(), 500_000, is_locked=True), 500_000, 150) == 0


def test_hogwild_adds_at_the_same_time_and_so_loses_parts_of_updates():
    """The same code without the lock; that it happens shows that the adding is concurrent."""
    for _ in range(20):  # one round nearly always does
        if hammer(make_shard(Add(), 500_000, is_locked=False), 500_000, 150) > 0:
            return
    raise AssertionError("no update was lost in 20 rounds: the threads took turns")


def test_hogwild_threads_do_not_take_each_others_gradient():
    """With momentum at the center each message is used by its own thread's optimizer."""
    shard = make_shard(Outer(1.0, momentum=0.5), 4, is_locked=False)
    replies = [shard.exchange(push("w0", i, [1, 0, 0, 0])) for i in range(2)]
    results = []
    thread = threading.Thread(
        target=lambda: results.append(shard.exchange(push("w1", 0, [0, 0, 1, 0])))
    )
    thread.start()
    thread.join(timeout=10)
    # Momentum is shared: 1, 1.5, then 0.75 of the first place and 1 of the third.
    assert replies[1].weights.tolist() == [-2.5, 0, 0, 0]
    assert results[0].weights.tolist() == [-3.25, 0, -1, 0]


@pytest.mark.parametrize("is_locked", [True, False])
def test_ten_thousand_exchanges_leave_memory_flat(is_locked):
    shard = make_shard(Elastic(0.5), 20_000, is_locked=is_locked)
    values = np.ones(20_000, np.float32)
    for sequence in range(1000):
        shard.exchange(push("w0", sequence, values))
    before = resident_bytes()
    for sequence in range(1000, 11_000):
        shard.exchange(push("w0", sequence, values))
    assert resident_bytes() - before < 4_000_000  # fifty vectors of 80 kB


# orders


def make_dispatcher(
    method="async-easgd",
    *,
    num_samples=100,
    period=2,
    timeout_s=30.0,
    now=None,
    workers=("w0", "w1"),
    ledger=None,
    **training,
):
    training = training or {"epochs": 2}
    config = TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(batch_size=5, **training),
        exchange=ExchangeConfig(timeout_s=timeout_s),
    )
    clock = (lambda: now[0]) if now else (lambda: 0.0)
    ledger = ledger or Ledger(num_samples)
    dispatcher = Dispatcher(config, resolve(config), ledger, clock=clock)
    dispatcher.open(Membership(1, workers))
    return dispatcher


def enter(dispatcher, worker_id, *, generation=1):
    return dispatcher.enter(Stamp(worker_id, generation, 0, 0), 0)


def settle(dispatcher, worker_id, *, local_step=2, generation=1, num_trained=ALL, **header):
    settlement = Settlement(Header(**header), local_step, num_trained, 0.1, 80)
    return dispatcher.settle(push(worker_id, 1, [], generation=generation, settlement=settlement))


def test_workers_claim_in_the_order_they_come():
    dispatcher = make_dispatcher()
    assert spans_of(enter(dispatcher, "w1")) == [(0, 10)]
    assert spans_of(enter(dispatcher, "w0")) == [(10, 20)]
    orders = settle(dispatcher, "w1")
    assert (spans_of(orders), orders.num_steps, orders.num_done) == ([(20, 30)], 2, 10)


def test_who_claims_in_blocks_is_told_what_it_will_claim_next():
    ledger = Ledger(100, cuts=lambda epoch: [25, 50, 75, 100])
    dispatcher = make_dispatcher(ledger=ledger)
    orders = enter(dispatcher, "w1")
    assert (spans_of(orders), orders.ahead) == ([(0, 10)], [(0, (10, 25)), (0, (25, 50))])
    assert settle(dispatcher, "w1").ahead == [(0, (20, 25)), (0, (25, 50))]


def test_what_a_member_has_reserved_stays_and_what_a_lost_one_has_is_free():
    ledger = Ledger(100, cuts=lambda epoch: [25, 50, 75, 100])
    dispatcher = make_dispatcher(ledger=ledger)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.open(Membership(2, ("w1",)))
    assert ledger.reserved_by("w0") == []
    assert ledger.reserved_by("w1") == [(0, (60, 75)), (0, (75, 100))]
    assert spans_of(enter(dispatcher, "w1", generation=2)) == [(60, 70)]


def test_staleness_counts_what_others_settled_in_between():
    now = [0.0]
    dispatcher = make_dispatcher(now=now)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    for worker_id in ("w1", "w1", "w1", "w0"):
        settle(dispatcher, worker_id)
    now[0] = 1.0
    settle(dispatcher, "w0")
    (record,) = dispatcher.take_records()
    assert record.staleness == 3 / 5


def test_nobody_waits_for_the_last_samples_of_another():
    dispatcher = make_dispatcher(num_samples=15)
    enter(dispatcher, "w0")
    first, second = enter(dispatcher, "w1").claims, settle(dispatcher, "w1").claims
    assert first == [Claim(0, [(10, 15)], 1), Claim(1, [(0, 5)], 1)]  # its two local steps
    assert second == [Claim(1, [(5, 15)], 2)]


def test_a_finished_run_orders_everyone_to_leave_and_wants_one_kept_snapshot():
    dispatcher = make_dispatcher(num_samples=20, epochs=1)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED
    assert dispatcher.take_due() == []
    last = settle(dispatcher, "w1")
    assert last.outcome is Outcome.FINISHED
    dispatcher.leave(Stamp("w0", 1, 0, 9))
    assert dispatcher.take_due() == []  # a message of w1 to another shard may be on its way
    for _ in range(2):  # told twice, counted once
        dispatcher.leave(Stamp("w1", 1, 0, 9))
    assert dispatcher.take_due() == [Due(last.version, True)]
    assert dispatcher.state()["num_samples"] == 20


def test_a_checkpoint_is_due_when_everyone_was_told_to_keep_its_state():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.vote(1, checkpoint=1.0)
    number = settle(dispatcher, "w0").keep
    assert number is not None
    assert settle(dispatcher, "w0").keep is None  # told once
    assert dispatcher.take_due() == []
    assert settle(dispatcher, "w1").keep == number
    assert dispatcher.take_due() == [Due(number, True)]


def test_calls_that_are_repeated_are_answered_as_before():
    """A connection may break after a call was taken and before it was answered."""
    dispatcher = make_dispatcher("original-easgd")
    first = enter(dispatcher, "w0")
    assert enter(dispatcher, "w0") is first  # nothing is claimed twice
    enter(dispatcher, "w1")  # nobody's turn comes before
    shard = make_shard(Elastic(0.5), 2, settles=dispatcher)
    shard.open(Membership(1, ("w0", "w1")))
    dispatcher.take_turn(Stamp("w0", 1, 0, 1))
    dispatcher.take_turn(Stamp("w0", 1, 0, 1))  # the turn is held, not waited for
    settlement = Settlement(Header(), 2, ALL, 0.1, 80)
    message = push("w0", 2, [1, 2], generation=1, settlement=settlement)
    orders = shard.exchange(message).orders
    assert shard.exchange(message).orders is orders
    assert orders.num_done == 10


def test_a_run_that_is_complete_is_finished_even_if_a_stop_came_at_the_end():
    dispatcher = make_dispatcher(num_samples=10, epochs=1)
    enter(dispatcher, "w0")
    dispatcher.vote(1, stop=1.0)
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED


def test_a_vote_of_another_generation_is_ignored():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    dispatcher.vote(7, stop=1.0)
    assert settle(dispatcher, "w0").outcome is Outcome.GO_ON
    dispatcher.vote(1, stop=1.0)
    assert settle(dispatcher, "w0").outcome is Outcome.STOPPED


def test_what_a_worker_had_claimed_goes_back_when_its_generation_ends():
    dispatcher = make_dispatcher()
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.open(Membership(2, ("w1",)))
    dispatcher.open(Membership(3, ("w0", "w1")))
    assert spans_of(enter(dispatcher, "w1", generation=3)) == [(0, 10)]


def test_local_steps_follow_the_speed_where_the_method_says_so():
    dispatcher = make_dispatcher("async-diloco", num_samples=1000, period=8)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    settle(dispatcher, "w0", step_s=0.1)
    assert settle(dispatcher, "w1", step_s=0.2).num_steps == 4
    assert settle(dispatcher, "w0", step_s=0.1).num_steps == 8


def test_a_turn_that_does_not_come_is_told_with_its_holder():
    dispatcher = make_dispatcher("original-easgd", timeout_s=0.05)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    with pytest.raises(ExchangeTimeoutError, match="w0"):
        dispatcher.take_turn(Stamp("w1", 1, 0, 1))


def test_a_call_for_a_turn_that_overtakes_the_end_of_the_last_one_waits():
    """The center's threads take a worker's calls in any order."""
    dispatcher = make_dispatcher("original-easgd", timeout_s=30.0)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    dispatcher.take_turn(Stamp("w0", 1, 0, 1))
    seen = []

    def run(worker_id):
        dispatcher.take_turn(Stamp(worker_id, 1, 0, 3))
        seen.append(worker_id)
        dispatcher.end_turn(Stamp(worker_id, 1, 0, 4))

    early = threading.Thread(target=run, args=("w0",))
    early.start()  # before the end of its first turn
    early.join(timeout=0.1)
    assert early.is_alive()
    dispatcher.end_turn(Stamp("w0", 1, 0, 2))
    run("w1")
    early.join(timeout=5)
    assert seen == ["w1", "w0"]


def test_a_worker_without_work_is_passed_over():
    dispatcher = make_dispatcher("original-easgd", num_samples=25, epochs=1)
    enter(dispatcher, "w0")
    enter(dispatcher, "w1")
    settle(dispatcher, "w0")
    dispatcher.end_turn(Stamp("w0", 1, 0, 2))
    assert settle(dispatcher, "w1").outcome is Outcome.FINISHED
    dispatcher.end_turn(Stamp("w1", 1, 0, 2))
    dispatcher.take_turn(Stamp("w0", 1, 0, 3))
    assert settle(dispatcher, "w0").outcome is Outcome.FINISHED
