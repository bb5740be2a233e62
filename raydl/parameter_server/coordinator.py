"""The coordinator: assigns samples where workers exchange with the center one by one.

Synchronous methods need none: every rank keeps the ledger and sees the same votes. With
messages the ledger is here, beside the center's home shard: a worker's message ends its
round, counts its samples as done and is answered with what to do next. Workers join and
leave while the others go on; what a lost one had claimed is claimed again. For methods in rank
order (``round_robin``) ``Turns`` says whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from raydl.config import TrainConfig
from raydl.core.membership import Membership
from raydl.core.methods import Method
from raydl.core.non_trainable import NonTrainable
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, Record, RecordAggregator
from raydl.core.rules import Sends
from raydl.core.stop_condition import StopCondition, num_evaluations_due
from raydl.data.ledger import Claim, Ledger
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.parameter_server.members import Member, Members
from raydl.parameter_server.protocol import Assignment, Completion, MessageId, Request


class Stopwatch:
    """Counts the seconds in which somebody trains; at first it stands.

    Args:
        clock: seconds, rising.
        seconds: what it shows at first.
    """

    def __init__(self, clock: Callable[[], float], *, seconds: float = 0.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Value shown."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def run(self, is_running: bool) -> None:
        """Let it run or stand from now on."""
        self._seconds = self.seconds
        self._since = self._clock() if is_running else None


@dataclass(frozen=True)
class Due:
    """A snapshot of the center that is wanted."""

    round: int
    is_kept: bool
    """Whether the workers kept their states under this number."""


class Dues:
    """The snapshots that are not made yet. The caller holds a lock."""

    def __init__(self) -> None:
        self._wanted: list[Due] = []
        self._checkpoint: int | None = None
        self._told: set[str] = set()

    def want(self, number: int, *, is_kept: bool) -> None:
        """Want a snapshot, under a number."""
        self._wanted.append(Due(number, is_kept))

    @property
    def has_checkpoint(self) -> bool:
        """Whether workers are being told to keep their states."""
        return self._checkpoint is not None

    def begin_checkpoint(self, number: int) -> None:
        """Have every worker told to keep its state, under a number."""
        self._checkpoint, self._told = number, set()

    def end_checkpoint(self) -> None:
        """Forget a checkpoint that somebody was not told of."""
        self._checkpoint, self._told = None, set()

    def tell(self, worker_id: str) -> int | None:
        """Return the number under which this worker has not kept its state, if it must."""
        if self._checkpoint is None or worker_id in self._told:
            return None
        self._told.add(worker_id)
        return self._checkpoint

    def settle_checkpoint(self, members: Set[str], in_training: Set[str]) -> None:
        """Want a checkpoint's snapshot once all in training were told to keep their states.

        What those kept who are no members any more is lost.
        """
        self._told &= members
        if self._checkpoint is not None and self._told >= in_training:
            if self._told:
                self.want(self._checkpoint, is_kept=True)
            self.end_checkpoint()

    def pop_due(self) -> list[Due]:
        """Return the snapshots that are due, once: all that are kept, and the newest other."""
        due, self._wanted = self._wanted, []
        return [d for i, d in enumerate(due) if d.is_kept or i == len(due) - 1]


class Turns:
    """A turn that goes round the workers of a membership, in the order of their ranks.

    It is kept by id rather than by place: joins and losses before it do not move it.
    """

    def __init__(self) -> None:
        self._order: tuple[str, ...] = ()
        self._whose: str | None = None

    def begin_generation(self, order: tuple[str, ...]) -> None:
        """Begin with the first of an order."""
        self._order, self._whose = order, order[0] if order else None

    def change(self, order: tuple[str, ...]) -> None:
        """Go on in another order. The turn of one that is gone falls to the next who stays."""
        if self._whose not in order:
            staying = [worker_id for worker_id in self._round() if worker_id in order]
            self._whose = next(iter([*staying, *order]), None)
        self._order = order

    def holder(self, takes_turns: Callable[[str], bool]) -> str | None:
        """Return whose turn it is, if anyone's.

        The turn passes over those that take none, for good: it stays with the next one even
        if they take turns again.
        """
        if self._whose is not None and takes_turns(self._whose):
            return self._whose  # as nearly always, and all who wait for theirs ask
        for worker_id in self._round():
            if takes_turns(worker_id):
                self._whose = worker_id
                return worker_id
        return None

    def end(self, worker_id: str) -> None:
        """Give the turn to the next, if it is this worker's."""
        if self._whose == worker_id:
            self._whose = (*self._round(), worker_id)[1]

    def _round(self) -> tuple[str, ...]:
        """Return all workers, beginning with whose turn it is."""
        if self._whose is None:
            return self._order
        place = self._order.index(self._whose)
        return self._order[place:] + self._order[:place]


