"""What a worker has trained on and not exchanged yet; only it knows how far it came.

When an exchange fails, the ledger that all go on with says what each worker has claimed. A
worker may have trained on less: it came out of its round early, or was a round behind and
those claims are of a round that it never saw. So survivors compare, and tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raydl.data.feed import positions_of


class Trained:
    """Positions a worker has trained on since its last completed exchange, in their order."""

    def __init__(self) -> None:
        self._parts = [_pairs(0, np.empty(0, np.int64))]

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, epoch: int, positions: np.ndarray) -> None:
        """Note the positions of a local step."""
        self._parts.append(_pairs(epoch, positions))

    def num_claimed(self, ledger: Mapping[str, Any], worker_id: str) -> int:
        """Return how many of them lead the claims of the worker in a ledger's state."""
        claims = [
            _pairs(epoch, positions_of([(start, stop)]))
            for claimant, epoch, (start, stop) in ledger.get("claimed", ())
            if claimant == worker_id
        ]
        ours, theirs = np.concatenate(self._parts), np.concatenate([self._parts[0][:0], *claims])
        length = min(len(ours), len(theirs))
        differs = (ours[:length] != theirs[:length]).any(axis=1)
        return int(differs.argmax()) if differs.any() else length

    def keep_first(self, count: int) -> None:
        """Forget all but the first ones."""
        self._parts = [np.concatenate(self._parts)[:count]]


def with_first_claims(ledger: Mapping[str, Any], kept: Mapping[str, int]) -> dict[str, Any]:
    """Return a ledger's state in which workers keep their first claims, and the rest is free.

    Args:
        ledger: what ``Ledger.state_dict(with_claims=True)`` returned.
        kept: how many positions each worker keeps; one that is not named keeps all.
    """
    free = {epoch: list(spans) for epoch, _, spans in ledger["open"]}
    left, claimed = dict(kept), []
    for worker_id, epoch, (start, stop) in ledger["claimed"]:
        cut = min(stop, start + left.get(worker_id, stop - start))
        if worker_id in left:
            left[worker_id] -= cut - start
        if start < cut:
            claimed.append([worker_id, epoch, [start, cut]])
        if cut < stop:
            free[epoch].append([cut, stop])
    open_epochs = [[epoch, num_done, sorted(free[epoch])] for epoch, num_done, _ in ledger["open"]]
    return {**ledger, "open": open_epochs, "claimed": claimed}


def _pairs(epoch: int, positions: np.ndarray) -> np.ndarray:
    """Return (epoch, position) in rows, shape [n, 2]."""
    return np.stack([np.full_like(positions, epoch), positions], axis=1)
