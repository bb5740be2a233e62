"""Turns continue after joins and losses, and no worker waits for a lost one."""

import pytest
from coordinators import (
    change,
    completing_request,
    enter,
    make_coordinator,
    make_shard,
    start_blocking_call,
    values_of,
)
from ensembles import Ensemble, tiny_images
from message_jobs import message_job as job
from scenarios import spans_of

from raydl.core.membership import Membership
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.methods.easgd import Elastic
from raydl.parameter_server.protocol import MessageId
from raydl.worker.in_process import LocalCenterClient


def turns(coordinator, *worker_ids, start=10, generations=None):
    """Take one turn for each worker in this order, and check that none waits."""
    for sequence, worker_id in enumerate(worker_ids, start):
        generation = (generations or {}).get(worker_id, 1)
        coordinator.take_turn(MessageId(worker_id, generation, 2 * sequence))
        coordinator.end_turn(MessageId(worker_id, generation, 2 * sequence + 1))


def in_turns(*workers, timeout_s=30.0):
    coordinator = make_coordinator("original-easgd", timeout_s=timeout_s, workers=workers)
    for worker_id in workers:
        enter(coordinator, worker_id)
    return coordinator


def test_a_worker_that_waits_behind_a_lost_worker_gets_the_turn_at_once(pool):
    coordinator = in_turns("w0", "w1", "w2")
    coordinator.take_turn(MessageId("w0", 1, 1))
    third = start_blocking_call(pool, coordinator.take_turn, MessageId("w2", 1, 1))
    second = start_blocking_call(pool, coordinator.take_turn, MessageId("w1", 1, 1))
    change(coordinator, 2, "w1", "w2")
    second.result(timeout=30)
    assert not third.done()
    coordinator.end_turn(MessageId("w1", 1, 2))
    third.result(timeout=30)


def test_both_copies_of_a_call_that_waits_for_the_turn_return_when_it_comes(pool):
    coordinator = in_turns("w0", "w1")
    coordinator.take_turn(MessageId("w0", 1, 1))
    copies = [
        start_blocking_call(pool, coordinator.take_turn, MessageId("w1", 1, 1)) for _ in range(2)
    ]
    coordinator.end_turn(MessageId("w0", 1, 2))
    for copy in copies:
        copy.result(timeout=30)
    coordinator.end_turn(MessageId("w1", 1, 2))
    turns(coordinator, "w0", "w1", "w0")


def test_a_copy_of_a_call_for_the_turn_that_arrives_after_the_turn_takes_no_other(pool):
    coordinator = in_turns("w0", "w1")
    turns(coordinator, "w0", start=1)
    coordinator.take_turn(MessageId("w0", 1, 2))  # at once, although it is w1's turn
    turns(coordinator, "w1", start=1)
    coordinator.take_turn(MessageId("w0", 1, 2))
    turns(coordinator, "w0", "w1", start=2)


@pytest.mark.parametrize("workers", [("w0",), ("w0", "w1")])
def test_a_copy_of_the_end_of_a_turn_does_not_end_the_next_turn(workers, pool):
    coordinator = in_turns(*workers)
    for sequence in (1, 3):
        for worker_id in workers:
            coordinator.take_turn(MessageId(worker_id, 1, sequence))
            coordinator.end_turn(MessageId(worker_id, 1, sequence + 1))
    coordinator.take_turn(MessageId("w0", 1, 5))
    coordinator.end_turn(MessageId("w0", 1, 4))
    next = start_blocking_call(pool, coordinator.take_turn, MessageId(workers[-1], 1, 7))
    coordinator.end_turn(MessageId("w0", 1, 6))
    next.result(timeout=30)


def test_after_a_turn_that_did_not_come_in_time_a_copy_of_the_call_may_still_take_it():
    coordinator = in_turns("w0", "w1", timeout_s=0.1)
    coordinator.take_turn(MessageId("w0", 1, 1))
    with pytest.raises(ExchangeTimeoutError):
        coordinator.take_turn(MessageId("w1", 1, 1))
    coordinator.end_turn(MessageId("w0", 1, 2))
    coordinator.take_turn(MessageId("w1", 1, 1))


def test_copies_of_every_call_change_nothing_whenever_they_arrive():
    """All calls of a round, each sent once or again and again, at once or late."""

    def train(num_copies):
        coordinator = in_turns("w0", "w1", timeout_s=5.0)
        shard = make_shard(Elastic(0.5), 2, coordinator=coordinator)
        shard.begin_generation(Membership(1, ("w0", "w1")))
        sent = []

        def send(call, *arguments):
            sent.append((call, arguments))
            for call, arguments in num_copies * sent[-4:]:
                call(*arguments)

        for sequence in range(1, 30, 4):
            for worker_id in ("w0", "w1"):
                ids = [MessageId(worker_id, 1, sequence + i) for i in range(3)]
                send(coordinator.take_turn, ids[0])
                send(shard.exchange, completing_request(worker_id, sequence + 1, [1, 2]))
                send(coordinator.end_turn, ids[2])
        for worker_id in ("w0", "w1"):
            send(coordinator.leave_generation, MessageId(worker_id, 1, 40))
        return values_of(shard).tolist(), coordinator.state(), coordinator.pop_due()

    assert train(3) == train(1)


