"""Augmentation of training images: a whole batch at once, on the device of the batch.

    flip     horizontal flip, with probability 1/2      He et al. 2016, section 4.2
    crop     shift by up to an eighth of the side       He et al. 2016, section 4.2: 4 of 32 pixels
    cutout   remove a square of half the side           DeVries and Taylor 2017: 16 of 32 pixels

The augmentation of a sample depends on seed, epoch and row (``counter_rng.py``), not on the number
of workers or on its batch. Pixels that are shifted in or cut out are 0, the mean of the training
set, since the images are normalized before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raydl.data.counter_rng import uniform
from raydl.data.samples import Batch, Prepare

Draw = Callable[[int], Tensor]
"""Returns a number in [0, 1) for each image of the batch, by the index of the draw."""

# A resumed run must draw the same numbers: never change these indexes, only append new ones.
_FLIP, _TOP, _LEFT, _ROW, _COLUMN = range(5)


def flip(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Flip some images horizontally, shape [B, C, H, W].

    Args:
        images: shape [B, C, H, W].
        is_flipped: bool, shape [B].
    """
    return torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(3), images)


def crop(images: Tensor, top: Tensor, left: Tensor, *, pad: tuple[int, int]) -> Tensor:
    """Pad each image with zeros and return one window of it, shape [B, C, H, W].

    Args:
        images: shape [B, C, H, W].
        top: first row of the window, int64 in 0..2 * pad[0], shape [B]; pad[0] is the center.
        left: first column of the window, int64 in 0..2 * pad[1], shape [B].
        pad: padding in pixels: (above and below, left and right).
    """
    _, _, height, width = images.shape
    padded = functional.pad(images, (pad[1], pad[1], pad[0], pad[0]))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, top, left, H, W]
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def cutout(images: Tensor, row: Tensor, column: Tensor, *, side: int) -> Tensor:
    """Set a square of each image to zero, shape [B, C, H, W].

    Args:
        images: finite, shape [B, C, H, W].
        row: row of the center of the square, int64, shape [B]; the square may cross the edge.
        column: column of the center of the square, int64, shape [B].
        side: side of the square, in pixels.
    """
    _, _, height, width = images.shape
    is_row = _within(row - side // 2, side, height)
    is_column = _within(column - side // 2, side, width)
    is_cut = is_row[:, None, :, None] & is_column[:, None, None, :]
    # masked_fill takes five times as long with a mask that is broadcast over the channels.
    return images * ~is_cut


def _within(start: Tensor, length: int, size: int) -> Tensor:
    """Return whether each of ``size`` pixels is in start..start+length-1, bool, shape [B, size]."""
    distance = torch.arange(size, device=start.device) - start[:, None]
    return (distance >= 0) & (distance < length)


def _random_flip(images: Tensor, draw: Draw) -> Tensor:
    return flip(images, draw(_FLIP) < 0.5)


def _random_crop(images: Tensor, draw: Draw) -> Tensor:
    _, _, height, width = images.shape
    pad = max(height // 8, 1), max(width // 8, 1)
    top, left = _below(2 * pad[0] + 1, draw(_TOP)), _below(2 * pad[1] + 1, draw(_LEFT))
    return crop(images, top, left, pad=pad)


def _random_cutout(images: Tensor, draw: Draw) -> Tensor:
    _, _, height, width = images.shape
    row, column = _below(height, draw(_ROW)), _below(width, draw(_COLUMN))
    return cutout(images, row, column, side=min(height, width) // 2)


def _below(limit: int, numbers: Tensor) -> Tensor:
    """Return integers in 0..limit-1 from numbers in [0, 1)."""
    return (numbers * limit).to(torch.int64)


_AUGMENTATIONS = {"flip": _random_flip, "crop": _random_crop, "cutout": _random_cutout}
"""Augmentations in the order of their application, whatever the order in the setting."""


class Augment:
    """Prepares images, and augments them for training.

    Each augmentation has its own draws: adding another one does not change its results.

    Args:
        prepare: normalizes the images, the first tensor of a batch.
        names: names in ``raydl.config.input.AUGMENTATIONS``.
        seed: seed of the run.
    """

    def __init__(self, prepare: Prepare, names: Sequence[str], *, seed: int) -> None:
        self.prepare = prepare
        self._names = tuple(names)
        self._seed = seed

    def changed(self, images: Tensor, rows: np.ndarray, epoch: int) -> Tensor:
        """Return augmented images, with the same shape and device.

        Args:
            images: normalized, shape [B, C, H, W].
            rows: row numbers of the samples, int64, shape [B].
            epoch: pass over the data.
        """
        samples = torch.tensor(rows, dtype=torch.int64, device=images.device)
        draw = partial(uniform, self._seed, epoch, samples)
        for name, augmentation in _AUGMENTATIONS.items():
            if name in self._names:
                images = augmentation(images, draw)
        return images

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the prepared batch, its images augmented unless the epoch is None."""
        batch = self.prepare(batch, rows, epoch)
        if epoch is None:
            return batch
        images, *others = batch
        return self.changed(images, rows, epoch), *others
