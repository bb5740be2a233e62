"""The order of the samples in each epoch, the same on all workers."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_CACHED_BLOCKS = 8
"""Shuffled blocks to cache: a worker's own, and other workers' blocks that it helps with."""


class Order(Protocol):
    """The sample at each position of an epoch."""

    num_samples: int
    """Positions in an epoch."""

    @property
    def name(self) -> str:
        """Description without the seed: orders of equal name and seed are equal."""
        ...

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions, int64, shape [num_positions]."""
        ...

    def cuts(self, epoch: int) -> Sequence[int] | None:
        """Return the ends of the blocks of an epoch, ascending, or None if it has no blocks.

        The last end is ``num_samples``.
        """
        ...

    def near(self, epoch: int, position: int) -> np.ndarray:
        """Return one row of each row group in the block of a position, int64."""
        ...


class Shuffled:
    """A permutation of all samples, for a set whose samples are read one by one.

    Args:
        num_samples: samples in the set.
        seed: seed of the orders.
        block_samples: positions in a block, if a worker is to read ahead what it has reserved;
            None for a set in memory: no blocks.
    """

    def __init__(self, num_samples: int, seed: int, *, block_samples: int | None = None) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._cuts: array[int] | None = None
        if block_samples is not None:
            self._cuts = array("q", range(block_samples, num_samples, block_samples))
            self._cuts.append(num_samples)
        self._orders: dict[int, np.ndarray] = {}

    @property
    def name(self) -> str:
        """Description of the order."""
        return "in memory"

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions of an epoch."""
        if epoch not in self._orders:
            random = np.random.default_rng([self._seed, epoch])
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = random.permutation(self.num_samples)
        rows: np.ndarray = self._orders[epoch][positions]
        return rows

    def cuts(self, epoch: int) -> Sequence[int] | None:
        """Return the ends of the blocks, the same in each epoch."""
        return self._cuts

    def near(self, epoch: int, position: int) -> np.ndarray:
        """Return the row at a position: there are no row groups."""
        return self.rows(epoch, np.array([position]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}


class InStream:
    """Positions without rows, for a stream: a worker takes the next samples of its shard.

    Args:
        num_samples: positions in an epoch.
    """

    name = "a stream"
    """Description of the order."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the positions."""
        return positions

    def cuts(self, epoch: int) -> None:
        """Return None: there are no blocks."""
        return None

    def near(self, epoch: int, position: int) -> np.ndarray:
        """Return the position: there are no row groups."""
        return np.array([position])


class InBlocks:
    """Row groups in random order, combined to blocks whose rows are shuffled.

    Files are read by row groups. So a worker reserves a block, reads all of it, and trains on its
    rows in random order. Samples of different blocks rarely share a batch.

    Args:
        sizes: samples in each row group, in the order of the set, each 1 or more.
        seed: seed of the orders.
        block_samples: a block ends where the samples so far pass a multiple of this number.
    """

    def __init__(self, sizes: Sequence[int], seed: int, *, block_samples: int) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.num_samples = int(self._sizes.sum())
        self._seed = seed
        self._block_samples = block_samples
        self._plans: dict[int, tuple[list[np.ndarray], array[int]]] = {}
        self._shuffled: dict[tuple[int, int], np.ndarray] = {}

    @property
    def name(self) -> str:
        """Description of the order: the block size, and a checksum of the row group sizes."""
        sizes = f"{len(self._sizes)} row groups, {zlib.crc32(self._sizes.tobytes()):08x}"
        return f"streamed with input.shuffle_samples {self._block_samples} ({sizes})"

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions of an epoch."""
        _, cuts = self._plan(epoch)
        blocks = np.searchsorted(cuts, positions, side="right")
        rows = np.empty(len(positions), np.int64)
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            start = cuts[block - 1] if block else 0
            rows[in_block] = self._rows_of(epoch, block)[positions[in_block] - start]
        return rows

    def cuts(self, epoch: int) -> Sequence[int]:
        """Return the ends of the blocks of an epoch."""
        return self._plan(epoch)[1]

    def near(self, epoch: int, position: int) -> np.ndarray:
        """Return the first row of each row group of the block at a position."""
        groups, cuts = self._plan(epoch)
        first: np.ndarray = self._starts[groups[bisect_right(cuts, position)]]
        return first

    def _plan(self, epoch: int) -> tuple[list[np.ndarray], array[int]]:
        """Return (row groups of each block, end of each block)."""
        if epoch not in self._plans:
            groups = np.random.default_rng([self._seed, epoch]).permutation(len(self._sizes))
            ends = np.cumsum(self._sizes[groups])
            last = np.flatnonzero(np.diff((ends - 1) // self._block_samples, append=-1))
            cuts = array("q", ends[last].astype(np.int64).tobytes())  # fast for numpy and bisect
            plan = np.split(groups, last[:-1] + 1), cuts
            self._plans = {e: p for e, p in self._plans.items() if e == epoch - 1}
            self._plans[epoch] = plan
        return self._plans[epoch]

    def _rows_of(self, epoch: int, block: int) -> np.ndarray:
        """Return the rows of a block in shuffled order."""
        key = (epoch, block)
        if key not in self._shuffled:
            groups = self._plan(epoch)[0][block]
            rows = [np.arange(self._starts[g], self._starts[g] + self._sizes[g]) for g in groups]
            random = np.random.default_rng([self._seed, epoch, block])
            while len(self._shuffled) >= _CACHED_BLOCKS:
                del self._shuffled[next(iter(self._shuffled))]
            self._shuffled[key] = random.permutation(np.concatenate(rows))
        return self._shuffled[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_shuffled": {}}
