"""Messages between a worker and the center are answered and applied once, in any order."""

import itertools
import threading

import numpy as np
import pytest
import torch
from coordinators import Add, enter, make_coordinator, make_shard, request, settle, values_of
from processes import steady_growth
from ray.exceptions import ActorUnavailableError
from scenarios import ALL, spans_of, steps_of

from raydl.core.exchange import Header, cells, shard_spans
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.data.ledger import Claim, Ledger
from raydl.errors import ExchangeTimeoutError
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.parameter_server import ray_transport as remote
from raydl.parameter_server.coordinator import Due
from raydl.parameter_server.protocol import Completion, MessageId

# messages are applied once


def test_elastic_messages_are_answered_with_the_center_before_them():
    shard = make_shard(Elastic(0.5), 2)  # alpha 1/4
    assert shard.exchange(request("w0", 0, [4, 8])).weights.tolist() == [0, 0]
    assert shard.exchange(request("w1", 0, [1, 2])).weights.tolist() == [1, 2]
    assert values_of(shard).tolist() == [1, 2]


def test_progress_is_answered_with_the_center_after_it():
    shard = make_shard(Outer(1.0), 2)
    assert shard.exchange(request("w0", 0, [1, 2])).weights.tolist() == [-1, -2]


def test_a_repeated_message_is_answered_and_changes_nothing():
    shard = make_shard(Add(), 2)
    shard.exchange(request("w0", 0, [1, 2]))
    again = shard.exchange(request("w0", 0, [1, 2]))
    assert again.weights.tolist() == [1, 2]
    assert not again.refusal
    assert shard.num_repeated == 1
    shard.exchange(request("w0", 1, [1, 2]))  # the next one counts
    shard.exchange(request("w1", 0, [1, 2]))  # and so does that of another worker
    assert values_of(shard).tolist() == [3, 6]


def test_a_message_of_a_past_generation_is_refused_and_changes_nothing():
    shard = make_shard(Add(), 2)
    shard.begin_generation(Membership(3, ("w0", "w1")))
    response = shard.exchange(request("w0", 0, [1, 2], generation=2))
    assert "the center refused w0: it entered generation 3" in response.refusal
    assert values_of(shard).tolist() == [0, 0]
    assert shard.num_refused == 1


def test_hogwild_has_memory_for_as_many_messages_as_are_applied_at_one_time(monkeypatch):
    """The center has two threads for each worker; it does not need memory for each thread."""
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    shard = make_shard(Add(), 2, is_locked=False)
    for number in range(20):
        exchange = threading.Thread(target=shard.exchange, args=[request("w0", number, [1, 2])])
        exchange.start()
        exchange.join()
    assert values_of(shard).tolist() == [20, 40]
    assert len(made) == 1


def test_a_message_does_not_overwrite_the_senders_memory():
    shard, message = make_shard(Elastic(0.5), 3), request("w0", 0, [4, 8, 12])
    message.weights.flags.writeable = False  # like arrays from Ray
    shard.exchange(message)
    assert message.weights.tolist() == [4, 8, 12]


def test_every_parameter_is_in_one_cell_of_one_shard():
    for size, num_shards, num_fragments in [(10, 3, 4), (7, 1, 1), (5, 5, 2), (1001, 4, 7)]:
        spans = [
            s for c in cells(size, num_shards=num_shards, num_fragments=num_fragments) for s in c
        ]
        assert sorted(p for a, b in spans for p in range(a, b)) == list(range(size))
        assert len(shard_spans(size, num_shards)) == num_shards


def test_a_message_without_an_answer_is_resent_and_counts_once(monkeypatch):
    shard = make_shard(Add(), 2)
    answers = []

    def get(ref, timeout):
        answers.append(ref)
        if len(answers) == 1:  # the shard applied the message, then the connection broke
            raise ActorUnavailableError("the connection broke", b"0" * 16)
        return ref

    monkeypatch.setattr(remote.ray, "get", get)
    monkeypatch.setattr(remote.ray, "wait", lambda refs, timeout: (refs, []))
    message = request("w0", 0, [1, 2])
    delivery = remote.RayPendingResponse(
        lambda: shard.exchange(message), 0, message.message_id, 5.0
    )
    assert delivery.wait().weights.tolist() == [1, 2]
    assert values_of(shard).tolist() == [1, 2]
    assert shard.num_repeated == 1


# concurrent messages


