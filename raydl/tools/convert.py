"""Converts a set of pictures or a table to Parquet in the layout of the Hugging Face hub.

Encoded pictures, in files or in Parquet, are copied without decoding. Pictures in arrays become
PNG, which is lossless.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from raydl.config.checks import require
from raydl.data import files
from raydl.data.atomic_folder import whole_folder, wording
from raydl.data.binary import npz_parts
from raydl.data.datasets import WITH_GROUPS, Layout, find_layout, load_pictures, open_parts
from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_pair, labelled_files, shared_class_names
from raydl.data.parquet import class_names_of, has_pictures, hub_metadata
from raydl.data.row_groups import FileGroups
from raydl.errors import DataError

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_THREADS = 8
"""Threads that read or encode pictures: they overlap the latency of a remote store."""


class Part(Protocol):
    """A training set or a test set that is converted."""

    @property
    def num_rows(self) -> int:
        """Rows, 1 or more."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Columns of all tables, with class names if known."""
        ...

    @property
    def pictures(self) -> str | None:
        """Name of the column of pictures, if there is one."""
        ...

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Yield the rows in order, at most ``num_rows`` per table.

        Raises:
            DataError: if a row cannot be read or has a wrong label.
        """
        ...


@dataclass(frozen=True)
class EncodedPictures:
    """Labelled pictures that are read or encoded one by one."""

    labels: np.ndarray
    """int64, shape [N]."""
    class_names: tuple[str, ...]
    encode: Callable[[int], tuple[bytes, str | None]]
    """Return a picture of 0..N-1, encoded, and the name of its file."""
    order: np.ndarray
    """Numbers of the pictures in the order of writing, shape [N]."""

    @property
    def num_rows(self) -> int:
        """Number of pictures."""
        return len(self.labels)

    @property
    def schema(self) -> pa.Schema:
        """Columns ``image`` and ``label``, with the class names."""
        return picture_schema(self.class_names)

    @property
    def pictures(self) -> str:
        """The column ``image``."""
        return "image"

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Yield the rows in order, at most ``num_rows`` per table."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, self.num_rows, num_rows):
                rows = self.order[start : start + num_rows]
                images = [{"bytes": b, "path": p} for b, p in pool.map(self.encode, rows.tolist())]
                columns = [pa.array(images, _IMAGE), pa.array(self.labels[rows], pa.int64())]
                yield pa.Table.from_arrays(columns, schema=self.schema)

    def shuffled(self, random: np.random.Generator) -> EncodedPictures:
        """Return the same pictures in random order."""
        return replace(self, order=random.permutation(self.num_rows))


@dataclass(frozen=True)
class CopiedPart:
    """Rows of files that are copied; columns of pictures get the names of the hub."""

    groups: FileGroups

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(self.groups.sizes)

    @property
    def schema(self) -> pa.Schema:
        """Columns ``image`` and ``label`` for pictures, else the schema of the first file."""
        if self.pictures:
            return picture_schema(class_names_of(self.groups.schema))
        return self.groups.schema

    @property
    def pictures(self) -> str | None:
        """The column ``image``, if the rows are pictures."""
        return "image" if has_pictures(self.groups.columns) else None

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Yield the rows in order, at most ``num_rows`` per table."""
        for name, tables in self.groups.tables(num_rows):
            start = 0
            for table in tables:
                yield self._cast(table, name, start)
                start += len(table)

    def _cast(self, table: pa.Table, source: str, start: int) -> pa.Table:
        if self.pictures:
            arrays = _labelled(table, class_names_of(self.groups.schema), source, start)
            return pa.Table.from_arrays(arrays, schema=self.schema)
        try:
            return table.select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, KeyError) as error:
            reason = str(error).splitlines()[0]
            first = self.groups.files[0].name
            raise DataError(source, f"does not have the columns of {first}: {reason}") from error


