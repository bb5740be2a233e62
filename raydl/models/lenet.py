"""LeNet: the variant of Caffe's MNIST example, and LeNet-5 as published."""

from __future__ import annotations

from torch import Tensor, nn

from raydl.models.parts import channels_last, require_size

_LENET5_SIDE = 32


class LeNet(nn.Module):
    """Caffe's LeNet: two 5x5 convolutions, 500 hidden units; 431,080 parameters at 28x28.

    Images below 16x16 are too small for two convolutions without padding. For them, the
    convolutions pad by 2, so that only the poolings shrink them.

    Args:
        image_shape: channels, height, width; sides of 4 or more.
        num_classes: logits per image.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        require_size("lenet", image_shape, 4)
        padding = 0 if min(height, width) >= 16 else 2
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
        logits: Tensor = self.classifier(self.features(channels_last(images)))
        return logits


class LeNet5(nn.Module):
    """LeNet-5: two 5x5 convolutions, layers of 120 and 84 units, tanh; 61,706 parameters at 28x28.

    Smaller images are padded to 32x32, as the paper does with digits of 28x28. The second
    convolution reads all six maps, the pooling is a plain average and the output is linear; the
    paper has a table of connections, trained pooling and radial units instead.
    (LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition, figure 2.)

    Args:
        image_shape: channels, height, width; any size.
        num_classes: logits per image.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.features = nn.Sequential(
            nn.ZeroPad2d((*_margins(width), *_margins(height))),
            nn.Conv2d(channels, 6, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        sides = [((max(side, _LENET5_SIDE) - 4) // 2 - 4) // 2 for side in (height, width)]
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * sides[0] * sides[1], 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.features(channels_last(images)))
        return logits


def _margins(side: int) -> tuple[int, int]:
    """Return the padding before and after a side to make it 32."""
    missing = max(0, _LENET5_SIDE - side)
    return missing // 2, missing - missing // 2


def _after_features(side: int, padding: int) -> int:
    for _ in range(2):
        side = side + 2 * padding - 4  # the 5x5 convolution
        side = -(-side // 2)  # the pooling, rounded up
    return side
