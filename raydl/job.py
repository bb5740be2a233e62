"""What all workers of a run share, and who is told of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from raydl.config import TrainConfig
from raydl.data import Order
from raydl.faults import FaultPlan
from raydl.method import Method
from raydl.task import DataShape, Task


class BeforeStep(Protocol):
    """Is told of a local step that is about to begin; see :class:`raydl.faults.Injector`."""

    def __call__(
        self,
        worker_id: str,
        *,
        rank: int,
        num_workers: int,
        local_step: int,
        round: int,
        seconds: float,
    ) -> None:
        """Do as the step requires; may block, or not come back."""
        ...


@dataclass(frozen=True)
class Job:
    """What all workers of a run share."""

    config: TrainConfig
    method: Method
    task: Task
    shape: DataShape
    order: Order
    """In which order the training samples come."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    """What is inflicted on the run, for chaos testing."""
