"""FedNova: progress per step, so that workers with more steps do not weigh more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raydl.core.rules import Mail, Message, Now, ReplicaSpan, State
from raydl.methods.outer import Outer


class FedNova(Outer):
    """Local steps, then a step along the mean of the progress per step of each worker.

    D_i = c - x_i after a_i local steps ; c <- c - lr * mean(a) * mean(D_i / a_i) ; x <- c

    All workers have the weight 1/p, however many steps they take. (With weights in proportion to
    their samples, as in the paper, the direction is that of local SGD wherever steps and samples
    are.) Use it with ``method.steps_by_speed``, or where workers end a round early.
    (arXiv 2007.07481.)
    """

    name, source = "fednova", "arXiv 2007.07481, with equal weights"
    lanes = ("direction",)
    numbers = ("steps",)

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return D / a, and a."""
        steps = replica.since.steps
        direction = torch.sub(center, replica.x, out=out["direction"]).div_(max(1, steps))
        return Message({"direction": direction}, numbers={"steps": steps})

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along mean(a) * mean(D / a)."""
        steps = mail.mean_number("steps")
        self.step_(center, mail.mean("direction").mul_(steps), state, now)
