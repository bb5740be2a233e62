"""Who gives orders where workers exchange with the center one by one.

Synchronous methods need none: every rank keeps the ledger and sees the same votes. With
messages the ledger is here, beside the center's home shard: a worker's message ends its
round, counts its samples as done and is answered with what to do next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydl.config import TrainConfig
from raydl.errors import ExchangeTimeoutError
from raydl.exchange.messages import Orders, Push, Stamp
from raydl.extent import Extent, num_evaluations_due
from raydl.ledger import Ledger
from raydl.membership import Membership
from raydl.method import Method
from raydl.reports import Books, Outcome, Record, Standing


@dataclass(frozen=True)
class Due:
    """A snapshot of the center that is wanted."""

    round: int
    is_kept: bool
    """Whether the workers kept their states under this number."""


@dataclass
class _Member:
    """What the dispatcher knows of a worker in this generation."""

    local_step: int = 0
    seen_version: int = 0
    step_s: float = 0.0
    has_entered: bool = False
    has_left: bool = False
    """It was told to leave."""
    has_closed: bool = False
    """It has left, with all its messages answered."""
    turn: int | None = None
    """The number of the message that holds the turn."""
    answered: tuple[int, Orders] | None = None
    """The newest message that was answered with orders, and these."""


class Dispatcher:
    """The ledger, the votes and the turns of a run, for any number of threads.

    Args:
        config: the run's settings.
        method: the run's method.
        ledger: which samples are done.
        version: exchanges settled before.
        seconds: seconds trained before.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._method = method
        self._ledger = ledger
        self._extent = Extent.of(config.training, epoch_samples=ledger.num_samples)
        self._version = version
        self._seconds_before = seconds
        self._clock = clock
        self._opened_at: float | None = None
        self._books = Books(clock)
        self._changed = threading.Condition()
        self._membership = Membership(0, ())
        self._members: dict[str, _Member] = {}
        self._votes: dict[str, float] = {}
        self._told: set[str] = set()
        self._checkpoint: int | None = None
        self._due: list[Due] = []
        self._turn = 0
        self._is_end = False

    def open(self, membership: Membership) -> None:
        """Begin a generation. Votes and turns of the one before end with it."""
        with self._changed:
            for worker_id in self._membership.worker_ids:
                self._ledger.give_back(worker_id)  # what was under way when it left
            self._membership = membership
            self._members = {w: _Member() for w in membership.worker_ids}
            self._votes, self._told, self._checkpoint = {}, set(), None
            self._turn = 0
            if self._opened_at is None:
                self._opened_at = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds of training, over all starts."""
        since = 0.0 if self._opened_at is None else self._clock() - self._opened_at
        return self._seconds_before + since

    def enter(self, stamp: Stamp, local_step: int) -> Orders:
        """Return the first orders of a worker in this generation.

        In rank order where the method keeps to it: claims decide which samples one gets.

        Raises:
            ExchangeTimeoutError: a worker before this one did not come in time.
        """
        with self._changed:
            if self._method.schedule == "round_robin":
                self._wait_for_ranks_before(stamp.worker_id)
            member = self._members[stamp.worker_id]
            if member.answered is not None:  # the call was repeated
                return member.answered[1]
            member.local_step, member.has_entered = local_step, True
            orders = self._orders(stamp.worker_id, keep=None)
            member.answered = stamp.sequence, orders
            self._changed.notify_all()
            return orders

    def _wait_for_ranks_before(self, worker_id: str) -> None:
        workers = self._membership.worker_ids
        before = workers[: workers.index(worker_id)]

        def missing() -> list[str]:
            return [w for w in before if not self._members[w].has_entered]

        self._wait(lambda: not missing(), missing)

    def _wait(self, is_true: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        """Wait for other workers, bounded by ``exchange.timeout_s``."""
        timeout_s = self._config.exchange.timeout_s
        if not self._changed.wait_for(is_true, timeout_s):
            generation = self._membership.generation
            raise ExchangeTimeoutError(self._version, generation, timeout_s, missing())

    def settle(self, push: Push) -> Orders:
        """Count the round behind a message as done, and return what the worker does next."""
        settlement, worker_id = push.settlement, push.stamp.worker_id
        assert settlement is not None
        with self._changed:
            member = self._members[worker_id]
            staleness = self._version - member.seen_version
            self._version += 1
            epoch, num_due = (
                self._ledger.epoch,
                num_evaluations_due(self._config.evaluation, self._ledger),
            )
            self._ledger.complete(worker_id)
            member.local_step = settlement.local_step
            member.step_s = settlement.header.step_s
            self._books.add(settlement.header, num_messages=1, staleness=staleness)
            orders = self._orders(worker_id, keep=self._keep(worker_id))
            # Of the last one of all, the final snapshot will do.
            if (
                num_evaluations_due(self._config.evaluation, self._ledger) > num_due
                and not self._has_ended()
            ):
                self._due.append(Due(self._version, False))
            is_end = orders.outcome is not Outcome.GO_ON
            self._books.record(self._standing(push), at_once=is_end or self._ledger.epoch > epoch)
            member.answered = push.stamp.sequence, orders
            self._changed.notify_all()
            return orders

    def repeat(self, push: Push) -> Orders:
        """Return the orders that a settled message was answered with.

        The message may come again while it is being settled.

        Raises:
            ExchangeTimeoutError: it was not settled in time.
        """
        worker_id, sequence = push.stamp.worker_id, push.stamp.sequence

        def orders() -> Orders | None:
            answered = self._members[worker_id].answered
            return answered[1] if answered is not None and answered[0] >= sequence else None

        with self._changed:
            self._wait(lambda: orders() is not None, lambda: [worker_id])
            found = orders()
            assert found is not None
            return found

    def _keep(self, worker_id: str) -> int | None:
        """Return the number of the checkpoint that this worker has not kept its state for."""
        if self._checkpoint is None or worker_id in self._told:
            return None
        number = self._checkpoint
        self._told.add(worker_id)
        if self._told >= {w for w, m in self._members.items() if not m.has_left}:
            self._due.append(Due(number, True))
            self._checkpoint = None
        return number

    def _orders(self, worker_id: str, *, keep: int | None) -> Orders:
        member = self._members[worker_id]
        outcome, epoch, spans, num_steps = self._next(worker_id)
        if outcome is not Outcome.GO_ON:
            member.has_left = True
            self._is_end = outcome in (Outcome.STOPPED, Outcome.FINISHED)
            self._changed.notify_all()
        member.seen_version = self._version
        return Orders(
            outcome=outcome,
            epoch=epoch,
            spans=spans,
            num_steps=num_steps,
            num_workers=self._membership.num_workers,
            num_done=self._ledger.num_done_ever,
            seconds=self.seconds,
            version=self._version,
            keep=keep,
        )

    def leave(self, stamp: Stamp) -> None:
        """Note that a worker has left; when all have, the last snapshot is due.

        Only now no message is on its way to any shard.
        """
        with self._changed:
            if stamp.generation != self._membership.generation:
                return
            member = self._members[stamp.worker_id]
            is_news, member.has_closed = not member.has_closed, True
            if is_news and all(m.has_closed for m in self._members.values()):
                self._due.append(Due(self._version, self._is_end))

    def _next(self, worker_id: str) -> tuple[Outcome, int, list[tuple[int, int]], int]:
        """Return (outcome, epoch, spans, local steps) of a worker's next round."""
        member, batch_size = self._members[worker_id], self._config.training.batch_size
        is_over = self._extent.is_reached(
            num_samples=0, num_steps=member.local_step, seconds=self.seconds
        )
        count = 0 if is_over else batch_size * self._max_steps(worker_id)
        left = self._extent.samples_left(self._ledger.num_done_ever + self._ledger.num_claimed)
        count = count if left is None else min(count, left)
        if count == 0:
            return Outcome.FINISHED, 0, [], 0
        if self._votes.get("stop"):
            return Outcome.STOPPED, 0, [], 0
        if self._votes.get("regroup"):
            return Outcome.REGROUP, 0, [], 0
        epoch, spans = self._ledger.claim(worker_id, count)
        num_samples = sum(stop - start for start, stop in spans)
        return Outcome.GO_ON, epoch, spans, -(-num_samples // batch_size)

    def _max_steps(self, worker_id: str) -> int:
        """Return the local steps of a full round: the period, less for one that is slow."""
        steps = self._method.period
        if self._method.by_speed:
            known = [m.step_s for m in self._members.values() if m.step_s > 0]
            own = self._members[worker_id].step_s
            if own > 0:
                steps = max(1, round(steps * min(known) / own))
        left = self._extent.steps_left(self._members[worker_id].local_step)
        return steps if left is None else min(steps, left)

    def _standing(self, push: Push) -> Standing:
        assert push.settlement is not None
        return Standing(
            round=self._version,
            generation=self._membership.generation,
            num_workers=self._membership.num_workers,
            epoch=self._ledger.num_done_ever / self._ledger.num_samples,
            num_samples=self._ledger.num_done_ever,
            local_step=self._local_step,
            lr=push.settlement.lr,
            exchange_bytes=push.settlement.num_bytes,
        )

    @property
    def _local_step(self) -> int:
        """Local steps of each worker, the mean."""
        steps = [m.local_step for m in self._members.values()]
        return sum(steps) // max(1, len(steps))

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all workers of a generation to ``stop``, to ``regroup``, or to keep a checkpoint."""
        with self._changed:
            if generation != self._membership.generation or self._has_ended():
                return
            self._votes.update(votes)
            if self._votes.pop("checkpoint", 0.0):
                self._version += 1  # a number that no other snapshot has
                self._checkpoint, self._told = self._version, set()

    def _has_ended(self) -> bool:
        return all(member.has_left for member in self._members.values())

    # turns, for methods in rank order

    def take_turn(self, stamp: Stamp) -> None:
        """Wait until it is the worker's turn.

        Raises:
            ExchangeTimeoutError: it did not come within ``exchange.timeout_s``.
        """
        member = self._members[stamp.worker_id]
        with self._changed:
            if member.turn == stamp.sequence:  # the call was repeated
                return
            # The end of a worker's turn may be overtaken by its call for the next one.
            self._wait(
                lambda: self._holder() == stamp.worker_id and member.turn is None,
                lambda: [self._holder() or "nobody"],
            )
            member.turn = stamp.sequence

    def end_turn(self, stamp: Stamp) -> None:
        """Let the next in rank order begin."""
        with self._changed:
            if stamp.generation != self._membership.generation:
                return
            workers = self._membership.worker_ids
            self._members[stamp.worker_id].turn = None
            if workers and workers[self._turn % len(workers)] == stamp.worker_id:
                self._turn += 1
                self._changed.notify_all()

    def _holder(self) -> str | None:
        """Return whose turn it is; those that have left are passed over."""
        workers = self._membership.worker_ids
        for offset in range(len(workers)):
            worker_id = workers[(self._turn + offset) % len(workers)]
            if not self._members[worker_id].has_left:
                self._turn += offset
                return worker_id
        return None

    # what others ask for

    def take_due(self) -> list[Due]:
        """Return the snapshots that are wanted: all that are kept, and the newest other."""
        with self._changed:
            due, self._due = self._due, []
        return [d for i, d in enumerate(due) if d.is_kept or i == len(due) - 1]

    def take_records(self) -> tuple[Record, ...]:
        """Return the records that nobody has taken yet."""
        with self._changed:
            return self._books.take()

    def state(self) -> dict[str, Any]:
        """Return the counters of a snapshot, by its own field names."""
        with self._changed:
            return {
                "generation": self._membership.generation,
                "epoch": self._ledger.epoch,
                "num_samples": self._ledger.num_done_ever,
                "local_step": self._local_step,
                "seconds": self.seconds,
                "ledger": self._ledger.state_dict(),
            }
