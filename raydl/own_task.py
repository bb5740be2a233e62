"""Tasks made of what a user has: a model and a loss, or a model that knows its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from raydl.data.samples import Batch, DataShape, num_samples_of
from raydl.errors import ConfigError, ShapeError

OwnFactory = Callable[..., nn.Module]
"""Builds a model; of a :class:`DataShape`, or of nothing."""
OwnLoss = Callable[[nn.Module, Batch], Tensor]
"""Returns the mean loss of a model over a batch, a scalar with a gradient."""
OwnMetrics = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Returns sums over the samples of a batch, by name."""


class ModelAndLoss:
    """A model of your own, and the loss that it is to make small.

    Args:
        build: returns the model; takes the :class:`DataShape`, or nothing.
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
        build: returns the model; takes the :class:`DataShape`, or nothing.
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
