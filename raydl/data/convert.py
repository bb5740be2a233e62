"""Make Parquet in the layout of the Hugging Face hub of any set of pictures, or of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydl.config.checks import require
from raydl.data import files
from raydl.data.encoded import EncodedPictures, Part, read_parts
from raydl.data.files import Place
from raydl.data.whole import whole_folder, wording
from raydl.errors import DataError


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
    """What was written of a part."""

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
    """Write a source as Parquet into a folder; :func:`raydl.data.load` reads the same of both.

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
