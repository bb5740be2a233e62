"""Converts a set of images or a table to Parquet in the layout of the Hugging Face hub.

Encoded images, in files or in Parquet, are copied without decoding. Images in arrays become
PNG, which is lossless.
"""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydl.config import InputConfig
from raydl.config.checks import require
from raydl.data import files
from raydl.data.atomic_folder import whole_folder
from raydl.data.datasets import describe
from raydl.data.files import Place, wording
from raydl.data.image_files import ImageFiles
from raydl.data.part import Part, Ready
from raydl.data.pieces import reading
from raydl.data.schema import hub_metadata
from raydl.data.sources import open_source
from raydl.data.values import image_at, image_of
from raydl.errors import DataError

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_THREADS = 8
"""Threads that read or encode images: they overlap the latency of a remote store."""


def read_parts(source: str, *, seed: int) -> dict[str, Part]:
    """Return the parts of a source by name: train and, if the source has one, test.

    Args:
        source: a source that ``raydl.data.load`` reads, except a text.
        seed: seed of synthetic data.

    Raises:
        DataError: if the source cannot be read or is a text.
    """
    found = open_source(source, input=InputConfig(), seed=seed)
    if found.kind in ("text", "tokens"):
        raise DataError(source, "is a text; only images and tables can be converted to Parquet")
    described = describe(found, input=InputConfig())
    for problem in described.problems:
        raise problem
    return described.parts


def _schema_of(part: Part) -> pa.Schema:
    """Return the columns ``image`` and ``label`` with the class names, or those of a table."""
    if part.has_images:
        label = {"names": list(part.schema["label"].names), "_type": "ClassLabel"}
        features = {"image": {"_type": "Image"}, "label": label}
        columns = {"image": _IMAGE, "label": pa.int64()}
        return pa.schema(columns, metadata=hub_metadata(features))
    first = part.pieces[0].arrow_schema  # type: ignore[attr-defined]
    fields = [first.field(name) for name in part.columns]
    plain = [f.with_type(getattr(f.type, "storage_type", f.type)) for f in fields]
    return pa.schema(plain, metadata=first.metadata)


def _rows_of(part: Part, num_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of a table with their types, at most ``num_rows`` at once."""
    names, schema = list(part.columns), _schema_of(part)
    for piece in part.pieces:
        for columns in piece.batches(names, num_rows):
            table = pa.table({name: columns[name] for name in names})
            with reading(piece.name, "does not have the types of the first file"):
                yield table.cast(schema)


def _images_of(part: Part, num_rows: int) -> Iterator[pa.Table]:
    """Yield images and labels, at most ``num_rows`` at once."""
    schema, read = _schema_of(part), _of_groups if part.is_grouped else _of_rows
    with ThreadPoolExecutor(_THREADS) as pool:
        for images, paths, labels in read(part, num_rows):
            encoded = pool.map(_encoded, images)
            cells = [{"bytes": b, "path": p} for b, p in zip(encoded, paths, strict=True)]
            columns = [pa.array(cells, _IMAGE), pa.array(labels, pa.int64())]
            yield pa.Table.from_arrays(columns, schema=schema)


_Images = tuple[list[Any], list[str | None], np.ndarray]
"""Stored images, the paths of their files, and their labels."""


def _of_rows(part: Part, num_rows: int) -> Iterator[_Images]:
    is_file = isinstance(part.pieces[0], ImageFiles)
    for start in range(0, part.num_rows, num_rows):
        rows = np.arange(start, min(start + num_rows, part.num_rows))
        images, labels = dict[int, Any](), np.empty(len(rows), np.int64)
        for places, ready in part.read_rows(rows):
            labels[places] = ready.columns["label"]
            images.update(zip(places.tolist(), _checked(part, ready, rows[places]), strict=True))
        files = [posixpath.basename(part.where(row)) if is_file else None for row in rows.tolist()]
        yield [images[place] for place in range(len(rows))], files, labels


def _of_groups(part: Part, num_rows: int) -> Iterator[_Images]:
    names, first = list(part.columns.values()), 0
    for number, piece in enumerate(part.pieces):
        for columns in piece.batches(names, num_rows):
            ready = part.ready(number, columns)
            labels = ready.columns["label"]
            images = _checked(part, ready, np.arange(first, first + len(labels)))
            yield images, _paths_in(columns[part.columns["image"]]), labels
            first += len(labels)


def _checked(part: Part, ready: Ready, rows: np.ndarray) -> list[Any]:
    """Return stored images, after a check of these rows."""
    images = [image_at(ready.columns["image"], n) for n in range(len(rows))]
    for n, image in enumerate(images):
        problem = ready.bad.get(n) or ("it holds no image" if image is None else None)
        problem = image if isinstance(image, Exception) else problem
        if problem is not None:
            raise part.error(int(rows[n]), problem)
    return images


def _encoded(image: Any) -> bytes:
    """Return an image as the file that it is, or of pixels as PNG."""
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    image_of(image).save(buffer, "PNG")
    return buffer.getvalue()


def _paths_in(images: pa.Array | pa.ChunkedArray) -> list[str | None]:
    is_file = pa.types.is_struct(images.type) and images.type.get_field_index("path") >= 0
    paths: list[str | None] = pc.struct_field(images, "path").to_pylist() if is_file else []
    return paths or [None] * len(images)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The layout of the Parquet files."""

    rows_per_group: int = 1000
    """Rows of a row group, the unit that a worker reads of a streamed set."""
    rows_per_file: int = 50_000
    """Rows of a file; the last file may have fewer."""
    shuffle: bool = False
    """Write images in random order; not possible for Parquet and saved sets, which are copied."""
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
        parts, random = read_parts(source, seed=config.seed), np.random.default_rng(config.seed)
        if config.shuffle:
            parts = {name: _shuffled(part, source, random) for name, part in parts.items()}
        return [_write(part, name, folder, config, on_rows) for name, part in parts.items()]


def _shuffled(part: Part, source: str, random: np.random.Generator) -> Part:
    if not part.has_images or part.is_grouped:
        raise DataError(
            source,
            "is Parquet or saved by datasets, which is copied in its own order; omit --shuffle",
        )
    return part.choose_rows(random.permutation(part.num_rows))


def _write(
    part: Part,
    name: str,
    folder: Place,
    config: ConvertConfig,
    on_rows: Callable[[str, int, int], None],
) -> WrittenPart:
    plan, schema = file_plan(part.num_rows, config), _schema_of(part)
    sizes = [size for groups in plan for size in groups]
    read, num_done, num_bytes = _images_of if part.has_images else _rows_of, 0, 0
    tables = regrouped(read(part, config.rows_per_group), sizes)
    # Encoded images rarely repeat: a dictionary, or minimum and maximum, would be useless.
    plain = [field.name for field in schema if field.type != _IMAGE]
    options = {"use_dictionary": plain, "write_statistics": plain or False}
    on_rows(name, 0, part.num_rows)
    for number, groups in enumerate(plan):
        file = folder / f"{name}-{number:05}-of-{len(plan):05}.parquet"
        with wording(file.name, "written"), file.filesystem.open_output_stream(file.path) as stream:
            with pq.ParquetWriter(stream, schema, **options) as writer:
                for table in islice(tables, len(groups)):
                    writer.write_table(table, row_group_size=len(table))
                    num_done += len(table)
                    on_rows(name, num_done, part.num_rows)
            num_bytes += stream.tell()
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
