"""Models that no table holds: your own ``module:function``, and torchvision's."""

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
"""Arguments by which torchvision's models with two outputs return one."""


def load(name: str) -> Callable[[tuple[int, int, int], int], nn.Module]:
    """Return the factory that ``torchvision:NAME`` or ``module:function`` names.

    Raises:
        ConfigError: it can not be imported, or is nothing to call.
        UnknownNameError: torchvision has no such model.
    """
    module_name, _, attribute = name.partition(":")
    if module_name == "torchvision":
        return _from_torchvision(attribute)
    found = load_own("model", name)
    if not callable(found):
        raise ConfigError(
            "model", f"{name} is no function of (image shape, number of classes), nor a class"
        )
    factory: Callable[[tuple[int, int, int], int], nn.Module] = found
    return factory


def _from_torchvision(name: str) -> Callable[[tuple[int, int, int], int], nn.Module]:
    zoo = _torchvision_models()
    names = zoo.list_models(module=zoo)  # the classifiers alone
    if name not in names:
        raise UnknownNameError("model torchvision", name, names)
    return functools.partial(_build_torchvision, name)


def _torchvision_models() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # the latter from one built for another torch
        raise ConfigError(
            "model", f"torchvision:NAME needs a torchvision that fits this torch: {error}"
        ) from error


def _build_torchvision(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return an untrained model of torchvision whose first convolution takes our channels."""
    settings = _WITHOUT_AUXILIARY.get(name, {})
    model: nn.Module = _torchvision_models().get_model(
        name, weights=None, num_classes=num_classes, **settings
    )
    key, first = next((k, m) for k, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if first.in_channels == image_shape[0]:
        return model
    parent, _, child = key.rpartition(".")
    fitting = nn.Conv2d(
        image_shape[0],
        first.out_channels,
        kernel_size=first.kernel_size,  # type: ignore[arg-type]
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    setattr(model.get_submodule(parent), child, fitting)
    return model
