"""Runs the rounds of one replica: the worker's own loop and a user's loop both drive it.

A round is opened, its local steps are taken one by one, and it is closed. Here are its context, its
header, the timing of its waits, the count of its samples, and what a failed exchange leaves to
undo. ``raydl.worker.loop`` takes the steps itself; in ``raydl.worker.user_loop`` the user's code
does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from raydl.collective.sync_strategy import SyncStrategy, Trained
from raydl.core.autotune import Choice
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Header, StepPlan
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.replica import Replica
from raydl.core.reports import AllreduceReport, Losses, Record
from raydl.core.rules import Sends
from raydl.core.strategy import Decision, Round, Strategy, WorkerContext, plan_round
from raydl.data.ledger import Span
from raydl.data.loader import Step
from raydl.metrics import TimeParts
from raydl.parameter_server.async_strategy import AsyncStrategy

Loss = TypeVar("Loss")


class RoundRunner:
    """The rounds of one replica, through the generations that it enters.

    Args:
        job: what all workers share.
        replica: takes the local steps.
        time_parts: know how long it waited.
        incarnation: which life of its worker.
        worker_id: of its worker; a rendezvous may give another one before the first generation.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        *,
        time_parts: TimeParts,
        incarnation: int = 0,
        worker_id: str = "",
    ) -> None:
        self.replica = replica
        self.worker_id = worker_id
        self.local_step = 0
        """Local steps so far; of a worker that came later, with those of the others before it."""
        self.generation = 0
        """The newest that it has entered."""
        self.strategy: Strategy | None = None
        """Of that generation."""
        self.trained = Trained()
        self.losses = Losses()
        self.feedback: dict[Span, ErrorFeedback] = {}
        self.is_behind = False
        """Its last exchange failed: others may have completed that one."""
        self.step_s = self.waited_s = self.round_s = 0.0
        """Of the newest round, as in ``raydl.core.reports.WorkerReport``."""
        self._job = job
        self._method = job.method
        self._parts = time_parts
        self._incarnation = incarnation
        self._sync: SyncStrategy | None = None
        """The strategy where workers exchange as a group: only then do they vote, undo a round
        and choose together."""
        self._lock = threading.Lock()
        self._early_votes: dict[int, dict[str, float]] = {}
        self._records: tuple[Record, ...] = ()
        self._seconds_at = (0.0, time.monotonic())
        self._plan: list[tuple[list[int], list[int]]] = []
        self._steps: list[Step] = []
        self._at = 0
        self._num_flying = 0
        self._is_sent_ahead = False
        self._sums = Header()
        self._opened_at = self._steps_since = (0.0, 0.0)

    # entering a generation

    def enter(self, membership: Membership, transport: Any, snapshot: Snapshot) -> WorkerContext:
        """Begin a generation; return this worker's place in it.

        Args:
            membership: who trains.
            transport: connects this worker with the others, or with the center.
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
        )
        if self._sync is not None:
            with self._lock:
                self._records += self._sync.pop_records()
        sync, strategy = self._make_strategy(context, transport, snapshot)
        self._seconds_at = (snapshot.progress.seconds, time.monotonic())
        with self._lock:
            self.generation, self.strategy, self._sync = membership.generation, strategy, sync
            early = self._early_votes.pop(membership.generation, {})
            if sync is not None:
                sync.vote(**early)
            now = membership.generation  # votes for generations that it was not in are void
            self._early_votes = {g: v for g, v in self._early_votes.items() if g > now}
        return context

    def _make_strategy(
        self, context: WorkerContext, transport: Any, snapshot: Snapshot
    ) -> tuple[SyncStrategy | None, Strategy]:
        if self._method.is_sync:
            sync = SyncStrategy(context, transport, snapshot, self.trained)
            return sync, sync
        if self._method.rule.sends is not Sends.WEIGHTS:
            # The center went on while this worker was away; it measures its progress from
            # where the center is now.
            self.become(snapshot)
        return None, AsyncStrategy(
            context,
            transport,
            snapshot,
            incarnation=self._incarnation,
            local_step=self.local_step,
        )

    def catch_up(self, snapshot: Snapshot) -> None:
        """Bring the replica from the generation before to where the next one starts.

        That one may have ended with an exchange that failed.
        """
        if self._sync is not None:
            weights = self._sync.catch_up(snapshot, is_behind=self.is_behind)
            if weights is not None:
                device = self.replica.flat.weights.device
                buffers = torch.tensor(snapshot.buffers, device=device)
                self.replica.become(weights.to(device), buffers)
        self.is_behind = False

    def become(self, center: Snapshot) -> None:
        """Let the replica become a copy of a center."""
        self.replica.become(*self._tensors_of(center))

    def start_over(self, center: Snapshot) -> None:
        """Let the replica begin again at a center; its samples become free again."""
        self.replica.start_over(*self._tensors_of(center))
        self.trained.keep_first(0)
        self.losses = Losses()
        self.feedback.clear()

    def _tensors_of(self, center: Snapshot) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.replica.flat.weights.device
        weights = torch.tensor(center.weights, device=device)
        return weights, torch.tensor(center.buffers, device=device)

    # one round

    def find_tuning(self) -> None:
        """Let the workers choose how they exchange from here on, if a choice is due.

        Raises:
            ExchangeError: somebody did not come to the choice; nothing has changed.
        """
        if self._sync is not None:
            self._sync.find_tuning()

    def open_round(self) -> Round:
        """Begin the next round; return its work. Waits where it is not this worker's turn.

        Raises:
            ExchangeError: the others did not come; ``undo_round`` comes next.
        """
        strategy = self._entered()
        if self._sync is not None and len(strategy.exchanges) > 1:  # they arrive one by one
            self.replica.keep()
        self._opened_at = time.perf_counter(), self._waited()
        round = strategy.next_round(self.local_step)
        self._steps_since = time.perf_counter(), self._waited()
        fragments = len(strategy.exchanges)
        self._plan = plan_round(round.num_steps, fragments=fragments, delay=round.delay)
        self._steps, self._at, self._num_flying = round.steps(), 0, 0
        self._sums, self._is_sent_ahead = Header(), False
        return round

    @property
    def num_left(self) -> int:
        """Local steps that are left of the round."""
        return len(self._plan) - self._at

    @property
    def num_flying(self) -> int:
        """Exchanges that have begun and not taken effect."""
        return self._num_flying

    def share_done(self) -> float:
        """Return 0..1 of the run before the next step."""
        return self._entered().share_done(self._at, self.local_step)

    def begin_step(self, lr: float) -> None:
        """Note that the next step begins, with its learning rate, before anything is sent."""
        self._entered().begin_step(self._at, lr)

    def send_ahead(self) -> None:
        """Send what is due in the next step, for a gradient that is computed elsewhere.

        Raises:
            ExchangeError: it can not begin; nothing was changed.
        """
        begin, _ = self._plan[self._at]
        self._is_sent_ahead = True
        self._num_flying += len(begin)
        if begin:
            self.replica.begin(self._step_plan(begin, []))

    def take_step(self, take: Callable[[StepPlan], tuple[Loss, Header | None]]) -> Loss:
        """Take the next step of the round, and count it even if its exchange fails.

        Args:
            take: lets the replica step; returns (the loss, the sums of the last exchange joined).

        Raises:
            ExchangeError: as ``raydl.core.replica.Replica.step``.
        """
        begin, join = self._plan[self._at]
        if self._is_sent_ahead:
            begin = []
        step_plan, num_steps = self._step_plan(begin, join), self.replica.num_steps
        try:
            loss, sums = take(step_plan)
        finally:
            if self.replica.num_steps > num_steps:
                self.trained.add(*self._steps[self._at])
                self.local_step += 1
                self._at += 1
        self._sums = sums or self._sums
        self._num_flying += len(begin) - len(join)
        self._is_sent_ahead = False
        return loss

    def close_round(self) -> Decision:
        """End the round, all its steps being taken; return what follows.

        Raises:
            NonFiniteLossError: the loss of one of its steps is NaN or infinite.
        """
        self.losses.read(self.worker_id)
        if self._plan:
            began, waited_before = self._opened_at
            steps_since, waited_then = self._steps_since
            now, waited = time.perf_counter(), self._waited()
            self.waited_s = waited - waited_before
            in_steps_s = now - steps_since - (waited - waited_then)
            self.step_s = max(0.0, in_steps_s) / len(self._plan)
            self.round_s = now - began
        decision = self._entered().settle(self._sums, self.local_step)
        self.trained.keep_first(0)
        return decision

    def undo_round(self) -> None:
        """Undo what a round that failed has done in part; local steps stay in the replica."""
        if self._sync is not None:
            self._sync.undo_round()
        self.replica.undo_()
        self.is_behind = True

    def _step_plan(self, begin: list[int], join: list[int]) -> StepPlan:
        return StepPlan.around(
            self._entered().exchanges,
            begin,
            join,
            make_header=self._make_header,
            overlap=self._method.overlap,
        )

    def _make_header(self) -> Header:
        return Header(
            **self.losses.pop_state(self.worker_id),
            distance=self.replica.distance_squared,
            step_s=self.step_s,
            waited_s=self.waited_s,
            elapsed_s=self.elapsed_s(),
            **(self._sync.votes() if self._sync is not None else {}),
        )

    def elapsed_s(self) -> float:
        """Return the seconds of training so far, by this worker's clock."""
        seconds_before, since = self._seconds_at
        return seconds_before + time.monotonic() - since

    def _waited(self) -> float:
        """Return the seconds that this worker waited for exchanges so far."""
        return self._parts.as_dict()["device_device_parameters"]

    def _entered(self) -> Strategy:
        assert self.strategy is not None, "enter comes first"
        return self.strategy

    # what others ask for

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all ranks for something after a round, by the fields of the header.

        A vote counts in its generation alone. It may come before the worker has entered that one;
        one for a generation that has passed is ignored, and so is one by messages, where the
        coordinator counts votes.
        """
        with self._lock:
            if generation == self.generation and self._sync is not None:
                self._sync.vote(**votes)
            elif generation > self.generation:
                self._early_votes.setdefault(generation, {}).update(votes)

    def center(self, *, is_kept: bool = False) -> Snapshot:
        """Return this worker's copy of the center."""
        return self._entered().snapshot(is_kept=is_kept, local_step=self.local_step)

    @property
    def round(self) -> int:
        """Rounds completed since the run began, or exchanges that the center has settled."""
        return self.strategy.version if self.strategy is not None else 0

    @property
    def num_changes(self) -> int:
        """Changes of this worker's copy of the ledger; 0 where the coordinator keeps it."""
        return self._sync.num_changes if self._sync is not None else 0

    def pop_records(self) -> tuple[Record, ...]:
        """Hand over the records that nobody has taken yet; by messages the coordinator has them."""
        with self._lock:
            records, self._records = self._records, ()
        return records + self._sync.pop_records() if self._sync is not None else records

    def allreduce_report(self) -> AllreduceReport | None:
        """Return how the group sums, where it chooses for itself."""
        return self._sync.allreduce_report() if self._sync is not None else None

    def choice(self) -> Choice | None:
        """Return the exchange tuning that the workers of this generation chose, if they did."""
        return self._sync.choice() if self._sync is not None else None

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function that readies memory for a copy of the center, in any thread."""
        return self._sync.prepare_copy() if self._sync is not None else lambda: None
