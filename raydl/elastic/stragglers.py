"""Detects stragglers in rounds: workers that the others wait for longer than usual.

The limit is no constant. It follows from the durations of recent rounds, their spread, and the cost
of continuing without a worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

_FEWEST_ROUNDS = 5
_SPREADS = 6.0
"""Standard deviations above the median at which a round counts as unusual: one in a billion rounds,
if their durations are normally distributed."""
_FIRST_PAUSE_S = 0.5
"""Assumed cost of a pause until one was measured, in seconds."""
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""
_ROUNDING = 1e-9
"""Rounding error of a share of the workers: in floating point, 7/25 of 25 exceeds 7."""


class StragglerDetector:
    """The durations of rounds, and the cost of continuing without a worker."""

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=101)
        self._pauses: deque[float] = deque(maxlen=5)
        self._newest_round = -1
        self._paused_at: float | None = None
        self._paused_generation = 0
        self._lacks_workers = False

    def note_round(self, round: int, seconds: float) -> None:
        """Record the duration of a round. Several workers report the same round."""
        if round > self._newest_round and seconds > 0:
            self._newest_round = round
            self._rounds.append(seconds)

    def pause(self, now: float, generation: int) -> None:
        """Begin a pause, unless one is under way: no member of a generation trains any more.

        A generation that breaks before it has trained does not end the pause.
        """
        self._paused_generation = max(self._paused_generation, generation)
        if self._paused_at is None:
            self._paused_at, self._lacks_workers = now, False

    def wait_for_workers(self) -> None:
        """Note that too few workers are left: this pause is no measure of a regrouping."""
        self._lacks_workers = True

    def resume(self, now: float, generation: int) -> None:
        """End the pause, if a worker reports from a generation newer than the paused one.

        Between two generations workers still report the older one.
        """
        if self._paused_at is None or generation <= self._paused_generation:
            return
        seconds, self._paused_at = now - self._paused_at, None
        if not self._lacks_workers:
            self._pauses.append(seconds)

    def grace_s(self) -> float:
        """Return the seconds to wait for a straggler; infinite during the first rounds.

        Leaving a worker out costs two pauses: one now and one when it rejoins. A shorter wait is
        cheaper, however unusual it is.
        """
        if len(self._rounds) < _FEWEST_ROUNDS:
            return math.inf
        middle = median(self._rounds)
        spread = _MAD_TO_SIGMA * median(abs(s - middle) for s in self._rounds)
        pause_s = median(self._pauses) if self._pauses else _FIRST_PAUSE_S
        return middle + _SPREADS * spread + 2 * pause_s


def late_workers(
    waiting_s: Mapping[str, float], *, grace_s: float, quorum: float
) -> tuple[str, ...]:
    """Return the workers to leave out.

    Args:
        waiting_s: by worker, how long it has waited for the others, or 0 while it still computes.
        grace_s: the longest wait, in seconds.
        quorum: the share of workers, in (0, 1], that must have waited longer than ``grace_s``.
    """
    needed = max(1, math.ceil(quorum * len(waiting_s) - _ROUNDING))
    waits = sorted(waiting_s.values(), reverse=True)
    if not waits or waits[needed - 1] <= max(grace_s, 0.0):
        return ()
    return tuple(w for w, seconds in waiting_s.items() if seconds == 0.0)
