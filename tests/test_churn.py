"""Workers come and go under synchronous methods: what holds whoever joins, is lost or is late.

A history of memberships is scripted, and run in threads. Who goes leaves its group before a
given step, so which exchange fails where follows from the script and not from any clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHAPE, Ensemble, linear, tiny_images
from hypothesis import given, settings
from hypothesis import strategies as st

from raydl.checkpoint import CheckpointStore
from raydl.checkpoint_writer import checkpoint_of, snapshot_of
from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.crew import Collected
from raydl.data import Batches, ImageSet, Normalizer
from raydl.errors import ExchangeError
from raydl.exchange.local import LocalGroup
from raydl.job import Job
from raydl.ledger import Ledger
from raydl.membership import Membership
from raydl.methods import resolve
from raydl.reports import Outcome
from raydl.rules import Elastic, MeanGradient, Outer, Sends
from raydl.schedules.trained import Trained
from raydl.storage import Storage
from raydl.worker import Worker

Place = tuple[int, int]
"""A round of the generation, and a local step of it, both counted from 0."""


class Died(Exception):
    """A worker was lost."""


class Watched(Batches):
    """Notes the samples that one worker reads."""

    def __init__(self, images):
        super().__init__(self, Normalizer.of(images))
        self.images = images
        self.open = []

    def __getattr__(self, name):
        return getattr(self.images, name)

    num_samples = property(lambda self: self.images.num_samples)

    def fetch(self, rows):
        self.open += rows.tolist()
        return self.images.fetch(rows)


class Road:
    """A group one of whose sums does not reach this member, though it does the others.

    It is named by its round, and its number there; the roll call, one number for each worker, is
    number -1.
    """

    def __init__(self, member, missed=None):
        self._member = member
        self._missed = missed
        self._numbers = Counter()

    def __getattr__(self, name):
        return getattr(self._member, name)

    def start_allreduce(self, tensor, *, round):
        work = self._member.start_allreduce(tensor, round=round)
        if tensor.numel() == self._member.num_workers:
            return LostSum(round) if (round, -1) == self._missed else work
        return self._maybe_lost(work, round)

    def start_allgather(self, tensor, out, *, round):
        return self._maybe_lost(self._member.start_allgather(tensor, out, round=round), round)

    def _maybe_lost(self, work, round):
        number = self._numbers[round]
        self._numbers[round] += 1
        return LostSum(round) if (round, number) == self._missed else work


class LostSum:
    def __init__(self, round):
        self._round = round

    def wait(self):
        raise ExchangeError(self._round, 0, "the connection was reset")


@dataclass
class Part:
    """What a worker does in one generation."""

    road: Any
    partners: Any
    first_round: int
    dies: Place | None = None
    lags: Place | None = None
    now: Place = (-1, 0)

    def leave(self):
        self.road.close()
        if self.partners is not None:
            self.partners.close()


@dataclass
class End:
    """How a generation ended."""

    outcomes: dict[str, Outcome]
    errors: list[Exception] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        (outcome,) = set(self.outcomes.values())
        return outcome


class History:
    """One run through several memberships; the center goes on from the freshest survivor."""

    def __init__(self, config, *, images=None, model=linear, task=None, rule=None):
        self.images = images or tiny_images(25)
        base = Ensemble(config, num_workers=0, images=self.images, model=model)
        self.job, self.snapshot = base.job, base.first
        self.published = base.published
        self._publish = base._publish
        if task is not None:
            self.job = Job(
                config, resolve(config, rule), task, SHAPE, self.images.order(config.training.seed)
            )
            self.snapshot = base.first = self._first_of(base, task)
        self.flat = base.flat
        self.workers: dict[str, Worker] = {}
        self.watched: dict[str, Watched] = {}
        self.parts: dict[str, Part] = {}
        self.away: tuple[str, ...] = ()
        self.generation = 0
        self.done = Counter()

    def _first_of(self, base, task):
        base.use_task(task)
        return base.first

    @property
    def sends(self):
        return self.job.method.rule.sends

    def train(
        self,
        *members: str,
        rounds: int | None = None,
        lost: Mapping[str, Place] | None = None,
        late: Mapping[str, Place] | None = None,
        missed: Mapping[str, Place] | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> End:
        """Run one generation.

        Args:
            members: who trains.
            rounds: how many all complete, if nothing happens; None: up to the end.
            lost: who dies before which step.
            late: who goes on alone from which step, left out by the others.
            missed: who does not receive which sum: the number of the round, and of its sums.
            states: what newcomers start from besides the center.
        """
        self.generation += 1
        self.away = tuple(w for w in self.away if w not in members)
        membership = Membership(self.generation, members, self.away)
        self._hand_out_parts(membership, lost or {}, late or {}, missed or {})
        end = End({})

        def live(worker_id):
            try:
                end.outcomes[worker_id] = self._live(worker_id, membership, rounds, states or {})
            except Died:
                pass
            except Exception as error:
                end.errors.append(error)
            finally:
                self.parts[worker_id].leave()

        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(live, members))
        if end.errors:
            raise end.errors[0]
        self._settle(members, tuple(lost or ()), tuple(late or ()))
        return end

    def _hand_out_parts(self, membership, lost, late, missed):
        members, size = membership.worker_ids, self.job.config.method.group_size
        group = LocalGroup(len(members), timeout_s=30.0, generation=self.generation)
        shared = [LocalGroup(size, timeout_s=30.0) for _ in range(len(members) // size)]
        first = self.snapshot.round
        for rank, worker_id in enumerate(members):
            miss = missed.get(worker_id)
            road = Road(group.member(rank), miss and (first + miss[0], miss[1]))
            partners = shared[rank // size].member(rank % size) if size > 1 else None
            self.parts[worker_id] = Part(
                road, partners, first, lost.get(worker_id), late.get(worker_id)
            )
            if worker_id not in self.workers:
                self.watched[worker_id] = Watched(self.images)
                self.workers[worker_id] = Worker(
                    self.job,
                    worker_id,
                    batches=self.watched[worker_id],
                    publish=self._publish,
                    before_step=self._before_step,
                )

    def _before_step(self, worker_id, *, round, **_):
        part = self.parts[worker_id]
        number, step = part.now
        now = round - part.first_round
        part.now = (now, step + 1) if now == number else (now, 0)
        if part.now == part.dies:
            raise Died
        if part.now == part.lags:
            part.leave()

    def _live(self, worker_id, membership, rounds, states):
        worker, part = self.workers[worker_id], self.parts[worker_id]
        num_done, outcome = 0, Outcome.GO_ON
        try:
            own = states.get(worker_id)
            worker.join(membership, part.road, self.snapshot, own, part.partners)
            while outcome is Outcome.GO_ON and (rounds is None or num_done < rounds):
                outcome = worker.run_round()
                self._complete(worker_id)
                num_done += 1
        except ExchangeError:
            return Outcome.BROKEN
        return outcome

    def _complete(self, worker_id):
        """Count what a worker has read as done: it has reached a completed exchange."""
        self.done.update(self.watched[worker_id].open)
        self.watched[worker_id].open = []

    def _settle(self, members, lost, late):
        for worker_id in lost:
            self.forget(worker_id)
        self.away += tuple(w for w in late if w in self.workers)
        here = [w for w in members if w not in lost and w not in late]
        newest, _ = age = max(self.workers[w].copy_age for w in here)
        freshest, *others = [w for w in here if self.workers[w].copy_age == age]
        for worker_id in here:
            if self.workers[worker_id].round < newest:
                self._complete(worker_id)  # the others have received what it sent
            elif self.sends is Sends.GRADIENT:
                self.watched[worker_id].open = []  # done again
        for worker_id in late if self.sends is Sends.GRADIENT else ():
            self.watched[worker_id].open = []
        self.snapshot = self.workers[freshest].center()
        for worker_id in others:
            assert_same(self.workers[worker_id].center(), self.snapshot)

    def forget(self, worker_id):
        """Lose a worker."""
        del self.workers[worker_id], self.watched[worker_id]
        self.away = tuple(w for w in self.away if w != worker_id)

    def weights(self, worker_id):
        return self.workers[worker_id].replica.flat.weights.clone()

    def bits(self) -> dict[str, Any]:
        """Return the center and all replicas."""
        states = {w: worker.replica.state_dict() for w, worker in self.workers.items()}
        center = {"weights": self.snapshot.weights, "buffers": self.snapshot.buffers}
        return {"center": {**center, "optimizer": self.snapshot.optimizer}, **states}

    def end(self, *members: str) -> None:
        """Train up to the end."""
        assert self.train(*members).outcome is Outcome.FINISHED

    def assert_every_sample_once_an_epoch(self):
        epochs = self.job.config.training.epochs
        assert self.done == dict.fromkeys(range(self.images.num_samples), epochs)


def assert_same(one: Any, other: Any) -> None:
    """Compare nested values bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"param_groups"}:  # settings, which are set before each step
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif hasattr(one, "weights"):
        assert one.round == other.round
        assert_same(one.weights, other.weights)
        assert_same(one.buffers, other.buffers)
        assert_same(one.optimizer, other.optimizer)
    else:
        assert one == other


