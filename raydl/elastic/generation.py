"""A generation: the members that train together, and which of them have ended or were lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import RunEnded


@dataclass
class Generation:
    """One membership, from its first round to its last."""

    membership: Membership
    began_at_round: int
    ended: dict[str, RunEnded] = field(default_factory=dict)
    """Members that have left their loops."""
    lost: set[str] = field(default_factory=set)
    """Members that were lost or left out: nothing waits for them."""
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    """By member, the generation that it entered, where members join one by one."""
    broken_at: float = math.inf
    """When the first failed exchange was reported, by the controller's clock."""
    voted_at_round: int = 0
    """The newest reported round at the last vote for a checkpoint."""
    is_changing: bool = False
    """Whether the center has not confirmed the newest membership yet."""
    num_snapshots: int = 0
    """Polls that the center has answered since it confirmed the membership. The first may have been
    sent before that."""
    is_regroup_voted: bool = False
    """Whether the vote to leave after the next exchange was cast."""

    @property
    def present(self) -> tuple[str, ...]:
        """Members that were not lost, in their loops or out of them."""
        return tuple(w for w in self.membership.worker_ids if w not in self.lost)

    def is_present(self, worker_id: str) -> bool:
        """Whether a worker is a member and was not lost."""
        return worker_id not in self.lost and worker_id in self.membership

    @property
    def at_work(self) -> tuple[str, ...]:
        """Members in their loops."""
        return tuple(w for w in self.present if w not in self.ended)

    @property
    def is_idle(self) -> bool:
        """Whether no member is in its loop. With many members this is faster than ``at_work``."""
        return len(self.ended) + len(self.lost) >= self.membership.num_workers

    @property
    def is_broken(self) -> bool:
        """Whether an exchange did not complete."""
        return any(end.outcome is Outcome.BROKEN for end in self.ended.values())

    @property
    def has_diverged(self) -> bool:
        """Whether a replica diverged, which also fails the exchanges of the other members."""
        return any(end.error is not None for end in self.ended.values())

    def entered_with(self, worker_id: str) -> int:
        """Return the generation in which a member entered."""
        return self.entered.get(worker_id, self.membership.generation)

    def change(self, membership: Membership) -> None:
        """Replace the membership while the members that stay train on."""
        before, self.is_changing = self.membership, True
        self.entered = {
            w: self.entered_with(w) if w in before else membership.generation
            for w in membership.worker_ids
        }
        self.membership = membership
        # Ends and reports of former members have no effect any more.
        self.ended = {w: e for w, e in self.ended.items() if w in self.entered}
        self.reports = {w: r for w, r in self.reports.items() if w in self.entered}
        self.lost.clear()
        if not self.is_broken:
            self.broken_at = math.inf

    def note_changed(self) -> None:
        """Note that the center has confirmed the newest membership."""
        self.is_changing, self.num_snapshots = False, 0

    def note_end(self, end: RunEnded, now: float) -> bool:
        """Record that a member has left its loop; return whether it left this generation.

        Args:
            end: how it left. An end in another generation changes nothing.
            now: seconds by the controller's clock.
        """
        worker_id = end.worker_id
        if not self.is_present(worker_id) or end.generation != self.entered_with(worker_id):
            return False
        self.ended[worker_id] = end
        if end.outcome is Outcome.BROKEN:
            self.broken_at = min(self.broken_at, now)
        return True

    def lose(self, worker_id: str) -> None:
        """Stop waiting for a member."""
        self.lost.add(worker_id)
        self.ended.pop(worker_id, None)
        self.reports.pop(worker_id, None)

    def newest_end(self) -> RunEnded | None:
        """Return the end of the member that got furthest, or None if none has ended.

        Of equal ones it is that of a member whose loop did not break: the loss of another one may
        have been NaN in the last step.
        """

        def key(end: RunEnded) -> tuple[int, int, bool]:
            return end.round, end.num_changes, end.outcome is not Outcome.BROKEN

        return max(self.ended.values(), key=key, default=None)

    def outcome(self) -> Outcome:
        """Return the outcome of the generation, once its members have ended.

        In synchronous methods they end in the same round. A vote to regroup takes precedence over
        the end of the run: where members join one by one, some may have run out of samples before
        the vote arrived. Otherwise the furthest member decides: if its round is the run's last
        one, that holds for the members that missed it, too.
        """
        newest = self.newest_end()
        outcomes = {end.outcome for end in self.ended.values()}
        if newest is None or Outcome.REGROUP in outcomes:
            return Outcome.REGROUP
        return newest.outcome

    def note_vote(self) -> None:
        """Record the newest reported round at a vote for a checkpoint."""
        self.voted_at_round = max((r.round for r in self.reports.values()), default=0)

    def kept_everywhere(self) -> set[int]:
        """Return the rounds since the newest vote whose states all members keep.

        Older rounds do not count: an earlier vote may have reached some members a round later than
        others, so that kept states of an older round look new.
        """
        kept = [set(self.reports[w].kept) for w in self.present if w in self.reports]
        if not kept or len(kept) < len(self.present):
            return set()
        return {r for r in set.intersection(*kept) if r > self.voted_at_round}

    @property
    def last_score(self) -> Evaluated | None:
        """The score of the run's last center, if the workers have scored it."""
        return next((end.score for end in self.ended.values() if end.score is not None), None)

    def has_final_reports(self) -> bool:
        """Whether every ended member has reported up to its end."""
        return all(
            w in self.reports and self.reports[w].round >= end.round
            for w, end in self.ended.items()
        )
