"""Which snapshots of the center are wanted, and who was told to keep its state for one."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Due:
    """A snapshot of the center that is wanted."""

    round: int
    is_kept: bool
    """Whether the workers kept their states under this number."""


class Dues:
    """The snapshots that nobody has made yet. Whoever uses it holds a lock."""

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

    def take(self) -> list[Due]:
        """Return what is wanted, once: all that is kept, and the newest other."""
        due, self._wanted = self._wanted, []
        return [d for i, d in enumerate(due) if d.is_kept or i == len(due) - 1]
