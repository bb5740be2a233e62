"""Parquet: pictures in the layout of the Hugging Face hub, and tables of numbers.

Pictures are a column ``image`` (a struct with ``bytes``, or plain binary) and a column ``label``;
the metadata of the schema may hold class names. Any other file is a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_set, decode_all
from raydl.data.row_groups import FileGroups, arrow_errors
from raydl.errors import DataError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_CACHED_FOOTERS = 16
_BUFFER_BYTES = 1 << 20
"""Read buffer of a column, in bytes, where a row group is not held in memory as a whole."""


@dataclass(frozen=True)
class ParquetGroups(FileGroups):
    """Row groups of some Parquet files."""

    unit: ClassVar[str] = "row group"
    _footers: dict[int, pq.FileMetaData] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Footers of the files that were read last; a footer describes all row groups of its file."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_footers": {}}

    def read(self, number: int) -> pa.Table:
        """Return the columns of a row group.

        Raises:
            DataError: if the file is truncated or was changed.
        """
        file, group = self.index[number]
        place = self.files[file]
        with (
            arrow_errors(self.name(number), "cannot be read"),
            place.filesystem.open_input_file(place.path) as stream,
        ):
            footer = self._footers.get(file)
            if footer is None:
                footer = pq.read_metadata(stream)
                while len(self._footers) >= _CACHED_FOOTERS:
                    self._footers.pop(next(iter(self._footers)), None)
                self._footers[file] = footer
            parquet = pq.ParquetFile(stream, metadata=footer)
            return parquet.read_row_group(group, columns=list(self.columns))

    def read_first(self) -> pa.Table:
        """Return the first row, without the rest of its row group.

        Raises:
            DataError: if the file is truncated or was changed.
        """
        file, group = self.index[0]
        place = self.files[file]
        with (
            arrow_errors(self.name(0), "cannot be read"),
            place.filesystem.open_input_file(place.path) as stream,
        ):
            parquet = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            rows = parquet.iter_batches(1, row_groups=[group], columns=list(self.columns))
            return pa.Table.from_batches([next(rows)])

    def tables(self, num_rows: int) -> Iterator[tuple[str, Iterator[pa.Table]]]:
        """Yield the rows file by file, without holding a whole row group in memory."""
        for file in self.files:
            yield file.name, _tables(file, self.columns, num_rows)

    def group_bytes(self) -> list[int]:
        """Return the bytes of the columns in each row group, uncompressed, from the footers."""
        return [size for file in self.files for size in _group_bytes(file, self.columns)]


def _tables(file: Place, columns: Sequence[str], num_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of a file in order, as tables of at most ``num_rows``."""
    with (
        arrow_errors(file.name, "cannot be read"),
        file.filesystem.open_input_file(file.path) as stream,
    ):
        parquet = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        for batch in parquet.iter_batches(num_rows, columns=list(columns)):
            yield pa.Table.from_batches([batch])


def _group_bytes(file: Place, columns: Sequence[str]) -> list[int]:
    """Return the bytes of some columns in each non-empty row group of a file."""
    with (
        arrow_errors(file.name, "cannot be read"),
        file.filesystem.open_input_file(file.path) as stream,
    ):
        footer = pq.ParquetFile(stream).metadata
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    return [
        sum(
            group.column(i).total_uncompressed_size
            for i in range(group.num_columns)
            if group.column(i).path_in_schema.split(".")[0] in columns
        )
        for group in groups
        if group.num_rows
    ]


def open_groups(
    files: Sequence[Place], *, columns: Sequence[str] = (), of_one_type: bool = True
) -> ParquetGroups:
    """Return the row groups of some files; read only the footers.

    Args:
        files: one or more files.
        columns: columns of a table to read; empty: all. Pictures always have two.
        of_one_type: whether a column must have the same type in all files.

    Raises:
        DataError: if a file cannot be opened, lacks a column or has another type, or if there are
            no rows.
    """
    footers = []
    for file in files:
        with (
            arrow_errors(file.name, "is not a whole Parquet file"),
            file.filesystem.open_input_file(file.path) as stream,
        ):
            footers.append(pq.ParquetFile(stream).metadata)
    schema = footers[0].schema.to_arrow_schema()
    selected = chosen_columns(schema, columns, files[0].name)
    for file, footer in zip(files[1:], footers[1:], strict=True):
        other = footer.schema.to_arrow_schema()
        chosen_columns(other, selected, file.name)
        if of_one_type:
            _check_like(other, schema, selected, file.name)
    index = [(f, g) for f, m in enumerate(footers) for g in range(m.num_row_groups)]
    sizes = [footers[f].row_group(g).num_rows for f, g in index]
    groups = ParquetGroups(
        files=tuple(files),
        index=tuple(pair for pair, size in zip(index, sizes, strict=True) if size),
        sizes=tuple(size for size in sizes if size),
        schema=schema,
        columns=selected,
    )
    if not groups.sizes:
        raise DataError(groups.source, "holds no rows")
    return groups


