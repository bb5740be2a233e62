"""The synchronous exchange of shortened messages: all gather them, each sums for itself.

Encoded numbers can not be added, so every rank sends its message to all others, who decode
and sum in the order of the ranks: the same bits everywhere. A rank sends p - 1 short
messages where the all-reduce of whole ones sends less than 2.

What a rule that sends weights leaves out is not lost: the message is the difference to the
center, and replica and center use the difference as it was decoded; the rest of it is still
between them at the next exchange. Gradients and progress are done with once they are sent,
so what is left out of them is kept and added to the next message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydl.center import Center
from raydl.compression import ErrorFeedback
from raydl.exchange.sync import HEADER_SIZE, Group, Work, packed_header, settled
from raydl.rules import Sends, Tally
from raydl.step_plan import Header


class GatheredExchange:
    """One rank's side of the rounds of one generation, for one span of the center.

    Args:
        group: the workers of this generation.
        center: this rank's copy of the span; all ranks have the same.
        span: which of the flat parameters it is.
        round: the number of the first round.
        sends: what the rule sends.
        feedback: this worker's codec, with what it has left out so far.
        group_size: workers that share one replica and send the same weights.
    """

    def __init__(
        self,
        group: Group,
        center: Center,
        *,
        span: slice,
        round: int,
        sends: Sends,
        feedback: ErrorFeedback,
        group_size: int = 1,
    ) -> None:
        self.center = center
        self.span = span
        self.round = round
        self._group = group
        self._sends = sends
        self._group_size = group_size
        self._feedback = feedback
        self._work: Work | None = None
        self._tally = Tally(0, 0, 0.0)
        num_weights, num_buffers = center.weights.numel(), center.buffers.numel()
        self._num_encoded = feedback.codec.num_bytes(num_weights)
        start = -(-self._num_encoded // 4) * 4  # floats begin at a multiple of their size
        self._rest = center.weights.new_zeros(num_buffers + HEADER_SIZE)
        self._buffers, self._header = self._rest[:num_buffers], self._rest[num_buffers:]
        num_bytes = start + self._rest.numel() * self._rest.element_size()
        self._message = torch.zeros(num_bytes, dtype=torch.uint8, device=center.weights.device)
        self._message_rest = self._message[start:].view(self._rest.dtype)
        self._all = self._message.new_zeros((group.num_workers, num_bytes))
        self._all_rest = self._all[:, start:].view(self._rest.dtype)
        self._total = torch.zeros_like(center.weights)
        self._decoded = torch.zeros_like(center.weights)
        self._seen = torch.zeros_like(center.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of one message."""
        return self._message.numel()

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Encode the message and start to gather."""
        assert self._work is None, "an exchange is under way"
        encoded = self._message[: self._num_encoded]
        if self._sends is Sends.WEIGHTS:
            codec = self._feedback.codec
            codec.encode(torch.sub(weights, self.center.weights, out=self._total), out=encoded)
            codec.decode(encoded, out=self._decoded)
            torch.add(self.center.weights, self._decoded, out=self._seen)
        else:
            encoded.copy_(self._feedback.encode(weights.contiguous()))
        num_buffers = self.center.buffers.numel()
        if num_buffers:
            self._message_rest[:num_buffers] = buffers
        self._message_rest[num_buffers:] = packed_header(header, self._rest.dtype)
        self._work = self._group.start_allgather(self._message, self._all, round=self.round)

    def own_pull(self) -> None:
        """Return None: the replica finds it."""

    def as_seen(self, weights: Tensor) -> Tensor:
        """Return the weights that were sent as all ranks decode them."""
        return self._seen

    def wait(self) -> tuple[Tally, Header]:
        """Wait for all messages and sum them.

        Raises:
            ExchangeError: it failed or took too long; no tensor but the scratch changed.
        """
        assert self._work is not None, "begin comes first"
        work, self._work = self._work, None
        work.wait()
        codec = self._feedback.codec
        self._total.zero_()
        self._rest.zero_()
        for rank in range(self._group.num_workers):
            codec.decode(self._all[rank, : self._num_encoded], out=self._decoded)
            self._total.add_(self._decoded)
            self._rest.add_(self._all_rest[rank])
        self._tally, sums = settled(
            self._group, self._group_size, self._total, self._buffers, self._header
        )
        if self._sends is Sends.WEIGHTS:
            self._total.add_(self.center.weights, alpha=self._tally.num_messages)
        return self._tally, sums

    def commit(self) -> None:
        """Move the center by the sum, and keep what the own message left out."""
        self.center.apply_(self._total, self._buffers, self._tally)
        if self._sends is not Sends.WEIGHTS:
            self._feedback.commit()
        self.round += 1
