"""Round steps for the axes of pictures."""

from __future__ import annotations

import math


def nice_step(span: float, most: int) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that parts ``span`` into at most ``most``.

    >>> nice_step(100, 6), nice_step(0.7, 5)
    (20.0, 0.2)
    """
    rough = span / most
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
