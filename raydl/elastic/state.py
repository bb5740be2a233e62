"""The states of a run, and the recorder that the controller reports to."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from raydl.core.membership import Membership
from raydl.core.reports import Record, WorkerReport
from raydl.core.worker_group import Collected, Evaluated


class State(enum.Enum):
    """Progress and state of a run."""

    WAITING = "waiting for workers"
    TRAINING = "training"
    REGROUPING = "regrouping"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    DONE = "done"


class Recorder(Protocol):
    """Takes what the controller learns to people and files."""

    def event(self, sentence: str) -> None:
        """Take one line on what the cluster did."""
        ...

    def formed(self, membership: Membership, reason: str) -> None:
        """Take a new membership, and why it is."""
        ...

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        """Take a point of the curves, and the newest report of each worker."""
        ...

    def evaluated(self, evaluated: Evaluated) -> None:
        """Take a score of the center."""
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
        """Whether the storage has not answered for so long that nothing should wait for it."""
        ...

    def show(self, state: State, workers: Mapping[str, int]) -> None:
        """Refresh what a person sees; ``workers``: how many stand where, by word."""
        ...
