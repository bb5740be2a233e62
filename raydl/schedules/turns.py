"""Whose turn it is, for methods in rank order: the center's side of ``round_robin``."""

from __future__ import annotations

from collections.abc import Callable


class Turns:
    """A turn that goes round the workers of a membership, in the order of their ranks.

    It is kept by id rather than by place: joins and losses before it do not move it.
    """

    def __init__(self) -> None:
        self._order: tuple[str, ...] = ()
        self._whose: str | None = None

    def open(self, order: tuple[str, ...]) -> None:
        """Begin with the first of an order."""
        self._order, self._whose = order, order[0] if order else None

    def change(self, order: tuple[str, ...]) -> None:
        """Go on in another order. The turn of one that is gone falls to the next who stays."""
        if self._whose not in order:
            staying = [worker_id for worker_id in self._round() if worker_id in order]
            self._whose = next(iter([*staying, *order]), None)
        self._order = order

    def holder(self, takes_turns: Callable[[str], bool]) -> str | None:
        """Return whose turn it is, if anyone's.

        The turn passes over those that take none, for good: it stays with the next one even
        if they take turns again.
        """
        if self._whose is not None and takes_turns(self._whose):
            return self._whose  # as nearly always, and all who wait for theirs ask
        for worker_id in self._round():
            if takes_turns(worker_id):
                self._whose = worker_id
                return worker_id
        return None

    def end(self, worker_id: str) -> None:
        """Give the turn to the next, if it is this worker's."""
        if self._whose == worker_id:
            self._whose = (*self._round(), worker_id)[1]

    def _round(self) -> tuple[str, ...]:
        """Return all workers, beginning with whose turn it is."""
        if self._whose is None:
            return self._order
        place = self._order.index(self._whose)
        return self._order[place:] + self._order[:place]
