"""The inner optimizer: torch's own over flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from raydl.config import OptimizerConfig


class ClippedSGD(SGD):
    """Torch's SGD that shortens a gradient beyond ``max_grad_norm`` first.

    One exploding batch would else throw a replica out, and the center after it.
    """

    def __init__(self, tensors: list[Tensor], *, max_grad_norm: float | None, **settings: Any):
        super().__init__(tensors, **settings)
        self._max_grad_norm = max_grad_norm

    def step(self, closure: Any = None) -> Any:
        """Shorten the gradient if it is too long, then step."""
        if self._max_grad_norm is not None:
            for group in self.param_groups:
                nn.utils.clip_grad_norm_(group["params"], self._max_grad_norm)
        return super().step(closure)


def make_optimizer(config: OptimizerConfig) -> Callable[[list[Tensor]], Optimizer]:
    """Return a function that builds the configured optimizer over flat tensors."""

    def build(tensors: list[Tensor]) -> Optimizer:
        return ClippedSGD(
            tensors,
            max_grad_norm=config.max_grad_norm,
            lr=config.lr or 0.0,
            momentum=config.momentum or 0.0,
            nesterov=bool(config.nesterov),
            weight_decay=config.weight_decay,
        )

    return build
