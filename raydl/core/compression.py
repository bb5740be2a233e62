"""Lossy codecs for exchanged vectors, with error feedback.

    symbol  name here   meaning
    v       values      the vector to send, float32, shape [n]
    e       residual    the part that earlier messages left out, shape [n]
    m       decoded     the vector that the receiver decodes, shape [n]
    s       share       what the message counts at the receiver, relative to the mean message
    r       scale       the s of the message before, at least 1
    C(.)                encode, then decode

    error feedback:     m = C(v + e/r) ; e <- e + s * (v - m) ; r <- max(1, s)

s is 1 if all messages of a sum count the same: then e <- (v + e) - m. It is 0 for a message that
the receiver ignores, such as a gradient without samples. s is known only once all messages have
arrived. Without r a sender whose messages count more than twice the mean would send e several times
over, and e would grow. The residual is in units of the values. It does not depend on the codec, so
a codec may change, also to none.

The size of a message depends on n alone; its byte order is the machine's. Equal values give equal
bytes. Non-finite values stay non-finite, so that a diverged run is noticed.

Sources: Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019, arXiv 1901.09847 (error
feedback); Aji & Heafield 2017, arXiv 1704.05021, and Stich et al. 2018, arXiv 1809.07599
(top-k); after Alistarh et al. 2017, arXiv 1610.02132 (QSGD; int8, without its coin).
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from raydl.errors import ConfigError


class Codec(Protocol):
    """Encodes a float32 vector as bytes and decodes it."""

    name: str
    """The setting that ``parse_codec`` accepts."""

    def num_bytes(self, num_values: int) -> int:
        """Return the exact size of a message in bytes."""

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the message: uint8, shape [num_bytes(n)], on the device of the values."""

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Overwrite ``out``, float32, shape [n]; the message may start at any byte."""


class _Cast:
    """Casts each value to another dtype."""

    name: str
    dtype: torch.dtype

    def num_bytes(self, num_values: int) -> int:
        return self.dtype.itemsize * num_values

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        message = _message(self, values, out)
        message.view(self.dtype).copy_(values)
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(_aligned(self, message, out).view(self.dtype))


class Plain(_Cast):
    """Values without encoding: decodes to the same bits."""

    name, dtype = "none", torch.float32


class BFloat16(_Cast):
    """Values rounded to the nearest bfloat16, ties to even: relative error at most 2^-8."""

    name, dtype = "bf16", torch.bfloat16


class Int8Blocks:
    """One byte per value, and per block its largest magnitude s as float32.

    q = round(v / s * 127) ; m = q / 127 * s, with an error of at most s / 254. The message is all
    s, then all q. A block with a non-finite value decodes to NaN as a whole.

    Args:
        block_size: values that share one s; the last block may be shorter.
    """

    def __init__(self, block_size: int = 1024) -> None:
        self.name, self.block_size = "int8", block_size

    def num_bytes(self, num_values: int) -> int:
        """Return n + 4 per block."""
        return num_values + 4 * -(-num_values // self.block_size)

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return all s, then all q."""
        message = _message(self, values, out)
        for part, scale, level in self._groups(values, message):
            rows = pad(part, (0, -len(part) % self.block_size)).view(-1, self.block_size)
            low, high = rows.aminmax(dim=1)  # NaN if any value is
            torch.maximum(low.abs(), high.abs(), out=scale)
            # Divide first: 127 / s may overflow. NaN becomes q = 0; it comes from 0 / 0 in a
            # block of zeros, or from a block whose s is not finite.
            levels = (rows / scale[:, None]).mul_(127).round_().nan_to_num_(nan=0)
            level.copy_(levels.view(-1)[: len(level)])
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Return q / 127 * s."""
        for part, scale, level in self._groups(out, _aligned(self, message, out)):
            steps = scale.repeat_interleave(self.block_size)[: len(part)]
            part.copy_(level).div_(127).mul_(steps)
        return out

    def _groups(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (v, s, q) of several blocks at a time, so that scratch memory is 4 MiB."""
        start, step = len(message) - len(values), max(1, 2**20 // self.block_size)
        scales, levels = message[:start].view(torch.float32), message[start:].view(torch.int8)
        for block in range(0, len(scales), step):
            span = slice(block * self.block_size, (block + step) * self.block_size)
            yield values[span], scales[block : block + step], levels[span]


class TopK:
    """The k = max(1, ceil(share * n)) values of largest magnitude; all others become 0.

    NaN ranks above infinities, infinities above numbers; among equal magnitudes the lower index
    is sent. The message is the indices as int32 in ascending order, then their values as float32.
    n < 2^31.

    Args:
        share: in (0, 1], read as a decimal number: 0.07 of 100 is 7, not 8.
    """

    def __init__(self, share: float) -> None:
        self.name, self.share = f"topk:{share}", share

    def num_bytes(self, num_values: int) -> int:
        """Return 8 * k, or 0 for no values."""
        k = math.ceil(Fraction(str(self.share)) * num_values)
        return 8 * min(max(1, k), num_values)

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the indices and the values of the k largest."""
        message = _message(self, values, out)
        half = len(message) // 2
        k = half // 4
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # integers in the same order, NaN last
        # Which of several equal values torch.topk returns is undefined, so only its smallest
        # magnitude is used.
        limit = magnitudes.topk(k, sorted=False).values.amin() if k else 0
        above = (magnitudes > limit).nonzero()[:k, 0]
        equal = (magnitudes == limit).nonzero()[: k - len(above), 0]
        largest = torch.cat([above, equal]).sort().values
        message[:half].view(torch.int32).copy_(largest)
        message[half:].view(torch.float32).copy_(values[largest])
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Return the sent values, and zeros elsewhere."""
        message, half = _aligned(self, message, out), len(message) // 2
        indices, sent = message[:half].view(torch.int32), message[half:].view(torch.float32)
        return out.zero_().index_copy_(0, indices.long(), sent)


def parse_codec(text: str) -> Codec:
    """Return the codec for ``none``, ``bf16``, ``int8`` or ``topk:SHARE``.

    Raises:
        ConfigError: for any other text.
    """
    simple: dict[str, Codec] = {"none": Plain(), "bf16": BFloat16(), "int8": Int8Blocks()}
    if text in simple:
        return simple[text]
    name, _, share = text.partition(":")
    with contextlib.suppress(ValueError):
        if name == "topk" and 0 < float(share) <= 1:
            return TopK(float(share))
    near = difflib.get_close_matches(name.lower(), [*simple, "topk"], n=1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    problem = f"must be none, bf16, int8 or topk:SHARE with SHARE in (0, 1], got {text!r}"
    raise ConfigError("exchange.compression", problem + hint)


class ErrorFeedback:
    """A codec that adds the parts left out of earlier messages to later ones.

    The sum of all s * m and the last e is the sum of all s * v: values are delayed, not lost.
    ``encode`` begins an exchange, ``commit`` ends a successful one. Without ``commit`` the residual
    stays, and the next ``encode`` discards the message. Memory: three vectors and a message.

    Attributes:
        residual: e after the last commit, shape [n]; [0] before the first ``encode``.
        decoded: m of the last message, shape [n]; the next ``encode`` overwrites it.
        message: (generation, number) of the last message while it is open, if its receiver numbers
            messages; the sender sets it, to ask later whether the message was applied.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
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
            self._message = _message(self.codec, values, None)
        torch.add(values, self.residual, alpha=1 / self._scale, out=self._next)
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
        """Return e + s * (v - m): the residual after the last message."""
        if not self._is_open or share == 0:
            return self.residual
        if share == self._scale == 1:
            return self._next
        # self._next is v + e/r - m.
        return self.residual * (1 - share / self._scale) + self._next * share

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
    feedback: Mapping[tuple[int, int], ErrorFeedback], spans: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], ErrorFeedback]:
    """Return codecs for other spans of the same parameters, with the same residuals.

    Their r is the largest one, so that no message sends more of its residual than it would have.

    Args:
        feedback: codecs of one kind by span, at least one.
        spans: contiguous spans, [start, stop) each.
    """
    codec = next(iter(feedback.values())).codec
    residuals = {span: old.residual for span, old in feedback.items() if len(old.residual)}
    if not residuals:
        return {}
    whole = next(iter(residuals.values())).new_zeros(spans[-1][1])
    for (start, stop), residual in residuals.items():
        whole[start:stop] = residual
    scale = max(old._scale for old in feedback.values())
    redistributed = {span: ErrorFeedback(codec) for span in spans}
    for (start, stop), new in redistributed.items():
        new.load_state_dict({"residual": whole[start:stop], "scale": scale})
    return redistributed


def _message(codec: Codec, values: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, which must start at a multiple of 4 bytes, or memory for a message."""
    assert values.dtype == torch.float32, values.dtype
    num_bytes = codec.num_bytes(len(values))
    if out is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    assert out.shape == (num_bytes,), (codec.name, out.shape, num_bytes)
    return out


def _aligned(codec: Codec, message: Tensor, out: Tensor) -> Tensor:
    """Return the message, copied if it is not aligned for a view of four-byte numbers."""
    assert len(message) == codec.num_bytes(len(out)), (codec.name, message.shape, out.shape)
    return message.clone() if message.storage_offset() % 4 else message
