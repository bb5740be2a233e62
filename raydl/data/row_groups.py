"""Row groups: a thread reads a large set group by group, a few ahead of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

_KEPT_OTHERS = 2
"""Groups to keep that were not prefetched: a worker reads them when it helps with a block."""

_T = TypeVar("_T")


class GroupCache(Generic[_T]):
    """A cache of the groups that are in use or prefetched by a thread.

    Args:
        sizes: rows of each group, each 1 or more.
        read: reads a group by its number. It may raise a DataError.
    """

    def __init__(self, sizes: Sequence[int], read: Callable[[int], _T]) -> None:
        self._read = read
        self._starts = np.cumsum([0, *sizes])
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._cached: dict[int, Future[_T]] = {}
        self._prefetched: frozenset[int] = frozenset()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="row-groups")

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of the group, row in the group) of each row, int64, shape [num_rows]."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        return numbers, rows - self._starts[numbers]

    def prefetch(self, rows: np.ndarray) -> None:
        """Start to read the groups of these rows, also those that failed, and drop all others."""
        numbers = self.locate(rows)[0]
        with self._lock:
            _, first = np.unique(numbers, return_index=True)
            in_order = numbers[np.sort(first)].tolist()
            self._prefetched = frozenset(in_order)
            self._cached = {
                n: future
                for n, future in self._cached.items()
                if n in self._prefetched and not (future.done() and future.exception())
            }
            for number in in_order:
                self._start(number)

    def get(self, number: int) -> _T:
        """Return the rows of a group; wait until it is read.

        Raises:
            DataError: if it cannot be read.
        """
        with self._lock:
            others = [n for n in self._cached if n not in self._prefetched and n != number]
            for other in others[: len(others) - _KEPT_OTHERS + 1]:
                del self._cached[other]
            future = self._start(number)
        return future.result()

    def _start(self, number: int) -> Future[_T]:
        if number not in self._cached:
            self._cached[number] = self._pool.submit(self._read, number)
        return self._cached[number]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the cache: another process reads its own groups."""
        return {"_read": self._read, "_starts": self._starts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
