"""Functions that model families share: size checks, memory layout, initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raydl.errors import ShapeError


def require_size(model: str, image_shape: tuple[int, int, int], smallest: int) -> None:
    """Refuse images with a side below ``smallest``.

    Args:
        model: name of the model, for the message.
        image_shape: channels, height, width.
        smallest: smallest side that the model takes, in pixels.

    Raises:
        ShapeError: if the images are too small.
    """
    _, height, width = image_shape
    if min(height, width) < smallest:
        raise ShapeError(
            model, f"needs images of {smallest}x{smallest} or more, got {height}x{width}"
        )


def channels_last(images: Tensor) -> Tensor:
    """Return images, shape [B, C, H, W], in the memory layout channels_last, unless on a GPU.

    Convolutions and poolings keep the layout, and a CPU pools several channels at a time in it. A
    gradient of LeNet takes 0.64 of the time, of CifarAlexNet 0.57, of CifarResNet 0.85, of
    GoogLeNet 0.57 to 0.88. VGG gains nothing and ResNet for ImageNet less than a tenth, so they do
    not use it. The figures are in docs/journal.md.
    """
    if images.is_cuda:
        return images
    # Not contiguous(): it would not change an image of one channel, which is in both layouts.
    return images.to(memory_format=torch.channels_last)


def he_convolutions_(model: nn.Module) -> None:
    """Initialize all convolutions: weights normal with variance 2 / fan-out, biases 0.

    (He et al. 2015, Delving Deep into Rectifiers, eq. 14.) Uses torch's generator.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_linears_(model: nn.Module) -> None:
    """Initialize all linear layers: weights normal with standard deviation 0.01, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
