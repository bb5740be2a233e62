"""Measures how long no worker trained, from the reports of all workers.

A worker trains while it computes the gradients of its local steps. While it waits for an exchange,
for a worker that was lost, for data or for a new generation, it does not train.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from raydl.core.reports import WorkerReport
from raydl.metrics.time_parts import COMPUTING_PART

_BETWEEN_REPORTS_S = 1.0
"""Longest time between two reports within which a worker that has computed counts as training all
the time: how its local steps are spread over a longer time is not known."""
_NUM_OPEN = 16
"""Newest pauses that a report may still shorten: reports of other workers may arrive first."""


class TrainingPauses:
    """The times in which no worker trained, since the first local step."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, float, int]] = {}
        """By worker, the time of its newest report, and how long and in how many local steps it had
        computed by then."""
        self._until: float | None = None
        """The latest time at which a worker is known to have trained."""
        self._open: deque[tuple[float, float]] = deque()
        self._longest_closed_s = 0.0

    def note(self, report: WorkerReport, now: float) -> None:
        """Record a report of a worker.

        Args:
            report: the report.
            now: when it arrived, in seconds, by a clock that rises.
        """
        computed_s = report.time_parts.get(COMPUTING_PART, 0.0)
        before = self._newest.get(report.worker_id, (-math.inf, 0.0, 0))
        reported_at, computed_before_s, steps_before = before
        self._newest[report.worker_id] = now, computed_s, report.local_step
        if (trained_s := computed_s - computed_before_s) <= 0:
            return
        since_report_s = now - reported_at
        end = now - min(report.idle_s, since_report_s)
        begin = end - trained_s
        if since_report_s <= _BETWEEN_REPORTS_S:
            # The first of several computations may have begun before the last report, and none
            # says how long it waited between them; nor, in a further one, when the last has ended.
            is_one = report.local_step <= steps_before + 1 and report.idle_s > 0
            begin = min(reported_at, begin if is_one else begin - (end - reported_at))
        self._add_training(begin, end)

    def keep_only(self, worker_ids: Collection[str]) -> None:
        """Forget the reports of all other workers; their training counts."""
        self._newest = {w: newest for w, newest in self._newest.items() if w in worker_ids}

    @property
    def longest_s(self) -> float:
        """The longest time in which no worker trained, between two local steps, in seconds."""
        open_s = (end - begin for begin, end in self._open)
        return max(self._longest_closed_s, *open_s, 0.0)

    def _add_training(self, begin: float, end: float) -> None:
        """Take the time of a worker's training out of the pauses, and add the pause before it."""
        if self._open and self._open[-1][1] > begin:
            parts = [
                part
                for pause_begin, pause_end in self._open
                for part in (
                    (pause_begin, min(pause_end, begin)),
                    (max(pause_begin, end), pause_end),
                )
                if part[0] < part[1]
            ]
            self._open = deque(parts)
        if self._until is not None and begin > self._until:
            self._open.append((self._until, begin))
        while len(self._open) > _NUM_OPEN:
            closed_begin, closed_end = self._open.popleft()
            self._longest_closed_s = max(self._longest_closed_s, closed_end - closed_begin)
        self._until = end if self._until is None else max(self._until, end)
