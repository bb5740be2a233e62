"""VGG: stacks of 3x3 convolutions, with and without batch norm, for large and small images.

Simonyan and Zisserman 2015, Very Deep Convolutional Networks for Large-Scale Image
Recognition, table 1, columns A, D and E; names and initial weights are torchvision's.
"""

from __future__ import annotations

from torch import Tensor, nn

from raydl.models.parts import he_convolutions_, require_size, small_linears_

_WIDTHS = (64, 128, 256, 512, 512)
_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions before each of the five poolings, by depth."""


class VGG(nn.Module):
    """VGG for ImageNet: five stacks of 3x3 convolutions, two layers of 4,096 units, the logits.

    Args:
        image_shape: channels, height, width; sides of 32 or more, made for 224.
        num_classes: logits per image.
        depth: layers with weights: 11, 16 or 19.
        has_batch_norm: whether each convolution is followed by batch norm.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        depth: int = 16,
        has_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        require_size(f"vgg{depth}", image_shape, 32)
        self.features = _stacks(image_shape[0], depth, has_batch_norm, ceil_mode=False)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        he_convolutions_(self)
        small_linears_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


class CifarVGG(nn.Module):
    """VGG for 32x32 images: the same stacks, then one linear layer to the logits.

    The poolings round up, for images of any size; at 32x32 this changes nothing.

    Args:
        image_shape: channels, height, width; any size, made for 32.
        num_classes: logits per image.
        depth: layers with weights of the large variant: 11, 16 or 19.
        has_batch_norm: whether each convolution is followed by batch norm.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        depth: int = 16,
        has_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.features = _stacks(channels, depth, has_batch_norm, ceil_mode=True)
        sides = [-(-side // 2 ** len(_WIDTHS)) for side in (height, width)]
        self.classifier = nn.Linear(512 * sides[0] * sides[1], num_classes)
        he_convolutions_(self)
        small_linears_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _stacks(channels: int, depth: int, has_batch_norm: bool, *, ceil_mode: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, count in zip(_WIDTHS, _CONVOLUTIONS[depth], strict=True):
        for _ in range(count):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if has_batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=ceil_mode))
    return nn.Sequential(*layers)
