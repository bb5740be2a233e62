"""SCAFFOLD: control variates against the drift of workers whose data differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raydl.core.rules import Mail, Message, Now, ReplicaSpan, State
from raydl.methods.outer import Outer


class Scaffold(Outer):
    """Local steps whose gradients are corrected by control variates, then the mean progress.

    x_i <- x_i - eta*(g_i - v_i + v) ; D_i = c - x_i ; v_i' = v_i - v + D_i / sum(eta) ;
    c <- c - lr*mean(D) ; v <- mean(v_i') ; x_i <- c ; v_i <- v_i'

    v_i is about the mean gradient of worker i, v that of all; each worker keeps its v_i, and a
    newcomer begins with zeros. The sum of eta is over the local steps since the last message. The
    workers send v_i' itself, so that v is right again one round after a worker was lost. Plain SGD
    takes the local steps, or D / sum(eta) would be no mean gradient. (arXiv 1910.06378, option 2.)
    """

    name, source = "scaffold", "arXiv 1910.06378"
    lanes = ("progress", "control")
    keeps = ("control",)
    needs_plain_sgd = True

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        """v, and the outer momentum, if any."""
        return ("control", *super().shared)

    def tilt_(self, gradient: Tensor, replica: ReplicaSpan, state: State) -> None:
        """Do g <- g - v_i + v."""
        gradient.sub_(replica["control"]).add_(state["control"])

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return D and v'; v' = v_i if no step had a rate."""
        progress = torch.sub(center, replica.x, out=out["progress"])
        control, rates = out["control"].copy_(replica["control"]), replica.since.rates
        if rates > 0:
            control.sub_(state["control"]).add_(progress, alpha=1 / rates)
        return Message({"progress": progress, "control": control})

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along mean(D) ; v <- mean(v')."""
        state["control"].copy_(mail.mean("control"))
        super().merge_(center, mail, state, now)

    def land_(self, replica: ReplicaSpan, center: Tensor, state: State, now: Now) -> None:
        """Do x <- c ; v_i <- v'."""
        super().land_(replica, center, state, now)
        replica["control"].copy_(replica.sent["control"])
