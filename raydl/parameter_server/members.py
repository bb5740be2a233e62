"""The members of a method with messages, and the coordinator's state of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from raydl.core.membership import Membership
from raydl.parameter_server.protocol import (
    AppliedCalls,
    Assignment,
    Completion,
    MessageId,
    refusal_of,
)


@dataclass
class Member:
    """A member's state at the coordinator."""

    entered: int
    """The generation that it entered; its messages carry this one."""
    is_awaited: bool
    """Whether the others wait for it to enter; not if it joins while they train."""
    local_step: int
    seen: int
    """Exchanges that the center had completed at this worker's newest assignment."""
    num_completed: int = 0
    """Positions completed since it entered."""
    num_kept: int = 0
    """Positions, since it entered, whose training is in the state that it must keep."""
    completion: Completion | None = None
    """Its newest completion."""
    step_s: float = 0.0
    """Seconds per local step, without waiting; 0 if not reported yet."""
    has_entered: bool = False
    is_dismissed: bool = False
    has_left: bool = False
    """Its newest assignment tells it to leave."""
    has_closed: bool = False
    """It has left, and all its messages are answered."""
    has_turn: bool = False
    """Whether it has taken its turn and not ended it."""
    calls: AppliedCalls = field(default_factory=AppliedCalls)
    """Its calls that were applied, by method."""
    answered: tuple[int, Assignment] | None = None
    """Sequence number of the newest message answered with an assignment, and the assignment."""

    @property
    def takes_turns(self) -> bool:
        """Whether it is given its turn, so that the others wait for the end of the turn."""
        return not self.has_left and (self.has_entered or self.is_awaited)


class Members:
    """The members, by rank. The caller holds a lock.

    Args:
        local_step: local steps of each worker so far, the mean.
    """

    def __init__(self, *, local_step: int = 0) -> None:
        self.membership = Membership(0, ())
        self.opened = 0
        """The last generation that began with new members only."""
        self._members: dict[str, Member] = {}
        self._ranks: dict[str, int] = {}
        self._newcomers_step = local_step
        self._least_step_s: float | None = None

    def begin_generation(self, membership: Membership, *, seen: int) -> None:
        """Begin with new members only.

        Args:
            membership: the members.
            seen: exchanges that the center has completed.
        """
        self.opened = membership.generation
        self._set(membership, {}, seen, is_awaited=True)

    def change(self, membership: Membership, *, seen: int) -> bool:
        """Keep the state of members that stay; return whether any worker joined.

        A newcomer starts with the mean local steps of the previous members.

        Args:
            membership: the members.
            seen: exchanges that the center has completed.
        """
        staying = {w: m for w, m in self._members.items() if w in membership.worker_ids}
        self._set(membership, staying, seen, is_awaited=False)
        return len(staying) < membership.num_workers

    def _set(
        self, membership: Membership, staying: dict[str, Member], seen: int, *, is_awaited: bool
    ) -> None:
        self._newcomers_step = step = self.local_step
        self.membership = membership
        self._members = {
            w: staying.get(w) or Member(membership.generation, is_awaited, step, seen)
            for w in membership.worker_ids
        }
        self._ranks = {w: rank for rank, w in enumerate(membership.worker_ids)}
        self._least_step_s = None

    def __getitem__(self, worker_id: str) -> Member:
        return self._members[worker_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def get(self, worker_id: str) -> Member | None:
        """Return a member, or None if the worker is no member."""
        return self._members.get(worker_id)

    def rank_of(self, worker_id: str) -> int:
        """Return the rank of a member."""
        return self._ranks[worker_id]

    def note_step(self, worker_id: str, step_s: float) -> None:
        """Record a member's seconds per local step."""
        member, least_s = self._members[worker_id], self._least_step_s
        before_s, member.step_s = member.step_s, step_s
        if least_s is not None and (before_s <= least_s or 0 < step_s < least_s):
            self._least_step_s = None  # recompute: it was this member's, or becomes it

    def refusal(self, message_id: MessageId) -> str:
        """Return why a call is refused, or an empty text if it is accepted."""
        member = self._members.get(message_id.worker_id)
        entered = None if member is None else member.entered
        return refusal_of(message_id, entered, self.membership.generation)

    def not_entered(self, *, before: str | None = None) -> list[str]:
        """Return the awaited members that have not entered, in rank order.

        Args:
            before: only members of lower rank than this worker.
        """
        workers = self.membership.worker_ids
        workers = workers if before is None else workers[: workers.index(before)]
        members = ((w, self._members[w]) for w in workers)
        return [w for w, m in members if m.is_awaited and not m.has_entered]

    @property
    def in_training(self) -> set[str]:
        """Members whose newest assignment does not tell them to leave."""
        return {w for w, m in self._members.items() if not m.has_left}

    @property
    def is_closed(self) -> bool:
        """Whether all members have left, and all their messages are answered."""
        return all(m.has_closed for m in self._members.values())

    @property
    def local_step(self) -> int:
        """Mean local steps of the members."""
        steps = [m.local_step for m in self._members.values()]
        return sum(steps) // len(steps) if steps else self._newcomers_step

    @property
    def least_local_step(self) -> int:
        """Fewest local steps of any member."""
        return min((m.local_step for m in self._members.values()), default=self._newcomers_step)

    @property
    def least_step_s(self) -> float:
        """Seconds per step of the fastest worker, or 0 before any report."""
        if self._least_step_s is None:
            reported = (m.step_s for m in self._members.values() if m.step_s > 0)
            self._least_step_s = min(reported, default=0.0)
        return self._least_step_s
