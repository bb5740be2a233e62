"""Samples per second, of the newest records."""

from __future__ import annotations

from collections import deque

_OVER_S = 2.0
"""Over so many seconds, or more: records come several at once."""


class RecentSpeed:
    """The speed of a run by its newest records."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, num_samples: int) -> None:
        """Take note of the samples so far at a moment, in seconds; fewer than before: anew."""
        if self._seen and num_samples < self._seen[-1][1]:
            self._seen.clear()  # the center went back
        self._seen.append((now, num_samples))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _OVER_S:
            self._seen.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None: too little was seen."""
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
