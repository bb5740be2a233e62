"""Tasks: each builds the model, and knows the loss and the metrics of a batch.

Images into classes, the next token of a text, a class of your own with the methods of
``Task``, or a task made of a model and a loss. The worker's loop knows nothing else of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl import models
from raydl.config import TrainConfig
from raydl.config.custom_code import made_of
from raydl.data.generators import seed_everything
from raydl.data.samples import Batch, DataShape, num_samples_of
from raydl.errors import ConfigError, DataError, ShapeError
from raydl.models import ModelFactory

__all__ = [
    "Batch", "Classification", "DataShape", "Derives", "LanguageModel", "Predicts", "Task",
    "build_model", "evaluate", "in_precision", "predict", "task_for", "task_on",
]  # fmt: skip


class Task(Protocol):
    """A task, as the worker's loop uses it."""

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
        """Return sums over the samples of the batch, by name; ``loss`` among them.

        ``accuracy``, where there is one, is what a run is followed and compared by.
        """
        ...


@runtime_checkable
class Predicts(Protocol):
    """A task that can say which class an input belongs to; of others no examples are shown."""

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return a class for each input, int64, shape [B]."""
        ...


@runtime_checkable
class Derives(Protocol):
    """A task with metrics that follow from the means of the others, and are no means."""

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return further metrics, by name.

        Args:
            means: of each metric over all samples that were scored.
        """
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
        label_smoothing: share of each label, in [0, 1), that the loss spreads over all classes;
            the metrics know nothing of it.
    """

    def __init__(
        self, model: str | ModelFactory = "lenet", *, label_smoothing: float = 0.0
    ) -> None:
        self.name, self._factory = _named(model)
        self._label_smoothing = label_smoothing

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for pictures of this shape.

        Raises:
            ShapeError: a model of the table does not take such data, or the factory does not
                take (image shape, number of classes).
        """
        return _built(self._factory, self.name, shape)

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
        return functional.cross_entropy(
            model(inputs), labels, label_smoothing=self._label_smoothing
        )

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


class LanguageModel:
    """The next token of a text, by cross entropy.

    Its metrics, for each sample the mean over its positions: ``loss``, in nats for a token;
    ``accuracy``, the share of next tokens that had the highest logit; and ``perplexity``,
    the exponential of the mean loss.

    Args:
        model: a name in ``raydl models``, ``module:function``, or a function of ((context,),
            size of the vocabulary) that returns a module with logits of shape
            [B, context, vocabulary] for tokens [B, context].
        label_smoothing: share of each token, in [0, 1), that the loss spreads over all.
    """

    def __init__(
        self, model: str | ModelFactory = "gpt-nano", *, label_smoothing: float = 0.0
    ) -> None:
        self.name, self._factory = _named(model)
        self._label_smoothing = label_smoothing

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for texts of this context and vocabulary.

        Raises:
            ShapeError: a model of the table does not take such data.
        """
        return _built(self._factory, self.name, shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy over all positions."""
        tokens, following = batch
        return functional.cross_entropy(
            model(tokens).flatten(0, 1),
            following.flatten(),
            label_smoothing=self._label_smoothing,
        )

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums over samples of their mean cross entropy and share of right tokens."""
        tokens, following = batch
        logits = model(tokens)
        losses = functional.cross_entropy(logits.transpose(1, 2), following, reduction="none")
        is_right = (logits.argmax(2) == following).float()
        return {"loss": losses.mean(1).sum(), "accuracy": is_right.mean(1).sum()}

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the perplexity; beyond what a float holds it is infinite."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}


def build_model(task: Task, shape: DataShape, *, seed: int) -> nn.Module:
    """Return a new model, built from a seed: all processes of a run build the same one.

    Raises:
        ShapeError: the model does not take such data.
    """
    seed_everything(seed)
    return task.build_model(shape)


def task_for(model: str, shape: DataShape, *, label_smoothing: float = 0.0) -> Task:
    """Return the task that the data call for: texts are told on, all else is classified.

    Args:
        model: a name in ``raydl models``, ``torchvision:NAME`` or ``module:function``.
        shape: of the data.
        label_smoothing: of the loss.

    Raises:
        ConfigError: no model has that name.
    """
    kind = LanguageModel if len(shape.input_shape) == 1 else Classification
    return kind(model, label_smoothing=label_smoothing)


def task_on(task: Task | None, shape: DataShape, config: TrainConfig) -> Task:
    """Return the task that a run trains.

    Args:
        task: of the user; None: the one that the settings name.
        shape: of the data, which say what a named model is trained for.
        config: the run's settings.

    Raises:
        ConfigError: a task of the user's own can not be made, or is to be smoothed from outside.
    """
    smoothing = config.training.label_smoothing
    if task is None and config.task == "auto":
        return task_for(config.model, shape, label_smoothing=smoothing)
    if smoothing:
        raise ConfigError("training.label_smoothing", "is for a model by name; tell the task")
    return checked_task(made_of("task", config.task)) if task is None else task


def checked_task(task: Any) -> Task:
    """Return a task of the user's own.

    Raises:
        ConfigError: it lacks something that a task has.
    """
    if isinstance(task, type):
        raise ConfigError(
            "task", f"is the class {task.__name__}; give an instance: {task.__name__}()"
        )
    missing = [n for n in ("name", "build_model", "loss", "metrics") if not hasattr(task, n)]
    if missing:
        name = getattr(task, "__name__", f"a {type(task).__name__}")
        raise ConfigError(
            "task",
            f"{name} has no {', '.join(missing)}; give a task, the name of a model, or a "
            f"function that builds a model together with loss=",
        )
    own: Task = task
    return own


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return where a model computes in a precision: ``bf16`` is torch's autocast, else nothing."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _named(model: str | ModelFactory) -> tuple[str, ModelFactory]:
    """Return a model's name for messages, and its factory."""
    if isinstance(model, str):
        return model, models.find(model)
    return getattr(model, "__name__", "model"), model


