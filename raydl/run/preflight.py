"""Two samples through model and task before any process starts: what is wrong is one sentence.

A model or a task is the user's own code. What it raises itself keeps its traceback; what it
returns is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydl.config import TrainConfig
from raydl.core.custom_rule import try_rule
from raydl.core.exchange import cell_size
from raydl.core.flat import FlatModel
from raydl.core.methods import Method, check_weights
from raydl.core.optimizers import check_for_model, no_gradient_text
from raydl.core.saved_state import check_state
from raydl.data import Batch, Batches
from raydl.data.samples import num_samples_of, part_of
from raydl.errors import ConfigError, DataError, ShapeError
from raydl.tasks import ChecksOutput, Task, build_model, in_precision

_NEAR = 0.05
"""Two values this close, relative to the greater one, are one: a mean and a sum are not."""


@dataclass(frozen=True)
class Trial:
    """Result of trying a model."""

    flat: FlatModel
    """The run's first model, as it was built."""
    moved: tuple[str, ...]
    """Frozen parameters that the loss or the metrics change."""


def try_model(task: Task, batches: Batches, config: TrainConfig, method: Method) -> Trial:
    """Build the run's first model, try two samples, and return it as it was built.

    Args:
        task: what is learned.
        batches: of the training set.
        config: the run's settings.
        method: that they name.

    Raises:
        ShapeError: the model does not take the data, or the task returns what is no loss and no
            metrics.
        ConfigError: settings go by scores that the task does not measure, the optimizer does
            not take the model, or the rule does not do what it must.
        DataError: there are no two samples that can be read.
    """
    shape = batches.samples.shape
    model = build_model(task, shape, seed=config.training.seed)
    flat = FlatModel(model, name=task.name)
    check_weights(task.name, flat.parameters, config, method)
    if method.has_custom_rule:
        shards, fragments = config.exchange.center_shards, config.exchange.fragments
        size = cell_size(flat.num_parameters, num_shards=shards, num_fragments=fragments)
        try_rule(method.rule, size)
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
                with torch.no_grad(), torch.random.fork_rng(devices=()):  # dropout draws from it
                    task.check_output(model, batch[0], shape)
            _check_loss(task.name, task.loss(model, batch))
            if method.needs_all_gradients:
                _check_gradients(task, flat, first_samples(batches, config.training.batch_size))
            scores = _try_metrics(task, model, batch)
    except (RuntimeError, IndexError) as error:
        raise ShapeError(task.name, f"does not take {shape}: {error}") from error
    _check_names(task.name, names, model)
    _check_scores(config, scores)
    moved = flat.non_trainable.moved_parameters()
    flat.rebind()
    flat.weights.copy_(weights)
    flat.buffers.copy_(buffers)
    flat.non_trainable.load(non_trainable)
    return Trial(flat, moved)


def first_samples(batches: Batches, wanted: int) -> Any:
    """Return the first samples that can be read: two, which batch norm needs, or a batch.

    Of a smaller set it returns all.

    Raises:
        DataError: one of the first few thousand can not be read, or not so many of them.
    """
    wanted = min(wanted, batches.num_samples)
    for count in (wanted, 16 * wanted, 256 * wanted, 4096 * wanted):
        batch = batches.batch(np.arange(min(count, batches.num_samples)))
        if num_samples_of(batch) >= wanted:
            return part_of(batch, 0, wanted)
    raise DataError("the training set", f"holds no {wanted} samples that can be read at its start")


def _check_gradients(task: Task, flat: FlatModel, batch: Batch) -> None:
    """Raise a ShapeError if the loss of a batch does not reach all parameters."""
    loss = task.loss(flat.model, batch)
    found = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
    names, _ = flat.named(flat.weights, flat.buffers)
    unreached = [name for name, gradient in zip(names, found, strict=True) if gradient is None]
    if unreached:
        raise ShapeError(task.name, no_gradient_text(unreached))


def _check_names(name: str, before: Collection[str], model: nn.Module) -> None:
    """Raise a ShapeError if the first batch gave a model state that it did not have as built."""
    new = [key for key in model.state_dict() if key not in before]
    if new:
        raise ShapeError(
            name,
            f"has {new[0]} only from its first batch on, so no two processes would begin alike; "
            f"register it in its shape when it is built, or with persistent=False",
        )


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise ShapeError(
            name, f"the loss must be one number in a torch.Tensor, it is a {type(loss).__name__}"
        )
    if loss.shape != ():
        raise ShapeError(name, f"the loss must be one number, it has shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise ShapeError(
            name,
            "the loss has no gradient; compute it from the model's parameters, with no detach(), "
            "item() or no_grad()",
        )


def _try_metrics(task: Task, model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the metrics of a batch, as they are taken when the center is scored.

    Raises:
        ShapeError: they are no sums over the samples, by name, with the loss among them.
    """
    model.eval()
    with torch.no_grad():
        metrics = _sums(task.name, task.metrics(model, batch))
        if "loss" not in metrics:
            raise ShapeError(
                task.name, f"the metrics must have loss among them, they are {', '.join(metrics)}"
            )
        _require_sums(task, model, batch, metrics)
    model.train()
    return metrics


def _require_sums(task: Task, model: nn.Module, batch: Batch, metrics: dict[str, float]) -> None:
    """Raise a ShapeError if a metric of the batch is the mean of its samples', and not the sum."""
    count = num_samples_of(batch)
    parts = (part_of(batch, n, n + 1) for n in range(count))
    try:
        ones = [_sums(task.name, task.metrics(model, part)) for part in parts]
    except Exception:  # a task of the user's own may need more than one sample
        return
    for name, value in metrics.items():
        total = sum(one.get(name, math.nan) for one in ones)
        if count > 1 and _is_near(value, total / count) and not _is_near(value, total):
            raise ShapeError(
                task.name,
                f"the metric {name} must be the sum over the samples of a batch, it is the mean; "
                f"multiply it by their number",
            )


def _sums(task: str, metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ShapeError(
            task, f"the metrics must be a dict of name and sum, they are a {type(metrics).__name__}"
        )
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ShapeError(
                task,
                f"the metric {name} must be one number, the sum over the samples of a batch, it "
                f"has shape {list(value.shape)}",
            )
        if not isinstance(value, (Tensor, int, float, np.number)):
            raise ShapeError(
                task, f"the metric {name} must be one number, it is a {type(value).__name__}"
            )
    return {name: float(value) for name, value in metrics.items()}


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_NEAR)


def _check_scores(config: TrainConfig, scores: Mapping[str, float]) -> None:
    """Raise a ConfigError if settings go by scores that the task does not measure."""
    if config.training.stop_at_accuracy is not None and "accuracy" not in scores:
        raise ConfigError(
            "training.stop_at_accuracy",
            f"needs a task that measures accuracy, this one measures {', '.join(scores)}; "
            f"leave it out, or take training.patience",
        )