def config(method="local-sgd", *, period=2, optimizer=None, exchange=None, group_size=1, **more):
    dynamic = more.pop("dynamic_weights", False)
    more.setdefault("batch_size", 2)
    if not {"steps", "seconds"} & set(more):
        more.setdefault("epochs", 3)
    return TrainConfig(
        method=MethodConfig(
            name=method, period=period, group_size=group_size, dynamic_weights=dynamic
        ),
        training=TrainingConfig(**more),
        optimizer=OptimizerConfig(**(optimizer or {"lr": 0.1})),
        exchange=ExchangeConfig(**(exchange or {})),
    )


# a model that counts: each sample adds one to a number of its own


class Counts(torch.nn.Module):
    """One weight for each sample."""

    def __init__(self, num_samples):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_samples))


class Counting:
    """A step of rate 1 adds one to the weight of each sample of the batch."""

    name = "counts"

    def __init__(self, num_samples, rule):
        self._num_samples = num_samples
        self._rule = rule

    def build_model(self, shape):
        return Counts(self._num_samples)

    def loss(self, model, batch):
        total = -model.counts[batch[1]].sum()
        return total if self._rule.steps_replica else total / len(batch[1])

    def metrics(self, model, batch):
        raise NotImplementedError


class AllProgress(Outer):
    """Adds the progress of all workers to the center."""

    period = 2

    def make_center_optimizer(self, tensors):
        return None

    def update_center_(self, center, total, tally, optimizer):
        center.sub_(total)