def test_a_removed_worker_that_waits_for_its_turn_is_refused(pool):
    coordinator = in_turns("w0", "w1")
    coordinator.take_turn(MessageId("w0", 1, 1))
    call = start_blocking_call(pool, coordinator.take_turn, MessageId("w1", 1, 1))
    change(coordinator, 2, "w0")
    with pytest.raises(ExchangeError, match="the center refused w1: it is no longer a member"):
        call.result(timeout=30)
    coordinator.end_turn(MessageId("w0", 1, 2))
    turns(coordinator, "w0", "w0")


def test_a_worker_that_waits_to_enter_behind_a_lost_worker_enters(pool):
    coordinator = make_coordinator("original-easgd", workers=("w0", "w1", "w2"))
    second = start_blocking_call(pool, enter, coordinator, "w1")
    third = start_blocking_call(pool, enter, coordinator, "w2")
    change(coordinator, 2, "w2")
    assert spans_of(third.result(timeout=30)) == [(0, 10)]
    with pytest.raises(ExchangeError, match="no longer a member"):
        second.result(timeout=30)


def test_no_turn_begins_before_all_have_claimed_their_first_samples(pool):
    coordinator = make_coordinator("original-easgd", workers=("w0", "w1"))
    enter(coordinator, "w0")
    first = start_blocking_call(pool, coordinator.take_turn, MessageId("w0", 1, 1))
    assert not first.done()
    enter(coordinator, "w1")
    first.result(timeout=30)


def test_a_wait_for_a_worker_that_never_enters_names_it(pool):
    coordinator = make_coordinator("original-easgd", workers=("w0", "w1"), timeout_s=0.1)
    enter(coordinator, "w0")
    with pytest.raises(ExchangeTimeoutError, match="w1"):
        coordinator.take_turn(MessageId("w0", 1, 1))


def test_a_removed_worker_that_waits_for_an_answer_is_refused(pool):
    coordinator = make_coordinator()
    enter(coordinator, "w1")
    call = start_blocking_call(pool, coordinator.repeat, completing_request("w1", 1, []))
    change(coordinator, 2, "w0")
    with pytest.raises(ExchangeError, match="no longer a member"):
        call.result(timeout=30)


def test_turns_continue_in_rank_order_after_joins_and_losses():
    coordinator = in_turns("w0", "w1", "w2")
    turns(coordinator, "w0")  # w1 is next
    change(coordinator, 2, "w1", "w2", "w3")
    since = {"w3": 2, "w4": 3}
    turns(coordinator, "w1", "w2", "w1", "w2", start=20)  # no worker waits for w3 to enter
    enter(coordinator, "w3", generation=2)
    turns(coordinator, "w3", "w1", "w2", "w3", "w1", start=30, generations=since)
    change(coordinator, 3, "w1", "w3", "w4")  # w2, which held the turn, is lost
    enter(coordinator, "w4", generation=3)
    turns(coordinator, "w3", "w4", "w1", "w3", start=40, generations=since)


def test_the_first_worker_that_joins_gets_the_turn():
    coordinator = in_turns("w0", timeout_s=0.05)
    change(coordinator, 2)
    change(coordinator, 3, "w1")
    with pytest.raises(ExchangeTimeoutError, match="nobody"):
        coordinator.take_turn(MessageId("w1", 3, 0))  # w1 has not entered
    enter(coordinator, "w1", generation=3)
    turns(coordinator, "w1", "w1", generations={"w1": 3})


class RecordingClient(LocalCenterClient):
    """Records each worker's calls to the center, in order."""

    def __init__(self, *shards):
        super().__init__(*shards)
        self.calls = []

    def take_turn(self, message_id):
        super().take_turn(message_id)
        self.calls.append((message_id.worker_id, "turn"))

    def request(self, shard, request):
        self.calls.append((request.message_id.worker_id, "send"))
        return super().request(shard, request)

    def end_turn(self, message_id):
        self.calls.append((message_id.worker_id, "end"))
        super().end_turn(message_id)


@pytest.mark.parametrize("period", [1, 2])
def test_a_worker_sends_and_receives_only_within_its_turn(monkeypatch, period):
    monkeypatch.setattr("ensembles.LocalCenterClient", RecordingClient)
    run = Ensemble(job("original-easgd", period=period), num_workers=2, images=tiny_images(24))
    run.join().run()
    calls = run.workers[0].runner.strategy._client.calls[:-6]  # no turn for a worker without work
    assert len(calls) > 6
    for first in range(0, len(calls), 3):
        workers, words = zip(*calls[first : first + 3], strict=True)
        assert words == ("turn", "send", "end")
        assert {*workers} == {f"w{first // 3 % 2}"}
