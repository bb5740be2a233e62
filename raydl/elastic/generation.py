"""A generation: the members that train together, and which of them have ended or gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import RunEnded


@dataclass
class Generation:
    """One membership's way from its first round to its last."""

    membership: Membership
    began_at_round: int
    ended: dict[str, RunEnded] = field(default_factory=dict)
    """Members that have left their loops."""
    lost: set[str] = field(default_factory=set)
    """Members that have gone, or are not waited for."""
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    """The generation that each member entered with, where they come one by one."""
    broken_at: float = math.inf
    """When an exchange was first heard not to have completed, by the controller's clock."""
    voted_at_round: int = 0
    """The newest round known when a checkpoint was voted for."""
    is_changing: bool = False
    """Whether the center has yet to learn of the newest membership."""
    num_snapshots: int = 0
    """Answers of the center since it learned of the membership: the second was asked for later."""
    is_regroup_voted: bool = False
    """Whether all were asked to leave after their next exchange."""

    @property
    def present(self) -> tuple[str, ...]:
        """Members that are still there, in their loops or out of them."""
        return tuple(w for w in self.membership.worker_ids if w not in self.lost)

    def is_present(self, worker_id: str) -> bool:
        """Return whether a worker is a member that is still there."""
        return worker_id not in self.lost and worker_id in self.membership

    @property
    def at_work(self) -> tuple[str, ...]:
        """Members in their loops."""
        return tuple(w for w in self.present if w not in self.ended)

    @property
    def is_broken(self) -> bool:
        """Whether an exchange did not complete."""
        return any(end.outcome is Outcome.BROKEN for end in self.ended.values())

    @property
    def has_diverged(self) -> bool:
        """Whether a replica diverged, which ends its exchange and so that of others."""
        return any(end.error is not None for end in self.ended.values())

    def entered_with(self, worker_id: str) -> int:
        """Return the generation that a member entered."""
        return self.entered.get(worker_id, self.membership.generation)

    def change(self, membership: Membership) -> None:
        """Take note that members have come and gone while the others train on."""
        before, self.is_changing = self.membership, True
        self.entered = {
            w: self.entered_with(w) if w in before else membership.generation
            for w in membership.worker_ids
        }
        self.membership = membership
        # What becomes of those who are no members any more is of no consequence.
        self.ended = {w: e for w, e in self.ended.items() if w in self.entered}
        self.reports = {w: r for w, r in self.reports.items() if w in self.entered}
        self.lost.clear()
        if not self.is_broken:
            self.broken_at = math.inf

    def note_changed(self) -> None:
        """Note that the center knows the newest membership."""
        self.is_changing, self.num_snapshots = False, 0

    def note_end(self, end: RunEnded, now: float) -> bool:
        """Note that a member has left its loop; return whether it was one of this generation.

        Args:
            end: how; of another generation it changes nothing.
            now: by the controller's clock.
        """
        is_ours = self.is_present(end.worker_id) and end.generation == self.entered_with(
            end.worker_id
        )
        if is_ours:
            self.ended[end.worker_id] = end
            if end.outcome is Outcome.BROKEN:
                self.broken_at = min(self.broken_at, now)
        return is_ours

    def lose(self, worker_id: str) -> None:
        """Wait no more for a member."""
        self.lost.add(worker_id)
        self.ended.pop(worker_id, None)
        self.reports.pop(worker_id, None)

    def freshest(self) -> RunEnded | None:
        """Return how the member ended that got furthest."""
        ends = self.ended.values()
        return max(ends, key=lambda end: (end.round, end.num_changes), default=None)

    def outcome(self) -> Outcome:
        """Return the outcome: the members have ended, in synchronous methods in one round.

        A vote to regroup counts before the end of the run: where workers come one by one,
        some may have found no more work when it came. But where a round is the last one, it
        is so for those who missed it, too.
        """
        freshest = self.freshest()
        outcomes = {end.outcome for end in self.ended.values()}
        if freshest is None or Outcome.REGROUP in outcomes:
            return Outcome.REGROUP
        return freshest.outcome

    def note_vote(self) -> None:
        """Remember what was known when a checkpoint was voted for."""
        self.voted_at_round = max((r.round for r in self.reports.values()), default=0)

    def kept_everywhere(self) -> set[int]:
        """Return the rounds whose states all workers keep since the newest vote.

        An older vote may have reached some workers a round later than others, and left a
        round that would look new.
        """
        kept = [set(self.reports[w].kept) for w in self.present if w in self.reports]
        if not kept or len(kept) < len(self.present):
            return set()
        return {r for r in set.intersection(*kept) if r > self.voted_at_round}

    def is_told(self) -> bool:
        """Whether every worker has reported up to its end."""
        return all(
            w in self.reports and self.reports[w].round >= end.round
            for w, end in self.ended.items()
        )
