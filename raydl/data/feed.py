"""What a worker reads of the training set: the samples it claimed, in the epoch's order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raydl.data.batches import Batches
from raydl.ledger import Span
from raydl.metrics import TimeParts


class Feed:
    """The training set in an order of its own for each epoch, the same on all workers.

    Args:
        batches: the training set.
        seed: of the orders.
        device: where batches go.
        time_parts: where the time is counted.
    """

    def __init__(
        self, batches: Batches, *, seed: int, device: torch.device, time_parts: TimeParts
    ) -> None:
        self._batches = batches
        self._seed = seed
        self._device = device
        self._parts = time_parts
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, epoch: int, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (inputs, labels) of some positions of an epoch, shape [num_positions]."""
        with self._parts.measure("data_io"):
            inputs, labels = self._batches.batch(self._order(epoch)[positions])
        if self._device.type == "cpu":
            return inputs, labels
        with self._parts.measure("host_device_data"):
            return inputs.to(self._device), labels.to(self._device)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch in their order, shape [num_samples]."""
        if epoch not in self._orders:
            random = np.random.default_rng([self._seed, epoch])
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = random.permutation(self._batches.num_samples)
        return self._orders[epoch]


def positions_of(spans: list[Span]) -> np.ndarray:
    """Return the positions of spans in order, int64."""
    parts = [np.arange(start, stop) for start, stop in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
