"""SparseLoCo: sparse, two-bit progress with a decaying memory of what was left out."""

from __future__ import annotations

from raydl.methods.local_sgd import LocalSGD
from raydl.methods.options import between


class SparseLoCo(LocalSGD):
    """Local steps, then the mean of the largest values of each chunk of progress, two bits each.

    e <- b*e + D ; q = Q(e), the K largest of each chunk ; e <- e - q ; c <- c - lr*mean(q) ; x <- c

    There is no outer momentum: e has that part. What a worker leaves out decays with b, so that a
    part of the progress is lost on purpose. (arXiv 2508.15706, the equations of the paper. The
    released code differs: it averages each place over the workers that sent it, and cuts messages
    to the median norm.)

    Args:
        decay: b, in [0, 1]; 1 loses nothing.
    """

    name, period, source = "sparse-loco", 30, "arXiv 2508.15706"
    outer = (1.0, 0.0)
    compression = "chunk-topk:64"

    def __init__(self, lr: float = 1.0, *, momentum: float = 0.0, decay: float = 0.95) -> None:
        super().__init__(lr, momentum=momentum)
        self.feedback_decay = between("decay", decay, 0, 1)
