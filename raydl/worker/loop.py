"""The loop of one worker, in rounds: get samples, take local steps, exchange, go on.

No Ray here: an actor drives it in a cluster, the trainer drives it in one process, and a
test drives several in threads. When to talk, and what follows a round, its schedule says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from raydl.collective.exchange import GradientGroup, Group
from raydl.collective.strategy import SyncStrategy, Trained
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback, parse_codec
from raydl.core.copies import Copies, sizes_of
from raydl.core.exchange import Header, StepPlan
from raydl.core.job import BeforeStep, Job, first_model
from raydl.core.membership import Membership
from raydl.core.optimizers import lr_at, make_optimizer
from raydl.core.replica import Replica, Stepped
from raydl.core.reports import Losses, Outcome, Record, WorkerReport
from raydl.core.rules import Sends
from raydl.core.saved_state import pack
from raydl.core.strategy import Round, Strategy, WorkerContext, plan_round
from raydl.core.tensor_files import TensorFile
from raydl.core.untrained import Untrained
from raydl.data import Batches
from raydl.data.generators import generators_state, load_generators, seed_generators
from raydl.data.ledger import Span
from raydl.data.loader import Feed
from raydl.errors import ExchangeError, NonFiniteCenterError, NonFiniteError, StateLostError
from raydl.metrics import TimeParts
from raydl.parameter_server.protocol import CenterClient
from raydl.parameter_server.strategy import AsyncStrategy

LAST = -1
"""In place of a round: the state of a worker that has left its loop for good."""


class Worker:
    """One replica and its way through the epochs.

    Args:
        job: what all workers share.
        worker_id: the stable id, ``w0``, ``w1``, …
        batches: the training set.
        publish: takes a committed snapshot of the center to where it is served.
        incarnation: which life of this worker.
        before_step: is called before each local step.
        untrained: the untrained state of the run's first model; None: it is as the model is built.
    """

    def __init__(
        self,
        job: Job,
        worker_id: str,
        *,
        batches: Batches,
        publish: Callable[[Snapshot], object],
        incarnation: int = 0,
        before_step: BeforeStep | None = None,
        untrained: Untrained | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._device = torch.device(job.config.scaling.device)
        self.parts = TimeParts.on(self._device)
        self._job = job
        self._publish = publish
        self._incarnation = incarnation
        self._before_step = before_step
        self._method = job.method
        self._feed = Feed(batches, job.order, device=self._device, time_parts=self.parts)
        with self.parts.measure("initialization"):
            flat = first_model(job, untrained, device=job.config.scaling.device)
            model = flat.model
            self.replica = Replica(
                flat,
                job.task,
                rule=self._method.rule,
                make_optimizer=make_optimizer(job.method.inner, job.method.own_optimizer, model),
                training=job.config.training,
                time_parts=self.parts,
                has_dynamic_weights=job.config.method.dynamic_weights,
                needs_all_gradients=self._method.needs_all_gradients,
                who=lambda: (self.worker_id, self.local_step),
            )
        self.local_step = self._generation = 0
        self._early_votes: dict[int, dict[str, float]] = {}
        self._lock = threading.Lock()
        self._losses = Losses(worker_id)
        self._step_s = self._waited_s = self._round_s = 0.0
        self._is_behind = False
        self._trained = Trained()
        self._seconds_at = (0.0, 0.0)
        self._records: tuple[Record, ...] = ()
        self._kept: dict[int, dict[str, Any]] = {}
        self._held: dict[int, TensorFile] = {}
        self._copies = Copies()
        self._strategy: Strategy | None = None
        self._feedback: dict[Span, ErrorFeedback] = {}
        self._first_untrained = untrained or {}
        self._untrained_then = self._first_untrained  # with the newest generation's snapshot
        self._is_spoiled = False

    # joining and leaving a generation

    def join(
        self,
        membership: Membership,
        transport: Group | CenterClient,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None = None,
        partners: Group | None = None,
    ) -> None:
        """Enter a generation.

        Args:
            membership: who trains.
            road: connects this worker with the others, or with the center.
            snapshot: the center they all start from.
            own_state: what this worker kept in a checkpoint, or another one handed over; its
                tensors are this worker's from here on. None: nothing, or it is in memory.
            partners: connects the workers that share this one's replica, if any do.
        """
        with self.parts.measure("initialization"):
            if self._strategy is None:
                self._start_from(snapshot, own_state)
            else:
                self._go_on_from(snapshot, self._strategy)
                with self._lock:
                    self._records += self._strategy.take_records()
            context = WorkerContext(
                config=self._job.config,
                method=self._method,
                membership=membership,
                worker_id=self.worker_id,
                flat=self.replica.flat,
                time_parts=self.parts,
                cuts=self._job.order.cuts,
                feedback=self._feedback,
            )
            strategy = self._make_strategy(context, transport, snapshot)
            self._untrained_then = {**self._first_untrained, **snapshot.untrained}
            with self._lock:
                self._generation, self._strategy = membership.generation, strategy
                strategy.vote(**self._early_votes.pop(membership.generation, {}))
                now = membership.generation  # votes for generations that it was not in are void
                self._early_votes = {g: v for g, v in self._early_votes.items() if g > now}
            self._seconds_at = (snapshot.seconds, time.monotonic())
            self._join_partners(partners, context)

    def _join_partners(self, group: Group | None, context: WorkerContext) -> None:
        """Share the replica of the group's first worker."""
        self.replica.partners = None
        if group is None:
            return
        weights, layers = context.flat.weights, context.flat.layer_sizes
        partners = GradientGroup(
            group, weights.numel(), len(layers), dtype=weights.dtype, device=context.center_device()
        )
        is_first = context.rank % self._job.config.method.group_size == 0
        try:
            is_other = self.replica.copy_first_(partners, is_first=is_first)
        except ExchangeError:
            self._is_behind = True
            raise
        if is_other:  # what this worker did by itself is gone
            self._trained.keep_first(0)
        self.replica.partners = partners

    def _make_strategy(
        self, context: WorkerContext, transport: Any, snapshot: Snapshot
    ) -> Strategy:
        if self._method.is_sync:
            return SyncStrategy(context, transport, snapshot, self._trained)
        if self._method.rule.sends is not Sends.WEIGHTS:
            # The center went on while this worker was away; it measures its progress from
            # where the center is now.
            self._become(snapshot)
        return AsyncStrategy(
            context, transport, snapshot, incarnation=self._incarnation, local_step=self.local_step
        )

    def _start_from(self, snapshot: Snapshot, own_state: dict[str, Any] | None) -> None:
        self.local_step = snapshot.local_step
        self._become(snapshot)
        self.replica.flat.untrained.load(snapshot.untrained)
        if not own_state:  # or one that was spoiled, of which nothing is kept
            seed_generators(self._job.config.training.seed, self.worker_id)
        else:
            by = snapshot.tuning or self._job.config.exchange
            self._load_state(own_state, by.compression)
            is_old = own_state.get("round", snapshot.round) != snapshot.round
            has_open = own_state.get("num_trained", 0) > 0  # free again in a checkpoint's ledger
            if (is_old or has_open) and self._method.rule.sends is not Sends.WEIGHTS:
                self._become(snapshot)  # it follows the center, which has gone on

    def _go_on_from(self, snapshot: Snapshot, before: Strategy) -> None:
        """Go on after another generation, which may have ended with a failed exchange."""
        if self._is_spoiled:
            self._start_over(snapshot)
            self._is_spoiled = self._is_behind = False
            return
        weights = before.catch_up(snapshot, is_behind=self._is_behind)
        if weights is not None:
            buffers = torch.tensor(snapshot.buffers, device=self._device)
            self.replica.become(weights.to(self._device), buffers)
        self._is_behind = False

    def _become(self, snapshot: Snapshot) -> None:
        device = self._device
        self.replica.become(
            torch.tensor(snapshot.weights, device=device),
            torch.tensor(snapshot.buffers, device=device),
        )

    # one round

    def run_round(self) -> Outcome:
        """Take the local steps up to the next exchange, exchange, and return what follows.

        Whatever it raises, the center is as before the round, and this worker may join the next
        generation.

        Raises:
            ExchangeError: the exchange failed.
            NonFiniteError: the replica diverged; it has become the center again.
        """
        strategy = self._strategy
        assert strategy is not None, "join comes first"
        strategy.find_tuning()  # should it fail, there is nothing of this round to undo
        if self._method.is_sync and len(strategy.exchanges) > 1:  # they arrive one by one
            self.replica.keep()
        try:
            sums = self._exchange_once(strategy)
            decision = strategy.settle(sums, self.local_step)
        except Exception as error:
            strategy.undo_round()
            self.replica.undo_()
            self._is_behind = True
            if isinstance(error, NonFiniteError):
                self._roll_back(strategy)
            raise
        self._trained.keep_first(0)
        keep = decision.keep
        if keep is not None:
            state = self._state_dict()
            with self._lock:
                self._kept[keep] = state
        if decision.publishes:
            self._publish_center(strategy, is_kept=keep is not None)
        return decision.outcome

    def _publish_center(self, strategy: Strategy, *, is_kept: bool) -> None:
        with self.parts.measure("host_device_parameters"):
            snapshot = strategy.snapshot(is_kept=is_kept, local_step=self.local_step)
        if not snapshot.is_finite():
            self._is_spoiled = True
            raise NonFiniteCenterError(snapshot.round)
        self._publish(snapshot)

    def _roll_back(self, strategy: Strategy) -> None:
        """Let a replica that has diverged start over at the center.

        Raises:
            NonFiniteCenterError: that has diverged, too; the replica starts over where all do next.
        """
        center = strategy.snapshot(is_kept=False, local_step=self.local_step)
        if not center.is_finite():
            self._is_spoiled = True
            raise NonFiniteCenterError(center.round)
        self._start_over(center)

    def _start_over(self, center: Snapshot) -> None:
        """Let the replica begin again at a center; its samples become free again."""
        device = self._device
        self.replica.start_over(
            torch.tensor(center.weights, device=device), torch.tensor(center.buffers, device=device)
        )
        self.replica.flat.untrained.load(self._untrained_then)
        self._trained.keep_first(0)
        self._losses = Losses(self.worker_id)
        self._feedback.clear()

    def _exchange_once(self, strategy: Strategy) -> Header:
        """Take a round's local steps; return the header sums of its last exchange."""
        began, waited_s = time.perf_counter(), self._waited()
        round = strategy.next_round(self.local_step)
        start, waited_for_turn_s = time.perf_counter(), self._waited() - waited_s
        sums = self._take_steps(strategy, round)
        self._losses.read()
        if round.num_steps:
            self._waited_s = self._waited() - waited_s
            in_steps_s = time.perf_counter() - start - (self._waited_s - waited_for_turn_s)
            self._step_s = max(0.0, in_steps_s) / round.num_steps
            self._round_s = time.perf_counter() - began
        return sums

    def _waited(self) -> float:
        """Return the seconds that this worker waited for exchanges so far."""
        return self.parts.as_dict()["device_device_parameters"]

    def _take_steps(self, strategy: Strategy, round: Round) -> Header:
        sums = Header()
        if not round.num_steps:  # the center has no work for this worker
            return sums
        plan = plan_round(round.num_steps, fragments=len(strategy.exchanges), delay=round.delay)
        steps = round.steps()
        self._feed.expect(steps, round.ahead)
        for step, (epoch, positions) in enumerate(steps):
            self._notice_step(strategy)
            self._begin_step(strategy, step)
            step_plan = self._step_plan(strategy, *plan[step])
            loss, arrived = self._step(step_plan, epoch, positions)
            sums = arrived or sums
            self._losses.add(self.local_step - 1, self._feed.num_in_batch, loss)
        return sums

    def _step(self, step_plan: StepPlan, epoch: int, positions: np.ndarray) -> Stepped:
        """Take one local step, and count it even if its exchange fails."""
        batch = self._feed.batch(epoch, positions)
        num_steps = self.replica.num_steps
        try:
            return self.replica.step(batch, step_plan)
        finally:
            if self.replica.num_steps > num_steps:
                self._trained.add(epoch, positions)
                self.local_step += 1

    def _notice_step(self, strategy: Strategy) -> None:
        if self._before_step is not None:
            rank, num_workers = strategy.place
            self._before_step(
                self.worker_id,
                rank=rank,
                num_workers=num_workers,
                local_step=self.local_step,
                round=strategy.version,
                seconds=self._elapsed_s(),
            )

    def _step_plan(self, strategy: Strategy, begin: list[int], join: list[int]) -> StepPlan:
        return StepPlan.around(
            strategy.exchanges,
            begin,
            join,
            make_header=lambda: self._make_header(strategy),
            overlap=self._method.overlap,
        )

    def _begin_step(self, strategy: Strategy, step: int) -> None:
        """Set the learning rate for a step of this round, counted from 0."""
        share_done = strategy.share_done(step, self.local_step)
        lr = lr_at(self._method.optimizer, share_done, num_cuts=strategy.num_cuts)
        self.replica.set_lr(lr)
        strategy.begin_step(step, lr)

    def _make_header(self, strategy: Strategy) -> Header:
        return Header(
            **self._losses.pop_state(),
            distance=self.replica.distance_squared,
            step_s=self._step_s,
            waited_s=self._waited_s,
            elapsed_s=self._elapsed_s(),
            **strategy.votes(),
        )

    def _elapsed_s(self) -> float:
        """Return the seconds of training so far, by this worker's clock."""
        seconds_before, since = self._seconds_at
        return seconds_before + time.monotonic() - since

    @property
    def round(self) -> int:
        """Rounds completed since the run began, or exchanges that the center has settled."""
        return self._strategy.version if self._strategy else 0

    @property
    def copy_age(self) -> tuple[int, int]:
        """(Rounds, changes of the ledger) that its copy of the center has seen; -1: it has none.

        One with values that are not finite is none. Not while it trains.
        """
        if self._strategy is not None and not self.center().is_finite():
            self._is_spoiled = True
            return -1, 0
        return (self.round, self._strategy.num_changes) if self._strategy else (-1, 0)

    @property
    def copy_generation(self) -> int:
        """The generation that made its copy of the center; 0: the center itself made it."""
        return self._generation if self._strategy and self._method.is_sync else 0

    @property
    def ledger_round(self) -> int:
        """The round up to which it knows the ledger; -1: it has no copy of the center."""
        return self._strategy.ledger_round if self._strategy else -1

    # what others ask for

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all ranks to ``stop``, ``regroup`` or keep a ``checkpoint`` after a round.

        A vote counts in its generation alone. It may come before the worker has joined that
        one, since it takes another road than the order to join; one for a generation that
        has passed is ignored.
        """
        with self._lock:
            if self._strategy is not None and generation == self._generation:
                self._strategy.vote(**votes)
            elif generation > self._generation:
                self._early_votes.setdefault(generation, {}).update(votes)

    def report(self) -> WorkerReport:
        """Return all that is new since the last report."""
        version = self.round
        with self._lock:
            kept = tuple(self._kept)
            records, self._records = self._records, ()
        if self._strategy is not None:
            records += self._strategy.take_records()
        return WorkerReport(
            worker_id=self.worker_id,
            round=version,
            records=records,
            kept=kept,
            time_parts=self.parts.as_dict(),
            generation=self._generation,
            local_step=self.local_step,
            step_s=self._step_s,
            waited_s=self._waited_s,
            round_s=self._round_s,
            waiting_s=self.parts.since("device_device_parameters"),
            allreduce=self._strategy.allreduce_report() if self._strategy else None,
            choice=self._strategy.choice() if self._strategy else None,
            left_out=self._feed.left_out,
            told_s=time.monotonic(),
            cpu_s=time.process_time(),
        )

    def center(self) -> Snapshot:
        """Return this worker's copy of the center, to go on from. Not while it trains."""
        assert self._strategy, "join comes first"
        return self._strategy.snapshot(is_kept=False, local_step=self.local_step)

    def take_kept(self, round: int) -> dict[str, Any]:
        """Hand over the state kept at that round; older ones are dropped with it.

        A worker that has left its loop stays as it is, so without a kept state it hands over
        what it has.
        """
        with self._lock:
            state = self._kept.pop(round, None)
            self._kept = {r: s for r, s in self._kept.items() if r > round}
        if state is None and self._is_spoiled:
            return {}
        return self._state_dict() if state is None else state

    def hold_last(self) -> None:
        """Hold the state of a worker that has left its loop for good, without a copy of it.

        One that was spoiled has none: what is held is empty.
        """
        held = pack({} if self._is_spoiled else self._state_dict(_as_it_is))
        with self._lock:
            self._held[LAST] = held

    def hold_kept(self, round: int) -> None:
        """Hold the state kept at that round, as ``take_kept`` finds it, to be written.

        It is held until ``release``, or until two newer ones are: that of the last round may be
        wanted while the one before it is being written.
        """
        held = pack(self.take_kept(round))
        with self._lock:
            self._held.pop(round, None)
            self._held[round] = held
            for old in [r for r in self._held if r != LAST][:-2]:
                del self._held[old]

    def held(self, round: int) -> TensorFile:
        """Return the state that is held of a round, as a file.

        Raises:
            StateLostError: it is not held any more.
        """
        with self._lock:
            held = self._held.get(round)
        if held is None:
            raise StateLostError(self.worker_id, f"that of round {round} is not held any more")
        return held

    def release(self, round: int) -> None:
        """Hold the state of a round no more: it is written, or will not be."""
        with self._lock:
            self._held.pop(round, None)

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function that readies memory for a first checkpoint, in any thread."""
        assert self._strategy is not None, "join comes first"
        sizes, prepare_center = sizes_of(self.replica.tensors()), self._strategy.prepare_copy()

        def prepare() -> None:
            self._copies.prepare(sizes)
            prepare_center()

        return prepare

    def _state_dict(self, copied: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        with self.parts.measure("host_device_parameters"):
            return {
                "replica": self.replica.state_dict(copied or self._copies.of),
                "local_step": self.local_step,
                "round": self.round,
                "num_trained": len(self._trained),
                **self._losses.state_dict(),
                "feedback": [[*span, f.state_dict()] for span, f in self._feedback.items()],
                "generators": generators_state(self._device),
            }

    def _load_state(self, state: dict[str, Any], compression: str) -> None:
        self.replica.load_state_dict(state["replica"], copies=False)
        self.local_step = state["local_step"]
        self._losses.load_state_dict(state)
        for start, stop, residual in state["feedback"]:
            self._feedback[start, stop] = ErrorFeedback(parse_codec(compression))
            self._feedback[start, stop].load_state_dict(residual)
        load_generators(state["generators"], self._device)


def _as_it_is(value: Any) -> Any:
    return value
