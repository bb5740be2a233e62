"""Folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote: Arrow files and their state.

PyArrow reads them; the library itself is not needed. The features in an Arrow file's schema tell
which column holds pictures and which labels. Other sets are tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from pyarrow import fs

from raydl.data.files import Place
from raydl.data.parquet import features_of, hub_metadata
from raydl.data.row_groups import FileGroups, arrow_errors
from raydl.errors import DataError

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_LABEL_NAMES = ("label", "labels")
"""Names of a column of labels that is no ``ClassLabel``."""


def find_parts(folder: Place) -> tuple[tuple[Place, ...], tuple[Place, ...]] | None:
    """Return the folders of (training set, test set), each () or one, or None if not saved so.

    Args:
        folder: the folder of a ``Dataset``, or of a ``DatasetDict`` with the splits ``train`` and,
            if there is a test set, ``test`` or ``validation``.

    Raises:
        DataError: if the folder is incomplete, or has no split ``train``.
    """
    if (folder / _DICT).is_file():
        return _splits_of(folder)
    if (folder / _STATE).is_file() or folder.children("data-*-of-*.arrow"):
        _refuse_incomplete(folder)
        return (folder,), ()
    return None


def _splits_of(folder: Place) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    splits = _read_json(folder / _DICT).get("splits", [])
    if "train" not in splits:
        raise DataError(
            folder.name,
            f"must have a split train, got {', '.join(splits) or 'none'}; give the folder of one "
            f"split to train on it",
        )
    test = [name for name in ("test", "validation") if name in splits][:1]
    parts = [folder / name for name in ("train", *test)]
    for part in parts:
        _refuse_incomplete(part)
    return (parts[0],), tuple(parts[1:])


def _refuse_incomplete(folder: Place) -> None:
    """Raise DataError unless both files that ``save_to_disk`` writes last are there."""
    for name in (_STATE, _INFO):
        if not (folder / name).is_file():
            raise DataError(folder.name, f"has no {name}: save_to_disk did not finish; save again")


def _read_json(place: Place) -> dict[str, Any]:
    try:
        content = json.loads(place.read())
    except ValueError as error:
        raise DataError(place.name, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(place.name, f"must hold a JSON object, got a {type(content).__name__}")
    return content


@dataclass(frozen=True)
class ArrowGroups(FileGroups):
    """Record batches of some Arrow files in the stream format."""

    unit: ClassVar[str] = "record batch"
    starts: tuple[tuple[int, ...], ...]
    """By file: the byte at which each record batch starts, and at last the one after all."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the files of each column that is read; pictures are read as image and label."""

    def read(self, number: int) -> pa.Table:
        """Return the columns of a record batch.

        Raises:
            DataError: if the file is truncated or was changed.
        """
        file, batch = self.index[number]
        with arrow_errors(self.name(number), "cannot be read"), _opened(self.files[file]) as stream:
            schema = pa.ipc.read_schema(stream)
            stream.seek(self.starts[file][batch])
            table = pa.Table.from_batches([pa.ipc.read_record_batch(stream, schema)])
            columns = [_plain(table[self.names[name]]) for name in self.columns]
        return pa.table(columns, schema=self._schema_of(columns))

    def _schema_of(self, columns: Sequence[pa.ChunkedArray]) -> pa.Schema:
        types = zip(self.columns, (column.type for column in columns), strict=True)
        return pa.schema(list(types), metadata=self.schema.metadata)

    def read_first(self) -> pa.Table:
        """Return the first row.

        Raises:
            DataError: if the file is truncated or was changed.
        """
        return self.read(0).slice(0, 1)

    def group_bytes(self) -> list[int]:
        """Return the bytes of each record batch, with all columns."""
        return [self.starts[f][b + 1] - self.starts[f][b] for f, b in self.index]


