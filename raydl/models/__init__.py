"""Networks known by name: plain PyTorch, one file per family.

Each is built from (channels, height, width) and the number of classes, for texts from (tokens,) and
the size of the vocabulary, or for tables from (inputs,) and the number of outputs. The CIFAR
variants also take small images of other data sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raydl.errors import ShapeError, UnknownNameError
from raydl.models.alexnet import AlexNet, CifarAlexNet
from raydl.models.custom import load
from raydl.models.googlenet import CifarGoogLeNet, GoogLeNet
from raydl.models.gpt import GPT
from raydl.models.lenet import LeNet, LeNet5
from raydl.models.mlp import MLP
from raydl.models.resnet import CifarResNet, ResNet
from raydl.models.vgg import VGG, CifarVGG

ModelFactory = Callable[[Any, int], nn.Module]
"""Builds a model from (channels, height, width) and the number of classes.

For texts: from (tokens,) and the size of the vocabulary.
"""

_DIGITS = ((1, 28, 28), 10)
_CIFAR = ((3, 32, 32), 10)
_IMAGENET = ((3, 224, 224), 1000)
_BYTES = ((128,), 256)
_GPT2 = ((1024,), 50_257)


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model of the table."""

    build: ModelFactory
    """Builds the model for any number of channels and classes."""
    made_for: tuple[tuple[int, ...], int]
    """Input shape and number of classes of the publication.

    ((channels, height, width), classes) of images, ((tokens,), vocabulary) of texts.
    """
    sentence: str
    """Description, short enough for a row of a table."""
    source: str
    """Publication."""
    takes_tables: bool = False
    """Whether the input may also be a row of numbers."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of data that it takes: images, texts, tables."""
        first = "texts" if self.reads_texts else "images"
        return (first, "tables") if self.takes_tables else (first,)

    @property
    def reads_texts(self) -> bool:
        """Whether the input is texts rather than images."""
        return len(self.made_for[0]) == 1

    @property
    def input_size(self) -> str:
        """Input size of the publication: ``3x32x32``, ``128 tokens``."""
        size = "x".join(map(str, self.made_for[0]))
        return f"{size} tokens" if self.reads_texts else size

    @property
    def num_parameters(self) -> int:
        """Trainable parameters for ``made_for``, counted without memory for them."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.build(*self.made_for).parameters())


def _vgg(depth: int, *, has_batch_norm: bool = False, is_small: bool = False) -> ModelRow:
    norm = ", batch norm" if has_batch_norm else ""
    end = "1 linear" if is_small else "3 linear"
    return ModelRow(
        build=partial(CifarVGG if is_small else VGG, depth=depth, has_batch_norm=has_batch_norm),
        made_for=_CIFAR if is_small else _IMAGENET,
        sentence=f"{depth - 3} convolutions, {end}{norm}",
        source="Simonyan and Zisserman 2015",
    )


def _resnet(depth: int) -> ModelRow:
    block = "three" if depth >= 50 else "two"
    return ModelRow(
        build=partial(ResNet, depth=depth),
        made_for=_IMAGENET,
        sentence=f"residual blocks of {block} convolutions",
        source="He et al. 2016, table 1",
    )


def _small_resnet(depth: int) -> ModelRow:
    return ModelRow(
        build=partial(CifarResNet, depth=depth),
        made_for=_CIFAR,
        sentence="residual blocks, plain shortcuts",
        source="He et al. 2016, section 4.2",
    )


def _gpt(
    made_for: tuple[tuple[int, ...], int], *, num_layers: int, num_heads: int, width: int
) -> ModelRow:
    return ModelRow(
        build=partial(GPT, num_layers=num_layers, num_heads=num_heads, width=width),
        made_for=made_for,
        sentence=f"{num_layers} blocks of {num_heads} heads, width {width}",
        source="Radford et al. 2019, " + ("table 2" if width >= 768 else "the sizes of minGPT"),
    )


MODELS: dict[str, ModelRow] = {
    "lenet": ModelRow(
        build=LeNet,
        made_for=_DIGITS,
        sentence="Caffe's LeNet, of its MNIST example",
        source="Caffe, examples/mnist/lenet.prototxt",
    ),
    "lenet5": ModelRow(
        build=LeNet5,
        made_for=_DIGITS,
        sentence="LeNet-5 of 1998, with tanh",
        source="LeCun et al. 1998, figure 2",
    ),
    "mlp": ModelRow(
        build=MLP,
        made_for=_DIGITS,
        sentence="two hidden layers of 256 units; for tables, too",
        source="raydl",
        takes_tables=True,
    ),
    "alexnet": ModelRow(
        build=AlexNet,
        made_for=_IMAGENET,
        sentence="AlexNet in one tower",
        source="Krizhevsky 2014",
    ),
    "alexnet-cifar": ModelRow(
        build=CifarAlexNet,
        made_for=_CIFAR,
        sentence="Krizhevsky's net for CIFAR-10",
        source="Krizhevsky's cuda-convnet; Caffe, cifar10_full",
    ),
    "vgg11": _vgg(11),
    "vgg11-bn": _vgg(11, has_batch_norm=True),
    "vgg11-cifar": _vgg(11, is_small=True),
    "vgg11-bn-cifar": _vgg(11, has_batch_norm=True, is_small=True),
    "vgg16": _vgg(16),
    "vgg16-bn": _vgg(16, has_batch_norm=True),
    "vgg16-cifar": _vgg(16, is_small=True),
    "vgg16-bn-cifar": _vgg(16, has_batch_norm=True, is_small=True),
    "vgg19": _vgg(19),
    "vgg19-bn": _vgg(19, has_batch_norm=True),
    "vgg19-cifar": _vgg(19, is_small=True),
    "vgg19-bn-cifar": _vgg(19, has_batch_norm=True, is_small=True),
    "resnet18": _resnet(18),
    "resnet34": _resnet(34),
    "resnet50": _resnet(50),
    "resnet20": _small_resnet(20),
    "resnet32": _small_resnet(32),
    "resnet56": _small_resnet(56),
    "googlenet": ModelRow(
        build=GoogLeNet,
        made_for=_IMAGENET,
        sentence="Inception v1 as published",
        source="Szegedy et al. 2015, table 1",
    ),
    "googlenet-bn": ModelRow(
        build=partial(GoogLeNet, has_batch_norm=True),
        made_for=_IMAGENET,
        sentence="Inception v1, batch norm",
        source="Szegedy et al. 2015; torchvision",
    ),
    "googlenet-cifar": ModelRow(
        build=CifarGoogLeNet,
        made_for=_CIFAR,
        sentence="Inception v1, batch norm, a short stem",
        source="Szegedy et al. 2015, a smaller stem",
    ),
    "gpt-nano": _gpt(_BYTES, num_layers=3, num_heads=3, width=48),
    "gpt-mini": _gpt(_BYTES, num_layers=6, num_heads=6, width=192),
    "gpt2": _gpt(_GPT2, num_layers=12, num_heads=12, width=768),
}
"""Every named model."""


def find(name: str) -> ModelFactory:
    """Return the factory of a model.

    Args:
        name: a name of the table, ``torchvision:NAME``, or your own ``module:function``.

    Raises:
        UnknownNameError: if no model has the name.
        ConfigError: if ``torchvision:NAME`` or ``module:function`` cannot be imported.
    """
    if ":" in name:
        return load(name)
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name].build


USUAL = {"images": "lenet", "texts": "gpt-nano", "tables": "mlp"}
"""Model by kind of data, if none is named."""


def require_fit(name: str, factory: ModelFactory, kind: str, *, data: str) -> None:
    """Refuse texts, images or tables for a model of the table that takes another kind of data.

    Args:
        name: name of the model.
        factory: factory of the model; only those of the table are checked.
        kind: kind of the data: images, texts or tables.
        data: description of the data, for the message.

    Raises:
        ShapeError: if the model takes another kind of data.
    """
    row = MODELS.get(name)
    if row is None or row.build is not factory or kind in row.kinds:
        return
    fitting = [n for n, r in MODELS.items() if kind in r.kinds]
    takes = " or ".join(row.kinds)
    hint = f"choose {', '.join(fitting[:3])}"
    raise ShapeError(name, f"takes {takes}, but the data are {data}; {hint}")


__all__ = [
    "GPT", "MLP", "MODELS", "VGG", "AlexNet", "CifarAlexNet", "CifarGoogLeNet", "CifarResNet",
    "CifarVGG", "GoogLeNet", "LeNet", "LeNet5", "ModelFactory", "ModelRow", "ResNet", "find",
    "require_fit",
]  # fmt: skip
