"""Describes a data source from its footers, its labels and its first picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from raydl.config import InputConfig
from raydl.data.datasets import WITH_GROUPS, Layout, find_layout, open_parts
from raydl.data.images import (
    ImageSet,
    decode_one,
    labelled_files,
    mode_of,
    shared_class_names,
)
from raydl.data.parquet import check_labels, class_names_of, has_pictures, integers_of
from raydl.data.row_groups import FileGroups
from raydl.data.table import arrays_of, row_bytes
from raydl.data.text import TokenSet, load_text
from raydl.errors import DataError
from raydl.tools.convert import image_sets

_LARGE_GROUP_BYTES = 64 << 20
"""Larger row groups cause a warning: a worker holds several row groups in memory."""
_CONVERT = "raydl data convert SRC DST"


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """A description of the training set or of the test set."""

    name: str
    """train or test; train if the source has one part."""
    num_rows: int
    """Pictures, rows of a table, or tokens of a text."""
    files: tuple[str, ...] = ()
    """Paths of the files; empty for class folders, which have too many."""
    group_rows: tuple[int, ...] = ()
    """Rows of each row group of Parquet, or record batch of a saved set."""
    group_bytes: tuple[int, ...] = ()
    """Bytes of each of them, with pictures encoded and columns uncompressed."""
    class_counts: tuple[int, ...] = ()
    """Rows of each class."""
    num_unlabelled: int = 0
    """Rows whose label is missing or belongs to no class."""
    classes_per_group: float | None = None
    """Mean number of different labels in a row group of pictures; None without row groups."""


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """A column of a table."""

    name: str
    type: str
    """Arrow's name of the type."""
    shape: tuple[int, ...] | None
    """Shape of the first row; None: the column is not numeric."""


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """A description of a data source."""

    source: str
    kind: str
    """parquet, saved, folders, idx, cifar, npz, text or synthetic."""
    holds: str
    """pictures, table or text."""
    parts: tuple[PartInfo, ...]
    has_test: bool
    """Whether the source has a test part; else a run splits off a tenth of the rows."""
    picture_shape: tuple[int, ...] = ()
    """(channels, height, width) of the first picture."""
    mode: str = ""
    """grey or RGB."""
    class_names: tuple[str, ...] = ()
    columns: tuple[ColumnInfo, ...] = ()
    num_tokens: int = 0
    vocabulary: int = 0
    decoded_bytes: int
    """Bytes of the decoded source in memory."""
    is_streamed: bool
    """Whether a run streams the source instead of reading it into memory."""
    warnings: tuple[str, ...] = ()


def inspect(source: str, *, input: InputConfig | None = None) -> SourceInfo:
    """Return a description of a source; Parquet and class folders are read only in small part.

    Args:
        source: a source that ``raydl.data.load`` reads.
        input: settings of the input; None: the defaults.

    Raises:
        DataError: if the source cannot be read.
    """
    config, layout = input or InputConfig(), find_layout(source)
    if layout.kind == "text":
        return _of_text(layout, source)
    if layout.kind == "folders":
        info = _of_folders(layout, source)
    elif layout.kind in WITH_GROUPS:
        info = _of_groups(layout, source, config)
    else:
        info = _of_sets(layout, source)
    return replace(info, warnings=_warnings(info, config))


def _of_text(layout: Layout, source: str) -> SourceInfo:
    data = load_text(layout.name, context=1)
    train, test = (part for part in (data.train, data.test) if isinstance(part, TokenSet))
    return SourceInfo(
        source=source,
        kind="text",
        holds="text",
        parts=(
            PartInfo(name="train", num_rows=len(train.tokens)),
            PartInfo(name="test", num_rows=len(test.tokens)),
        ),
        has_test=False,
        num_tokens=len(train.tokens) + len(test.tokens),
        vocabulary=train.vocabulary,
        decoded_bytes=train.tokens.nbytes + test.tokens.nbytes,
        is_streamed=False,
    )


def _of_folders(layout: Layout, source: str) -> SourceInfo:
    listed = [labelled_files(place) for place in (*layout.train, *layout.test)]
    class_names = list(shared_class_names([names for _, _, names in listed], source=source))
    first = listed[0][0][0]
    shape = _picture_shape(first.read(), None, source=first.name)
    parts = [
        PartInfo(
            name=name,
            num_rows=len(labels),
            class_counts=_counts(labels, len(class_names)),
        )
        for name, (_, labels, _) in zip(("train", "test"), listed, strict=False)
    ]
    return _of_pictures(layout.kind, source, parts, class_names, shape)


