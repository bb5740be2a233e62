"""The strategy of synchronous methods: all workers exchange together, and keep center and ledger.

After a failed exchange, the ledger that all continue with says what each worker has claimed. A
worker may have trained less: it left the round early, or was a round behind and never saw those
claims. So the survivors compare claims with the positions that they trained, and share the result
(``TrainedPositions``). The workers measure the first rounds of a generation, and by those
measurements agree on how often to exchange (``ExchangeProfiler``).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raydl.collective.equal_replicas import EqualityCheck
from raydl.collective.steps_by_speed import StepsBySpeed
from raydl.collective.sync_exchange import (
    GatheredExchange,
    Group,
    StagedExchange,
    SyncExchange,
    gather_bytes,
    gather_numbers,
)
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
from raydl.core.exchange import Header, shard_spans, tensor_spans
from raydl.core.lr_schedules import lr_at
from raydl.core.optimizers import make_optimizer
from raydl.core.progress import Progress
from raydl.core.reports import AllreduceReport, Outcome, Record, RecordAggregator
from raydl.core.rules import Moment
from raydl.core.stop_condition import StopCondition, num_evaluations_due
from raydl.core.strategy import Decision, Round, WorkerContext, samples_before
from raydl.data.ledger import Claim, Ledger, RoundShare, Span, share_round
from raydl.data.loader import positions_of
from raydl.methods.conflicts import may_compress
from raydl.metrics import TimeParts


class TrainedPositions:
    """The positions that a worker has trained since its last completed exchange, in order."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []  # (epoch, positions) of each local step

    def __len__(self) -> int:
        return sum(len(positions) for _, positions in self._parts)

    def add(self, epoch: int, positions: np.ndarray) -> None:
        """Record the positions of a local step."""
        self._parts.append((epoch, positions))

    def num_claimed(self, claims: Sequence[tuple[int, Span]]) -> int:
        """Return the length of the common prefix with the worker's claims in a ledger."""
        trained = _pairs(self._parts)
        claimed = _pairs([(epoch, positions_of([span])) for epoch, span in claims])
        length = min(len(trained), len(claimed))
        differs = (trained[:length] != claimed[:length]).any(axis=1)
        return int(differs.argmax()) if differs.any() else length

    def keep_first(self, count: int) -> None:
        """Forget all but the first ``count`` positions."""
        parts, self._parts = self._parts, []
        for epoch, positions in parts:
            first = positions[:count]
            count -= len(first)
            if len(first):
                self.add(epoch, first)