__all__ = ["COPIES", "Coordinator", "Due"]

COPIES = 16
"""The ledger goes with the orders of so many workers in the time in which each exchanges once: it
has a line for each of p claims, and to tell all of them to everybody is p squared.

A lost center is made again from the worker that was told the ledger last. Where up to 31 train that
is the newest orders of all; of more the ledger is p/16 exchanges older at most, whose samples are
trained again, beside those of the p exchanges under way, which are lost in any case.
"""
_NONE: NonTrainable = {}


class Coordinator:
    """The ledger, the votes and the turns of a run, for any number of threads.

    Args:
        config: the run's settings.
        method: the run's method.
        ledger: which samples are done.
        version: exchanges settled before, and checkpoints voted for.
        seconds: seconds trained before.
        local_step: local steps of each worker before, the mean.
        non_trainable: what the center has of the non-trainable state; see
            ``raydl.core.center.Snapshot``.
        clock: seconds, rising.
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
        non_trainable: NonTrainable = _NONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._method = method
        self._ledger = ledger
        self._stop_condition = StopCondition.of(config.training, epoch_samples=ledger.num_samples)
        self._version = version
        self._num_settled = self._told_at = 0
        self._watch = Stopwatch(clock, seconds=seconds)
        self._aggregator = RecordAggregator(clock)
        self._changed = threading.Condition()
        self._members = Members(local_step=local_step)
        self._votes: dict[str, float] = {}
        self._dues = Dues()
        self._turns = Turns()
        self._non_trainable = dict(non_trainable)
        self._is_end = False
        self.num_cuts = 0
        """How often the learning rate was cut, for the schedule ``plateau``."""
        self.num_refused = 0
        """Calls of workers that are no members, or were others then."""

    def begin_generation(self, membership: Membership) -> None:
        """Begin with new members alone. Votes and turns of those before end with them."""
        with self._changed:
            self._ledger.release(members=membership.worker_ids)  # claims of before are void
            self._members.begin_generation(membership, seen=self._num_settled)
            self._votes, self._is_end = {}, False
            self._dues.end_checkpoint()
            self._turns.begin_generation(membership.worker_ids)
            self._watch.run(not self._members.is_closed)
            self._changed.notify_all()

    def change(self, membership: Membership) -> None:
        """Let workers join and leave; those who stay do not notice.

        What the ones that are gone had claimed is claimed again, and nobody waits for them.
        """
        with self._changed:
            was_closed = self._members.is_closed
            self._ledger.release(keep=membership.worker_ids)
            if self._members.change(membership, seen=self._num_settled):
                self._is_end = False
            self._turns.change(membership.worker_ids)
            self._settle_checkpoint()
            if not was_closed:
                self._want_last()
            self._watch.run(not self._members.is_closed)
            self._changed.notify_all()

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange, with ``Outcome.LEFT``.

        The others go on, and it stays a member until ``change``. Where the run is over
        with that exchange it is told so, as the others are.
        """
        with self._changed:
            member = self._members.get(worker_id)
            if member is not None:
                member.is_dismissed = True

    def _admit(self, message_id: MessageId) -> Member:
        """Return the caller; raise ExchangeError if it is no member, or another incarnation was."""
        problem = self._members.refusal(message_id)
        if problem:
            self.num_refused += 1
            raise ExchangeError(self._version, self._generation, problem)
        return self._members[message_id.worker_id]

    @property
    def _generation(self) -> int:
        return self._members.membership.generation

    @property
    def seconds(self) -> float:
        """Seconds of training, over all starts; those in which nobody trains do not count."""
        return self._watch.seconds

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return the first orders of a worker.

        In rank order where the method keeps to it: claims decide which samples one gets. Who
        joins while others train waits for nobody.

        Raises:
            ExchangeTimeoutError: a worker before this one did not come in time.
            ExchangeError: it is no member, or ceased to be one while it waited.
        """

        def missing() -> list[str]:
            return self._members.not_entered(before=message_id.worker_id)

        with self._changed:
            member = self._admit(message_id)
            if self._method.strategy == "round_robin" and member.is_awaited:
                self._wait(message_id, lambda: not missing(), missing)
            if member.answered is not None:  # the call was repeated
                return member.answered[1]
            member.local_step, member.has_entered = local_step, True
            assignment = self._assignment(message_id.worker_id, keep=None)
            member.answered = message_id.sequence, assignment
            self._changed.notify_all()
            return assignment

    def _wait(
        self, message_id: MessageId, is_true: Callable[[], bool], missing: Callable[[], list[str]]
    ) -> None:
        """Wait for other workers, bounded by ``exchange.timeout_s``, or for one's own removal."""
        timeout_s = self._config.exchange.timeout_s
        refusal = self._members.refusal
        if not self._changed.wait_for(lambda: refusal(message_id) or is_true(), timeout_s):
            raise ExchangeTimeoutError(self._version, self._generation, timeout_s, missing())
        self._admit(message_id)

    def settle(self, push: Request) -> Assignment | None:
        """Count what a worker has sent as done, and return what it does next.

        None: the worker ceased to be a member after its shard took the message, and its
        samples are claimed by others. It is counted as refused.
        """
        completion, worker_id = push.completion, push.message_id.worker_id
        assert completion is not None
        with self._changed:
            if self._members.refusal(push.message_id):
                self.num_refused += 1
                return None
            member = self._members[worker_id]
            # Not by versions: a checkpoint that is voted for has one, too.
            staleness = self._num_settled - member.seen
            self._num_settled += 1
            self._version += 1
            epoch = self._ledger.epoch
            is_due = self._complete(worker_id, completion.num_trained)
            num_steps = completion.local_step - member.local_step
            member.local_step, member.completion = completion.local_step, completion
            self._members.note_step(worker_id, completion.header.step_s)
            self._non_trainable.update(completion.non_trainable)
            self._aggregator.add(
                completion.header, num_messages=1, num_steps=num_steps, staleness=staleness
            )
            keep = self._dues.tell(worker_id)
            if keep is not None:
                member.num_kept = member.num_completed
                if self._keeps_own_steps:  # it has taken all by the time that it keeps its state
                    member.num_kept += self._ledger.num_claimed_by(worker_id)
            self._settle_checkpoint()
            assignment = self._assignment(worker_id, keep=keep)
            self._want_evaluation(is_due)
            at_once = self._ledger.epoch > epoch
            # A worker that leaves is recorded when it has left.
            if assignment.outcome is Outcome.GO_ON and (at_once or self._aggregator.is_due):
                self._record(completion, at_once=at_once)
            member.answered = push.message_id.sequence, assignment
            self._changed.notify_all()
            return assignment

    def _complete(self, worker_id: str, num_trained: int | None = None) -> bool:
        """Count as done what a worker has trained since it entered; return if a score is due.

        Args:
            worker_id: whose.
            num_trained: positions; None: all that it claimed.
        """
        num_due = num_evaluations_due(self._config.evaluation, self._ledger)
        member = self._members[worker_id]
        count = None if num_trained is None else num_trained - member.num_completed
        member.num_completed += self._ledger.complete(worker_id, count)
        return num_evaluations_due(self._config.evaluation, self._ledger) > num_due

    def _want_evaluation(self, is_due: bool) -> None:
        if is_due and self._members.in_training:  # else the final snapshot will do
            self._dues.want(self._version, is_kept=False)

    @property
    def _keeps_own_steps(self) -> bool:
        """Whether workers go on from replicas of their own, with steps that no message has."""
        return self._method.rule.sends is Sends.WEIGHTS

    def repeat(self, push: Request) -> Assignment:
        """Return the orders that a settled message was answered with.

        The message may come again while it is being settled.

        Raises:
            ExchangeTimeoutError: it was not settled in time.
            ExchangeError: its worker is no member, or ceased to be one meanwhile.
        """
        message_id = push.message_id
        with self._changed:
            member = self._admit(message_id)

            def is_answered() -> bool:
                return member.answered is not None and member.answered[0] >= message_id.sequence

            self._wait(message_id, is_answered, lambda: [message_id.worker_id])
            assert member.answered is not None
            return member.answered[1]

    def _settle_checkpoint(self) -> None:
        if self._dues.has_checkpoint:
            self._dues.settle_checkpoint(set(self._members), self._members.in_training)

    def _assignment(self, worker_id: str, *, keep: int | None) -> Assignment:
        member = self._members[worker_id]
        outcome, claims = self._next(worker_id)
        if outcome is not Outcome.GO_ON:
            member.has_left = True
            if outcome is not Outcome.LEFT:  # that says nothing of the run
                self._is_end = outcome in (Outcome.STOPPED, Outcome.FINISHED)
            self._settle_checkpoint()
            self._changed.notify_all()
        member.seen = self._num_settled
        return Assignment(
            outcome=outcome,
            claims=claims,
            ahead=self._ledger.reserved_by(worker_id),
            num_workers=self._members.membership.num_workers,
            rank=self._members.rank_of(worker_id),
            num_done=self._ledger.num_done_ever,
            seconds=self.seconds,
            version=self._version,
            ledger=self._copy_due(outcome),
            keep=keep,
            num_cuts=self.num_cuts,
        )

    def _copy_due(self, outcome: Outcome) -> dict[str, Any] | None:
        """Return the ledger for orders that should have it; see ``COPIES``.

        Claims are not told: a center that is made again begins without members.
        """
        every = self._members.membership.num_workers // COPIES
        if outcome is Outcome.GO_ON and self._num_settled - self._told_at < every:
            return None
        self._told_at = self._num_settled
        return self._ledger.as_told()

    def leave_generation(self, message_id: MessageId) -> None:
        """Note that a worker has left; when all have, the last snapshot is due.

        Only now no message is on its way to any shard. Its steps after the last message are taken,
        too: they count where its replica goes on with them, or where nobody goes on.
        """
        with self._changed:
            if self._members.refusal(message_id):
                return
            member = self._members[message_id.worker_id]
            is_news, member.has_closed = not member.has_closed, True
            if is_news:
                self._count_last_steps(message_id.worker_id)
                if member.completion is not None:
                    self._record(member.completion, at_once=True)
                self._want_last()
                self._watch.run(not self._members.is_closed)

    def _count_last_steps(self, worker_id: str) -> None:
        answered = self._members[worker_id].answered
        is_finished = answered is not None and answered[1].outcome is Outcome.FINISHED
        if self._keeps_own_steps or is_finished:
            self._want_evaluation(self._complete(worker_id))
        else:  # it becomes a copy of the center
            self._ledger.give_back(worker_id)

    def _want_last(self) -> None:
        """Want the last snapshot if all have left; of those that are gone, none is to come."""
        if self._members.is_closed:
            self._dues.want(self._version, is_kept=self._is_end)

    def _next(self, worker_id: str) -> tuple[Outcome, list[Claim]]:
        """Return a worker's next work: the outcome of its round, and its claims."""
        member = self._members[worker_id]
        is_over = self._stop_condition.is_reached(
            num_samples=0, num_steps=member.local_step, seconds=self.seconds
        )
        num_steps = 0 if is_over else self._max_steps(member)
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
        """Claim the samples of some local steps, in as many epochs as that takes."""
        claims: list[Claim] = []
        while count := self._max_samples(num_steps):
            epoch, spans = self._ledger.claim(worker_id, count)
            num_samples = sum(stop - start for start, stop in spans)
            steps = -(-num_samples // self._config.training.batch_size)
            claims.append(Claim(epoch, spans, steps))
            num_steps -= steps
        return claims

    def _max_samples(self, num_steps: int) -> int:
        """Return the samples of so many local steps, or what is left of the run if that is less."""
        count = num_steps * self._config.training.batch_size
        left = self._stop_condition.samples_left(
            self._ledger.num_done_ever + self._ledger.num_claimed
        )
        return count if left is None else min(count, left)

    def _max_steps(self, member: Member) -> int:
        """Return the local steps of a full round: the period, less for one that is slow."""
        steps = self._method.period
        if self._method.by_speed and member.step_s > 0:
            steps = max(1, round(steps * self._members.least_step_s / member.step_s))
        left = self._stop_condition.steps_left(member.local_step)
        return steps if left is None else min(steps, left)

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
            round=self._version,
            generation=self._generation,
            epoch=ledger.num_done_ever / ledger.num_samples,
            num_samples=ledger.num_done_ever,
            local_step=self._members.local_step,
            seconds=self.seconds,
        )

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all workers to ``stop``, to ``regroup``, or to keep a checkpoint.

        A vote of a generation before the last ``open`` is ignored; changes of membership
        since then do not matter to it.
        """
        with self._changed:
            if not self._members.opened <= generation <= self._generation:
                return
            self.num_cuts = max(self.num_cuts, int(votes.pop("num_cuts", 0)))
            self._votes.update(votes)
            if self._votes.pop("checkpoint", 0.0) and self._members.in_training:
                self._version += 1  # a number that no other snapshot has
                self._dues.begin_checkpoint(self._version)

    # turns, for methods in rank order

    def take_turn(self, message_id: MessageId) -> None:
        """Wait until it is the worker's turn.

        Raises:
            ExchangeTimeoutError: it did not come within ``exchange.timeout_s``.
            ExchangeError: it is no member, or ceased to be one while it waited.
        """
        with self._changed:
            member = self._admit(message_id)
            if member.turn == message_id.sequence:  # the call was repeated
                return
            absent = self._members.not_entered
            # Not before all have entered: a turn ends with a claim, after the first ones of all
            # others. The end of a worker's turn may be overtaken by its call for the next one.
            self._wait(
                message_id,
                lambda: (
                    self._holder() == message_id.worker_id and member.turn is None and not absent()
                ),
                lambda: absent() or [self._holder() or "nobody"],
            )
            member.turn = message_id.sequence

    def end_turn(self, message_id: MessageId) -> None:
        """Let the next in rank order begin."""
        with self._changed:
            if self._members.refusal(message_id):
                return
            self._members[message_id.worker_id].turn = None
            self._turns.end(message_id.worker_id)
            self._changed.notify_all()

    def _holder(self) -> str | None:
        return self._turns.holder(lambda worker_id: self._members[worker_id].takes_turns)

    # what others ask for

    @property
    def version(self) -> int:
        """Exchanges settled, over all starts."""
        return self._version

    def is_complete(self) -> bool:
        """Whether what is done reaches the run's extent.

        It may not, though members were told that the run is finished: what another one had
        claimed goes back if that one is lost.
        """
        with self._changed:
            return self._stop_condition.is_reached(
                num_samples=self._ledger.num_done_ever,
                num_steps=self._members.least_local_step,
                seconds=self.seconds,
            )

    def pop_due(self) -> list[Due]:
        """Return the snapshots that are wanted: all that are kept, and the newest other."""
        with self._changed:
            return self._dues.pop_due()

    def pop_records(self) -> tuple[Record, ...]:
        """Return the records that nobody has taken yet."""
        with self._changed:
            return self._aggregator.pop_records()

    def state(self, *, is_kept: bool = False) -> dict[str, Any]:
        """Return the counters of a snapshot, by its own field names.

        Args:
            is_kept: the snapshot is of a checkpoint, with states that the workers have kept: what
                is trained in these counts, too.
        """
        with self._changed:
            ledger = self._kept_ledger() if is_kept else self._ledger
            return {
                "progress": self._progress(ledger),
                "ledger": ledger.state_dict(),
                "num_cuts": self.num_cuts,
                "non_trainable": dict(self._non_trainable),
            }

    def _kept_ledger(self) -> Ledger:
        """Return the ledger of a checkpoint."""
        ledger = Ledger.from_state_dict(self._ledger.state_dict(with_claims=True))
        for worker_id in self._members:
            member = self._members[worker_id]
            ledger.complete(worker_id, max(0, member.num_kept - member.num_completed))
        return ledger
