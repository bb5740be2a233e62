"""The points of the curves, on their way to the recorder."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from raydl.core.reports import Record, WorkerReport
from raydl.elastic.state import Recorder

_NUM_DELAYS = 32
"""So many of the newest messages of a process tell how its clock stands to ours."""
_NUM_SENDERS = 4
"""Processes whose messages are remembered: the center, or rank 0, which is another one at times."""


class RecordForwarder:
    """Hands on records, and tells whether the training goes on.

    Records come several at once, whenever their process was asked. When each happened is known by
    the clock of that process; how that stands to ours, by the message that came through fastest.

    Args:
        recorder: where they go.
        clock: seconds, rising; the driver's.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self.last: Record | None = None
        self._recorder = recorder
        self._clock = clock
        self._delays: dict[str, deque[float]] = {}

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return int(self.last.progress.epoch) if self.last else 0

    def add_records(
        self,
        records: tuple[Record, ...],
        reports: dict[str, WorkerReport],
        *,
        sender: str,
        told_s: float,
    ) -> bool:
        """Hand on records with the newest reports; return whether more samples were seen.

        Args:
            records: new ones, oldest first; there may be none.
            reports: the newest of each worker.
            sender: the process that told of them.
            told_s: when it did, by its clock.
        """
        now = self._clock()
        # The newest sender is the last one of the dict.
        delays = self._delays.pop(sender, None) or deque(maxlen=_NUM_DELAYS)
        delays.append(now - told_s)
        self._delays[sender] = delays
        if len(self._delays) > _NUM_SENDERS:
            del self._delays[next(iter(self._delays))]
        has_progress = False
        for record in records:
            before = self.last.progress.num_samples if self.last else -1
            has_progress |= record.progress.num_samples > before
            self.last = self._placed(record, min(delays), now)
            self._recorder.record(self.last, reports)
        return has_progress

    def _placed(self, record: Record, delay_s: float, now: float) -> Record:
        """Return a record with its moment on our clock: neither before others nor to come."""
        earliest = self.last.at_s if self.last else record.at_s + delay_s
        at_s = min(now, max(earliest, record.at_s + delay_s))
        return dataclasses.replace(record, at_s=at_s)