def has_pictures(columns: Iterable[str]) -> bool:
    """Whether one of these columns holds pictures."""
    return any(name in _IMAGE_COLUMNS for name in columns)


def chosen_columns(schema: pa.Schema, columns: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the names of the columns to read: (pictures, labels), or the columns of a table.

    Args:
        schema: schema of the data.
        columns: columns that the user named; empty: all.
        source: the file, for messages.

    Raises:
        DataError: if a column is missing.
    """
    if has_pictures(columns or schema.names):
        return _column(schema, _IMAGE_COLUMNS, source), _column(schema, _LABEL_COLUMNS, source)
    for name in columns:
        _column(schema, (name,), source)
    return tuple(columns) or tuple(schema.names)


def _check_like(schema: pa.Schema, first: pa.Schema, columns: Sequence[str], source: str) -> None:
    """Raise DataError if a column has another type than in the first file."""
    for name in columns:
        type, first_type = (
            _value_type(s.field(_column(s, (name,), source)).type) for s in (schema, first)
        )
        if type != first_type:
            raise DataError(
                source,
                f"column {name!r} holds {type}, but in the first file {first_type}; all files "
                f"must hold one type",
            )


def _value_type(type: pa.DataType) -> pa.DataType:
    """Return the type of a column, or the type of ``bytes`` if it is a struct of the hub."""
    is_picture = pa.types.is_struct(type) and type.get_field_index("bytes") >= 0
    return type.field("bytes").type if is_picture else type


def _column(schema: pa.Schema, choices: tuple[str, ...], source: str) -> str:
    for name in choices:
        if name in schema.names:
            return name
    raise DataError(
        source, f"must have a column {' or '.join(choices)}, got {', '.join(schema.names)}"
    )


def read_pictures(groups: FileGroups) -> ImageSet:
    """Return all pictures of some row groups, in order, decoded.

    Raises:
        DataError: if one cannot be read or has a wrong label.
    """
    tables = [
        labelled_pictures(groups.read(number), source=groups.name(number))
        for number in range(len(groups.index))
    ]
    with arrow_errors(groups.source, "files differ in their columns"):
        table = pa.concat_tables(tables)
    encoded = (value.as_py() for chunk in table["image"].chunks for value in chunk)
    return checked_set(
        decode_all(encoded, count=table.num_rows, locate=groups.locate),
        integers_of(table["label"]),
        source=groups.source,
        class_names=class_names_of(groups.schema),
        locate=groups.locate,
    )


def integers_of(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of integers without nulls as an array that may not be written.

    pyarrow's ``to_numpy`` would import pandas, where it is installed: 0.2 s in each process.
    """
    return np.from_dlpack(column.combine_chunks())


def labelled_pictures(
    table: pa.Table, *, source: str, allows_null: bool = False, allows_tensors: bool = False
) -> pa.Table:
    """Return a table with ``image``, encoded as binary, and ``label``, int64.

    Args:
        table: a table of the two columns.
        source: the file, for messages.
        allows_null: whether rows may be null.
        allows_tensors: whether pictures may be decoded, in a column of tensors.

    Raises:
        DataError: if a column has another type, or has a null that is not allowed.
    """
    image, label = table.column_names
    images, labels = table[image], table[label]
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    is_right = pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)
    is_right = is_right or (allows_tensors and isinstance(images.type, pa.BaseExtensionType))
    if not is_right:
        raise DataError(source, f"column {image!r} must hold encoded pictures, got {images.type}")
    check_labels(table.schema, table.column_names, source)
    for name, column in ((image, images), (label, labels)):
        if column.null_count and not allows_null:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(source, f"column {name!r} is null in row {row}")
    return pa.table({"image": images, "label": labels.cast(pa.int64())})


def check_labels(schema: pa.Schema, columns: Sequence[str], source: str) -> None:
    """Raise DataError unless the labels are integers.

    Args:
        schema: schema of the data.
        columns: (pictures, labels).
        source: the file, for messages.
    """
    label, type = columns[1], schema.field(columns[1]).type
    if not pa.types.is_integer(type):
        raise DataError(source, f"column {label!r} must hold integers, got {type}")


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """Return the features by column in the metadata of a schema, or an empty dict."""
    text = (schema.metadata or {}).get(b"huggingface")
    features: dict[str, Any] = (
        json.loads(text).get("info", {}).get("features") or {} if text else {}
    )
    return features


def hub_metadata(features: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a schema with these features by column."""
    return {"huggingface": json.dumps({"info": {"features": features}})}


def class_names_of(schema: pa.Schema) -> list[str] | None:
    """Return the class names in the metadata of a schema, or None without any."""
    features = features_of(schema)
    for label in _LABEL_COLUMNS:
        names: list[str] | None = features.get(label, {}).get("names")
        if names is not None:
            return names
    return None


def largest_label(groups: FileGroups) -> int:
    """Return the largest label, or -1 without any; read only the column of labels."""
    labels_only = groups.narrowed(groups.columns[1:])
    largest = [pc.max(labels_only.read(n)[0]).as_py() for n in range(len(groups.sizes))]
    return max((label for label in largest if label is not None), default=-1)
