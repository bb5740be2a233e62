"""Forwards the points of the curves to the recorder."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from raydl.core.reports import Record, WorkerReport
from raydl.elastic.run_state import Recorder

_NUM_DELAYS = 32
"""The newest messages of a process from which its clock offset is estimated."""
_NUM_SENDERS = 4
"""Processes whose delays are kept: the center, or the workers that were rank 0 last."""


class RecordForwarder:
    """Forwards records.

    Records arrive several at a time, when their process is polled. Their times are by the clock of
    that process; its fastest recent message gives the offset to the driver's clock.

    Args:
        recorder: the destination.
        clock: seconds, rising; the driver's.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self.last: Record | None = None
        self._recorder = recorder
        self._clock = clock
        self._delays: dict[str, deque[float]] = {}

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return int(self.last.progress.epoch) if self.last else 0

    def add_records(
        self,
        records: tuple[Record, ...],
        reports: dict[str, WorkerReport],
        *,
        sender: str,
        sent_s: float,
    ) -> None:
        """Forward records with the newest reports.

        Args:
            records: new records, oldest first; may be empty.
            reports: the newest report of each worker.
            sender: the process that sent the records.
            sent_s: when it sent them, by its own clock, in seconds.
        """
        now = self._clock()
        # Reinserted, so that the dict is in the order of the newest messages.
        delays = self._delays.pop(sender, None) or deque(maxlen=_NUM_DELAYS)
        delays.append(now - sent_s)
        self._delays[sender] = delays
        if len(self._delays) > _NUM_SENDERS:
            del self._delays[next(iter(self._delays))]
        for record in records:
            # By the driver's clock, neither before the last record nor in the future.
            at_s = record.at_s + min(delays)
            at_s = min(now, max(self.last.at_s if self.last else at_s, at_s))
            self.last = dataclasses.replace(record, at_s=at_s)
            self._recorder.record(self.last, reports)
