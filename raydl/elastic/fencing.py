"""Counts late messages and files that were refused, and reports them at each doubling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_KINDS = {
    "snapshots": ("snapshot", "an earlier generation"),
    "messages": ("message", "outside the current membership"),
    "checkpoints": ("checkpoint", "an earlier driver"),
}
"""By kind: the name of one, and its origin."""


class Refusals:
    """Messages and files refused since the driver started."""

    def __init__(self) -> None:
        self._by_process: dict[str, Mapping[str, int]] = {}
        self._num_reported: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """The number refused, by kind. Kinds with none are absent."""
        total: Counter[str] = Counter()
        for refused in self._by_process.values():
            total.update(refused)
        return {kind: total[kind] for kind in _KINDS if total[kind]}

    def note_refused(self, process: str, refused: Mapping[str, int]) -> list[str]:
        """Record how much a process has refused, and return a sentence for each kind to report.

        A kind is reported at its first refusal and each time its count has more than doubled.

        Args:
            process: the refusing process; a restarted one counts as another.
            refused: the number refused so far, by kind.
        """
        self._by_process[process] = refused
        sentences = []
        for kind, count in self.counts.items():
            if count > self._num_reported[kind] * 2 or not self._num_reported[kind]:
                self._num_reported[kind] = count
                name, origin = _KINDS[kind]
                what = f"a late {name}" if count == 1 else f"{count:,} late {kind}"
                it = "it" if count == 1 else "they"
                sentences.append(f"refused {what} from {origin}: {it} changed nothing")
        return sentences
