"""The coordinator: assigns samples in methods with messages.

Synchronous methods need none: every rank keeps the ledger and has the same votes. With messages,
the ledger is here, beside the center's home shard: the last message of a worker's round completes
its samples, and the answer assigns the next ones. Workers join and leave while the others continue;
the claims of a lost worker are claimed again. For methods in rank order (``round_robin``) ``Turns``
keeps the turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydl.config import TrainConfig
from raydl.core.membership import Membership
from raydl.core.method import Method
from raydl.core.non_trainable import NonTrainable
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, Record, RecordAggregator
from raydl.core.stop_condition import StopCondition, num_evaluations_due
from raydl.core.strategy import steps_at_speed
from raydl.data.ledger import Claim, Ledger
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.parameter_server.members import Member, Members
from raydl.parameter_server.protocol import Assignment, Completion, MessageId, Request


class Stopwatch:
    """Counts the seconds in which a worker trains; stopped at first.

    Args:
        clock: returns monotonic seconds.
        seconds: initial value.
    """

    def __init__(self, clock: Callable[[], float], *, seconds: float = 0.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def run(self, is_running: bool) -> None:
        """Run or stop from now on."""
        self._seconds = self.seconds
        self._since = self._clock() if is_running else None


@dataclass(frozen=True)
class Due:
    """A snapshot of the center to make."""

    round: int
    is_kept: bool
    """Whether the workers kept their states under this number."""


class PendingSnapshots:
    """The snapshots still to be made. The caller holds a lock."""

    def __init__(self) -> None:
        self._due: list[Due] = []
        self._checkpoint: int | None = None
        self._notified: set[str] = set()

    def add(self, number: int, *, is_kept: bool) -> None:
        """Request a snapshot under a number."""
        self._due.append(Due(number, is_kept))

    def begin_checkpoint(self, number: int) -> None:
        """Start to notify every worker to keep its state under a number."""
        self._checkpoint, self._notified = number, set()

    def end_checkpoint(self) -> None:
        """Abandon a checkpoint in progress."""
        self._checkpoint, self._notified = None, set()

    def notify(self, worker_id: str) -> int | None:
        """Return the number under which this worker must keep its state, once; else None."""
        if self._checkpoint is None or worker_id in self._notified:
            return None
        self._notified.add(worker_id)
        return self._checkpoint

    def complete_checkpoint(self, members: Members) -> None:
        """Request a checkpoint's snapshot once all workers in training were notified.

        States kept by former members are lost.
        """
        if self._checkpoint is None:
            return
        self._notified &= set(members)
        if self._notified >= members.in_training:
            if self._notified:
                self.add(self._checkpoint, is_kept=True)
            self.end_checkpoint()

    def pop_due(self) -> list[Due]:
        """Remove and return the requested snapshots: all kept ones, and the newest other one."""
        due, self._due = self._due, []
        return [d for i, d in enumerate(due) if d.is_kept or i == len(due) - 1]


class Turns:
    """A turn that passes round the workers of a membership in rank order.

    The holder is stored by id, not by rank: joins and losses before it do not move the turn.
    """

    def __init__(self) -> None:
        self._order: tuple[str, ...] = ()
        self._holder: str | None = None

    def begin_generation(self, order: tuple[str, ...]) -> None:
        """Give the turn to the first worker of an order."""
        self._order, self._holder = order, order[0] if order else None

    def change(self, order: tuple[str, ...]) -> None:
        """Continue in another order; a removed worker's turn passes to the next that stays."""
        if self._holder not in order:
            staying = [worker_id for worker_id in self._from_holder() if worker_id in order]
            self._holder = next(iter([*staying, *order]), None)
        self._order = order

    def holder(self, takes_turns: Callable[[str], bool]) -> str | None:
        """Return the worker whose turn it is, or None.

        The turn skips workers that take no turns, for good: the next one keeps it even if they
        take turns again.
        """
        if self._holder is not None and takes_turns(self._holder):
            return self._holder  # the usual case, in a call that every waiting worker makes
        for worker_id in self._from_holder():
            if takes_turns(worker_id):
                self._holder = worker_id
                return worker_id
        return None

    def end(self, worker_id: str) -> None:
        """Pass the turn to the next worker, if it is this worker's."""
        if self._holder == worker_id:
            self._holder = (*self._from_holder(), worker_id)[1]

    def _from_holder(self) -> tuple[str, ...]:
        """Return all workers in order, beginning with the holder of the turn."""
        if self._holder is None:
            return self._order
        index = self._order.index(self._holder)
        return self._order[index:] + self._order[:index]


