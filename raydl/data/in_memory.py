"""Sets in memory: labelled images with their mean and deviation, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data.order import Shuffled
from raydl.data.samples import Batch, DataShape, Samples

_CHUNK = 4096


class InMemory:
    """Base class of sets that are wholly in memory."""

    is_streamed = False

    def order(self: Samples, seed: int) -> Shuffled:
        """Return the order of the samples in each epoch."""
        return Shuffled(self.num_samples, seed)

    def prefetch(self, rows: np.ndarray) -> None:
        """Do nothing: all samples are in memory."""


@dataclass(frozen=True)
class ImageSet(InMemory):
    """Images and their classes.

    Attributes:
        images: uint8, shape [N, C, H, W]; may be read-only memory that processes share.
        labels: int64, shape [N], each in 0..num_classes-1.
        class_names: one name per class.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """Images in the set."""
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes, whether or not each has an image."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(Channels, height, width)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def shape(self) -> DataShape:
        """The shape to build a model for."""
        return DataShape(self.image_shape, self.num_classes, self.class_names)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 images [B, C, H, W], int64 labels [B]) of these rows."""
        # Fancy indexing copies these rows, so torch never gets read-only memory.
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


@dataclass(frozen=True)
class TableSet(InMemory):
    """A table in memory.

    Attributes:
        columns: arrays by name, float32, int64 or bool, shape [N, ...].
        target: column to predict, or "".
        class_names: names of its classes, or () if it is a number.
    """

    columns: Mapping[str, np.ndarray]
    target: str = ""
    class_names: tuple[str, ...] = ()

    @property
    def labels(self) -> np.ndarray | None:
        """The class of each row, int64, shape [N]; None if there is no column of classes."""
        return self.columns[self.target] if self.target and self.class_names else None

    @property
    def num_samples(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    @property
    def shape(self) -> DataShape:
        """The shape of each column, to build a model for."""
        columns = {name: array.shape[1:] for name, array in self.columns.items()}
        return DataShape(
            (), len(self.class_names), self.class_names, columns=columns, target=self.target
        )

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return ``{column: tensor}`` of these rows."""
        return {name: torch.from_numpy(array[rows]) for name, array in self.columns.items()}


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, standard deviation) per channel on the scale 0..1, float32, shape [C].

    A constant channel gets the standard deviation 1. The set is read in chunks, without a
    floating-point copy of the whole.

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
