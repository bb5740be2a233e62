"""A multi-layer perceptron: the smallest classifier of images here, and the model for tables."""

from __future__ import annotations

import math

from torch import Tensor, nn


class MLP(nn.Module):
    """Two hidden layers of 256 units with ReLU; 269,322 parameters at 28x28.

    Args:
        input_shape: (channels, height, width), or (numbers of a row,).
        num_classes: logits per sample, or 1 for a number to predict.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, num_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W] or rows [B, n]."""
        logits: Tensor = self.layers(inputs)
        return logits
