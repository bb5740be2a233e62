"""DiLoCo: local steps, then an outer Nesterov step along the mean progress; and its relatives."""

from __future__ import annotations

from torch import Tensor

from raydl.core.rules import LocalStep, Mail, Now, State
from raydl.methods.options import at_least
from raydl.methods.outer import Outer


class DiLoCo(Outer):
    """Local steps, then an outer Nesterov step along the mean progress.

    D_i = c - x_i ; m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m) ; x_i <- c

    The paper has mu = 0.9 for hundreds of rounds of 500 steps. The default is 0.7, with which also
    short runs end well: momentum of 0.9 is still on its way for tens of rounds when the learning
    rate has fallen.
    """

    name, period, source = "diloco", 50, "arXiv 2311.08105"
    lr, momentum = 0.7, 0.7
    nesterov = True


class MuLoCo(DiLoCo):
    """diloco with Muon inside: ``muon``, which is AdamW for what is no hidden matrix.

    D_i = c - x_i ; m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m) ; x_i <- c

    With ``raydl.attach``, where the optimizer is the user's own, it is diloco with this period,
    outer rate and outer momentum. Of what a codec leaves out the next message takes 0.9 along.
    """

    name, period, source = "muloco", 30, "arXiv 2505.23725"
    local_step = LocalStep("muon", lr=1e-3, momentum=0.9, nesterov=True)
    lr, momentum = 0.9, 0.8
    feedback_decay = 0.9


class RestartedDiLoCo(DiLoCo):
    """DiLoCo whose momentum is set to zero every few rounds.

    As diloco ; after every K-th round m <- 0

    We know the abstract of arXiv 2605.28585 (restarts of the outer momentum); when to restart is
    our reading.

    Args:
        every: K, rounds between two restarts.
    """

    name, source = "restarted-diloco", "arXiv 2605.28585, our reading of its abstract"
    lr, momentum = 0.7, 0.9
    shared_numbers = ("rounds",)

    def __init__(
        self, lr: float | None = None, *, momentum: float | None = None, every: int = 10
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.every = at_least("every", every, 1)

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step as DiLoCo; after every K-th round set the momentum to zero."""
        super().merge_(center, mail, state, now)
        state.numbers["rounds"] = (state.numbers["rounds"] + 1) % self.every
        if self.momentum and state.numbers["rounds"] == 0:
            state["momentum_buffer"].zero_()


_ROUNDING = 1e-6
"""Ten tenths of a message are less than one, by rounding."""


class AsyncDiLoCo(Outer):
    """Progress is applied on arrival with delayed Nesterov.

    Faster workers take more local steps.

    s <- s + D ; every p-th message: m <- mu*m + s/n ; c <- c - lr*(D/p + mu*m) ; s <- 0 ;
    else: c <- c - lr*D/p

    Momentum at every message would count stale progress p times. n is the number of messages in s:
    p, or more at the first update after p has decreased. A message of a part of a round counts as
    that part of a message. (arXiv 2401.09135, algorithm 3.)
    """

    name, strategy, period = "async-diloco", "async", 20
    source = "arXiv 2401.09135"
    lr, momentum = 0.7, 0.5
    steps_by_speed = True
    shared_numbers = ("arrivals",)

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        """S and m."""
        return "sum", "momentum_buffer"

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along D; every p-th message updates the momentum."""
        progress, every = mail.mean("progress"), now.num_workers
        state.numbers["arrivals"] += now.share_of_round
        state["sum"].add_(progress)
        center.sub_(progress, alpha=self.lr / every)
        if state.numbers["arrivals"] <= every - _ROUNDING:
            return
        momentum = state["momentum_buffer"]
        momentum.mul_(self.momentum).add_(state["sum"], alpha=1 / state.numbers["arrivals"])
        center.sub_(momentum, alpha=self.lr * self.momentum)
        state["sum"].zero_()
        state.numbers["arrivals"] = 0.0
