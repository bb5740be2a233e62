"""Data-parallel SGD: the optimizer at the center steps along the mean gradient.

Source: SC17 = You, Buluc, Demmel, arXiv 1708.02983.
"""

from __future__ import annotations

from torch import Tensor

from raydl.core.rules import GradientRule, LocalStep, Mail, Now, State


class MeanGradient(GradientRule):
    """The optimizer at the center steps along the mean gradient; replicas copy the center.

    g <- sum_i n_i*g_i / sum_i n_i ; c <- optimizer(c, g) ; x_i <- c, where n_i is the number of
    samples of worker i, or what they count. With plain SGD this is data-parallel SGD on the joined
    batch. (SC17, eq. 3 and 4, at the master.)
    """

    period = 1

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step the optimizer along the mean gradient."""
        assert state.step_along_ is not None
        state.step_along_(mail.mean("gradient"))


class SyncSGD(MeanGradient):
    """Mean gradient of all workers: the plain data-parallel baseline."""

    name, source = "sync-sgd", "SC17, data-parallel SGD"


class SyncMSGD(SyncSGD):
    """sync-sgd with momentum."""

    name, source = "sync-msgd", "SC17 eq. 3 and 4"
    local_step = LocalStep(lr=0.025, momentum=0.9)
