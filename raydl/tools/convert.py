"""Makes Parquet in the layout of the Hugging Face hub, of any set of images or of a table.

Images that lie encoded in files or in Parquet are copied as they are and not decoded; those that
are arrays become PNG, which loses nothing.
"""

from __future__ import annotations

import io
import json
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
from raydl.data.datasets import Layout, find_layout, load_pictures
from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_pair, labelled_files
from raydl.data.parquet import ParquetGroups, class_names_of, has_pictures, open_groups
from raydl.errors import DataError

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_THREADS = 8
"""Pictures that are read or encoded at a time: a store answers each after a while."""
_BUFFER_BYTES = 1 << 20
"""Bytes of a Parquet column that are read at a time: a large row group is never in memory."""


class Part(Protocol):
    """A training set or a test set on its way into Parquet."""

    @property
    def num_rows(self) -> int:
        """Rows, 1 or more."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Columns of all tables, with the names of classes where they are known."""
        ...

    @property
    def pictures(self) -> str | None:
        """The column of pictures, if there is one."""
        ...

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Return the rows in order, at most ``num_rows`` at a time.

        Raises:
            DataError: one can not be read, or is mislabelled.
        """
        ...


@dataclass(frozen=True)
class EncodedPictures:
    """Labelled pictures that are encoded, or read, one by one."""

    labels: np.ndarray
    """int64, shape [N]."""
    class_names: tuple[str, ...]
    encode: Callable[[int], tuple[bytes, str | None]]
    """Return a picture of 0..N-1, encoded, and the name of its file."""
    order: np.ndarray
    """The pictures in the order in which they are written, shape [N]."""

    @property
    def num_rows(self) -> int:
        """Pictures."""
        return len(self.labels)

    @property
    def schema(self) -> pa.Schema:
        """``image`` and ``label``, with the names of the classes."""
        return picture_schema(self.class_names)

    @property
    def pictures(self) -> str:
        """The column ``image``."""
        return "image"

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Return the rows in order, at most ``num_rows`` at a time."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, self.num_rows, num_rows):
                rows = self.order[start : start + num_rows]
                found = [{"bytes": b, "path": p} for b, p in pool.map(self.encode, rows.tolist())]
                columns = [pa.array(found, _IMAGE), pa.array(self.labels[rows], pa.int64())]
                yield pa.Table.from_arrays(columns, schema=self.schema)

    def shuffled(self, random: np.random.Generator) -> EncodedPictures:
        """Return the same pictures in another order."""
        return replace(self, order=random.permutation(self.num_rows))


@dataclass(frozen=True)
class ParquetPart:
    """Rows of Parquet files, copied: a table, or pictures under the names that the hub gives."""

    groups: ParquetGroups

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(self.groups.sizes)

    @property
    def schema(self) -> pa.Schema:
        """That of the first file; of pictures ``image`` and ``label``."""
        if self.pictures:
            return picture_schema(class_names_of(self.groups.schema))
        return self.groups.schema

    @property
    def pictures(self) -> str | None:
        """The column ``image``, if these are pictures."""
        return "image" if has_pictures(self.groups.columns) else None

    def tables(self, num_rows: int) -> Iterator[pa.Table]:
        """Return the rows in order, at most ``num_rows`` at a time."""
        for file in self.groups.files:
            start = 0
            for batch in batches_of(file, self.groups.columns, num_rows=num_rows):
                table = pa.Table.from_batches([batch])
                yield self._cast(table, file.name, start)
                start += len(batch)

    def _cast(self, table: pa.Table, source: str, start: int) -> pa.Table:
        if self.pictures:
            arrays = _labelled(table, class_names_of(self.groups.schema), source, start)
            return pa.Table.from_arrays(arrays, schema=self.schema)
        try:
            return table.select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, KeyError) as error:
            reason = str(error).splitlines()[0]
            first = self.groups.files[0].name
            raise DataError(source, f"has other columns than {first}: {reason}") from error


def batches_of(file: Place, columns: Sequence[str], *, num_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield rows of a Parquet file in order; of a large row group only some are in memory.

    Raises:
        DataError: the file is cut off, or was changed.
    """
    try:
        with file.filesystem.open_input_file(file.path) as stream:
            opened = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            yield from opened.iter_batches(num_rows, columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(file.name, f"can not be read: {reason}") from error


def _labelled(
    table: pa.Table, names: Sequence[str] | None, source: str, start: int
) -> tuple[pa.Array, pa.Array]:
    """Return (pictures, labels) of rows that begin with ``start`` of a file, both checked."""
    image, label = table.column_names
    images, labels = (table[name].combine_chunks() for name in (image, label))
    paths = pa.nulls(len(table), pa.string())
    if pa.types.is_struct(images.type):
        fields = {field.name for field in images.type}
        # Unlike .field(), this knows that the parts of a struct that is null are null.
        paths = pc.struct_field(images, "path") if "path" in fields else paths
        images = pc.struct_field(images, "bytes") if "bytes" in fields else images
    if not (pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)):
        raise DataError(source, f"column {image!r} must hold encoded pictures, it is {images.type}")
    if not pa.types.is_integer(labels.type):
        raise DataError(source, f"column {label!r} must hold integers, it is {labels.type}")
    for name, column in ((image, images), (label, labels)):
        if column.null_count:
            row = start + pc.index(pc.is_null(column), True).as_py()
            raise DataError(source, f"column {name!r} is null in row {row}")
    labels = labels.cast(pa.int64())
    _require_classes(labels.to_numpy(), names, source, start)
    parts = [images.cast(pa.binary()), paths.cast(pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(_IMAGE)), labels


def _require_classes(
    labels: np.ndarray, names: Sequence[str] | None, source: str, start: int
) -> None:
    limit = len(names) if names else np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(wrong):
        rule = f"0 to {limit - 1}" if names else "0 or more"
        row = int(wrong[0])
        raise DataError(source, f"row {start + row} has label {labels[row]}; labels must be {rule}")


def picture_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema that the Hugging Face hub gives to labelled pictures.

    Args:
        class_names: one name per class; None: they are not known.
    """
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if class_names:
        label = {"names": list(class_names), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label}
    hub = json.dumps({"info": {"features": features}})
    columns = {"image": _IMAGE, "label": pa.int64()}
    return pa.schema(columns, metadata={"huggingface": hub})


def read_parts(source: str, *, seed: int) -> dict[str, Part]:
    """Return the parts of a source by name, train and, where there is one, test.

    Args:
        source: what ``raydl.data.load`` reads, but no text.
        seed: of synthetic data.

    Raises:
        DataError: it can not be read, or is a text.
    """
    layout = find_layout(source)
    if layout.kind == "parquet":
        parts = (
            open_groups(files, of_one_type=False) for files in (layout.train, layout.test) if files
        )
        return _named(*map(ParquetPart, parts))
    if layout.kind == "folders":
        return _named(*_of_folders(layout))
    if layout.kind == "text":
        raise DataError(source, "is a text; pictures and tables alone become Parquet")
    return _named(*map(_of_set, image_sets(layout, seed=seed)))


def _named(train: Part, test: Part | None = None) -> dict[str, Part]:
    return {"train": train} if test is None else {"train": train, "test": test}


def image_sets(layout: Layout, *, seed: int) -> list[ImageSet]:
    """Return [training set, test set] of pictures that are read as a whole; the second may lack.

    Raises:
        DataError: they can not be read.
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
    found = [labelled_files(place) for place in (*layout.train, *layout.test)]
    all_names = max((names for _, _, names in found), key=len)
    if any(names != all_names[: len(names)] for _, _, names in found):
        raise DataError(layout.name, "the training set and the test set name different classes")
    return [_of_files(pictures, labels, all_names) for pictures, labels, _ in found]


def _of_files(
    pictures: Sequence[Place], labels: np.ndarray, names: Sequence[str]
) -> EncodedPictures:
    def encode(row: int) -> tuple[bytes, str | None]:
        return pictures[row].read(), pictures[row].basename

    return EncodedPictures(labels, tuple(names), encode, np.arange(len(labels)))


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """How Parquet is laid out."""

    rows_per_group: int = 1000
    """Rows of a row group, which is what a worker reads at a time of a streamed set."""
    rows_per_file: int = 50_000
    """Rows of a file, but for the last one."""
    shuffle: bool = False
    """Write pictures in a random order, by the seed; of class folders and arrays alone."""
    seed: int = 0
    """Of that order, and of synthetic data."""

    def __post_init__(self) -> None:
        for name in ("rows_per_group", "rows_per_file"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        require(self.seed >= 0, "seed", "0 or more", self.seed)


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """Files written for one part."""

    name: str
    """train or test."""
    num_rows: int
    num_files: int
    num_groups: int
    num_bytes: int
    """Of its files."""


_AS_USUAL = ConvertConfig()


def _silent(part: str, num_done: int, num_rows: int) -> None:
    pass


def convert(
    source: str,
    target: str,
    config: ConvertConfig = _AS_USUAL,
    *,
    on_rows: Callable[[str, int, int], None] = _silent,
) -> list[WrittenPart]:
    """Write a source as Parquet into a folder; ``raydl.data.load`` reads the same of both.

    Files are named train-00000-of-00002.parquet and test-…; a source without a test part
    gets none, so that a run splits it as it splits the source. After an error, or a cut, there is
    nothing that would be taken for a whole set.

    Args:
        source: what ``load`` reads, but no text.
        target: a path or URI of a folder that is new or empty.
        config: how files are laid out.
        on_rows: is told (part, rows written, rows of the part) after each row group.

    Raises:
        DataError: the source can not be read, the target is taken or can not be written.
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
                source, "is Parquet, which is copied in its own order; leave --shuffle out"
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

    def told(groups: Sequence[int]) -> Iterator[pa.Table]:
        nonlocal num_done
        for size in groups:
            yield next(tables)
            num_done += size
            on_rows(name, num_done, part.num_rows)

    on_rows(name, 0, part.num_rows)
    for number, groups in enumerate(plan):
        file = folder / f"{name}-{number:05}-of-{len(plan):05}.parquet"
        num_bytes += _write_file(file, part, told(groups))
    return WrittenPart(
        name=name,
        num_rows=part.num_rows,
        num_files=len(plan),
        num_groups=len(sizes),
        num_bytes=num_bytes,
    )


def file_plan(num_rows: int, config: ConvertConfig) -> list[list[int]]:
    """Return the rows of each row group, file by file."""

    def in_parts(count: int, size: int) -> list[int]:
        return [min(size, count - start) for start in range(0, count, size)]

    in_files = in_parts(num_rows, config.rows_per_file)
    return [in_parts(rows, config.rows_per_group) for rows in in_files]


def regrouped(tables: Iterable[pa.Table], sizes: Sequence[int]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of these sizes, whose sum is that of the rows."""
    coming, held = iter(tables), list[pa.Table]()
    for size in sizes:
        while sum(map(len, held)) < size:
            held.append(next(coming))
        table = pa.concat_tables(held)
        held = [table.slice(size)]
        yield table.slice(0, size)


def _write_file(file: Place, part: Part, groups: Iterator[pa.Table]) -> int:
    """Write a file, each table as a row group, and return its bytes."""
    # Encoded pictures hardly repeat: a dictionary, or least and greatest ones, are of no use.
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
