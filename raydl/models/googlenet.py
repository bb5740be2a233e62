"""GoogLeNet (Inception v1): as published, with batch norm, and for small images.

Szegedy et al. 2015, Going Deeper with Convolutions, table 1 and figure 3. The two auxiliary
classifiers are left out, since a task's loss takes one output.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from raydl.models.parts import channels_last, require_size

_WIDTHS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}
"""Channels: input; 1x1; reduced, 3x3; reduced, 5x5; after the pooling (table 1)."""


class _Layers(nn.Sequential):
    """A sequence of layers with the memory layout channels_last."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = super().forward(channels_last(images))  # type: ignore[no-untyped-call]
        return logits


class GoogLeNet(_Layers):
    """GoogLeNet for ImageNet: a stem of three convolutions, nine inception blocks.

    Without batch norm, it follows the paper with the settings of Caffe's ``bvlc_googlenet``. With
    batch norm, names, sizes and initial weights are torchvision's, whose third branch has 3x3
    convolutions instead of the paper's 5x5. Images [B, C, H, W] become logits [B, num_classes].

    Args:
        image_shape: channels, height, width; sides of 31 or more, with batch norm 15; made
            for 224.
        num_classes: logits per image.
        has_batch_norm: whether each convolution is followed by batch norm.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, *, has_batch_norm: bool = False
    ) -> None:
        name, smallest = ("googlenet-bn", 15) if has_batch_norm else ("googlenet", 31)
        require_size(name, image_shape, smallest)
        layers = _stem(image_shape[0], has_batch_norm) | _blocks(num_classes, has_batch_norm)
        super().__init__(OrderedDict(layers))
        _initialize_(self, has_batch_norm=has_batch_norm)


class CifarGoogLeNet(_Layers):
    """GoogLeNet for 32x32 images: batch norm, and one 3x3 convolution instead of the stem.

    Images [B, C, H, W] become logits [B, num_classes].

    Args:
        image_shape: channels, height, width; sides of 2 or more, made for 32.
        num_classes: logits per image.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        require_size("googlenet-cifar", image_shape, 2)
        stem = {"conv1": Convolution(image_shape[0], 192, 3, padding=1, has_batch_norm=True)}
        super().__init__(OrderedDict(stem | _blocks(num_classes, has_batch_norm=True)))
        _initialize_(self, has_batch_norm=True)


def _stem(channels: int, has_batch_norm: bool) -> dict[str, nn.Module]:
    """Return the layers before the blocks: [B, C, H, W] becomes [B, 192, H / 8, W / 8]."""
    return {
        "conv1": Convolution(channels, 64, 7, stride=2, padding=3, has_batch_norm=has_batch_norm),
        "maxpool1": nn.MaxPool2d(3, 2, ceil_mode=True),
        "norm1": _response_norm(has_batch_norm),
        "conv2": Convolution(64, 64, 1, has_batch_norm=has_batch_norm),
        "conv3": Convolution(64, 192, 3, padding=1, has_batch_norm=has_batch_norm),
        "norm2": _response_norm(has_batch_norm),
        "maxpool2": nn.MaxPool2d(3, 2, ceil_mode=True),
    }


def _blocks(num_classes: int, has_batch_norm: bool) -> dict[str, nn.Module]:
    """Return the nine blocks, global average pooling, dropout and the linear layer."""
    layers: dict[str, nn.Module] = {}
    for name, widths in _WIDTHS.items():
        if name == "4a":
            layers["maxpool3"] = nn.MaxPool2d(3, 2, ceil_mode=True)
        if name == "5a":
            layers["maxpool4"] = nn.MaxPool2d(2 if has_batch_norm else 3, 2, ceil_mode=True)
        layers[f"inception{name}"] = Inception(*widths, has_batch_norm=has_batch_norm)
    return layers | {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "dropout": nn.Dropout(0.2 if has_batch_norm else 0.4),
        "fc": nn.Linear(1024, num_classes),
    }


class Convolution(nn.Module):
    """A convolution and ReLU, with a bias or with batch norm between them."""

    def __init__(
        self,
        channels: int,
        width: int,
        side: int,
        *,
        stride: int = 1,
        padding: int = 0,
        has_batch_norm: bool,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            channels, width, side, stride=stride, padding=padding, bias=not has_batch_norm
        )
        self.bn = nn.BatchNorm2d(width, eps=0.001) if has_batch_norm else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B, width, ...]."""
        result: Tensor = self.relu(self.bn(self.conv(maps)))
        return result


class Inception(nn.Module):
    """Four parallel branches: 1x1; 1x1, 3x3; 1x1, 5x5; pooling, 1x1 (figure 2b)."""

    def __init__(
        self,
        channels: int,
        one: int,
        reduced_three: int,
        three: int,
        reduced_five: int,
        five: int,
        pooled: int,
        *,
        has_batch_norm: bool,
    ) -> None:
        super().__init__()

        def convolution(channels: int, width: int, side: int) -> Convolution:
            return Convolution(
                channels, width, side, padding=side // 2, has_batch_norm=has_batch_norm
            )

        self.branch1 = convolution(channels, one, 1)
        self.branch2 = nn.Sequential(
            convolution(channels, reduced_three, 1), convolution(reduced_three, three, 3)
        )
        self.branch3 = nn.Sequential(
            convolution(channels, reduced_five, 1),
            convolution(reduced_five, five, 3 if has_batch_norm else 5),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, padding=1, ceil_mode=True), convolution(channels, pooled, 1)
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return the concatenated maps of the branches, [B, sum of widths, H, W]."""
        branches = (self.branch1, self.branch2, self.branch3, self.branch4)
        return torch.cat([branch(maps) for branch in branches], 1)


def _response_norm(has_batch_norm: bool) -> nn.Module:
    return nn.Identity() if has_batch_norm else nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)


def _initialize_(model: nn.Module, *, has_batch_norm: bool) -> None:
    """Initialize weights as torchvision does with batch norm, and as Caffe does without."""
    for module in model.modules():
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            continue
        if has_batch_norm:
            nn.init.trunc_normal_(module.weight, std=0.01)
            continue
        nn.init.kaiming_uniform_(module.weight, nonlinearity="linear")  # Caffe's "xavier"
        assert module.bias is not None
        nn.init.constant_(module.bias, 0.2 if isinstance(module, nn.Conv2d) else 0.0)