def _of_sets(layout: Layout, source: str) -> SourceInfo:
    sets: list[ImageSet] = image_sets(layout, seed=0)
    files = tuple(place.name for place in layout.train)
    parts = [
        PartInfo(
            name=name,
            num_rows=part.num_samples,
            files=files,
            class_counts=_counts(part.labels, part.num_classes),
        )
        for name, part in zip(("train", "test"), sets, strict=False)
    ]
    return _of_pictures(layout.kind, source, parts, sets[0].class_names, sets[0].image_shape)


def _of_pictures(
    kind: str,
    source: str,
    parts: Sequence[PartInfo],
    class_names: Sequence[str],
    shape: tuple[int, ...],
    *,
    is_streamed: bool = False,
) -> SourceInfo:
    return SourceInfo(
        source=source,
        kind=kind,
        holds="pictures",
        parts=tuple(parts),
        has_test=len(parts) > 1,
        picture_shape=shape,
        mode={1: "grey", 3: "RGB"}.get(shape[0], ""),
        class_names=tuple(class_names),
        decoded_bytes=sum(part.num_rows for part in parts) * int(np.prod(shape)),
        is_streamed=is_streamed,
    )


def _of_groups(layout: Layout, source: str, config: InputConfig) -> SourceInfo:
    groups = open_parts(layout, columns=config.columns_named)
    parts = [_part_of(name, g) for name, g in zip(("train", "test"), groups, strict=False)]
    num_train = parts[0].num_rows
    if not has_pictures(groups[0].columns):
        bytes_per_row = row_bytes(groups[0].read_first())
        return SourceInfo(
            source=source,
            kind=layout.kind,
            holds="table",
            parts=tuple(parts),
            has_test=len(groups) > 1,
            columns=_columns(groups[0]),
            decoded_bytes=sum(part.num_rows for part in parts) * bytes_per_row,
            is_streamed=config.streams(lambda: num_train * bytes_per_row),
        )
    labels = [_labels(g) for g in groups]
    class_names = _class_names(groups, labels)
    parts = [
        _with_classes(part, labels_of_part, len(class_names))
        for part, labels_of_part in zip(parts, labels, strict=True)
    ]
    shape = _picture_shape(_first_picture(groups[0]), 0, source=groups[0].name(0))
    is_streamed = config.streams(lambda: num_train * int(np.prod(shape)))
    return _of_pictures(layout.kind, source, parts, class_names, shape, is_streamed=is_streamed)


def _part_of(name: str, groups: FileGroups) -> PartInfo:
    return PartInfo(
        name=name,
        num_rows=sum(groups.sizes),
        files=tuple(file.name for file in groups.files),
        group_rows=groups.sizes,
        group_bytes=tuple(groups.group_bytes()),
    )


def _labels(groups: FileGroups) -> list[np.ndarray]:
    """Return the labels of each row group, -1 for null, without reading other columns.

    Raises:
        DataError: if they are no integers.
    """
    check_labels(groups.schema, groups.columns, groups.source)
    labels_only = groups.narrowed(groups.columns[1:])
    columns = (labels_only.read(number)[0] for number in range(len(groups.sizes)))
    return [integers_of(column.cast(pa.int64()).fill_null(-1)) for column in columns]


def _class_names(groups: Sequence[FileGroups], labels: Sequence[list[np.ndarray]]) -> list[str]:
    """Return the class names in the files, or 0, 1, ... up to the largest label."""
    names = max((class_names_of(part.schema) or [] for part in groups), key=len)
    largest = max(int(array.max()) for part in labels for array in part)
    return names or [str(label) for label in range(largest + 1)]


def _with_classes(part: PartInfo, labels: list[np.ndarray], num_classes: int) -> PartInfo:
    """Return the part with statistics of its labels, which are given by row group."""
    joined = np.concatenate(labels)
    is_known = (joined >= 0) & (joined < num_classes)
    different = [len(np.unique(array)) for array in labels]
    return replace(
        part,
        class_counts=_counts(joined[is_known], num_classes),
        num_unlabelled=int((~is_known).sum()),
        classes_per_group=sum(different) / len(different),
    )