def _pairs(parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return (epoch, position) rows, shape [n, 2]."""
    rows = [np.stack([np.full_like(part, epoch), part], axis=1) for epoch, part in parts]
    return np.concatenate([np.empty((0, 2), np.int64), *rows])


SKIPPED = 2
"""First rounds that are not measured: processes warm up, and connections open."""
COUNTED = 3
"""Rounds that are measured for one choice."""
_CPU = torch.device("cpu")


class ExchangeProfiler:
    """Measures rounds and chooses how often to exchange; see ``raydl/core/autotune.py``.

    All workers call it in the same rounds, and choose by the same numbers.

    Args:
        group: the workers.
        rank: of this worker.
        generation: the membership.
        limits: the choices that the user's settings leave open.
        time_parts: count how long this worker waits.
        device: where the group sums.
        clock: returns monotonic seconds.
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
        self._previous: tuple[float, float] | None = None
        self._is_first, self._is_settled = True, False

    def next(self, now: ExchangeTuning, *, num_steps: int, round: int) -> Choice | None:
        """Record the previous round; return the tuning of the next rounds if it changes, or None.

        Each choice is measured in turn, until none brings a change.

        Args:
            now: the exchange tuning of the previous round.
            num_steps: local steps of that round; a shorter round than the period does not count.
            round: number of the next round.

        Raises:
            ExchangeError: if a worker did not take part in the choice.
        """
        if self._is_settled:
            return None
        at, waited_s = self._clock(), self._parts.as_dict()["device_device_parameters"]
        if self._previous is not None and num_steps == now.period:
            in_round_s, in_waits_s = at - self._previous[0], waited_s - self._previous[1]
            self._rounds.append(((in_round_s - in_waits_s) / num_steps, in_waits_s))
        self._previous = at, waited_s
        if len(self._rounds) < SKIPPED + COUNTED:
            return None
        choice = choose(now, self._measured(round), self._limits, generation=self._generation)
        self._rounds, self._previous, self._is_settled = [], None, choice is None
        self._is_first = False
        return choice

    def skip_round(self) -> None:
        """Do not count the round in progress, in which the workers do something else, too."""
        self._previous = None

    def _measured(self, round: int) -> Measured:
        """Return the step time of the slowest worker, and the shortest waiting time of any."""
        steps, waits = zip(*self._rounds[SKIPPED:], strict=True)
        # At first the minimum: other traffic at the start of a run, above all the samples, ends
        # soon. If the choice changes too little, its own measurement shows that.
        wait_s = min(waits) if self._is_first else statistics.median(waits)
        own = [statistics.median(steps), wait_s]
        with self._parts.measure("device_device_parameters"):
            steps_of_all, waits_of_all = gather_numbers(
                self._group, self._rank, own, round=round, device=self._device
            )
        return Measured(max(steps_of_all), min(waits_of_all), self._group.num_workers)


AnyExchange = SyncExchange | GatheredExchange | StagedExchange


class SyncStrategy:
    """All workers exchange together; each keeps center and ledger, and takes the same decisions.

    Args:
        context: the worker's place in the generation.
        group: the workers of this generation.
        snapshot: the center that they all start from.
        trained: the positions that this worker has trained and not yet exchanged.
    """

    def __init__(
        self, context: WorkerContext, group: Group, snapshot: Snapshot, trained: TrainedPositions
    ) -> None:
        self._context = context
        self._trained = trained
        self._config = context.config
        self._ledger = Ledger.from_state_dict(snapshot.ledger, cuts=context.cuts)
        self._release_claims()
        self._has_compared_claims = False
        # The same on all ranks, unlike a worker's own count: some workers join later than others.
        self._num_steps = snapshot.progress.local_step
        self._stop_condition = StopCondition.of(
            context.config.training, epoch_samples=self._ledger.num_samples
        )
        self._seconds = snapshot.progress.seconds
        self._num_bytes = snapshot.progress.num_bytes
        self._num_messages = snapshot.progress.num_messages
        self._round = self.version = snapshot.progress.round
        """Number of rounds completed since the run began. ``version`` rises after the round's
        record is made, so that a report with the round has its record, too."""
        self._sent_feedback: dict[Span, dict[str, torch.Tensor]] = {}
        """The residuals after the messages of a failed round, by span."""
        self._aggregator = RecordAggregator()
        self.equality = self._make_equality_check()
        self._group = group
        self._votes: dict[str, float] = {}
        self.num_cuts = snapshot.num_cuts
        """How often the learning rate was cut; the same on all ranks."""
        self._cuts_wanted = 0
        self._votes_lock = threading.Lock()
        self._lr = 0.0
        self.step_s = 0.0
        """This worker's seconds per local step in its newest round, without waiting; 0: unknown."""
        self._round_steps = 0
        """Local steps of the round; with steps by speed, those of the fastest worker."""
        self._steps_of_all = 0
        """Local steps of the round, of all ranks together."""
        self._share_of_round = 1.0
        """Share of a whole round that the round has; see ``raydl.core.rules.Now``."""
        self._samples_before: list[float] = []
        self._tuning, self.choice = self._first_tuning(snapshot.tuning)
        """The exchange tuning, and its choice by this or an earlier generation, or None."""
        self._profiler = self._make_profiler() if context.method.finds_tuning else None
        self._steps_by_speed = (
            self._make_steps_by_speed() if context.method.steps_by_speed else None
        )
        self._weights = torch.tensor(snapshot.weights, device=context.center_device())
        self._buffers = torch.tensor(snapshot.buffers, device=context.center_device())
        self._copies = CopyBuffers()
        self._make_centers(snapshot.optimizer)
        self._make_exchanges()

    def _first_tuning(self, chosen: ExchangeTuning | None) -> tuple[ExchangeTuning, Choice | None]:
        """Return the user's exchange tuning, or the one that earlier workers chose."""
        context, method = self._context, self._context.method
        users = ExchangeTuning(method.period, method.delay, method.compression, method.fragments)
        # A resumed run may have a fixed period now, and then ignores the choice.
        if chosen is None or chosen == users or not context.method.finds_tuning:
            return users, None
        members = context.membership
        tuning = carried_over(chosen, users.compression, members.num_workers)
        return tuning, Choice(members.generation, tuning, TAKEN_OVER)

    def _make_profiler(self) -> ExchangeProfiler:
        context = self._context
        return ExchangeProfiler(
            self._group,
            context.rank,
            generation=context.membership.generation,
            limits=Limits(
                overlap=context.method.overlap and context.method.rule.ahead,
                may_compress=context.flat.weights.dtype == torch.float32
                and may_compress(self._config, context.method),
                max_fragments=context.flat.weights.numel(),
            ),
            time_parts=context.time_parts,
            device=context.center_device(),
        )

    def _make_equality_check(self) -> EqualityCheck:
        """Return the comparison of the replicas; without local steps they are equal by design."""
        members, size = self._context.membership, self._config.method.group_size
        workers = members.worker_ids if self._context.method.has_local_steps else ()
        replicas = [workers[start : start + size] for start in range(0, len(workers), size)]
        return EqualityCheck(replicas, generation=members.generation)

    def _make_steps_by_speed(self) -> StepsBySpeed:
        context = self._context
        return StepsBySpeed(
            self._group,
            context.rank,
            period=context.method.period,
            time_parts=context.time_parts,
            device=context.center_device(),
        )

    def _make_exchanges(self) -> None:
        self.exchanges: tuple[AnyExchange, ...] = tuple(
            self._make_exchange(center, span)
            for center, span in zip(self._centers, self._spans, strict=True)
        )

    @property
    def _exchange_bytes(self) -> int:
        """Bytes of this rank's newest message of each exchange."""
        return sum(exchange.num_bytes for exchange in self.exchanges)

    def _release_claims(self) -> None:
        """Free the claims of lost workers.

        The remaining workers complete their claims with their next exchange, unless the rule sends
        gradients: one that was not summed is dropped. They keep their reservations.
        """
        membership = self._context.membership
        remaining = (*membership.worker_ids, *membership.absent)
        is_kept = self._context.method.has_local_steps
        self._ledger.release(keep=remaining if is_kept else (), members=remaining)

    def _make_centers(self, optimizer: dict[str, Any]) -> None:
        method = self._context.method
        num_fragments = self._tuning.fragments
        self._spans = (
            tensor_spans(self._context.flat.layer_sizes, num_fragments)
            if method.rule.whole_tensors
            else shard_spans(self._weights.numel(), num_fragments)
        )
        self._context.redistribute_residuals(self._spans)
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
                    method.inner, method.own_optimizer, self._context.flat
                ),
            )
            center.load_optimizer(state)
            self._centers.append(center)

    def _make_exchange(self, center: Center, span: Span) -> AnyExchange:
        settings, context = self._config.exchange, self._context
        group_size = self._config.method.group_size
        exchange: SyncExchange | GatheredExchange
        compression = self._tuning.compression
        if compression != "none" or not context.method.rule.sums:
            exchange = GatheredExchange(
                self._group,
                center,
                span=slice(*span),
                round=self._round,
                feedback=context.feedback_of(span, compression),
                group_size=group_size,
                share_of_round=lambda: self._share_of_round,
            )
        else:
            exchange = SyncExchange(
                self._group,
                center,
                span=slice(*span),
                round=self._round,
                pieces=None
                if settings.packed
                else _pieces(context.flat.layer_sizes, span) * len(context.method.rule.lanes),
                feedback=context.feedback_of(span, compression)
                if context.method.leaves_out
                else None,
                group_size=group_size,
                share_of_round=lambda: self._share_of_round,
            )
        device = context.flat.weights.device
        if settings.resident and context.center_device() == device:
            return exchange
        return StagedExchange(exchange, device, context.time_parts)

    @property
    def ledger_round(self) -> int:
        """The round up to which this rank knows the ledger: every round."""
        return self.version

    @property
    def num_changes(self) -> int:
        """Number of changes of the ledger."""
        return self._ledger.num_changes

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers)."""
        return self._context.rank, self._context.membership.num_workers

    @property
    def generation(self) -> int:
        """The generation that this worker has entered."""
        return self._context.membership.generation

    def next_round(self, local_step: int) -> Round:
        """Claim the samples of the next round for all ranks.

        Raises:
            ExchangeError: if a worker did not answer; the ledger has not changed.
        """
        if len(self._centers) > 1:  # fragments commit one by one, so a failed round needs an undo
            self._kept_feedback = {s: f.state_dict() for s, f in self._context.feedback.items()}
            for center in self._centers:
                center.keep()
        if not self._has_compared_claims:
            self._free_untrained_claims()
            self._has_compared_claims = True
        if self._steps_by_speed is not None:
            self._steps_by_speed.update(self.step_s, round=self._round)
        with self._context.time_parts.measure("data_io"):
            return self._claim()

    def find_tuning(self) -> None:
        """Let the workers choose how to exchange from now on, if a choice is due.

        Raises:
            ExchangeError: if a worker did not take part in the choice; nothing has changed.
        """
        if self._profiler is None:
            return
        choice = self._profiler.next(self._tuning, num_steps=self._round_steps, round=self._round)
        if choice is not None:  # the same on all ranks; no exchange spans two rounds
            state = self._optimizer_state()
            self.choice, self._tuning = choice, choice.tuning
            self._make_centers(state)
            self._make_exchanges()

    def undo_round(self) -> None:
        """Undo the fragments that a failed round has committed."""
        feedback = self._context.feedback
        self._sent_feedback = {span: f.sent_state_dict() for span, f in feedback.items()}
        if len(self._centers) > 1:
            for center in self._centers:
                center.undo_()
            for span, state in self._kept_feedback.items():
                feedback[span].load_state_dict(state)

    def _free_untrained_claims(self) -> None:
        """Share how much of its open claims each rank has trained; free the rest.

        A worker that left its round early, or was a round behind, has not trained all its claims,
        and no other worker knows.

        Raises:
            ExchangeError: if a worker did not answer; the ledger has not changed.
        """
        members = self._context.membership.worker_ids
        if not set(members) & set(self._ledger.claimants):
            return
        own = self._trained.num_claimed(self._ledger.claims_of(self._context.worker_id))
        with self._context.time_parts.measure("device_device_parameters"):
            [counts] = gather_numbers(
                self._group, self._context.rank, [own], round=self._round,
                device=self._weights.device,
            )  # fmt: skip
        for worker_id, count in zip(members, counts, strict=True):
            self._ledger.give_back(worker_id, keep=int(count))

    def _claim(self) -> Round:
        """Claim the samples of a whole period, from as many epochs as needed."""
        whole_round = self._steps_of_whole_round()
        left = self._stop_condition.steps_left(self._num_steps)
        left_steps = [count if left is None else min(left, count) for count in whole_round]
        trained = self._steps_kept()
        claims: list[Claim] = []
        by_all: list[tuple[int, int]] = []
        self._steps_of_all = 0
        while any(left_steps):
            num_free = self._ledger.num_free
            left = self._stop_condition.samples_left(
                self._ledger.num_done_ever + self._ledger.num_claimed
            )
            num_free = num_free if left is None else min(left, num_free)
            if by_all and not num_free:  # the end of the run
                break
            claim, share = self._claim_in_epoch(num_free, left_steps)
            if claim.num_steps:
                claims.append(claim)
            by_all.append((sum(share.counts), max(share.num_steps)))
            for rank, count in enumerate(share.counts):  # a step without samples trains nothing
                trained[rank] += min(count, share.num_steps[rank])
            left_steps = [a - b for a, b in zip(left_steps, share.num_steps, strict=True)]
            self._steps_of_all += sum(share.num_steps)
        self._samples_before = samples_before(by_all)
        self._round_steps = len(self._samples_before)
        size = self._config.method.group_size
        self._share_of_round = share_of_round(trained, whole_round, group_size=size)
        ahead = self._ledger.reserved_by(self._context.worker_id)
        return Round(claims, self._tuning.delay, ahead)

    def _steps_of_whole_round(self) -> list[int]:
        """Return the local steps of each rank in a whole round."""
        if self._steps_by_speed is not None:
            return list(self._steps_by_speed.steps)
        return [self._period()] * self._context.membership.num_workers

    def _period(self) -> int:
        """Return the period of the round, the same on all ranks."""
        rule, num_workers = self._context.method.rule, self._context.membership.num_workers
        if not rule.varies_period:
            return self._tuning.period
        optimizer = self._context.method.optimizer
        share_done = self._stop_condition.share_done(
            num_samples=self._ledger.num_done_ever,
            num_steps=self._num_steps,
            seconds=self._seconds,
            num_bytes=self._num_bytes,
        )
        moment = Moment(
            self._tuning.period,
            lr=lr_at(optimizer, share_done, num_cuts=self.num_cuts),
            peak_lr=optimizer.lr or 0.0,
            is_warming_up=share_done < optimizer.warmup,
            num_workers=num_workers,
        )
        return rule.checked_period(moment)

    def _steps_kept(self) -> list[int]:
        """Return the local steps of each rank whose exchange failed, which the next one sends."""
        batch_size = self._config.training.batch_size
        members = self._context.membership.worker_ids
        return [-(-self._ledger.num_claimed_by(worker) // batch_size) for worker in members]

    def _claim_in_epoch(self, num_free: int, max_steps: Sequence[int]) -> tuple[Claim, RoundShare]:
        """Claim for all ranks; return this rank's claim, and the share of each rank."""
        members = self._context.membership.worker_ids
        share = share_round(
            num_free, max_steps=max_steps, batch_size=self._config.training.batch_size
        )
        is_skewed = self._config.input.skew is not None
        claims = {
            worker: self._ledger.claim(worker, count, share=rank if is_skewed else None)
            for rank, (worker, count) in enumerate(zip(members, share.counts, strict=True))
        }
        own = share.num_steps[self._context.rank]
        return Claim(*claims[self._context.worker_id], own), share

    def share_done(self, step: int, local_step: int) -> float:
        """Return the completed share of the run, 0..1; the same on all ranks.

        With steps by speed it is that of the first step of the round: the centers of all ranks step
        with the same learning rate, but the ranks count different steps.
        """
        step = 0 if self._steps_by_speed is not None else step
        return self._stop_condition.share_done(
            num_samples=self._ledger.num_done_ever + self._samples_before[step],
            num_steps=self._num_steps + step,
            seconds=self._seconds,
            num_bytes=self._num_bytes,
        )

    def begin_step(self, step: int, lr: float) -> None:
        """Set the learning rate of this rank's center."""
        self._lr = lr
        for center in self._centers:
            center.set_lr(lr)

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Complete the round for all ranks, and decide by the sums that all ranks have."""
        p = self._context.membership.num_workers
        epoch = self._ledger.epoch
        num_due = num_evaluations_due(self._config.evaluation, self._ledger)
        for worker in self._context.membership.worker_ids:
            self._ledger.complete(worker)
        self._round += 1
        self._num_steps += self._round_steps
        if self._round_steps:  # else nothing was exchanged, and there are no sums
            self._seconds = sums.elapsed_s / p  # the mean of all clocks: the same on all ranks
            self._count_sent()
            self.equality.note(sums.equality, round=self._round)
        self.num_cuts += sums.lr_cut > 0
        outcome = self._outcome(sums)
        is_over = outcome is not Outcome.GO_ON
        is_new_epoch = self._ledger.epoch > epoch
        self._aggregator.add(sums, num_messages=p, num_steps=self._steps_of_all)
        self._aggregator.record(
            self._progress(),
            num_workers=p,
            lr=self._lr,
            exchange_bytes=self._exchange_bytes,
            at_once=is_new_epoch or is_over,
        )
        self.version = self._round
        keeps = sums.checkpoint > 0 or outcome in (Outcome.STOPPED, Outcome.FINISHED)
        evaluates = num_evaluations_due(self._config.evaluation, self._ledger) > num_due
        return Decision(
            outcome,
            keep=self._round if keeps else None,
            publishes=self._context.rank == 0 and (keeps or evaluates or is_over),
            is_score_due=self._is_score_due(outcome, evaluates=evaluates, votes=sums.score),
        )

    def _count_sent(self) -> None:
        """Count what all ranks have sent for the round; the same on all ranks."""
        p, size = self._context.membership.num_workers, self._config.method.group_size
        is_gathered = self._tuning.compression != "none" or not self._context.method.rule.sums
        self._num_bytes += bytes_of_all(self._exchange_bytes, p, is_gathered=is_gathered)
        self._num_messages += p * len(self.exchanges)
        if size > 1:  # each replica sums its gradients in every step
            num_sums = self._round_steps * (p // size)
            gradients = self._context.flat.weights.nbytes
            self._num_bytes += num_sums * bytes_of_all(gradients, size, is_gathered=False)
            self._num_messages += num_sums * size

    def _is_score_due(self, outcome: Outcome, *, evaluates: bool, votes: float) -> bool:
        """Whether the workers score the center now.

        Not before they regroup or obey a signal: the node of one of them may end soon.
        """
        if not self._config.evaluation.is_by_workers:
            return False
        match outcome:
            case Outcome.GO_ON:
                return evaluates
            case Outcome.STOPPED:
                return votes > 0
            case _:
                return outcome is Outcome.FINISHED

    def begin_score(self) -> None:
        """Note that the workers pause to score the center; the round in progress is no measure."""
        if self._profiler is not None:
            self._profiler.skip_round()

    def raise_if_abandoned(self) -> None:
        """Raise an ExchangeError if this worker is to leave its generation at once."""
        self._group.raise_if_abandoned(round=self._round)

    def gather(self, own: bytes) -> list[bytes]:
        """Return some bytes of each rank, by rank, between two rounds.

        Raises:
            ExchangeError: if a worker did not answer.
        """
        return gather_bytes(
            self._group, self._context.rank, own, round=self._round, device=self._weights.device
        )

    def _outcome(self, sums: Header) -> Outcome:
        num_done = self._ledger.num_done_ever
        if self._stop_condition.is_reached(
            num_samples=num_done,
            num_steps=self._num_steps,
            seconds=self._seconds,
            num_bytes=self._num_bytes,
        ):
            return Outcome.FINISHED
        if sums.stop > 0:
            return Outcome.STOPPED
        # A worker that was left out may hold the rest: there is nothing to do without it.
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
            num_bytes=self._num_bytes,
            num_messages=self._num_messages,
        )

    def equality_number(self, numbers: Sequence[float] | None) -> float:
        """Return what this worker sends so that equal replicas are found.

        Args:
            numbers: of its replica; None: it has taken no step that could differ from others'.
        """
        return self.equality.number_of(self._context.worker_id, numbers, round=self._round)

    def vote(self, **votes: float) -> None:
        """Send votes with the next header."""
        with self._votes_lock:
            self._cuts_wanted = int(votes.pop("num_cuts", self._cuts_wanted))
            self._votes.update(votes)

    def votes(self) -> dict[str, float]:
        """Return the votes to send; a later vote waits for the next round."""
        with self._votes_lock:
            votes, self._votes = self._votes, {}
            if self._cuts_wanted > self.num_cuts:  # ranks receive it in different rounds
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
        """Return a function, for any thread, that prepares memory for a copy of the center."""
        sizes = sizes_of([self._weights, self._buffers]) if self._context.rank == 0 else []
        return lambda: self._copies.prepare(sizes)

    def _optimizer_state(self) -> dict[str, Any]:
        sizes = [stop - start for start, stop in self._spans]
        return joined_states([center.optimizer_state() for center in self._centers], sizes)

    def catch_up(
        self, snapshot: Snapshot, *, is_behind: bool, unsent: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the replica's weights for the next generation, or None if they do not change.

        If messages are composed ahead, the replica keeps its own. Otherwise it follows the center,
        plus its progress since its last exchange: unless that progress is already counted, or its
        samples went to other workers. For a worker that is behind and has no open positions, it may
        be counted.

        If the others completed the round whose last sum this worker missed, they have its messages:
        the residuals of its codecs are those after these messages, and only its progress since
        then, ``unsent``, is not counted.
        """
        method, trained, newest = self._context.method, self._trained, snapshot.progress
        if newest.generation == self.generation and newest.round > self._round:
            for span, state in self._sent_feedback.items():
                self._context.feedback[span].load_state_dict(state)
            if unsent is not None:
                trained.keep_first(0)
                return torch.tensor(snapshot.weights, device=unsent.device).add_(unsent)
        num_open = len(trained)
        ledger = Ledger.from_state_dict(snapshot.ledger)
        num_kept = trained.num_claimed(ledger.claims_of(self._context.worker_id))
        if method.rule.ahead:
            trained.keep_first(num_kept)
            return None
        center = torch.tensor(snapshot.weights, device=self._weights.device)
        is_same = torch.equal(center, self._weights)
        if method.has_local_steps and num_kept == num_open and (num_kept or not is_behind):
            weights = self._context.flat.weights.detach().to(center.device)
            return None if is_same else center.add_(weights - self._weights)
        trained.keep_first(0)
        return center if is_behind or not is_same else None

    def pop_records(self) -> tuple[Record, ...]:
        """Remove and return the new records."""
        return self._aggregator.pop_records()

    def allreduce_report(self) -> AllreduceReport | None:
        """Return how the group sums large messages, or None if it does not choose."""
        return self._group.report()


