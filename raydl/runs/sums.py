"""What a start of a run has come to at each of its records, so that it can be told at any round.

A checkpoint is written some rounds after its own: what lies between is trained again by whoever
goes on from it, and would be counted twice.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sum:
    """What a start has come to at a round."""

    round: int
    seconds: float
    """Training time over all starts."""
    staleness_sum: float = 0.0
    """Of the rounds of this start."""
    period_sum: float = 0.0
    """Local steps before each exchange, over the rounds of this start."""
    time_parts: dict[str, float]
    """Mean seconds per worker by part, of this start."""
    at_s: float = 0.0
    """When it was there, by the driver's monotonic clock."""
    trained_s: float = 0.0
    """Seconds of training up to there, by the workers' clocks."""


_MOST = 1024
"""Sums that are kept. At five records a second all of the last 100 s are; older ones lie apart."""


class Sums:
    """The sums at the records since the newest checkpoint, oldest first.

    Without checkpoints there are ever more of them: then every other one of the older half goes.

    Args:
        first: where the start begins.
    """

    def __init__(self, first: Sum) -> None:
        self._notes = [first]

    def add(self, note: Sum) -> None:
        """Note a record; of those at its round or beyond, the center went back."""
        at = bisect.bisect_left(self._notes, note.round, key=lambda known: known.round)
        self._notes[at:] = [note]
        if len(self._notes) > _MOST:
            half = _MOST // 2
            self._notes[:half] = self._notes[:half:2]  # the oldest, where this start began, stays

    @property
    def newest(self) -> Sum:
        """That of the newest record."""
        return self._notes[-1]

    def before(self, round: int) -> Sum:
        """Return the newest of an earlier round, or the oldest that is known."""
        at = bisect.bisect_left(self._notes, round, key=lambda known: known.round)
        return self._notes[max(at - 1, 0)]

    def up_to(self, round: int) -> Sum:
        """Return that of a round, or the newest of an earlier one, or the oldest that is known."""
        at = bisect.bisect_right(self._notes, round, key=lambda known: known.round)
        return self._notes[max(at - 1, 0)]

    def take(self, round: int) -> Sum:
        """Return the sum of a checkpoint's round, or the newest before it; forget what is older."""
        taken = self.up_to(round)
        self._notes = self._notes[self._notes.index(taken) :]
        return taken
