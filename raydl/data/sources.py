"""The readers of all kinds of data behind one entry."""

from __future__ import annotations

import re

import numpy as np

from raydl.config import InputConfig
from raydl.data.binary import read_cifar, read_idx, read_npz
from raydl.data.class_folders import read_class_folders
from raydl.data.from_parquet import load_parquet
from raydl.data.images import ImageSet, checked_pair, checked_set, split_off_test
from raydl.data.layout import Layout, find_layout
from raydl.data.samples import Dataset
from raydl.data.text import load_text
from raydl.errors import DataError

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
        DataError: as :func:`load`.
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