class AllGradients(MeanGradient):
    """Adds the gradients of all samples to the center."""

    period = 2

    def update_center_(self, center, total, tally, optimizer):
        center.sub_(total)


def counting(rule, *, num_samples=25, **more):
    """Return a history whose center counts how often it was reached by each sample."""
    plain = {"lr": 1.0, "schedule": "constant", "warmup": 0.0, "max_grad_norm": None}
    images = tiny_images(num_samples)
    images = ImageSet(images.images, np.arange(num_samples), tuple(map(str, range(num_samples))))
    settings = config("local-sgd", optimizer=plain, **more)
    return History(settings, images=images, task=Counting(num_samples, rule), rule=rule)


def num_counted(history):
    return int(history.snapshot.weights.sum())


# 1. the same bits

CASES = {
    "sync-easgd": config("sync-easgd", period=3),
    "sync-easgd, no overlap": config("sync-easgd", exchange={"overlap": False}),
    "sync-easgd, dynamic": config("sync-easgd", dynamic_weights=True),
    "sync-easgd, layer by layer": config("sync-easgd", exchange={"packed": False}),
    "sync-easgd, bf16": config("sync-easgd", exchange={"compression": "bf16"}),
    "sync-easgd, fragments": config("sync-easgd", period=4, exchange={"fragments": 2, "delay": 1}),
    "sync-easgd, adamw": config("sync-easgd", optimizer={"name": "adamw"}),
    "sync-measgd": config("sync-measgd"),
    "sync-sgd": config("sync-sgd", period=1),
    "sync-sgd, topk": config("sync-sgd", exchange={"compression": "topk:0.2"}),
    "sync-sgd, fragments": config(
        "sync-sgd", optimizer={"lr": 0.1, "max_grad_norm": None}, exchange={"fragments": 2}
    ),
    "sync-sgd, adamw in fragments": config(
        "sync-sgd", optimizer={"name": "adamw", "max_grad_norm": None}, exchange={"fragments": 2}
    ),
    "sync-msgd": config("sync-msgd"),
    "local-sgd": config("local-sgd"),
    "local-sgd, int8": config("local-sgd", exchange={"compression": "int8"}),
    "local-sgd, momentum": config("local-sgd", optimizer={"lr": 0.1, "momentum": 0.9}),
    "diloco": config("diloco"),
    "diloco, staged": config("diloco", exchange={"resident": False}),
    "streaming diloco": config("diloco", period=4, exchange={"fragments": 2, "delay": 1}),
    "streaming diloco, int8": config(
        "diloco", period=4, exchange={"fragments": 2, "compression": "int8"}
    ),
}


