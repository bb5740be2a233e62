"""Copies of a state in reused memory, to shorten the pause that a copy makes in training.

The system clears newly allocated memory page by page, which takes several times as long as the
copy itself. So the memory of an earlier copy is reused once no tensor refers to it, and the memory
of the first copy is allocated and touched in advance.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20
"""Smaller tensors are copied to newly allocated memory."""


class _Block:
    """Memory for one tensor."""

    def __init__(self, num_bytes: int) -> None:
        # Allocated by torch: for large arrays NumPy requests huge pages, and a busy system has to
        # compact its memory first.
        self._memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        self._user: weakref.ref[np.ndarray] | None = None
        self.num_bytes = num_bytes

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def lend(self) -> Tensor:
        """Return the bytes as a tensor; they are in use while it or a view of it exists."""
        view = self._memory.view()  # the tensor's storage keeps it alive
        self._user = weakref.ref(view)
        return torch.from_numpy(view)


class CopyBuffers:
    """Copies nested values to the CPU. Used by one thread at a time."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def of(self, value: Any) -> Any:
        """Return nested dicts, lists and tuples with copies of all tensors on the CPU.

        Memory of earlier copies that this copy does not need is freed.
        """
        copy = map_nested(value, lambda v: self._copy(v) if isinstance(v, Tensor) else v)
        self._blocks = [block for block in self._blocks if not block.is_free]
        return copy

    def prepare(self, sizes: list[int]) -> None:
        """Allocate the missing memory for the next copy; may run in any thread.

        Args:
            sizes: bytes of its tensors, from ``sizes_of``.
        """
        ready = Counter(block.num_bytes for block in list(self._blocks) if block.is_free)
        missing = Counter(size for size in sizes if size >= _LEAST_BYTES) - ready
        blocks = [_Block(size) for size in missing.elements()]
        for block in blocks:
            block.lend().zero_()  # touches each page
        self._blocks += blocks

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.nbytes < _LEAST_BYTES:
            return tensor.to("cpu", copy=True)
        free = (b for b in self._blocks if b.num_bytes == tensor.nbytes and b.is_free)
        block = next(free, None)
        if block is None:
            block = _Block(tensor.nbytes)
            self._blocks.append(block)
        copy = block.lend().view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


def map_nested(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with a function applied to all values in them."""
    if isinstance(value, dict):
        return {key: map_nested(v, function) for key, v in value.items()}
    if isinstance(value, list):
        return [map_nested(v, function) for v in value]
    if isinstance(value, tuple):
        values = [map_nested(v, function) for v in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return function(value)


def sizes_of(value: Any) -> list[int]:
    """Return the bytes of each tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value.nbytes]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [size for v in value for size in sizes_of(v)]
