"""CGAD: an outer Adam to which progress counts the less, the older it is."""

from __future__ import annotations

import math

from torch import Tensor

from raydl.core.rules import Mail, Now, State
from raydl.methods.options import at_least, between
from raydl.methods.outer import Outer


class CGAD(Outer):
    """Progress arrives one by one, weighed by its age, and an outer Adam steps along it.

    k = exp(-a*t) * (1 + cos(pi*t/T)) / 2, and 0 from t = T on ; D <- k*D
    m <- mu*m + (1 - mu)*D ; v <- r*v + (1 - r)*D*D ;
    c <- c - lr/p * (m / (1 - mu^n)) / (sqrt(v / (1 - r^n)) + e) ; x_i <- c

    t is the age of D in rounds of all workers: how many messages of others moved the center since
    this worker received it, divided by p; n is the number of messages so far. A message of a part
    of a round counts as that part of a message. We know that k is an exponential times a cosine
    from the abstract of arXiv 2605.09126; its form, the defaults and lr/p are our reading. lr, mu,
    r and e are those of DiLoCo with Adam outside (arXiv 2311.08105).

    Args:
        decay: a, 0 or more.
        cutoff: T, rounds.
        second: r, in [0, 1).
        eps: e, more than 0.
    """

    name, strategy, period = "cgad", "async", 20
    source = "arXiv 2605.09126, our reading of its abstract"
    lr, momentum = 0.3, 0.9
    steps_by_speed = True
    shared_numbers = ("messages",)

    def __init__(
        self,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        decay: float = 0.1,
        cutoff: int = 16,
        second: float = 0.95,
        eps: float = 0.1,
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.decay = between("decay", decay, 0, math.inf)
        self.cutoff = at_least("cutoff", cutoff, 1)
        self.second = between("second", second, 0, 0.99999)
        self.eps = between("eps", eps, 1e-12, math.inf)

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        """The moments m and v of Adam."""
        return "momentum_buffer", "square"

    def worth(self, age: float) -> float:
        """Return k, what progress of an age in rounds counts, 0..1."""
        if age >= self.cutoff:
            return 0.0
        return math.exp(-self.decay * age) * (1 + math.cos(math.pi * age / self.cutoff)) / 2

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Weigh D by its age, then step as Adam."""
        share, age = now.share_of_round, now.staleness / now.num_workers
        progress = mail.mean("progress").mul_(self.worth(age))
        first, second = state["momentum_buffer"], state["square"]
        state.numbers["messages"] += share
        n = state.numbers["messages"]
        first.lerp_(progress, (1 - self.momentum) * share)
        second.lerp_(progress.square_(), (1 - self.second) * share)
        scale = progress.copy_(second).div_(1 - self.second**n).sqrt_().add_(self.eps)
        rate = self.lr / now.num_workers * share / (1 - self.momentum**n)
        center.addcdiv_(first, scale, value=-rate)