def eventful(case, **more):
    """Lose rank 0, join, leave out, be late by a round, stand by and come back."""
    history = History(case, **more)
    last = history.job.method.period - 1
    history.train("w0", "w1", "w2", rounds=2)
    history.train("w0", "w1", "w2", lost={"w0": (1, last)})
    history.train("w1", "w2", "w3", rounds=1)
    history.train("w1", "w2", "w3", late={"w1": (0, last)})
    history.train("w2", "w3", rounds=1)
    history.train("w2", "w3", "w1", missed={"w3": (0, 0)})
    history.train("w2", "w1", rounds=1)
    history.end("w1", "w2", "w3")
    return history


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_history_gives_the_same_bits(case):
    first, second = eventful(case), eventful(case)
    assert set(first.workers) == {"w1", "w2", "w3"}
    assert_same(first.bits(), second.bits())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_sample_reaches_a_completed_exchange_once_an_epoch(case):
    eventful(case).assert_every_sample_once_an_epoch()


@pytest.mark.parametrize("case", [CASES["diloco"], CASES["sync-sgd"]], ids=["diloco", "sync-sgd"])
def test_replicas_that_follow_the_center_are_its_copies_at_the_end(case):
    history = eventful(case)
    for worker_id in history.workers:
        assert_same(history.weights(worker_id).numpy(), history.snapshot.weights)


# 2. every sample once

