"""LeNet in the form of Caffe's MNIST example: 431,080 parameters at 28x28, one channel."""

from __future__ import annotations

from torch import Tensor, nn

from raydl.errors import ShapeError

_SMALLEST_UNPADDED = 16
_SMALLEST = 4


class LeNet(nn.Module):
    """Caffe's LeNet: two 5x5 convolutions, 500 hidden units; 431,080 parameters at 28x28.

    Pictures below 16x16 leave nothing after two unpadded convolutions; there the
    convolutions pad by 2, so that only the pooling shrinks them.

    Args:
        image_shape: channels, height, width; sides of 4 or more.
        num_classes: logits per picture.

    Raises:
        ShapeError: the pictures are too small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < _SMALLEST:
            raise ShapeError(
                "lenet",
                f"needs pictures of {_SMALLEST}x{_SMALLEST} or more, got {height}x{width}",
            )
        padding = 0 if min(height, width) >= _SMALLEST_UNPADDED else 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 20, 5, padding=padding),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(20, 50, 5, padding=padding),
            nn.MaxPool2d(2, ceil_mode=True),
        )
        sides = [_after_features(side, padding) for side in (height, width)]
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(50 * sides[0] * sides[1], 500),
            nn.ReLU(),
            nn.Linear(500, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def _after_features(side: int, padding: int) -> int:
    for _ in range(2):
        side = side + 2 * padding - 4  # the 5x5 convolution
        side = -(-side // 2)  # the pooling, rounded up
    return side