def add_concurrently(shard, size, num_pushes):
    """Add one many times in two threads; return the largest missing part of a sum."""
    start = threading.Barrier(2)

    def run(worker_id):
        torch.set_num_threads(1)
        ones = np.ones(size, np.float32)
        start.wait()
        for sequence in range(num_pushes):
            shard.exchange(request(worker_id, sequence, ones))

    threads = [threading.Thread(target=run, args=(w,)) for w in ("w0", "w1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return 2 * num_pushes - values_of(shard).min()


def test_behind_the_lock_no_update_is_ever_lost():
    assert add_concurrently(make_shard(Add(), 500_000, is_locked=True), 500_000, 150) == 0


def test_hogwild_adds_concurrently_and_therefore_loses_parts_of_updates():
    """This is the same code without the lock; lost parts show that additions are concurrent."""
    for _ in range(20):  # one attempt is nearly always enough
        if add_concurrently(make_shard(Add(), 500_000, is_locked=False), 500_000, 150) > 0:
            return
    raise AssertionError("no update was lost in 20 rounds: the threads took turns")


def test_hogwild_threads_do_not_take_each_others_gradient():
    """With momentum at the center each message is used by its own thread's optimizer."""
    shard = make_shard(Outer(1.0, momentum=0.5), 4, is_locked=False)
    replies = [shard.exchange(request("w0", i, [1, 0, 0, 0])) for i in range(2)]
    results = []
    thread = threading.Thread(
        target=lambda: results.append(shard.exchange(request("w1", 0, [0, 0, 1, 0])))
    )
    thread.start()
    thread.join(timeout=10)
    # Momentum is shared: 1, 1.5, then 0.75 of the first value and 1 of the third.
    assert replies[1].weights.tolist() == [-2.5, 0, 0, 0]
    assert results[0].weights.tolist() == [-3.25, 0, -1, 0]


@pytest.mark.parametrize("is_locked", [True, False])
def test_ten_thousand_exchanges_leave_memory_flat(is_locked):
    shard = make_shard(Elastic(0.5), 20_000, is_locked=is_locked)
    values = np.ones(20_000, np.float32)
    sequence = itertools.count()

    def exchange(times):
        for _ in range(times):
            shard.exchange(request("w0", next(sequence), values))

    exchange(1000)
    assert steady_growth(exchange, 2000) < 800_000  # ten vectors of 80 kB


# assignments


def test_workers_claim_in_the_order_of_their_requests():
    coordinator = make_coordinator()
    assert spans_of(enter(coordinator, "w1")) == [(0, 10)]
    assert spans_of(enter(coordinator, "w0")) == [(10, 20)]
    assignment = settle(coordinator, "w1")
    assert (spans_of(assignment), steps_of(assignment)) == ([(20, 30)], 2)
    assert assignment.num_done == 10


def test_a_worker_that_claims_in_blocks_receives_its_next_claims():
    ledger = Ledger(100, cuts=lambda epoch: [25, 50, 75, 100])
    coordinator = make_coordinator(ledger=ledger)
    assignment = enter(coordinator, "w1")
    assert (spans_of(assignment), assignment.ahead) == ([(0, 10)], [(0, (10, 25)), (0, (25, 50))])
    assert settle(coordinator, "w1").ahead == [(0, (20, 25)), (0, (25, 50))]


def test_a_members_reservations_stay_and_a_lost_workers_are_free():
    ledger = Ledger(100, cuts=lambda epoch: [25, 50, 75, 100])
    coordinator = make_coordinator(ledger=ledger)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.begin_generation(Membership(2, ("w1",)))
    assert ledger.reserved_by("w0") == []
    assert ledger.reserved_by("w1") == [(0, (60, 75)), (0, (75, 100))]
    assert spans_of(enter(coordinator, "w1", generation=2)) == [(60, 70)]


def test_staleness_counts_the_exchanges_of_others_in_between():
    now = [0.0]
    coordinator = make_coordinator(now=now)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    for worker_id in ("w1", "w1", "w1", "w0"):
        settle(coordinator, worker_id)
    now[0] = 1.0
    settle(coordinator, "w0")
    (record,) = coordinator.pop_records()
    assert record.staleness == 3 / 5


def test_no_worker_waits_for_the_last_samples_of_another():
    coordinator = make_coordinator(num_samples=15)
    enter(coordinator, "w0")
    first, second = enter(coordinator, "w1").claims, settle(coordinator, "w1").claims
    assert first == [Claim(0, [(10, 15)], 1), Claim(1, [(0, 5)], 1)]  # the two local steps of w0
    assert second == [Claim(1, [(5, 15)], 2)]


def test_a_finished_run_makes_all_workers_leave_and_requests_one_kept_snapshot():
    coordinator = make_coordinator(num_samples=20, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED
    assert coordinator.pop_due() == []
    last = settle(coordinator, "w1")
    assert last.outcome is Outcome.FINISHED
    coordinator.leave_generation(MessageId("w0", 1, 9))
    assert coordinator.pop_due() == []  # a message of w1 to another shard may be in transit
    for _ in range(2):  # called twice, counted once
        coordinator.leave_generation(MessageId("w1", 1, 9))
    assert coordinator.pop_due() == [Due(last.version, True)]
    assert coordinator.state()["progress"].num_samples == 20


def test_a_checkpoint_is_due_when_all_workers_were_notified_to_keep_their_states():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.vote(1, checkpoint=1.0)
    number = settle(coordinator, "w0").keep
    assert number is not None
    assert settle(coordinator, "w0").keep is None  # notified once
    assert coordinator.pop_due() == []
    assert settle(coordinator, "w1").keep == number
    assert coordinator.pop_due() == [Due(number, True)]


def test_repeated_calls_get_the_same_answers():
    """A connection may break after a call has run and before it was answered."""
    coordinator = make_coordinator("original-easgd")
    first = enter(coordinator, "w0")
    assert enter(coordinator, "w0") is first  # a repeated call claims nothing
    enter(coordinator, "w1")  # w1 does not get a turn before w0
    shard = make_shard(Elastic(0.5), 2, coordinator=coordinator)
    shard.begin_generation(Membership(1, ("w0", "w1")))
    coordinator.take_turn(MessageId("w0", 1, 1))
    coordinator.take_turn(MessageId("w0", 1, 1))  # w0 holds the turn already
    completion = Completion(Header(), 2, ALL, 0.1, 80)
    message = request("w0", 2, [1, 2], generation=1, completion=completion)
    assignment = shard.exchange(message).assignment
    assert shard.exchange(message).assignment is assignment
    assert assignment.num_done == 10


def test_a_complete_run_is_finished_even_after_a_late_vote_to_stop():
    coordinator = make_coordinator(num_samples=10, epochs=1)
    enter(coordinator, "w0")
    coordinator.vote(1, stop=1.0)
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED


def test_a_vote_of_another_generation_is_ignored():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    coordinator.vote(7, stop=1.0)
    assert settle(coordinator, "w0").outcome is Outcome.GO_ON
    coordinator.vote(1, stop=1.0)
    assert settle(coordinator, "w0").outcome is Outcome.STOPPED


def test_the_claims_of_a_worker_are_free_when_its_generation_ends():
    coordinator = make_coordinator()
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.begin_generation(Membership(2, ("w1",)))
    coordinator.begin_generation(Membership(3, ("w0", "w1")))
    assert spans_of(enter(coordinator, "w1", generation=3)) == [(0, 10)]


def test_local_steps_follow_the_speed_if_the_method_balances_steps():
    coordinator = make_coordinator("async-diloco", num_samples=1000, period=8)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0", step_s=0.1)
    assert steps_of(settle(coordinator, "w1", step_s=0.2)) == 4
    assert steps_of(settle(coordinator, "w0", step_s=0.1)) == 8


def test_a_wait_for_a_turn_that_times_out_names_the_holder():
    coordinator = make_coordinator("original-easgd", timeout_s=0.05)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    with pytest.raises(ExchangeTimeoutError, match="w0"):
        coordinator.take_turn(MessageId("w1", 1, 1))


def test_a_request_for_a_turn_that_overtakes_the_end_of_the_last_one_waits():
    """The threads of the center run the calls of a worker in any order."""
    coordinator = make_coordinator("original-easgd", timeout_s=30.0)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    coordinator.take_turn(MessageId("w0", 1, 1))
    seen = []

    def run(worker_id):
        coordinator.take_turn(MessageId(worker_id, 1, 3))
        seen.append(worker_id)
        coordinator.end_turn(MessageId(worker_id, 1, 4))

    early = threading.Thread(target=run, args=("w0",))
    early.start()  # before the end of its first turn
    early.join(timeout=0.1)
    assert early.is_alive()
    coordinator.end_turn(MessageId("w0", 1, 2))
    run("w1")
    early.join(timeout=5)
    assert seen == ["w1", "w0"]


def test_the_turn_skips_a_worker_without_work():
    coordinator = make_coordinator("original-easgd", num_samples=25, epochs=1)
    enter(coordinator, "w0")
    enter(coordinator, "w1")
    settle(coordinator, "w0")
    coordinator.end_turn(MessageId("w0", 1, 2))
    assert settle(coordinator, "w1").outcome is Outcome.FINISHED
    coordinator.end_turn(MessageId("w1", 1, 2))
    coordinator.take_turn(MessageId("w0", 1, 3))
    assert settle(coordinator, "w0").outcome is Outcome.FINISHED
