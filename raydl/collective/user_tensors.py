"""Tensors of torch and arrays of NumPy, as callers of ``ray.util.collective`` hand them over.

An operation reads and fills flat memory. What it has filled is copied to the caller's tensor once
it has succeeded, so that one that fails changes nothing.
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
"""What gloo and NCCL can sum; any dtype can be sent."""


def only(values: Sequence[T]) -> T:
    """Return the one tensor of a list, or the one list of tensors.

    Raises:
        ConfigError: there are several, each on a device of its own.
    """
    if len(values) != 1:
        raise ConfigError(
            "tensor_list",
            f"has {len(values)} tensors of one member; raydl's groups have one device per member: "
            f"take the operation without _multigpu, in an actor for each GPU",
        )
    return values[0]


def flat(value: Value, device: str) -> Tensor:
    """Return the elements of a tensor, shape [n]: its own memory where that is contiguous.

    Args:
        value: a dense tensor, or an array.
        device: the type of the group's device, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: it is of another device, or nothing that can be sent.
    """
    here = value.device.type if isinstance(value, Tensor) else "cpu"
    if here != device:
        raise ConfigError(
            "tensor",
            f"is on {here}, and the group on {device}; move it, or form the group with "
            f"device={here!r}",
        )
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.detach().reshape(-1)
    if isinstance(value, np.ndarray):
        try:  # read-only arrays, such as those of Ray's object store, are copied
            return torch.from_numpy(np.require(value, requirements=["C", "W"])).reshape(-1)
        except (TypeError, ValueError):
            kind: Any = value.dtype
    else:
        kind = getattr(value, "layout", type(value))
    raise ConfigError("tensor", f"must be a dense tensor or array of numbers, got {kind}")


def empty_for(value: Value, device: str) -> Tensor:
    """Return memory for what a tensor is to hold: shape [n], its dtype, not filled.

    Raises:
        ConfigError: as for ``flat``, or the tensor can not be written.
    """
    check_writable(value)
    return torch.empty_like(flat(value, device))


def copy_of(value: Value, device: str) -> Tensor:
    """Return a copy of a tensor that is reduced, shape [n]. Raises ConfigError."""
    copied = flat(value, device).clone()
    check_reduced(copied)
    return copied


def check_writable(value: Value) -> None:
    """Refuse an array that can not hold a result. Raises ConfigError."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ConfigError(
            "tensor", "is a read-only array, as those of Ray's object store are; pass a copy of it"
        )


def check_reduced(elements: Tensor) -> None:
    """Refuse what can not be reduced. Raises ConfigError."""
    if elements.dtype not in REDUCED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED)
        raise ConfigError("tensor", f"has dtype {elements.dtype}; reduced are {names}")


def check_alike(value: Value, pieces: Sequence[Value]) -> None:
    """Refuse a list whose tensors are not like another one. Raises ConfigError."""
    kind = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
    for piece in pieces:
        found = (tuple(piece.shape), str(piece.dtype).removeprefix("torch."))
        if found != kind:
            raise ConfigError(
                "tensor_list", f"must have tensors like the other one, {kind}, got {found}"
            )


def as_bytes(elements: Tensor) -> Tensor:
    """Return flat memory as bytes, which travel whatever the dtype."""
    return elements.view(torch.uint8)


def fill(value: Value, result: Tensor) -> None:
    """Copy a result, shape [n], into the caller's tensor."""
    if isinstance(value, Tensor):
        value.detach().copy_(result.view(value.shape))
    else:
        np.copyto(value, result.numpy().reshape(value.shape))
