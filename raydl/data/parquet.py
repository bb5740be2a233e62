"""Parquet: pictures in the layout of the Hugging Face hub, and tables of numbers.

Pictures are a column ``image`` (a struct with ``bytes``, or plain binary) and a column
``label``; class names, where given, are in the schema's metadata. Any other file is a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_set, decode_all
from raydl.errors import DataError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_KEPT_FOOTERS = 16


@dataclass(frozen=True)
class ParquetGroups:
    """Row groups of some files, in order; of rows with none nothing is here."""

    files: tuple[Place, ...]
    index: tuple[tuple[int, int], ...]
    """(File, row group of it) of each."""
    sizes: tuple[int, ...]
    """Rows of each."""
    schema: pa.Schema
    """Of the first file."""
    columns: tuple[str, ...]
    """The columns that are read."""
    _footers: dict[int, pq.FileMetaData] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of the files that were read last: a footer tells of all row groups of its file."""

    def _read_footer(self, file: int, stream: pa.NativeFile) -> pq.FileMetaData:
        """Return a file's footer, from memory where it was read before."""
        footer = self._footers.get(file)
        if footer is None:
            footer = pq.read_metadata(stream)
            while len(self._footers) >= _KEPT_FOOTERS:
                self._footers.pop(next(iter(self._footers)), None)
            self._footers[file] = footer
        return footer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_footers": {}}

    def read(self, number: int) -> pa.Table:
        """Return the columns of a row group.

        Raises:
            DataError: the file is cut off, or was changed.
        """
        file, group = self.index[number]
        place = self.files[file]
        try:
            with place.filesystem.open_input_file(place.path) as stream:
                footer = self._read_footer(file, stream)
                opened = pq.ParquetFile(stream, metadata=footer)
                return opened.read_row_group(group, columns=list(self.columns))
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise DataError(self.name(number), f"can not be read: {reason}") from error

    def name(self, number: int) -> str:
        """Return the file and the row group, for messages."""
        file, group = self.index[number]
        return f"{self.files[file].name}, row group {group}"

    def some(self, numbers: Sequence[int]) -> ParquetGroups:
        """Return some of the row groups."""
        return replace(
            self,
            index=tuple(self.index[n] for n in numbers),
            sizes=tuple(self.sizes[n] for n in numbers),
        )

    def read_first(self) -> pa.Table:
        """Return the first row alone, without the rest of its row group.

        Raises:
            DataError: the file is cut off, or was changed.
        """
        file, group = self.index[0]
        place = self.files[file]
        try:
            with place.filesystem.open_input_file(place.path) as stream:
                rows = pq.ParquetFile(stream).iter_batches(
                    1, row_groups=[group], columns=list(self.columns)
                )
                return pa.Table.from_batches([next(rows)])
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise DataError(self.name(0), f"can not be read: {reason}") from error

    def read_all(self) -> pa.Table:
        """Return the columns of all row groups.

        Raises:
            DataError: a file is cut off, or was changed, or files differ in their types.
        """
        tables = [self.read(number) for number in range(len(self.index))]
        try:
            return pa.concat_tables(tables)
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise DataError(self.source, f"files differ in their columns: {reason}") from error

    @property
    def source(self) -> str:
        """The files, for messages."""
        others = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return self.files[0].name + others


def open_groups(
    files: Sequence[Place], *, columns: Sequence[str] = (), of_one_type: bool = True
) -> ParquetGroups:
    """Return the row groups of some files; their footers alone are read.

    Args:
        files: one or more.
        columns: of a table, those to read; none: all. Of pictures there are two.
        of_one_type: whether a column must be of one type in all files.

    Raises:
        DataError: a file does not open, lacks a column or has another type, or none has a row.
    """
    footers = [_footer(file) for file in files]
    schema = footers[0].schema.to_arrow_schema()
    wanted = chosen_columns(schema, columns, files[0].name)
    for file, footer in zip(files[1:], footers[1:], strict=True):
        other = footer.schema.to_arrow_schema()
        chosen_columns(other, wanted, file.name)
        if of_one_type:
            _check_like(other, schema, wanted, file.name)
    index = [(f, g) for f, m in enumerate(footers) for g in range(m.num_row_groups)]
    sizes = [footers[f].row_group(g).num_rows for f, g in index]
    groups = ParquetGroups(
        files=tuple(files),
        index=tuple(pair for pair, size in zip(index, sizes, strict=True) if size),
        sizes=tuple(size for size in sizes if size),
        schema=schema,
        columns=wanted,
    )
    if not groups.sizes:
        raise DataError(groups.source, "holds no rows")
    return groups


