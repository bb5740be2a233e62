"""The synchronous exchange: one all-reduce of one packed message, then a commit.

The message is ``weights | buffers | header`` in one contiguous tensor, so that an exchange
is one message. It is reduced into scratch memory; replica and center stay untouched until
the sum has arrived whole.

SC17's three steps of co-design are settings of it. EASGD1: staged through host memory,
nothing overlapped; EASGD2: resident on the device; EASGD3: overlapped with the gradient
(``StepPlan.overlap``). All three compute the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raydl.center import Center, Mirror
from raydl.exchange.staging import host_like
from raydl.metrics import TimeParts
from raydl.reports import AllreduceReport
from raydl.rules import Tally
from raydl.step_plan import Exchange, Header

HEADER_SIZE = len(dataclasses.fields(Header))
"""Numbers of a header in a message."""


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

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> Work:
        """Begin to fill ``out``, shape [num_workers, n], with all ``tensor``, shape [n]."""
        ...

    def report(self) -> AllreduceReport | None:
        """Return how large messages are summed, for a group that chooses for itself."""
        ...


def packed_header(header: Header, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a header, shape [HEADER_SIZE]."""
    return torch.tensor(header.numbers(), dtype=dtype)


def settled(
    group: Group, group_size: int, weights: Tensor, buffers: Tensor, header: Tensor
) -> tuple[Tally, Header]:
    """Return what sums over all workers are made of, and the header sums.

    The sums become those over replicas, in place: each is in them as often as workers
    share it.
    """
    num_replicas = group.num_workers // group_size
    if group_size > 1:
        weights.div_(group_size)
        buffers.div_(group_size)
    sums = Header(*header.tolist())
    return Tally(num_replicas, num_replicas, sums.num_samples), sums


class SyncExchange:
    """One rank's side of the rounds of one generation, for one span of the center.

    Args:
        group: the workers of this generation.
        center: this rank's copy of the span; all ranks have the same.
        span: which of the flat parameters it is.
        round: the number of the first round.
        pieces: sizes to send one by one, summing to the message's weights; None: all in one
            message.
        group_size: workers that share one replica and send the same weights.
    """

    def __init__(
        self,
        group: Group,
        center: Center,
        *,
        span: slice,
        round: int,
        pieces: Sequence[int] | None = None,
        group_size: int = 1,
    ) -> None:
        self.center = center
        self.span = span
        self.round = round
        self._group = group
        self._group_size = group_size
        self._work: list[Work] = []
        self._tally = Tally(0, 0, 0.0)
        num_weights, num_buffers = center.weights.numel(), center.buffers.numel()
        rest = num_buffers + HEADER_SIZE
        self._message = center.weights.new_zeros(num_weights + rest)
        self._weights, self._buffers, self._header = torch.split(
            self._message, [num_weights, num_buffers, HEADER_SIZE]
        )
        self._pieces: tuple[Tensor, ...] = (self._message,)
        if pieces is not None:
            assert sum(pieces) == num_weights
            self._pieces = torch.split(self._message, [*pieces, rest])

    @property
    def num_bytes(self) -> int:
        """Bytes of one exchange."""
        return self._message.numel() * self._message.element_size()

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Copy the message into scratch and start the sum."""
        assert not self._work, "an exchange is under way"
        self._weights.copy_(weights)
        if self._buffers.numel():
            self._buffers.copy_(buffers)
        self._header.copy_(packed_header(header, self._header.dtype))
        self._work = [
            self._group.start_allreduce(piece, round=self.round) for piece in self._pieces
        ]

    def own_pull(self) -> None:
        """Return None: the replica finds it."""

    def as_seen(self, weights: Tensor) -> Tensor:
        """Return the weights that were sent, as they are."""
        return weights

    def wait(self) -> tuple[Tally, Header]:
        """Wait for the sum.

        Raises:
            ExchangeError: it failed or took too long; no tensor but the scratch changed.
        """
        assert self._work, "begin comes first"
        work, self._work = self._work, []
        for piece in work:
            piece.wait()
        self._tally, sums = settled(
            self._group, self._group_size, self._weights, self._buffers, self._header
        )
        return self._tally, sums

    def commit(self) -> None:
        """Move the center by the sum that arrived."""
        self.center.apply_(self._weights, self._buffers, self._tally)
        self.round += 1


class OnDevice(Exchange, Protocol):
    """An exchange whose center lies where its messages are made."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one exchange."""
        ...


class StagedExchange:
    """An exchange whose message and center lie in host memory, as in SC17's EASGD1.

    The weights are copied to the host before each exchange and the center back after it;
    without staging both stay where the replica computes.

    Args:
        inner: the exchange among tensors in host memory.
        device: where the replica computes.
        time_parts: where the copying is counted.
    """

    def __init__(self, inner: OnDevice, device: torch.device, time_parts: TimeParts) -> None:
        self._inner = inner
        self._parts = time_parts
        weights, buffers = inner.center.weights, inner.center.buffers
        self.center = Mirror(weights.to(device, copy=True), buffers.to(device, copy=True))
        self._host = host_like(self.center.weights)
        self._host_buffers = host_like(self.center.buffers)

    @property
    def span(self) -> slice:
        """Which of the flat parameters travel."""
        return self._inner.span

    @property
    def num_bytes(self) -> int:
        """Bytes of one exchange."""
        return self._inner.num_bytes

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Copy to the host and start the sum there."""
        with self._parts.measure("host_device_parameters"):
            self._host.copy_(weights)
            if self._host_buffers.numel():
                self._host_buffers.copy_(buffers)
        self._inner.begin(self._host, self._host_buffers, header)

    def own_pull(self) -> None:
        """Return None: the replica finds it."""

    def as_seen(self, weights: Tensor) -> Tensor:
        """Return the weights that were sent as the ranks see them, on the device."""
        seen = self._inner.as_seen(self._host)
        return weights if seen is self._host else seen.to(weights.device)

    def wait(self) -> tuple[Tally, Header]:
        """Wait for the sum. Raises what the inner exchange does."""
        return self._inner.wait()

    def commit(self) -> None:
        """Move the center on the host, and copy it to the device."""
        self._inner.commit()
        with self._parts.measure("host_device_parameters"):
            self.center.weights.copy_(self._inner.center.weights)
            self.center.buffers.copy_(self._inner.center.buffers)
