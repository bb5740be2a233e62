"""DeMo: the largest coefficients of a cosine transform travel, and their sign is the step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from raydl.core.rules import LocalStep, Mail, Message, Now, ReplicaSpan, State
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.options import between

_CHUNK = 64
"""Values that are transformed together; what is left at the end of a span stays as it is."""
_ROUNDING = 1e-12
"""A smaller part of the largest coefficient is zero but for rounding, in float64."""


class DeMo(MeanGradient):
    """The few largest frequencies of each worker's momentum are sent; the center steps by signs.

    e <- b*e + C(g_i) ; q = Q(e), the largest of each chunk ; e <- e - q ;
    s = C'(mean of q over the workers that sent a place) ; c <- optimizer(c, sign(s)) ; x_i <- c

    C is the cosine transform of chunks of 64 values, C' its inverse. Fast parts of the momentum,
    the large coefficients, are shared at once; slow ones stay in e until they are large. With plain
    SGD the step is c - eta*sign(s). (arXiv 2411.19870.) In the released code the chunks are tiles
    of each tensor, coefficients travel as float32, and eta is a factor of g in e; here the chunks
    are of the flat vector, and the codec sends two bits a value. Nothing is clipped: all signs have
    the same length. A place without a gradient moves, too, if its chunk has one elsewhere.

    Args:
        decay: b, in [0, 1].
    """

    name, source = "demo", "arXiv 2411.19870, chunks of the flat vector"
    lanes = ("coefficients",)
    sums = False
    compression = f"chunk-topk:8/{_CHUNK}"
    local_step = LocalStep(lr=1e-3)
    steps_along_gradient = False

    def __init__(self, *, decay: float = 0.999) -> None:
        self.feedback_decay = between("decay", decay, 0, 1)

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return the coefficients of the sum of n * g, which weighs n."""
        coefficients = cosine_transform(replica.gradient, out=out["coefficients"])
        return Message({"coefficients": coefficients}, weight=replica.since.samples)

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step the optimizer along the sign of what the senders of each place mean."""
        assert state.step_along_ is not None
        total, weight = torch.zeros_like(center), torch.zeros_like(center)
        for letter in mail.each():
            sent = letter.lanes["coefficients"]
            total.add_(sent, alpha=letter.weight)
            weight.add_(sent != 0, alpha=letter.weight)
        mean = torch.where(weight > 0, total / weight, 0.0).double()
        step = cosine_transform(mean, out=torch.empty_like(mean), inverse=True)
        # Every rank takes this step: no sign may depend on how a processor rounds.
        step[step.abs() <= _ROUNDING * mean.abs().amax()] = 0.0
        state.step_along_(step.sign_().to(center))


def cosine_transform(values: Tensor, *, out: Tensor, inverse: bool = False) -> Tensor:
    """Return the orthonormal DCT-II of each chunk of 64 values, or its inverse, in ``out``.

    Both have shape [n]; the last n mod 64 values stay as they are.
    """
    whole = values.numel() // _CHUNK * _CHUNK
    waves = _waves(values.dtype, values.device)
    chunks = values[:whole].view(-1, _CHUNK)
    out[:whole] = (chunks @ (waves if inverse else waves.T)).view(-1)
    out[whole:] = values[whole:]
    return out


@functools.cache
def _waves(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the waves of the DCT-II as rows, shape [64, 64]."""
    number = torch.arange(_CHUNK, dtype=torch.float64)
    waves = torch.cos(math.pi / _CHUNK * number[:, None] * (number + 0.5)) * math.sqrt(2 / _CHUNK)
    waves[0] /= math.sqrt(2)
    return waves.to(device, dtype)
