"""A multi-layer perceptron: the smallest picture classifier here."""

from __future__ import annotations

import math

from torch import Tensor, nn


class MLP(nn.Module):
    """Two hidden layers of 256 units with ReLU; 269,322 parameters at 28x28.

    Args:
        image_shape: channels, height, width.
        num_classes: logits per picture.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(image_shape), 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.layers(images)
        return logits
