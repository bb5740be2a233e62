"""DC-ASGD: delayed gradients, corrected for what the center did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raydl.core.rules import Mail, Message, Now, ReplicaSpan, State
from raydl.methods.master_sgd import AsyncSGD
from raydl.methods.options import between


class DCASGD(AsyncSGD):
    """async-sgd whose gradients are corrected by the change of the center since they began.

    g = D_i / sum(eta) ; c <- c - sum(eta) * (g + l*g*g*(c - c_i)) ; x_i <- c

    c_i is the center that worker i received last; it travels with D_i, so that a message is twice
    as long and nothing is kept at the center for each worker. l*g*g stands for the curvature. With
    several local steps g is their mean. (arXiv 1609.08326, with constant l.)

    Args:
        rate: l, 0 or more.
    """

    name, source = "dc-asgd", "arXiv 1609.08326"
    lanes = ("progress", "base")
    numbers = ("eta",)
    may_compress = False

    def __init__(self, *, rate: float = 0.04) -> None:
        super().__init__()
        self.rate = between("rate", rate, 0, float("inf"))

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return D and c_i, and the sum of eta."""
        progress = torch.sub(center, replica.x, out=out["progress"])
        lanes = {"progress": progress, "base": out["base"].copy_(center)}
        return Message(lanes, numbers={"eta": replica.since.rates})

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along D + l*D*D*(c - c_i) / sum(eta)."""
        progress, eta = mail.mean("progress"), mail.mean_number("eta")
        if eta > 0:
            moved = torch.sub(center, mail.mean("base"))
            progress.addcmul_(progress.square(), moved, value=self.rate / eta)
        self.step_(center, progress, state, now)
