"""Replicas as large as one likes, that take no more memory than they must.

Weights cost some twelve times their size in a worker: gradients, momentum, the center, what is
under way. What an optimizer remembers costs no more than itself, and goes into a replica's file all
the same. The sizes come from the environment, since each process builds its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.watching import _note

MODEL = "benchmarks.large_replicas:wide"
"""What ``--model`` takes for a network of so many bytes, whose steps are noted."""
OPTIMIZER = "benchmarks.large_replicas:remembering"
"""What ``--optimizer`` takes for SGD that remembers so many bytes."""
LIGHT_OPTIMIZER = "benchmarks.large_replicas:repeating"
"""The same, but all that it remembers is one number: it takes no memory before it is copied."""
_WEIGHTS, _MEMORY = "RAYDL_BENCHMARK_WEIGHT_BYTES", "RAYDL_BENCHMARK_MEMORY_BYTES"
_FIRST = 3
"""The step with which an optimizer begins to remember; a driver that tries one takes fewer."""


def sizes(*, weights: int, memory: int = 0) -> Mapping[str, str]:
    """Return the environment of processes with so many bytes of weights and of memory."""
    return {_WEIGHTS: str(weights), _MEMORY: str(memory)}


def wide(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Return a network of as many bytes as the environment says, that notes its steps."""
    import torch

    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    width = int(os.environ[_WEIGHTS]) // 4 // (pixels + num_classes)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(pixels, width), torch.nn.Linear(width, num_classes)
    )
    _note("built", 0)

    def note_step(_: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        if torch.is_grad_enabled():
            outputs.register_hook(lambda _: _note("steps", len(inputs[0])))

    model.register_forward_hook(note_step)
    return model


def remembering(parameters: list[Any]) -> Any:
    """Return an SGD that remembers as many bytes as the environment says, and changes some."""
    import torch

    return _sgd(parameters, lambda count: torch.full((count,), 0.5))


def repeating(parameters: list[Any]) -> Any:
    """Return an SGD that remembers one number, as often as the environment says."""
    import torch

    return _sgd(parameters, lambda count: torch.full((1,), 0.5).expand(count))


def _sgd(parameters: list[Any], remember: Callable[[int], Any]) -> Any:
    import torch

    class Remembering(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            state: Any = self.state[self.param_groups[0]["params"][0]]
            number = state["num_steps"] = state.get("num_steps", 0) + 1
            if number >= _FIRST and "memory" not in state:
                state["memory"] = remember(int(os.environ[_MEMORY]) // 4)
            if number > _FIRST:
                state["memory"][number % len(state["memory"])] += 1
            return loss

    return Remembering(parameters, lr=0.0001, momentum=0.9)
