"""The vectors in the state of a replica's optimizer, as parts of the flat parameters.

An optimizer has its state by tensor: the flat one, runs of it (parameter groups), or the parameters
themselves. A rule sees one vector for a span, whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.core.optimizers import parameters_of


def state_views(
    optimizer: Optimizer, name: str, weights: Tensor, span: slice
) -> list[tuple[slice, Tensor]]:
    """Return the views of a state's values in a span, each with its place within the span.

    Args:
        optimizer: over the flat weights, or over views of them.
        name: of the value, such as ``exp_avg``.
        weights: the flat weights, shape [num_parameters].
        span: flat parameters.

    Returns:
        What exists: before its first step a tensor has no state.
    """
    views = []
    for tensor in parameters_of(optimizer):
        first = (tensor.data_ptr() - weights.data_ptr()) // weights.itemsize
        start, stop = max(first, span.start), min(first + tensor.numel(), span.stop)
        value = optimizer.state.get(tensor, {}).get(name)
        if start < stop and value is not None:
            place = slice(start - span.start, stop - span.start)
            views.append((place, value.view(-1)[start - first : stop - first]))
    return views


def read_state(
    optimizer: Optimizer, names: Sequence[str], weights: Tensor, span: slice
) -> dict[str, Tensor]:
    """Return copies of a state's values in a span by name, shape [n]; zeros where none exist."""
    vectors = {}
    for name in names:
        vectors[name] = torch.zeros_like(weights[span])
        for place, view in state_views(optimizer, name, weights, span):
            vectors[name][place] = view
    return vectors


def write_state(
    optimizer: Optimizer, vectors: Mapping[str, Tensor], weights: Tensor, span: slice
) -> None:
    """Copy values into a state where it exists."""
    for name, values in vectors.items():
        for place, view in state_views(optimizer, name, weights, span):
            view.copy_(values[place])
