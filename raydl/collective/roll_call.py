"""Why an operation of a user's group failed: by what its members say, and by what Ray knows.

A member whose operation fails signs with a word in the store of the generation, and so does one
that leaves. One that computes meanwhile can not sign, and is not lost for that: the loss of a
process is Ray's to tell.
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
"""For others to sign: their operations fail with this member's, but they may be slow to see it."""
_WATCH_EVERY_S = 1.0
_LOOK = timedelta(seconds=0.1)
_TOGETHER_S = 0.1
"""Processes that end together are not seen to end in one moment."""


class RollCall:
    """One member's side.

    Args:
        group: its name, for messages.
        generation: of the group.
        members: the ids of all, by rank.
        rank: this member's.
        store: of the generation; see ``ray_collective.CenterStore``.
        timeout_s: of an operation.
        has_ended: whether the process of a rank has ended, as far as Ray knows.
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
        self._has_signed = False
        self._watched = rank
        self._watched_at = 0.0

    def watch(self) -> None:
        """Look after one member a second, in turn, while this one waits.

        A member that waits for another has no part in the connection of that one to a third, and
        would not see it break. All members together look after all.

        Raises:
            RuntimeError: its process has ended.
        """
        now = time.monotonic()
        if now - self._watched_at >= _WATCH_EVERY_S:
            self._watched_at = now
            self._watched = (self._watched + 1) % len(self._members)
            if self._has_ended(self._watched):
                raise RuntimeError("a process has ended")

    def leave(self) -> None:
        """Tell the others that this member leaves, unless an operation has failed before."""
        self._sign(_LEFT)

    def explain(
        self, problem: str, *, operation: int, is_late: bool, ranks: Iterable[int]
    ) -> ExchangeError:
        """Return the error of a failed operation, with the names of the missing.

        Args:
            problem: what the transport said.
            operation: its number in this member; 0: the group was being formed.
            is_late: this member has waited until the time-out.
            ranks: of all that the operation needs.
        """
        self._sign(_LATE if is_late else _FAILED)
        signed, lost = self._call(list(ranks), is_late)
        if is_late or _LATE in signed.values():
            return ExchangeTimeoutError(
                operation,
                self._generation,
                self._timeout_s,
                self._names(rank for rank in ranks if rank not in signed),
                self._group,
                "timeout_s of raydl.init_collective_group",
            )
        left = [rank for rank, word in signed.items() if word == _LEFT]
        if lost:
            problem = f"lost members {self._names(lost)}"
        elif left:
            problem = f"members {self._names(left)} have left"
        return ExchangeError(
            operation,
            self._generation,
            f"{problem}; {AGAIN}",
            self._names(lost),
            self._group,
        )

    def _call(self, ranks: list[int], is_late: bool) -> tuple[dict[int, bytes], list[int]]:
        """Return the words of the ranks that have signed, and the ranks that are lost."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            lost = self._lost(ranks)
            if lost and not is_late:
                time.sleep(_TOGETHER_S)
                return {}, self._lost(ranks)
            signed = self._signed(ranks)
            is_over = len(signed) == len(ranks) or _LEFT in signed.values()
            if is_over or time.monotonic() >= deadline:
                return signed, lost

    def _lost(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if self._has_ended(rank)]

    def _signed(self, ranks: list[int]) -> dict[int, bytes]:
        keys = {rank: f"out/{rank}" for rank in ranks}
        try:
            there = self._store.keys_present(list(keys.values()), _LOOK)
        except RuntimeError:  # the actor that keeps the keys is lost, too
            time.sleep(_LOOK.total_seconds())
            return {}
        return {rank: self._store.get(key) for rank, key in keys.items() if key in there}

    def _sign(self, word: bytes) -> None:
        if not self._has_signed:  # the first word is why
            self._has_signed = True
            self._store.set(f"out/{self._rank}", word)

    def _names(self, ranks: Iterable[int]) -> list[str]:
        return [self._members[rank] for rank in ranks]
