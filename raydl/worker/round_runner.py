"""Runs the rounds of one replica, for the worker's own loop and for a user's loop.

A round is opened, its local steps are taken one by one, and it is closed. This module builds the
context and the header, times the waits, counts the samples, and undoes the parts of a failed
exchange. ``raydl.worker.loop`` takes the steps itself; in ``raydl.worker.user_loop`` the user's
code takes them.
"""

from __future__ import annotations

import functools
import io
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from raydl.collective.sync_strategy import SyncStrategy, TrainedPositions
from raydl.core.autotune import Choice
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback, LostResidual
from raydl.core.exchange import Header, Partners, StepPlan
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.replica import Replica
from raydl.core.reports import AllreduceReport, EqualReplicas, Losses, Record
from raydl.core.strategy import Decision, Round, Strategy, WorkerContext, plan_round
from raydl.data.ledger import Span
from raydl.data.loader import Step
from raydl.metrics import TimeParts
from raydl.parameter_server.async_strategy import AsyncStrategy

Loss = TypeVar("Loss")


class RoundRunner:
    """Runs the rounds of one replica, in all generations that it enters.

    Args:
        job: the job of all workers.
        replica: takes the local steps.
        time_parts: count how long it waits.
        worker_id: of its worker; a rendezvous may assign another before the first generation.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        *,
        time_parts: TimeParts,
        worker_id: str = "",
    ) -> None:
        self.replica = replica
        self.worker_id = worker_id
        self.local_step = 0
        """Local steps so far; a newcomer's count includes the others' steps before it joined."""
        self.generation = 0
        """The newest generation that it has entered."""
        self.strategy: Strategy | None = None
        """The strategy of that generation."""
        self.trained = TrainedPositions()
        self.losses = Losses()
        self.feedback: dict[Span, ErrorFeedback] = {}
        self.residual = 0.0
        """L2 norm of what its messages have left out, after its newest round."""
        self._lost_residuals: list[LostResidual] = []
        self.is_behind = False
        """Whether its last exchange failed; others may have completed that exchange."""
        self._unsent: torch.Tensor | None = None
        """Then its progress since the messages of that round, if all of them were sent."""
        self.step_s = self.waited_s = self.round_s = 0.0
        """Times of the newest round, as in ``raydl.core.reports.WorkerReport``."""
        self._job = job
        self._method = job.method
        self._parts = time_parts
        self._sync: SyncStrategy | None = None
        """The strategy of a synchronous method, else None: only a group votes, undoes a round and
        chooses its tuning."""
        self._lock = threading.Lock()
        self._early_votes: dict[int, dict[str, float]] = {}
        self._records: tuple[Record, ...] = ()
        self._seconds_at = (0.0, time.monotonic())
        self._plan: list[tuple[list[int], list[int]]] = []
        self._steps: list[Step] = []
        self._step = 0
        """Index of the next local step in the round."""
        self._num_pending = 0
        self._is_sent_ahead = self._is_settled = False
        self._sums = Header()
        self._opened_at = self._steps_since = (0.0, 0.0)

    # entering a generation

    def enter(self, membership: Membership, transport: Any, snapshot: Snapshot) -> WorkerContext:
        """Enter a generation; return this worker's place in it.

        Args:
            membership: the members.
            transport: connects this worker to the others, or to the center.
            snapshot: the center that they all start from.
        """
        context = WorkerContext(
            config=self._job.config,
            method=self._method,
            membership=membership,
            worker_id=self.worker_id,
            flat=self.replica.flat,
            time_parts=self._parts,
            cuts=self._job.order.cuts,
            feedback=self.feedback,
            lost_residuals=self._lost_residuals,
        )
        if self._sync is not None:
            with self._lock:
                self._records += self._sync.pop_records()
        sync: SyncStrategy | None = None
        strategy: Strategy
        if self._method.is_sync:
            sync = strategy = SyncStrategy(context, transport, snapshot, self.trained)
        else:
            if not self._method.rule.ahead:
                # The center has moved since this worker's last exchange; its progress starts at
                # the current center.
                self.become(snapshot)
            strategy = AsyncStrategy(context, transport, snapshot, local_step=self.local_step)
        self._seconds_at = (snapshot.progress.seconds, time.monotonic())
        with self._lock:
            self.generation, self.strategy, self._sync = membership.generation, strategy, sync
            early = self._early_votes.pop(membership.generation, {})
            if sync is not None:
                sync.vote(**early)
            # Votes for generations that it has skipped are void.
            self._early_votes = {g: v for g, v in self._early_votes.items() if g > self.generation}
        return context

    def catch_up(self, snapshot: Snapshot) -> None:
        """Bring the replica from the last generation to the start of the next one.

        The last one may have ended with a failed exchange.
        """
        if self._sync is not None:
            weights = self._sync.catch_up(snapshot, is_behind=self.is_behind, unsent=self._unsent)
            if weights is not None:
                device = self.replica.flat.weights.device
                buffers = torch.tensor(snapshot.buffers, device=device)
                self.replica.become(weights.to(device), buffers)
        self.is_behind, self._unsent = False, None

    def become(self, center: Snapshot) -> None:
        """Make the replica a copy of a center."""
        self.replica.become(*self._tensors_of(center))

    def start_over(self, center: Snapshot, *, is_earlier: bool = False) -> None:
        """Restart the replica at a center; its samples become free again.

        What completed exchanges have left out is still sent, unless the center is an earlier one:
        then those exchanges are void, or some of them.

        Args:
            center: to restart from.
            is_earlier: whether the center has lost exchanges of this worker.
        """
        self.replica.start_over(*self._tensors_of(center))
        self.trained.keep_first(0)
        self.losses = Losses()
        self._unsent = None
        norm = self._norm_of_residuals()
        if is_earlier or not math.isfinite(norm):
            why = "the center went back to an earlier state" if is_earlier else "it diverged"
            self._lose_residuals(norm, why)

    def _lose_residuals(self, norm: float, why: str) -> None:
        """Forget what messages have left out, and report it."""
        for feedback in self.feedback.values():
            feedback.clear()
        self.residual = 0.0
        if norm:
            self._lost_residuals.append(LostResidual(norm, why))

    def _norm_of_residuals(self) -> float:
        return math.hypot(*(feedback.norm() for feedback in self.feedback.values()))

    def pop_lost_residuals(self) -> tuple[LostResidual, ...]:
        """Remove and return the residuals that this worker has lost since the last call."""
        count = len(self._lost_residuals)  # the loop's thread may append meanwhile
        lost = tuple(self._lost_residuals[:count])
        del self._lost_residuals[:count]
        return lost

    def feedback_state(self) -> list[list[Any]]:
        """Return the state of the error feedback: start, stop and state of each span."""
        return [
            [*span, {**feedback.state_dict(), **_unanswered(feedback)}]
            for span, feedback in self.feedback.items()
            if len(feedback.residual) or feedback.message is not None
        ]

    def load_feedback(self, state: list[list[Any]], compression: str) -> None:
        """Load what ``feedback_state`` returned.

        Args:
            state: start, stop and state of each span.
            compression: codec of the messages from now on.
        """
        codec, decay = self._method.codec(compression), self._method.rule.feedback_decay
        self.feedback.clear()
        for start, stop, saved in state:
            if not self._is_of_this_method(saved["residual"], stop - start):
                why = "the messages of the method before had other vectors"
                self._lost_residuals.append(LostResidual(float(saved["residual"].norm()), why))
                continue
            feedback = self.feedback[start, stop] = ErrorFeedback(codec, decay=decay)
            feedback.load_state_dict(saved if "of" in saved else self._of_mean(saved))
        self.residual = self._norm_of_residuals()
        if unknown := math.hypot(*(saved.get("unanswered", 0.0) for *_, saved in state)):
            why = "it is not known whether its last message before the state was saved was applied"
            self._lost_residuals.append(LostResidual(unknown, why))

    def _is_of_this_method(self, residual: torch.Tensor, size: int) -> bool:
        """Whether a residual is none, or has the lanes that each message of this method has."""
        rule = self._method.rule
        is_whole = len(residual) == len(rule.lanes) * size and not rule.lane_rounds
        return is_whole or not len(residual)

    def _of_mean(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of an earlier version, whose gradients were sums over full batches."""
        if self._method.has_local_steps:
            return {**state}
        samples = self._job.config.training.batch_size * self._method.period
        return {"residual": state["residual"] / samples}

    def copy_first_residuals(self, partners: Partners, *, is_first: bool) -> Callable[[], None]:
        """Fetch what the messages of the first partner have left out.

        Partners send the same messages, so they need the same residuals.

        Returns:
            A function that takes them over, and reports own ones that differed as lost.

        Raises:
            ExchangeError: if a partner was lost or timed out; nothing has changed.
        """
        if not self._method.leaves_out:
            return lambda: None
        own = io.BytesIO()
        if is_first:
            torch.save(self.feedback_state(), own)
        content = partners.bytes_of_first(own.getvalue(), is_first=is_first)
        if is_first:
            return lambda: None
        state = torch.load(io.BytesIO(content), weights_only=True)
        return functools.partial(self._take_over, {(a, b): saved for a, b, saved in state})

    def _take_over(self, residuals: Mapping[Span, Mapping[str, Any]]) -> None:
        own = {(a, b): saved["residual"] for a, b, saved in self.feedback_state()}
        is_same = own.keys() == residuals.keys() and all(
            torch.equal(own[span], saved["residual"]) for span, saved in residuals.items()
        )
        if is_same:
            return
        self._lose_residuals(self._norm_of_residuals(), "it copied the replica of its partner")
        for span, saved in residuals.items():
            self.feedback[span].load_state_dict(saved)
        self.residual = self._norm_of_residuals()

    def _tensors_of(self, center: Snapshot) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.replica.flat.weights.device
        weights = torch.tensor(center.weights, device=device)
        return weights, torch.tensor(center.buffers, device=device)

    # one round

    def find_tuning(self) -> None:
        """Let the workers choose how to exchange from now on, if a choice is due.

        Raises:
            ExchangeError: if a worker did not take part in the choice; nothing has changed.
        """
        if self._sync is not None:
            self._sync.find_tuning()

    def open_round(self) -> Round:
        """Begin the next round; return its work. In rank order, wait for this worker's turn.

        Raises:
            ExchangeError: if others timed out; call ``undo_round`` next.
        """
        strategy = self.entered()
        self._is_settled, self._plan, self._step = False, [], 0
        if self._sync is not None:
            self._sync.step_s = self.step_s
            if len(strategy.exchanges) > 1:  # they commit one by one
                self.replica.keep()
        self.replica.exchanges = strategy.exchanges
        self._opened_at = time.perf_counter(), self._waited()
        round = strategy.next_round(self.local_step)
        self._steps_since = time.perf_counter(), self._waited()
        fragments = len(strategy.exchanges)
        self._plan = plan_round(round.num_steps, fragments=fragments, delay=round.delay)
        self._steps, self._step, self._num_pending = round.steps(), 0, 0
        self._sums, self._is_sent_ahead = Header(), False
        return round

    @property
    def num_left(self) -> int:
        """Number of local steps left in the round."""
        return len(self._plan) - self._step

    @property
    def num_pending(self) -> int:
        """Number of exchanges that have begun and not taken effect."""
        return self._num_pending

    def share_done(self) -> float:
        """Return the completed share of the run before the next step, 0..1."""
        return self.entered().share_done(self._step, self.local_step)

    def begin_step(self, lr: float) -> None:
        """Begin the next step, with its learning rate, before anything is sent."""
        self.entered().begin_step(self._step, lr)

    def send_ahead(self) -> None:
        """Begin the exchanges of the next step, before the user's code computes its gradient.

        Raises:
            ExchangeError: if one cannot begin; nothing has changed.
        """
        begin, _ = self._plan[self._step]
        self._is_sent_ahead = True
        self._num_pending += len(begin)
        if begin:
            self.replica.begin(self._step_plan(begin, []))

    def take_step(self, take: Callable[[StepPlan], tuple[Loss, Header | None]]) -> Loss:
        """Take the next step of the round, and count it even if its exchange fails.

        Args:
            take: takes the replica's step; returns (the loss, the header sums of the last exchange
                joined).

        Raises:
            ExchangeError: as for ``raydl.core.replica.Replica.step``.
        """
        begin, join = self._plan[self._step]
        if self._is_sent_ahead:
            begin = []
        step_plan, num_steps = self._step_plan(begin, join), self.replica.num_steps
        try:
            loss, sums = take(step_plan)
        finally:
            if self.replica.num_steps > num_steps:
                self.trained.add(*self._steps[self._step])
                self.local_step += 1
                self._step += 1
        self._sums = sums or self._sums
        self._num_pending += len(begin) - len(join)
        self._is_sent_ahead = False
        return loss

    def close_round(self) -> Decision:
        """Close the round after its last step, and return the decision.

        Raises:
            NonFiniteLossError: if the loss of one of its steps is NaN or infinite. The round is
                settled all the same: its exchange has moved the center.
        """
        if self._plan:
            began, waited_before = self._opened_at
            steps_since, waited_then = self._steps_since
            now, waited = time.perf_counter(), self._waited()
            self.waited_s = waited - waited_before
            in_steps_s = now - steps_since - (waited - waited_then)
            self.step_s = max(0.0, in_steps_s) / len(self._plan)
            self.round_s = now - began
        decision = self.entered().settle(self._sums, self.local_step)
        self._is_settled = True
        self.residual = self._norm_of_residuals()
        self.trained.keep_first(0)
        self.losses.read(self.worker_id)
        return decision

    def undo_round(self) -> None:
        """Undo the committed parts of a failed round; its local steps stay in the replica."""
        if self._is_settled:
            return
        if self._sync is not None:
            self._unsent = self._unsent_progress()
            self._sync.undo_round()
        self.replica.undo_()
        self.is_behind = True

    def _unsent_progress(self) -> torch.Tensor | None:
        """Return the progress since the messages of a round of which all were sent, if any."""
        is_carried = self._method.has_local_steps and not self._method.rule.ahead
        if not is_carried or self.num_left or not self._plan:
            return None
        exchanges, (begin, join) = self.entered().exchanges, self._plan[-1]
        if len(begin) == len(join) == len(exchanges):  # the messages have all progress
            return None
        last_step = StepPlan.around(exchanges, begin, join, make_header=Header)
        return self.replica.unsent_progress(exchanges, last_step)

    def _step_plan(self, begin: list[int], join: list[int]) -> StepPlan:
        return StepPlan.around(
            self.entered().exchanges,
            begin,
            join,
            make_header=self._make_header,
            overlap=self._method.overlap,
            round=self.entered().version,
        )

    def _make_header(self) -> Header:
        losses, distance = self.losses.pop_state(self.worker_id), self.replica.distance_squared
        return Header(
            **losses,
            distance=distance,
            equality=self._equality_number(distance, *losses.values()),
            step_s=self.step_s,
            waited_s=self.waited_s,
            elapsed_s=self.elapsed_s(),
            **self._votes(),
        )

    def _votes(self) -> dict[str, float]:
        """Return the votes to send, in methods in which a header has some."""
        if self._sync is None:
            return {}
        votes = self._sync.votes()
        # The run goes on at once, with these parameters.
        return {**votes, "stop": 1.0} if self.replica.flat.newly_trained else votes

    def _equality_number(self, distance: float, *losses: float) -> float:
        """Return what this worker sends so that equal replicas are found."""
        if self._sync is None:
            return 0.0
        # At distance 0 it has only copied the center; at rate 0 it may keep what it has loaded.
        has_stepped = distance > 0 and self.replica.has_rate
        return self._sync.equality_number((distance, *losses) if has_stepped else None)

    def elapsed_s(self) -> float:
        """Return the seconds of training so far, by this worker's clock."""
        seconds_before, since = self._seconds_at
        return seconds_before + time.monotonic() - since

    def _waited(self) -> float:
        """Return the seconds that this worker has waited for exchanges so far."""
        return self._parts.as_dict()["device_device_parameters"]

    def entered(self) -> Strategy:
        """Return the strategy of the generation that the worker has entered."""
        assert self.strategy is not None, "the worker has not entered a generation"
        return self.strategy

    # for the actor and the loops

    def vote(self, generation: int, **votes: float) -> None:
        """Send votes to all ranks with the next header, by its field names.

        A vote counts in its generation only. It may arrive before the worker has entered that
        generation; a vote for a past one is ignored. With messages votes are ignored here: the
        coordinator counts them.
        """
        with self._lock:
            if generation == self.generation and self._sync is not None:
                self._sync.vote(**votes)
            elif generation > self.generation:
                self._early_votes.setdefault(generation, {}).update(votes)

    def center(self, *, is_kept: bool = False) -> Snapshot:
        """Return this worker's copy of the center."""
        return self.entered().snapshot(is_kept=is_kept, local_step=self.local_step)

    @property
    def round(self) -> int:
        """Rounds completed since the run began, or exchanges that the center has completed."""
        return self.strategy.version if self.strategy is not None else 0

    @property
    def num_changes(self) -> int:
        """Changes of this worker's copy of the ledger; 0 if the coordinator keeps it."""
        return self._sync.num_changes if self._sync is not None else 0

    def pop_records(self) -> tuple[Record, ...]:
        """Remove and return the new records; with messages the coordinator has them."""
        with self._lock:
            records, self._records = self._records, ()
        return records + self._sync.pop_records() if self._sync is not None else records

    def allreduce_report(self) -> AllreduceReport | None:
        """Return how the group sums large messages, or None if it does not choose."""
        return self._sync.allreduce_report() if self._sync is not None else None

    def equal_replicas(self) -> EqualReplicas | None:
        """Return two equal replicas that this generation has found, or None."""
        return self._sync.equality.found if self._sync is not None else None

    def choice(self) -> Choice | None:
        """Return the exchange tuning that this generation chose, or None."""
        return self._sync.choice if self._sync is not None else None

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function, for any thread, that prepares memory for a copy of the center."""
        return self._sync.prepare_copy() if self._sync is not None else lambda: None

    # between two rounds of a synchronous method

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers)."""
        return self.entered().place

    def begin_score(self) -> None:
        """Begin a pause in which all workers score the center."""
        self._entered_sync().begin_score()

    def raise_if_abandoned(self) -> None:
        """Raise an ExchangeError if this worker is to leave its generation at once."""
        self._entered_sync().raise_if_abandoned()

    def gather(self, own: bytes) -> list[bytes]:
        """Return some bytes of each rank, by rank.

        Raises:
            ExchangeError: if a worker did not answer.
        """
        with self._parts.measure("device_device_parameters"):
            return self._entered_sync().gather(own)

    def _entered_sync(self) -> SyncStrategy:
        """Return the strategy of the generation that the worker has entered."""
        assert self._sync is not None, "workers that exchange with the center have no group"
        return self._sync


def _unanswered(feedback: ErrorFeedback) -> dict[str, float]:
    """Return by how much a message would change the residual of which no answer has arrived."""
    return {} if feedback.message is None else {"unanswered": feedback.open_norm()}
