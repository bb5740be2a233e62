"""Which reader serves what the user named: the one entry to all data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.binary import read_cifar, read_idx, read_npz
from raydl.data.files import Place
from raydl.data.from_parquet import load_parquet
from raydl.data.images import ImageSet, checked_pair, checked_set, split_off_test
from raydl.data.pictures import decode_all
from raydl.data.samples import Dataset
from raydl.data.text import TEXT_ENDINGS, load_text
from raydl.data.whole import refuse_unfinished
from raydl.errors import DataError, UnknownNameError

_AS_USUAL = InputConfig()
_BUNDLED = ("digits", "synthetic")
_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")
_LAYOUTS = "train-*.parquet, IDX files, data_batch_*.bin, or folders of pictures named by class"


def load(source: str, *, seed: int = 0, input: InputConfig = _AS_USUAL) -> Dataset:
    """Return the training set and the test set that ``source`` names, decoded.

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
    if source == "digits":
        return load(str(Path(__file__).parent / "digits"))
    if source.split(":")[0] == "synthetic":
        return _synthetic(source, seed=seed)
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        return load_text(source.removeprefix("text:"), context=input.context)
    if "*" in source:
        found = files.glob(source)
        if not found:
            raise DataError(source, "no file matches")
        refuse_unfinished(found[0])
        return _from_parquet_files(found, source=source, seed=seed, input=input)
    place = files.find(source)
    if place.is_dir():
        return _from_folder(place, seed=seed, input=input)
    if not place.is_file():
        if re.fullmatch(r"[\w-]+", source):
            raise UnknownNameError("data", source, _BUNDLED)
        raise DataError(source, "there is no such file or folder")
    if place.path.endswith(".npz"):
        return read_npz(place, seed=seed)
    if place.path.endswith(".parquet"):
        return _from_parquet_files([place], source=source, seed=seed, input=input)
    raise DataError(
        source,
        "a single file must be .parquet or .npz, or for a text .txt, .md, .npy or text:PATH; name "
        "the folder otherwise",
    )


def _from_folder(folder: Place, *, seed: int, input: InputConfig) -> Dataset:
    for place in (folder, folder / "data"):
        parquet = place.children("*.parquet") if place.is_dir() else []
        if parquet:
            refuse_unfinished(parquet[0])
            return _from_parquet_files(parquet, source=folder.name, seed=seed, input=input)
    for images_name in _IDX_NAMES:
        pairs = [_idx_pair(folder, images_name, part) for part in ("train", "t10k")]
        if pairs[0]:
            train, test = (_required(pair, folder) for pair in pairs)
            return checked_pair(read_idx(*train), read_idx(*test), source=folder.name)
    if folder.children("data_batch_*.bin"):
        return _from_cifar(folder)
    return _from_class_folders(folder, seed=seed)


def _from_parquet_files(
    found: list[Place], *, source: str, seed: int, input: InputConfig
) -> Dataset:
    train, test = parquet_parts(found)
    return load_parquet(train, test, source=source, seed=seed, input=input)


def parquet_parts(found: list[Place]) -> tuple[list[Place], list[Place]]:
    """Return (training, test) files by their names: train, test (or validation); test may be []."""
    parts = {
        part: [f for f in found if re.match(rf"{part}\b", f.basename)]
        for part in ("train", "test", "validation")
    }
    test = parts["test"] or parts["validation"]
    if not (parts["train"] and test):
        parts["train"], test = parts["train"] or found, []
    return parts["train"], test


def _idx_pair(folder: Place, images_name: str, part: str) -> tuple[Place, Place] | None:
    name = images_name.format(part=part)
    for ending in ("", ".gz"):
        images = folder / (name + ending)
        labels = folder / (name.replace("images", "labels").replace("idx3", "idx1") + ending)
        if images.is_file():
            if not labels.is_file():
                raise DataError(labels.name, "is missing beside its pictures")
            return images, labels
    return None


def _required(pair: tuple[Place, Place] | None, folder: Place) -> tuple[Place, Place]:
    if pair is None:
        raise DataError(folder.name, "has IDX files for training (train-*) but none for t10k-*")
    return pair


def _from_cifar(folder: Place) -> Dataset:
    names = folder / "batches.meta.txt"
    test = folder / "test_batch.bin"
    if not test.is_file():
        raise DataError(test.name, "is missing beside the training batches")
    train = read_cifar(folder.children("data_batch_*.bin"), names)
    return checked_pair(train, read_cifar([test], names), source=folder.name)


def _from_class_folders(folder: Place, *, seed: int) -> Dataset:
    train, test = folder / "train", folder / "test"
    if train.is_dir() and test.is_dir():
        return checked_pair(_class_folders(train), _class_folders(test), source=folder.name)
    images = _class_folders(train if train.is_dir() else folder)
    return split_off_test(images, seed=seed, source=folder.name)


def _class_folders(folder: Place) -> ImageSet:
    pictures, labels, names = labelled_files(folder)
    images = decode_all(
        (picture.read() for picture in pictures), count=len(pictures), source=folder.name
    )
    return checked_set(images, labels, source=folder.name, class_names=names)


def labelled_files(folder: Place) -> tuple[list[Place], np.ndarray, list[str]]:
    """Return FOLDER/CLASS/*.png and the like, their labels, and the classes, numbered by name.

    Raises:
        DataError: there are none.
    """
    classes = [child for child in folder.children() if child.is_dir()]
    pictures = [
        (picture, number)
        for number, child in enumerate(classes)
        for picture in child.children()
        if picture.basename.lower().endswith(_PICTURE_ENDINGS)
    ]
    if not pictures:
        raise DataError(folder.name, f"holds nothing that is known here: {_LAYOUTS}")
    labels = np.array([number for _, number in pictures])
    return [picture for picture, _ in pictures], labels, [child.basename for child in classes]


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
