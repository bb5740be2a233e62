"""The strategy of synchronous methods: all exchange at once; every rank has center and ledger.

When an exchange fails, the ledger that all go on with says what each worker has claimed. A
worker may have trained on less: it came out of its round early, or was a round behind and
those claims are of a round that it never saw. So survivors compare, and tell each other
(``Trained``). The first rounds of a generation are measured, and all its workers choose by
them how often to exchange (``ExchangeProfiler``).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raydl.collective.sync_exchange import GatheredExchange, Group, StagedExchange, SyncExchange
from raydl.core.autotune import (
    TAKEN_OVER,
    Choice,
    ExchangeTuning,
    Limits,
    Measured,
    carried_over,
    choose,
)
from raydl.core.center import Center, Snapshot, joined_states, split_states
from raydl.core.copy_buffers import CopyBuffers, sizes_of
from raydl.core.exchange import Exchange, Header, shard_spans
from raydl.core.methods import may_compress
from raydl.core.optimizers import make_optimizer
from raydl.core.progress import Progress
from raydl.core.reports import AllreduceReport, Outcome, Record, RecordAggregator
from raydl.core.rules import Sends
from raydl.core.stop_condition import StopCondition, num_evaluations_due
from raydl.core.strategy import Decision, Round, WorkerContext, samples_before
from raydl.data.ledger import Claim, Ledger, Span, share_round
from raydl.data.loader import positions_of
from raydl.metrics import TimeParts


class Trained:
    """Positions a worker has trained on since its last completed exchange, in their order."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []  # (epoch, positions) of each local step

    def __len__(self) -> int:
        return sum(len(positions) for _, positions in self._parts)

    def add(self, epoch: int, positions: np.ndarray) -> None:
        """Note the positions of a local step."""
        self._parts.append((epoch, positions))

    def num_claimed(self, claims: Sequence[tuple[int, Span]]) -> int:
        """Return how many of them lead what the worker has claimed by a ledger."""
        ours = _pairs(self._parts)
        theirs = _pairs([(epoch, positions_of([span])) for epoch, span in claims])
        length = min(len(ours), len(theirs))
        differs = (ours[:length] != theirs[:length]).any(axis=1)
        return int(differs.argmax()) if differs.any() else length

    def keep_first(self, count: int) -> None:
        """Forget all but the first ones."""
        parts, self._parts = self._parts, []
        for epoch, positions in parts:
            first = positions[:count]
            count -= len(first)
            if len(first):
                self.add(epoch, first)


