"""Samples per second, from the newest records."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 2.0
"""Least seconds to average over, since several records may come at once."""


class RecentSpeed:
    """The speed of a run, from its newest records."""

    def __init__(self) -> None:
        self._records: deque[tuple[float, int]] = deque()

    def note(self, now: float, num_samples: int) -> None:
        """Record the samples trained up to a time, in seconds; start again if they decreased."""
        if self._records and num_samples < self._records[-1][1]:
            self._records.clear()  # the run went back to an earlier center
        self._records.append((now, num_samples))
        while len(self._records) > 2 and now - self._records[1][0] >= _WINDOW_S:
            self._records.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second, or None with fewer than two records."""
        if len(self._records) < 2:
            return None
        (first_s, first), (last_s, last) = self._records[0], self._records[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
