"""Decides when the membership of a run changes: between rounds, or while the others train.

In synchronous methods all leave at the same round and a new generation forms; by messages the
center alone learns of a change. The policies look at a generation and return what follows; the
controller does it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raydl.config import TrainConfig
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.worker_group import WorkerGroup
from raydl.elastic.center_manager import CenterManager
from raydl.elastic.failures import RunFailure
from raydl.elastic.generation import Generation
from raydl.elastic.stragglers import StragglerDetector, late_workers
from raydl.elastic.worker_pool import WorkerPool
from raydl.elastic.worker_registry import Copy, Phase, WorkerRegistry

_ANSWER_S = 0.75
"""The least time that a survivor has to come out of an abandoned exchange, in seconds."""
CAUSE_S = 2.0
"""Seconds that a broken exchange waits for news of its cause: a worker, or the center, was lost."""


class Next(enum.Enum):
    """The next step of the generation that trains."""

    TRAIN = "it trains on"
    REGROUP = "all leave after an exchange"
    ABANDON = "an exchange will not complete: free those who wait in it"
    END = "all have left: the next generation goes on from the furthest copy"


@dataclass(frozen=True)
class Change:
    """Workers come and go while the others train."""

    membership: Membership
    reason: str


class MembershipPolicy(Protocol):
    """Says when members come and go, for one kind of method."""

    @property
    def answer_s(self) -> float:
        """Seconds that survivors have to come out of an exchange that was abandoned."""
        ...

    def watch(self, run: Generation) -> Next | Change:
        """Return the next state of a generation that trains, and that the center knows."""
        ...

    def watch_regroup(self, run: Generation) -> Next | Change:
        """Return the next state of a generation that is leaving by vote."""
        ...

    def round_to_go_on_from(
        self, run: Generation | None, copy: Copy | None, known: int
    ) -> int | None:
        """Return the furthest round, of a copy or of the center itself; None: wait for it.

        Args:
            run: the generation that has ended; None: there was none.
            copy: the furthest that a worker has.
            known: the round that the newest generation began with.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SyncMembership:
    """Lets all leave at the same round when someone joins or leaves.

    A vote rides on the exchange, so nobody waits for it. When a worker is lost in an exchange
    the others can not vote: they are told to abandon it, and go on from the round that the
    furthest of them has completed.
    """

    config: TrainConfig
    worker_group: WorkerGroup
    worker_pool: WorkerPool
    worker_registry: WorkerRegistry
    center_manager: CenterManager
    stragglers: StragglerDetector
    log: Callable[[str], None]

    @property
    def answer_s(self) -> float:
        """Seconds that survivors have to come out of an exchange that was abandoned."""
        return max(_ANSWER_S, min(self.stragglers.grace_s(), self.config.exchange.timeout_s))

    def watch(self, run: Generation) -> Next:
        """Return the next state of a generation that trains."""
        if run.lost or run.is_broken:
            return Next.ABANDON
        if not run.at_work:
            return Next.END
        if run.ended:  # the others are on their way out, at the same round
            return Next.TRAIN
        if self._leaves_out_late(run):
            return Next.ABANDON
        return Next.REGROUP if self._wants_regroup(run) else Next.TRAIN

    def watch_regroup(self, run: Generation) -> Next:
        """Return the next state of a generation that is leaving by vote."""
        if run.lost or run.is_broken:
            return Next.ABANDON
        if not run.at_work:
            return Next.END
        return Next.ABANDON if not run.ended and self._leaves_out_late(run) else Next.REGROUP

    def _wants_regroup(self, run: Generation) -> bool:
        center = self.center_manager
        if center.is_lost:
            # Training goes on: workers hold the center, and meet where it was when they formed.
            center.rebuild(None)
            self.log("the center is started again, and takes in the workers' copy")
        if not center.published:  # a new center is on its way: nobody could meet now
            return False
        membership, reason = self.worker_pool.decide(run.membership)
        if membership == run.membership:
            if not center.is_new:
                return False
            reason = "the center is back"
        elif not center.is_new and self._waits_for_newcomer(run, membership):
            return False
        self.log(f"{reason}: regrouping after this round")
        self.worker_group.vote(run.membership.generation, regroup=1.0)
        return True

    def _waits_for_newcomer(self, run: Generation, membership: Membership | None) -> bool:
        """Whether nobody leaves, somebody joins, and its replica is on its way."""
        if membership is None or not set(run.membership.worker_ids) < set(membership.worker_ids):
            return False
        return self.worker_pool.awaits_handover(membership.worker_ids)

    def _leaves_out_late(self, run: Generation) -> bool:
        """Go on without workers that the others wait for beyond all that is usual."""
        elastic, p = self.config.elastic, len(run.at_work)
        if not elastic.leave_out_slow or p == 1:
            return False
        late = late_workers(
            self.worker_registry.waiting_s(run.at_work, generation=run.membership.generation),
            grace_s=self.stragglers.grace_s(),
            quorum=min(1.0, max(elastic.quorum, self.config.scaling.min_workers / p)),
        )
        self.worker_pool.leave_out(run, late)
        return bool(late)

    def round_to_go_on_from(
        self, run: Generation | None, copy: Copy | None, known: int
    ) -> int | None:
        """Return the furthest round, of a copy or of the center itself; None: wait for it."""
        # Workers that are there may be behind, if others have gone that the center knew; and one
        # that was left out may have a round that the others trained anew, without it.
        is_of_now = copy is not None and copy.generation >= self.center_manager.newest_generation
        at = copy.round if copy and is_of_now else -1
        return at if at >= known else max(at, self.center_manager.newest)