def _pairs(parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return (epoch, position) in rows, shape [n, 2]."""
    rows = [np.stack([np.full_like(part, epoch), part], axis=1) for epoch, part in parts]
    return np.concatenate([np.empty((0, 2), np.int64), *rows])


SKIPPED = 2
"""Rounds that are not measured: processes warm up, connections open."""
COUNTED = 3
_CPU = torch.device("cpu")


class ExchangeProfiler:
    """Measures rounds and chooses how often to exchange; see ``raydl/core/autotune.py``.

    All call it in the same rounds, and choose by the same numbers.

    Args:
        group: the workers.
        rank: of this worker.
        generation: the membership.
        limits: what the user's settings leave open.
        time_parts: know how long this worker waited.
        device: of what the group sums.
        clock: seconds, rising.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        *,
        generation: int,
        limits: Limits,
        time_parts: TimeParts,
        device: torch.device = _CPU,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group = group
        self._rank = rank
        self._generation = generation
        self._limits = limits
        self._parts = time_parts
        self._device = device
        self._clock = clock
        self._rounds: list[tuple[float, float]] = []
        self._before: tuple[float, float] | None = None
        self._is_first, self._is_settled = True, False

    def next(self, now: ExchangeTuning, *, num_steps: int, round: int) -> Choice | None:
        """Take note of the round before; return the tuning of the next ones if it changes.

        A choice is measured in its turn, until nothing is left to change.

        Args:
            now: the exchange tuning of the round before.
            num_steps: its local steps; one that was cut short does not count.
            round: the number of the next round.

        Raises:
            ExchangeError: somebody did not come to the choice.
        """
        if self._is_settled:
            return None
        at, waited_s = self._clock(), self._parts.as_dict()["device_device_parameters"]
        if self._before is not None and num_steps == now.period:
            in_round_s, in_waits_s = at - self._before[0], waited_s - self._before[1]
            self._rounds.append(((in_round_s - in_waits_s) / num_steps, in_waits_s))
        self._before = at, waited_s
        if len(self._rounds) < SKIPPED + COUNTED:
            return None
        choice = choose(now, self._measured(round), self._limits, generation=self._generation)
        self._rounds, self._before, self._is_settled = [], None, choice is None
        self._is_first = False
        return choice

    def _measured(self, round: int) -> Measured:
        """Return the steps of the slowest worker, and the waiting time of the fastest."""
        steps, waits = zip(*self._rounds[SKIPPED:], strict=True)
        p = self._group.num_workers
        times = torch.zeros(2, p, dtype=torch.float32, device=self._device)
        times[0, self._rank] = statistics.median(steps)
        # First the least, for what else crosses the link while a run starts, the samples above
        # all, is soon gone. A choice that is too mild shows when it is measured.
        times[1, self._rank] = min(waits) if self._is_first else statistics.median(waits)
        with self._parts.measure("device_device_parameters"):
            self._group.start_allreduce(times.view(-1), round=round).wait()
        return Measured(float(times[0].max()), float(times[1].min()), p)


AnyExchange = SyncExchange | GatheredExchange | StagedExchange


class SyncStrategy:
    """All at once: every rank keeps the center and the ledger, and takes the same decisions.

    Args:
        context: where the worker stands.
        group: the workers of this generation.
        snapshot: what they all start from.
        trained: what this worker has trained on and not exchanged yet.
    """

    def __init__(
        self, context: WorkerContext, group: Group, snapshot: Snapshot, trained: Trained
    ) -> None:
        self._context = context
        self._trained = trained
        self._config = context.config
        self._ledger = Ledger.from_state_dict(snapshot.ledger, cuts=context.cuts)
        self._release_claims()
        self._is_roll_called = False
        # Common to all ranks, unlike a worker's own count: some come later than others.
        self._num_steps = snapshot.progress.local_step
        self._stop_condition = StopCondition.of(
            context.config.training, epoch_samples=self._ledger.num_samples
        )
        self._seconds = snapshot.progress.seconds
        self._round = self._version = snapshot.progress.round
        self._aggregator = RecordAggregator()
        self._group = group
        self._votes: dict[str, float] = {}
        self.num_cuts = snapshot.num_cuts
        """How often the learning rate was cut; the same on all ranks."""
        self._cuts_wanted = 0
        self._votes_lock = threading.Lock()
        self._lr = 0.0
        self._round_steps = 0
        self._samples_before: list[float] = []
        # A run may have been resumed with a period of the user's.
        chosen = snapshot.tuning if context.method.finds_tuning else None
        self._tuning, self._choice = self._their_tuning(), None
        if chosen and chosen != self._tuning:
            members, theirs = context.membership, self._tuning.compression
            self._tuning = carried_over(chosen, theirs, members.num_workers)
            self._choice = Choice(members.generation, self._tuning, TAKEN_OVER)
        self._profiler = self._make_profiler() if context.method.finds_tuning else None
        self._weights = torch.tensor(snapshot.weights, device=context.center_device())
        self._buffers = torch.tensor(snapshot.buffers, device=context.center_device())
        self._copies = CopyBuffers()
        self._make_centers(snapshot.optimizer)
        self._make_exchanges()

    def _their_tuning(self) -> ExchangeTuning:
        settings = self._config.exchange
        return ExchangeTuning(
            self._context.method.period, settings.delay, settings.compression, settings.fragments
        )

    def _make_profiler(self) -> ExchangeProfiler:
        context = self._context
        return ExchangeProfiler(
            self._group,
            context.rank,
            generation=context.membership.generation,
            limits=Limits(
                overlap=context.method.overlap and context.method.rule.sends is Sends.WEIGHTS,
                may_compress=context.flat.weights.dtype == torch.float32
                and may_compress(self._config),
            ),
            time_parts=context.time_parts,
            device=context.center_device(),
        )

    def _make_exchanges(self) -> None:
        exchanges: tuple[AnyExchange, ...] = tuple(
            self._make_exchange(self._group, center, span)
            for center, span in zip(self._centers, self._spans, strict=True)
        )
        self.exchanges: tuple[Exchange, ...] = exchanges
        self._exchange_bytes = sum(exchange.num_bytes for exchange in exchanges)

    def _release_claims(self) -> None:
        """Free what the lost had claimed.

        Those who are still here complete what they have trained on with their next exchange;
        but a gradient that was not summed is forgotten. What they have reserved they keep.
        """
        membership = self._context.membership
        still_here = (*membership.worker_ids, *membership.absent)
        is_kept = self._context.method.rule.sends is not Sends.GRADIENT
        self._ledger.release(keep=still_here if is_kept else (), members=still_here)

    def _make_centers(self, optimizer: dict[str, Any]) -> None:
        method = self._context.method
        self._spans = shard_spans(self._weights.numel(), self._tuning.fragments)
        self._context.lay_feedback(self._spans)
        sizes = [stop - start for start, stop in self._spans]
        states = split_states(optimizer, sizes)
        self._centers = []
        for (start, stop), state in zip(self._spans, states, strict=True):
            is_last = stop == self._weights.numel()
            center = Center(
                self._weights[start:stop],
                self._buffers if is_last else self._buffers[:0],
                rule=method.rule,
                make_optimizer=make_optimizer(
                    method.inner, method.own_optimizer, self._context.flat.model
                ),
            )
            center.load_optimizer(state)
            self._centers.append(center)

    def _make_exchange(self, group: Group, center: Center, span: Span) -> AnyExchange:
        settings, context = self._config.exchange, self._context
        group_size = self._config.method.group_size
        exchange: SyncExchange | GatheredExchange
        if (compression := self._tuning.compression) != "none":
            exchange = GatheredExchange(
                group,
                center,
                span=slice(*span),
                round=self._round,
                sends=context.method.rule.sends,
                feedback=context.feedback_of(span, compression),
                group_size=group_size,
            )
        else:
            exchange = SyncExchange(
                group,
                center,
                span=slice(*span),
                round=self._round,
                pieces=None if settings.packed else _pieces(context.flat.layer_sizes, span),
                group_size=group_size,
            )
        device = context.flat.weights.device
        if settings.resident and context.center_device() == device:
            return exchange
        return StagedExchange(exchange, device, context.time_parts)

    @property
    def version(self) -> int:
        """Rounds completed since the run began."""
        return self._version

    @property
    def ledger_round(self) -> int:
        """Every rank keeps the ledger."""
        return self.version

    @property
    def num_changes(self) -> int:
        """Changes of the ledger."""
        return self._ledger.num_changes

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers)."""
        return self._context.rank, self._context.membership.num_workers

    def next_round(self, local_step: int) -> Round:
        """Claim this round's samples for all ranks."""
        if len(self._centers) > 1:  # fragments are committed one by one
            self._kept_feedback = {s: f.state_dict() for s, f in self._context.feedback.items()}
            for center in self._centers:
                center.keep()
        if not self._is_roll_called:
            self._call_roll()
            self._is_roll_called = True
        with self._context.time_parts.measure("data_io"):
            round = self._claim()
        self._round_steps = round.num_steps
        return round

    def find_tuning(self) -> None:
        """Let the workers choose how they exchange from here on, if a choice is due.

        Raises:
            ExchangeError: somebody did not come to the choice; nothing has changed.
        """
        if self._profiler is None:
            return
        choice = self._profiler.next(self._tuning, num_steps=self._round_steps, round=self._round)
        if choice is not None:  # on all ranks the same, and nothing is under way between rounds
            state = self._optimizer_state()
            self._choice, self._tuning = choice, choice.tuning
            self._make_centers(state)
            self._make_exchanges()

    def undo_round(self) -> None:
        """Undo the fragments that a round which failed has committed."""
        if len(self._centers) > 1:
            for center in self._centers:
                center.undo_()
            for span, state in self._kept_feedback.items():
                self._context.feedback[span].load_state_dict(state)

    def _call_roll(self) -> None:
        """Let all ranks know how much of their open claims each has trained on; free the rest.

        One that came out of its round early, or was a round behind, has not trained on all that
        stands under its name, and nobody else knows.

        Raises:
            ExchangeError: somebody did not answer; the ledger is as it was.
        """
        members = self._context.membership.worker_ids
        if not set(members) & set(self._ledger.claimants):
            return
        counts = torch.zeros(len(members), device=self._weights.device)
        counts[self._context.rank] = self._trained.num_claimed(
            self._ledger.claims_of(self._context.worker_id)
        )
        with self._context.time_parts.measure("device_device_parameters"):
            self._group.start_allreduce(counts, round=self._round).wait()
        for worker_id, count in zip(members, counts.tolist(), strict=True):
            self._ledger.give_back(worker_id, keep=int(count))

    def _claim(self) -> Round:
        """Claim the samples of a whole period, in as many epochs as that takes."""
        steps_left = self._stop_condition.steps_left(self._num_steps)
        num_steps = self._tuning.period if steps_left is None else steps_left
        num_steps = min(num_steps, self._tuning.period)
        claims: list[Claim] = []
        by_all: list[tuple[int, int]] = []
        while num_steps:
            num_free = self._num_free()
            if claims and not num_free:  # the end of the run
                break
            claim, num_samples = self._claim_in_epoch(num_free, num_steps)
            claims.append(claim)
            by_all.append((num_samples, claim.num_steps))
            num_steps -= claim.num_steps
        self._samples_before = samples_before(by_all)
        ahead = self._ledger.reserved_by(self._context.worker_id)
        return Round(claims, self._tuning.delay, ahead)

    def _num_free(self) -> int:
        """Return how many samples are left to claim in an epoch, or in the run."""
        left = self._stop_condition.samples_left(
            self._ledger.num_done_ever + self._ledger.num_claimed
        )
        return self._ledger.num_free if left is None else min(left, self._ledger.num_free)

    def _claim_in_epoch(self, num_free: int, num_steps: int) -> tuple[Claim, int]:
        """Claim for all ranks; return this one's claim, and the samples of all."""
        members = self._context.membership.worker_ids
        share = share_round(
            num_free,
            num_workers=len(members),
            batch_size=self._config.training.batch_size,
            max_steps=num_steps,
        )
        claims = {
            worker: self._ledger.claim(worker, count)
            for worker, count in zip(members, share.counts, strict=True)
        }
        return Claim(*claims[self._context.worker_id], share.num_steps), sum(share.counts)

    def share_done(self, step: int, local_step: int) -> float:
        """Return 0..1 of the run, the same on all ranks."""
        return self._stop_condition.share_done(
            num_samples=self._ledger.num_done_ever + self._samples_before[step],
            num_steps=self._num_steps + step,
            seconds=self._seconds,
        )

    def begin_step(self, step: int, lr: float) -> None:
        """Set the learning rate at this rank's center."""
        self._lr = lr
        for center in self._centers:
            center.set_lr(lr)

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Complete the round for all ranks and decide by the sums they all see."""
        p = self._context.membership.num_workers
        epoch = self._ledger.epoch
        num_due = num_evaluations_due(self._config.evaluation, self._ledger)
        for worker in self._context.membership.worker_ids:
            self._ledger.complete(worker)
        self._round += 1
        self._num_steps += self._round_steps
        self._seconds = sums.elapsed_s / p  # the mean of all clocks: the same on all ranks
        self.num_cuts += sums.lr_cut > 0
        outcome = self._outcome(sums)
        is_over = outcome is not Outcome.GO_ON
        is_new_epoch = self._ledger.epoch > epoch
        self._aggregator.add(sums, num_messages=p, num_steps=p * self._round_steps)
        self._aggregator.record(
            self._progress(),
            num_workers=p,
            lr=self._lr,
            exchange_bytes=self._exchange_bytes,
            at_once=is_new_epoch or is_over,
        )
        self._version = self._round  # told only when its record can be told as well
        keeps = sums.checkpoint > 0 or outcome in (Outcome.STOPPED, Outcome.FINISHED)
        evaluates = num_evaluations_due(self._config.evaluation, self._ledger) > num_due
        return Decision(
            outcome,
            keep=self._round if keeps else None,
            publishes=self._context.rank == 0 and (keeps or evaluates or is_over),
        )

    def _outcome(self, sums: Header) -> Outcome:
        num_done = self._ledger.num_done_ever
        if self._stop_condition.is_reached(
            num_samples=num_done, num_steps=self._num_steps, seconds=self._seconds
        ):
            return Outcome.FINISHED
        if sums.stop > 0:
            return Outcome.STOPPED
        # The rest may be with a worker that was left out: nothing to do without it.
        is_idle = self._stop_condition.samples_left(num_done + self._ledger.num_claimed) == 0
        return Outcome.REGROUP if sums.regroup > 0 or is_idle else Outcome.GO_ON

    def _progress(self) -> Progress:
        ledger = self._ledger
        return Progress(
            round=self._round,
            generation=self._context.membership.generation,
            epoch=ledger.num_done_ever / ledger.num_samples,
            num_samples=ledger.num_done_ever,
            local_step=self._num_steps,
            seconds=self._seconds,
        )

    def vote(self, **votes: float) -> None:
        """Cast votes with the next header."""
        with self._votes_lock:
            self._cuts_wanted = int(votes.pop("num_cuts", self._cuts_wanted))
            self._votes.update(votes)

    def votes(self) -> dict[str, float]:
        """Return the votes to send; one that comes in later waits for the next round."""
        with self._votes_lock:
            votes, self._votes = self._votes, {}
            if self._cuts_wanted > self.num_cuts:  # ranks hear of it in different rounds
                votes["lr_cut"] = 1.0
        return votes

    def snapshot(self, *, is_kept: bool, local_step: int) -> Snapshot:
        """Return a copy of this rank's center, the same on all ranks."""
        weights, buffers = self._copies.of([self._weights, self._buffers])
        return Snapshot(
            progress=self._progress(),
            is_kept=is_kept,
            weights=weights.numpy(),
            buffers=buffers.numpy(),
            optimizer=self._optimizer_state(),
            ledger=self._ledger.state_dict(with_claims=True),
            num_cuts=self.num_cuts,
            tuning=self._tuning if self._profiler else None,
            non_trainable=self._context.flat.non_trainable.changed(),
        )

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function that readies memory for a copy of the center, in any thread."""
        sizes = sizes_of([self._weights, self._buffers]) if self._context.rank == 0 else []
        return lambda: self._copies.prepare(sizes)

    def _optimizer_state(self) -> dict[str, Any]:
        sizes = [stop - start for start, stop in self._spans]
        return joined_states([center.optimizer_state() for center in self._centers], sizes)

    def catch_up(self, snapshot: Snapshot, *, is_behind: bool) -> torch.Tensor | None:
        """Return the weights that the replica goes on with in the next generation, if others.

        A replica is its worker's own where the rule sends weights. Otherwise it follows the
        center; what it has done since its last exchange it takes along, unless it is counted,
        or given to others. Who is behind and has nothing open may have been counted.
        """
        sends, trained = self._context.method.rule.sends, self._trained
        num_open = len(trained)
        ledger = Ledger.from_state_dict(snapshot.ledger)
        num_kept = trained.num_claimed(ledger.claims_of(self._context.worker_id))
        if sends is Sends.WEIGHTS:
            trained.keep_first(num_kept)
            return None
        center = torch.tensor(snapshot.weights, device=self._weights.device)
        is_same = torch.equal(center, self._weights)
        if sends is Sends.PROGRESS and num_kept == num_open and (num_kept or not is_behind):
            weights = self._context.flat.weights.detach().to(center.device)
            return None if is_same else center.add_(weights - self._weights)
        trained.keep_first(0)
        return center if is_behind or not is_same else None

    def pop_records(self) -> tuple[Record, ...]:
        """Return the records that nobody has taken yet."""
        return self._aggregator.pop_records()

    def allreduce_report(self) -> AllreduceReport | None:
        """Return how the group sums, where it chooses for itself."""
        return self._group.report()

    def choice(self) -> Choice | None:
        """Return the exchange tuning that this generation chose, if it did."""
        return self._choice


def _pieces(layer_sizes: list[int], span: Span) -> list[int]:
    """Return the sizes of the layers' parts within a span."""
    pieces, start = [], 0
    for size in layer_sizes:
        common = min(start + size, span[1]) - max(start, span[0])
        if common > 0:
            pieces.append(common)
        start += size
    return pieces