def _footer(file: Place) -> pq.FileMetaData:
    try:
        with file.filesystem.open_input_file(file.path) as stream:
            return pq.ParquetFile(stream).metadata
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(file.name, f"is not a whole Parquet file: {reason}") from error


def has_pictures(columns: Iterable[str]) -> bool:
    """Whether there is a column of pictures among these."""
    return any(name in _IMAGE_COLUMNS for name in columns)


def chosen_columns(schema: pa.Schema, columns: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the names of the columns to read: (pictures, labels), or those of a table.

    Args:
        schema: of the data.
        columns: those that the user named; none: all.
        source: the file, for messages.

    Raises:
        DataError: one is not there.
    """
    if has_pictures(columns or schema.names):
        return _column(schema, _IMAGE_COLUMNS, source), _column(schema, _LABEL_COLUMNS, source)
    for name in columns:
        _column(schema, (name,), source)
    return tuple(columns) or tuple(schema.names)


def _check_like(schema: pa.Schema, first: pa.Schema, columns: Sequence[str], source: str) -> None:
    """Raise DataError if a file's columns are of other types than the first's."""
    for name in columns:
        ours, theirs = (
            _kind_of(s.field(_column(s, (name,), source)).type) for s in (schema, first)
        )
        if ours != theirs:
            raise DataError(
                source,
                f"column {name!r} holds {ours}, in the first file {theirs}; all files must hold "
                f"one type",
            )


def _kind_of(type: pa.DataType) -> pa.DataType:
    """Return the type of a column; of hub pictures, that of the pictures alone."""
    is_picture = pa.types.is_struct(type) and type.get_field_index("bytes") >= 0
    return type.field("bytes").type if is_picture else type


def _column(schema: pa.Schema, choices: tuple[str, ...], source: str) -> str:
    for name in choices:
        if name in schema.names:
            return name
    raise DataError(
        source, f"needs a column {' or '.join(choices)}; it has {', '.join(schema.names)}"
    )


def read_pictures(groups: ParquetGroups) -> ImageSet:
    """Return all pictures of row groups, in order, decoded.

    Raises:
        DataError: one can not be read, or is mislabelled.
    """
    table = labelled_pictures(groups.read_all(), source=groups.source)
    labels = table["label"].to_numpy()
    images = decode_all(_encoded(table["image"]), count=table.num_rows, source=groups.source)
    names = class_names_of(groups.schema)
    return checked_set(images, labels, source=groups.source, class_names=names)


def labelled_pictures(
    table: pa.Table, *, source: str, allows_null: bool = False, allows_tensors: bool = False
) -> pa.Table:
    """Return a table of ``image``, encoded, as binary, and ``label`` as int64.

    Args:
        table: of the two columns.
        source: for messages.
        allows_null: in either column.
        allows_tensors: pictures that are decoded, in a column of tensors.

    Raises:
        DataError: a column is of another type, or null in some row and must not be.
    """
    image, label = table.column_names
    images, labels = table[image], table[label]
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    is_right = pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)
    is_right = is_right or (allows_tensors and isinstance(images.type, pa.BaseExtensionType))
    if not is_right:
        raise DataError(source, f"column {image!r} must hold encoded pictures, it is {images.type}")
    if not pa.types.is_integer(labels.type):
        raise DataError(source, f"column {label!r} must hold integers, it is {labels.type}")
    for name, column in ((image, images), (label, labels)):
        if column.null_count and not allows_null:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(source, f"column {name!r} is null in row {row}")
    return pa.table({"image": images, "label": labels.cast(pa.int64())})


def check_labels(schema: pa.Schema, columns: Sequence[str], source: str) -> None:
    """Raise DataError if the labels are no integers.

    Args:
        schema: of the data.
        columns: (pictures, labels).
        source: for messages.
    """
    label, type = columns[1], schema.field(columns[1]).type
    if not pa.types.is_integer(type):
        raise DataError(source, f"column {label!r} must hold integers, it is {type}")


def class_names_of(schema: pa.Schema) -> list[str] | None:
    """Return the names of the classes, where the file says them."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return None
    features: dict[str, Any] = json.loads(text).get("info", {}).get("features", {})
    for label in _LABEL_COLUMNS:
        names: list[str] | None = features.get(label, {}).get("names")
        if names is not None:
            return names
    return None


def largest_label(groups: ParquetGroups) -> int:
    """Return the largest label; the column of labels alone is read."""
    labels_only = replace(groups, columns=groups.columns[1:])
    largest = [pc.max(labels_only.read(n)[0]).as_py() for n in range(len(groups.index))]
    return max((label for label in largest if label is not None), default=-1)


def _encoded(column: pa.ChunkedArray) -> Iterator[bytes]:
    for chunk in column.chunks:
        for value in chunk:
            yield value.as_py()
