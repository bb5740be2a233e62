"""A counter-based random number generator: each number is a hash of what it is for.

A generator with a state gives other numbers to another number of workers. Here a number is a
hash of (seed, epoch, row, draw), so that it is the same wherever and whenever it is drawn. The
hash is splitmix64 (Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators;
the shifts and factors are Stafford's variant 13): whole numbers alone, which CPU and CUDA
multiply to the same bits.

    z      key + row * 0x9E3779B97F4A7C15    modulo 2**64, as all of this
    z      (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z      (z ^ (z >> 27)) * 0x94D049BB133111EB
    z      z ^ (z >> 31)
    number  z >> 40, in units of 2**-24
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_Bits = TypeVar("_Bits", int, Tensor)

_NUM_BITS = 24
"""As many as float32 holds exactly."""


def uniform(seed: int, epoch: int, rows: Tensor, draw: int) -> Tensor:
    """Return a number in [0, 1) for each row, float32, shape [B], on the device of the rows.

    Args:
        seed: of the run.
        epoch: the pass over the data.
        rows: samples, int64, shape [B].
        draw: which of the numbers that a sample needs in an epoch.
    """
    z = _mixed(rows * _signed(0x9E3779B97F4A7C15) + _key(seed, epoch, draw))
    return _right(z, 64 - _NUM_BITS).to(torch.float32) * 2.0**-_NUM_BITS


def _key(*numbers: int) -> int:
    """Return 64 bits, as a signed number, that differ wherever one of the numbers does."""
    key = 0
    for number in numbers:
        key = _signed(_mixed(key + number + 0x9E3779B97F4A7C15))
    return key


def _mixed(z: _Bits) -> _Bits:
    """Return bits each of which depends on all the lowest 64 of ``z``.

    An int is longer than 64 bits in between; what is above them reaches none of the lowest.
    """
    z = (z ^ _right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _right(z, 31)


def _right(z: _Bits, count: int) -> _Bits:
    """Return the lowest 64 bits moved right, zeros coming in; ``>>`` alone repeats the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(z: int) -> int:
    """Return the lowest 64 bits as the number that they are in int64."""
    return (z + (1 << 63)) % (1 << 64) - (1 << 63)
