"""DiLoCo: local steps, then an outer Nesterov step along the mean progress."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.config import MethodConfig
from raydl.core.rules import LocalStep, Tally, step_along_
from raydl.core.torch_import import without_compiler
from raydl.methods.outer import Outer


class DiLoCo(Outer):
    """Local steps, then an outer Nesterov step along the mean progress.

    D_i = c - x_i ; m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m) ; x_i <- c
    """

    name, period, source = "diloco", 50, "arXiv 2311.08105"
    outer = (0.7, 0.9)

    @classmethod
    def from_config(cls, config: MethodConfig) -> DiLoCo:
        """Return the method with the user's outer rate and momentum."""
        plain = Outer.from_config(config)
        return cls(plain.lr, momentum=plain.momentum, nesterov=True)


class MuLoCo(DiLoCo):
    """diloco with Muon inside: ``muon``, which is AdamW for what is no hidden matrix.

    D_i = c - x_i ; m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m) ; x_i <- c

    With ``raydl.attach``, where the optimizer is the user's own, it is diloco with this period,
    outer rate and outer momentum.
    """

    name, period, source = "muloco", 30, "arXiv 2505.23725"
    local_step = LocalStep("muon", lr=1e-3, momentum=0.9, nesterov=True)
    outer = (0.9, 0.8)


class DelayedOuter(Outer):
    """Outer Nesterov optimizer for progress that arrives one by one: ``DelayedNesterov``.

    The momentum is updated after every p-th message. A message of a part of a round counts as that
    part of a message.
    """

    def make_center_optimizer(self, tensors: list[Tensor]) -> Optimizer | None:
        """Return the delayed Nesterov optimizer."""
        return without_compiler(DelayedNesterov)(tensors, lr=self.lr, momentum=self.momentum)

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step along D; every p-th message updates the momentum."""
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["every"], group["share"] = tally.num_workers, tally.share_of_round
        step_along_(center, total.div_(tally.num_messages), optimizer)


_ROUNDING = 1e-6
"""Ten tenths of a message are less than one, by rounding."""


class DelayedNesterov(Optimizer):
    """Nesterov optimizer that updates its momentum every N steps (arXiv 2401.09135, algorithm 3).

    s <- s + D ; every N-th step: m <- mu*m + s/n ; c <- c - lr*(D/N + mu*m) ; s <- 0 ;
    else: c <- c - lr*D/N. Momentum at every step would count stale progress N times. n is the
    number of steps in s: N, or more at the first update after N has decreased. A step along the
    progress of a part of a round counts as that part of a step, ``share`` of its group.

    Args:
        tensors: one flat tensor.
        lr: outer learning rate.
        momentum: mu.
    """

    def __init__(self, tensors: list[Tensor], *, lr: float, momentum: float) -> None:
        super().__init__(tensors, {"lr": lr, "momentum": momentum, "every": 1, "share": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply the progress in ``grad``."""
        for group in self.param_groups:
            for tensor in group["params"]:
                self._step(tensor, group, self.state[tensor])

    def _step(self, tensor: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["arrivals"] = 0
            state["sum"] = torch.zeros_like(tensor)
            state["momentum_buffer"] = torch.zeros_like(tensor)
        progress, every = tensor.grad, group["every"]
        assert progress is not None
        state["arrivals"] += group["share"]
        state["sum"].add_(progress)
        tensor.sub_(progress, alpha=group["lr"] / every)
        if state["arrivals"] > every - _ROUNDING:
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(state["sum"], alpha=1 / state["arrivals"])
            tensor.sub_(momentum, alpha=group["lr"] * group["momentum"])
            state["sum"].zero_()
            state["arrivals"] = 0


class AsyncDiLoCo(DelayedOuter):
    """Progress is applied on arrival with delayed Nesterov.

    Faster workers take more local steps.

    s <- s + D ; every p-th message: m <- mu*m + s/p ; c <- c - lr*(D/p + mu*m) ; s <- 0 ;
    else: c <- c - lr*D/p
    """

    name, strategy, period = "async-diloco", "async", 20
    source = "arXiv 2401.09135"
    outer = (0.7, 0.5)
    steps_by_speed = True
