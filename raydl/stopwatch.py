"""A stopwatch: seconds that count only while it runs."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """Counts the seconds in which somebody trains; at first it stands.

    Args:
        clock: seconds, rising.
        seconds: what it shows at first.
    """

    def __init__(self, clock: Callable[[], float], *, seconds: float = 0.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """What it shows."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def run(self, is_running: bool) -> None:
        """Let it run or stand from now on."""
        self._seconds = self.seconds
        self._since = self._clock() if is_running else None
