"""Batches of normalised pictures from shared uint8 memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raydl.data.images import ImageSet, channel_statistics


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

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 pictures, shape [B, C, H, W], from uint8 ones."""
        return images.to(torch.float32).mul_(self._scale).add_(self._shift)


class Batches:
    """Any rows of a set as a batch.

    Args:
        images: the set; its arrays may be read-only and shared.
        normalizer: made from the training set.
    """

    def __init__(self, images: ImageSet, normalizer: Normalizer) -> None:
        self._images = images
        self._normalizer = normalizer

    @property
    def num_samples(self) -> int:
        """Pictures in the set."""
        return self._images.num_samples

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (float32 [B, C, H, W], int64 [B]) for these rows; B may be 0.

        Args:
            rows: int64, shape [B].
        """
        # Fancy indexing copies just these rows, so torch never sees read-only memory.
        images = torch.from_numpy(self._images.images[rows])
        return self._normalizer(images), torch.from_numpy(self._images.labels[rows])