COUNTING = {"progress": AllProgress(), "gradients": AllGradients()}


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (2, 1)])
@pytest.mark.parametrize("num_workers", [2, 3, 6])
def test_the_center_counts_each_sample_once_an_epoch_when_one_is_lost(rule, place, num_workers):
    history = counting(rule, num_samples=50)
    members = [f"w{i}" for i in range(num_workers)]
    history.train(*members, lost={"w0": place})
    history.end(*members[1:], "w9")
    assert (history.snapshot.weights == 3).all()
    history.assert_every_sample_once_an_epoch()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_the_center_counts_each_sample_once_an_epoch_when_one_is_left_out(rule):
    history = counting(rule)
    history.train("w0", "w1", "w2", late={"w1": (1, 0)})
    history.train("w0", "w2", rounds=2)
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_one_that_is_lost_while_it_is_left_out_gives_its_samples_back(rule):
    history = counting(rule)
    history.train("w0", "w1", "w2", late={"w1": (1, 0)})
    history.train("w0", "w2", rounds=1)
    history.forget("w1")
    history.end("w0", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_exchanges_that_break_one_after_another_lose_and_double_nothing(rule):
    history = counting(rule)
    for lost in ("w0", "w1", "w2"):
        others = [w for w in ("w0", "w1", "w2", "w3") if w >= lost]
        history.train(*others, lost={lost: (0, 1)})
    history.end("w3")
    assert (history.snapshot.weights == 3).all()


def test_of_copies_of_one_round_the_one_that_knows_more_claims_is_gone_on_from():
    history = History(config("sync-easgd", period=2), images=tiny_images(40))
    history.train("w0", "w1", "w2", lost={"w2": (1, 0)})  # w0 and w1 hold what they trained on
    history.train("w0", "w1", missed={"w0": (0, -1)})  # w1 goes on into the next round
    ages = {w: history.workers[w].copy_age for w in ("w0", "w1")}
    assert ages["w0"][0] == ages["w1"][0]
    assert ages["w0"] < ages["w1"]
    claimed = [worker_id for worker_id, _, _ in history.snapshot.ledger["claimed"]]
    assert (claimed.count("w0"), claimed.count("w1")) == (2, 2)
    history.end("w0", "w1")
    history.assert_every_sample_once_an_epoch()


def test_what_was_left_of_a_round_that_broke_early_is_trained_by_others():
    """With fragments a round may break before its last step."""
    history = counting(AllProgress(), num_samples=100, period=4, exchange={"fragments": 2})
    history.train("w0", "w1", "w2", late={"w0": (1, 1)})  # the others come to step 1 of 4
    assert len(history.watched["w1"].open) == 4
    history.end("w0", "w1", "w2")
    history.assert_every_sample_once_an_epoch()
    assert (in_all(history) == 3).all()


def in_all(history):
    """Return what the center counts, with what the replicas have yet to send."""
    center = history.snapshot.weights
    open_ = [history.weights(w).numpy() - center for w in history.workers]
    return center + sum(open_)


KINDS = ["calm", "lost", "late", "missed", "join", "stand by"]


def lists_of_events(*kinds):
    """Return lists of (what, whom it meets, in which round, before which step)."""
    places = st.integers(0, 5), st.integers(0, 2), st.integers(0, 1)
    return st.lists(st.tuples(st.sampled_from(kinds), *places), max_size=6)


def play(history, num_workers, events):
    """Let things happen to a history, then bring it to its end with all who are left."""
    here, aside = [f"w{i}" for i in range(num_workers)], []
    for number, (event, who, round, step) in enumerate(events):
        here += [w for w in (*history.away, *aside) if w not in here and (who + number) % 2]
        aside = [w for w in aside if w not in here]
        chosen, happens = here[who % len(here)], {}
        if event in ("lost", "late", "missed") and len(here) > 1:
            happens = {event: {chosen: (round, 0 if event == "missed" else step)}}
        elif event == "unheard":
            happens = {"missed": {chosen: (0, -1)}}
        end = history.train(*here, rounds=3 if happens else 1, **happens)
        if set(end.outcomes.values()) & {Outcome.FINISHED, Outcome.REGROUP}:
            break
        if (event in ("lost", "late") and happens) or (event == "stand by" and len(here) > 1):
            here.remove(chosen)
            aside += [chosen] if event == "stand by" else []
        elif event == "join":
            here.append(f"w{num_workers + number}")
    if (history.snapshot.num_samples // history.images.num_samples) < 3:
        history.end(*dict.fromkeys([*here, *aside, *history.away]))


@settings(max_examples=25, deadline=None, database=None)
@given(
    rule=st.sampled_from(list(COUNTING)),
    num_workers=st.integers(1, 6),
    events=lists_of_events(*KINDS, "unheard"),
)
def test_whatever_happens_the_center_counts_each_sample_once_an_epoch(rule, num_workers, events):
    torch.set_num_threads(1)
    history = counting(COUNTING[rule], num_samples=40)
    play(history, num_workers, events)
    assert (history.snapshot.weights == 3).all()


@settings(max_examples=15, deadline=None, database=None)
@given(
    method=st.sampled_from(["sync-easgd", "sync-msgd", "diloco"]),
    fragments=st.integers(1, 2),
    num_workers=st.integers(1, 4),
    events=lists_of_events(*KINDS, "unheard"),
)
def test_whatever_happens_every_sample_is_done_once_an_epoch(
    method, fragments, num_workers, events
):
    torch.set_num_threads(1)
    optimizer = {"lr": 0.1, "max_grad_norm": None}
    case = config(method, exchange={"fragments": fragments}, optimizer=optimizer)
    history = History(case, images=tiny_images(40))
    play(history, num_workers, events)
    history.assert_every_sample_once_an_epoch()


# 3. one is a round behind


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_who_missed_a_sum_goes_on_from_the_freshest_and_is_not_counted_twice(rule):
    history = counting(rule)
    end = history.train("w0", "w1", "w2", missed={"w1": (1, 0)})
    assert set(end.outcomes.values()) == {Outcome.BROKEN}
    assert {w: history.workers[w].round for w in history.workers} == {"w0": 2, "w1": 1, "w2": 2}
    assert num_counted(history) == 24  # 2 rounds of 3 workers, 2 steps, 2 samples
    history.train("w0", "w1", "w2", rounds=1)
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("survivors", [("w0", "w1"), ("w1", "w0"), ("w1",)])
def test_who_missed_a_sum_may_be_rank_0_or_alone_afterwards(survivors):
    history = counting(AllProgress())
    history.train("w0", "w1", "w2", missed={"w1": (0, 0)})
    for gone in {"w0", "w1", "w2"} - set(survivors):
        history.forget(gone)
    history.end(*survivors)
    assert (history.snapshot.weights == 3).all()


def test_a_replica_that_sends_weights_stays_as_it_is_when_it_missed_a_sum():
    history = History(config("sync-measgd"))
    history.train("w0", "w1", missed={"w1": (1, 0)})
    before = history.workers["w1"].replica.state_dict()
    history.train("w0", "w1", rounds=0)
    assert_same(history.workers["w1"].replica.state_dict(), before)


def test_progress_by_hand_when_one_is_left_out_and_comes_back():
    """Two of three go on; c <- c_new + (x - c_old) takes the absent one's progress along."""
    history = counting(AllProgress())
    history.train("w0", "w1", "w2", late={"w1": (0, 0)})
    assert num_counted(history) == 0
    own = history.weights("w1")
    assert own.sum() == 4  # 2 steps of 2 samples, by itself
    history.train("w0", "w2", rounds=1)
    assert num_counted(history) == 16  # 2 workers, of this round and the one that broke
    center = torch.tensor(history.snapshot.weights)
    history.train("w0", "w1", "w2", rounds=0)
    assert_same(history.weights("w1"), center + own)
    history.train("w0", "w1", "w2", rounds=1)
    assert num_counted(history) == 25  # an epoch: 20 and the 5 that were left


def test_one_that_stood_by_begins_at_the_center_as_it_is_now():
    history = counting(AllProgress())
    history.train("w0", "w1", rounds=1)
    history.train("w0", rounds=2)
    history.train("w0", "w1", rounds=0)
    assert_same(history.weights("w1").numpy(), history.snapshot.weights)


# 4. a round in several fragments

FRAGMENTS = ["sync-easgd", "sync-msgd", "diloco", "streaming diloco, int8"]


@pytest.mark.parametrize("method", FRAGMENTS)
def test_a_round_that_broke_after_its_first_fragment_leaves_the_center_as_it_was(method):
    plain = {"fragments": 2}
    name, _, codec = method.partition(", ")
    name = name.removeprefix("streaming ")
    exchange = {**plain, "compression": codec} if codec else plain
    case = config(name, period=4, exchange=exchange, optimizer={"lr": 0.1, "max_grad_norm": None})
    history = History(case, images=tiny_images(100), model=with_buffer)
    history.train("w0", "w1", rounds=2)
    before = history.snapshot
    feedback = feedback_of(history.workers["w1"])
    history.train("w0", "w1", late={"w0": (0, 3)})  # the first fragment joins in step 1
    assert history.parts["w1"].now == (0, 3)
    assert_same(history.snapshot, before)
    assert_same(feedback_of(history.workers["w1"]), feedback)


def feedback_of(worker):
    return [tensors for *_, tensors in worker.take_kept(-1)["feedback"]]


def with_buffer(image_shape, num_classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, num_classes)
    )


@pytest.mark.parametrize("rule", [AllProgress(), Elastic(0.9)], ids=["progress", "weights"])
def test_what_a_fragment_did_to_the_replica_is_undone_with_the_round(rule):
    """Two workers that train alone, but for a first fragment that comes to nothing."""
    history = counting(rule, num_samples=100, period=4, exchange={"fragments": 2})
    history.train("w0", "w1", late={"w0": (0, 3)})
    assert (history.snapshot.weights == 0).all()
    for worker_id in ("w0", "w1"):
        rows = history.watched[worker_id].open
        expected = np.bincount(rows, minlength=100)
        np.testing.assert_allclose(history.weights(worker_id).numpy(), expected, atol=1e-6)
        assert len(rows) == 8


# 5. newcomers


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "sync-msgd"])
def test_a_newcomer_starts_at_the_center(method):
    history = History(config(method))
    history.train("w0", "w1", rounds=2)
    history.train("w0", "w1", "w2", rounds=0)
    assert_same(history.weights("w2").numpy(), history.snapshot.weights)


