"""torch tensors and NumPy arrays of callers of ``ray.util.collective``, as flat memory.

An operation reads and fills flat memory. Its result is copied to the caller's tensor after it has
succeeded, so a failed operation changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from raydl.errors import ConfigError

Value: TypeAlias = Tensor | np.ndarray
T = TypeVar("T")

REDUCED = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
"""The dtypes that gloo and NCCL can sum; any dtype can be sent."""


def only(values: Sequence[T]) -> T:
    """Return the only tensor of a list, or the only list of tensors.

    Raises:
        ConfigError: if there are several, each on its own device.
    """
    if len(values) != 1:
        raise ConfigError(
            "tensor_list",
            f"has {len(values)} tensors of one member; raydl's groups have one device per member: "
            f"use the operation without _multigpu, in one actor per GPU",
        )
    return values[0]


def flat(value: Value, device: str) -> Tensor:
    """Return the elements of a tensor as contiguous memory, shape [n].

    A tensor that is contiguous is not copied.

    Args:
        value: a dense tensor, or an array.
        device: the type of the group's device, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: if it is on another device, or cannot be sent.
    """
    found = value.device.type if isinstance(value, Tensor) else "cpu"
    if found != device:
        raise ConfigError(
            "tensor",
            f"is on {found}, and the group on {device}; move it, or form the group with "
            f"device={found!r}",
        )
    if isinstance(value, Tensor) and value.layout == torch.strided:
        # A column is a strided view even after reshape; conjugation and sign may be mere marks.
        return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if isinstance(value, np.ndarray):
        try:  # copies read-only arrays, such as those of Ray's object store
            return torch.from_numpy(np.require(value, requirements=["C", "W"])).reshape(-1)
        except (TypeError, ValueError):
            kind: Any = value.dtype
    else:
        kind = getattr(value, "layout", type(value))
    raise ConfigError("tensor", f"must be a dense tensor or array of numbers, got {kind}")


def empty_for(value: Value, device: str) -> Tensor:
    """Return uninitialized memory for a result: shape [n], with the dtype of ``value``.

    Raises:
        ConfigError: as for ``flat``, or if the tensor is read-only.
    """
    check_writable(value)
    return torch.empty_like(flat(value, device))


def copy_of(value: Value, device: str) -> Tensor:
    """Return a copy to reduce, shape [n]. Raises ConfigError if it cannot be reduced."""
    copied = flat(value, device).clone()
    check_reduced(copied)
    return copied


def check_writable(value: Value) -> None:
    """Raise ConfigError if an array is read-only."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ConfigError(
            "tensor", "is a read-only array, as in Ray's object store; pass a copy of it"
        )


def check_reduced(elements: Tensor) -> None:
    """Raise ConfigError if a dtype cannot be reduced."""
    if elements.dtype not in REDUCED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED)
        raise ConfigError("tensor", f"must have one of the dtypes {names}, got {elements.dtype}")


def check_alike(value: Value, pieces: Sequence[Value]) -> None:
    """Raise ConfigError if the tensors of a list differ from ``value`` in shape or dtype."""
    expected = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
    for piece in pieces:
        found = (tuple(piece.shape), str(piece.dtype).removeprefix("torch."))
        if found != expected:
            raise ConfigError(
                "tensor_list", f"must have tensors like the other argument, {expected}, got {found}"
            )


def as_bytes(elements: Tensor) -> Tensor:
    """Return flat memory as bytes, which can be sent whatever the dtype."""
    return elements.view(torch.uint8)


def fill(value: Value, result: Tensor) -> None:
    """Copy a result, shape [n], into the caller's tensor."""
    if isinstance(value, Tensor):
        value.detach().copy_(result.view(value.shape))
    else:
        np.copyto(value, result.numpy().reshape(value.shape))
