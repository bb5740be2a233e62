"""Which tensors of a model are one: parameters and buffers over the same memory.

A model ties two weights by registering one object twice, or by giving two objects the same memory
(``b.weight.data = a.weight.data``). Both are one tensor here: its elements count once and are
exchanged once, under the first of its names. Tensors that share only some elements, or the same
elements in another order, are neither one nor two, and are refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from raydl.core.non_trainable import plain, shares_elements, slots_of
from raydl.errors import ShapeError

_MAX_WORK = 1_000_000
"""Steps that NumPy takes to find an element of two views; slices and columns need a few."""


def memory_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors if they are the same view of the same memory.

    A tensor without elements, or without an address (a sparse one), is one with itself alone.
    """
    if not _has_memory(tensor):
        return id(tensor)
    # The stride of a dimension of one element has no effect.
    steps = [n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape)
    return (*kind, tensor.data_ptr(), tuple(steps))


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by plain name; of several over one memory, the first."""
    first: dict[Hashable, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first.setdefault(memory_of(parameter), (plain(name), parameter))
    return dict(first.values())


def move(model: nn.Module, device: str) -> nn.Module:
    """Move a model in place and return it; tensors that were one still are, unlike in torch."""
    before = [(place, tensor, memory_of(tensor)) for _, place, tensor in slots_of(model)]
    model.to(device)
    first: dict[Hashable, tuple[Tensor, Tensor]] = {}
    for place, old, memory in before:
        now = place.get()
        assert now is not None, "a move drops no tensor"
        first_old, first_now = first.setdefault(memory, (old, now))
        if old is first_old:
            place.set(first_now)
        else:
            now.data = first_now.data
    return model


def check_sharing(model: nn.Module, name: str) -> None:
    """Raise a ShapeError if tensors of a model share memory but are not one.

    Args:
        model: the model.
        name: its name, for the message.
    """
    first: dict[Hashable, tuple[int, str, Tensor]] = {}
    for number, (key, _, tensor) in enumerate(slots_of(model)):
        if not _has_memory(tensor):
            continue
        if tensor.requires_grad and shares_elements(tensor):
            problem = f"has {key}, whose own elements share memory; make it a copy (clone())"
            raise ShapeError(name, problem)
        first.setdefault(memory_of(tensor), (number, key, tensor))
    # In the order of addresses, so that few views reach into the next one.
    open_views: list[tuple[int, str, Tensor]] = []
    for number, key, tensor in sorted(first.values(), key=lambda item: _range_of(item[2])):
        device, start, _ = _range_of(tensor)
        open_views = [item for item in open_views if _reaches(item[2], device, start)]
        for other_number, other_key, other in open_views:
            if _share_an_element(other, tensor):
                names = (other_key, key) if other_number < number else (key, other_key)
                _refuse(name, *names)
        open_views.append((number, key, tensor))


def _refuse(model: str, first: str, second: str) -> NoReturn:
    raise ShapeError(
        model,
        f"has {first} and {second}, which share elements but are not the same view of them, so "
        f"they cannot be trained as one tensor or as two; make one of them a copy (clone()), or "
        f"give both the same view",
    )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0


def _range_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device of a tensor, and the begin and end of its memory in bytes."""
    last = sum((size - 1) * n for size, n in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _reaches(tensor: Tensor, device: str, address: int) -> bool:
    own, _, stop = _range_of(tensor)
    return own == device and stop > address


def _share_an_element(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory; exact also where their elements alternate."""
    search: Any = np.shares_memory  # its types lack a bound
    try:
        return bool(search(_addresses(tensor), _addresses(other), max_work=_MAX_WORK))
    except np.exceptions.TooHardError:  # no ordinary view: refused, as if they did
        return True


def _addresses(tensor: Tensor) -> np.ndarray:
    """Return an array at the addresses of a tensor on any device. It must not be read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(n * size for n in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
