"""Models that are not in the table: the user's ``module:function``, and torchvision's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

from torch import nn

from raydl.config.custom_code import load_own
from raydl.errors import ConfigError, UnknownNameError

_WITHOUT_AUXILIARY = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}
"""Arguments with which torchvision's models with auxiliary outputs return one output."""


def load(name: str) -> Callable[[tuple[int, int, int], int], nn.Module]:
    """Return the factory that ``torchvision:NAME`` or ``module:function`` names.

    Raises:
        ConfigError: if it cannot be imported or is not callable.
        UnknownNameError: if torchvision has no such model.
    """
    module_name, _, attribute = name.partition(":")
    if module_name == "torchvision":
        torchvision_models = _torchvision_models()
        names = torchvision_models.list_models(module=torchvision_models)  # classifiers only
        if attribute not in names:
            raise UnknownNameError("model torchvision", attribute, names)
        return functools.partial(_build_torchvision, attribute)
    factory: Callable[[tuple[int, int, int], int], nn.Module] = load_own("model", name)
    if not callable(factory):
        raise ConfigError(
            "model",
            f"must be a function or class of (image shape, number of classes), got {name}",
        )
    return factory


def _torchvision_models() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise ConfigError(
            "model", f"torchvision:NAME needs a torchvision that matches this torch: {error}"
        ) from error


def _build_torchvision(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return an untrained model of torchvision whose first convolution fits ``image_shape``."""
    settings = _WITHOUT_AUXILIARY.get(name, {})
    model: nn.Module = _torchvision_models().get_model(
        name, weights=None, num_classes=num_classes, **settings
    )
    key, first = next((k, m) for k, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if first.in_channels == image_shape[0]:
        return model
    parent, _, child = key.rpartition(".")
    replacement = nn.Conv2d(
        image_shape[0],
        first.out_channels,
        kernel_size=first.kernel_size,  # type: ignore[arg-type]
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    setattr(model.get_submodule(parent), child, replacement)
    return model
