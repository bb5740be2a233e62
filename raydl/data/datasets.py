"""Opens data sets of all kinds.

``find_layout`` finds the kind and the files of a source without reading them; ``load`` reads them.
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
    check_labels,
    class_names_of,
    has_pictures,
    labelled_pictures,
    largest_label,
    open_groups,
    read_pictures,
)
from raydl.data.row_groups import FileGroups, RowGroups
from raydl.data.samples import Dataset, Samples
from raydl.data.saved_dataset import find_parts, open_saved
from raydl.data.streaming import StreamedPictures
from raydl.data.table import StreamedTable, TableSet, arrays_of, row_bytes
from raydl.data.text import TEXT_ENDINGS, load_text
from raydl.errors import DataError, UnknownNameError

_BUNDLED = ("digits", "synthetic")
WITH_GROUPS = ("parquet", "saved")
"""Kinds of sources whose files have row groups, so that they can be streamed."""
_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")


@dataclass(frozen=True)
class Layout:
    """The kind of a source, and the files or folders of its parts."""

    kind: str
    """parquet, saved (by ``datasets``), folders (one per class), idx, cifar, npz, text or
    synthetic."""
    name: str
    """Name of the source, for messages; path or URI of a text."""
    train: tuple[Place, ...] = ()
    """Files or folders of the training set: (pictures, labels) of IDX, one file of .npz."""
    test: tuple[Place, ...] = ()
    """Files or folders of the test set; empty if there is none, or if ``train`` holds both."""
    class_names: Place | None = None
    """File that may hold the class names, for cifar."""


def find_layout(source: str) -> Layout:
    """Return the layout of a source that ``raydl.data.load`` accepts.

    A folder of unknown kind counts as one of class folders, even if it holds none.

    Raises:
        DataError: if the source is missing, cannot be reached, lacks a part, or is an incomplete
            conversion.
        UnknownNameError: if a bare word is neither a path nor a bundled set.
    """
    if source == "digits":
        return _of_folder(files.find(str(Path(__file__).parent / "digits")))
    if source.split(":")[0] == "synthetic":
        return Layout("synthetic", source)
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        return Layout("text", source.removeprefix("text:"))
    if "*" in source:
        places = files.glob(source)
        if not places:
            raise DataError(source, "no file matches")
        return _parquet(places, source)
    place = files.find(source)
    if place.is_dir():
        return _of_folder(place)
    if not place.is_file():
        if re.fullmatch(r"[\w-]+", source):
            setting = "data names no file or folder, and the list of bundled data"
            raise UnknownNameError(setting, source, _BUNDLED)
        raise DataError(source, "there is no such file or folder")
    if place.path.endswith(".npz"):
        return Layout("npz", place.name, (place,))
    if place.path.endswith(".parquet"):
        return _parquet([place], place.name)
    raise DataError(
        place.name,
        "a single file must be .parquet or .npz, or for a text .txt, .md, .npy or text:PATH; "
        "otherwise give the folder",
    )


def _of_folder(folder: Place) -> Layout:
    for place in (folder, folder / "data"):
        parquet = place.children("*.parquet") if place.is_dir() else []
        if parquet:
            return _parquet(parquet, folder.name)
    if parts := find_parts(folder):
        return Layout("saved", folder.name, *parts)
    return _idx(folder) or _cifar(folder) or _class_folders(folder)


def _idx(folder: Place) -> Layout | None:
    for name in _IDX_NAMES:
        train, test = (_idx_pair(folder, name.format(part=part)) for part in ("train", "t10k"))
        if train and test:
            return Layout("idx", folder.name, train, test)
        if train:
            raise DataError(folder.name, "has IDX files for training (train-*) but no t10k-* files")
    return None


def _idx_pair(folder: Place, images_name: str) -> tuple[Place, ...]:
    """Return (pictures, labels), plain or .gz, or () if there are no such pictures."""
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


def _parquet(places: list[Place], name: str) -> Layout:
    """Assign files by name to training and test (or validation), or else all to training."""
    refuse_unfinished(places[0])
    of_part: dict[str, list[Place]] = {"train": [], "test": [], "validation": [], "": []}
    for place in places:
        match = re.match(r"(train|test|validation)(?![A-Za-z])", place.basename)
        of_part[match[1] if match else ""].append(place)
    train = tuple(of_part["train"] or of_part[""])
    test = tuple(of_part["test"] or of_part["validation"])
    # Files that all have names of a test set were given as the training set.
    return Layout("parquet", name, train, test) if train else Layout("parquet", name, tuple(places))


_Groups = TypeVar("_Groups", bound=RowGroups)
_TEST_SHARE = 10
"""One in this many rows or row groups is split off as test set."""


def open_parts(
    layout: Layout, *, columns: Sequence[str] = (), of_one_type: bool = True
) -> list[FileGroups]:
    """Return the row groups of the training set and, if the source has one, of the test set.

    Args:
        layout: a source of Parquet files, or one that ``datasets`` has saved.
        columns: columns to read; empty: all.
        of_one_type: whether a column must have the same type in all Parquet files.

    Raises:
        DataError: if a file is not whole, or differs in its columns from the others.
    """
    if layout.kind == "saved":
        return [open_saved(part, columns=columns) for part in (*layout.train, *layout.test)]
    parts = [part for part in (layout.train, layout.test) if part]
    return [open_groups(part, columns=columns, of_one_type=of_one_type) for part in parts]


def _load_groups(layout: Layout, *, seed: int, input: InputConfig) -> Dataset:
    """Return the dataset of some files with row groups.

    Without a test set a tenth of the training set is split off, by the seed.

    Raises:
        DataError: if a file is not whole, or differs in its columns from the others.
    """
    groups, *others = open_parts(layout, columns=input.columns_named)
    test_groups, source = others[0] if others else None, layout.name
    if not input.streams(lambda: _decoded_bytes(groups)):
        return _in_memory(groups, test_groups, source=source, seed=seed)
    names = _class_names(groups, test_groups)
    if test_groups is None:
        groups, test_groups = split_groups(groups, seed=seed, source=source)
    return streamed(groups, test_groups, names=names, source=source, input=input)


def _decoded_bytes(groups: FileGroups) -> int:
    """Return the decoded size of a set in bytes, estimated from its first picture or row."""
    if not has_pictures(groups.columns):
        return sum(groups.sizes) * row_bytes(groups.read_first())
    first = labelled_pictures(groups.read_first(), source=groups.name(0), allows_null=True)
    encoded, name = first["image"][0].as_py(), groups.name(0)
    if encoded is None:
        raise DataError(name, "row 0 holds no picture")
    picture = decode_one(encoded, 0, mode=mode_of(encoded, 0, source=name), source=name)
    return sum(groups.sizes) * picture.size


def _in_memory(groups: FileGroups, test: FileGroups | None, *, source: str, seed: int) -> Dataset:
    if has_pictures(groups.columns):
        pictures = read_pictures(groups)
        if test is None:
            return split_off_test(pictures, seed=seed, source=source)
        return checked_pair(pictures, read_pictures(test), source=source)
    columns = arrays_of(groups.read_all(), source=groups.source)
    if test is not None:
        test_set = TableSet(arrays_of(test.read_all(), source=test.source))
        return _checked(TableSet(columns), test_set, source=source)
    num_rows = len(next(iter(columns.values())))
    train_set, test_set = (
        TableSet({name: array[rows] for name, array in columns.items()})
        for rows in _split(num_rows, seed=seed, what="rows", source=source)
    )
    return Dataset(train_set, test_set, source)


def split_groups(groups: _Groups, *, seed: int, source: str) -> tuple[_Groups, _Groups]:
    """Return (training, test); the seed chooses a tenth of the row groups as test set.

    Raises:
        DataError: if there is only one row group.
    """
    train, test = _split(len(groups.sizes), seed=seed, what="row groups", source=source)
    return groups.select(train.tolist()), groups.select(test.tolist())


def _split(count: int, *, seed: int, what: str, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..count-1 at random into (nine tenths, one tenth), each ascending."""
    if count < 2:
        raise DataError(
            source, f"has no test part and only {count} {what}: too few to split; name files "
            f"train-*.parquet and test-*.parquet, or save splits train and test"
        )  # fmt: skip
    order = np.random.default_rng(seed).permutation(count)
    num_test = max(1, count // _TEST_SHARE)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def _class_names(groups: FileGroups, test: FileGroups | None) -> tuple[str, ...]:
    """Return the class names, or without any in the file, the numbers up to the largest label.

    Raises:
        DataError: if labels are no integers, or there are none.
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
    """Return the numbers 0..largest as class names.

    Args:
        largest: largest label; -1 without any.
        source: source, for messages.

    Raises:
        DataError: if there is no label of 0 or more.
    """
    if largest < 0:
        raise DataError(source, "must hold labels of 0 or more, got none: no classes to learn")
    return tuple(str(number) for number in range(largest + 1))


def streamed(
    train: RowGroups,
    test: RowGroups,
    *,
    names: tuple[str, ...],
    source: str,
    input: InputConfig,
) -> Dataset:
    """Return a streamed dataset.

    Args:
        train: row groups of the training set.
        test: row groups of the test set.
        names: class names of pictures; empty: a table.
        source: path, URI or name that the user gave.
        input: settings of the input.

    Raises:
        DataError: if the shapes of the two parts differ.
    """

    def samples_of(groups: RowGroups) -> Samples:
        if names:
            return StreamedPictures(groups, names, input)
        return StreamedTable(groups, shuffle_samples=input.shuffle_samples)

    return _checked(samples_of(train), samples_of(test), source=source)


def _checked(train: Samples, test: Samples, *, source: str) -> Dataset:
    if train.shape != test.shape:
        raise DataError(source, f"trains on {train.shape} but tests on {test.shape}")
    return Dataset(train, test, source)


_DEFAULTS = InputConfig()


def load(source: str, *, seed: int = 0, input: InputConfig = _DEFAULTS) -> Dataset:
    """Return the training set and the test set of a source, decoded or streamed.

    A source without a test part is split 90/10 by the seed.

    Args:
        source: ``digits``, ``synthetic``, ``synthetic:N[xCxHxW[xK]]``, or a path or URI of
            Parquet files (file, glob or folder), a folder of ``datasets.save_to_disk``, an IDX
            folder, CIFAR-10's binary folder, an .npz file, a folder of class folders, or a text
            (.txt, .md, .npy with tokens, or ``text:PATH`` for any other name).
        seed: seed of the split and of synthetic data.
        input: settings of the input.

    Raises:
        DataError: if the data are missing, empty, truncated, mislabelled or of unknown kind.
        UnknownNameError: if a bare word is neither a path nor a bundled set.
    """
    layout = find_layout(source)
    if layout.kind == "text":
        return load_text(layout.name, context=input.context)
    if layout.kind in WITH_GROUPS:
        return _load_groups(layout, seed=seed, input=input)
    return load_pictures(layout, seed=seed)


def load_pictures(layout: Layout, *, seed: int) -> Dataset:
    """Return a dataset of pictures that are not in Parquet, read as a whole.

    Raises:
        DataError: as in ``load``.
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
    """Return learnable pictures: one random prototype per class, plus noise."""
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
