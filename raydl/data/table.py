"""Tables: columns of numbers, for custom tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from raydl.data.row_groups import InRowGroups, RowGroups
from raydl.data.samples import Batch, DataShape, InMemory
from raydl.errors import DataError

Columns = Mapping[str, np.ndarray]
"""Arrays by column, shape [N, ...], with the rows as first dimension."""


@dataclass(frozen=True)
class TableSet(InMemory):
    """A table in memory.

    Attributes:
        columns: float32, int64 or bool, shape [N, ...].
    """

    columns: Columns

    @property
    def num_samples(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    @property
    def shape(self) -> DataShape:
        """The shape of each column, to build a model for."""
        return shape_of(self.columns)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return ``{column: tensor}`` of these rows."""
        return {name: torch.from_numpy(array[rows]) for name, array in self.columns.items()}


class StreamedTable(InRowGroups[Columns]):
    """A streamed table.

    Args:
        groups: the row groups on storage.
        shuffle_samples: rows of a block, the row groups that are shuffled together, on average.
    """

    def __init__(self, groups: RowGroups, *, shuffle_samples: int) -> None:
        super().__init__(groups, _ToArrays(groups), shuffle_samples=shuffle_samples)
        first = self._groups.get(0)
        self._dtypes = {name: array.dtype for name, array in first.items()}
        self.shape = shape_of(first)
        """The shape of each column, to build a model for."""

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return ``{column: tensor}`` of these rows.

        Raises:
            DataError: if a row group cannot be read or has other columns than the first.
        """
        numbers, within = self._groups.locate(rows)
        batch = {
            name: np.empty((len(rows), *shape), self._dtypes[name])
            for name, shape in self.shape.columns.items()
        }
        for number in np.unique(numbers).tolist():
            columns, in_group = self._groups.get(number), numbers == number
            self._check(columns, number)
            for name, array in batch.items():
                array[in_group] = columns[name][within[in_group]]
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _check(self, columns: Columns, number: int) -> None:
        """Raise DataError if a row group has other shapes or types than the first."""
        name = self._groups.groups.name(number)
        if shape_of(columns) != self.shape:
            raise DataError(
                name, f"has {shape_of(columns)} of other shapes than the first row group"
            )
        for column, array in columns.items():
            if array.dtype != self._dtypes[column]:
                raise DataError(
                    name,
                    f"column {column!r} holds {array.dtype}, but in the first row group "
                    f"{self._dtypes[column]}; all must hold one type",
                )


@dataclass(frozen=True)
class _ToArrays:
    """Converts the table of a row group."""

    groups: RowGroups

    def __call__(self, table: pa.Table, number: int) -> Columns:
        return arrays_of(table, source=self.groups.name(number))


def shape_of(columns: Columns) -> DataShape:
    """Return the shape of one row of a table."""
    return DataShape((), 0, columns={name: a.shape[1:] for name, a in columns.items()})


def arrays_of(table: pa.Table, *, source: str) -> Columns:
    """Return the columns of a table as arrays, float32, int64 or bool, shape [N, ...].

    Raises:
        DataError: if a column holds no numbers, lists of different lengths, or nulls.
    """
    return {name: _array_of(table[name], name, source=source) for name in table.column_names}


def row_bytes(row: pa.Table) -> int:
    """Return the bytes of a table of one row as arrays; other columns count as they are stored."""
    total = 0
    for name in row.column_names:
        try:
            total += _array_of(row[name], name, source="").nbytes
        except DataError:
            total += int(row.select([name]).nbytes)
    return total


def _array_of(column: pa.ChunkedArray, name: str, *, source: str) -> np.ndarray:
    values, shape = column.combine_chunks(), [len(column)]
    _refuse_nulls(values, 1, name, source=source)
    if isinstance(values.type, pa.BaseExtensionType):
        return _checked_tensor(values, name, source=source)
    while _is_list(values.type):
        lengths = np.unique(np.asarray(pa.compute.list_value_length(values)))
        if len(lengths) > 1:
            raise DataError(
                source,
                f"column {name!r} holds lists of {lengths[0]} to {lengths[-1]} values; "
                f"all must have one length",
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
        _refuse_nulls(values, math.prod(shape[1:]), name, source=source)
    return _numbers(values, name, source=source).reshape(shape)


def _refuse_nulls(values: pa.Array, per_row: int, name: str, *, source: str) -> None:
    """Raise DataError if there is a null among values, ``per_row`` of each row."""
    if values.null_count:
        row = pa.compute.index(values.is_null(), True).as_py() // per_row
        raise DataError(source, f"column {name!r} is null in row {row}")


def tensor_array(values: pa.Array) -> np.ndarray:
    """Return a column of tensors, of Arrow or Ray, as one array, shape [N, ...]."""
    if hasattr(values, "to_numpy_ndarray"):
        array: np.ndarray = values.to_numpy_ndarray()
    else:
        array = values.to_numpy(zero_copy_only=False)
    return array


def _checked_tensor(values: pa.Array, name: str, *, source: str) -> np.ndarray:
    if _is_list(values.storage.type):
        inner = values.storage.flatten()
        _refuse_nulls(inner, max(1, len(inner) // max(1, len(values))), name, source=source)
    array = tensor_array(values)
    if array.dtype == object:
        raise DataError(source, f"column {name!r} holds tensors of different shapes")
    kinds = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}
    if array.dtype.kind not in kinds:
        raise DataError(source, f"column {name!r} must hold numbers, got {array.dtype}")
    return array.astype(kinds[array.dtype.kind])


def _is_list(type: pa.DataType) -> bool:
    is_any = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_it(type) for is_it in is_any)


def _numbers(values: pa.Array, name: str, *, source: str) -> np.ndarray:
    dtype: type[np.generic]
    if pa.types.is_boolean(values.type):
        dtype = np.bool_
    elif pa.types.is_integer(values.type):
        dtype = np.int64
    elif pa.types.is_floating(values.type):
        dtype = np.float32
    else:
        raise DataError(
            source,
            f"column {name!r} must hold numbers, got {values.type}; name the columns to read in "
            f"input.columns",
        )
    array: np.ndarray = values.to_numpy(zero_copy_only=False).astype(dtype)
    return array
