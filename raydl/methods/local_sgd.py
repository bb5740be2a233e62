"""Local SGD: local steps, then the mean of all replicas; with periods that follow the rate."""

from __future__ import annotations

import math

from raydl.core.rules import Moment
from raydl.methods.options import at_least, between
from raydl.methods.outer import Outer


class LocalSGD(Outer):
    """Local steps, then the mean of all replicas.

    D_i = c - x_i ; c <- c - lr*mean(D) ; x_i <- c, where lr = 1 is c <- mean(x_i).
    """

    name, source = "local-sgd", "local SGD, FedAvg"


class QSR(LocalSGD):
    """local-sgd whose period grows with the square of the inverse learning rate.

    tau = max(H, min(L, floor((g/eta)^2))), where H is method.period ; then c <- mean(x_i)

    eta is the rate at the start of a round, and its peak during the warm-up. g belongs to the
    optimizer: 0.0175 is the value for AdamW at a peak rate of 0.008; the period is H as long as
    eta is above g/sqrt(H). (The quadratic synchronization rule, arXiv 2310.14423.) The limit L is
    ours: evaluation, checkpoints and workers that join wait for the end of a round, and at the end
    of a schedule the rate is almost zero.

    Args:
        growth: g, 0 or more.
        longest: L, local steps.
    """

    name, period, source = "qsr", 4, "arXiv 2310.14423"

    def __init__(
        self,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        growth: float = 0.0175,
        longest: int = 1000,
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.growth = between("growth", growth, 0, math.inf)
        self.longest = at_least("longest", longest, 1)

    def period_at(self, moment: Moment) -> int:
        """Return max(H, min(L, floor((g/eta)^2)))."""
        eta = moment.peak_lr if moment.is_warming_up else moment.lr
        if self.growth == 0:
            return moment.period
        if eta * math.sqrt(self.longest) <= self.growth:
            return max(moment.period, self.longest)
        return max(moment.period, math.floor((self.growth / eta) ** 2))


class PostLocalSGD(LocalSGD):
    """local-sgd that averages after every step until the learning rate falls for the first time.

    tau = 1 until the first cut of eta, then method.period ; as local-sgd: c <- mean(x_i)

    The first cut is the first milestone of optimizer.lr_schedule step or plateau; cosine and linear
    fall right after the warm-up. (arXiv 1808.07217.)
    """

    name, period, source = "post-local-sgd", 16, "arXiv 1808.07217"

    def period_at(self, moment: Moment) -> int:
        """Return 1 before the first cut, then the period."""
        has_fallen = not moment.is_warming_up and moment.lr < moment.peak_lr
        return moment.period if has_fallen else 1
