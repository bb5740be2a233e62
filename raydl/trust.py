"""How far a replica is trusted, by the trend of its distance to the center.

A worker that comes back after a failure is far from where the others went. With dynamic
weights it is pulled hard and pulls the center little:

    u       log of the distance between replica and center at an exchange
    a       u minus the median of the newest u before
    f       0 for a <= log 2, 1 for a >= log 8, a straight line between
    x <- x - (alpha*(1 - f) + f) * (x - c) ; c <- c + alpha*(1 - f)*(x - c)

With f = 0 this is elastic averaging, with f = 1 the replica starts again at the center. Our
reading of Xu and Carr, arXiv 2409.09242, of which we know the idea (weights by the trend of
the log distance), not the formulas: the score and its limits are ours.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_GRACE, _LIMIT = math.log(2), math.log(8)
_REMEMBERED, _NEEDED = 8, 4


class DistanceTrend:
    """Follows one replica's distance to one span of the center."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=_REMEMBERED)

    def distrust(self, distance: float) -> float:
        """Take in the distance at an exchange; return f, 0 (trusted) to 1.

        The first exchanges are trusted: distances grow from zero in every run.
        """
        if distance <= 0:
            return 0.0
        log = math.log(distance)
        if len(self._logs) < _NEEDED:
            self._logs.append(log)
            return 0.0
        usual = statistics.median(self._logs)
        # A jump counts as a small one, or the next one would look small beside it.
        self._logs.append(min(log, usual + _GRACE))
        return min(1.0, max(0.0, (log - usual - _GRACE) / (_LIMIT - _GRACE)))

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen."""
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._logs = deque(state["logs"], maxlen=_REMEMBERED)


class DynamicWeights:
    """How far one replica is trusted at each span of the center, by the span's start.

    Args:
        is_on: without dynamic weights it is always trusted.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._dynamic_weights: dict[int, DistanceTrend] = {}
        self._distrust: dict[int, float] = {}

    def take(self, start: int, distance: float) -> None:
        """Take in the distance to a span at an exchange."""
        self._distrust[start] = self._dynamic_weights.setdefault(start, DistanceTrend()).distrust(
            distance
        )

    def distrust_at(self, start: int) -> float:
        """Return f at a span's newest exchange, 0 (trusted) to 1."""
        return self._distrust.get(start, 0.0)

    def state(self) -> list[list[Any]]:
        """Return what was seen at each span."""
        return [[start, trust.state_dict()] for start, trust in self._dynamic_weights.items()]

    def load(self, state: list[list[Any]]) -> None:
        """Take over what :meth:`state` returned, where that matters."""
        for start, seen in state if self.is_on else ():
            self._dynamic_weights[start] = DistanceTrend()
            self._dynamic_weights[start].load_state_dict(seen)
