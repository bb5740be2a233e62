"""Random changes of training pictures, a whole batch at once, on the device that holds it.

    flip     left for right, every other picture       He et al. 2016, section 4.2
    crop     moved by up to an eighth of the side      He et al. 2016, section 4.2: 4 of 32 pixels
    cutout   without a square of half the side         DeVries and Taylor 2017: 16 of 32 pixels

What a sample becomes follows from seed, epoch and row (``counter_rng.py``), so neither the number
of workers nor the batch that it falls into changes it. What is moved in from outside and what is
cut out is 0: pictures come here normalised, so that is the mean of the training set.
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
"""Returns a number in [0, 1) for each picture of the batch, by the number of the draw."""

# A run that is resumed draws as it did: these stay as they are, and new ones follow.
_FLIP, _TOP, _LEFT, _ROW, _COLUMN = range(5)


def flip(pictures: Tensor, is_flipped: Tensor) -> Tensor:
    """Return pictures some of which have left and right exchanged, shape [B, C, H, W].

    Args:
        pictures: shape [B, C, H, W].
        is_flipped: bool, shape [B].
    """
    return torch.where(is_flipped.view(-1, 1, 1, 1), pictures.flip(3), pictures)


def crop(pictures: Tensor, top: Tensor, left: Tensor, *, pad: tuple[int, int]) -> Tensor:
    """Return one window out of each picture with a margin of zeros, shape [B, C, H, W].

    Args:
        pictures: shape [B, C, H, W].
        top: where the window begins, int64 in 0..2 * pad[0], shape [B]; pad[0] is the middle.
        left: the same for the columns, in 0..2 * pad[1].
        pad: the margin, in pixels: (above and below, left and right).
    """
    _, _, height, width = pictures.shape
    padded = functional.pad(pictures, (pad[1], pad[1], pad[0], pad[0]))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, top, left, H, W]
    return windows[torch.arange(len(pictures), device=pictures.device), :, top, left]


def cutout(pictures: Tensor, row: Tensor, column: Tensor, *, side: int) -> Tensor:
    """Return pictures with zeros in a square, shape [B, C, H, W].

    Args:
        pictures: finite, shape [B, C, H, W].
        row: of the middle of the square, int64, shape [B]; it may reach over the edge.
        column: the same for the columns.
        side: of the square, in pixels.
    """
    _, _, height, width = pictures.shape
    is_row = _within(row - side // 2, side, height)
    is_column = _within(column - side // 2, side, width)
    is_cut = is_row[:, None, :, None] & is_column[:, None, None, :]
    # masked_fill takes five times as long where the mask is spread over the channels.
    return pictures * ~is_cut


def _within(start: Tensor, length: int, size: int) -> Tensor:
    """Return which of ``size`` pixels are at start..start+length-1, bool, shape [B, size]."""
    distance = torch.arange(size, device=start.device) - start[:, None]
    return (distance >= 0) & (distance < length)


def _flip_by_chance(pictures: Tensor, draw: Draw) -> Tensor:
    return flip(pictures, draw(_FLIP) < 0.5)


def _crop_by_chance(pictures: Tensor, draw: Draw) -> Tensor:
    _, _, height, width = pictures.shape
    pad = max(height // 8, 1), max(width // 8, 1)
    top, left = _below(2 * pad[0] + 1, draw(_TOP)), _below(2 * pad[1] + 1, draw(_LEFT))
    return crop(pictures, top, left, pad=pad)


def _cutout_by_chance(pictures: Tensor, draw: Draw) -> Tensor:
    _, _, height, width = pictures.shape
    row, column = _below(height, draw(_ROW)), _below(width, draw(_COLUMN))
    return cutout(pictures, row, column, side=min(height, width) // 2)


def _below(limit: int, chances: Tensor) -> Tensor:
    """Return whole numbers in 0..limit-1 from numbers in [0, 1)."""
    return (chances * limit).to(torch.int64)


_CHANGES = {"flip": _flip_by_chance, "crop": _crop_by_chance, "cutout": _cutout_by_chance}
"""In the order in which they are made, whichever order they are named in."""


class Augment:
    """Prepares pictures, and changes at random those that are trained on.

    Each change draws for itself: with another one added it does what it did.

    Args:
        prepare: makes normalised pictures of what was fetched; they come first in its batch.
        names: the changes, out of ``raydl.config.input.AUGMENTATIONS``.
        seed: of the run.
    """

    def __init__(self, prepare: Prepare, names: Sequence[str], *, seed: int) -> None:
        self._prepare = prepare
        self._names = tuple(names)
        self._seed = seed

    def changed(self, pictures: Tensor, rows: np.ndarray, epoch: int) -> Tensor:
        """Return the samples as changed in an epoch, with shape and device of the pictures.

        Args:
            pictures: normalised, shape [B, C, H, W].
            rows: the samples, int64, shape [B].
            epoch: the pass over the data.
        """
        samples = torch.tensor(rows, dtype=torch.int64, device=pictures.device)
        draw = partial(uniform, self._seed, epoch, samples)
        for name, change in _CHANGES.items():
            if name in self._names:
                pictures = change(pictures, draw)
        return pictures

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the batch prepared, its pictures changed unless they are scored."""
        batch = self._prepare(batch, rows, epoch)
        if epoch is None:
            return batch
        pictures, *others = batch
        return self.changed(pictures, rows, epoch), *others
