"""Detects stragglers: workers that the others wait for longer than is usual, in rounds.

No constant says it: what recent rounds took, how much they differ, and what it costs to go on
without somebody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

_FEWEST_ROUNDS = 5
_SPREADS = 6.0
"""Spreads above the median at which a round is no usual one: with normally distributed rounds
one in a billion."""
_FIRST_PAUSE_S = 0.5
"""Assumed cost of a pause until one was measured, in seconds."""
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""
_ROUNDING = 1e-9
"""Rounding error of a share of the workers: 7/25 of 25 is a little more than 7."""


class StragglerDetector:
    """Durations of rounds, and the cost of going on without a worker."""

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=101)
        self._pauses: deque[float] = deque(maxlen=5)
        self._newest_round = -1
        self._paused_at: float | None = None
        self._paused_generation = 0
        self._lacks_workers = False
        self.longest_pause_s = 0.0
        """The longest time in which nobody trained, for whatever reason."""

    def note_round(self, round: int, seconds: float) -> None:
        """Note what a round took; several workers tell of the same one."""
        if round > self._newest_round and seconds > 0:
            self._newest_round = round
            self._rounds.append(seconds)

    def pause(self, now: float, generation: int) -> None:
        """Note that nobody of a generation trains any more, unless it was noted.

        One that breaks before it has trained ends no pause: the pause goes on beyond it.
        """
        self._paused_generation = max(self._paused_generation, generation)
        if self._paused_at is None:
            self._paused_at, self._lacks_workers = now, False

    def wait_for_workers(self) -> None:
        """Note that there are too few to go on: the pause says nothing of what forming costs."""
        self._lacks_workers = True

    def resume(self, now: float, generation: int) -> None:
        """Note that somebody is in a generation; it ends a pause if it is a newer one.

        Between two generations workers go on reporting from the one before.
        """
        if self._paused_at is None or generation <= self._paused_generation:
            return
        seconds, self._paused_at = now - self._paused_at, None
        self.longest_pause_s = max(self.longest_pause_s, seconds)
        if not self._lacks_workers:
            self._pauses.append(seconds)

    def grace_s(self) -> float:
        """Return the seconds to wait for a late worker; infinite while rounds are few.

        Leaving it out costs two pauses, one now and one when it comes back: a shorter wait
        is cheaper, however unusual it is.
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
    """Return the workers to go on without.

    Args:
        waiting_s: by worker, how long it has waited for the others; 0: it is still at work.
        grace_s: the longest wait.
        quorum: least share of the workers, in (0, 1], that must be there.
    """
    needed = max(1, math.ceil(quorum * len(waiting_s) - _ROUNDING))
    waits = sorted(waiting_s.values(), reverse=True)
    if not waits or waits[needed - 1] <= max(grace_s, 0.0):
        return ()
    return tuple(w for w, seconds in waiting_s.items() if seconds == 0.0)
