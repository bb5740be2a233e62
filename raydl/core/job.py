"""The job that all workers of a run share: settings, method, task, data and first model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from raydl.config import TrainConfig
from raydl.core.flat import FlatModel
from raydl.core.method import Method
from raydl.core.non_trainable import NonTrainable
from raydl.core.sharing import move
from raydl.data import Order
from raydl.faults import FaultPlan
from raydl.tasks import DataShape, Task, build_model


class BeforeStep(Protocol):
    """Called before each local step; see ``raydl.faults.Injector``."""

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
        """Inject the faults due at this step; may block, or never return."""
        ...


@dataclass(frozen=True)
class Job:
    """Settings and objects that all workers of a run share."""

    config: TrainConfig
    method: Method
    task: Task
    shape: DataShape
    order: Order
    """Order of the training samples."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Injected faults, for chaos testing."""
    unfrozen: tuple[str, ...] = ()
    """Parameters that are trained although the model is built with them frozen; see ``FlatModel``.
    """


def first_model(job: Job, non_trainable: NonTrainable | None, *, device: str = "cpu") -> FlatModel:
    """Build the model with the non-trainable state of the run's first model.

    Args:
        job: names the model and the seed.
        non_trainable: that state, by name, or None to keep the state of the new model.
        device: device of the model.

    Raises:
        ShapeError: if this process builds a model that differs from the first one.
    """
    model = move(build_model(job.task, job.shape, seed=job.config.training.seed), device)
    names = None if non_trainable is None else non_trainable.keys()
    flat = FlatModel(model, name=job.task.name, non_trainable=names, unfrozen=job.unfrozen)
    if non_trainable is None:
        flat.non_trainable.mark()
    else:
        flat.non_trainable.load_first(non_trainable)
    return flat