def test_a_newcomer_with_the_state_of_one_that_left_starts_as_that_replica():
    history = History(config("sync-measgd"))
    history.train("w0", "w1", rounds=2)
    left = history.workers["w1"].take_kept(0)
    history.train("w0", rounds=1)
    history.train("w0", "w2", rounds=0, states={"w2": left})
    assert_same(history.workers["w2"].replica.state_dict(), left["replica"])
    history.end("w0", "w2")


# 6. another size


@pytest.mark.parametrize("num_after", [2, 6])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-msgd", "diloco"])
def test_a_checkpoint_of_four_goes_on_with_two_and_with_six(method, num_after, tmp_path):
    case = config(method)
    before = History(case, images=tiny_images(60))
    before.train("w0", "w1", "w2", "w3", rounds=2)
    states = {w: worker.take_kept(2) for w, worker in before.workers.items()}
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(checkpoint_of(Collected(before.snapshot, states), before.flat, seconds=1.0))

    checkpoint, damage = store.read()
    assert not damage
    after = History(case, images=tiny_images(60))
    after.snapshot = snapshot_of(checkpoint, after.flat)
    after.done = before.done
    members = [f"w{i}" for i in range(num_after)]
    after.train(*members, rounds=0, states=checkpoint.workers)
    assert_same(after.snapshot, before.snapshot)
    assert after.snapshot.ledger == before.snapshot.ledger
    for worker_id in members:
        if worker_id in before.workers:
            replica = before.workers[worker_id].replica.state_dict()
            assert_same(after.workers[worker_id].replica.state_dict(), replica)
        else:
            assert_same(after.weights(worker_id).numpy(), before.snapshot.weights)
    after.end(*members)
    after.assert_every_sample_once_an_epoch()


