"""Tasks: a task builds the model, and computes the loss and the metrics of a batch.

A task is classification, regression, next-token prediction, a class with the methods of ``Task``,
or a model with a loss. The training loop uses only the methods of ``Task``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from raydl import models
from raydl.config import TrainConfig
from raydl.config.custom_code import HUGGING_FACE, hugging_face_folder, instantiate
from raydl.data.generators import seed_everything
from raydl.data.loader import Batches, Statistics, preparation_for
from raydl.data.samples import Batch, Dataset, DataShape, Prepare, num_samples_of
from raydl.data.scaling import TableScaler
from raydl.data.target import IGNORED, Key, labels_of, shape_with_labels
from raydl.errors import ConfigError, DataError, ShapeError
from raydl.models import ModelFactory
from raydl.models.hugging_face import LabelRule, LocalModel, label_rule_of

__all__ = [
    "Batch", "Classification", "Counter", "DataShape", "Derives", "LanguageModel", "Metric",
    "MetricSums", "Predicts", "Regression", "Task", "build_model", "evaluate", "in_precision",
    "metric_sums", "metrics_of", "predict", "preparation", "shape_for", "sum_and_count", "task_for",
    "task_on",
]  # fmt: skip


_OWN = f"{__name__}:"
"""Begins the names of the tasks of this module in the settings of a run."""

Metric = Tensor | float | tuple[Tensor | float, Tensor | float]
"""The sum over the samples of a batch; or a pair (sum, count), if the mean is not over samples."""


class Task(Protocol):
    """A task, as the training loop uses it.

    A task may have a method ``count(batch)`` as well: see ``Counter``.
    """

    @property
    def name(self) -> str:
        """Name of the model, for messages."""
        ...

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model; its weights may depend on torch's global seed."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch, a scalar with a gradient."""
        ...

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return sums over the samples of the batch, by name, ``loss`` included.

        A pair (sum, count) instead of a sum is for a mean over something else, such as tokens.
        Runs are monitored and compared by ``accuracy``, if it is included.
        """
        ...


@runtime_checkable
class Predicts(Protocol):
    """A task that predicts the class of an image; only such tasks have examples in TensorBoard."""

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return a class for each image, int64, shape [B]; called only for labelled images."""
        ...


@runtime_checkable
class Derives(Protocol):
    """A task with metrics that are functions of the means of the others."""

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return further metrics, by name.

        Args:
            means: mean of each metric over all evaluated samples, or over what it counts.
        """
        ...


@runtime_checkable
class ChecksOutput(Protocol):
    """A task that checks before a run whether the output of a model fits the data."""

    def check_output(self, model: nn.Module, inputs: Any, shape: DataShape) -> None:
        """Raise a ShapeError if the output does not fit.

        Args:
            model: the model.
            inputs: the inputs of a batch; of a table, all its columns by name.
            shape: the shape of the data.
        """
        ...


class Classification:
    """Classification of images, or of rows of a table, with cross entropy as loss.

    Args:
        model: a name in ``raydl models``, ``torchvision:NAME``, ``module:function``, or a
            function of (image shape, number of classes) that returns a module with logits of
            shape [B, num_classes]. For a table with ``input.target`` the shape is (number of
            inputs,).
        label_smoothing: share of each label, in [0, 1), that the loss spreads over all classes;
            the metrics ignore it.
    """

    averages_over_labels = True
    """Whether the metrics are means over what counts, not over all samples."""

    def __init__(
        self, model: str | ModelFactory = "lenet", *, label_smoothing: float = 0.0
    ) -> None:
        self.name, self._factory = _named(model)
        self._label_smoothing = label_smoothing

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for samples of this shape.

        Raises:
            ShapeError: if a model of the table does not take the data, or if the factory does not
                take (image shape, number of classes).
        """
        return _build(self._factory, self.name, shape, shape.num_classes)

    def check_output(self, model: nn.Module, inputs: Tensor, shape: DataShape) -> None:
        """Compute the logits of some inputs and check their shape.

        Raises:
            ShapeError: if it is not [B, num_classes].
        """
        of = f" of {shape.num_classes} classes"
        _check_outputs(self.name, model, inputs, shape.num_classes, "logits", of)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        inputs, labels = batch
        return functional.cross_entropy(
            model(inputs), labels, label_smoothing=self._label_smoothing
        )

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the summed cross entropy and the number of correct predictions."""
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


class Regression:
    """Prediction of a number from the others of a table, with the squared error as loss.

    Model and loss see the number with mean 0 and standard deviation 1 over the training set. The
    metrics are ``loss``, the mean squared error in these units, so that 1 is that of the mean
    alone; and ``absolute_error``, the mean absolute error in the units of the data.

    Args:
        model: a name in ``raydl models``, ``module:function``, or a function of ((number of
            inputs,), 1) that returns a module with outputs of shape [B, 1].
    """

    def __init__(self, model: str | ModelFactory = "mlp") -> None:
        self.name, self._factory = _named(model)
        self._spread = 1.0

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for a table of this shape, and learn the unit of its target.

        Raises:
            ShapeError: if a model of the table does not take the data.
        """
        self._spread = shape.spread
        return _build(self._factory, self.name, shape, 1)

    def check_output(self, model: nn.Module, inputs: Tensor, shape: DataShape) -> None:
        """Compute the outputs for some inputs and check their shape.

        Raises:
            ShapeError: if it is not [B, 1].
        """
        _check_outputs(self.name, model, inputs, 1, "numbers")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error."""
        inputs, target = batch
        return functional.mse_loss(model(inputs)[:, 0], target)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the summed squared error, and the summed absolute error in the data's units."""
        inputs, target = batch
        error = model(inputs)[:, 0] - target
        return {"loss": (error**2).sum(), "absolute_error": error.abs().sum() * self._spread}


