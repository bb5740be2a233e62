"""Counts what compressed messages have left out and no later message will contain."""

from __future__ import annotations

from collections.abc import Callable

from raydl.config import TrainConfig
from raydl.core.compression import LostResidual
from raydl.core.method import Method
from raydl.core.saved_state import SavedState


def may_leave_out(config: TrainConfig, method: Method) -> bool:
    """Whether messages of a run may leave something out for later ones: see ``ErrorFeedback``."""
    is_lossy = method.compression != "none" or method.finds_tuning
    return is_lossy and method.leaves_out


class LostResiduals:
    """The residuals lost since the driver started.

    Args:
        log: logs one line.
        may_exist: whether messages of this run may leave something out.
    """

    def __init__(self, log: Callable[[str], None], *, may_exist: bool) -> None:
        self.count = 0
        """The number of residuals lost."""
        self.may_exist = may_exist
        self._log = log
        self._passed_on: list[tuple[SavedState, str, float]] = []
        """The saved states of leavers, with the leaver and the norm of its residual."""

    def note(self, worker_id: str, lost: LostResidual) -> None:
        """Count and log what a worker has lost; nothing if its messages have left out nothing."""
        if lost.norm or (lost.norm is None and self.may_exist):
            self.count += 1
            self._log(lost.sentence(worker_id))

    def pass_on(self, state: SavedState, worker_id: str, norm: float) -> None:
        """Note that a leaver's saved state has its residual."""
        self._passed_on.append((state, worker_id, norm))

    def note_taken(self, state: SavedState) -> None:
        """Note that another worker continues from a leaver's saved state."""
        self._passed_on = [other for other in self._passed_on if other[0] is not state]

    def note_not_taken(self, state: SavedState) -> None:
        """Note that no worker will continue from a leaver's saved state."""
        for passed, worker_id, norm in self._passed_on:
            if passed is state:
                self.note(worker_id, LostResidual(norm, "no worker continues from its state"))
        self.note_taken(state)
