"""A labelled set of pictures in memory, and what can be wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data.samples import Batch, Dataset, DataShape, InMemory
from raydl.errors import DataError

_CHUNK = 4096


@dataclass(frozen=True)
class ImageSet(InMemory):
    """Pictures and their classes.

    Attributes:
        images: uint8, shape [N, C, H, W]. May be read-only memory shared by processes.
        labels: int64, shape [N], each in 0..num_classes-1.
        class_names: one name per class.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """Pictures in the set."""
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Classes, whether or not each has a picture."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def shape(self) -> DataShape:
        """What a model is built for."""
        return DataShape(self.image_shape, self.num_classes, self.class_names)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 pictures [B, C, H, W], int64 labels [B]) of these rows."""
        # Fancy indexing copies just these rows, so torch never sees read-only memory.
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


def checked_set(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    source: str,
    class_names: Sequence[str] | None = None,
) -> ImageSet:
    """Return an image set, or say what is wrong with it.

    Args:
        images: uint8, shape [N, C, H, W].
        labels: integers, shape [N].
        source: the file or folder, for messages.
        class_names: names of the classes; None: as many as the largest label needs.

    Raises:
        DataError: no pictures, as many labels as not, or a label out of range.
    """
    if len(images) == 0:
        raise DataError(source, "holds no pictures")
    if len(images) != len(labels):
        raise DataError(source, f"has {len(images)} pictures but {len(labels)} labels")
    names = tuple(class_names or ()) or tuple(str(k) for k in range(int(labels.max()) + 1))
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            source,
            f"row {row} has label {int(labels[row])}; labels must be 0 to {len(names) - 1} "
            f"({len(names)} classes)",
        )
    return ImageSet(images, labels.astype(np.int64), names)


def checked_pair(train: ImageSet, test: ImageSet, *, source: str) -> Dataset:
    """Return both sets as one dataset.

    Raises:
        DataError: the two do not agree in picture size or classes.
    """
    if train.image_shape != test.image_shape:
        raise DataError(
            source,
            f"training pictures are {_size(train)} (channels x height x width) but test "
            f"pictures are {_size(test)}",
        )
    names = max(train.class_names, test.class_names, key=len)
    for part in (train, test):
        if part.class_names != names[: part.num_classes]:
            raise DataError(source, "the training set and the test set name different classes")
    return Dataset(
        ImageSet(train.images, train.labels, names),
        ImageSet(test.images, test.labels, names),
        source,
    )


def split_off_test(images: ImageSet, *, seed: int, source: str) -> Dataset:
    """Return a seeded 90/10 split of a set that comes without a test part.

    Raises:
        DataError: fewer than 10 pictures.
    """
    if images.num_samples < 10:
        raise DataError(
            source, f"has no test part and only {images.num_samples} pictures: too few to split"
        )
    order = np.random.default_rng(seed).permutation(images.num_samples)
    num_test = images.num_samples // 10
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    return Dataset(
        ImageSet(images.images[train], images.labels[train], images.class_names),
        ImageSet(images.images[test], images.labels[test], images.class_names),
        source,
    )


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, standard deviation) per channel on the scale 0..1, float32, shape [C].

    A channel of one constant value gets the deviation 1. The set is read in chunks; no
    floating-point copy of the whole is made.

    Args:
        images: uint8, shape [N, C, H, W].
    """
    num_channels = images.shape[1]
    counts = np.zeros((num_channels, 256), np.int64)
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        for channel in range(num_channels):
            counts[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255.0
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ values
    variance = share @ values**2 - mean**2
    std = np.sqrt(np.maximum(variance, 0.0))
    std[std < 1e-6] = 1.0
    return mean.astype(np.float32), std.astype(np.float32)


def _size(images: ImageSet) -> str:
    return "x".join(str(side) for side in images.image_shape)
