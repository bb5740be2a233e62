"""Scripted histories of memberships under synchronous methods, run in threads.

A worker that is lost leaves its group before a given step. So the script, and no clock, determines
which exchange fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images

from benchmarks.counting import AllProgress
from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.saved_state import SavedState
from raydl.data import Batches, ImageSet, Normalizer
from raydl.data.samples import as_they_are
from raydl.errors import ExchangeError
from raydl.methods import resolve
from raydl.methods.data_parallel import MeanGradient
from raydl.worker.in_process import LocalGroup
from raydl.worker.loop import Worker

Place = tuple[int, int]
"""(round of the generation, local step of the round), both from 0."""


class WorkerDied(Exception):
    """A worker died before a step."""


class RecordingBatches(Batches):
    """Batches that record the samples that a worker has taken since its last exchange."""

    def __init__(self, images):
        super().__init__(images, self._recorded)
        self._prepare = Normalizer.of(images) if isinstance(images, ImageSet) else as_they_are
        self.open = []

    def _recorded(self, batch, rows, epoch):
        self.open += rows.tolist()
        return self._prepare(batch, rows, epoch)


class LossyTransport:
    """The transport of one member, which may miss one sum that all others receive.

    The missed sum is given by its round and its number in the round. The sum of what each worker
    has trained, a tensor with one number per worker, has number -1.
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
class MemberScript:
    """A worker's script and state in one generation."""

    transport: Any
    partners: Any
    first_round: int
    dies_at: Place | None = None
    leaves_at: Place | None = None
    now: Place = (-1, 0)

    def leave(self):
        self.transport.close()
        if self.partners is not None:
            self.partners.close()


@dataclass
class End:
    """The outcomes and errors of a generation."""

    outcomes: dict[str, Outcome]
    errors: list[Exception] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        (outcome,) = set(self.outcomes.values())
        return outcome


class History:
    """A run through several memberships; the newest copy of the center continues."""

    def __init__(self, config, *, images=None, model=linear, task=None, rule=None):
        self.images = images or tiny_images(25)
        base = Ensemble(config, num_workers=0, images=self.images, model=model, task=task)
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
        self.batches: dict[str, RecordingBatches] = {}
        self.scripts: dict[str, MemberScript] = {}
        self.absent: tuple[str, ...] = ()
        self.generation = 0
        self.done = Counter()

    def _first_of(self, base, task):
        base.use_task(task)
        return base.first

    @property
    def _drops_open_samples(self):
        return not self.job.method.rule.takes_steps

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
            members: ids of the workers that train.
            rounds: number of rounds; None: to the end of the run.
            lost: step before which a worker is lost, by worker id.
            late: step from which a worker trains alone, left out by the others, by worker id.
            missed: (round, number) of the sum that a worker does not receive, by worker id.
            states: state of a newcomer besides the center, by worker id.
        """
        self.generation += 1
        self.absent = tuple(w for w in self.absent if w not in members)
        membership = Membership(self.generation, members, self.absent)
        self._make_scripts(membership, lost or {}, late or {}, missed or {})
        end = End({})

        def run(worker_id):
            try:
                end.outcomes[worker_id] = self._run_worker(
                    worker_id, membership, rounds, states or {}
                )
            except WorkerDied:
                pass
            except Exception as error:
                end.errors.append(error)
            finally:
                self.scripts[worker_id].leave()

        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(run, members))
        if end.errors:
            raise end.errors[0]
        self._settle(members, tuple(lost or ()), tuple(late or ()))
        return end

    def _make_scripts(self, membership, lost, late, missed):
        members, size = membership.worker_ids, self.job.config.method.group_size
        group = LocalGroup(len(members), timeout_s=30.0, generation=self.generation)
        shared = [LocalGroup(size, timeout_s=30.0) for _ in range(len(members) // size)]
        first = self.snapshot.progress.round
        for rank, worker_id in enumerate(members):
            miss = missed.get(worker_id)
            transport = LossyTransport(group.member(rank), miss and (first + miss[0], miss[1]))
            partners = shared[rank // size].member(rank % size) if size > 1 else None
            self.scripts[worker_id] = MemberScript(
                transport, partners, first, lost.get(worker_id), late.get(worker_id)
            )
            if worker_id not in self.workers:
                self.batches[worker_id] = RecordingBatches(self.images)
                self.workers[worker_id] = Worker(
                    self.job,
                    worker_id,
                    batches=self.batches[worker_id],
                    publish=self._publish,
                    before_step=self._before_step,
                    non_trainable=self.flat.non_trainable.arrays(),
                )

    def _before_step(self, worker_id, *, round, **_):
        script = self.scripts[worker_id]
        number, step = script.now
        now = round - script.first_round
        script.now = (now, step + 1) if now == number else (now, 0)
        if script.now == script.dies_at:
            raise WorkerDied
        if script.now == script.leaves_at:
            script.leave()

    def _run_worker(self, worker_id, membership, rounds, states):
        worker, script = self.workers[worker_id], self.scripts[worker_id]
        num_done, outcome = 0, Outcome.GO_ON
        try:
            own = states.get(worker_id)
            own = own.load() if isinstance(own, SavedState) else own
            worker.join(membership, script.transport, self.snapshot, own, script.partners)
            while outcome is Outcome.GO_ON and (rounds is None or num_done < rounds):
                outcome = worker.run_round()
                self._complete(worker_id)
                num_done += 1
        except ExchangeError:
            return Outcome.BROKEN
        return outcome

    def _complete(self, worker_id):
        """Count the samples that a worker has read: its exchange is complete."""
        self.done.update(self.batches[worker_id].open)
        self.batches[worker_id].open = []

    def _settle(self, members, lost, late):
        for worker_id in lost:
            self.remove_worker(worker_id)
        self.absent += tuple(w for w in late if w in self.workers)
        here = [w for w in members if w not in lost and w not in late]
        newest, _ = age = max(self.workers[w].copy_age for w in here)
        first_newest, *others = [w for w in here if self.workers[w].copy_age == age]
        for worker_id in here:
            if self.workers[worker_id].round < newest:
                self._complete(worker_id)  # the other workers have received its message
            elif self._drops_open_samples:
                self.batches[worker_id].open = []  # these samples are trained again
        for worker_id in late if self._drops_open_samples else ():
            self.batches[worker_id].open = []
        self.snapshot = self.workers[first_newest].center()
        for worker_id in others:
            assert_same(self.workers[worker_id].center(), self.snapshot)

    def remove_worker(self, worker_id):
        """Remove a lost worker."""
        del self.workers[worker_id], self.batches[worker_id]
        self.absent = tuple(w for w in self.absent if w != worker_id)

    def weights(self, worker_id):
        return self.workers[worker_id].replica.flat.weights.clone()

    def bits(self) -> dict[str, Any]:
        """Return the center and all replicas."""
        states = {w: worker.replica.state_dict() for w, worker in self.workers.items()}
        center = {"weights": self.snapshot.weights, "buffers": self.snapshot.buffers}
        return {"center": {**center, "optimizer": self.snapshot.optimizer}, **states}

    def end(self, *members: str) -> None:
        """Train to the end."""
        assert self.train(*members).outcome is Outcome.FINISHED

    def assert_every_sample_once_an_epoch(self):
        epochs = self.job.config.training.epochs
        assert self.done == dict.fromkeys(range(self.images.num_samples), epochs)


def assert_same(one: Any, other: Any) -> None:
    """Assert that nested values are bitwise equal."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"param_groups"}:  # param_groups are settings, set before each step
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif hasattr(one, "weights"):
        assert one.progress.round == other.progress.round
        assert one.progress.num_samples == other.progress.num_samples
        assert one.progress.local_step == other.progress.local_step
        assert_same(one.ledger, other.ledger)
        assert one.num_cuts == other.num_cuts
        assert_same(one.weights, other.weights)
        assert_same(one.buffers, other.buffers)
        assert_same(one.optimizer, other.optimizer)
    else:
        assert one == other