@contextmanager
def _opened(file: Place) -> Iterator[pa.NativeFile]:
    """Open a file; map a local one, so that only what is used is read."""
    if isinstance(file.filesystem, fs.LocalFileSystem):
        with pa.memory_map(file.path) as stream:
            yield stream
    else:
        with file.filesystem.open_input_file(file.path) as stream:
            yield stream


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without the type of ``datasets`` that Arrow knows if that is imported."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def open_saved(folder: Place, *, columns: Sequence[str] = ()) -> ArrowGroups:
    """Return the record batches of a saved ``Dataset``.

    Arrow's stream format has no index, so a file on a remote storage is read once to find them; a
    local file is mapped.

    Args:
        folder: the folder of the ``Dataset``.
        columns: columns to read; empty: those of the set's format, or all.

    Raises:
        DataError: if a file cannot be read, a column is missing, or there are no rows; of pictures
            also if it is not clear which column holds them or their labels.
    """
    state = _read_json(folder / _STATE)
    files = tuple(folder / entry["filename"] for entry in state.get("_data_files", []))
    scanned = [_scan(file) for file in files]
    pairs = [((f, b), size) for f, (_, _, sizes) in enumerate(scanned)
             for b, size in enumerate(sizes) if size]  # fmt: skip
    if not pairs:
        raise DataError(folder.name, "holds no rows")
    schema = scanned[0][0]
    formatted = () if state.get("_output_all_columns") else state.get("_format_columns") or ()
    names = _names_of(schema, columns, formatted, folder.name)
    return ArrowGroups(
        files=files,
        index=tuple(pair for pair, _ in pairs),
        sizes=tuple(size for _, size in pairs),
        schema=_schema_under(names, schema),
        columns=tuple(names),
        starts=tuple(starts for _, starts, _ in scanned),
        names=names,
    )


def _scan(file: Place) -> tuple[pa.Schema, tuple[int, ...], list[int]]:
    """Return (schema, start of each record batch and end of the last, rows of each)."""
    with arrow_errors(file.name, "is not a whole Arrow file"), _opened(file) as stream:
        reader = pa.ipc.open_stream(stream)
        starts, sizes = [stream.tell()], list[int]()
        for batch in reader:
            starts.append(stream.tell())
            sizes.append(batch.num_rows)
        return reader.schema, tuple(starts), sizes


def _names_of(
    schema: pa.Schema, columns: Sequence[str], formatted: Sequence[str], source: str
) -> dict[str, str]:
    """Return the column of the files for each column to read: image and label, or a table's."""
    for name in columns:
        if name not in schema.names:
            raise DataError(source, f"must have a column {name}, got {', '.join(schema.names)}")
    candidates = list(columns or formatted or schema.names)
    kinds = {name: feature.get("_type") for name, feature in features_of(schema).items()}
    pictures = [name for name in candidates if kinds.get(name) == "Image"]
    if not pictures:
        return {name: name for name in candidates}
    if len(pictures) > 1:
        raise DataError(
            source,
            f"has several columns of pictures, {', '.join(pictures)}; name one, and the labels, in "
            f"input.columns",
        )
    others = [name for name in candidates if name != pictures[0]]
    labels = others if columns and len(others) == 1 else [
        name for name in others if kinds.get(name) == "ClassLabel"
    ] or [name for name in others if name in _LABEL_NAMES]  # fmt: skip
    if len(labels) != 1:
        what = "no column of labels" if not labels else "several columns of labels"
        found = ", ".join(labels or schema.names)
        raise DataError(
            source,
            f"has {what} for the pictures in {pictures[0]!r}, got {found}; name both columns in "
            f"input.columns",
        )
    return {"image": pictures[0], "label": labels[0]}


def _schema_under(names: Mapping[str, str], schema: pa.Schema) -> pa.Schema:
    """Return the schema of some columns, with their features, under other names."""
    features = features_of(schema)
    renamed = {new: features[old] for new, old in names.items() if old in features}
    columns = [(new, schema.field(old).type) for new, old in names.items()]
    return pa.schema(columns, metadata=hub_metadata(renamed))
