"""Which models are attached: a model belongs to one handle at a time."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from raydl.errors import ConfigError

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Any], str]] = (
    weakref.WeakKeyDictionary()
)
"""By model, its handle, which may be gone without having been detached, and the run's name."""


def claim(model: nn.Module, holder: object, name: str) -> None:
    """Note that a model is attached.

    Args:
        model: of the user.
        holder: the handle; the claim ends with it.
        name: of the run.

    Raises:
        ConfigError: another handle has it.
    """
    holder_now, name_now = _HOLDERS.get(model, (lambda: None, ""))
    if holder_now() is not None:
        raise ConfigError(
            "model",
            f"is attached to {name_now!r} already, and would wait for itself; call detach() of "
            f"that handle first, or leave its `with`",
        )
    _HOLDERS[model] = weakref.ref(holder), name


def release(model: nn.Module) -> None:
    """Let others attach a model."""
    _HOLDERS.pop(model, None)
