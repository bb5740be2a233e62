"""SparseLoCo: sparse, two-bit progress with a decaying memory of what was left out."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from raydl.core.rules import Mail, Now, State
from raydl.methods.local_sgd import LocalSGD
from raydl.methods.options import between, one_of


class SparseLoCo(LocalSGD):
    """Local steps, then the mean of the largest values of each chunk of progress, two bits each.

    e <- b*e + D ; q = Q(e), the K largest of each chunk ; e <- e - q ; c <- c - lr*mean(q) ; x <- c

    There is no outer momentum: e has that part. What a worker leaves out decays with b, so that a
    part of the progress is lost on purpose. (arXiv 2508.15706, the equations of the paper.)

    The released code merges otherwise: messages that are longer than the median are cut to its
    length, and each place is averaged over the workers that sent it, which makes steps of places
    longer that few workers send.

    Args:
        decay: b, in [0, 1]; 1 loses nothing.
        merge: ``mean`` as in the paper, or ``senders`` as in the released code.
    """

    name, period, source = "sparse-loco", 30, "arXiv 2508.15706"
    compression = "chunk-topk:64"

    def __init__(
        self,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        decay: float = 0.95,
        merge: str = "mean",
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.feedback_decay = between("decay", decay, 0, 1)
        self.sums = one_of("merge", merge, ("mean", "senders")) == "mean"

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along the mean of the messages, or of those that sent a place."""
        if self.sums:
            return super().merge_(center, mail, state, now)
        messages = [letter.lanes["progress"] for letter in mail.each()]
        lengths = [float(message.norm()) for message in messages]
        longest = statistics.median_low(lengths)
        total, num_senders = torch.zeros_like(center), torch.zeros_like(center)
        for message, length in zip(messages, lengths, strict=True):
            total.add_(message, alpha=min(1.0, longest / length) if length else 1.0)
            num_senders.add_(message != 0)
        self.step_(center, total.div_(num_senders.clamp_(min=1)), state, now)
