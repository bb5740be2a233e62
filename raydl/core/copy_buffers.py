"""Copies of a state, in memory that is used again: a training waits while one is made.

What the system hands out anew it has to clear, page by page, and that takes several times as long
as the copy itself. So the memory of an earlier copy is used again as soon as nobody has any tensor
in it, and the memory of the first copy is made ready beforehand.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20
"""Smaller tensors are copied to wherever the allocator likes."""


class _Block:
    """Memory for one tensor, and whether anybody uses it."""

    def __init__(self, num_bytes: int) -> None:
        # torch's: for large arrays NumPy asks for huge pages, for which a busy system has to tidy
        # up first.
        self._memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        self._user: weakref.ref[np.ndarray] | None = None

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def lend(self) -> Tensor:
        """Return the bytes as a tensor; they are in use until it and all its views are gone."""
        view = self._memory.view()  # which the tensor's storage keeps
        self._user = weakref.ref(view)
        return torch.from_numpy(view)


class CopyBuffers:
    """Makes copies of nested values on the CPU. For one thread at a time."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def of(self, value: Any) -> Any:
        """Return nested dicts and lists with copies of all tensors on the CPU.

        Memory of earlier copies that this one has no use for is given back.
        """
        copy = self._of(value)
        self._blocks = [block for block in self._blocks if not block.is_free]
        return copy

    def prepare(self, sizes: list[int]) -> None:
        """Make memory ready for the next copy, as far as it is not there; in any thread.

        Args:
            sizes: of its tensors, as ``sizes_of`` returns them.
        """
        ready = Counter(block.num_bytes for block in list(self._blocks) if block.is_free)
        missing = Counter(size for size in sizes if size >= _LEAST_BYTES) - ready
        blocks = [_Block(size) for size in missing.elements()]
        for block in blocks:
            block.lend().zero_()  # touches each page
        self._blocks += blocks

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value.detach())
        if isinstance(value, dict):
            return {key: self._of(v) for key, v in value.items()}
        if isinstance(value, list):
            return [self._of(v) for v in value]
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST_BYTES:
            return tensor.to("cpu", copy=True)
        free = (b for b in self._blocks if b.num_bytes == tensor.nbytes and b.is_free)
        block = next(free, None)
        if block is None:
            block = _Block(tensor.nbytes)
            self._blocks.append(block)
        copy = block.lend().view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


def sizes_of(value: Any) -> list[int]:
    """Return the bytes of each tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        return [value.nbytes]
    if isinstance(value, dict):
        value = list(value.values())
    return [size for v in value for size in sizes_of(v)] if isinstance(value, list) else []
