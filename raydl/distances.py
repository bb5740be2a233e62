"""How far a replica was from the center when it last exchanged each span."""

from __future__ import annotations

from collections.abc import Mapping


class Distances:
    """Squared distances of one replica, by the start of each span of the center.

    Fragments may change from one round to the next: what was known of a span goes once another
    one that covers its start is noted.
    """

    def __init__(self) -> None:
        self._squares: dict[int, float] = {}

    def note(self, span: slice, squares: float) -> None:
        """Take in the squared distance of a span."""
        within = range(span.start, span.stop)
        kept = {start: before for start, before in self._squares.items() if start not in within}
        self._squares = {**kept, span.start: squares}

    def total(self) -> float:
        """Return the squared distance of all spans together."""
        return sum(self._squares.values())

    def state(self) -> dict[int, float]:
        """Return what is kept in a checkpoint."""
        return dict(self._squares)

    def load(self, state: Mapping[int, float]) -> None:
        """Take over what :meth:`state` returned."""
        self._squares = dict(state)
