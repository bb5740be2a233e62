"""Streamed labelled pictures, in bounded memory.

A worker reads whole row groups of encoded pictures (``row_groups``), and decodes the pictures of a
batch shortly before it trains on them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raydl.config import InputConfig
from raydl.data.images import decode_one, decodes_in_threads, mode_of
from raydl.data.parquet import integers_of, labelled_pictures
from raydl.data.row_groups import InRowGroups, RowGroups
from raydl.data.samples import Batch, DataShape, check_readable
from raydl.data.table import tensor_array
from raydl.errors import DataError

_STATISTICS_GROUPS, _STATISTICS_PICTURES = 8, 2048
"""Least row groups and pictures to compute mean and deviation of a set from."""
_NO_LABEL = np.iinfo(np.int64).min
"""Stands for a missing label; no valid file holds this value."""


@dataclass(frozen=True)
class _Group:
    """One row group: pictures and their labels."""

    pictures: pa.Array | np.ndarray
    """Encoded pictures, or decoded ones, uint8, shape [N, H, W, C]."""
    labels: np.ndarray
    """int64, shape [N]."""


@dataclass(frozen=True)
class _ToGroup:
    """Converts the table of a row group."""

    groups: RowGroups

    def __call__(self, table: pa.Table, number: int) -> _Group:
        name = self.groups.name(number)
        pictures = labelled_pictures(table, source=name, allows_null=True, allows_tensors=True)
        column = pictures["image"].combine_chunks()
        labels = integers_of(pictures["label"].fill_null(_NO_LABEL))
        if not isinstance(column.type, pa.BaseExtensionType):
            return _Group(column, labels)
        return _Group(_decoded(column, source=name), labels)


def _decoded(column: pa.Array, *, source: str) -> np.ndarray:
    """Return pictures of a column of tensors, uint8, shape [N, H, W] or [N, H, W, C]."""
    if column.null_count:
        row = pa.compute.index(column.is_null(), True).as_py()
        raise DataError(source, f"row {row} holds no picture")
    pictures = tensor_array(column)
    dtypes = (
        {picture.dtype for picture in pictures} if pictures.dtype == object else {pictures.dtype}
    )
    if dtypes != {np.dtype(np.uint8)}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise DataError(source, f"must hold decoded pictures as uint8, from 0 to 255, got {names}")
    return pictures


class StreamedPictures(InRowGroups[_Group]):
    """Pictures and their classes, in row groups.

    Args:
        groups: the row groups on storage.
        class_names: one name per class.
        config: settings of the input.

    Raises:
        DataError: if the first picture does not decode; if bad samples are skipped, none of the
            first row group's.
    """

    def __init__(
        self, groups: RowGroups, class_names: tuple[str, ...], config: InputConfig
    ) -> None:
        super().__init__(groups, _ToGroup(groups), shuffle_samples=config.shuffle_samples)
        self._config = config
        self._mode = ""
        self.shape = DataShape(self._first_picture().shape, len(class_names), class_names)
        """The shape to build a model for; all pictures must have the size of the first."""
        self._make_pool()

    def _first_picture(self) -> np.ndarray:
        """Return the first picture that decodes, and set the mode of the others by it."""
        name, pictures = self._groups.groups.name(0), self._groups.get(0).pictures
        skips, first_error = self._config.on_bad_sample == "skip", None
        for row in range(len(pictures) if skips else 1):
            try:
                value = pictures[row]
                if not isinstance(value, np.ndarray) and (encoded := value.as_py()) is not None:
                    self._mode = mode_of(encoded, row, source=name)
                return self._picture(value, row, name)
            except DataError as error:
                first_error = first_error or error
        assert first_error is not None, "no row group is empty"
        raise first_error

    def _make_pool(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if decodes_in_threads(self.shape.input_shape):
            self._pool = ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="decode")

    def statistics_rows(self) -> np.ndarray:
        """Return rows from row groups across the set, enough for mean and deviation."""
        sizes = np.asarray(self._groups.groups.sizes)
        starts, num_groups = np.cumsum(sizes) - sizes, _STATISTICS_GROUPS
        while True:
            numbers = np.unique(np.linspace(0, len(sizes) - 1, num_groups).astype(int))
            counts = np.minimum(sizes[numbers], -(-_STATISTICS_PICTURES // len(numbers)))
            if counts.sum() >= _STATISTICS_PICTURES or len(numbers) == len(sizes):
                pairs = zip(starts[numbers], counts, strict=True)
                return np.concatenate([start + np.arange(count) for start, count in pairs])
            num_groups *= 2

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 pictures [B, C, H, W], int64 labels [B]) of these rows.

        Raises:
            DataError: with the file, the row group and the row, if one cannot be read.
        """
        return self.fetch_readable(rows)[0]

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and one sentence per skipped sample.

        Raises:
            DataError: see ``check_readable``.
        """
        numbers, within = self._groups.locate(rows)
        each = map if self._pool is None else self._pool.map
        samples = list(each(self._sample, numbers.tolist(), within.tolist()))
        errors = [sample for sample in samples if isinstance(sample, DataError)]
        skips = self._config.on_bad_sample == "skip"
        check_readable(errors, num_samples=len(rows), skips=skips)
        readable = [i for i, sample in enumerate(samples) if not isinstance(sample, DataError)]
        pictures = np.empty((len(readable), *self.shape.input_shape), np.uint8)
        labels = np.empty(len(readable), np.int64)
        for place, i in enumerate(readable):
            pictures[place], labels[place] = samples[i]  # type: ignore[misc]
        batch = torch.from_numpy(pictures), torch.from_numpy(labels)
        return batch, rows[readable], list(map(str, errors))

    def _sample(self, number: int, row: int) -> tuple[np.ndarray, int] | DataError:
        """Return a picture and its label, or the error if it cannot be read."""
        name, num_classes = self._groups.groups.name(number), self.shape.num_classes
        try:
            group = self._groups.get(number)
            label = int(group.labels[row])
            if label == _NO_LABEL:
                raise DataError(name, f"row {row} has no label")
            if not 0 <= label < num_classes:
                raise DataError(
                    name, f"row {row} has label {label}; labels must be 0 to {num_classes - 1}"
                )
            picture = self._picture(group.pictures[row], row, name)
            if picture.shape != self.shape.input_shape:
                size, first_size = (
                    "x".join(map(str, shape)) for shape in (picture.shape, self.shape.input_shape)
                )
                raise DataError(
                    name,
                    f"the picture in row {row} is {size}, but the first one is {first_size}; all "
                    f"must have one size",
                )
            return picture, label
        except DataError as error:
            return error

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
