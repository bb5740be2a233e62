"""A piece: a file, or anything else, that gives stored samples by number and knows nothing else.

Decoding, conversion, numbering of classes, comparison, order and messages are the same for all
kinds (``raydl.data.part``). So a new kind of source is a class with the members of ``Piece`` and a
line in ``raydl.data.sources``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydl.data.files import Place
from raydl.data.schema import Schema
from raydl.errors import DataError, in_one_line

Columns = Mapping[str, Any]
"""Stored values by column, an item per sample: an Arrow array, an array, or a list.

An item of a list may be an exception, if this sample alone cannot be read. Images are files as
bytes, also in a struct with ``bytes``, or decoded: uint8, [H, W], [H, W, C] or [C, H, W].
"""


class Piece(Protocol):
    """Some samples of a source, all of one kind. Workers receive copies, pickled.

    A piece keeps no open file and no mapped memory in its pickled state, reads nothing but what it
    is asked for, and need not be safe for several threads.
    """

    name: str
    """The file, for messages."""
    schema: Schema
    """Its columns, as stored."""
    num_rows: int
    """Samples, 1 or more."""
    groups: Sequence[int] = ()
    """Samples of each group that is read as a whole, in order, each 1 or more; () if any samples
    can be read alone at little cost. It decides how the set is shuffled when it is streamed: in
    blocks of groups, or all samples."""
    word: str = "row group"
    """What a group is called, for messages."""
    note: str = ""
    """A sentence for the log of a run, or ""."""

    folder: Place | None = None
    """Folder below which images lie of which it has only the paths; None: it has no such images."""
    is_in_memory: bool = False
    """Whether all samples are in memory already."""

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some columns of some samples; only without groups.

        Args:
            rows: numbers of the samples, int64, in any order.
            names: columns of the schema.

        Raises:
            DataError: if the piece as a whole cannot be read; see ``reading``.
        """
        raise AssertionError(f"{self.name} is read by groups")

    def read_group(self, number: int, names: Sequence[str]) -> Columns:
        """Return some columns of all samples of a group; only with groups.

        Raises:
            DataError: if the group cannot be read.
        """
        raise AssertionError(f"{self.name} has no groups")

    def where(self, row: int) -> str:
        """Return where a sample lies, for messages: ``train.parquet, row group 2, row 17``."""
        return f"{self.name}, row {row}"

    def batches(self, names: Sequence[str], num_rows: int) -> Iterator[Columns]:
        """Yield some columns of all samples in order, in parts of at most ``num_rows`` samples.

        Override it if a part can be read without all of its group.

        Raises:
            DataError: if they cannot be read.
        """
        for number, size in enumerate(self.groups):
            group = self.read_group(number, names)
            for start in range(0, size, num_rows):
                yield {name: group[name][start : start + num_rows] for name in names}
        if not self.groups:
            for start in range(0, self.num_rows, num_rows):
                stop = min(start + num_rows, self.num_rows)
                yield self.read(np.arange(start, stop), names)

    def group_bytes(self, names: Sequence[str]) -> Sequence[int]:
        """Return the bytes of some columns in each group, as far as the format tells; or ()."""
        return ()

    def column(self, name: str) -> Iterator[Any]:
        """Yield the values of one column, group by group; without groups, at once.

        Raises:
            DataError: if they cannot be read.
        """
        for number in range(len(self.groups)):
            yield self.read_group(number, [name])[name]
        if not self.groups:
            yield self.read(np.arange(self.num_rows), [name])[name]

    def distinct(self, name: str) -> set[Any]:
        """Return the different values of a column of labels.

        Raises:
            DataError: if they cannot be read.
        """
        found: set[Any] = set()
        for values in self.column(name):
            if isinstance(values, (pa.Array, pa.ChunkedArray)):
                values = pc.unique(values).to_pylist()
            elif isinstance(values, np.ndarray):
                values = np.unique(values).tolist()
            found.update(value for value in values if not isinstance(value, Exception))
        return found


class GroupedFile(Piece):
    """A piece whose file numbers its groups; those without samples are passed over."""

    def _set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the groups by the samples of each group of the file."""
        self._numbers = [number for number, size in enumerate(sizes) if size]
        self.groups = tuple(size for size in sizes if size)
        self._starts = np.cumsum([0, *self.groups])
        self.num_rows = int(self._starts[-1])

    def name_of_group(self, number: int) -> str:
        """Return the file and its number of a group, for messages."""
        return f"{self.name}, {self.word} {self._numbers[number]}"

    def where(self, row: int) -> str:
        """Return the file, the group and the row in it, for messages."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self.name_of_group(number)}, row {row - self._starts[number]}"


@contextmanager
def reading(name: str, problem: str) -> Iterator[None]:
    """Turn whatever a library raises at a damaged file into one sentence, ``NAME: PROBLEM: …``.

    Raises:
        DataError: instead of any other exception, which is its cause. One that is the machine's
            failure is found again by ``raydl.errors.failure_of_machine``.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(name, f"{problem}: {in_one_line(error)}") from error
