"""The models raydl knows by name: plain PyTorch, one file per family.

Each is built from (channels, height, width) and the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from raydl.errors import UnknownNameError
from raydl.models.lenet import LeNet
from raydl.models.mlp import MLP

MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "lenet": LeNet,
    "mlp": MLP,
}
"""Every named model."""


def find(name: str) -> Callable[[tuple[int, int, int], int], nn.Module]:
    """Return the factory of a named model.

    Raises:
        UnknownNameError: no model has that name.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name]


__all__ = ["MLP", "MODELS", "LeNet", "find"]
