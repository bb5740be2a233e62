"""What is learned: a task builds the model, and knows the loss and the metrics of a batch.

The worker's loop knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl import models
from raydl.models import ModelFactory

Batch = tuple[Tensor, Tensor]
"""Inputs, shape [B, ...], and labels, int64, shape [B]."""


@dataclass(frozen=True)
class DataShape:
    """What a task must know of the data to build a model."""

    image_shape: tuple[int, int, int]
    """Channels, height, width."""
    num_classes: int


class Task(Protocol):
    """What the worker's loop asks of what is learned."""

    @property
    def name(self) -> str:
        """The name of the model, for messages."""
        ...

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model; its weights may depend on torch's global seed."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch, a scalar with a gradient."""
        ...

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the batch, by name; ``loss`` and ``accuracy`` among them."""
        ...


@runtime_checkable
class Predicts(Protocol):
    """A task that can say which class an input belongs to; of others no examples are shown."""

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return a class for each input, int64, shape [B]."""
        ...


class Classification:
    """Pictures into classes, by cross entropy.

    Args:
        model: a name in ``raydl models``, ``torchvision:NAME``, ``module:function``, or a
            function of (image shape, number of classes) that returns a module with logits of
            shape [B, num_classes].
    """

    def __init__(self, model: str | ModelFactory = "lenet") -> None:
        self._factory = models.find(model) if isinstance(model, str) else model
        self.name = model if isinstance(model, str) else getattr(model, "__name__", "model")

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for pictures of this shape."""
        return self._factory(shape.image_shape, shape.num_classes)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the summed cross entropy and the number of right answers."""
        inputs, labels = batch
        logits = model(inputs)
        return {
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (logits.argmax(1) == labels).sum(),
        }

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the class with the highest logit, int64, shape [B]."""
        logits: Tensor = model(inputs)
        return logits.argmax(1)


def evaluate(
    task: Task,
    model: nn.Module,
    get_batch: Callable[[int, int], Batch],
    *,
    num_samples: int,
    batch_size: int,
) -> dict[str, float]:
    """Return the mean of each metric over ``num_samples`` samples.

    The model is put into evaluation mode and back.

    Args:
        get_batch: returns the samples start..stop-1.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, float] = {}
    with torch.no_grad():
        for start in range(0, num_samples, batch_size):
            batch = get_batch(start, min(start + batch_size, num_samples))
            for key, value in task.metrics(model, batch).items():
                sums[key] = sums.get(key, 0.0) + float(value)
    model.train(was_training)
    return {key: value / num_samples for key, value in sums.items()}


def predict(task: Task, model: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    """Return the class of each input, by a model in evaluation mode; empty if the task has none.

    The model is put into evaluation mode and back.
    """
    if not isinstance(task, Predicts):
        return ()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        classes = task.predict(model, inputs)
    model.train(was_training)
    return tuple(int(number) for number in classes)
