"""The points of the curves, on their way to the recorder."""

from __future__ import annotations

from raydl.control.state import Recorder
from raydl.reports import Record, WorkerReport


class Curves:
    """Hands on records, and tells whether the training goes on.

    Args:
        recorder: where they go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.last: Record | None = None
        self._recorder = recorder

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return int(self.last.epoch) if self.last else 0

    def take(self, records: tuple[Record, ...], reports: dict[str, WorkerReport]) -> bool:
        """Hand on records with the newest reports; return whether more samples were seen."""
        has_progress = False
        for record in records:
            before, self.last = self.last, record
            has_progress |= before is None or record.num_samples > before.num_samples
            self._recorder.record(record, reports)
        return has_progress