def test_a_checkpoint_of_a_broken_generation_counts_nothing_twice(tmp_path):
    before = counting(AllProgress())
    before.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    states = {w: worker.take_kept(0) for w, worker in before.workers.items()}
    after = counting(AllProgress())
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(checkpoint_of(Collected(before.snapshot, states), after.flat, seconds=1.0))
    checkpoint, _ = store.read()
    after.snapshot = snapshot_of(checkpoint, after.flat)
    after.train("w1", "w2", rounds=1, states=checkpoint.workers)
    after.end("w1", "w2")
    assert (after.snapshot.weights == 3).all()


# 7. the end of a run


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "sync-sgd"])
def test_steps_count_the_completed_rounds_the_same_for_all(method):
    history = History(config(method, steps=9))
    history.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    history.train("w1", "w2", "w3", rounds=1)
    history.end("w1", "w2", "w3", "w4")
    assert history.snapshot.local_step == 9
    assert {worker.center().local_step for worker in history.workers.values()} == {9}
    assert history.snapshot.round == 5  # of 2, 2, 2, 2 and 1 steps


def test_seconds_end_the_run_for_all_after_the_same_round():
    history = History(config("sync-easgd", seconds=0.3))
    history.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    history.end("w1", "w2", "w3")
    assert history.snapshot.seconds >= 0.3
    assert len({worker.round for worker in history.workers.values()}) == 1


@pytest.mark.parametrize("is_back", [True, False])
def test_what_only_an_absent_worker_can_finish_ends_the_generation(is_back):
    history = counting(AllProgress(), num_samples=24)
    history.train("w0", "w1", "w2", rounds=5)
    history.train("w0", "w1", "w2", late={"w1": (0, 0)})  # the last round of the run
    end = history.train("w0", "w2")
    assert end.outcome is Outcome.REGROUP
    assert num_counted(history) == 68
    num_rounds = history.snapshot.round
    assert history.train("w0", "w2").outcome is Outcome.REGROUP
    assert history.snapshot.round == num_rounds + 1  # an exchange alone, and no more
    if is_back:
        history.end("w0", "w1", "w2")
    else:
        history.forget("w1")
        history.end("w0", "w2")
    assert (history.snapshot.weights == 3).all()


def test_what_is_left_open_by_the_last_break_is_completed_by_an_exchange_alone():
    history = counting(AllProgress(), num_samples=24)
    history.train("w0", "w1", "w2", rounds=5)
    history.train("w0", "w1", "w2", missed={"w1": (0, 0), "w0": (0, 0), "w2": (0, 0)})
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


