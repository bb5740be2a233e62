"""What is learned: a task builds the model, and knows the loss and the metrics of a batch.

The worker's loop knows nothing else of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl import models
from raydl.errors import ShapeError
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


@runtime_checkable
class ChecksOutput(Protocol):
    """A task that can say before a run whether a model's output fits the data."""

    def check_output(self, model: nn.Module, inputs: Tensor, shape: DataShape) -> None:
        """Raise a ShapeError if the output does not fit."""
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
        """Return a new model for pictures of this shape.

        Raises:
            ShapeError: the factory does not take (image shape, number of classes).
        """
        _check_takes_two(self._factory, self.name)
        return self._factory(shape.image_shape, shape.num_classes)

    def check_output(self, model: nn.Module, inputs: Tensor, shape: DataShape) -> None:
        """Compute the logits of some inputs, and see that there is one for each class.

        Raises:
            ShapeError: they are not of shape [B, num_classes].
        """
        wanted = [len(inputs), shape.num_classes]
        logits = model(inputs)
        if not isinstance(logits, Tensor) or list(logits.shape) != wanted:
            is_tensor = isinstance(logits, Tensor)
            found = f"shape {list(logits.shape)}" if is_tensor else f"a {type(logits).__name__}"
            raise ShapeError(
                self.name,
                f"must return logits of shape {wanted} for {len(inputs)} samples of "
                f"{shape.num_classes} classes, it returned {found}",
            )

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


def _check_takes_two(factory: Callable[..., object], name: str) -> None:
    """Refuse what can not be called with (image shape, number of classes)."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: the call will tell
        return
    try:
        signature.bind((1, 1, 1), 1)
    except TypeError as error:
        problem = f"must be built from (image shape, number of classes), it takes {signature}"
        raise ShapeError(name, f"{problem}: {error}") from error


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
