"""Makes large replicas that need little memory.

A byte of weights costs about twelve bytes in a worker: gradients, momentum, the center, buffers of
an exchange. A byte of optimizer state costs one, and is part of a replica's file as well. The sizes
come from environment variables, since each process builds its own model and optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.watching import with_notes

MODEL = "benchmarks.large_replicas:wide"
"""Value of ``--model`` for a network of the given size that notes its steps."""
OPTIMIZER = "benchmarks.large_replicas:with_state"
"""Value of ``--optimizer`` for an SGD with optimizer state of the given size."""
LIGHT_OPTIMIZER = "benchmarks.large_replicas:with_expanded_state"
"""The same, but the state is an expanded number: it needs no memory until it is copied."""
_WEIGHTS, _STATE = "RAYDL_BENCHMARK_WEIGHT_BYTES", "RAYDL_BENCHMARK_STATE_BYTES"
_FIRST = 3
"""The step at which the state is allocated; the driver's check of an optimizer takes fewer."""


def sizes(*, weights: int, state: int = 0) -> Mapping[str, str]:
    """Return the environment variables for the bytes of weights and of optimizer state."""
    return {_WEIGHTS: str(weights), _STATE: str(state)}


def wide(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Return a network of the given size that notes its steps."""
    import torch

    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    width = int(os.environ[_WEIGHTS]) // 4 // (pixels + num_classes)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(pixels, width), torch.nn.Linear(width, num_classes)
    )
    return with_notes(model)


def with_state(parameters: list[Any]) -> Any:
    """Return an SGD with a state of the given size, of which each step changes a number."""
    import torch

    return _sgd(parameters, lambda count: torch.full((count,), 0.5))


def with_expanded_state(parameters: list[Any]) -> Any:
    """Return an SGD with a state of the given size that is one expanded number."""
    import torch

    return _sgd(parameters, lambda count: torch.full((1,), 0.5).expand(count))


def _sgd(parameters: list[Any], make_state: Callable[[int], Any]) -> Any:
    import torch

    class LargeSgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            state: Any = self.state[self.param_groups[0]["params"][0]]
            number = state["num_steps"] = state.get("num_steps", 0) + 1
            if number >= _FIRST and "memory" not in state:
                state["memory"] = make_state(int(os.environ[_STATE]) // 4)
            if number > _FIRST:
                state["memory"][number % len(state["memory"])] += 1
            return loss

    return LargeSgd(parameters, lr=0.0001, momentum=0.9)