class LanguageModel:
    """Next-token prediction, with cross entropy as loss.

    The metrics are means over the labelled positions: ``loss``, in nats per token, and
    ``accuracy``, the share of next tokens with the highest logit. ``perplexity`` is the exponential
    of the mean loss.

    Args:
        model: a name in ``raydl models``, ``module:function``, or a function of ((context,),
            size of the vocabulary) that returns a module with logits of shape
            [B, context, vocabulary] for tokens [B, context].
        label_smoothing: share of each token, in [0, 1), that the loss spreads over all tokens.
    """

    averages_over_labels = True
    """Whether the metrics are means over what counts, not over all samples."""

    def __init__(
        self, model: str | ModelFactory = "gpt-nano", *, label_smoothing: float = 0.0
    ) -> None:
        self.name, self._factory = _named(model)
        self._label_smoothing = label_smoothing

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model for texts of this context and vocabulary.

        Raises:
            ShapeError: if a model of the table does not take the data.
        """
        return _build(self._factory, self.name, shape, shape.num_classes)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy over all positions."""
        tokens, next_tokens = batch
        return functional.cross_entropy(
            model(tokens).flatten(0, 1),
            next_tokens.flatten(),
            label_smoothing=self._label_smoothing,
        )

    def count(self, batch: Batch) -> Tensor:
        """Return the number of labelled tokens, in contexts: the samples if all are labelled."""
        next_tokens: Tensor = batch[1]
        return (next_tokens != IGNORED).sum() / next_tokens.shape[1]

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over samples of the mean cross entropy and the share of correct tokens."""
        tokens, next_tokens = batch
        logits = model(tokens)
        losses = functional.cross_entropy(logits.transpose(1, 2), next_tokens, reduction="none")
        is_correct = (logits.argmax(2) == next_tokens).float()
        return {"loss": losses.mean(1).sum(), "accuracy": is_correct.mean(1).sum()}

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the perplexity, which is infinite if it overflows a float."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}


def build_model(task: Task, shape: DataShape, *, seed: int) -> nn.Module:
    """Return a new model, built from a seed, the same in all processes of a run.

    A task may name buffers of its model to average, as a module does (``averaged_buffers``).

    Raises:
        ShapeError: if the model does not take the data.
    """
    seed_everything(seed)
    model: Any = task.build_model(shape)
    named = getattr(task, "averaged_buffers", ())
    if named:
        model.averaged_buffers = [*getattr(model, "averaged_buffers", ()), *named]
    return model  # type: ignore[no-any-return]


def task_for(model: str | ModelFactory, shape: DataShape, *, label_smoothing: float = 0.0) -> Task:
    """Return the task for the data: next-token prediction, classification or regression.

    Args:
        model: a name in ``raydl models``, ``hf:FOLDER``, ``torchvision:NAME``,
            ``module:function``, or a function that builds a model.
        shape: shape of the data.
        label_smoothing: share of each label, in [0, 1), that the loss spreads over all classes.

    Raises:
        ConfigError: if no model has the name, or labels of a model of transformers are smoothed.
    """
    if isinstance(model, str) and hugging_face_folder(model) is not None:
        if label_smoothing:
            raise ConfigError(
                "training.label_smoothing",
                f"must be 0 with {model}, got {label_smoothing}: the model computes its loss",
            )
        return HuggingFace(model)
    kind = LanguageModel if shape.kind == "texts" else Classification
    return kind(model, label_smoothing=label_smoothing)


def task_on(task: Task | None, shape: DataShape, config: TrainConfig) -> Task:
    """Return the task that a run trains.

    Args:
        task: the user's task; None: the task of the settings.
        shape: shape of the data, which decides the task of a named model.
        config: settings of the run.

    Raises:
        ConfigError: if a custom task cannot be made, or label smoothing is set with a custom task.
    """
    smoothing = config.training.label_smoothing
    if task is None and config.task in ("auto", "classification"):
        return task_for(config.model, shape, label_smoothing=smoothing)
    if smoothing:
        raise ConfigError(
            "training.label_smoothing",
            f"must be 0 with your own task and regression, got {smoothing}: only classes are "
            f"smoothed",
        )
    if task is None and config.task == "regression":
        if not shape.target:
            problem = f"regression predicts a column of a table: name it by --target; got {shape}"
            raise ConfigError("task", problem)
        return Regression(config.model)
    if task is None and config.task.startswith(_OWN):
        return _made_again(config.task.removeprefix(_OWN), config.model)
    return checked_task(instantiate("task", config.task)) if task is None else task


def _made_again(name: str, model: str) -> Task:
    """Return a task of this module, which a run in Python was given as an object.

    Args:
        name: its class.
        model: its model's name, which is that of a function if the user gave a function.

    Raises:
        ConfigError: if the names do not suffice.
    """
    is_found = ":" in model or model in models.MODELS
    if name == "Classification" and is_found:
        return Classification(model)
    if name == "Regression" and is_found:
        return Regression(model)
    if name == "LanguageModel" and is_found:
        return LanguageModel(model)
    if name == "HuggingFace":
        return HuggingFace(model)
    raise ConfigError(
        "task",
        f"cannot be made again from the names {name} and {model}: the run began with a function or "
        f"a loss in Python; see its result.metrics, or load its center.safetensors",
    )


def checked_task(task: Any) -> Task:
    """Return a custom task after a check of its attributes.

    Raises:
        ConfigError: if it lacks an attribute of ``Task``.
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
    checked: Task = task
    return checked


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a precision: torch's autocast for ``bf16``, else an empty one."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _named(model: str | ModelFactory) -> tuple[str, ModelFactory]:
    """Return the name of a model, for messages, and its factory."""
    if isinstance(model, str):
        return model, models.find(model)
    return getattr(model, "__name__", "model"), model


