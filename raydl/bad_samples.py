"""Adds up the samples that workers could not read, and says so, less often the more there are."""

from __future__ import annotations

from collections.abc import Container, Mapping

from raydl.reports import WorkerReport


class BadSamples:
    """The samples that were left out, over all workers there ever were."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}
        self._num_of_gone = 0
        self._tell_from = 1

    @property
    def num_samples(self) -> int:
        """How many."""
        return self._num_of_gone + sum(self._by_worker.values())

    def keep(self, worker_ids: Container[str]) -> None:
        """Forget whose the samples were, but for these workers: the others have gone."""
        gone = [w for w in self._by_worker if w not in worker_ids]
        self._num_of_gone += sum(self._by_worker.pop(w) for w in gone)

    def note(self, reports: Mapping[str, WorkerReport]) -> str:
        """Take in the newest reports; return a sentence where one is due, else nothing."""
        last = ""
        for worker_id, report in reports.items():
            if report.left_out.num_samples > self._by_worker.get(worker_id, 0):
                self._by_worker[worker_id] = report.left_out.num_samples
                last = report.left_out.last
        if not last or self.num_samples < self._tell_from:
            return ""
        self._tell_from = 2 * self.num_samples
        count = f"{self.num_samples:,} samples" if self.num_samples > 1 else "a sample"
        return f"left out {count} that can not be read; the last: {last}"
