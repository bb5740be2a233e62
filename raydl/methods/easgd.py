"""Elastic averaging: a replica and the center pull each other by a share of their gap.

    symbol  name here       meaning
    x_i     replica         parameters of worker i
    c       center          the center variable
    g_i     gradient        mini-batch gradient at x_i
    eta     lr              learning rate of the local step (it lives in the optimizer)
    alpha   moving_rate     share of the gap that one exchange closes
    beta    beta            p * alpha
    p       num_workers     workers that train now

    x_i <- x_i - eta*g_i - alpha*(x_i - c) ; c <- c + alpha * sum_i (x_i - c)

Sources: SC17 = You, Buluc, Demmel, arXiv 1708.02983; EASGD = Zhang, Choromanska, LeCun,
arXiv 1412.6651.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydl.core.rules import AheadRule, LocalStep, Mail, Now, State, blocks_of


def moving_rate(beta: float, num_workers: int) -> float:
    """Return alpha = beta / p; compute it again whenever p changes.

    Losses may leave fewer workers than the minimum for which beta was checked: alpha stays within
    ``moving_rate_limit_in_turn`` at zero curvature, beyond which the distances grow.
    """
    return min(beta / num_workers, 1.0)


def moving_rate_limit_in_turn(*, lr_curvature: float = 0.0) -> float:
    """Return the largest stable alpha if workers exchange one by one, for any p.

    alpha <= (4 - 2*eta*h) / (4 - eta*h), with ``lr_curvature`` = eta*h in [0, 2).
    """
    return (4 - 2 * lr_curvature) / (4 - lr_curvature)


def elastic_difference(
    replica: Tensor, center: Tensor, *, moving_rate: float, out: Tensor | None = None
) -> Tensor:
    """Return alpha * (x - c), shape [num_parameters], in ``out`` if given.

    The replica subtracts it and the center adds it, so that their sum stays the same. (SC17, eq. 1
    and 2.)
    """
    return torch.sub(replica, center, out=out).mul_(moving_rate)


def elastic_center_(
    center: Tensor, total: Tensor, *, num_messages: int, moving_rate: float
) -> Tensor:
    """Do c <- c + alpha * (total - n*c) in place; ``total``, sum of n replicas, is overwritten.

    n = p if all workers exchange at once (SC17, eq. 2), n = 1 if one worker exchanges.
    """
    for block in blocks_of(center):
        gaps = total[block].sub_(center[block], alpha=num_messages)
        center[block].add_(gaps, alpha=moving_rate)
    return center


class Elastic(AheadRule):
    """Elastic averaging: x <- x - eta*g - alpha*(x - c) ; c <- c + alpha*sum(x - c).

    The term eta*g stands for the whole step of the inner optimizer: with momentum this is MEASGD,
    with Nesterov momentum EAMSGD. (SC17, eq. 1, 2, 5 and 6.)

    Args:
        beta: p * alpha, in (0, 1].
    """

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta

    def pull(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> Tensor:
        """Return alpha * (x - c)."""
        alpha = moving_rate(self.beta, now.num_workers)
        return elastic_difference(replica, center, moving_rate=alpha, out=out)

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Do c <- c + alpha * (sum(x) - n*c)."""
        alpha = moving_rate(self.beta, now.num_workers)
        elastic_center_(center, mail.total("weights"), num_messages=mail.count, moving_rate=alpha)

    def measured_pull(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> float:
        """Return |x - c|^2, computed from the pull itself, block by block."""
        if type(self).pull is not Elastic.pull:  # a subclass may override it
            return super().measured_pull(replica, center, now, out=out)
        alpha, squares = moving_rate(self.beta, now.num_workers), 0.0
        for block in blocks_of(replica):
            x, c = replica[block], center[block]
            pull = elastic_difference(x, c, moving_rate=alpha, out=out[block])
            squares += float(torch.dot(pull, pull))
        return squares / alpha**2

    def exchange_(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> float:
        """Do c <- c + alpha * (x - c), with the same difference for both sides."""
        kind = type(self)
        if kind.pull is not Elastic.pull or kind.merge_ is not Elastic.merge_:
            return super().exchange_(replica, center, now, out=out)
        squares = 0.0
        for block in blocks_of(replica):
            squares += self.measured_pull(replica[block], center[block], now, out=out[block])
            center[block].add_(out[block])
        return squares


class OriginalEASGD(Elastic):
    """Workers take turns in rank order, one active at a time: the baseline of SC17."""

    name, strategy, period = "original-easgd", "round_robin", 1
    source = "SC17 eq. 1, and 2 for one worker"
    overlap = False


class AsyncEASGD(Elastic):
    """Each worker exchanges with the center by itself, one at a time."""

    name, strategy = "async-easgd", "async"
    source = "SC17 eq. 1, and 2 for one worker"


class AsyncMEASGD(AsyncEASGD):
    """async-easgd with momentum in the local step."""

    name, source = "async-measgd", "SC17 eq. 5, 6, and 2 for one worker"
    local_step = LocalStep(lr=0.025, momentum=0.9)


class EAMSGD(AsyncEASGD):
    """async-easgd with Nesterov momentum 0.99 in the local step."""

    name, source = "eamsgd", "arXiv 1412.6651, EAMSGD"
    local_step = LocalStep(lr=0.005, momentum=0.99, nesterov=True)


class HogwildEASGD(AsyncEASGD):
    """async-easgd without the lock."""

    name, strategy = "hogwild-easgd", "hogwild"


class HogwildMEASGD(AsyncMEASGD):
    """async-measgd without the lock."""

    name, strategy = "hogwild-measgd", "hogwild"
    source = "rule and strategy of SC17, combined here"


class SyncEASGD(Elastic):
    """All workers exchange with the center at once, overlapped with the gradient."""

    name, source = "sync-easgd", "SC17 eq. 1 and 2"


class SyncMEASGD(SyncEASGD):
    """sync-easgd with momentum in the local step."""

    name, source = "sync-measgd", "SC17 eq. 2, 5 and 6"
    local_step = LocalStep(lr=0.025, momentum=0.9)