def _build(factory: ModelFactory, name: str, shape: DataShape, num_outputs: int) -> nn.Module:
    if shape.columns and not shape.target:
        raise ShapeError(
            name,
            f"needs a column to predict, but the data are {shape}: name it by --target, or give "
            f"your own task",
        )
    models.require_fit(name, factory, shape.kind, data=str(shape))
    if not num_outputs and shape.is_numeric:
        raise ShapeError(
            name,
            f"needs the number of classes, but the data are {shape}: give the data set an "
            f"attribute classes, or give your own task",
        )
    _check_signature(factory, name)
    return factory((shape.num_inputs,) if shape.columns else shape.input_shape, num_outputs)


def _check_outputs(
    name: str, model: nn.Module, inputs: Tensor, num_outputs: int, what: str, of: str = ""
) -> None:
    """Raise a ShapeError if the outputs for some inputs are not of shape [B, num_outputs]."""
    outputs, expected = model(inputs), [len(inputs), num_outputs]
    is_tensor = isinstance(outputs, Tensor)
    if not is_tensor or list(outputs.shape) != expected:
        returned = f"shape {list(outputs.shape)}" if is_tensor else f"a {type(outputs).__name__}"
        raise ShapeError(
            name,
            f"must return {what} of shape {expected} for {len(inputs)} samples{of}, got {returned}",
        )


