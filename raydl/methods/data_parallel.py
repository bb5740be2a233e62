"""Data-parallel SGD: the optimizer at the center steps along the mean gradient.

Source: SC17 = You, Buluc, Demmel, arXiv 1708.02983.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from raydl.core.rules import LocalStep, Rule, Sends, Tally, step_along_


class MeanGradient(Rule):
    """The optimizer at the center steps along the mean gradient; replicas copy the center.

    g <- sum_i n_i*g_i / sum_i n_i ; c <- optimizer(c, g) ; x_i <- c, where n_i is the number of
    samples of worker i, or what they count. With plain SGD this is data-parallel SGD on the joined
    batch. (SC17, eq. 3 and 4, at the master.)
    """

    sends = Sends.GRADIENT
    steps_replica = False
    period = 1

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step the optimizer along total / num_samples, or do nothing if they count nothing."""
        if tally.num_samples == 0:  # no sample could be read, or none has a label
            return
        step_along_(center, total.div_(tally.num_samples), optimizer)


class SyncSGD(MeanGradient):
    """Mean gradient of all workers: the plain data-parallel baseline."""

    name, source = "sync-sgd", "SC17, data-parallel SGD"


class SyncMSGD(SyncSGD):
    """sync-sgd with momentum."""

    name, source = "sync-msgd", "SC17 eq. 3 and 4"
    local_step = LocalStep(lr=0.025, momentum=0.9)
