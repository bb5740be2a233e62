"""Parquet image sets in the layout of the Hugging Face hub.

A column ``image`` (a struct with ``bytes``, or plain binary) and a column ``label``; class
names, where given, in the schema's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_set
from raydl.data.pictures import decode_all
from raydl.errors import DataError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")


def read_parquet(files: list[Place]) -> ImageSet:
    """Return all rows of some files, in order.

    Raises:
        DataError: a file does not open, lacks a column, is empty or mislabelled.
    """
    tables, names = zip(*[_read_file(file) for file in files], strict=True)
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    if sum(table.num_rows for table in tables) == 0:
        raise DataError(name, "holds no rows")
    table = pa.concat_tables(tables)
    labels = table["label"].to_numpy()
    images = decode_all(_encoded(table["image"]), count=table.num_rows, source=name)
    return checked_set(images, labels, source=name, class_names=names[0])


def _read_file(file: Place) -> tuple[pa.Table, list[str] | None]:
    """Return a file's (table of ``image`` as binary and ``label`` as int64, class names)."""
    try:
        with file.filesystem.open_input_file(file.path) as stream:
            parquet = pq.ParquetFile(stream)
            schema = parquet.schema_arrow
            image = _column(schema, _IMAGE_COLUMNS, file)
            label = _column(schema, _LABEL_COLUMNS, file)
            table = parquet.read(columns=[image, label])
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(file.name, f"is not a whole Parquet file: {reason}") from error
    images, labels = table[image], table[label]
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    if not pa.types.is_binary(images.type) and not pa.types.is_large_binary(images.type):
        raise DataError(
            file.name, f"column {image!r} must hold encoded pictures, it is {images.type}"
        )
    if not pa.types.is_integer(labels.type):
        raise DataError(file.name, f"column {label!r} must hold integers, it is {labels.type}")
    for name, column in ((image, images), (label, labels)):
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(file.name, f"column {name!r} is null in row {row}")
    names = _class_names(schema.metadata, label)
    return pa.table({"image": images, "label": labels.cast(pa.int64())}), names


def _column(schema: pa.Schema, choices: tuple[str, ...], file: Place) -> str:
    for name in choices:
        if name in schema.names:
            return name
    raise DataError(
        file.name, f"needs a column {' or '.join(choices)}; it has {', '.join(schema.names)}"
    )


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> list[str] | None:
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return None
    features: dict[str, Any] = json.loads(text).get("info", {}).get("features", {})
    names: list[str] | None = features.get(label, {}).get("names")
    return names


def _encoded(column: pa.ChunkedArray) -> Iterator[bytes]:
    for chunk in column.chunks:
        for value in chunk:
            yield value.as_py()