def _check_signature(factory: Callable[..., object], name: str) -> None:
    """Refuse a function that does not take (image shape, number of classes)."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind((1, 1, 1), 1)
    except TypeError as error:
        problem = f"must be a function of (image shape, number of classes), got {signature}"
        raise ShapeError(name, f"{problem}: {error}") from error


class Counter:
    """Says how much a batch counts: the denominator of its mean loss.

    Parts of a batch, the ranks of a method that sums gradients, and test batches are weighed by it.
    So the mean over all of them does not depend on how they were cut. It is

    - what ``count(batch)`` of the task returns, if it has such a method: a number, or None;
    - else, if the labels are signed integers, the number of those that are not -100;
    - else the number of samples.

    Args:
        task: the task.
        labels: ``DataShape.labels`` of the data.
    """

    def __init__(self, task: Task, labels: Key | None = None) -> None:
        self._task = task
        self._labels = labels
        self.ignores: Key | None = None
        """Name or place of labels of which some were -100 and did not count; None so far."""

    def of(self, batch: Batch) -> float:
        """Return how much a batch counts; 0 if nothing is to be learned from it.

        Raises:
            ShapeError: if the task returned a negative value, or anything but one number.
        """
        own = own_count(self._task, batch)
        if own is not None:
            return _checked_count(self._task.name, own)
        named = labels_of(batch, self._labels)
        if named is None:
            return float(num_samples_of(batch))
        key, labels = named
        count = float((labels != IGNORED).sum())
        if count < labels.numel():
            self.ignores = key
        return count


def own_count(task: Task, batch: Batch) -> Any:
    """Return what a task itself says that a batch counts, or None if it does not say it."""
    count = getattr(task, "count", None)
    return count(batch) if callable(count) else None


def _checked_count(task: str, value: Any) -> float:
    count = number(task, "the count of a batch", value, "one number, the denominator of its loss")
    if not 0.0 <= count < math.inf:
        raise ShapeError(
            task,
            f"the count of a batch must be finite and 0 or more, but it is {count}; return from "
            f"count(batch) the denominator of the mean loss, such as the number of labelled tokens",
        )
    return count


def number(task: str, what: str, value: Any, rule: str) -> float:
    """Return a value as a number; raise a ShapeError if it is none."""
    if not isinstance(value, (Tensor, int, float, np.number)):
        raise ShapeError(task, f"{what} must be {rule}, but it is a {type(value).__name__}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ShapeError(task, f"{what} must be {rule}, but it has shape {list(value.shape)}")
    return float(value)


def shape_for(task: Task, batches: Batches) -> tuple[DataShape, str]:
    """Return the shape of a training set for a task, and a sentence if its labels are ambiguous.

    See ``raydl.data.target.shape_with_labels``. A task that counts itself needs no labels.
    """
    first = batches.batch(np.arange(min(2, batches.num_samples)))
    if own_count(task, first) is not None:
        return batches.samples.shape, ""
    shape, note = shape_with_labels(batches, first)
    prepare = batches.prepare
    if isinstance(prepare, TableScaler):
        shape = replace(shape, spread=prepare.spread)
    return shape, note


def preparation(
    task: Task, dataset: Dataset, config: TrainConfig, kept: Statistics | None = None
) -> Prepare:
    """Return the transform from the samples of a dataset to the batches of a task.

    A task of raydl that predicts a column of a table gets (inputs, target), scaled; any other task
    gets the columns as they are.

    Args:
        task: the task.
        dataset: the dataset.
        config: settings of the run.
        kept: statistics by which the run has normalized so far; None: those of the training set.

    Raises:
        ConfigError: if ``input.augment`` is set and the data are not images.
        DataError: as ``preparation_for``.
    """
    is_scaled = isinstance(task, Classification | Regression)
    return preparation_for(dataset, config, scales_tables=is_scaled, kept=kept)


def sum_and_count(task: str, name: str, value: Any) -> tuple[float, float | None]:
    """Return a metric of a batch as numbers: its sum, and its count if that is not the samples.

    Args:
        task: name of the task, for messages.
        name: of the metric.
        value: what the task returned for it.

    Raises:
        ShapeError: if it is neither a number nor a pair (sum, count).
    """
    what = f"the metric {name}"
    if not isinstance(value, (tuple, list)):
        return number(task, what, value, "one number, the sum over the samples of a batch"), None
    rule = "a sum over the samples of a batch, or a pair (sum, count) of two numbers"
    if len(value) != 2:
        raise ShapeError(task, f"{what} must be {rule}, but it has {len(value)} values")
    total, count = (number(task, what, part, rule) for part in value)
    if not 0.0 <= count < math.inf:
        problem = f"the count of {what} must be finite and 0 or more, but it is {count}"
        raise ShapeError(task, problem)
    return total, count


@dataclass(frozen=True)
class MetricSums:
    """Sums of the metrics of a task over some samples."""

    sums: Mapping[str, float]
    """By name of the metric."""
    num_samples: int
    """Samples that were evaluated."""
    num_skipped: int = 0
    """Samples that could not be read."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """By name, the denominator of each metric whose mean is not over samples."""
    not_finite: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By name of the metric, the first sample of each batch whose sum is NaN or infinite."""


