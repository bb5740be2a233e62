"""Tries model and task with two samples before any actor starts.

A model or a task may be the user's own code. Errors that it raises keep their traceback; what it
returns is checked here, and a mistake is reported in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from raydl.config import TrainConfig
from raydl.core.exchange import cell_size
from raydl.core.flat import FlatModel
from raydl.core.lr_schedules import lr_at
from raydl.core.method import Method, check_weights
from raydl.core.optimizers import check_for_model, no_gradient_text
from raydl.core.saved_state import check_state
from raydl.core.scores import AVERAGED
from raydl.core.state_names import check_round_trip
from raydl.data import Batch, Batches
from raydl.data.samples import num_samples_of, part_of
from raydl.errors import ConfigError, DataError, ShapeError, UnknownNameError
from raydl.methods.custom_rule import try_rule
from raydl.tasks import (
    ChecksOutput,
    Counter,
    DataShape,
    Derives,
    Predicts,
    Task,
    build_model,
    in_precision,
    means_of,
    number,
    sum_and_count,
)

_FIRST_SAMPLES = 256
"""Samples to try if the first ones have no labels."""
_Metrics = dict[str, tuple[float, float | None]]
"""By name, the sum of a metric, and its count if it is no mean over samples."""


@dataclass(frozen=True)
class PreflightResult:
    """The run's first model, and what the preflight found."""

    flat: FlatModel
    """The model, in the state in which it was built."""
    moved: tuple[str, ...]
    """Frozen parameters that the loss or the metrics change."""
    num_in_evaluation: int
    """Modules with dropout or batch norm that were built in evaluation mode."""
    num_uncounted: int
    """Samples at the start of the training set, if none of them counts; else 0."""


def try_model(
    task: Task, batches: Batches, shape: DataShape, config: TrainConfig, method: Method
) -> PreflightResult:
    """Build the run's first model, try two samples, and restore the model's first state.

    Args:
        task: the task.
        batches: batches of the training set.
        shape: its shape.
        config: the run's settings.
        method: the method in these settings.

    Raises:
        ShapeError: the model does not accept the data, or the loss or the metrics of the task are
            not valid.
        ConfigError: a setting needs a score that the task does not measure, the optimizer does
            not accept the model, or the rule is not valid.
        DataError: two samples cannot be read.
    """
    model = build_model(task, shape, seed=config.training.seed)
    flat = FlatModel(model, name=task.name)
    check_round_trip(model, task.name)
    num_in_evaluation = sum(map(_is_in_evaluation, model.modules()))
    check_weights(task.name, flat.parameters, config, method)
    if method.has_custom_rule:
        shards = config.exchange.center_shards
        size = cell_size(flat.num_parameters, num_shards=shards, num_fragments=method.fragments)
        ends = [lr_at(method.optimizer, share) for share in (0.0, 1.0)]
        try_rule(method.rule, size, is_rate_ever_zero=0.0 in ends)
    optimizer = check_for_model(method.inner, method.own_optimizer, model, flat.weights)
    check_state(f"optimizer.name {method.inner.name}", optimizer)
    weights, buffers = flat.weights.clone(), flat.buffers.clone()
    non_trainable = flat.non_trainable.arrays()
    flat.non_trainable.mark()
    names = model.state_dict().keys()
    batch = first_samples(batches, 2)
    try:
        with in_precision(config.training.precision, flat.weights.device):
            if isinstance(task, ChecksOutput):
                with torch.no_grad(), torch.random.fork_rng(devices=()):  # for dropout
                    inputs = batch if isinstance(batch, Mapping) else batch[0]
                    task.check_output(model, inputs, shape)
            _check_loss(task.name, task.loss(model, batch))
            counter = Counter(task, shape.labels)
            _check_count(counter, task.name, batch)
            num_uncounted = _num_uncounted(counter, batches, batch)
            if method.needs_all_gradients:
                _check_gradients(task, flat, first_samples(batches, config.training.batch_size))
            scores = _try_metrics(task, model, batch)
            if isinstance(task, Predicts) and shape.has_labelled_images:
                _try_predictions(task, model, batch)
    except (RuntimeError, IndexError) as error:
        raise ShapeError(task.name, f"does not accept {shape}: {error}") from error
    _check_names(task.name, names, model)
    _check_scores(config, scores)
    means = _means_of(task, scores, num_samples_of(batch))
    if config.evaluation.average:
        means |= {AVERAGED + name: value for name, value in means.items()}
    if (metric := config.evaluation.metric) and means and metric not in means:
        raise UnknownNameError("evaluation.metric", metric, means)
    moved = flat.non_trainable.moved_parameters()
    flat.rebind()
    flat.weights.copy_(weights)
    flat.buffers.copy_(buffers)
    flat.non_trainable.load(non_trainable)
    return PreflightResult(flat, moved, num_in_evaluation, num_uncounted)


