"""An outer optimizer at the center steps along the progress of the replicas."""

from __future__ import annotations

from torch import Tensor

from raydl.core.rules import Mail, Now, Rule, State


class Outer(Rule):
    """An outer optimizer steps along the mean progress D_i = c - x_i; replicas copy the center.

    If all workers exchange at once, rate 1 without momentum is local SGD, c <- mean(x_i); Nesterov
    momentum is DiLoCo (arXiv 2311.08105): m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m).
    If workers exchange one by one, rate 1 with one local step is SGD at the master, D = eta*g
    (SC17; with more local steps Downpour), and with momentum MSGD at the master.

    In a round of which only the share s was trained, s*m takes part in the step and (1 - s)*m does
    not change. So a round in several parts moves the center about as far as a whole one.

    Args:
        lr: outer learning rate; None: that of the class.
        momentum: outer momentum; None: that of the class.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    """Whether the outer momentum is Nesterov's."""

    def __init__(self, lr: float | None = None, *, momentum: float | None = None) -> None:
        if lr is not None:
            self.lr = lr
        if momentum is not None:
            self.momentum = momentum

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        """The outer momentum, if any."""
        return ("momentum_buffer",) if self.momentum else ()

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along mean(D), with the share of the momentum."""
        self.step_(center, mail.mean("progress"), state, now)

    def step_(
        self, center: Tensor, progress: Tensor, state: State, now: Now, *, scale: float = 1.0
    ) -> None:
        """Do m <- mu*m + D ; c <- c - lr*m, or - lr*(D + mu*m); ``progress`` D is overwritten.

        Args:
            center: shape [n].
            progress: D, shape [n].
            state: has the momentum.
            now: of the exchange.
            scale: factor of the rate.
        """
        lr = self.lr * scale
        if not self.momentum:
            center.sub_(progress, alpha=lr)
            return
        momentum, share = state["momentum_buffer"], now.share_of_round
        at_rest = momentum * (1 - share) if share < 1 else None
        if at_rest is not None:
            momentum.mul_(share)
        momentum.mul_(self.momentum).add_(progress)
        step = progress.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
        center.sub_(step, alpha=lr)
        if at_rest is not None:
            momentum.add_(at_rest)
