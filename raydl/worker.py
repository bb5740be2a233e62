"""The loop of one worker, in rounds: claim samples, take local steps, exchange, decide.

No Ray here: an actor drives it in a cluster, the trainer drives it in one process, and a
test drives several in threads. All ranks of a generation run the same ledger and see the
same header sums, so they take the same decisions after the same round.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raydl.center import Center, Snapshot
from raydl.config import TrainConfig
from raydl.data import Batches
from raydl.errors import NonFiniteLossError
from raydl.exchange.sync import Group, SyncExchange
from raydl.ledger import Ledger, Span, share_round, split_evenly
from raydl.membership import Membership
from raydl.methods import resolve
from raydl.metrics import TimeParts
from raydl.replica import Header, Replica, make_optimizer
from raydl.reports import Books, Record, WorkerReport
from raydl.rules import lr_factor
from raydl.task import Batch, DataShape, Task

_RECORD_EVERY_S = 0.2


@dataclass(frozen=True)
class Job:
    """What all workers of a run share."""

    config: TrainConfig
    task: Task
    shape: DataShape


class Outcome(enum.Enum):
    """What all ranks decided after a round."""

    GO_ON = "go on"
    REGROUP = "regroup"
    STOPPED = "stopped"
    FINISHED = "finished"


class Worker:
    """One replica and its way through the epochs.

    Args:
        job: what all workers share.
        worker_id: the stable id, ``w0``, ``w1``, …
        batches: the training set.
        publish: takes a committed snapshot of the center to where it is served.
    """

    def __init__(
        self,
        job: Job,
        worker_id: str,
        *,
        batches: Batches,
        publish: Callable[[Snapshot], None],
    ) -> None:
        self.worker_id = worker_id
        self.parts = TimeParts()
        self._job = job
        self._batches = batches
        self._publish = publish
        self._method = resolve(job.config.method, job.config.optimizer)
        self._device = torch.device(job.config.scaling.device)
        with self.parts.measure("initialization"):
            model = job.task.build_model(job.shape).to(self._device)
            self.replica = Replica(
                model,
                job.task,
                rule=self._method.rule,
                make_optimizer=make_optimizer(self._method.optimizer),
                time_parts=self.parts,
            )
        self.local_step = 0
        self._lr = 0.0
        self._votes: dict[int, dict[str, float]] = {}
        self._votes_lock = threading.Lock()
        self._losses: list[tuple[int, int, torch.Tensor]] = []
        self._loss_sum = self._loss_samples = 0.0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._books = Books()
        self._kept: dict[int, dict[str, Any]] = {}
        self._center: Center | None = None

    # joining and leaving a generation

    def join(
        self,
        membership: Membership,
        group: Group,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None = None,
    ) -> None:
        """Enter a generation.

        Args:
            membership: who trains.
            group: connects them.
            snapshot: the center they all start from.
            own_state: what this worker kept at that round in a checkpoint; None for one
                that has none (it starts at the center) or has it in memory.
        """
        with self.parts.measure("initialization"):
            if self._center is None:
                self._start_from(snapshot, own_state)
            assert self._center is not None
            self._membership = membership
            with self._votes_lock:
                self._votes = {g: v for g, v in self._votes.items() if g >= membership.generation}
            self._rank = membership.worker_ids.index(self.worker_id)
            self._exchange = SyncExchange(group, self._center, round=snapshot.round)

    def _start_from(self, snapshot: Snapshot, own_state: dict[str, Any] | None) -> None:
        device = self._device
        weights = torch.tensor(snapshot.weights, device=device)
        buffers = torch.tensor(snapshot.buffers, device=device)
        optimizer = make_optimizer(self._method.optimizer)
        center = Center(weights, buffers, rule=self._method.rule, make_optimizer=optimizer)
        center.load(weights, buffers, version=snapshot.version, optimizer=snapshot.optimizer)
        self._center = center
        self._ledger = Ledger.from_state_dict(snapshot.ledger)
        self.local_step = snapshot.local_step
        self.replica.follow(center)
        if own_state is None:
            seed = np.random.SeedSequence([self._job.config.training.seed, _number(self.worker_id)])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        else:
            self._load_state(own_state)

    # one round

    def run_round(self) -> Outcome:
        """Take the local steps up to the next exchange, exchange, and return what follows.

        Raises:
            NonFiniteLossError: the loss became NaN or infinite.
            ExchangeError: the exchange failed; the center is as before the round.
        """
        start = time.perf_counter()
        num_steps, spans, counts = self._claim_round()
        sums: Header | None = None
        first = 0
        for step, size in enumerate(split_evenly(counts[self._rank], num_steps)):
            batch = self._batch(spans[first : first + size])
            first += size
            is_last = step == num_steps - 1
            self._set_lr(step)
            if is_last:
                header = self._make_header(num_samples=counts[self._rank])
                loss, sums = self.replica.step(batch, exchange=self._exchange, header=header)
            else:
                loss, _ = self.replica.step(batch)
            self._losses.append((self.local_step, size, loss))
            self.local_step += 1
        assert sums is not None
        self._collect_losses()
        self._books.round_s = time.perf_counter() - start
        return self._decide(sums)

    def _claim_round(self) -> tuple[int, np.ndarray, tuple[int, ...]]:
        """Return (local steps, this worker's positions, samples of each rank)."""
        with self.parts.measure("data_io"):
            training = self._job.config.training
            max_steps = self._method.period
            if training.steps is not None:
                max_steps = min(max_steps, training.steps - self.local_step)
            members = self._membership.worker_ids
            share = share_round(
                self._ledger.num_free,
                num_workers=len(members),
                batch_size=training.batch_size,
                max_steps=max_steps,
            )
            claims = {
                worker: self._ledger.claim(worker, count)
                for worker, count in zip(members, share.counts, strict=True)
            }
            return share.num_steps, _positions(claims[self.worker_id]), share.counts

    def _batch(self, positions: np.ndarray) -> Batch:
        with self.parts.measure("data_io"):
            inputs, labels = self._batches.batch(self._epoch_order()[positions])
        if self._device.type == "cpu":
            return inputs, labels
        with self.parts.measure("host_device_data"):
            return inputs.to(self._device), labels.to(self._device)

    def _epoch_order(self) -> np.ndarray:
        """Return the samples of this epoch in their order, shape [num_samples]."""
        epoch = self._ledger.epoch
        if self._order[0] != epoch:
            random = np.random.default_rng([self._job.config.training.seed, epoch])
            self._order = (epoch, random.permutation(self._ledger.num_samples))
        return self._order[1]

    def _set_lr(self, step: int) -> None:
        """Set the learning rate for a step of this round, counted from 0."""
        assert self._center is not None
        optimizer = self._method.optimizer
        assert optimizer.lr is not None
        share_done = self._share_done(step)
        self._lr = optimizer.lr * lr_factor(optimizer.schedule, share_done, warmup=optimizer.warmup)
        self.replica.set_lr(self._lr)
        self._center.set_lr(self._lr)

    def _share_done(self, step: int) -> float:
        """Return 0..1 of the run before a step of this round."""
        training, ledger = self._job.config.training, self._ledger
        if training.steps is not None:
            return self.local_step / training.steps
        assert training.num_epochs is not None
        batch = training.batch_size * self._membership.num_workers
        num_samples = ledger.num_done_ever + step * batch
        return min(1.0, num_samples / (training.num_epochs * ledger.num_samples))

    def _make_header(self, *, num_samples: int) -> Header:
        self._collect_losses()
        loss_sum, loss_samples = self._loss_sum, self._loss_samples
        self._loss_sum = self._loss_samples = 0.0
        with self._votes_lock:  # a vote that comes in later waits for the next round
            votes = self._votes.pop(self._membership.generation, {})
        return Header(
            num_samples=num_samples,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            distance=self.replica.distance_squared,
            seconds=self._books.round_s,
            **votes,
        )

    def _collect_losses(self) -> None:
        """Read the losses off the device, once per round rather than once per step."""
        for local_step, num_samples, loss in self._losses:
            value = float(loss)
            if not math.isfinite(value):
                raise NonFiniteLossError(self.worker_id, local_step, value)
            self._loss_sum += value * num_samples
            self._loss_samples += num_samples
        self._losses.clear()

    def _decide(self, sums: Header) -> Outcome:
        """Enter a committed round into the books; return what all ranks do next."""
        for worker in self._membership.worker_ids:
            self._ledger.complete(worker)
        epoch_ended = self._ledger.epoch_is_complete
        if epoch_ended:
            self._ledger.next_epoch()
        outcome = self._outcome(sums)
        self._write_down(sums, at_once=epoch_ended or outcome is not Outcome.GO_ON)
        keep = sums.checkpoint > 0 or outcome in (Outcome.STOPPED, Outcome.FINISHED)
        if keep:
            self._kept[self._exchange.round] = self._state_dict()
        every = self._job.config.evaluation.every_epochs
        evaluate = epoch_ended and self._ledger.epoch % every == 0
        if self._rank == 0 and (keep or evaluate or outcome is not Outcome.GO_ON):
            self._publish(self._snapshot(is_kept=keep))
        return outcome

    def _outcome(self, sums: Header) -> Outcome:
        training = self._job.config.training
        if training.steps is not None:
            finished = self.local_step >= training.steps
        else:
            assert training.num_epochs is not None
            finished = self._ledger.epoch >= training.num_epochs
        if finished:
            return Outcome.FINISHED
        if sums.stop > 0:
            return Outcome.STOPPED
        return Outcome.REGROUP if sums.regroup > 0 else Outcome.GO_ON

    @property
    def round(self) -> int:
        """Rounds completed since the run began."""
        return self._exchange.round if self._center else 0

    # what others ask for

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all ranks to ``stop``, ``regroup`` or keep a ``checkpoint`` after a round.

        A vote counts in its generation alone. It may come before the worker has joined that
        one, since it takes another road than the order to join; one for a generation that
        has passed is ignored.
        """
        with self._votes_lock:
            self._votes.setdefault(generation, {}).update(votes)

    def report(self) -> WorkerReport:
        """Return what is new since the last report."""
        records, self._books.records = self._books.records, []
        return WorkerReport(
            worker_id=self.worker_id,
            round=self.round,
            records=tuple(records),
            kept=tuple(self._kept),
            time_parts=self.parts.as_dict(),
        )

    def take_kept(self, round: int) -> dict[str, Any]:
        """Hand over the state kept at that round; older ones are dropped with it."""
        state = self._kept[round]
        self._kept = {r: s for r, s in self._kept.items() if r > round}
        return state

    def _write_down(self, sums: Header, *, at_once: bool) -> None:
        books = self._books
        books.add(sums)
        now = time.monotonic()
        if not at_once and now - books.recorded_at < _RECORD_EVERY_S:
            return
        waited_s = self.parts.as_dict()["device_device_parameters"]
        ledger, p = self._ledger, self._membership.num_workers
        books.records.append(
            Record(
                round=self._exchange.round,
                generation=self._membership.generation,
                num_workers=p,
                epoch=ledger.num_done_ever / ledger.num_samples,
                num_samples=ledger.num_done_ever,
                local_step=self.local_step,
                lr=self._lr,
                loss=books.mean_loss(),
                distance=math.sqrt(sums.distance / p),
                exchange_s=(waited_s - books.waited_s) / books.num_rounds,
                exchange_bytes=self._exchange.num_bytes,
            )
        )
        books.restart(now, waited_s)

    def _snapshot(self, *, is_kept: bool) -> Snapshot:
        assert self._center is not None
        with self.parts.measure("host_device_parameters"):
            return Snapshot(
                round=self._exchange.round,
                generation=self._membership.generation,
                epoch=self._ledger.epoch,
                num_samples=self._ledger.num_done_ever,
                local_step=self.local_step,
                version=self._center.version,
                is_kept=is_kept,
                weights=self._center.weights.cpu().numpy().copy(),
                buffers=self._center.buffers.cpu().numpy().copy(),
                optimizer=self._center.optimizer_state(),
                ledger=self._ledger.state_dict(),
            )

    def _state_dict(self) -> dict[str, Any]:
        with self.parts.measure("host_device_parameters"):
            cuda = torch.cuda.get_rng_state() if self._device.type == "cuda" else None
            return {
                "replica": self.replica.state_dict(),
                "loss_sum": self._loss_sum,
                "loss_samples": self._loss_samples,
                "generators": {"cpu": torch.get_rng_state(), "cuda": cuda},
            }

    def _load_state(self, state: dict[str, Any]) -> None:
        self.replica.load_state_dict(state["replica"])
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]
        torch.set_rng_state(state["generators"]["cpu"])
        if self._device.type == "cuda" and state["generators"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["generators"]["cuda"])


def _positions(spans: list[Span]) -> np.ndarray:
    """Return the positions of spans in order, int64."""
    parts = [np.arange(start, stop) for start, stop in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _number(worker_id: str) -> int:
    return int(worker_id.lstrip("w"))
