"""The states of a run, and the recorder that the controller reports to."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol

from raydl.core.membership import Membership
from raydl.core.reports import Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import Collected


class State(enum.Enum):
    """The state of a run."""

    WAITING = "waiting for workers"
    TRAINING = "training"
    REGROUPING = "regrouping"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    DONE = "done"


class Recorder(Protocol):
    """Shows and stores the results of the controller."""

    def event(self, sentence: str) -> None:
        """Log one line about an event of the run."""
        ...

    def note(self, fact: Any) -> None:
        """Keep a fact in the history of the run; see ``raydl.elastic.facts``."""
        ...

    def formed(self, membership: Membership, reason: str) -> None:
        """Record a new membership, and the reason for it."""
        ...

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        """Record a point of the curves, with the newest report of each worker."""
        ...

    def evaluated(self, evaluated: Evaluated) -> None:
        """Record a score of the center."""
        ...

    def checkpoint(self, collected: Collected) -> None:
        """Write a checkpoint; must not block for long."""
        ...

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        ...

    @property
    def is_given_up(self) -> bool:
        """Whether the storage has been silent for too long, so that nothing should wait for it."""
        ...

    def show(self, state: State, workers: Mapping[str, int]) -> None:
        """Refresh the display; ``workers`` is the number of workers by the name of their phase."""
        ...
