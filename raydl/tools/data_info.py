"""Describes a data source from its footers, its labels and its first image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from raydl.config import InputConfig
from raydl.data.datasets import Described, describe
from raydl.data.image_files import ImageFiles
from raydl.data.part import Part
from raydl.data.sources import open_source
from raydl.data.tokens import Tokens
from raydl.data.values import convert
from raydl.text.formatting import bytes_text

_LARGE_GROUP_BYTES = 64 << 20
"""Larger row groups cause a warning: a worker holds several row groups in memory."""
_CONVERT = "raydl data convert SRC DST"


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """A description of the training set or of the test set."""

    name: str
    """train or test; train if the source has one part."""
    num_rows: int
    """Images, rows of a table, or tokens of a text."""
    files: tuple[str, ...] = ()
    """Paths of the files; empty for class folders, which have too many."""
    group_rows: tuple[int, ...] = ()
    """Rows of each row group of Parquet, or record batch of a saved set."""
    group_bytes: tuple[int, ...] = ()
    """Bytes of each of them, with images encoded and columns uncompressed."""
    class_counts: tuple[int, ...] = ()
    """Rows of each class."""
    num_unlabelled: int = 0
    """Rows whose label is missing or belongs to no class."""
    classes_per_group: float | None = None
    """Mean number of different labels in a row group of images; None without row groups."""


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
    """That of ``raydl.data.sources.KINDS``; text; or synthetic."""
    holds: str
    """images, table or text."""
    parts: tuple[PartInfo, ...]
    has_test: bool
    """Whether the source has a test part; else a run splits off a tenth of the rows."""
    image_shape: tuple[int, ...] = ()
    """(channels, height, width) of the first image."""
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

    What a run would refuse in the source is among the warnings.

    Args:
        source: a source that ``raydl.data.load`` reads.
        input: settings of the input; None: the defaults.

    Raises:
        DataError: if the source cannot be read, or is nothing that a run could begin with.
    """
    config = input or InputConfig()
    found = open_source(source, input=replace(config, context=1))  # however short a text is
    described = describe(found, input=config).shaped(skips=True)
    train, shape = described.train, described.train.shape
    parts = described.parts
    tokens = [piece for p in parts.values() for piece in p.pieces if isinstance(piece, Tokens)]
    is_text, has_images = train.has_tokens, train.has_images
    info = SourceInfo(
        source=source,
        kind=found.kind,
        holds="text" if is_text else "images" if has_images else "table",
        parts=tuple(_part_of(name, part) for name, part in parts.items()),
        # That of a text may be the end of its files.
        has_test=described.test is not None and not (is_text and tokens[1].start),
        image_shape=shape.input_shape if has_images else (),
        mode={1: "grey", 3: "RGB"}.get(shape.input_shape[0], "") if has_images else "",
        class_names=shape.class_names if has_images else (),
        columns=() if is_text or has_images else _columns_of(train, config),
        num_tokens=sum(piece.num_tokens for piece in tokens),
        vocabulary=shape.num_classes if is_text else 0,
        decoded_bytes=sum(x.num_bytes for x in tokens)
        or sum(part.decoded_bytes for part in parts.values()),
        is_streamed=described.streams(config) and described.can_be_streamed,
    )
    return replace(info, warnings=_warnings(info, described, config))


def _part_of(name: str, part: Part) -> PartInfo:
    if isinstance(tokens := part.pieces[0], Tokens):
        return PartInfo(name=name, num_rows=tokens.num_tokens, files=tokens.file_names)
    columns = list(part.columns.values())
    info = PartInfo(
        name=name,
        num_rows=part.num_rows,
        files=tuple(x.name for x in part.pieces if not isinstance(x, ImageFiles)),
        group_rows=part.sizes,
        group_bytes=tuple(size for x in part.pieces for size in x.group_bytes(columns)),
    )
    return _with_classes(info, part) if part.has_images else info


def _with_classes(info: PartInfo, part: Part) -> PartInfo:
    """Return a part with statistics of its labels, without reading other columns."""
    label, stored, num_bad = part.schema["label"], part.columns["label"], 0
    counts = np.zeros(len(label.names), np.int64)
    different = []
    for values in chain.from_iterable(piece.column(stored) for piece in part.pieces):
        labels, bad = convert(values, label)
        good = labels[np.setdiff1d(np.arange(len(labels)), list(bad))] if bad else labels
        counts += np.bincount(good, minlength=len(label.names))
        num_bad += len(bad)
        different.append(len(np.unique(good)))
    return replace(
        info,
        class_counts=tuple(counts.tolist()),
        num_unlabelled=num_bad,
        classes_per_group=sum(different) / len(different) if part.is_grouped else None,
    )


def _columns_of(train: Part, config: InputConfig) -> tuple[ColumnInfo, ...]:
    stored, shapes = train.pieces[0].schema, train.shape.columns
    return tuple(
        ColumnInfo(name=name, type=stored[name].stored, shape=shapes.get(name))
        for name in config.columns_named or stored
    )


def _warnings(info: SourceInfo, described: Described, config: InputConfig) -> tuple[str, ...]:
    warnings = [f"a run refuses it: {problem}" for problem in described.problems]
    warnings += described.notes
    warnings += [w for part in info.parts for w in _group_warnings(part, config)]
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
    if (
        not described.can_be_streamed
        and info.holds != "text"
        and info.decoded_bytes > config.max_memory_bytes
    ):
        warnings.append(
            f"takes {bytes_text(info.decoded_bytes)} decoded, more than input.max_memory_bytes, "
            f"and arrays cannot be streamed; convert it with {_CONVERT}"
        )
    return tuple(warnings)


def _empty_classes(info: SourceInfo) -> list[str]:
    """Return a warning if classes have no rows: one mistyped label creates many such classes."""
    counts = np.sum([part.class_counts for part in info.parts], axis=0)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
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
