"""Batches of any rows of a set, made ready for a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raydl.config import TrainConfig
from raydl.data.augment import Augment
from raydl.data.images import ImageSet, channel_statistics
from raydl.data.samples import Batch, Dataset, Prepare, Samples, as_they_are
from raydl.data.streamed import StreamedPictures
from raydl.errors import ConfigError


class Normalizer:
    """Maps uint8 pictures to float32 with mean 0 and deviation 1 per channel.

    Args:
        mean: on the scale 0..1, shape [C].
        std: on the scale 0..1, shape [C].
    """

    def __init__(self, mean: np.ndarray, std: np.ndarray) -> None:
        # (v/255 - mean)/std as one multiply and one add.
        self._scale = torch.tensor(1.0 / (255.0 * std), dtype=torch.float32).view(-1, 1, 1)
        self._shift = torch.tensor(-mean / std, dtype=torch.float32).view(-1, 1, 1)

    @classmethod
    def of(cls, images: ImageSet) -> Normalizer:
        """Return the normalizer with the statistics of this (training) set."""
        return cls(*channel_statistics(images.images))

    def normalized(self, pictures: Tensor) -> Tensor:
        """Return float32 pictures, shape [B, C, H, W], from uint8 ones."""
        device = pictures.device
        if self._scale.device != device:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        return pictures.to(torch.float32).mul_(self._scale).add_(self._shift)

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the batch with its pictures, which come first, normalised."""
        pictures, *others = batch
        return self.normalized(pictures), *others


def preparation_for(dataset: Dataset, config: TrainConfig) -> Prepare:
    """Return what makes a dataset's samples ready for a model.

    Pictures are normalised, and for training changed as ``input.augment`` says.

    Raises:
        ConfigError: ``input.augment`` is set for what are no pictures.
    """
    names, normalizer = config.input.augmentations, _normalizer_for(dataset.train)
    if not names:
        return normalizer or as_they_are
    if normalizer is None:
        raise ConfigError(
            "input.augment",
            f"changes pictures, got {config.input.augment} for {dataset.train.shape}; "
            f"set it to none",
        )
    return Augment(normalizer, names, seed=config.training.seed)


def _normalizer_for(samples: Samples) -> Normalizer | None:
    """Return the normalizer with the statistics of a set; None if it holds no pictures."""
    if isinstance(samples, ImageSet):
        return Normalizer.of(samples)
    if isinstance(samples, StreamedPictures):
        pictures, _ = samples.fetch_readable(samples.rows_across())[0]
        return Normalizer(*channel_statistics(pictures.numpy()))
    return None


class Batches:
    """Any rows of a set as a batch.

    Args:
        samples: the set; its arrays may be read-only and shared.
        prepare: makes a batch ready for a model.
    """

    def __init__(self, samples: Samples, prepare: Prepare) -> None:
        self.samples = samples
        self.prepare = prepare

    @property
    def num_samples(self) -> int:
        """Samples in the set."""
        return self.samples.num_samples

    def batch(self, rows: np.ndarray) -> Batch:
        """Return these rows as they are scored, on the CPU.

        Args:
            rows: int64, shape [B]; B may be 0.
        """
        return self.prepare(self.samples.fetch(rows), rows, None)
