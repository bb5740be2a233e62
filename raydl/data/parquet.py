"""Parquet files: their row groups are the groups that are read as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.pieces import Columns, GroupedFile, reading
from raydl.data.schema import schema_of

_MOST_FOOTERS = 16
_BUFFER_BYTES = 1 << 20
"""Read buffer of a column, in bytes, where a row group is not held in memory as a whole."""
_footers: dict[object, pq.FileMetaData] = {}
"""Footers of the files that were read last: a set of many files has many, and each is large."""


class ParquetFile(GroupedFile):
    """A Parquet file.

    Args:
        place: the file.
        input: not used: all files are read alike.

    Raises:
        DataError: if it is not a whole Parquet file.
    """

    def __init__(self, place: Place, input: InputConfig | None = None) -> None:
        self.place, self.name = place, place.name
        self.folder = place.parent
        with reading(self.name, "is not a whole Parquet file"), self.place.open() as stream:
            footer = self._footer(stream)
            self.arrow_schema = footer.schema.to_arrow_schema()
            self.schema = schema_of(self.arrow_schema)
        self._set_sizes([footer.row_group(n).num_rows for n in range(footer.num_row_groups)])

    def _footer(self, stream: pa.NativeFile) -> pq.FileMetaData:
        footer = _footers.get(self)
        if footer is None:
            footer = pq.read_metadata(stream)
            while len(_footers) >= _MOST_FOOTERS:
                _footers.pop(next(iter(_footers)), None)
            _footers[self] = footer
        return footer

    def read_group(self, number: int, names: Sequence[str]) -> Columns:
        """Return some columns of a row group."""
        name = self.name_of_group(number)
        with reading(name, "cannot be read"), self.place.open() as stream:
            file = pq.ParquetFile(stream, metadata=self._footer(stream))
            table = file.read_row_group(self._numbers[number], columns=list(names))
            return {name: table[name] for name in names}

    def batches(self, names: Sequence[str], num_rows: int) -> Iterator[Columns]:
        """Yield some columns in parts, without holding a whole row group in memory."""
        with reading(self.name, "cannot be read"), self.place.open() as stream:
            file = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            for batch in file.iter_batches(num_rows, columns=list(names)):
                yield {name: batch[name] for name in names}

    def group_bytes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of some columns in each row group, uncompressed."""
        wanted = set(names)
        with reading(self.name, "cannot be read"), self.place.open() as stream:
            footer = self._footer(stream)
        groups = [footer.row_group(number) for number in self._numbers]
        places = [
            i for i in range(footer.num_columns)
            if footer.schema.column(i).path.split(".")[0] in wanted
        ]  # fmt: skip
        return [sum(g.column(i).total_uncompressed_size for i in places) for g in groups]
