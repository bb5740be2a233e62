"""Decides when the membership of a run changes: between rounds, or while the others train.

In synchronous methods all members leave after the same round, and a new generation forms. In
methods with messages only the center changes its members. A policy inspects a generation and
returns a decision, which the controller carries out.
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
"""The shortest time-out for survivors to leave an abandoned exchange, in seconds."""
CAUSE_S = 2.0
"""Seconds after a failed exchange in which its cause may be reported: a lost worker or center."""


class Next(enum.Enum):
    """The next step of the generation that trains."""

    TRAIN = "it continues to train"
    REGROUP = "all members leave after an exchange"
    ABANDON = "an exchange cannot complete: its members are released"
    END = "all members have left: the next generation continues from the furthest copy"


@dataclass(frozen=True)
class Change:
    """A new membership, adopted while the members that stay train on."""

    membership: Membership
    reason: str


class MembershipPolicy(Protocol):
    """Decides when members join and leave, for one kind of method."""

    @property
    def answer_s(self) -> float:
        """Time-out for survivors to leave an abandoned exchange, in seconds."""
        ...

    def watch(self, run: Generation) -> Next | Change:
        """Return the decision for a generation that trains."""
        ...

    def watch_regroup(self, run: Generation) -> Next | Change:
        """Return the decision for a generation that leaves by vote."""
        ...

    def round_to_go_on_from(
        self, run: Generation | None, copy: Copy | None, known: int
    ) -> int | None:
        """Return the round that training continues from, or None to wait for it.

        Args:
            run: the generation that has ended; None: there was none.
            copy: the furthest copy of the center that a worker has.
            known: the round that the newest generation began with.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SyncMembership:
    """Lets all members leave after the same round when a worker joins or leaves.

    The vote is part of the exchange, so no worker waits for it. When a worker is lost in an
    exchange, the others cannot vote. They abandon it, and the next generation continues from the
    furthest round that a member has completed.
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
        """Time-out for survivors to leave an abandoned exchange, in seconds."""
        return max(_ANSWER_S, min(self.stragglers.grace_s(), self.config.exchange.timeout_s))

    def watch(self, run: Generation) -> Next:
        """Return the decision for a generation that trains."""
        if run.lost or run.is_broken:
            return Next.ABANDON
        if run.is_idle:
            return Next.END
        if run.ended:  # the others leave after the same round
            return Next.TRAIN
        if self._leaves_out_late(run):
            return Next.ABANDON
        return Next.REGROUP if self._wants_regroup(run) else Next.TRAIN

    def watch_regroup(self, run: Generation) -> Next:
        """Return the decision for a generation that leaves by vote."""
        if run.lost or run.is_broken:
            return Next.ABANDON
        if run.is_idle:
            return Next.END
        return Next.ABANDON if not run.ended and self._leaves_out_late(run) else Next.REGROUP

    def _wants_regroup(self, run: Generation) -> bool:
        center = self.center_manager
        if center.is_lost:
            # Training continues: each worker holds the center, and the group has formed already.
            center.rebuild(None)
            self.log("the center restarts and will adopt the workers' copy")
        if not center.published:  # no generation could form before the new center has started
            return False
        membership, reason = self.worker_pool.decide(run.membership)
        if membership == run.membership:
            if not center.is_new:
                return False
            reason = "the center has restarted"
        elif not center.is_new and membership is not None:
            # No member leaves, and the replica of a newcomer is being handed over.
            is_growing = set(run.membership.worker_ids) < set(membership.worker_ids)
            if is_growing and self.worker_pool.awaits_handover(membership.worker_ids):
                return False
        self.log(f"{reason}: regrouping after this round")
        self.worker_group.vote(run.membership.generation, regroup=1.0)
        return True

    def _leaves_out_late(self, run: Generation) -> bool:
        """Leave out stragglers; return whether there were any."""
        elastic, p = self.config.elastic, len(run.at_work)
        if not elastic.leave_out_slow or p == 1:
            return False
        # With a fixed number of workers none can be left out: --deterministic relies on that.
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
        """Return the round that training continues from: the furthest of a copy or the center."""
        # The survivors may be behind the center, if members ahead of them were lost. And a worker
        # that was left out may have a round that the others trained again without it.
        is_of_now = copy is not None and copy.generation >= self.center_manager.newest_generation
        at = copy.round if copy and is_of_now else -1
        return at if at >= known else max(at, self.center_manager.newest)


@dataclass(frozen=True, kw_only=True)
class AsyncMembership:
    """Changes the membership only at the center; the members that stay train on.

    One change at a time: until the center has confirmed it, the policy decides nothing else.
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
        """Time-out for survivors to leave an abandoned exchange, in seconds."""
        return self.config.elastic.lease_s  # a worker waits only for the center

    def watch(self, run: Generation) -> Next | Change:
        """Return the decision for a generation that trains."""
        if self.center_manager.is_lost:
            return Next.ABANDON
        self._drop_ended(run)
        if self.failure.error is not None:
            if run.lost:
                return self._without_the_lost(run)
            # Until the others have left by vote, and the center has a snapshot taken later.
            return Next.END if run.is_idle and run.num_snapshots > 1 else Next.TRAIN
        if run.is_idle and run.is_broken:  # the loss of the center may be reported next
            return Next.TRAIN
        if run.is_idle and not run.lost:
            return Next.END
        membership, reason = self.worker_pool.decide(run.membership)
        if membership is not None and run.lost:
            return self._without_the_lost(run)
        if membership is None:
            self.log(f"{reason}: all workers leave after their next exchange")
            return Next.REGROUP
        leavers = self._dismiss_leavers(run)
        if membership.worker_ids == run.membership.worker_ids:
            return Next.TRAIN
        # A leaver may be before its last exchange, or its replica on the way to a newcomer.
        is_leaving = any(w in leavers for w in run.at_work)
        if is_leaving or self.worker_pool.awaits_handover(membership.worker_ids):
            return Next.TRAIN
        return Change(membership, reason)

    def _drop_ended(self, run: Generation) -> None:
        """Drop members whose loops have ended while the others train."""
        # Within CAUSE_S of a failed exchange the loss of the center may still be reported.
        has_failed = self.failure.error is not None
        is_explained = has_failed or self.clock() - run.broken_at > CAUSE_S
        for worker_id, end in list(run.ended.items()):
            if end.outcome is Outcome.BROKEN and (is_explained or end.error is not None):
                if end.error is None and not has_failed:
                    self.log(f"{worker_id} left its exchange: {end.problem}")
                    self.worker_pool.count_loss(worker_id, end.problem)
                self.worker_registry.stand_by(worker_id, "diverged" if end.error else "")
                run.lose(worker_id)
            elif end.outcome is Outcome.LEFT:
                self.worker_registry.stand_by(worker_id, "made room")
                run.lose(worker_id)

    def _without_the_lost(self, run: Generation) -> Change:
        """Return the change that drops lost members; newcomers join with the next change."""
        lost = [w for w in run.membership.worker_ids if w in run.lost]
        reason = ", ".join(f"{w} {self.worker_registry.cause_of(w)}" for w in lost)
        return Change(Membership(0, run.present), reason)

    def _dismiss_leavers(self, run: Generation) -> list[str]:
        """Let members leave that are to leave, or that stand by again; return all of them."""
        leavers = self.worker_registry.in_phase(Phase.LEAVING)
        leavers += self.worker_pool.relieved_spares()
        for worker_id in leavers:
            entry = self.worker_registry[worker_id]
            if worker_id in run.at_work and not entry.is_dismissed:
                entry.is_dismissed = True
                self.worker_group.dismiss(worker_id)
        return leavers

    def watch_regroup(self, run: Generation) -> Next | Change:
        """Return the decision for a generation that leaves by vote."""
        if self.center_manager.is_lost:
            return Next.ABANDON
        if run.is_changing:
            return Next.REGROUP
        self._drop_ended(run)
        if run.lost:
            return self._without_the_lost(run)
        if run.is_idle and run.is_broken:
            return Next.REGROUP  # the loss of the center may be reported next
        if not run.is_regroup_voted:
            run.is_regroup_voted = True
            self.worker_group.vote(run.membership.generation, regroup=1.0)
            return Next.REGROUP
        return Next.END if run.is_idle else Next.REGROUP

    def round_to_go_on_from(
        self, run: Generation | None, copy: Copy | None, known: int
    ) -> int | None:
        """Return the round that training continues from: the center's newest."""
        # The center makes the last snapshot by itself; a restarted one has no later round.
        end, newest = run.newest_end() if run else None, self.center_manager.newest
        is_complete = end is None or self.center_manager.is_new or newest >= end.round
        return newest if is_complete else None