def evaluate(
    task: Task,
    model: nn.Module,
    get_batch: Callable[[int, int], Batch],
    *,
    num_samples: int,
    batch_size: int,
) -> dict[str, float]:
    """Return the mean of each metric over the samples of a set, and the derived metrics.

    Skipped samples do not count. The model computes in evaluation mode; its mode is restored.

    Args:
        task: computes the metrics.
        model: the model to evaluate.
        get_batch: returns the samples start..stop-1.
        num_samples: samples in the set.
        batch_size: most samples of one batch.

    Raises:
        DataError: if no sample of the set could be read.
    """
    sums = metric_sums(task, model, get_batch, num_samples=num_samples, batch_size=batch_size)
    return metrics_of(task, [sums])


def metric_sums(
    task: Task,
    model: nn.Module,
    get_batch: Callable[[int, int], Batch],
    *,
    num_samples: int,
    batch_size: int,
) -> MetricSums:
    """Return the sum of each metric over some samples; arguments as for ``evaluate``."""
    was_training = model.training
    model.eval()
    sums = _Sums(task.name)
    counter = Counter(task) if getattr(task, "averages_over_labels", False) else None
    not_finite: dict[str, list[int]] = {}
    num_evaluated = 0
    with torch.no_grad():
        for start in range(0, num_samples, batch_size):
            batch = get_batch(start, min(start + batch_size, num_samples))
            if not num_samples_of(batch):  # all of them were skipped
                continue
            labelled = None if counter is None else counter.of(batch)
            for key, value in task.metrics(model, batch).items():
                total, count = sum_and_count(task.name, key, value)
                sums.add(key, total, labelled if count is None else count)
                if not math.isfinite(total):
                    not_finite.setdefault(key, []).append(start)
            num_evaluated += num_samples_of(batch)
    model.train(was_training)
    num_skipped = num_samples - num_evaluated
    return MetricSums(sums.sums, num_evaluated, num_skipped, sums.counts, not_finite)


class _Sums:
    """Adds up metrics, and the counts of those that are not means over samples."""

    def __init__(self, task: str) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self._task = task

    def add(self, name: str, total: float, count: float | None) -> None:
        if name in self.sums and (count is None) == (name in self.counts):
            raise ShapeError(
                self._task,
                f"the metric {name} must be a pair (sum, count) for all batches or for none, but "
                f"it is one for some",
            )
        self.sums[name] = self.sums.get(name, 0.0) + total
        if count is not None:
            self.counts[name] = self.counts.get(name, 0.0) + count


