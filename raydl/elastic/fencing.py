"""Counts late messages and files that were refused, and logs them, less often as they grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_KINDS = {
    "snapshots": ("a late snapshot", "late snapshots", "an earlier generation had made"),
    "messages": (
        "a late message",
        "late messages",
        "a worker had sent that is no member any more",
    ),
    "checkpoints": ("a late checkpoint", "late checkpoints", "an earlier driver had written"),
}
"""By kind: one, many, and by whom."""


class Refusals:
    """Refused messages and files of this start of the run."""

    def __init__(self) -> None:
        self._by_process: dict[str, Mapping[str, int]] = {}
        self._tell_from: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """How many were refused, by kind; a kind of which none was is not there."""
        total: Counter[str] = Counter()
        for refused in self._by_process.values():
            total.update(refused)
        return {kind: total[kind] for kind in _KINDS if total[kind]}

    def note_refused(self, process: str, refused: Mapping[str, int]) -> list[str]:
        """Note what a process has refused so far; return a sentence for each kind with news.

        A kind is told when its first one is refused, and whenever there are twice as many.

        Args:
            process: which; one that is started again is another.
            refused: how many, by kind.
        """
        self._by_process[process] = refused
        sentences = []
        for kind, count in self.counts.items():
            if count > self._tell_from[kind] * 2 or not self._tell_from[kind]:
                self._tell_from[kind] = count
                one, many, who = _KINDS[kind]
                what, by = (one, "it") if count == 1 else (f"{count:,} {many}", "them")
                sentences.append(f"refused {what} that {who}: nothing was changed by {by}")
        return sentences
