"""Streaming DiLoCo: fragments that are exchanged one after the other, and land mixed."""

from __future__ import annotations

from torch import Tensor

from raydl.core.rules import Now, ReplicaSpan, State
from raydl.methods.diloco import DiLoCo
from raydl.methods.options import between


class StreamingDiLoCo(DiLoCo):
    """DiLoCo in fragments of whole tensors, with four bits a value; replica and center are mixed.

    At the center as diloco. When the answer lands, x <- a*x + (1 - a)*c, with x as it is then.

    Each fragment has its exchange at another step of the period. It lands ``exchange.delay`` steps
    after it was sent, and these steps are kept in x. (arXiv 2501.18512; torchft's default
    mixes nothing, a = 0.)

    Args:
        mix: a, in [0, 1): the share of its own weights that a replica keeps.
    """

    name, period, source = "streaming-diloco", 100, "arXiv 2501.18512"
    lr, momentum = 0.4, 0.9
    compression = "e3m0"
    fragments, delay = 4, 5
    whole_tensors = True

    def __init__(
        self, lr: float | None = None, *, momentum: float | None = None, mix: float = 0.5
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.mix = between("mix", mix, 0, 0.999)

    def land_(self, replica: ReplicaSpan, center: Tensor, state: State, now: Now) -> None:
        """Do x <- a*x + (1 - a)*c."""
        replica.x.lerp_(center, 1 - self.mix)
