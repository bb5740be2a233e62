"""Error feedback: what a lossy codec leaves out of a message is added to later ones.

    symbol  name here   meaning
    v       values      the vector to send, float32, shape [n]
    e       residual    the part that earlier messages left out, shape [n]
    m       decoded     the vector that the receiver decodes, shape [n]
    s       share       what the message counts at the receiver, relative to the mean message
    r       scale       the s of the message before, at least 1
    b       decay       share of e that a message takes along, 1 but for some methods
    C(.)                encode, then decode

    error feedback:     m = C(v + b*e/r) ; e <- b*e + s * (v - m) ; r <- max(1, s)

s is 1 if all messages of a sum count the same: then e <- (v + e) - m. It is 0 for a message that
the receiver ignores, such as a gradient without samples. s is known only once all messages have
arrived. Without r a sender whose messages count more than twice the mean would send e several times
over, and e would grow. The residual is in units of the values. It does not depend on the codec, so
a codec may change, also to none.

The codecs are in ``raydl.core.codecs``.

Sources: Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019, arXiv 1901.09847 (error
feedback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydl.core.codecs import Codec, message_for


class ErrorFeedback:
    """A codec that adds the parts left out of earlier messages to later ones.

    Without decay the sum of all s * m and the last e is the sum of all s * v: values are delayed,
    not lost.
    ``encode`` begins an exchange, ``commit`` ends a successful one. Without ``commit`` the residual
    stays, and the next ``encode`` discards the message. Memory: three vectors and a message.

    Args:
        codec: encodes.
        decay: b, in [0, 1].

    Attributes:
        residual: e after the last commit, shape [n]; [0] before the first ``encode``.
        decoded: m of the last message, shape [n]; the next ``encode`` overwrites it.
        message: (generation, number) of the last message while it is open, if its receiver numbers
            messages; the sender sets it, to ask later whether the message was applied.
    """

    def __init__(self, codec: Codec, *, decay: float = 1.0) -> None:
        self.codec = codec
        self._decay = decay
        self.residual = self.decoded = self._next = torch.zeros(0)
        self.message: tuple[int, int] | None = None
        self._message = torch.zeros(0, dtype=torch.uint8)
        self._share = self._scale = 1.0
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether the last message is neither committed nor discarded."""
        return self._is_open

    @property
    def holds_back(self) -> bool:
        """Whether earlier messages have left anything out."""
        return bool(len(self.residual)) and bool(self.residual.any())

    def norm(self) -> float:
        """Return the L2 norm of the residual."""
        return float(torch.linalg.vector_norm(self.residual)) if len(self.residual) else 0.0

    def encode(self, values: Tensor, *, share: float = 1.0) -> Tensor:
        """Return the message of values + residual; the next call overwrites it.

        Args:
            values: float32, shape [n].
            share: s, as far as the sender knows it.
        """
        if self._next.shape != values.shape:
            residual = self.residual if len(self.residual) else torch.zeros_like(values)
            assert residual.shape == values.shape, (residual.shape, values.shape)
            self.residual = residual.to(values)
            self.decoded, self._next = torch.empty_like(values), torch.empty_like(values)
            self._message = message_for(self.codec, values, None)
        torch.add(values, self.residual, alpha=self._decay / self._scale, out=self._next)
        self.codec.encode(self._next, out=self._message)
        self.codec.decode(self._message, out=self.decoded)
        self._next.sub_(self.decoded)
        self._share, self._is_open, self.message = share, True, None
        return self._message

    def commit(self, share: float | None = None) -> None:
        """Keep what the last message has left out; its exchange succeeded.

        Args:
            share: s, if it is known only now; None: that of ``encode``.
        """
        assert self._is_open, "commit at most once after each encode"
        share = self._share if share is None else share
        sent = self._sent(share)
        if sent is not self.residual:
            self.residual, self._next = sent, self.residual
            self._scale = max(1.0, share)
        self.discard()

    def discard(self) -> None:
        """Forget the last message: it had no effect."""
        self._is_open, self.message = False, None

    def clear(self) -> None:
        """Forget the last message and the residual, and release all memory."""
        self.discard()
        if len(self.residual):
            self.load_state_dict({"residual": torch.zeros(0)})
            self.decoded, self._message = torch.zeros(0), self._message[:0]

    def _sent(self, share: float) -> Tensor:
        """Return b*e + s * (v - m): the residual after the last message."""
        if not self._is_open or share == 0:
            return self.residual
        if share == self._scale == 1:
            return self._next
        # self._next is v + b*e/r - m.
        return self.residual * self._decay * (1 - share / self._scale) + self._next * share

    def open_norm(self) -> float:
        """Return by how much, as an L2 norm, the last message changes the residual."""
        return float(torch.linalg.vector_norm(self._sent(self._share) - self.residual))

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the committed residual, on the CPU."""
        return _state(self.residual, self._scale)

    def sent_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state as if the exchange of the last message had succeeded.

        What the message counted in the sum is known only to those that received the sum: s is that
        of ``encode``.
        """
        return _state(self._sent(self._share), self._scale)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, and discard the last message."""
        self.residual, self._next = state["residual"].clone(), torch.zeros(0)
        self._scale = state.get("scale", 1.0)  # not in the states of earlier versions
        self.discard()


@dataclass(frozen=True)
class LostResidual:
    """What messages have left out and no later message will contain."""

    norm: float | None
    """Its L2 norm, in units of a message; None: not known."""
    why: str
    """The reason: the last part of a sentence."""

    def sentence(self, worker_id: str) -> str:
        """Return what a worker has lost, in one sentence."""
        size = "" if self.norm is None else f", of L2 norm {self.norm:.3g},"
        return f"what compressed messages of {worker_id} had left out{size} is lost: {self.why}"


def _state(residual: Tensor, scale: float) -> dict[str, Any]:
    # Earlier versions encoded gradients as sums over the samples, and had no entry "of".
    return {"residual": residual.to("cpu", copy=True), "of": "mean", "scale": scale}


def redistribute_residuals(
    feedback: Mapping[tuple[int, int], ErrorFeedback],
    spans: Sequence[tuple[int, int]],
    *,
    num_lanes: int = 1,
) -> dict[tuple[int, int], ErrorFeedback]:
    """Return codecs for other spans of the same parameters, with the same residuals.

    Their r is the largest one, so that no message sends more of its residual than it would have.

    Args:
        feedback: codecs of one kind by span, at least one.
        spans: contiguous spans, [start, stop) each.
        num_lanes: number of vectors that a residual is of, one after the other.
    """
    first = next(iter(feedback.values()))
    residuals = {span: old.residual for span, old in feedback.items() if len(old.residual)}
    if not residuals:
        return {}
    whole = next(iter(residuals.values())).new_zeros(num_lanes, spans[-1][1])
    for (start, stop), residual in residuals.items():
        whole[:, start:stop] = residual.view(num_lanes, -1)
    scale = max(old._scale for old in feedback.values())
    redistributed = {span: ErrorFeedback(first.codec, decay=first._decay) for span in spans}
    for (start, stop), new in redistributed.items():
        new.load_state_dict({"residual": whole[:, start:stop].reshape(-1), "scale": scale})
    return redistributed
