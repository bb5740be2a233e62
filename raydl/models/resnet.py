"""Residual networks: large ones for ImageNet, small ones for CIFAR.

He et al. 2016, Deep Residual Learning for Image Recognition, table 1 and section 4.2. Names and
initial weights of the large networks are torchvision's; as there, the stride of a bottleneck is in
its 3x3 convolution.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from raydl.models.parts import channels_last, he_convolutions_

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Blocks of each of the four stages, by depth."""


class ResNet(nn.Module):
    """A residual network for ImageNet: a 7x7 convolution, four stages, pooling, the logits.

    Args:
        image_shape: channels, height, width; any size, made for 224.
        num_classes: logits per image.
        depth: layers with weights: 18, 34 or 50.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, *, depth: int = 18
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(image_shape[0], 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        block = Bottleneck if depth >= 50 else BasicBlock
        channels = 64
        for stage, count in enumerate(_BLOCKS[depth]):
            width, stride = 64 * 2**stage, 1 if stage == 0 else 2
            blocks: list[nn.Module] = []
            for index in range(count):
                blocks.append(block(channels, width, stride if index == 0 else 1))
                channels = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        he_convolutions_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in range(1, 5):
            maps = self.get_submodule(f"layer{stage}")(maps)
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes.

    Args:
        channels: input channels.
        width: output channels.
        stride: stride of the first convolution.
    """

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B, width, H / stride, W / stride]."""
        change = self.relu(self.bn1(self.conv1(maps)))
        change = self.bn2(self.conv2(change))
        result: Tensor = self.relu(change + self.downsample(maps))
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut.

    Args:
        channels: input channels.
        width: inner channels; the output has 4 * width.
        stride: stride of the 3x3 convolution.
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, 4 * width, stride)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B, 4 * width, H / stride, W / stride]."""
        change = self.relu(self.bn1(self.conv1(maps)))
        change = self.relu(self.bn2(self.conv2(change)))
        change = self.bn3(self.conv3(change))
        result: Tensor = self.relu(change + self.downsample(maps))
        return result


class CifarResNet(nn.Module):
    """A residual network for 32x32 images: three stages of 16, 32 and 64 channels.

    A shortcut has no parameters: if the shape changes, it takes every other pixel and adds channels
    of zeros (option A).

    Args:
        image_shape: channels, height, width; any size, made for 32.
        num_classes: logits per image.
        depth: layers with weights, 6n + 2: 20, 32, 56.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, *, depth: int = 20
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(image_shape[0], 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks, channels = [], 16
        for width in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                blocks.append(PlainShortcutBlock(channels, width))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(64, num_classes)
        he_convolutions_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape [B, num_classes], for images [B, C, H, W]."""
        maps = self.conv1(channels_last(images))
        maps = self.blocks(functional.relu(self.bn1(maps)))
        logits: Tensor = self.fc(maps.mean((2, 3)))
        return logits


class PlainShortcutBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters.

    Args:
        channels: input channels.
        width: output channels; if there are more than input channels, the sides are halved.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if channels == width else 2
        self.num_new = width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B, width, H / stride, W / stride]."""
        change = functional.relu(self.bn1(self.conv1(maps)))
        change = self.bn2(self.conv2(change))
        shortcut = maps[:, :, :: self.stride, :: self.stride]
        before = self.num_new // 2
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, before, self.num_new - before))
        return functional.relu(change + shortcut)


def _shortcut(channels: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and channels == width:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
    )