def _labelled(
    table: pa.Table, names: Sequence[str] | None, source: str, start: int
) -> tuple[pa.Array, pa.Array]:
    """Return checked (pictures, labels) of a table; ``start`` is the row of its first in the file.

    Raises:
        DataError: if a column has another type or is null, or a label belongs to no class.
    """
    image, label = table.column_names
    images, labels = (table[name].combine_chunks() for name in (image, label))
    paths = pa.nulls(len(table), pa.string())
    if pa.types.is_struct(images.type):
        fields = {field.name for field in images.type}
        # Unlike .field(), struct_field() returns null for the fields of a null struct.
        paths = pc.struct_field(images, "path") if "path" in fields else paths
        images = pc.struct_field(images, "bytes") if "bytes" in fields else images
    if not (pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)):
        raise DataError(source, f"column {image!r} must hold encoded pictures, got {images.type}")
    if not pa.types.is_integer(labels.type):
        raise DataError(source, f"column {label!r} must hold integers, got {labels.type}")
    for name, column in ((image, images), (label, labels)):
        if column.null_count:
            row = start + pc.index(pc.is_null(column), True).as_py()
            raise DataError(source, f"column {name!r} is null in row {row}")
    labels = labels.cast(pa.int64())
    values, limit = labels.to_numpy(), len(names) if names else np.iinfo(np.int64).max
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        rule, row = f"0 to {limit - 1}" if names else "0 or more", int(wrong[0])
        raise DataError(source, f"row {start + row} has label {values[row]}; labels must be {rule}")
    arrays = [images.cast(pa.binary()), paths.cast(pa.string())]
    return pa.StructArray.from_arrays(arrays, fields=list(_IMAGE)), labels


