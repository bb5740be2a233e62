"""An outer optimizer at the center steps along the progress of the replicas."""

from __future__ import annotations

from torch import Tensor
from torch.optim import SGD, Optimizer

from raydl.config import MethodConfig
from raydl.core.rules import Rule, Sends, Tally, step_along_
from raydl.core.torch_import import without_compiler


class Outer(Rule):
    """An outer optimizer steps along the mean progress D_i = c - x_i; replicas copy the center.

    If all workers exchange at once, rate 1 without momentum is local SGD, c <- mean(x_i); Nesterov
    momentum is DiLoCo (arXiv 2311.08105): m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m).
    If workers exchange one by one, rate 1 with one local step is SGD at the master, D = eta*g
    (SC17; with more local steps Downpour), and with momentum MSGD at the master.

    In a round of which only the share s was trained, s*m takes part in the step and (1 - s)*m does
    not change. So a round in several parts moves the center about as far as a whole one.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.
        nesterov: whether the outer momentum is Nesterov's.
    """

    sends = Sends.PROGRESS

    def __init__(self, lr: float = 1.0, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov

    @classmethod
    def from_config(cls, config: MethodConfig) -> Outer:
        """Return the rule with the user's outer rate and momentum, if any."""
        lr = 1.0 if config.outer_lr is None else config.outer_lr
        return cls(lr, momentum=config.outer_momentum or 0.0)

    def make_center_optimizer(self, tensors: list[Tensor]) -> Optimizer | None:
        """Return torch's SGD with the outer rate and momentum."""
        nesterov = self.nesterov and self.momentum > 0  # torch refuses it without momentum
        make = without_compiler(SGD)
        return make(tensors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step the outer optimizer along total / n, with the share of its momentum."""
        assert optimizer is not None
        direction, share = total.div_(tally.num_messages), tally.share_of_round
        momentum = optimizer.state[center].get("momentum_buffer") if share < 1 else None
        if momentum is None:
            step_along_(center, direction, optimizer)
            return
        at_rest = momentum * (1 - share)
        momentum.mul_(share)
        step_along_(center, direction, optimizer)
        momentum.add_(at_rest)