def bytes_of_all(num_bytes: int, num_workers: int, *, is_gathered: bool) -> int:
    """Return the bytes that all ranks together send for one exchange.

    A sum takes at least 2 (p - 1) messages: p - 1 to add them, p - 1 to spread the result. An
    all-reduce that sends more, to take fewer turns, counts the same. If messages are gathered, each
    goes to p - 1 others.

    Args:
        num_bytes: of the message of one rank.
        num_workers: number of ranks p.
        is_gathered: whether each rank receives all messages, as compressed ones.
    """
    return (num_workers if is_gathered else 2) * (num_workers - 1) * num_bytes


def share_of_round(trained: Sequence[int], whole: Sequence[int], *, group_size: int = 1) -> float:
    """Return the local steps of a round / those of a whole round, at most 1.

    Workers that share a replica take their steps together.

    Args:
        trained: local steps with samples, by rank.
        whole: local steps of a whole round, by rank.
        group_size: number of workers that share one replica.
    """
    replicas = range(0, len(whole), group_size)
    taken = sum(max(trained[rank : rank + group_size]) for rank in replicas)
    return min(1.0, taken / sum(whole[rank] for rank in replicas))


def _pieces(layer_sizes: list[int], span: Span) -> list[int]:
    """Return the size of each layer's part of a span."""
    pieces, start = [], 0
    for size in layer_sizes:
        common = min(start + size, span[1]) - max(start, span[0])
        if common > 0:
            pieces.append(common)
        start += size
    return pieces
