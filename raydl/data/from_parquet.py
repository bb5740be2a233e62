"""A dataset of Parquet files: pictures or a table, in memory or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.images import checked_pair, split_off_test
from raydl.data.parquet import (
    ParquetGroups,
    check_labels,
    class_names_of,
    has_pictures,
    labelled_pictures,
    largest_label,
    open_groups,
    read_pictures,
)
from raydl.data.pictures import decode_one, mode_of
from raydl.data.row_groups import RowGroups
from raydl.data.samples import Dataset, Samples
from raydl.data.streamed import StreamedPictures
from raydl.data.table import StreamedTable, TableSet, arrays_of, row_bytes
from raydl.errors import DataError

_Groups = TypeVar("_Groups", bound=RowGroups)
_TEST_SHARE = 10
"""Of a set without a test part, one row or row group in so many becomes one."""


def load_parquet(
    train: Sequence[Place],
    test: Sequence[Place],
    *,
    source: str,
    seed: int,
    input: InputConfig,
) -> Dataset:
    """Return the dataset of some files.

    Args:
        train: files of the training set, one or more.
        test: of the test set; none: a tenth of the training set becomes one, by the seed.
        source: what the user named.
        seed: of that split.
        input: how samples are read.

    Raises:
        DataError: a file is no whole Parquet file, or not of the kind of the others.
    """
    groups = open_groups(train, columns=input.columns_named)
    test_groups = open_groups(test, columns=input.columns_named) if test else None
    if not input.streams(lambda: _decoded_bytes(groups)):
        return _in_memory(groups, test_groups, source=source, seed=seed)
    names = _names(groups, test_groups)
    if test_groups is None:
        groups, test_groups = split_groups(groups, seed=seed, source=source)
    return streamed(groups, test_groups, names=names, source=source, input=input)


def _decoded_bytes(groups: ParquetGroups) -> int:
    """Return what the set takes in memory, going by the first picture or row."""
    if not has_pictures(groups.columns):
        return sum(groups.sizes) * row_bytes(groups.read_first())
    first = labelled_pictures(groups.read_first(), source=groups.name(0), allows_null=True)
    encoded, name = first["image"][0].as_py(), groups.name(0)
    if encoded is None:
        raise DataError(name, "row 0 holds no picture")
    picture = decode_one(encoded, 0, mode=mode_of(encoded, 0, source=name), source=name)
    return sum(groups.sizes) * picture.size


def _in_memory(
    groups: ParquetGroups, test: ParquetGroups | None, *, source: str, seed: int
) -> Dataset:
    if has_pictures(groups.columns):
        pictures = read_pictures(groups)
        if test is None:
            return split_off_test(pictures, seed=seed, source=source)
        return checked_pair(pictures, read_pictures(test), source=source)
    columns = arrays_of(groups.read_all(), source=groups.source)
    if test is not None:
        tested = TableSet(arrays_of(test.read_all(), source=test.source))
        return _checked(TableSet(columns), tested, source=source)
    num_rows = len(next(iter(columns.values())))
    tested_rows, trained_rows = _split(num_rows, seed=seed, what="rows", source=source)
    train, tested = (
        TableSet({name: a[rows] for name, a in columns.items()})
        for rows in (trained_rows, tested_rows)
    )
    return Dataset(train, tested, source)


def split_groups(groups: _Groups, *, seed: int, source: str) -> tuple[_Groups, _Groups]:
    """Return (training, test): a tenth of the row groups, chosen by the seed, is the test set.

    Raises:
        DataError: there is one row group alone.
    """
    test, train = _split(len(groups.sizes), seed=seed, what="row groups", source=source)
    return groups.some(train.tolist()), groups.some(test.tolist())


def _split(count: int, *, seed: int, what: str, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (a tenth, the others) of 0..count-1, rising."""
    if count < 2:
        raise DataError(
            source, f"has no test part and only {count} {what}: too few to split; name files "
            f"train-*.parquet and test-*.parquet"
        )  # fmt: skip
    order = np.random.default_rng(seed).permutation(count)
    num_test = max(1, count // _TEST_SHARE)
    return np.sort(order[:num_test]), np.sort(order[num_test:])


def _names(groups: ParquetGroups, test: ParquetGroups | None) -> tuple[str, ...]:
    """Return the names of the classes; without any as many numbers as both parts need.

    Raises:
        DataError: labels are no integers, or there are none.
    """
    if not has_pictures(groups.columns):
        return ()
    parts = [part for part in (groups, test) if part is not None]
    for part in parts:
        check_labels(part.schema, part.columns, part.source)
    names = class_names_of(groups.schema)
    if names:
        return tuple(names)
    return numbered(max(largest_label(part) for part in parts), groups.source)


def numbered(largest: int, source: str) -> tuple[str, ...]:
    """Return a number for each class, as its name.

    Args:
        largest: label; -1: there is none.
        source: for messages.

    Raises:
        DataError: there is no label of 0 or more.
    """
    if largest < 0:
        raise DataError(source, "holds no labels of 0 or more, so there are no classes to learn")
    return tuple(str(number) for number in range(largest + 1))


def streamed(
    train: RowGroups,
    test: RowGroups,
    *,
    names: tuple[str, ...],
    source: str,
    input: InputConfig,
) -> Dataset:
    """Return a dataset whose samples are read as they are needed.

    Args:
        train: row groups of the training set.
        test: row groups of the test set.
        names: of the classes, for pictures; none: a table.
        source: what the user named.
        input: how samples are read.

    Raises:
        DataError: the two parts are of different kinds.
    """

    def of(groups: RowGroups) -> Samples:
        if names:
            return StreamedPictures(groups, names, input)
        return StreamedTable(groups, shuffle_samples=input.shuffle_samples)

    return _checked(of(train), of(test), source=source)


def _checked(train: Samples, test: Samples, *, source: str) -> Dataset:
    if train.shape != test.shape:
        raise DataError(source, f"trains on {train.shape} but tests on {test.shape}")
    return Dataset(train, test, source)
