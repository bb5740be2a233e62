"""Labelled pictures that are read as they are needed, with bounded memory.

A worker reads whole row groups (``row_groups``), which hold encoded pictures, and decodes the
pictures of a batch just before it is trained on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raydl.config import InputConfig
from raydl.data.images import decode_one, mode_of, pays_threads
from raydl.data.parquet import labelled_pictures
from raydl.data.row_groups import InRowGroups, RowGroups
from raydl.data.samples import Batch, DataShape
from raydl.data.table import tensor_array
from raydl.errors import DataError

_GROUPS_ACROSS, _PICTURES_ACROSS = 8, 2048
"""Mean and deviation of a set are taken from so many pictures, in so many row groups or more."""
_NO_LABEL = np.iinfo(np.int64).min
"""Stands for a label that is missing; no file is meant to hold it."""


@dataclass(frozen=True)
class _Group:
    """One row group: encoded pictures and their labels."""

    pictures: pa.Array | np.ndarray
    """Encoded, or uint8 of shape [N, H, W, C]."""
    labels: np.ndarray


@dataclass(frozen=True)
class _Open:
    """Makes a group of a row group's table."""

    groups: RowGroups

    def __call__(self, table: pa.Table, number: int) -> _Group:
        name = self.groups.name(number)
        pictures = labelled_pictures(table, source=name, allows_null=True, allows_tensors=True)
        column = pictures["image"].combine_chunks()
        labels = _labels_of(pictures["label"])
        if not isinstance(column.type, pa.BaseExtensionType):
            return _Group(column, labels)
        return _Group(_decoded(column, source=name), labels)


def _decoded(column: pa.Array, *, source: str) -> np.ndarray:
    """Return pictures that are tensors: uint8, shape [N, H, W] or [N, H, W, C]."""
    if column.null_count:
        row = pa.compute.index(column.is_null(), True).as_py()
        raise DataError(source, f"row {row} holds no picture")
    pictures = tensor_array(column)
    kinds = (
        {picture.dtype for picture in pictures} if pictures.dtype == object else {pictures.dtype}
    )
    if kinds != {np.dtype(np.uint8)}:
        found = ", ".join(sorted(map(str, kinds)))
        raise DataError(
            source, f"holds pictures of {found}; decoded ones must be uint8, from 0 to 255"
        )
    return pictures


def _labels_of(column: pa.ChunkedArray) -> np.ndarray:
    """Return int64 labels."""
    labels: np.ndarray = column.fill_null(_NO_LABEL).to_numpy()
    return labels


class StreamedPictures(InRowGroups[_Group]):
    """Pictures and their classes, in row groups.

    Args:
        groups: where they lie.
        class_names: one name per class.
        config: how they are read.

    Raises:
        DataError: the first picture does not decode.
    """

    def __init__(
        self, groups: RowGroups, class_names: tuple[str, ...], config: InputConfig
    ) -> None:
        super().__init__(groups, _Open(groups), shuffle_samples=config.shuffle_samples)
        self._config = config
        first, name = self._groups.get(0).pictures[0], groups.name(0)
        self._mode = "" if isinstance(first, np.ndarray) else mode_of(first.as_py(), 0, source=name)
        picture = self._picture(first, 0, name)
        self.shape = DataShape(picture.shape, len(class_names), class_names)
        """The shape that a model is built for; the first image decides on the size of all."""
        self._make_pool()

    def _make_pool(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if pays_threads(self.shape.input_shape):
            self._pool = ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="decode")

    def rows_across(self) -> np.ndarray:
        """Return rows of row groups all over the set, enough for mean and deviation."""
        sizes = np.asarray(self._groups.groups.sizes)
        starts, num_groups = np.cumsum(sizes) - sizes, _GROUPS_ACROSS
        while True:
            numbers = np.unique(np.linspace(0, len(sizes) - 1, num_groups).astype(int))
            counts = np.minimum(sizes[numbers], -(-_PICTURES_ACROSS // len(numbers)))
            if counts.sum() >= _PICTURES_ACROSS or len(numbers) == len(sizes):
                pairs = zip(starts[numbers], counts, strict=True)
                return np.concatenate([start + np.arange(count) for start, count in pairs])
            num_groups *= 2

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 pictures [B, C, H, W], int64 labels [B]) of these rows.

        Raises:
            DataError: one can not be read; it names the file, the row group and the row.
        """
        return self.fetch_readable(rows)[0]

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and what is wrong with those that are left out.

        Raises:
            DataError: one can not be read, and ``on_bad_sample`` is stop.
        """
        numbers, within = self._groups.places(rows)
        each = map if self._pool is None else self._pool.map
        found = list(each(self._try, numbers.tolist(), within.tolist()))
        bad = [str(sample) for sample in found if isinstance(sample, DataError)]
        if bad and self._config.on_bad_sample == "stop":
            raise next(sample for sample in found if isinstance(sample, DataError))
        good = [i for i, sample in enumerate(found) if not isinstance(sample, DataError)]
        pictures = np.empty((len(good), *self.shape.input_shape), np.uint8)
        labels = np.empty(len(good), np.int64)
        for place, i in enumerate(good):
            pictures[place], labels[place] = found[i]  # type: ignore[misc]
        return (torch.from_numpy(pictures), torch.from_numpy(labels)), rows[good], bad

    def _try(self, number: int, row: int) -> tuple[np.ndarray, int] | DataError:
        """Return a picture and its label, or what is wrong with it."""
        try:
            return self._sample(self._groups.get(number), row, self._groups.groups.name(number))
        except DataError as error:
            return error

    def _sample(self, group: _Group, row: int, name: str) -> tuple[np.ndarray, int]:
        label, num_classes = int(group.labels[row]), self.shape.num_classes
        if label == _NO_LABEL:
            raise DataError(name, f"row {row} has no label")
        if not 0 <= label < num_classes:
            raise DataError(
                name, f"row {row} has label {label}; labels must be 0 to {num_classes - 1}"
            )
        picture = self._picture(group.pictures[row], row, name)
        if picture.shape != self.shape.input_shape:
            raise DataError(
                name,
                f"the picture in row {row} is {'x'.join(map(str, picture.shape))}, the first one "
                f"{'x'.join(map(str, self.shape.input_shape))}; all must be of one size",
            )
        return picture, label

    def _picture(self, value: Any, row: int, name: str) -> np.ndarray:
        """Return one picture, uint8, shape [C, H, W]."""
        if isinstance(value, np.ndarray):
            return np.moveaxis(value if value.ndim == 3 else value[..., None], 2, 0)
        encoded = value.as_py()
        if encoded is None:
            raise DataError(name, f"row {row} holds no picture")
        return decode_one(encoded, row, mode=self._mode, source=name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_pool()
