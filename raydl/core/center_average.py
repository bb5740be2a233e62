"""The mean of the newest centers, which is often better than the last one.

    lawa:K   a = (c_1 + ... + c_K) / K, of the K newest scored centers (LAWA, arXiv 2209.14981)
    ema:B    a <- B*a + (1 - B)*c at each scored center

Float buffers, such as running statistics, are averaged as the weights are; other non-trainable
state is that of the newest center. The training goes on from c: a is only scored and kept.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from raydl.config.run import parse_average
from raydl.core.center import Snapshot


class CenterAverage:
    """Keeps what the mean is of, from one scored center to the next.

    A run that continues from an earlier round forgets the centers that came after it: the mean
    begins anew.

    Args:
        setting: ``lawa:K`` or ``ema:B``.

    Raises:
        ConfigError: if it is neither.
    """

    def __init__(self, setting: str) -> None:
        self._num_newest, self._decay = parse_average(setting)
        self._newest: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=self._num_newest)
        self._mean: Snapshot | None = None
        self.num_centers = 0
        """Centers that the mean is of."""

    def add(self, snapshot: Snapshot) -> Snapshot:
        """Add a center; return it with the mean of weights and float buffers."""
        if self._mean is not None and snapshot.progress.round <= self._mean.progress.round:
            self._newest.clear()
            self._mean, self.num_centers = None, 0
        if self._num_newest is None:
            self.num_centers += 1
            self._mean = snapshot if self._mean is None else self._moved(self._mean, snapshot)
        else:
            # Copies: the snapshot's memory is that of a store that all processes share.
            self._newest.append((snapshot.weights.copy(), snapshot.buffers.copy()))
            self.num_centers = len(self._newest)
            weights, buffers = map(_mean, zip(*self._newest, strict=True))
            self._mean = dataclasses.replace(snapshot, weights=weights, buffers=buffers)
        return self._mean

    def _moved(self, mean: Snapshot, snapshot: Snapshot) -> Snapshot:
        b = self._decay
        weights = b * mean.weights + (1 - b) * snapshot.weights
        buffers = b * mean.buffers + (1 - b) * snapshot.buffers
        return dataclasses.replace(snapshot, weights=weights, buffers=buffers)


def _mean(vectors: Sequence[np.ndarray]) -> np.ndarray:
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return np.asarray(total / total.dtype.type(len(vectors)))