def _counts(labels: np.ndarray, num_classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


def _first_picture(groups: FileGroups) -> bytes:
    """Return the first picture, encoded, without reading a whole row group."""
    image = groups.columns[0]
    value = groups.narrowed([image]).read_first()[0][0].as_py()
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        file = groups.files[groups.index[0][0]]
        raise DataError(file.name, f"column {image!r} must hold encoded pictures; row 0 has none")
    return data


def _picture_shape(data: bytes, row: int | None, *, source: str) -> tuple[int, ...]:
    """Return (channels, height, width) of an encoded picture."""
    mode = mode_of(data, row, source=source)
    return decode_one(data, row, mode=mode, source=source).shape


def _columns(groups: FileGroups) -> tuple[ColumnInfo, ...]:
    row = groups.read_first()
    return tuple(
        ColumnInfo(name=name, type=str(row[name].type), shape=_shape(row.select([name])))
        for name in row.column_names
    )


def _shape(row: pa.Table) -> tuple[int, ...] | None:
    """Return the shape of a table's only row, or None if it is not numeric."""
    try:
        (array,) = arrays_of(row, source="").values()
    except DataError:
        return None
    return array.shape[1:]


def _warnings(info: SourceInfo, config: InputConfig) -> tuple[str, ...]:
    warnings = [w for part in info.parts for w in _group_warnings(part, config)]
    for part in info.parts:
        if part.num_unlabelled:
            warnings.append(
                f"{part.name} has {part.num_unlabelled:,} rows whose label is missing or belongs "
                f"to no class; a run stops at such a row, or skips it with --on-bad-sample skip"
            )
        if _is_sorted(part):
            warnings.append(
                f"{part.name} is sorted by class, and a row group holds "
                f"{part.classes_per_group:.1f} of {np.count_nonzero(part.class_counts)} classes; "
                f"streaming mixes only a few row groups, so shuffle the rows first "
                f"({_CONVERT} --shuffle does it for class folders and arrays)"
            )
    warnings += _empty_classes(info)
    unread = [column.name for column in info.columns if column.shape is None]
    if unread:
        warnings.append(
            f"{', '.join(unread)}: a run cannot read columns that are not numeric; name the "
            f"other columns with --input.columns"
        )
    if info.kind not in WITH_GROUPS and info.decoded_bytes > config.max_memory_bytes:
        warnings.append(
            f"takes {bytes_text(info.decoded_bytes)} decoded, more than input.max_memory_bytes, "
            f"and only Parquet and saved datasets can be streamed; convert it with {_CONVERT}"
        )
    return tuple(warnings)


def _empty_classes(info: SourceInfo) -> list[str]:
    """Return a warning if classes have no rows: one mistyped label creates many such classes."""
    counted = [part.class_counts for part in info.parts if part.class_counts]
    counts = [sum(of_class) for of_class in zip(*counted, strict=True)]
    empty = [number for number, count in enumerate(counts) if not count]
    if not empty:
        return []
    last = f" to {empty[-1]}" if len(empty) > 1 else ""
    return [
        f"{len(empty)} of {len(counts)} classes have no rows (from {empty[0]}{last}), but the "
        f"model has an output for each; check for a mistyped label"
    ]


def _is_sorted(part: PartInfo) -> bool:
    """Whether a row group has less than half the classes that random rows would have."""
    num_classes = np.count_nonzero(part.class_counts)
    if part.classes_per_group is None or num_classes < 2 or len(part.group_rows) < 2:
        return False
    missed = (1 - 1 / num_classes) ** np.mean(part.group_rows)
    return bool(part.classes_per_group < num_classes * (1 - missed) / 2)


def _group_warnings(part: PartInfo, config: InputConfig) -> list[str]:
    largest = max(part.group_bytes, default=0)
    if len(part.group_rows) == 1 and part.num_rows > config.shuffle_samples:
        what = f"one row group of all its {part.num_rows:,} rows ({bytes_text(largest)})"
    elif largest > _LARGE_GROUP_BYTES:
        what = f"row groups of up to {bytes_text(largest)}"
    else:
        return []
    return [
        f"{part.name} has {what}; a worker that streams holds whole row groups in memory, and "
        f"{_CONVERT} makes smaller ones"
    ]


def bytes_text(num_bytes: float) -> str:
    """Return the text of a size, with a binary unit: ``12.4 MiB``."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    units = ["TiB", "GiB", "MiB", "KiB"]
    unit = "bytes"
    while num_bytes >= 1000 and units:
        num_bytes, unit = num_bytes / 1024, units.pop()
    return f"{num_bytes:,.1f} {unit}"