@dataclass(frozen=True, kw_only=True)
class AsyncMembership:
    """Changes the membership at the center alone; workers that stay do not notice.

    One change at a time: until the center knows it, nothing else is decided.
    """

    config: TrainConfig
    worker_group: WorkerGroup
    worker_pool: WorkerPool
    worker_registry: WorkerRegistry
    center_manager: CenterManager
    failure: RunFailure
    log: Callable[[str], None]
    clock: Callable[[], float]

    @property
    def answer_s(self) -> float:
        """Seconds that survivors have to come out of an exchange that was abandoned."""
        return self.config.elastic.lease_s  # nobody waits but for the center

    def watch(self, run: Generation) -> Next | Change:
        """Return the next state of a generation that trains."""
        if self.center_manager.is_lost:
            return Next.ABANDON
        self._drop_those_out(run)
        if self.failure.error is not None:
            return self._stop_on_error(run)
        if not run.at_work and run.is_broken:  # news of the center may follow
            return Next.TRAIN
        if not run.at_work and not run.lost:
            return Next.END
        membership, reason = self.worker_pool.decide(run.membership)
        if membership is not None and run.lost:
            return self._without_the_lost(run)
        if membership is None:
            self.log(f"{reason}: all leave after their next exchange")
            return Next.REGROUP
        self._dismiss_leavers(run)
        is_new = membership.worker_ids != run.membership.worker_ids
        if is_new and not self._waits_for_leaver(run, membership):
            return Change(membership, reason)
        return Next.TRAIN

    def _stop_on_error(self, run: Generation) -> Next | Change:
        """Wait until the others have left by vote, and the center has kept where they were."""
        if run.lost:
            return self._without_the_lost(run)
        return Next.END if not run.at_work and run.num_snapshots > 1 else Next.TRAIN

    def _drop_those_out(self, run: Generation) -> None:
        """Count out those whose loop has ended while the run goes on."""
        # Else it may be the center that went away.
        has_failed = self.failure.error is not None
        is_explained = has_failed or self.clock() - run.broken_at > CAUSE_S
        out = [
            end
            for end in run.ended.values()
            if end.outcome is Outcome.LEFT
            or (end.outcome is Outcome.BROKEN and (is_explained or end.error is not None))
        ]
        for end in out:
            worker_id = end.worker_id
            if end.outcome is Outcome.BROKEN:
                if end.error is None and not has_failed:
                    self.log(f"{worker_id} left its exchange: {end.problem}")
                    self.worker_pool.count_loss(worker_id, end.problem)
                self.worker_registry.stand_by(worker_id, "diverged" if end.error else "")
            run.lose(worker_id)

    def _without_the_lost(self, run: Generation) -> Change:
        """Let the center wait for nobody who is gone; who comes, comes with the next change."""
        gone = [w for w in run.membership.worker_ids if w in run.lost]
        reason = ", ".join(f"{w} {self.worker_registry.cause_of(w)}" for w in gone)
        return Change(Membership(0, run.present), reason)

    def _dismiss_leavers(self, run: Generation) -> None:
        for worker_id in self.worker_registry.named(Phase.LEAVING):
            entry = self.worker_registry[worker_id]
            if worker_id in run.at_work and not entry.is_dismissed:
                entry.is_dismissed = True
                self.worker_group.dismiss(worker_id)

    def _waits_for_leaver(self, run: Generation, membership: Membership) -> bool:
        """Whether somebody is on the way to the exchange after which it leaves, or its state."""
        is_leaving = any(self.worker_registry[w].phase is Phase.LEAVING for w in run.at_work)
        return is_leaving or self.worker_pool.awaits_handover(membership.worker_ids)

    def watch_regroup(self, run: Generation) -> Next | Change:
        """Return the next state of a generation that is leaving by vote."""
        if self.center_manager.is_lost:
            return Next.ABANDON
        if run.is_changing:
            return Next.REGROUP
        self._drop_those_out(run)
        if run.lost:
            return self._without_the_lost(run)
        if not run.at_work and run.is_broken:
            return Next.REGROUP  # news of the center may follow
        if not run.is_regroup_voted:
            run.is_regroup_voted = True
            self.worker_group.vote(run.membership.generation, regroup=1.0)
            return Next.REGROUP
        return Next.REGROUP if run.at_work else Next.END

    def round_to_go_on_from(
        self, run: Generation | None, copy: Copy | None, known: int
    ) -> int | None:
        """Return the furthest round, of a copy or of the center itself; None: wait for it."""
        # The center makes the last snapshot by itself; a new one has what it has.
        end, newest = run.freshest() if run else None, self.center_manager.newest
        is_there = end is None or self.center_manager.is_new or newest >= end.round
        return newest if is_there else None