def first_samples(batches: Batches, wanted: int) -> Any:
    """Return the first readable samples, or all of a smaller set.

    Args:
        batches: batches of the training set.
        wanted: number of samples; batch norm needs two.

    Raises:
        DataError: the first thousands of samples have fewer readable ones.
    """
    wanted = min(wanted, batches.num_samples)
    for count in (wanted, 16 * wanted, 256 * wanted, 4096 * wanted):
        batch = batches.batch(np.arange(min(count, batches.num_samples)))
        if num_samples_of(batch) >= wanted:
            return part_of(batch, 0, wanted)
    raise DataError("the training set", f"has fewer than {wanted} readable samples at its start")


def _check_gradients(task: Task, flat: FlatModel, batch: Batch) -> None:
    """Raise a ShapeError if the loss of a batch gives no gradient to some parameter."""
    loss = task.loss(flat.model, batch)
    named = [(name, p) for name, ps in flat.sharing.items() for p in ps if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    reached = {name for (name, _), g in zip(named, gradients, strict=True) if g is not None}
    without = [name for name in flat.sharing if name not in reached]
    if without:
        raise ShapeError(task.name, no_gradient_text(without))


def _check_names(name: str, before: Collection[str], model: nn.Module) -> None:
    """Raise a ShapeError if the first batch added state to the model."""
    new = [key for key in model.state_dict() if key not in before]
    if new:
        raise ShapeError(
            name,
            f"has {new[0]} only from its first batch on, so processes would begin differently; "
            f"register it with its shape in the constructor, or with persistent=False",
        )


def _check_loss(name: str, loss: Any) -> None:
    """Raise a ShapeError unless the loss is one number with a gradient."""
    if not isinstance(loss, Tensor):
        problem = f"must be one number in a torch.Tensor, but it is a {type(loss).__name__}"
    elif loss.shape != ():
        problem = f"must be one number, but it has shape {list(loss.shape)}"
    elif not loss.requires_grad:
        problem = (
            "has no gradient; compute it from the model's parameters, with no detach(), item() or "
            "no_grad()"
        )
    else:
        return
    raise ShapeError(name, f"the loss {problem}")


def _check_count(counter: Counter, name: str, batch: Batch) -> None:
    """Raise a ShapeError if a batch does not count as much as its samples one by one."""
    count = counter.of(batch)
    try:
        of_samples = [counter.of(part) for part in _samples_of(batch)]
    except Exception:  # a user's task may need more than one sample
        return
    if not math.isclose(count, sum(of_samples), rel_tol=1e-3, abs_tol=1e-9):
        raise ShapeError(
            name,
            f"the count of a batch must be the sum of what its samples count, but samples that "
            f"count {' and '.join(f'{n:g}' for n in of_samples)} count {count:g} together; return "
            f"a sum from count(batch), not a mean",
        )


def _num_uncounted(counter: Counter, batches: Batches, first: Batch) -> int:
    """Return how many samples at the start do not count, if none of them does; else 0."""
    if counter.of(first):
        return 0
    more = batches.batch(np.arange(min(_FIRST_SAMPLES, batches.num_samples)))
    return 0 if counter.of(more) else num_samples_of(more)


def _samples_of(batch: Batch) -> list[Batch]:
    """Return each sample of a batch as a batch."""
    return [part_of(batch, n, n + 1) for n in range(num_samples_of(batch))]


def _is_in_evaluation(module: nn.Module) -> bool:
    """Whether a module has dropout or batch norm, and is not in training mode."""
    is_dropout = isinstance(module, _DropoutNd) and module.p > 0
    return not module.training and (is_dropout or isinstance(module, _BatchNorm))


def _try_predictions(task: Predicts, model: nn.Module, batch: Batch) -> None:
    """Predict the classes of a batch, as for the examples in TensorBoard.

    Raises:
        ShapeError: they are not a whole number for each image.
    """
    count = num_samples_of(batch)
    model.eval()
    with torch.no_grad():
        classes = task.predict(model, batch[0])
    model.train()
    is_tensor = isinstance(classes, Tensor)
    if not is_tensor or classes.shape != (count,) or classes.is_floating_point():
        got = f"{classes.dtype} of shape {list(classes.shape)}" if is_tensor else type(classes)
        name = getattr(task, "name", type(task).__name__)
        raise ShapeError(name, f"predict must return {count} whole numbers for {count} images, "
                               f"got {got}")  # fmt: skip


def _try_metrics(task: Task, model: nn.Module, batch: Batch) -> _Metrics:
    """Return the metrics of a batch, computed as for a score of the center.

    Raises:
        ShapeError: they are not a dict of sums over the samples with the key ``loss``.
    """
    model.eval()
    with torch.no_grad():
        metrics = _sums(task.name, task.metrics(model, batch))
        if "loss" not in metrics:
            raise ShapeError(
                task.name, f"the metrics must include loss, but they are {', '.join(metrics)}"
            )
        _require_sums(task, model, batch, metrics)
    model.train()
    return metrics


def _require_sums(task: Task, model: nn.Module, batch: Batch, metrics: _Metrics) -> None:
    """Raise a ShapeError if a metric is the mean over the samples of the batch, not the sum."""
    parts = _samples_of(batch)
    try:
        of_samples = [_sums(task.name, task.metrics(model, part)) for part in parts]
    except Exception:  # a user's task may need more than one sample
        return
    for name, (value, count) in metrics.items():
        values = [sample.get(name, (math.nan, None)) for sample in of_samples]
        total = sum(value for value, _ in values)
        weighted = sum(value * (1.0 if count is None else count) for value, count in values)
        mean = weighted / (count or math.nan if count is not None else len(parts))
        if len(parts) > 1 and _is_near(value, mean) and not _is_near(value, total):
            by = "their number" if count is None else "its count"
            raise ShapeError(
                task.name,
                f"the metric {name} must be the sum over the samples of a batch, but it is the "
                f"mean; multiply it by {by}",
            )


def _sums(task: str, metrics: Any) -> _Metrics:
    """Return the metrics as numbers; raise a ShapeError if they are not."""
    if not isinstance(metrics, Mapping):
        raise ShapeError(
            task,
            f"the metrics must be a dict of name and sum, but they are a {type(metrics).__name__}",
        )
    return {name: sum_and_count(task, name, value) for name, value in metrics.items()}


def _is_near(a: float, b: float) -> bool:
    """Whether two values agree within 5%: the mean and the sum of some samples do not."""
    return math.isclose(a, b, rel_tol=0.05)


def _check_scores(config: TrainConfig, scores: _Metrics) -> None:
    """Raise a ConfigError if a setting needs a score that the task does not measure."""
    if config.training.stop_at_accuracy is not None and "accuracy" not in scores:
        raise ConfigError(
            "training.stop_at_accuracy",
            f"needs a task that measures accuracy, but this one measures {', '.join(scores)}; "
            f"omit it, or use training.patience",
        )


def _means_of(task: Task, metrics: _Metrics, num_samples: int) -> dict[str, float]:
    """Return the scores of a batch, with the derived ones; {} if these need more samples.

    Raises:
        ShapeError: a derived metric is not a number.
    """
    counts = {name: count for name, (_, count) in metrics.items() if count is not None}
    means = means_of({name: total for name, (total, _) in metrics.items()}, counts, num_samples)
    if not isinstance(task, Derives):
        return means
    try:
        derived = dict(task.derived(means))
    except Exception:  # a user's task may need more than two samples
        return {}
    for name, value in derived.items():
        means[name] = number(task.name, f"the derived metric {name}", value, "one number")
    return means