# 8. groups that share a replica


def pairs(*lost, method="sync-easgd"):
    history = History(config(method, group_size=2))
    history.train("w0", "w1", "w2", "w3", rounds=1)
    history.train("w0", "w1", "w2", "w3", lost=dict.fromkeys(lost, (1, 0)))
    return history


@pytest.mark.parametrize("method", ["sync-easgd", "diloco"])
@pytest.mark.parametrize(
    ("lost", "members"),
    [
        (("w3",), ("w0", "w1", "w2", "w4")),
        (("w0",), ("w2", "w3", "w1", "w4")),
        (("w0", "w3"), ("w1", "w2")),
        (("w0", "w1"), ("w2", "w3")),
    ],
)
def test_survivors_of_groups_share_one_replica_again(method, lost, members):
    history = pairs(*lost, method=method)
    for rounds in (0, 1):
        history.train(*members, rounds=rounds)
        for first, second in zip(members[::2], members[1::2], strict=True):
            assert_same(history.weights(first), history.weights(second))
    history.end(*members)
    assert history.snapshot.num_samples == 75


def test_who_takes_over_a_partners_replica_gives_back_what_it_did_alone():
    history = pairs("w0", "w3")
    history.train("w1", "w2", rounds=0)
    kept = {w: len(history.workers[w]._trained) for w in ("w1", "w2")}
    assert kept["w2"] == 0


# 9. how many


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6])
def test_one_worker_and_many_survive_a_sum_that_nobody_received(rule, num_workers):
    history = counting(rule, num_samples=60)
    members = [f"w{i}" for i in range(num_workers)]
    history.train(*members, missed=dict.fromkeys(members, (1, 0)))
    assert history.snapshot.round == 1
    history.end(*members)
    assert (history.snapshot.weights == 3).all()


def test_a_group_that_somebody_left_fails_for_those_who_wait_and_at_once():
    group = LocalGroup(2, timeout_s=30.0)
    first, second = group.member(0), group.member(1)
    whole = first.start_allreduce(torch.ones(1), round=0)
    second.start_allreduce(torch.ones(1), round=0)
    second.close()
    whole.wait()  # it was handed in before
    with pytest.raises(ExchangeError, match="rank 1 left the group"):
        first.start_allreduce(torch.ones(1), round=1).wait()
    with pytest.raises(ExchangeError, match="rank 1 left the group"):
        second.start_allreduce(torch.ones(1), round=1).wait()


# the books


def test_claims_beyond_what_was_trained_go_back_and_those_of_others_stay():
    ledger = Ledger(20)
    ledger.claim("w0", 8)
    ledger.claim("w1", 6)
    assert ledger.give_back("w0", keep=5) == 3
    assert (ledger.num_claimed, ledger.num_free) == (11, 9)
    assert ledger.claim("w2", 4) == (0, [(5, 8), (14, 15)])


def test_what_was_trained_is_compared_with_the_claims_in_their_order():
    ledger, trained = Ledger(20), Trained()
    epoch, _ = ledger.claim("w0", 6)
    claims = ledger.claims_of("w0")
    assert trained.num_claimed(claims) == 0
    trained.add(epoch, np.arange(0, 4))
    assert trained.num_claimed(claims) == 4
    trained.add(epoch, np.arange(4, 8))
    assert (trained.num_claimed(claims), len(trained)) == (6, 8)
    trained.keep_first(0)
    trained.add(epoch, np.arange(10, 12))
    assert trained.num_claimed(claims) == 0


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_survivors_of_groups_share_what_their_optimizer_remembers(name):
    history = History(config("sync-easgd", group_size=2, optimizer={"name": name}))
    history.train("w0", "w1", "w2", "w3", rounds=2)
    history.train("w0", "w1", "w2", "w3", lost={"w0": (1, 0)})
    members = ("w2", "w3", "w1", "w4")  # w4 has never taken a step
    history.train(*members, rounds=2)
    for first, second in zip(members[::2], members[1::2], strict=True):
        one, other = (history.workers[w].replica.state_dict() for w in (first, second))
        assert_same(one["weights"], other["weights"])
        assert_same(one["optimizer"]["state"], other["optimizer"]["state"])
