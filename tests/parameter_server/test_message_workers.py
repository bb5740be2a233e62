"""Complete workers join and leave a center in this process."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from message_jobs import message_job as job
from message_jobs import wait_for
from scenarios import FourSlopes, scenario_config

from raydl.config import ExchangeConfig
from raydl.core.codecs import parse_codec
from raydl.core.compression import ErrorFeedback
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.rules import GradientRule
from raydl.data.ledger import Ledger
from raydl.errors import ExchangeError
from raydl.methods import resolve
from raydl.parameter_server import ray_transport as remote
from raydl.parameter_server.protocol import MessageId
from raydl.worker.loop import Worker


class ChangingWorkers:
    """Workers that join a center in this process, one after another.

    Each worker takes only a few rounds between two changes, so that a slow machine keeps up.
    """

    AT_A_TIME = 10

    def __init__(self, config, *, num_workers, num_first, has_neighbours=False):
        self.ensemble = Ensemble(
            config,
            num_workers=num_workers,
            images=tiny_images(96),
            has_neighbours=has_neighbours,
        )
        self.workers = {w.worker_id: w for w in self.ensemble.workers}
        self.num_left = dict.fromkeys(self.workers, self.AT_A_TIME)
        self.membership = Membership(1, tuple(self.workers)[:num_first])
        self.client = self.ensemble._open_center(self.ensemble.first, self.membership)
        for worker_id in self.membership.worker_ids:
            self.workers[worker_id].join(self.membership, self.client, self.ensemble.first)

    @property
    def coordinator(self):
        return self.ensemble.service.coordinator

    def change(self, *worker_ids):
        before = self.membership.worker_ids
        self.membership = Membership(self.membership.generation + 1, worker_ids)
        states = [shard.change(self.membership) for shard in self.ensemble.others]
        snapshot = self.ensemble.service.change(self.membership, states)
        for worker_id in worker_ids:
            if worker_id not in before:
                self.workers[worker_id].join(self.membership, self.client, snapshot)
        self.allow_rounds()
        return snapshot

    def allow_rounds(self, num_rounds=AT_A_TIME):
        self.num_left = dict.fromkeys(self.workers, num_rounds)

    def run(self, worker_id):
        outcome = Outcome.GO_ON
        while outcome is Outcome.GO_ON:
            wait_for(lambda: self.num_left[worker_id] > 0)
            self.num_left[worker_id] -= 1
            outcome = self.workers[worker_id].run_round()
        return outcome


CHURN = [
    ("async-easgd", "none", 1, False),
    ("async-easgd", "none", 1, True),
    ("hogwild-easgd", "none", 1, True),
    ("async-easgd", "int8", 2, False),
    ("async-sgd", "topk:0.5", 2, False),
    ("hogwild-easgd", "int8", 1, False),
    ("original-easgd", "none", 1, False),
    ("original-easgd", "none", 2, False),
]


@pytest.mark.parametrize(("method", "compression", "center_shards", "has_neighbours"), CHURN)
def test_workers_join_and_leave_while_the_others_train(
    pool, method, compression, center_shards, has_neighbours
):
    config = job(method, compression=compression, center_shards=center_shards, epochs=10)
    run = ChangingWorkers(config, num_workers=4, num_first=3, has_neighbours=has_neighbours)
    staying = pool.submit(run.run, "w0")
    lost = pool.submit(run.run, "w2")
    dismissed = pool.submit(run.run, "w1")
    wait_for(lambda: run.coordinator.version > 20)
    run.change("w0", "w1")
    with pytest.raises(ExchangeError, match="the center refused w2"):
        lost.result(timeout=60)
    run.change("w0", "w1", "w3")
    joined = pool.submit(run.run, "w3")
    run.coordinator.dismiss("w1")
    run.allow_rounds()
    assert dismissed.result(timeout=60) is Outcome.LEFT
    run.change("w0", "w3")
    run.allow_rounds(10**6)
    assert staying.result(timeout=60) is Outcome.FINISHED
    assert joined.result(timeout=60) is Outcome.FINISHED
    assert run.coordinator.is_complete()
    state = run.coordinator.state()
    assert (state["progress"].num_samples, state["progress"].generation) == (10 * 96, 4)
    assert [due.is_kept for due in run.coordinator.pop_due()][-1]
    assert np.isfinite(run.ensemble.center().weights).all()


@pytest.mark.parametrize(
    ("vote", "outcome"), [("regroup", Outcome.REGROUP), ("stop", Outcome.STOPPED)]
)
def test_a_worker_that_joins_when_all_are_leaving_takes_no_step_and_leaves(vote, outcome):
    run = ChangingWorkers(job("async-easgd"), num_workers=2, num_first=1)
    run.coordinator.vote(1, **{vote: 1.0})
    run.change("w0", "w1")
    before = run.ensemble.center().weights
    assert run.workers["w1"].run_round() is outcome
    assert run.workers["w1"].local_step == 0
    assert np.array_equal(run.ensemble.center().weights, before)


@pytest.mark.parametrize("method", ["async-easgd", "async-sgd", "hogwild-easgd"])
def test_with_a_lossless_codec_a_newcomers_mirror_is_the_center(method):
    run = ChangingWorkers(
        job(method, compression="topk:1", center_shards=2), num_workers=2, num_first=1
    )
    for _ in range(3):
        run.workers["w0"].run_round()
    run.change("w0", "w1")
    for _ in range(2):
        run.workers["w0"].run_round()
        before = run.ensemble.center().weights
        run.workers["w1"].run_round()
        after = run.ensemble.center().weights
        seen = run.workers["w1"].runner.strategy.snapshot(is_kept=False, local_step=0).weights
        expected = after if method == "async-sgd" else before
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-6)
        assert not np.array_equal(before, after)


# a lost center


def test_a_worker_that_sends_progress_holds_the_center_as_its_message_left_it():
    run = ChangingWorkers(job("async-sgd"), num_workers=1, num_first=1)
    for _ in range(3):
        run.workers["w0"].run_round()
    center = run.ensemble.center()
    copy = run.workers["w0"].runner.strategy.snapshot(is_kept=False, local_step=6)
    assert np.array_equal(copy.weights, center.weights)
    assert np.array_equal(copy.buffers, center.buffers)
    at, of_center = copy.progress, center.progress
    assert (at.round, at.num_samples) == (run.coordinator.version, of_center.num_samples)
    assert (at.epoch, at.local_step, copy.optimizer) == (of_center.epoch, 6, {})


def test_a_worker_that_sends_weights_holds_the_center_as_before_its_message():
    run = ChangingWorkers(job("async-easgd", center_shards=2), num_workers=1, num_first=1)
    for _ in range(3):
        before = run.ensemble.center()
        run.workers["w0"].run_round()
    copy = run.workers["w0"].runner.strategy.snapshot(is_kept=True, local_step=6)
    assert np.array_equal(copy.weights, before.weights)
    assert copy.progress.num_samples == run.coordinator.state()["progress"].num_samples
    assert copy.is_kept


def test_a_center_restored_from_a_worker_assigns_the_claimed_samples_again():
    run = ChangingWorkers(job("async-easgd", epochs=1), num_workers=2, num_first=2)
    for worker_id in ("w0", "w1", "w0"):
        run.workers[worker_id].run_round()
    copy = run.workers["w0"].runner.strategy.snapshot(is_kept=False, local_step=4)
    ledger = Ledger.from_state_dict(copy.ledger)
    assert ledger.num_free == 96 - copy.progress.num_samples, "claimed samples are free again"
    again = ChangingWorkers(job("async-easgd", epochs=1), num_workers=2, num_first=0)
    again.client = again.ensemble._open_center(copy, Membership(5, ("w1",)))
    assert again.coordinator.version == copy.progress.round
    again.workers["w1"].join(Membership(5, ("w1",)), again.client, copy)
    again.allow_rounds(10**6)
    assert again.run("w1") is Outcome.FINISHED
    assert again.coordinator.state()["progress"].num_samples == 96


def test_what_a_codec_held_back_is_sent_though_a_resumed_run_has_other_shards():
    config = job("async-diloco", compression="topk:0.1", center_shards=2)
    ensemble = Ensemble(config, num_workers=1, images=tiny_images(96))
    (worker,) = ensemble.workers
    size = ensemble.flat.num_parameters
    held_back = ErrorFeedback(parse_codec("topk:0.1"))
    residual = torch.arange(float(size))
    held_back.load_state_dict({"residual": residual})
    worker.runner.feedback[0, size] = held_back
    ensemble.join()
    parts = sorted(worker.runner.feedback)
    assert len(parts) == 2
    after = torch.cat([worker.runner.feedback[part].residual for part in parts])
    assert torch.equal(after, residual)


def test_a_worker_does_not_wait_for_a_center_that_was_abandoned(monkeypatch):
    abandoned = threading.Event()
    looks = []

    def wait(refs, timeout):
        looks.append(timeout)
        if len(looks) == 3:
            abandoned.set()
        return [], refs

    monkeypatch.setattr(remote.ray, "wait", wait)
    message_id = MessageId("w0", 4, 12)
    delivery = remote.RayPendingResponse(lambda: "ref", 1, message_id, 60.0, abandoned)
    with pytest.raises(ExchangeError, match="center shard 1 did not answer and was abandoned: "):
        delivery.wait()
    assert len(looks) == 3
    assert max(looks) <= 0.1


# answers that are lost


class SumOfGradients(GradientRule):
    """c <- c - mean gradient, one message at a time."""

    strategy, period = "async", 1

    def merge_(self, center, mail, state, now):
        center.sub_(mail.mean("gradient"))


class LosingClient:
    """A client that loses the answers of some shards, or the messages to them."""

    def __init__(self, client):
        self._client = client
        self.lost_answers, self.lost_messages = (), ()
        self.num_sent = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def request(self, shard, request):
        is_lost = self.num_sent in self.lost_messages
        is_unanswered = self.num_sent in self.lost_answers
        self.num_sent += 1
        answer = None if is_lost else self._client.request(shard, request)
        return LostAnswer() if is_lost or is_unanswered else answer


class LostAnswer:
    def wait(self):
        raise ExchangeError(0, 1, "the answer was lost")


class OneSlopeWorker:
    """One worker that computes ``FourSlopes.gradient`` in each round, by compressed messages."""

    def __init__(self, compression="topk:0.25", *, rule=None, **exchange):
        config = scenario_config(
            "async-sgd",
            steps=40,
            period=exchange.get("fragments", 1),
            lr=1.0,
            workers=1,
            exchange=ExchangeConfig(timeout_s=20.0, compression=compression, **exchange),
        )
        self.run = Ensemble(config, num_workers=1, images=tiny_images(6000))
        self.run.use_task(FourSlopes())
        if rule is not None:
            self.run.job = dataclasses.replace(self.run.job, method=resolve(config, rule))
            self.run.workers = [Worker(self.run.job, "w0", batches=self.run.batches, publish=print)]
        (self.worker,) = self.run.workers
        first = dataclasses.replace(self.run.first, weights=np.zeros(4, np.float32))
        members = Membership(1, ("w0",))
        self.client = LosingClient(self.run._open_center(first, members))
        self.worker.join(members, self.client, first)
        self.generation = 1

    def fail(self, *, lost_answers=(), lost_messages=()):
        """Take a round of which some messages or answers are lost, by their numbers."""
        sent = self.client.num_sent
        self.client.lost_answers = [sent + i for i in lost_answers]
        self.client.lost_messages = [sent + i for i in lost_messages]
        with pytest.raises(ExchangeError, match="was lost"):
            self.worker.run_round()

    def change(self, *members):
        self.generation += 1
        membership = Membership(self.generation, members)
        states = [shard.change(membership) for shard in self.run.others]
        snapshot = self.run.service.change(membership, states)
        if members:
            self.worker.join(membership, self.client, snapshot)

    def enter_again(self):
        self.change()
        self.change("w0")

    def moved_and_left_out(self):
        left_out = torch.zeros(4)
        for (start, stop), feedback in self.worker.runner.feedback.items():
            if len(feedback.residual):
                left_out[start:stop] = feedback.residual
        return (left_out - torch.tensor(self.run.center().weights)).tolist()


def test_an_applied_message_whose_answer_was_lost_counts_once():
    run = OneSlopeWorker()
    run.run.run(rounds=5)
    run.fail(lost_answers=[0])
    run.enter_again()
    assert run.moved_and_left_out() == [48, 24, 12, 6], "six rounds"
    run.run.run(rounds=3)
    assert run.moved_and_left_out() == [72, 36, 18, 9]
    assert run.worker.report().lost_residuals == ()


def test_a_message_that_did_not_arrive_does_not_count():
    run = OneSlopeWorker()
    run.run.run(rounds=5)
    run.fail(lost_messages=[0])
    run.enter_again()
    assert run.moved_and_left_out() == [40, 20, 10, 5], "five rounds"


@pytest.mark.parametrize("lost", ["messages", "answers"])
def test_of_a_message_in_parts_the_applied_ones_count(lost):
    run = OneSlopeWorker("topk:0.5", center_shards=2)
    run.run.run(rounds=5)
    run.fail(**{f"lost_{lost}": [1]})
    run.enter_again()
    last = 5 if lost == "messages" else 6
    assert run.moved_and_left_out() == [48, 24, 2 * last, last]


def test_of_a_round_in_fragments_the_applied_messages_count():
    run = OneSlopeWorker("topk:0.5", fragments=2)
    run.run.run(rounds=3)
    assert run.moved_and_left_out() == [40, 20, 12, 6], "five of six steps in the first half"
    run.fail(lost_answers=[1])
    run.enter_again()
    assert run.moved_and_left_out() == [56, 28, 16, 8], "seven and eight steps"


def test_an_applied_gradient_whose_answer_was_lost_counts_once():
    run = OneSlopeWorker(rule=SumOfGradients())
    run.run.run(rounds=5)
    run.fail(lost_answers=[0])
    run.enter_again()
    run.run.run(rounds=2)
    assert run.moved_and_left_out() == [64, 32, 16, 8]


def test_a_gradient_without_samples_keeps_what_was_left_out():
    run = OneSlopeWorker(rule=SumOfGradients())
    run.run.run(rounds=5)
    left_out, batch = run.moved_and_left_out(), run.worker._feed.batch
    run.worker._feed.batch = lambda *place: tuple(tensor[:0] for tensor in batch(*place))
    run.run.run(rounds=1)
    assert run.moved_and_left_out() == left_out == [40, 20, 10, 5]
    run.worker._feed.batch = batch
    run.run.run(rounds=1)
    assert run.moved_and_left_out() == [48, 24, 12, 6]


def test_an_answer_lost_before_the_whole_membership_ended_counts_once():
    run = OneSlopeWorker()
    run.run.run(rounds=5)
    run.fail(lost_answers=[0])
    run.generation = 2
    members = Membership(2, ("w0",))
    run.run.service.begin_generation(members)
    run.worker.join(members, run.client, run.run.center())
    assert run.moved_and_left_out() == [48, 24, 12, 6]


class Actor:
    """An actor whose calls run at once, and whose references are the results."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._target, name))


