"""A counter-based random number generator: each number is a hash of its purpose.

The numbers of a generator with a state would depend on the number of workers. Here a number is a
hash of (seed, epoch, row, draw): the same in any worker and at any time. The hash is splitmix64
(Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators; shifts and factors of
Stafford's variant 13). It uses integers only, which CPU and CUDA multiply to the same bits.

    z      key + row * 0x9E3779B97F4A7C15    modulo 2**64, as all lines
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
"""Bits of a number: as many as float32 holds exactly."""


def uniform(seed: int, epoch: int, rows: Tensor, draw: int) -> Tensor:
    """Return a number in [0, 1) for each row, float32, shape [B], on the device of the rows.

    Args:
        seed: seed of the run.
        epoch: pass over the data.
        rows: row numbers of samples, int64, shape [B].
        draw: index of the number among all that a sample needs in an epoch.
    """
    z = _mixed(rows * _signed(0x9E3779B97F4A7C15) + _key(seed, epoch, draw))
    return _right(z, 64 - _NUM_BITS).to(torch.float32) * 2.0**-_NUM_BITS


def _key(*numbers: int) -> int:
    """Hash some numbers to one signed 64-bit number."""
    key = 0
    for number in numbers:
        key = _signed(_mixed(key + number + 0x9E3779B97F4A7C15))
    return key


def _mixed(z: _Bits) -> _Bits:
    """Mix the lowest 64 bits of ``z``, so that each result bit depends on all of them.

    An int grows beyond 64 bits in between; the higher bits do not affect the lowest 64.
    """
    z = (z ^ _right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _right(z, 31)


def _right(z: _Bits, count: int) -> _Bits:
    """Shift the lowest 64 bits right and fill with zeros; ``>>`` alone repeats the sign bit."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(z: int) -> int:
    """Return the lowest 64 bits as an int64 value."""
    return (z + (1 << 63)) % (1 << 64) - (1 << 63)