def config(method="local-sgd", *, period=2, optimizer=None, exchange=None, group_size=1, **more):
    dynamic, options = more.pop("dynamic_weights", False), more.pop("options", "")
    more.setdefault("batch_size", 2)
    if not {"steps", "seconds"} & set(more):
        more.setdefault("epochs", 3)
    return TrainConfig(
        method=MethodConfig(
            name=method,
            period=period,
            group_size=group_size,
            dynamic_weights=dynamic,
            options=options,
        ),
        training=TrainingConfig(**more),
        optimizer=OptimizerConfig(**(optimizer or {"lr": 0.1})),
        exchange=ExchangeConfig(**(exchange or {})),
    )


# a model that counts: each sample adds one to its own weight


class CountingModel(torch.nn.Module):
    """One weight for each sample."""

    def __init__(self, num_samples):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_samples))


class CountingTask:
    """A task whose steps with rate 1 add one to the weight of each sample in the batch."""

    name = "counts"

    def __init__(self, num_samples, rule):
        self._num_samples = num_samples
        self._rule = rule

    def build_model(self, shape):
        return CountingModel(self._num_samples)

    def loss(self, model, batch):
        total = -model.counts[batch[1]].sum()
        return total if self._rule.takes_steps else total / len(batch[1])

    def metrics(self, model, batch):
        raise NotImplementedError


class AllGradients(MeanGradient):
    """Adds the gradients of all samples to the center."""

    period = 2

    def merge_(self, center, mail, state, now):
        center.sub_(mail.total("gradient"))


def counting(rule, *, num_samples=25, **more):
    """Return a history whose center counts how often each sample reached it."""
    plain = {"lr": 1.0, "lr_schedule": "constant", "warmup": 0.0, "clip_grad_norm": None}
    images = tiny_images(num_samples)
    images = ImageSet(images.images, np.arange(num_samples), tuple(map(str, range(num_samples))))
    settings = config("local-sgd", optimizer=plain, **more)
    return History(settings, images=images, task=CountingTask(num_samples, rule), rule=rule)


def num_counted(history):
    return int(history.snapshot.weights.sum())


COUNTING = {"progress": AllProgress(), "gradients": AllGradients()}
