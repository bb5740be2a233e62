"""Find out why an operation of a user's group failed, from its members and from Ray.

A member whose operation fails, or that leaves, writes its status to the generation's key store. A
member that is busy computing writes nothing, and is not lost for that: only Ray decides whether a
process is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from raydl.errors import ExchangeError, ExchangeTimeoutError

AGAIN = "form the group again, under a later generation"
_LATE, _FAILED, _LEFT = b"late", b"failed", b"left"
_WAIT_S = 3.0
"""The longest wait for the others' statuses, in seconds: their operations fail together with this
member's, but they may notice it late."""
_WATCH_EVERY_S = 1.0
_POLL = timedelta(seconds=0.1)
_GRACE_S = 0.1
"""Processes that end together do not appear as ended at the same moment."""


class FailureDiagnosis:
    """Diagnoses failed operations, on behalf of one member.

    Args:
        group: the group's name, for messages.
        generation: of the group.
        members: the ids of all members, by rank.
        rank: of this member.
        store: the generation's keys; see ``ray_collective.CenterStore``.
        timeout_s: of an operation, in seconds.
        has_ended: returns whether the process of a rank has ended, according to Ray.
    """

    def __init__(
        self,
        group: str,
        generation: int,
        members: Sequence[str],
        rank: int,
        *,
        store: Any,
        timeout_s: float,
        has_ended: Callable[[int], bool],
    ) -> None:
        self._group = group
        self._generation = generation
        self._members = members
        self._rank = rank
        self._store = store
        self._timeout_s = timeout_s
        self._has_ended = has_ended
        self._has_written = False
        self._watched = rank
        self._watched_at = 0.0

    def watch(self) -> None:
        """Check one other member's process a second, in turn, while this member waits.

        A member that waits for another does not see that one's connection to a third member
        break. Together the members check all processes.

        Raises:
            RuntimeError: if the process has ended.
        """
        now = time.monotonic()
        if now - self._watched_at >= _WATCH_EVERY_S:
            self._watched_at = now
            self._watched = (self._watched + 1) % len(self._members)
            if self._has_ended(self._watched):
                raise RuntimeError("a process has ended")

    def leave(self) -> None:
        """Record that this member leaves, unless one of its operations has failed before."""
        self._write_status(_LEFT)

    def explain(
        self, problem: str, *, operation: int, is_late: bool, ranks: Iterable[int]
    ) -> ExchangeError:
        """Return the error of a failed operation, with the names of the missing members.

        Args:
            problem: the transport's message.
            operation: number of the operation in this member, or 0 while the group forms.
            is_late: whether this member has waited until the time-out.
            ranks: of all members that take part in the operation.
        """
        self._write_status(_LATE if is_late else _FAILED)
        statuses, lost = self._wait_for_statuses(list(ranks), is_late)
        if is_late or _LATE in statuses.values():
            return ExchangeTimeoutError(
                operation,
                self._generation,
                self._timeout_s,
                self._names(rank for rank in ranks if rank not in statuses),
                self._group,
                "timeout_s of raydl.init_collective_group",
            )
        left = [rank for rank, status in statuses.items() if status == _LEFT]
        if lost:
            problem = f"lost members {self._names(lost)}"
        elif left:
            problem = f"members {self._names(left)} left"
        problem = f"{problem}; {AGAIN}"
        return ExchangeError(operation, self._generation, problem, self._names(lost), self._group)

    def _wait_for_statuses(
        self, ranks: list[int], is_late: bool
    ) -> tuple[dict[int, bytes], list[int]]:
        """Return the statuses by rank, without the ranks that have none, and the lost ranks."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            lost = self._lost(ranks)
            if lost and not is_late:
                time.sleep(_GRACE_S)
                return {}, self._lost(ranks)
            statuses = self._statuses(ranks)
            is_complete = len(statuses) == len(ranks) or _LEFT in statuses.values()
            if is_complete or time.monotonic() >= deadline:
                return statuses, lost

    def _lost(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if self._has_ended(rank)]

    def _statuses(self, ranks: list[int]) -> dict[int, bytes]:
        keys = {rank: f"out/{rank}" for rank in ranks}
        try:
            present = self._store.keys_present(list(keys.values()), _POLL)
        except RuntimeError:  # the actor that keeps the keys is lost, too
            time.sleep(_POLL.total_seconds())
            return {}
        return {rank: self._store.get(key) for rank, key in keys.items() if key in present}

    def _write_status(self, status: bytes) -> None:
        if not self._has_written:  # the first status is the reason
            self._has_written = True
            self._store.set(f"out/{self._rank}", status)

    def _names(self, ranks: Iterable[int]) -> list[str]:
        return [self._members[rank] for rank in ranks]
