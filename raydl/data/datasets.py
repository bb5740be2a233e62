"""Opens data of any kind by the name of its source.

``find_layout`` alone tells the kind of a source, without reading it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.atomic_folder import refuse_unfinished
from raydl.data.binary import read_cifar, read_idx, read_npz
from raydl.data.files import Place
from raydl.data.images import (
    ImageSet,
    checked_pair,
    checked_set,
    decode_one,
    mode_of,
    read_class_folders,
    split_off_test,
)
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
from raydl.data.row_groups import RowGroups
from raydl.data.samples import Dataset, Samples
from raydl.data.streaming import StreamedPictures
from raydl.data.table import StreamedTable, TableSet, arrays_of, row_bytes
from raydl.data.text import TEXT_ENDINGS, load_text
from raydl.errors import DataError, UnknownNameError

_BUNDLED = ("digits", "synthetic")
_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")


@dataclass(frozen=True)
class Layout:
    """The kind of a source, and the files or folders that make its parts."""

    kind: str
    """parquet, folders (one per class), idx, cifar, npz, text or synthetic."""
    name: str
    """Of the source, for messages; of a text its path or URI."""
    train: tuple[Place, ...] = ()
    """Of the training set, IDX pictures before their labels; of an .npz file, the file."""
    test: tuple[Place, ...] = ()
    """Of the test set; none: the source has none, or both lie in one place."""
    class_names: Place | None = None
    """The file that may name the classes, of cifar."""


def find_layout(source: str) -> Layout:
    """Return the data set behind a name that ``raydl.data.load`` takes.

    A folder of which nothing is known is one of class folders; there may be none in it.

    Raises:
        DataError: nothing is there, it can not be reached, a part of it is missing, or it is a
            conversion that was cut off.
        UnknownNameError: a bare word that is neither a path nor a bundled set.
    """
    if source == "digits":
        return _of_folder(files.find(str(Path(__file__).parent / "digits")))
    if source.split(":")[0] == "synthetic":
        return Layout("synthetic", source)
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        return Layout("text", source.removeprefix("text:"))
    if "*" in source:
        found = files.glob(source)
        if not found:
            raise DataError(source, "no file matches")
        return _parquet(found, source)
    place = files.find(source)
    if place.is_dir():
        return _of_folder(place)
    if not place.is_file():
        if re.fullmatch(r"[\w-]+", source):
            setting = "data: no such file or folder is there, and the bundled data"
            raise UnknownNameError(setting, source, _BUNDLED)
        raise DataError(source, "there is no such file or folder")
    return _of_file(place)


def _of_file(file: Place) -> Layout:
    if file.path.endswith(".npz"):
        return Layout("npz", file.name, (file,))
    if file.path.endswith(".parquet"):
        return _parquet([file], file.name)
    raise DataError(
        file.name,
        "a single file must be .parquet or .npz, or for a text .txt, .md, .npy or text:PATH; name "
        "the folder otherwise",
    )


def _of_folder(folder: Place) -> Layout:
    for place in (folder, folder / "data"):
        parquet = place.children("*.parquet") if place.is_dir() else []
        if parquet:
            return _parquet(parquet, folder.name)
    return _idx(folder) or _cifar(folder) or _class_folders(folder)


def _idx(folder: Place) -> Layout | None:
    for name in _IDX_NAMES:
        train, test = (_idx_pair(folder, name.format(part=part)) for part in ("train", "t10k"))
        if train and test:
            return Layout("idx", folder.name, train, test)
        if train:
            raise DataError(folder.name, "has IDX files for training (train-*) but none for t10k-*")
    return None


def _idx_pair(folder: Place, images_name: str) -> tuple[Place, ...]:
    """Return (pictures, labels), plain or packed, or nothing if no such pictures are there."""
    for ending in ("", ".gz"):
        images = folder / (images_name + ending)
        if images.is_file():
            labels_name = images_name.replace("images", "labels").replace("idx3", "idx1")
            labels = folder / (labels_name + ending)
            if not labels.is_file():
                raise DataError(labels.name, "is missing beside its pictures")
            return images, labels
    return ()


def _cifar(folder: Place) -> Layout | None:
    batches, test = folder.children("data_batch_*.bin"), folder / "test_batch.bin"
    if not batches:
        return None
    if not test.is_file():
        raise DataError(test.name, "is missing beside the training batches")
    names = folder / "batches.meta.txt"
    return Layout("cifar", folder.name, tuple(batches), (test,), names)


def _class_folders(folder: Place) -> Layout:
    train, test = folder / "train", folder / "test"
    if not train.is_dir():
        return Layout("folders", folder.name, (folder,))
    return Layout("folders", folder.name, (train,), (test,) if test.is_dir() else ())


def _parquet(found: list[Place], name: str) -> Layout:
    """Sort files by their names: train, test (or validation); else all are for training."""
    refuse_unfinished(found[0])
    train, test, validation = (
        tuple(file for file in found if re.match(rf"{part}\b", file.basename))
        for part in ("train", "test", "validation")
    )
    tested = test or validation
    if train and tested:
        return Layout("parquet", name, train, tested)
    return Layout("parquet", name, train or tuple(found))


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
    """Return the size of the set in memory, estimated from the first picture or row."""
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


_AS_USUAL = InputConfig()


def load(source: str, *, seed: int = 0, input: InputConfig = _AS_USUAL) -> Dataset:
    """Return the training set and the test set that ``source`` names, decoded or streamed.

    A source without a test part is split 90/10 by the seed.

    Args:
        source: ``digits``, ``synthetic``, ``synthetic:N[xCxHxW[xK]]``, or a path or URI of a
            Parquet image set (file, glob or folder), an IDX folder, CIFAR-10's binary
            folder, an .npz file, or a folder of class folders; of a text: .txt, .md, .npy
            with tokens, or ``text:PATH`` for any other name.
        seed: of the split, and of synthetic data.
        input: how samples are read.

    Raises:
        DataError: missing, empty, truncated, mislabelled or unrecognised input.
        UnknownNameError: a bare word that is neither a path nor a bundled set.
    """
    layout = find_layout(source)
    if layout.kind == "text":
        return load_text(layout.name, context=input.context)
    if layout.kind == "parquet":
        return load_parquet(layout.train, layout.test, source=layout.name, seed=seed, input=input)
    return load_pictures(layout, seed=seed)


def load_pictures(layout: Layout, *, seed: int) -> Dataset:
    """Return a dataset of pictures that lie in no Parquet; they are read as a whole.

    Raises:
        DataError: as ``load``.
    """
    if layout.kind == "synthetic":
        return _synthetic(layout.name, seed=seed)
    if layout.kind == "npz":
        return read_npz(layout.train[0], seed=seed)
    if layout.kind == "idx":
        train, test = (read_idx(*pair) for pair in (layout.train, layout.test))
    elif layout.kind == "cifar":
        train, test = (read_cifar(part, layout.class_names) for part in (layout.train, layout.test))
    else:
        train = read_class_folders(layout.train[0])
        if not layout.test:
            return split_off_test(train, seed=seed, source=layout.name)
        test = read_class_folders(layout.test[0])
    return checked_pair(train, test, source=layout.name)


def _synthetic(source: str, *, seed: int) -> Dataset:
    """Make pictures that can be learned: one random prototype per class, and noise."""
    match = re.fullmatch(r"synthetic(?::(\d+)(?:x(\d+)x(\d+)x(\d+)(?:x(\d+))?)?)?", source)
    numbers = [int(g) if g else None for g in match.groups()] if match else [0]
    if 0 in numbers:
        raise DataError(source, "must be written synthetic or synthetic:N[xCxHxW[xCLASSES]]")
    defaults = (2048, 1, 28, 28, 10)
    count, channels, height, width, num_classes = (
        d if n is None else n for n, d in zip(numbers, defaults, strict=True)
    )
    random = np.random.default_rng(seed)
    prototypes = random.integers(0, 256, (num_classes, channels, height, width))

    def part(size: int) -> ImageSet:
        labels = random.integers(0, num_classes, size)
        images = np.empty((size, channels, height, width), np.uint8)
        for row, label in enumerate(labels):
            noise = random.normal(0, 64, prototypes.shape[1:])
            images[row] = np.clip(prototypes[label] + noise, 0, 255)
        names = [str(k) for k in range(num_classes)]
        return checked_set(images, labels, source=source, class_names=names)

    return Dataset(part(count), part(max(1, count // 4)), source)