def picture_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema of labelled pictures on the Hugging Face hub.

    Args:
        class_names: one name per class; None: unknown.
    """
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if class_names:
        label = {"names": list(class_names), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label}
    columns = {"image": _IMAGE, "label": pa.int64()}
    return pa.schema(columns, metadata=hub_metadata(features))


def read_parts(source: str, *, seed: int) -> dict[str, Part]:
    """Return the parts of a source by name: train and, if the source has one, test.

    Args:
        source: a source that ``raydl.data.load`` reads, except a text.
        seed: seed of synthetic data.

    Raises:
        DataError: if the source cannot be read or is a text.
    """
    layout = find_layout(source)
    parts: Sequence[Part]
    if layout.kind in WITH_GROUPS:
        parts = [CopiedPart(groups) for groups in open_parts(layout, of_one_type=False)]
    elif layout.kind == "folders":
        parts = _of_folders(layout)
    elif layout.kind == "text":
        raise DataError(source, "is a text; only pictures and tables can be converted to Parquet")
    else:
        parts = [_of_set(images) for images in image_sets(layout, seed=seed)]
    return dict(zip(("train", "test"), parts, strict=False))


def image_sets(layout: Layout, *, seed: int) -> list[ImageSet]:
    """Return [training set, test set], or [training set] if the source has no test set.

    Raises:
        DataError: if the pictures cannot be read.
    """
    if layout.kind == "npz":
        train, test = npz_parts(layout.train[0])
        if test is None:
            return [train]
        data = checked_pair(train, test, source=layout.name)
    else:
        data = load_pictures(layout, seed=seed)
    return [part for part in (data.train, data.test) if isinstance(part, ImageSet)]


def _of_set(images: ImageSet) -> EncodedPictures:
    def encode(row: int) -> tuple[bytes, str | None]:
        buffer, pixels = io.BytesIO(), images.images[row]
        grey = len(pixels) == 1
        Image.fromarray(pixels[0] if grey else np.moveaxis(pixels, 0, 2)).save(buffer, "PNG")
        return buffer.getvalue(), None

    order = np.arange(images.num_samples)
    return EncodedPictures(images.labels, images.class_names, encode, order)


def _of_folders(layout: Layout) -> list[EncodedPictures]:
    parts = [labelled_files(place) for place in (*layout.train, *layout.test)]
    all_names = shared_class_names([names for _, _, names in parts], source=layout.name)
    return [_of_files(pictures, labels, all_names) for pictures, labels, _ in parts]


def _of_files(
    pictures: Sequence[Place], labels: np.ndarray, names: Sequence[str]
) -> EncodedPictures:
    def encode(row: int) -> tuple[bytes, str | None]:
        return pictures[row].read(), pictures[row].basename

    return EncodedPictures(labels, tuple(names), encode, np.arange(len(labels)))


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The layout of the Parquet files."""

    rows_per_group: int = 1000
    """Rows of a row group, the unit that a worker reads of a streamed set."""
    rows_per_file: int = 50_000
    """Rows of a file; the last file may have fewer."""
    shuffle: bool = False
    """Write pictures in random order; not possible for Parquet and saved sets, which are copied."""
    seed: int = 0
    """Seed of the random order and of synthetic data."""

    def __post_init__(self) -> None:
        for name in ("rows_per_group", "rows_per_file"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        require(self.seed >= 0, "seed", "0 or more", self.seed)


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """The files written for one part."""

    name: str
    """train or test."""
    num_rows: int
    num_files: int
    num_groups: int
    num_bytes: int
    """Bytes of all files of the part."""


_DEFAULTS = ConvertConfig()


def convert(
    source: str,
    target: str,
    config: ConvertConfig = _DEFAULTS,
    *,
    on_rows: Callable[[str, int, int], None] = lambda part, num_done, num_rows: None,
) -> list[WrittenPart]:
    """Write a source as Parquet into a folder, from which ``raydl.data.load`` reads the same data.

    Files are named train-00000-of-00002.parquet and test-…. A source without a test part gets none;
    a run then splits the Parquet as it would split the source. A conversion that fails or is
    interrupted leaves no folder that ``load`` accepts.

    Args:
        source: a source that ``load`` reads, except a text.
        target: path or URI of a folder that is new or empty.
        config: layout of the files.
        on_rows: called with (part, rows written, rows of the part) after each row group.

    Raises:
        DataError: if the source cannot be read, or the target is not empty or cannot be written.
    """
    with whole_folder(files.find(target)) as folder:
        parts = read_parts(source, seed=config.seed)
        if config.shuffle:
            parts = _shuffled(parts, source, config.seed)
        return [_write(part, name, folder, config, on_rows) for name, part in parts.items()]


def _shuffled(parts: dict[str, Part], source: str, seed: int) -> dict[str, Part]:
    random, shuffled = np.random.default_rng(seed), dict[str, Part]()
    for name, part in parts.items():
        if not isinstance(part, EncodedPictures):
            raise DataError(
                source,
                "is Parquet or saved by datasets, which is copied in its own order; omit --shuffle",
            )
        shuffled[name] = part.shuffled(random)
    return shuffled


def _write(
    part: Part,
    name: str,
    folder: Place,
    config: ConvertConfig,
    on_rows: Callable[[str, int, int], None],
) -> WrittenPart:
    plan = file_plan(part.num_rows, config)
    sizes = [size for groups in plan for size in groups]
    tables = regrouped(part.tables(config.rows_per_group), sizes)
    num_done = num_bytes = 0

    def next_tables(groups: Sequence[int]) -> Iterator[pa.Table]:
        nonlocal num_done
        for size in groups:
            yield next(tables)
            num_done += size
            on_rows(name, num_done, part.num_rows)

    on_rows(name, 0, part.num_rows)
    for number, groups in enumerate(plan):
        file = folder / f"{name}-{number:05}-of-{len(plan):05}.parquet"
        num_bytes += _write_file(file, part, next_tables(groups))
    return WrittenPart(
        name=name,
        num_rows=part.num_rows,
        num_files=len(plan),
        num_groups=len(sizes),
        num_bytes=num_bytes,
    )


def file_plan(num_rows: int, config: ConvertConfig) -> list[list[int]]:
    """Return the rows of each row group of each file."""

    def split(count: int, size: int) -> list[int]:
        return [min(size, count - start) for start in range(0, count, size)]

    return [split(rows, config.rows_per_group) for rows in split(num_rows, config.rows_per_file)]


def regrouped(tables: Iterable[pa.Table], sizes: Sequence[int]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of these sizes; the sizes sum up to the number of rows."""
    source, buffered = iter(tables), list[pa.Table]()
    for size in sizes:
        while sum(map(len, buffered)) < size:
            buffered.append(next(source))
        table = pa.concat_tables(buffered)
        buffered = [table.slice(size)]
        yield table.slice(0, size)


def _write_file(file: Place, part: Part, groups: Iterator[pa.Table]) -> int:
    """Write a file, one row group per table, and return its size in bytes."""
    # Encoded pictures rarely repeat: a dictionary, or minimum and maximum, would be useless.
    plain = [name for name in part.schema.names if name != part.pictures]
    with wording(file, "written"), file.filesystem.open_output_stream(file.path) as stream:
        writer = pq.ParquetWriter(
            stream, part.schema, use_dictionary=plain, write_statistics=plain or False
        )
        try:
            for table in groups:
                writer.write_table(table, row_group_size=len(table))
        finally:
            writer.close()
        num_bytes: int = stream.tell()
    return num_bytes
