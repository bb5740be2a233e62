"""Row groups: what a large set is read in, a few at a time, by a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from raydl.data.order import InBlocks

_KEPT_UNEXPECTED = 2
"""Groups that nobody expected and are kept all the same: those of a block that another began."""

_T = TypeVar("_T")


class RowGroups(Protocol):
    """Tables that are read one by one: row groups of files, or blocks in Ray's memory."""

    @property
    def sizes(self) -> Sequence[int]:
        """Rows in each group, each 1 or more."""
        ...

    def read(self, number: int) -> pa.Table:
        """Return the columns of a group that are of use.

        Raises:
            DataError: it can not be read.
        """
        ...

    def name(self, number: int) -> str:
        """Return the file and the row group, for messages."""
        ...

    def some(self: _T, numbers: Sequence[int]) -> _T:
        """Return some of the groups."""
        ...


class GroupCache(Generic[_T]):
    """The groups that are in use or expected, read ahead in a thread.

    Args:
        groups: where they lie.
        convert: makes of a group's table and number what is kept of it.
    """

    def __init__(self, groups: RowGroups, convert: Callable[[pa.Table, int], _T]) -> None:
        self.groups = groups
        self._convert = convert
        self._starts = np.cumsum([0, *groups.sizes])
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[int, Future[_T]] = {}
        self._expected: frozenset[int] = frozenset()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="row-groups")

    @property
    def num_rows(self) -> int:
        """Rows in all groups."""
        return int(self._starts[-1])

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row (its group, its row within that), int64, shape [num_rows]."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        return numbers, rows - self._starts[numbers]

    def expect(self, rows: np.ndarray) -> None:
        """Read the groups of these rows ahead, and forget the others."""
        numbers = self.places(rows)[0]
        with self._lock:
            _, first = np.unique(numbers, return_index=True)
            expected = numbers[np.sort(first)].tolist()
            self._expected = frozenset(expected)
            self._read = {n: f for n, f in self._read.items() if n in self._expected}
            for number in expected:
                self._start(number)

    def get(self, number: int) -> _T:
        """Return the kept rows of a group; waits until it is read.

        Raises:
            DataError: it can not be read.
        """
        with self._lock:
            unexpected = [n for n in self._read if n not in self._expected and n != number]
            for other in unexpected[: len(unexpected) - _KEPT_UNEXPECTED + 1]:
                del self._read[other]
            future = self._start(number)
        return future.result()

    def _start(self, number: int) -> Future[_T]:
        if number not in self._read:
            self._read[number] = self._pool.submit(self._load, number)
        return self._read[number]

    def _load(self, number: int) -> _T:
        return self._convert(self.groups.read(number), number)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what was read: another process reads its own groups."""
        return {"groups": self.groups, "_convert": self._convert, "_starts": self._starts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class InRowGroups(Generic[_T]):
    """Base of sets whose samples are read as they are needed.

    Args:
        groups: where they lie.
        convert: makes of a group's table and number what is kept of it.
        shuffle_samples: row groups are mixed with one another until they hold so many samples.
    """

    def __init__(
        self, groups: RowGroups, convert: Callable[[pa.Table, int], _T], *, shuffle_samples: int
    ) -> None:
        self._groups = GroupCache(groups, convert)
        self._shuffle_samples = shuffle_samples

    @property
    def num_samples(self) -> int:
        """Rows of all groups."""
        return self._groups.num_rows

    @property
    def is_streamed(self) -> bool:
        """Yes."""
        return True

    def order(self, seed: int) -> InBlocks:
        """Return the order of the samples in each epoch: row groups at random, a few mixed."""
        return InBlocks(self._groups.groups.sizes, seed, block_samples=self._shuffle_samples)

    def expect(self, rows: np.ndarray) -> None:
        """Read the row groups of these rows ahead."""
        self._groups.expect(rows)
