"""AlexNet, and its author's earlier network for CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from raydl.models.parts import channels_last, require_size


class AlexNet(nn.Module):
    """AlexNet in one tower: five convolutions, three linear layers.

    The tower has 64, 192, 384, 256 and 256 filters, without response normalization; names and
    initial weights are torchvision's. (Krizhevsky 2014, One Weird Trick for Parallelizing
    Convolutional Neural Networks.)

    Args:
        image_shape: channels, height, width; sides of 63 or more, made for 224.
        num_classes: logits per image.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        require_size("alexnet", image_shape, 63)
        self.features = nn.Sequential(
            nn.Conv2d(image_shape[0], 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


class CifarAlexNet(nn.Module):
    """Krizhevsky's net for CIFAR-10: three 5x5 convolutions, one linear layer.

    The layers are those of cuda-convnet's "18%" network, Caffe's ``cifar10_full``; the initial
    weights are torch's defaults.

    Args:
        image_shape: channels, height, width; sides of 8 or more, made for 32.
        num_classes: logits per image.

    Raises:
        ShapeError: if the images are too small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        require_size("alexnet-cifar", image_shape, 8)
        channels, height, width = image_shape
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.ReLU(),
            LocalNorm(),
            nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            LocalNorm(),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
        )
        # Each of the three poolings halves a side: ceil((side - 1) / 2), the last window partial.
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * (height // 8) * (width // 8), num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.features(channels_last(images)))
        return logits


class LocalNorm(nn.Module):
    """Response normalization within each map: x * (1 + alpha * mean(x^2 over 3x3))^-beta.

    alpha is 5e-5 and beta 3/4, as in Caffe's ``cifar10_full``.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape, [B, C, H, W]."""
        mean = functional.avg_pool2d(maps.square(), 3, stride=1, padding=1)
        return maps * (1 + 5e-5 * mean).pow(-0.75)
