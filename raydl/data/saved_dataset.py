"""Folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote, and such sets in Python.

PyArrow reads the Arrow files of a folder; the library itself is not needed. The record batches are
the groups. A ``datasets.Dataset`` gives its own Arrow rows by the same road.
"""

from __future__ import annotations

import json
import posixpath
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts
from raydl.data.pieces import Columns, GroupedFile, Piece, reading
from raydl.data.schema import schema_of
from raydl.errors import DataError

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_TESTS = ("test", "validation")


def find_saved(found: Listing) -> Parts | None:
    """Return the Arrow files of each part of a saved set, or None if the folder holds none.

    The folder is that of a ``Dataset``, or of a ``DatasetDict`` with the splits ``train`` and, if
    there is a test set, ``test`` or ``validation``.

    Raises:
        DataError: if the folder is incomplete, or has no split ``train``.
    """
    if _DICT in found.files:
        folders = _folders_of_splits(found)
    elif _STATE in found.files or any("/" not in path for path in found.ending_in([".arrow"])):
        folders = {"train": ""}
    else:
        return None
    parts = {name: _files_of(found, folder) for name, folder in folders.items()}
    read = [posixpath.join(folder, file) for folder in folders.values() for file in (_STATE, _INFO)]
    return {**parts, "": [_DICT, *read]}


def _folders_of_splits(found: Listing) -> dict[str, str]:
    splits = _read_json(found.root / _DICT).get("splits", [])
    if "train" not in splits:
        raise DataError(
            found.name,
            f"must have a split train, got {', '.join(splits) or 'none'}; give the folder of one "
            f"split to train on it",
        )
    test = [name for name in _TESTS if name in splits][:1]
    return {"train": "train", **({"test": test[0]} if test else {})}


def _files_of(found: Listing, folder: str) -> list[str]:
    """Return the Arrow files of a ``Dataset``."""
    place = found.root / folder if folder else found.root
    for name in (_STATE, _INFO):  # the files that save_to_disk writes last
        if posixpath.join(folder, name) not in found.files:
            raise DataError(place.name, f"has no {name}: save_to_disk did not finish; save again")
    entries = _read_json(place / _STATE).get("_data_files", [])
    return [posixpath.join(folder, entry["filename"]) for entry in entries]


def _read_json(place: Place) -> dict[str, Any]:
    try:
        content = json.loads(place.read())
    except ValueError as error:
        raise DataError(place.name, f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(place.name, f"must hold a JSON object, got a {type(content).__name__}")
    return content


def open_saved(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the Arrow files of each part of a saved set."""
    return found.each(parts, lambda place: ArrowFile(place, _columns_of_format(place, input)))


def _columns_of_format(place: Place, input: InputConfig) -> Sequence[str]:
    """Return the columns of the set's format, or () for all; those that a user names win."""
    state = _read_json(place.parent / _STATE)
    is_all = bool(input.columns_named) or state.get("_output_all_columns")
    return () if is_all else state.get("_format_columns") or ()


class ArrowFile(GroupedFile):
    """An Arrow file in the stream format; a local one is mapped while it is read.

    The format has no index, so a file in a store is read once to find its record batches.

    Args:
        place: the file.
        names: the columns that it is to have; (): all.

    Raises:
        DataError: if it is not a whole Arrow file.
    """

    word = "record batch"

    def __init__(self, place: Place, names: Sequence[str] = ()) -> None:
        self.place, self.name, self.folder = place, place.name, place.parent
        with reading(self.name, "is not a whole Arrow file"), _opened(place) as stream:
            reader = pa.ipc.open_stream(stream)
            schema = schema_of(reader.schema)
            starts, sizes = [stream.tell()], list[int]()
            for batch in reader:
                starts.append(stream.tell())
                sizes.append(batch.num_rows)
            self.arrow_schema = reader.schema
        self.schema = {name: schema[name] for name in names or schema}
        self._set_sizes(sizes)
        self.starts = tuple(starts)
        """Byte at which each record batch starts, and at last the one after all."""

    def read_group(self, number: int, names: Sequence[str]) -> Columns:
        """Return some columns of a record batch."""
        with (
            reading(self.name_of_group(number), "cannot be read"),
            _opened(self.place) as stream,
        ):
            schema = pa.ipc.read_schema(stream)
            stream.seek(self.starts[self._numbers[number]])
            batch = pa.ipc.read_record_batch(stream, schema).select(list(names))
            batch.validate(full=True)  # a wrong offset would end the process
            return {name: _plain(batch[name]) for name in names}

    def group_bytes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each record batch, with all columns."""
        return [self.starts[n + 1] - self.starts[n] for n in self._numbers]


def _opened(file: Place) -> pa.NativeFile:
    """Open a file; map a local one, so that only what is used is read."""
    return pa.memory_map(file.path) if file.is_local else file.open()


def _plain(values: pa.Array) -> pa.Array:
    """Return a column without the type of ``datasets`` that Arrow knows if that is imported."""
    return values.storage if isinstance(values.type, pa.BaseExtensionType) else values


class HubRows(Piece):
    """Rows of a ``datasets.Dataset``.

    Args:
        data: one without a format.
    """

    def __init__(self, data: Any) -> None:
        self.name, self.num_rows = "datasets.Dataset", len(data)
        self.schema = schema_of(data.features.arrow_schema)
        self._rows = data.with_format("arrow")

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some columns of some rows, as they are stored."""
        with reading(self.name, "cannot be read"):
            table = self._rows.select_columns(list(names))[rows]
        return {name: table[name] for name in names}


def is_stored(data: Any) -> bool:
    """Whether something is a ``datasets.Dataset`` without a format.

    One with a format or a transform gives other samples than it stores.
    """
    kind = getattr(sys.modules.get("datasets"), "Dataset", ())
    return isinstance(data, kind) and data.format["type"] is None
