"""SGD at the master: workers send progress one by one, and the center adds it.

With one local step D = eta*g, and this is SC17's Async SGD; with more, Downpour. Momentum is at the
center. Source: SC17 = You, Buluc, Demmel, arXiv 1708.02983.
"""

from __future__ import annotations

from raydl.core.rules import LocalStep
from raydl.methods.outer import Outer


class AsyncSGD(Outer):
    """SGD at the center, in order of arrival; with a longer period, Downpour.

    D = c_i - x_i, where c_i is the center that worker i received last ; c <- c - D ; x_i <- c
    """

    name, strategy, period = "async-sgd", "async", 1
    source = "SC17, Async SGD"
    local_step = LocalStep(lr=0.1)

    def __init__(self) -> None:
        super().__init__()


class AsyncMSGD(AsyncSGD):
    """async-sgd with momentum at the center.

    D = c_i - x_i ; m <- mu*m + D ; c <- c - m ; x_i <- c
    """

    name, source = "async-msgd", "SC17 eq. 3 and 4, at the master"
    local_step = LocalStep(lr=0.01, momentum=0.9)
    has_momentum_at_center = True

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum


class HogwildSGD(AsyncSGD):
    """async-sgd without the lock."""

    name, strategy, source = "hogwild-sgd", "hogwild", "SC17, Hogwild SGD"


class HogwildMSGD(AsyncMSGD):
    """async-msgd without the lock."""

    name, strategy = "hogwild-msgd", "hogwild"
    source = "rule and strategy of SC17, combined here"
