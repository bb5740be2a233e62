"""The job that all workers of a run share: settings, method, task, data and first model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from raydl.config import TrainConfig
from raydl.core.flat import FlatModel
from raydl.core.methods import Method
from raydl.core.non_trainable import NonTrainable
from raydl.data import Order
from raydl.faults import FaultPlan
from raydl.tasks import DataShape, Task, build_model


class BeforeStep(Protocol):
    """Is told of a local step that is about to begin; see ``raydl.faults.Injector``."""

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
    """Settings and objects that all workers of a run share."""

    config: TrainConfig
    method: Method
    task: Task
    shape: DataShape
    order: Order
    """In which order the training samples come."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Injected faults, for chaos testing."""


def first_model(job: Job, non_trainable: NonTrainable | None, *, device: str = "cpu") -> FlatModel:
    """Return a model with the non-trainable state that the run's first model has.

    Args:
        job: says which model, and from which seed.
        non_trainable: that state, by name; None: it is as the model is built.
        device: where the model goes.

    Raises:
        ShapeError: this process builds another model than the first one.
    """
    model = build_model(job.task, job.shape, seed=job.config.training.seed).to(device)
    names = None if non_trainable is None else non_trainable.keys()
    flat = FlatModel(model, name=job.task.name, non_trainable=names)
    if non_trainable is None:
        flat.non_trainable.mark()
    else:
        flat.non_trainable.load_first(non_trainable)
    return flat