def _built(factory: ModelFactory, name: str, shape: DataShape) -> nn.Module:
    models.require_fit(name, factory, shape.input_shape, data=str(shape))
    _check_takes_two(factory, name)
    return factory(shape.input_shape, shape.num_classes)


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
    """Return the mean of each metric over a set's samples, and what follows from them.

    Samples that could not be read, and were left out of a batch, do not count. The model is put
    into evaluation mode and back.

    Args:
        task: knows the metrics.
        model: to score.
        get_batch: returns the samples start..stop-1.
        num_samples: in the set.
        batch_size: of a call.

    Raises:
        DataError: no sample of the set could be read.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, float] = {}
    num_scored = 0
    with torch.no_grad():
        for start in range(0, num_samples, batch_size):
            batch = get_batch(start, min(start + batch_size, num_samples))
            if not num_samples_of(batch):  # all of them were left out
                continue
            for key, value in task.metrics(model, batch).items():
                sums[key] = sums.get(key, 0.0) + float(value)
            num_scored += num_samples_of(batch)
    model.train(was_training)
    if not num_scored:
        raise DataError("the test set", f"holds {num_samples} samples, none of which can be read")
    means = {key: value / num_scored for key, value in sums.items()}
    return {**means, **task.derived(means)} if isinstance(task, Derives) else means


def predict(task: Predicts, model: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    """Return the class of each input, by a model in evaluation mode.

    The model is put into evaluation mode and back.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        classes = task.predict(model, inputs)
    model.train(was_training)
    return tuple(int(number) for number in classes)


OwnFactory = Callable[..., nn.Module]
"""Builds a model; of a ``DataShape``, or of nothing."""
OwnLoss = Callable[[nn.Module, Batch], Tensor]
"""Returns the mean loss of a model over a batch, a scalar with a gradient."""
OwnMetrics = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Returns sums over the samples of a batch, by name."""


class ModelAndLoss:
    """A model of your own, and the loss that it is to make small.

    Args:
        build: returns the model; takes the ``DataShape``, or nothing.
        loss: of (model, batch), the mean over the samples of the batch.
        metrics: of (model, batch), sums over the samples; the loss is added where it is not among
            them.
    """

    def __init__(
        self, build: OwnFactory, loss: OwnLoss, *, metrics: OwnMetrics | None = None
    ) -> None:
        if isinstance(build, nn.Module):
            raise ConfigError(
                "task",
                f"is a model, a {type(build).__name__}; give a function that builds it, so that "
                f"each worker has its own",
            )
        self.name = getattr(build, "__name__", type(build).__name__)
        self._build = build
        self._loss = loss
        self._metrics = metrics

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model.

        Raises:
            ConfigError: what was built is no module.
        """
        model = self._build(shape) if _takes_shape(self._build) else self._build()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "task", f"{self.name} must return a torch.nn.Module, it returned {type(model)}"
            )
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        return self._loss(model, batch)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the samples of the batch, the loss among them."""
        sums = self._metrics(model, batch) if self._metrics else {}
        if not isinstance(sums, Mapping):
            raise ShapeError(self.name, f"metrics must return a dict of sums by name, not {sums!r}")
        loss = {} if "loss" in sums else {"loss": self._loss(model, batch) * num_samples_of(batch)}
        return {**sums, **loss}


class LossFromForward(ModelAndLoss):
    """A model whose forward returns its loss, as those of Hugging Face's transformers do.

    A batch of a table, or any other mapping, is passed by name: ``model(**batch)``; a tuple by
    place. What comes back has the loss as its attribute or its key ``loss``, or first.

    Args:
        build: returns the model; takes the ``DataShape``, or nothing.
        metrics: of (model, batch), sums over the samples.
    """

    def __init__(self, build: OwnFactory, *, metrics: OwnMetrics | None = None) -> None:
        super().__init__(build, _loss_of_forward, metrics=metrics)


def _loss_of_forward(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = _loss_in(output)
    if loss is None:
        raise ConfigError(
            "task", f"the forward of {type(model).__name__} returned no loss; it must be there "
            f"as .loss, as ['loss'] or first, and labels in the batch"
        )  # fmt: skip
    return loss


def _loss_in(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        loss: Tensor | None = output.loss
        return loss
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.ndim == 0 else None


def _takes_shape(build: OwnFactory) -> bool:
    """Whether a function needs an argument, rather than none."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some built-in classes tell no signature
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in parameters)  # fmt: skip
