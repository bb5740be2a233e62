"""The synchronous exchange: one all-reduce of one packed message, then a commit.

The message is ``weights | buffers | header`` in one contiguous tensor, so that a round is
one message. It is reduced into scratch memory; replica and center stay untouched until
the sum has arrived whole.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from raydl.center import Center
from raydl.replica import Header
from raydl.rules import Tally

_HEADER_SIZE = len(dataclasses.fields(Header))


class Work(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the tensor holds the sum.

        Raises:
            ExchangeError: it failed or took too long; the tensor's content is undefined.
        """
        ...


class Group(Protocol):
    """Workers that can sum tensors together."""

    @property
    def num_workers(self) -> int:
        """Members of the group."""
        ...

    def start_allreduce(self, tensor: Tensor, *, round: int) -> Work:
        """Begin to replace ``tensor`` by its sum over the members, and return at once."""
        ...


class SyncExchange:
    """One rank's side of the rounds of one generation.

    Args:
        group: the workers of this generation.
        center: this rank's copy of the center; all ranks have the same.
        round: the number of the first round.
    """

    def __init__(self, group: Group, center: Center, *, round: int) -> None:
        self.center = center
        self.round = round
        self._group = group
        self._work: Work | None = None
        self._tally = Tally(0, 0, 0.0)
        num_weights, num_buffers = center.weights.numel(), center.buffers.numel()
        self._message = center.weights.new_zeros(num_weights + num_buffers + _HEADER_SIZE)
        self._weights, self._buffers, self._header = torch.split(
            self._message, [num_weights, num_buffers, _HEADER_SIZE]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one message."""
        return self._message.numel() * self._message.element_size()

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Copy the message into scratch and start the sum."""
        assert self._work is None, "an exchange is under way"
        self._weights.copy_(weights)
        self._buffers.copy_(buffers)
        self._header.copy_(torch.tensor(dataclasses.astuple(header), dtype=self._header.dtype))
        self._work = self._group.start_allreduce(self._message, round=self.round)

    def wait(self) -> tuple[Tally, Header]:
        """Wait for the sum.

        Raises:
            ExchangeError: it failed or took too long; no tensor but the scratch changed.
        """
        assert self._work is not None, "begin comes first"
        work, self._work = self._work, None
        work.wait()
        sums = Header(*self._header.tolist())
        p = self._group.num_workers
        self._tally = Tally(num_workers=p, num_messages=p, num_samples=sums.num_samples)
        return self._tally, sums

    def commit(self) -> None:
        """Move the center by the sum that arrived."""
        self.center.apply_(self._weights, self._buffers, self._tally)
        self.round += 1