COPIES = 16
"""The number of assignments with the ledger in the time in which each worker exchanges once. The
ledger has a line for each of p claims, so in every assignment it would cost p squared.

A lost center is restored from the worker with the newest ledger. Up to 31 workers, that is the
newest assignment of all. With more, the ledger is at most p/16 exchanges older: their samples are
trained again, in addition to those of up to p exchanges in progress, which are lost in any case.
"""
_NONE: NonTrainable = {}


class Coordinator:
    """The ledger, the votes and the turns of a run. Thread-safe.

    Args:
        config: the run's settings.
        method: the run's method.
        ledger: of the completed samples.
        version: exchanges completed so far, plus checkpoints voted for.
        seconds: seconds trained so far.
        local_step: local steps of each worker so far, the mean.
        num_bytes: bytes of all exchanges so far.
        num_messages: messages of all exchanges so far.
        non_trainable: the center's non-trainable state; see ``raydl.core.center.Snapshot``.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        config: TrainConfig,
        method: Method,
        ledger: Ledger,
        *,
        version: int = 0,
        seconds: float = 0.0,
        local_step: int = 0,
        num_bytes: int = 0,
        num_messages: int = 0,
        non_trainable: NonTrainable = _NONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._method = method
        self._ledger = ledger
        self._stop_condition = StopCondition.of(config.training, epoch_samples=ledger.num_samples)
        self.version = version
        """Exchanges completed over all starts, plus checkpoints voted for."""
        self._num_completed = self._ledger_sent_at = 0
        self._num_bytes, self._num_messages = num_bytes, num_messages
        self._watch = Stopwatch(clock, seconds=seconds)
        self._aggregator = RecordAggregator(clock)
        self._changed = threading.Condition()
        self._members = Members(local_step=local_step)
        self._votes: dict[str, float] = {}
        self._snapshots = PendingSnapshots()
        self._turns = Turns()
        self._non_trainable = dict(non_trainable)
        self._is_end = False
        self.num_cuts = 0
        """How often the learning rate was cut, for the schedule ``plateau``."""
        self.num_refused = 0
        """Calls by workers that were no members, or had entered another generation."""

    def begin_generation(self, membership: Membership) -> None:
        """Begin with new members only; the votes, turns and claims of earlier ones are void."""
        with self._changed:
            self._ledger.release(members=membership.worker_ids)
            self._members.begin_generation(membership, seen=self._num_completed)
            self._votes, self._is_end = {}, False
            self._snapshots.end_checkpoint()
            self._turns.begin_generation(membership.worker_ids)
            self._watch.run(not self._members.is_closed)
            self._changed.notify_all()

    def change(self, membership: Membership) -> None:
        """Let workers join and leave while the others continue.

        The claims of removed workers are claimed again, and no worker waits for them.
        """
        with self._changed:
            was_closed = self._members.is_closed
            self._ledger.release(keep=membership.worker_ids)
            if self._members.change(membership, seen=self._num_completed):
                self._is_end = False
            self._turns.change(membership.worker_ids)
            self._snapshots.complete_checkpoint(self._members)
            if not was_closed:
                self._request_last()
            self._watch.run(not self._members.is_closed)
            self._changed.notify_all()

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange, with ``Outcome.LEFT``.

        The others continue, and it remains a member until ``change``. If the run ends with that
        exchange, it receives the outcome of the others instead.
        """
        with self._changed:
            member = self._members.get(worker_id)
            if member is not None:
                member.is_dismissed = True

    def _admit(self, message_id: MessageId) -> Member:
        """Return the calling member.

        Raises:
            ExchangeError: if it is no member, or has entered another generation.
        """
        problem = self._members.refusal(message_id)
        if problem:
            self.num_refused += 1
            raise ExchangeError(self.version, self._generation, problem)
        return self._members[message_id.worker_id]

    @property
    def _generation(self) -> int:
        return self._members.membership.generation

    @property
    def seconds(self) -> float:
        """Seconds of training over all starts, without times in which no worker trains."""
        return self._watch.seconds

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return a worker's first assignment.

        Methods in rank order assign in rank order, since claims decide which samples a worker gets.
        A worker that joins while others train does not wait.

        Raises:
            ExchangeTimeoutError: if a worker of lower rank did not enter in time.
            ExchangeError: if it is no member, or was removed while it waited.
        """

        def missing() -> list[str]:
            return self._members.not_entered(before=message_id.worker_id)

        with self._changed:
            member = self._admit(message_id)
            if self._method.strategy == "round_robin" and member.is_awaited:
                self._wait(message_id, lambda: not missing(), missing)
            if member.calls.is_first("enter", message_id):
                member.local_step, member.has_entered = local_step, True
                assignment = self._assignment(message_id.worker_id, keep=None)
                member.answered = message_id.sequence, assignment
                self._changed.notify_all()
            assert member.answered is not None
            return member.answered[1]

    def _wait(
        self, message_id: MessageId, is_true: Callable[[], bool], missing: Callable[[], list[str]]
    ) -> None:
        """Wait for other workers, up to ``exchange.timeout_s`` or until the caller is removed."""
        timeout_s = self._config.exchange.timeout_s
        refusal = self._members.refusal
        if not self._changed.wait_for(lambda: refusal(message_id) or is_true(), timeout_s):
            raise ExchangeTimeoutError(self.version, self._generation, timeout_s, missing())
        self._admit(message_id)

    def settle(self, request: Request) -> Assignment | None:
        """Complete a worker's round: count its samples as done, and return its next assignment.

        Returns:
            The assignment, or None if the worker was removed after its shard accepted the message:
            its samples are then claimed by others, and the message counts as refused.
        """
        completion, worker_id = request.completion, request.message_id.worker_id
        assert completion is not None
        with self._changed:
            if self._members.refusal(request.message_id):
                self.num_refused += 1
                return None
            member = self._members[worker_id]
            # Not by versions: a checkpoint takes one, too.
            staleness = self._num_completed - member.seen
            self._num_completed += 1
            self.version += 1
            self._num_bytes += completion.num_bytes
            self._num_messages += completion.num_messages
            epoch = self._ledger.epoch
            is_due = self._complete(worker_id, completion.num_trained)
            num_steps = completion.local_step - member.local_step
            member.local_step, member.completion = completion.local_step, completion
            self._members.note_step(worker_id, completion.header.step_s)
            if self._members.rank_of(worker_id) == 0:
                self._take_buffers(completion)
            self._aggregator.add(
                completion.header, num_messages=1, num_steps=num_steps, staleness=staleness
            )
            keep = self._snapshots.notify(worker_id)
            if keep is not None:
                member.num_kept = member.num_completed
                if self._keeps_own_steps:  # its kept state will contain all claimed steps
                    member.num_kept += self._ledger.num_claimed_by(worker_id)
            self._snapshots.complete_checkpoint(self._members)
            assignment = self._assignment(worker_id, keep=keep)
            self._request_evaluation(is_due)
            at_once = self._ledger.epoch > epoch
            # A worker that leaves is recorded once it has left.
            if assignment.outcome is Outcome.GO_ON and (at_once or self._aggregator.is_due):
                self._record(completion, at_once=at_once)
            member.answered = request.message_id.sequence, assignment
            self._changed.notify_all()
            return assignment

    def _take_buffers(self, completion: Completion) -> None:
        """Take the buffers of rank 0 that are not averaged."""
        for name in completion.replaces:
            self._non_trainable.pop(name, None)
        self._non_trainable.update(completion.non_trainable)

    def _complete(self, worker_id: str, num_trained: int | None = None) -> bool:
        """Count a worker's trained positions as done; return whether an evaluation is due.

        Args:
            worker_id: of the worker.
            num_trained: positions trained since it entered; None: all that it claimed.
        """
        num_due = num_evaluations_due(self._config.evaluation, self._ledger)
        member = self._members[worker_id]
        count = None if num_trained is None else num_trained - member.num_completed
        member.num_completed += self._ledger.complete(worker_id, count)
        return num_evaluations_due(self._config.evaluation, self._ledger) > num_due

    def _request_evaluation(self, is_due: bool) -> None:
        if is_due and self._members.in_training:  # otherwise the final snapshot serves
            self._snapshots.add(self.version, is_kept=False)

    @property
    def _keeps_own_steps(self) -> bool:
        """Whether workers continue from their own replicas, with steps that no message contains."""
        return self._method.rule.ahead

    def repeat(self, request: Request) -> Assignment:
        """Return the assignment that answered an earlier copy of a message.

        That copy may still be in progress; then wait for it.

        Raises:
            ExchangeTimeoutError: if it was not completed in time.
            ExchangeError: if its worker is no member, or was removed meanwhile.
        """
        message_id = request.message_id
        with self._changed:
            member = self._admit(message_id)

            def is_answered() -> bool:
                return member.answered is not None and member.answered[0] >= message_id.sequence

            self._wait(message_id, is_answered, lambda: [message_id.worker_id])
            assert member.answered is not None
            return member.answered[1]

    def _assignment(self, worker_id: str, *, keep: int | None) -> Assignment:
        member = self._members[worker_id]
        whole_round = self._steps_of_whole_round(member)
        outcome, claims = self._next(worker_id, whole_round)
        if outcome is not Outcome.GO_ON:
            member.has_left = True
            if outcome is not Outcome.LEFT:  # a single worker may leave
                self._is_end = outcome in (Outcome.STOPPED, Outcome.FINISHED)
            self._snapshots.complete_checkpoint(self._members)
            self._changed.notify_all()
        member.seen = self._num_completed
        every = self._members.membership.num_workers // COPIES
        ledger = None
        if outcome is not Outcome.GO_ON or self._num_completed - self._ledger_sent_at >= every:
            self._ledger_sent_at = self._num_completed
            # Without claims: a restored center has no members.
            ledger = self._ledger.compact_state()
        return Assignment(
            outcome=outcome,
            claims=claims,
            ahead=self._ledger.reserved_by(worker_id),
            num_workers=self._members.membership.num_workers,
            rank=self._members.rank_of(worker_id),
            generation=self._generation,
            num_done=self._ledger.num_done_ever,
            seconds=self.seconds,
            version=self.version,
            ledger=ledger,
            keep=keep,
            num_cuts=self.num_cuts,
            share_of_round=sum(claim.num_steps for claim in claims) / whole_round,
            num_bytes=self._num_bytes,
            num_messages=self._num_messages,
        )

    def leave_generation(self, message_id: MessageId) -> None:
        """Record that a worker has left; once all have, the last snapshot is due.

        Only now does no shard have a message of the worker in transit. Its steps after the last
        message count if its replica continues with them, or if the run is finished.
        """
        with self._changed:
            if self._members.refusal(message_id):
                return
            worker_id = message_id.worker_id
            member = self._members[worker_id]
            if not member.calls.is_first("leave_generation", message_id):
                return
            member.has_closed = True
            answered = member.answered
            is_finished = answered is not None and answered[1].outcome is Outcome.FINISHED
            if self._keeps_own_steps or is_finished:
                self._request_evaluation(self._complete(worker_id))
            else:  # its replica becomes a copy of the center
                self._ledger.give_back(worker_id)
            if member.completion is not None:
                self._record(member.completion, at_once=True)
            self._request_last()
            self._watch.run(not self._members.is_closed)

    def _request_last(self) -> None:
        """Request the last snapshot if all members have left."""
        if self._members.is_closed:
            self._snapshots.add(self.version, is_kept=self._is_end)

    def _next(self, worker_id: str, max_steps: int) -> tuple[Outcome, list[Claim]]:
        """Return a worker's next work: the outcome of its round, and its claims.

        Args:
            worker_id: of the worker.
            max_steps: most local steps of the work.
        """
        member = self._members[worker_id]
        is_over = self._stop_condition.is_reached(
            num_samples=0,
            num_steps=member.local_step,
            seconds=self.seconds,
            num_bytes=self._num_bytes,
        )
        left = self._stop_condition.steps_left(member.local_step)
        num_steps = 0 if is_over else max_steps if left is None else min(max_steps, left)
        if self._max_samples(num_steps) == 0:
            return Outcome.FINISHED, []
        if self._votes.get("stop"):
            return Outcome.STOPPED, []
        if member.is_dismissed:
            return Outcome.LEFT, []
        if self._votes.get("regroup"):
            return Outcome.REGROUP, []
        return Outcome.GO_ON, self._claims(worker_id, num_steps)

    def _claims(self, worker_id: str, num_steps: int) -> list[Claim]:
        """Claim the samples of some local steps, from as many epochs as needed."""
        claims: list[Claim] = []
        is_skewed = self._config.input.skew is not None
        share = self._members.rank_of(worker_id) if is_skewed else None
        while count := self._max_samples(num_steps):
            epoch, spans = self._ledger.claim(worker_id, count, share=share)
            num_samples = sum(stop - start for start, stop in spans)
            steps = -(-num_samples // self._config.training.batch_size)
            claims.append(Claim(epoch, spans, steps))
            num_steps -= steps
        return claims

    def _max_samples(self, num_steps: int) -> int:
        """Return the samples of some local steps, or the rest of the run if that is fewer."""
        count = num_steps * self._config.training.batch_size
        left = self._stop_condition.samples_left(
            self._ledger.num_done_ever + self._ledger.num_claimed
        )
        return count if left is None else min(count, left)

    def _steps_of_whole_round(self, member: Member) -> int:
        """Return the local steps of a whole round: the period, or fewer for a slow worker."""
        steps = self._method.period
        if self._method.steps_by_speed and member.step_s > 0:
            least = self._members.least_step_s
            steps = steps_at_speed(steps, step_s=member.step_s, least_step_s=least)
        return steps

    def _record(self, completion: Completion, *, at_once: bool) -> None:
        self._aggregator.record(
            self._progress(self._ledger),
            num_workers=self._members.membership.num_workers,
            lr=completion.lr,
            exchange_bytes=completion.num_bytes,
            at_once=at_once,
        )

    def _progress(self, ledger: Ledger) -> Progress:
        return Progress(
            round=self.version,
            generation=self._generation,
            epoch=ledger.num_done_ever / ledger.num_samples,
            num_samples=ledger.num_done_ever,
            local_step=self._members.local_step,
            seconds=self.seconds,
            num_bytes=self._num_bytes,
            num_messages=self._num_messages,
        )

    def vote(self, generation: int, **votes: float) -> None:
        """Request that all workers ``stop``, ``regroup``, or keep a checkpoint.

        A vote from before the last ``begin_generation`` is ignored; later changes of the membership
        do not matter.
        """
        with self._changed:
            if not self._members.opened <= generation <= self._generation:
                return
            self.num_cuts = max(self.num_cuts, int(votes.pop("num_cuts", 0)))
            self._votes.update(votes)
            if self._votes.pop("checkpoint", 0.0) and self._members.in_training:
                self.version += 1  # a number that no other snapshot has
                self._snapshots.begin_checkpoint(self.version)

    # turns, for methods in rank order

    def take_turn(self, message_id: MessageId) -> None:
        """Wait until it is the worker's turn.

        Raises:
            ExchangeTimeoutError: if it did not come within ``exchange.timeout_s``.
            ExchangeError: if the worker is no member, or was removed while it waited.
        """
        with self._changed:
            member = self._admit(message_id)
            absent = self._members.not_entered

            def is_due() -> bool:
                # Not before all have entered: a turn ends with a claim, which comes after all first
                # claims. A worker's request for its next turn may overtake the end of its last one.
                is_holder = self._holder() == message_id.worker_id
                return is_holder and not member.has_turn and not absent()

            self._wait(
                message_id,
                lambda: member.calls.has("take_turn", message_id) or is_due(),
                lambda: absent() or [self._holder() or "nobody"],
            )
            if member.calls.is_first("take_turn", message_id):
                member.has_turn = True
                self._changed.notify_all()  # other copies of this call

    def end_turn(self, message_id: MessageId) -> None:
        """Pass the turn to the next rank."""
        with self._changed:
            if self._members.refusal(message_id):
                return
            member = self._members[message_id.worker_id]
            if member.calls.is_first("end_turn", message_id):
                member.has_turn = False
                self._turns.end(message_id.worker_id)
                self._changed.notify_all()

    def _holder(self) -> str | None:
        return self._turns.holder(lambda worker_id: self._members[worker_id].takes_turns)

    # for the center and the controller

    def is_complete(self) -> bool:
        """Return whether the completed samples or steps reach the end of the run.

        They may not, although members have finished: the claims of a lost worker are free again.
        """
        with self._changed:
            return self._stop_condition.is_reached(
                num_samples=self._ledger.num_done_ever,
                num_steps=self._members.least_local_step,
                seconds=self.seconds,
                num_bytes=self._num_bytes,
            )

    def pop_due(self) -> list[Due]:
        """Remove and return the requested snapshots: all kept ones, and the newest other one."""
        with self._changed:
            return self._snapshots.pop_due()

    def pop_records(self) -> tuple[Record, ...]:
        """Remove and return the new records."""
        with self._changed:
            return self._aggregator.pop_records()

    def state(self, *, is_kept: bool = False) -> dict[str, Any]:
        """Return the counters of a snapshot, by its field names.

        Args:
            is_kept: whether the snapshot belongs to a checkpoint: samples whose training is in the
                kept states then count as done.
        """
        with self._changed:
            ledger = self._ledger
            if is_kept:
                ledger = Ledger.from_state_dict(ledger.state_dict(with_claims=True))
                for worker_id in self._members:
                    member = self._members[worker_id]
                    ledger.complete(worker_id, max(0, member.num_kept - member.num_completed))
            return {
                "progress": self._progress(ledger),
                "ledger": ledger.state_dict(),
                "num_cuts": self.num_cuts,
                "non_trainable": dict(self._non_trainable),
            }
