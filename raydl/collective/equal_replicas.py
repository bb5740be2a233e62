"""Finds two workers whose replicas are equal, by one number in the header of each round.

Equal replicas have seen the same batches: one of the two workers adds nothing. In each round two
replicas are drawn, the same ones on all ranks. One of them sends a checksum and the other one minus
its checksum, all others send zero. The sum is zero exactly if the two are equal: whole numbers up
to 2^24 are exact in float32, whatever the order of the sum. A pair that is equal is compared again
in the next rounds, so that no coincidence is reported.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence

from raydl.core.reports import EqualReplicas

_UNKNOWN = 2**24
"""More than any checksum: a replica without one equals none."""
_ROUNDS = 3
"""Rounds in a row in which two replicas must be equal. By chance they are once in 2^72 times."""


def checksum(numbers: Sequence[float], *, round: int) -> int:
    """Return a whole number from 1 to 2^24 - 1.

    Args:
        numbers: of a replica, which differ if its weights or batches do.
        round: also changes the checksum, so that two replicas that have the same one by chance
            have different ones in the next round.
    """
    hashed = zlib.crc32(struct.pack(f"q{len(numbers)}d", round, *numbers))
    return 1 + hashed % (_UNKNOWN - 1)


class EqualityCheck:
    """Compares two replicas in each round, as all ranks of a generation do alike.

    Args:
        replicas: the workers of each replica, by rank.
        generation: decides which replicas are compared first.
    """

    def __init__(self, replicas: Sequence[Sequence[str]], *, generation: int) -> None:
        self._replicas = replicas
        self._random = random.Random(generation)
        self._pair = self._draw()
        self._since: int | None = None
        self._num_equal = 0
        self.found: EqualReplicas | None = None
        """The first two replicas that were equal."""

    def number_of(self, worker_id: str, numbers: Sequence[float] | None, *, round: int) -> float:
        """Return what a worker sends in a round.

        Args:
            worker_id: the worker.
            numbers: of its replica, see ``checksum``; None: it has taken no step that could differ
                from those of others.
            round: the round.
        """
        if not self._pair:
            return 0.0
        first, second = (self._replicas[replica][0] for replica in self._pair)
        known = checksum(numbers, round=round) if numbers is not None else None
        if worker_id == first:
            return float(known or _UNKNOWN)
        return -float(known or 0) if worker_id == second else 0.0

    def note(self, total: float, *, round: int) -> None:
        """Record the sum of what all workers have sent in a round."""
        if not self._pair or self.found is not None:
            return
        if total != 0:
            self._pair, self._num_equal = self._draw(), 0
            return
        self._since = round if not self._num_equal else self._since
        self._num_equal += 1
        if self._num_equal == _ROUNDS and self._since is not None:
            first, second = (tuple(self._replicas[replica]) for replica in self._pair)
            self.found = EqualReplicas(first, second, since_round=self._since)

    def _draw(self) -> list[int]:
        """Return two replicas in order; none if there are not two."""
        count = len(self._replicas)
        return sorted(self._random.sample(range(count), 2)) if count > 1 else []
