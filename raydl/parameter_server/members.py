"""The members that train by messages, and what the center knows of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raydl.core.membership import Membership
from raydl.parameter_server.protocol import Assignment, Completion, MessageId, refusal_of


@dataclass
class Member:
    """A member's state at the coordinator."""

    entered: int
    """The generation that it became a member with: its messages are of this one."""
    is_awaited: bool
    """The others wait for it to enter; not for one that joins while they train."""
    local_step: int
    seen: int
    """Exchanges that the center had settled when this worker last heard of it."""
    num_completed: int = 0
    """Positions that it has completed, of all since it entered."""
    num_kept: int = 0
    """Positions whose training is in the state that it was told to keep, likewise."""
    completion: Completion | None = None
    """The newest."""
    step_s: float = 0.0
    has_entered: bool = False
    is_dismissed: bool = False
    has_left: bool = False
    """It was told to leave."""
    has_closed: bool = False
    """It has left, with all its messages answered."""
    turn: int | None = None
    """The number of the message that holds the turn."""
    answered: tuple[int, Assignment] | None = None
    """The newest message that was answered with orders, and these."""

    @property
    def takes_turns(self) -> bool:
        """Whether the others give it its turn, and wait for the end of it."""
        return not self.has_left and (self.has_entered or self.is_awaited)


class Members:
    """The members, by rank. The caller holds a lock.

    Args:
        local_step: local steps of each worker before, the mean.
    """

    def __init__(self, *, local_step: int = 0) -> None:
        self.membership = Membership(0, ())
        self.opened = 0
        """The generation at which all members were new."""
        self._members: dict[str, Member] = {}
        self._ranks: dict[str, int] = {}
        self._newcomers_step = local_step
        self._least_step_s: float | None = None

    def begin_generation(self, membership: Membership, *, seen: int) -> None:
        """Begin with new members alone.

        Args:
            membership: of them.
            seen: exchanges that the center they start from has settled.
        """
        self.opened = membership.generation
        self._set(membership, {}, seen, is_awaited=True)

    def change(self, membership: Membership, *, seen: int) -> bool:
        """Keep the members that stay, as they are; return whether others joined.

        Those start with as many local steps as the members of before, and know the center as
        it is after so many exchanges.
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
        """Return a member, or None: it is none."""
        return self._members.get(worker_id)

    def rank_of(self, worker_id: str) -> int:
        """Return the rank of a member."""
        return self._ranks[worker_id]

    def note_step(self, worker_id: str, step_s: float) -> None:
        """Note what a local step of a member takes, in seconds."""
        member, least_s = self._members[worker_id], self._least_step_s
        before_s, member.step_s = member.step_s, step_s
        if least_s is not None and (before_s <= least_s or 0 < step_s < least_s):
            self._least_step_s = None  # to be looked for again: it was this one's, or is

    def refusal(self, message_id: MessageId) -> str:
        """Return why a call does not count; empty: its worker is the member that it was."""
        member = self._members.get(message_id.worker_id)
        entered = None if member is None else member.entered
        return refusal_of(message_id, entered, self.membership.generation)

    def not_entered(self, *, before: str | None = None) -> list[str]:
        """Return the members that are awaited and have not entered, by rank.

        Args:
            before: those of lower rank than this worker alone.
        """
        workers = self.membership.worker_ids
        asked = workers if before is None else workers[: workers.index(before)]
        members = ((w, self._members[w]) for w in asked)
        return [w for w, m in members if m.is_awaited and not m.has_entered]

    @property
    def in_training(self) -> set[str]:
        """Members that were not told to leave."""
        return {w for w, m in self._members.items() if not m.has_left}

    @property
    def is_closed(self) -> bool:
        """Whether all members have left, with all their messages answered."""
        return all(m.has_closed for m in self._members.values())

    @property
    def local_step(self) -> int:
        """Local steps of each worker, the mean."""
        steps = [m.local_step for m in self._members.values()]
        return sum(steps) // len(steps) if steps else self._newcomers_step

    @property
    def least_local_step(self) -> int:
        """Local steps of the worker that took the fewest."""
        return min((m.local_step for m in self._members.values()), default=self._newcomers_step)

    @property
    def least_step_s(self) -> float:
        """Seconds per step of the fastest worker; 0 where nobody has told."""
        if self._least_step_s is None:
            told = (m.step_s for m in self._members.values() if m.step_s > 0)
            self._least_step_s = min(told, default=0.0)
        return self._least_step_s
