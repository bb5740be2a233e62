"""HeLoCo: stale progress that turns against the momentum is turned back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raydl.core.rules import Mail, Now, State
from raydl.methods.diloco import DiLoCo
from raydl.methods.options import between

_AGREES = 0.2
"""Cosine from which on progress stays as it is."""


class HeLoCo(DiLoCo):
    """DiLoCo whose progress arrives one by one, each corrected by its angle to the momentum.

    k = cos(D, m) ; f = |D| / (|D| + h*|m|)
    k >= 0.2:  D as it is
    k < 0:     D <- D - b*k*|D|*m/|m|, b = min(s*(-k)*f, 1/2)
    else:      D <- |D| * u/|u|, u = (1 - l)*D/|D| + l*m/|m|, l = min(d*(1 - k)*f, 1)
    D <- D / sqrt(p) ; m <- mu*m + D ; c <- c - lr*(D + mu*m) ; x_i <- c

    The part of stale progress that is opposed to the momentum is weakened, and progress that is at
    right angles to it is turned towards it, the more the longer D is relative to m. Lengths and
    angle are those of a fragment or shard. We know arXiv 2606.00271 from second hand; how the step
    at the center follows is our reading.

    Args:
        weaken: s, 0 or more.
        turn: d, 0 or more.
        trust: h, 0 or more.
    """

    name, strategy, period = "heloco", "async", 20
    source = "arXiv 2606.00271, our reading"
    lr, momentum = 0.7, 0.9
    steps_by_speed = True

    def __init__(
        self,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        weaken: float = 0.5,
        turn: float = 1.0,
        trust: float = 3.0,
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.weaken = between("weaken", weaken, 0, math.inf)
        self.turn = between("turn", turn, 0, math.inf)
        self.trust = between("trust", trust, 0, math.inf)

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Correct D, then step as DiLoCo with 1/sqrt(p) of it."""
        progress = mail.mean("progress")
        if self.momentum:
            self.correct_(progress, state["momentum_buffer"])
        self.step_(center, progress.div_(math.sqrt(now.num_workers)), state, now)

    def correct_(self, progress: Tensor, momentum: Tensor) -> None:
        """Weaken or turn D in place, shape [n], by its angle to m, shape [n]."""
        length, of_momentum = float(progress.norm()), float(momentum.norm())
        if not length or not of_momentum:
            return
        cosine = float(torch.dot(progress, momentum)) / (length * of_momentum)
        share = length / (length + self.trust * of_momentum)
        if cosine < 0:
            strength = min(self.weaken * -cosine * share, 0.5)
            progress.sub_(momentum, alpha=strength * cosine * length / of_momentum)
        elif cosine < _AGREES:
            part = min(self.turn * (1 - cosine) * share, 1.0)
            progress.mul_((1 - part) / length).add_(momentum, alpha=part / of_momentum)
            progress.mul_(length / float(progress.norm()))