def test_a_worker_asks_the_actors_of_all_shards_which_parts_were_applied(monkeypatch):
    monkeypatch.setattr(remote.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(remote.ray, "get", lambda ref, timeout: ref)
    run = OneSlopeWorker("topk:0.5", center_shards=3)
    run.run.run(rounds=2)
    run.change()
    client = remote.RayCenterClient(
        [Actor(shard) for shard in (run.run.service, *run.run.others)], timeout_s=5.0
    )
    message_id = MessageId("w0", 3, 0)
    assert sorted(client.applied(message_id, 1)) == [(0, 2), (2, 3), (3, 4)]
    assert client.applied(message_id, 1) == run.client.applied(message_id, 1)
    assert min(client.applied(message_id, 1).values()) > 0
    assert client.applied(message_id, 2) == {}


def test_what_only_a_lost_center_knew_is_counted_as_lost():
    run = OneSlopeWorker()
    run.run.run(rounds=5)
    left_out = run.worker.runner.feedback[0, 4].residual.clone()
    run.fail(lost_answers=[0])
    members, copy = Membership(2, ("w0",)), run.worker.center()
    run.client = LosingClient(run.run._open_center(copy, members))
    run.worker.join(members, run.client, copy)
    (lost,) = run.worker.report().lost_residuals
    assert torch.equal(run.worker.runner.feedback[0, 4].residual, left_out)
    assert lost.norm > 0
    assert lost.why.startswith("the center was lost with the answer to its last message")
    assert run.worker.report().lost_residuals == ()


def test_a_state_that_was_saved_before_the_answer_was_known_says_so_when_it_is_loaded():
    run = OneSlopeWorker()
    run.run.run(rounds=5)
    run.fail(lost_answers=[0])
    state, again = run.worker.pop_kept(-1), OneSlopeWorker().worker.runner
    again.load_feedback(state["feedback"], "topk:0.25")
    (lost,) = again.pop_lost_residuals()
    assert lost.norm > 0
    assert lost.why.startswith("it is not known whether its last message")
    run.enter_again()
    again.load_feedback(run.worker.pop_kept(-1)["feedback"], "topk:0.25")
    assert again.pop_lost_residuals() == ()


@pytest.mark.parametrize("rule", [None, SumOfGradients()], ids=["progress", "gradients"])
def test_a_run_that_resumes_without_compression_sends_all_that_was_left_out(rule):
    before = OneSlopeWorker(rule=rule)
    before.run.run(rounds=5)
    state, center = before.worker.pop_kept(-1), before.run.center()
    after = OneSlopeWorker("none", rule=rule)
    (after.worker,) = after.run.workers = [
        Worker(after.run.job, "w0", batches=after.run.batches, publish=print)
    ]
    members = Membership(1, ("w0",))
    after.client = LosingClient(after.run._open_center(center, members))
    after.worker.join(members, after.client, center, state)
    assert after.moved_and_left_out() == [40, 20, 10, 5]
    after.run.run(rounds=1)
    assert after.run.center().weights.tolist() == [-48, -24, -12, -6]
    after.run.run(rounds=1)
    assert after.run.center().weights.tolist() == [-56, -28, -14, -7]
