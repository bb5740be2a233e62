"""What a worker has trained on and not exchanged yet; only it knows how far it came.

When an exchange fails, the ledger that all go on with says what each worker has claimed. A
worker may have trained on less: it came out of its round early, or was a round behind and
those claims are of a round that it never saw. So survivors compare, and tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydl.data.feed import positions_of
from raydl.ledger import Span


class Trained:
    """Positions a worker has trained on since its last completed exchange, in their order."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []  # (epoch, positions) of each local step

    def __len__(self) -> int:
        return sum(len(positions) for _, positions in self._parts)

    def add(self, epoch: int, positions: np.ndarray) -> None:
        """Note the positions of a local step."""
        self._parts.append((epoch, positions))

    def num_claimed(self, claims: Sequence[tuple[int, Span]]) -> int:
        """Return how many of them lead what the worker has claimed by a ledger."""
        ours = _pairs(self._parts)
        theirs = _pairs([(epoch, positions_of([span])) for epoch, span in claims])
        length = min(len(ours), len(theirs))
        differs = (ours[:length] != theirs[:length]).any(axis=1)
        return int(differs.argmax()) if differs.any() else length

    def keep_first(self, count: int) -> None:
        """Forget all but the first ones."""
        parts, self._parts = self._parts, []
        for epoch, positions in parts:
            first = positions[:count]
            count -= len(first)
            if len(first):
                self.add(epoch, first)


def _pairs(parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return (epoch, position) in rows, shape [n, 2]."""
    rows = [np.stack([np.full_like(part, epoch), part], axis=1) for epoch, part in parts]
    return np.concatenate([np.empty((0, 2), np.int64), *rows])
