"""Row groups: a thread reads a large set group by group, a few ahead of the training."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from raydl.data.files import Place
from raydl.data.order import InBlocks
from raydl.errors import DataError

_KEPT_OTHERS = 2
"""Groups to keep that were not prefetched: a worker reads them when it helps with a block."""

_T = TypeVar("_T")
_Files = TypeVar("_Files", bound="FileGroups")


class RowGroups(Protocol):
    """Tables that are read one by one: row groups of files, or blocks in Ray's object store."""

    @property
    def sizes(self) -> Sequence[int]:
        """Rows in each group, each 1 or more."""
        ...

    def read(self, number: int) -> pa.Table:
        """Return the selected columns of a group.

        Raises:
            DataError: if it cannot be read.
        """
        ...

    def name(self, number: int) -> str:
        """Return the file and the row group, for messages."""
        ...

    def select(self: _T, numbers: Sequence[int]) -> _T:
        """Return some of the groups."""
        ...


@dataclass(frozen=True)
class FileGroups(ABC):
    """Row groups of some files, in order, without empty ones; each file format has a subclass."""

    unit: ClassVar[str]
    """Word of the format for a row group, for messages."""
    files: tuple[Place, ...]
    index: tuple[tuple[int, int], ...]
    """(File, row group in the file) of each row group."""
    sizes: tuple[int, ...]
    """Rows of each row group."""
    schema: pa.Schema
    """Schema of the first file."""
    columns: tuple[str, ...]
    """Columns to read."""

    @abstractmethod
    def read(self, number: int) -> pa.Table:
        """Return the columns of a row group.

        Raises:
            DataError: if the file is truncated or was changed.
        """

    @abstractmethod
    def read_first(self) -> pa.Table:
        """Return the first row.

        Raises:
            DataError: if the file is truncated or was changed.
        """

    @abstractmethod
    def group_bytes(self) -> list[int]:
        """Return the bytes of each row group."""

    def name(self, number: int) -> str:
        """Return the file and the row group, for messages."""
        file, group = self.index[number]
        return f"{self.files[file].name}, {self.unit} {group}"

    def locate(self, row: int) -> tuple[str, int]:
        """Return (the file and the row group for messages, the row in the group) of a row."""
        number = bisect_right(self._ends, row)
        return self.name(number), row - (self._ends[number] - self.sizes[number])

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes))

    def select(self: _Files, numbers: Sequence[int]) -> _Files:
        """Return some of the row groups."""
        return replace(
            self,
            index=tuple(self.index[n] for n in numbers),
            sizes=tuple(self.sizes[n] for n in numbers),
        )

    def narrowed(self: _Files, columns: Sequence[str]) -> _Files:
        """Return the same row groups with some of the columns."""
        return replace(self, columns=tuple(columns))

    def tables(self, num_rows: int) -> Iterator[tuple[str, Iterator[pa.Table]]]:
        """Yield the rows in order: (name for messages, tables of at most ``num_rows``).

        Raises:
            DataError: if a file is truncated or was changed.
        """
        for number, size in enumerate(self.sizes):
            table = self.read(number)
            yield self.name(number), (table.slice(i, num_rows) for i in range(0, size, num_rows))

    def read_all(self) -> pa.Table:
        """Return the columns of all row groups.

        Raises:
            DataError: if a file is truncated or was changed, or if files differ in their types.
        """
        tables = [self.read(number) for number in range(len(self.index))]
        with arrow_errors(self.source, "files differ in their columns"):
            return pa.concat_tables(tables)

    @property
    def source(self) -> str:
        """The files, for messages."""
        others = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return self.files[0].name + others


@contextmanager
def arrow_errors(name: str, problem: str) -> Iterator[None]:
    """Turn an error of a file system or of Arrow into a DataError, "NAME: PROBLEM: …"."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DataError(name, f"{problem}: {str(error).splitlines()[0]}") from error


class GroupCache(Generic[_T]):
    """A cache of the groups that are in use or prefetched by a thread.

    Args:
        groups: the groups on storage.
        convert: converts the table and the number of a group to the cached value.
    """

    def __init__(self, groups: RowGroups, convert: Callable[[pa.Table, int], _T]) -> None:
        self.groups = groups
        self._convert = convert
        self._starts = np.cumsum([0, *groups.sizes])
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._cached: dict[int, Future[_T]] = {}
        self._prefetched: frozenset[int] = frozenset()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="row-groups")

    @property
    def num_rows(self) -> int:
        """Rows in all groups."""
        return int(self._starts[-1])

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
        """Return the converted rows of a group; wait until it is read.

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
            self._cached[number] = self._pool.submit(self._load, number)
        return self._cached[number]

    def _load(self, number: int) -> _T:
        return self._convert(self.groups.read(number), number)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the cache: another process reads its own groups."""
        return {"groups": self.groups, "_convert": self._convert, "_starts": self._starts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class InRowGroups(Generic[_T]):
    """Base class of streamed sets.

    Args:
        groups: the groups on storage.
        convert: converts the table and the number of a group to the cached value.
        shuffle_samples: samples of a block, the row groups that are shuffled together, on average.
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
        """True."""
        return True

    def order(self, seed: int) -> InBlocks:
        """Return the order of the samples in each epoch: shuffled blocks of row groups."""
        return InBlocks(self._groups.groups.sizes, seed, block_samples=self._shuffle_samples)

    def prefetch(self, rows: np.ndarray) -> None:
        """Start to read the row groups of these rows."""
        self._groups.prefetch(rows)
