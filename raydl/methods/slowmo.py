"""SlowMo: momentum at the center, in units of the gradient."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from raydl.core.rules import Mail, Message, Now, ReplicaSpan, State
from raydl.methods.outer import Outer


class SlowMo(Outer):
    """Local steps, then slow momentum along the mean progress divided by the learning rate.

    D_i = c - x_i ; u <- b*u + mean(D)/eta ; c <- c - a*eta*u ; x <- c

    eta is the mean of the learning rates of the newest steps, which travel with the messages. So
    the momentum does not shrink the steps of a falling rate, as that of diloco enlarges them.
    (arXiv 1910.00643.)
    """

    name, period, source = "slowmo", 48, "arXiv 1910.00643"
    lr, momentum = 1.0, 0.5
    numbers = ("eta",)

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return D and eta."""
        message = super().compose(replica, center, state, out)
        return Message(message.lanes, numbers={"eta": replica.lr})

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along mean(D) / eta with rate a*eta; do nothing at rate 0."""
        eta = mail.mean_number("eta")
        if eta > 0:
            self.step_(center, mail.mean("progress").div_(eta), state, now, scale=eta)
