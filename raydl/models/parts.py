"""Parts that several families share: checks of the image size, layout, first weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raydl.errors import ShapeError


def require_size(model: str, image_shape: tuple[int, int, int], smallest: int) -> None:
    """Refuse pictures with a side below ``smallest``.

    Args:
        model: the name for the message.
        image_shape: channels, height, width.

    Raises:
        ShapeError: the pictures are too small.
    """
    _, height, width = image_shape
    if min(height, width) < smallest:
        raise ShapeError(
            model, f"needs pictures of {smallest}x{smallest} or more, got {height}x{width}"
        )


def channels_last(images: Tensor) -> Tensor:
    """Return pictures, shape [B, C, H, W], with the channels of a pixel side by side.

    For a model that a CPU computes faster in this layout, which its convolutions and poolings hand
    on: pooling takes several channels at a time. A gradient of LeNet takes 0.64 of the time, one of
    CifarAlexNet 0.57, of CifarResNet 0.85, of GoogLeNet 0.57 to 0.88. VGG is as fast in either,
    ResNet for ImageNet gains less than a tenth; they stay as they are. The figures are those of
    ``python -m benchmarks.layout``. On a GPU nothing is changed.
    """
    if images.is_cuda:
        return images
    # Not contiguous(): a picture of one channel is in both layouts, and would stay as it is.
    return images.to(memory_format=torch.channels_last)


def he_convolutions_(model: nn.Module) -> None:
    """Draw every convolution anew: normal with variance 2 / fan-out, biases 0.

    (He et al. 2015, Delving Deep into Rectifiers, eq. 14.) Random by torch's generator.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_linears_(model: nn.Module) -> None:
    """Draw every linear layer anew: normal with standard deviation 0.01, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