def metrics_of(task: Task, parts: Sequence[MetricSums]) -> dict[str, float]:
    """Return the mean of each metric over all parts of a set, and the derived metrics.

    The mean of a metric whose counts are all 0, as the loss of a set without labels, is NaN.

    Args:
        task: computes the metrics.
        parts: the sums over each part of the set.

    Raises:
        DataError: if no sample of the set could be read.
    """
    num_samples = sum(part.num_samples for part in parts)
    if not num_samples:
        skipped = sum(part.num_skipped for part in parts)
        raise DataError("the test set", f"holds {skipped} samples, none of which can be read")
    sums = _Sums(task.name)
    for part in parts:
        for key, value in part.sums.items():
            sums.add(key, value, part.counts.get(key))
    means = means_of(sums.sums, sums.counts, num_samples)
    derived = task.derived(means) if isinstance(task, Derives) else {}
    return {**means, **{name: float(value) for name, value in derived.items()}}


def means_of(
    sums: Mapping[str, float], counts: Mapping[str, float], num_samples: int
) -> dict[str, float]:
    """Return the mean of each metric, over its own count or else over the samples."""
    denominators = {name: counts.get(name, num_samples) for name in sums}
    return {name: sums[name] / n if n else math.nan for name, n in denominators.items()}


def predict(task: Predicts, model: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    """Return the predicted class of each input.

    The model computes in evaluation mode; its mode is restored.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        classes = task.predict(model, inputs)
    model.train(was_training)
    return tuple(int(number) for number in classes)


OwnFactory = Callable[..., nn.Module]
"""Builds a model; takes the ``DataShape`` or nothing."""
OwnLoss = Callable[[nn.Module, Batch], Tensor]
"""Returns the mean loss of a model over a batch, a scalar with a gradient."""
OwnMetrics = Callable[[nn.Module, Batch], Mapping[str, Metric]]
"""Returns sums over the samples of a batch, or pairs (sum, count), by name."""
OwnCount = Callable[[Batch], Tensor | float]
"""Returns how much a batch counts: the denominator of its mean loss."""


class ModelAndLoss:
    """A task made of a model and its loss.

    Args:
        build: builds the model; takes the ``DataShape`` or nothing.
        loss: returns the mean loss over a batch, from (model, batch).
        metrics: returns sums over the samples of a batch by name, or pairs (sum, count), from
            (model, batch); ``loss`` is added if it is missing.
        count: returns how much a batch counts, if the loss is not a mean over its samples or over
            the labels that are not -100: the denominator of that mean.
    """

    def __init__(
        self,
        build: OwnFactory,
        loss: OwnLoss,
        *,
        metrics: OwnMetrics | None = None,
        count: OwnCount | None = None,
    ) -> None:
        if isinstance(build, nn.Module):
            raise ConfigError(
                "task",
                f"is a model, a {type(build).__name__}; give a function that builds it, so that "
                f"each worker has its own",
            )
        if count is not None and not callable(count):
            raise ConfigError("count", f"must be a function of a batch, got {count!r}")
        self.name = getattr(build, "__name__", type(build).__name__)
        self._build = build
        self._loss = loss
        self._metrics = metrics
        self._count = count
        self._labels: Key | None = None

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model.

        Raises:
            ConfigError: if the function does not return a module.
        """
        self._labels = shape.labels if shape else None
        model = self._build(shape) if _takes_shape(self._build) else self._build()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "task", f"{self.name} must return a torch.nn.Module, got {type(model)}"
            )
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        return self._loss(model, batch)

    def count(self, batch: Batch) -> Tensor | float | None:
        """Return how much the batch counts by the user's function; None: there is none."""
        return None if self._count is None else self._count(batch)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return sums over the samples of the batch or pairs (sum, count), ``loss`` included."""
        sums = self._metrics(model, batch) if self._metrics else {}
        if not isinstance(sums, Mapping):
            raise ShapeError(self.name, f"metrics must return a dict of sums by name, got {sums!r}")
        return sums if "loss" in sums else {**sums, "loss": self._counted_loss(model, batch)}

    def _counted_loss(self, model: nn.Module, batch: Batch) -> Metric:
        """Return (loss * count, count) of a batch; the loss of one without labels is NaN."""
        count = Counter(self, self._labels).of(batch)
        return (self._loss(model, batch) * count if count else 0.0), count


class LossFromForward(ModelAndLoss):
    """A model whose forward returns its loss, as in Hugging Face's transformers.

    A mapping, such as a batch of a table, is passed by name, ``model(**batch)``; a tuple by
    position. The output has the loss as attribute ``loss``, as key ``loss``, or as first element.

    Args:
        build: builds the model; takes the ``DataShape`` or nothing.
        metrics: returns sums over the samples of a batch by name, or pairs (sum, count), from
            (model, batch).
        count: as for ``ModelAndLoss``; of a model of transformers the labels that its loss counts
            are known.
    """

    def __init__(
        self,
        build: OwnFactory,
        *,
        metrics: OwnMetrics | None = None,
        count: OwnCount | None = None,
    ) -> None:
        super().__init__(build, _loss_of_forward, metrics=metrics, count=count)
        self._label_rule: LabelRule | None = None

    def build_model(self, shape: DataShape) -> nn.Module:
        """Return a new model, and learn from it which labels its loss counts.

        Raises:
            ConfigError: if the function does not return a module.
        """
        model = super().build_model(shape)
        self._label_rule = label_rule_of(model)
        return model

    def count(self, batch: Batch) -> Tensor | float | None:
        """Return how much the batch counts, or None if it counts as those of other tasks."""
        own = super().count(batch)
        is_named = isinstance(batch, Mapping) and "labels" in batch
        if own is not None or self._label_rule is None or not is_named:
            return own
        return self._label_rule.count(batch["labels"])


def _loss_of_forward(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss: Tensor | None
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    else:
        first = output[0] if isinstance(output, tuple) and output else output
        loss = first if isinstance(first, Tensor) and first.ndim == 0 else None
    if loss is None:
        raise ConfigError(
            "task", f"the forward of {type(model).__name__} returned no loss; return it as .loss, "
            f"as ['loss'] or first, and put labels into the batch"
        )  # fmt: skip
    return loss


class HuggingFace(LossFromForward):
    """A model of transformers from a local folder; at the end the center is such a folder, too.

    A column ``label`` counts as ``labels``, as in the collators of transformers. A model for causal
    language modeling whose batches have no labels predicts its own ``input_ids``. The metrics are
    the loss, and the accuracy if there is one label per sample.

    Args:
        model: ``hf:FOLDER``.

    Raises:
        ConfigError: if the folder has no model.
    """

    def __init__(self, model: str) -> None:
        self._local = LocalModel(model.removeprefix(HUGGING_FACE))
        super().__init__(self._local.build)
        self.name = model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        return super().loss(model, self._labelled(batch))

    def count(self, batch: Batch) -> Tensor | float | None:
        """Return the number of labels that the loss of the model counts."""
        return super().count(self._labelled(batch))

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return (sum, count) by name: of the loss, and of the accuracy for one label each."""
        count = Counter(self, self._labels).of(batch)
        batch = self._labelled(batch)
        output = model(**batch)
        pairs: dict[str, Metric] = {"loss": (output.loss * count if count else 0.0, count)}
        labels = batch.get("labels")
        if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            pairs["accuracy"] = (output.logits.argmax(-1) == labels).sum(), count
        return pairs

    def export(self, weights: Mapping[str, Tensor], folder: str) -> None:
        """Write the center as a folder that ``from_pretrained`` reads.

        Args:
            weights: the center under the model's own names, on the CPU.
            folder: an empty local folder.
        """
        self._local.save(weights, folder)

    def _labelled(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                "data",
                f"must give batches by column for {self.name}, as a table of input_ids, "
                f"attention_mask and labels does",
            )
        if "label" in batch and "labels" not in batch:
            batch = {"labels" if name == "label" else name: batch[name] for name in batch}
        if "labels" in batch or not self._local.is_causal:
            return batch
        labels = batch["input_ids"]
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
        return {**batch, "labels": labels}


def _takes_shape(build: OwnFactory) -> bool:
    """Whether a function has a required argument."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some built-in classes have no signature
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in parameters)  # fmt: skip
