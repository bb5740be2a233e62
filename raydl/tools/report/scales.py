"""Axes: which values get a tick, how they are written, and where on the picture a value lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raydl.metrics.ticks import nice_step

_ROOM = 0.002
"""Where 100% lies on an axis stretched towards it; a logarithm alone never gets there."""
_ACCURACY_TICKS = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
_LONG_LOG = 20
"""Values whose greatest is so many times their least are drawn on a logarithmic axis."""
_UNITS = ((600.0, 1.0, "seconds"), (36000.0, 60.0, "minutes"), (math.inf, 3600.0, "hours"))


def _same(value: float) -> float:
    return value


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def short(value: float) -> str:
    """Return a number as an axis shows it: ``0.05``, ``250``, ``12k``, ``1.5M``."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{sign}"
    return f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Takes values to pixels along one axis."""

    low: float
    high: float
    first_px: float
    """Where ``low`` lies; above ``last_px`` for an axis that points up."""
    last_px: float
    ticks: tuple[float, ...]
    warp: Callable[[float], float] = _same
    """A rising function; equal steps of it are equally far apart."""
    label: Callable[[float], str] = short
    """How a value is written."""

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.warp(self.low), self.warp(self.high)
        share = (self.warp(value) - low) / (high - low)
        return self.first_px + share * (self.last_px - self.first_px)


def nice_ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Return the multiples of a nice step from ``low`` to ``high``, both included."""
    step = nice_step(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(float(f"{i * step:.10g}") for i in range(first, last + 1))


def linear(
    values: Sequence[float],
    first_px: float,
    last_px: float,
    *,
    from_zero: bool = False,
    tight: bool = False,
) -> Scale:
    """Return an axis for values, at least one.

    Args:
        values: finite.
        first_px: of the least value.
        last_px: of the greatest.
        from_zero: begin at 0, if no value lies below.
        tight: end at the greatest value instead of the next tick.
    """
    low, high = min(values), max(values)
    if from_zero and low >= 0:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: some room around it
        room = 0.5 * abs(high) or 0.5
        low, high = (low if from_zero and low == 0 else low - room), high + room
    step = nice_step(high - low, 5)
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = nice_ticks(low, high)
    return Scale(low=low, high=high, first_px=first_px, last_px=last_px, ticks=ticks)


def logarithmic(values: Sequence[float], first_px: float, last_px: float) -> Scale:
    """Return a logarithmic axis for positive values; a linear one where that would show less."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < _LONG_LOG:
        return linear(values, first_px, last_px)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [m * 10.0**d for d in decades for m in factors]
    inside = tuple(float(f"{t:.6g}") for t in ticks if low <= t * (1 + 1e-9) <= high * (1 + 2e-9))
    return Scale(
        low=low, high=high, first_px=first_px, last_px=last_px, ticks=inside, warp=math.log10
    )


def accuracies(values: Sequence[float], first_px: float, last_px: float) -> Scale:
    """Return an axis for shares from 0 to 1, stretched towards 1 once a value passes 0.9.

    There the way from 98% to 99% is as far as from 80% to 90%.
    """
    if min(values) < 0 or not 0.9 < max(values) <= 1:
        plain = linear(values, first_px, last_px)
        low, high = max(0.0, plain.low), min(1.0, plain.high)
        if min(values) < 0 or max(values) > 1 or low >= high:
            return plain
        return Scale(
            low=low, high=high, first_px=first_px, last_px=last_px,
            ticks=nice_ticks(low, high), label=_percent,
        )  # fmt: skip
    low, high = max(0.0, min(values) - 0.01), min(1.0, max(values) + 0.002)
    inside = tuple(t for t in _ACCURACY_TICKS if low <= t <= high)
    if len(inside) < 3:
        inside = nice_ticks(low, high)
    return Scale(
        low=low, high=high, first_px=first_px, last_px=last_px,
        ticks=inside, warp=_towards_one, label=_percent,
    )  # fmt: skip


def _towards_one(share: float) -> float:
    return -math.log10(1 + _ROOM - share)


def unit_of_time(longest_s: float) -> tuple[float, str]:
    """Return (seconds per unit, its name) for an axis that ends at ``longest_s``."""
    return next((size, name) for limit, size, name in _UNITS if longest_s < limit)
