"""The synchronous exchange: one all-reduce of one packed message, then a commit.

The message is ``weights | buffers | header`` in one contiguous tensor, so that an exchange
is one message. It is reduced into scratch memory; replica and center stay untouched until
the sum has arrived whole.

SC17's three steps of co-design are settings of it. EASGD1: staged through host memory,
nothing overlapped; EASGD2: resident on the device; EASGD3: overlapped with the gradient
(``StepPlan.overlap``). All three compute the same.

Encoded numbers can not be added, so every rank sends a compressed message to all others, and
each decodes and sums in the order of the ranks: the same bits everywhere. A rank sends p - 1
short messages where the all-reduce of whole ones sends less than 2. What a rule that sends weights
leaves out is not lost: the message is the difference to the center, and replica and center use the
difference as it was decoded; the rest of it is still between them at the next exchange. Gradients
and progress are done with once they are sent, so what is left out of them is kept and added to the
next message.

SC17 parts a chip into groups of cores whose copies of the weights stay identical by summing
gradients; here a group of workers is one replica in several processes. Only groups exchange
with the center.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from raydl.core.center import Center, Mirror
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Arrival, Exchange, Header, host_like
from raydl.core.reports import AllreduceReport
from raydl.core.rules import Sends, Tally
from raydl.metrics import TimeParts

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
    """Return the terms of the sums over all workers, and the header sums.

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

    def wait(self) -> Arrival:
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
        return Arrival(self._tally, sums)

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

    def wait(self) -> Arrival:
        """Wait for the sum. Raises what the inner exchange does."""
        arrival = self._inner.wait()
        if arrival.seen is None:
            return arrival
        return replace(arrival, seen=arrival.seen.to(self.center.weights.device))

    def commit(self) -> None:
        """Move the center on the host, and copy it to the device."""
        self._inner.commit()
        with self._parts.measure("host_device_parameters"):
            self.center.weights.copy_(self._inner.center.weights)
            self.center.buffers.copy_(self._inner.center.buffers)


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

    def wait(self) -> Arrival:
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
        if self._sends is not Sends.WEIGHTS:
            return Arrival(self._tally, sums)
        self._total.add_(self.center.weights, alpha=self._tally.num_messages)
        return Arrival(self._tally, sums, seen=self._seen)

    def commit(self) -> None:
        """Move the center by the sum, and keep what the own message left out."""
        self.center.apply_(self._total, self._buffers, self._tally)
        if self._sends is not Sends.WEIGHTS:
            self._feedback.commit()
        self.round += 1


class GradientGroup:
    """The workers that share one replica, as one of them sees them.

    Args:
        group: connects them.
        num_parameters: elements of a gradient.
        num_tensors: parameters that they are of.
        dtype: of the gradients.
        device: where the group sums; the gradients may be elsewhere.
    """

    def __init__(
        self,
        group: Group,
        num_parameters: int,
        num_tensors: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        sizes = [num_parameters, num_tensors, 1]
        self._message = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._gradients, self._is_reached, self._samples = torch.split(self._message, sizes)
        self._step = 0

    def mean_(
        self, gradients: Tensor, num_samples: int, is_reached: bytearray
    ) -> tuple[int, bytearray]:
        """Replace mean gradients by that of the joined batch; return its samples.

        Args:
            gradients: of the mean loss over ``num_samples`` samples, shape [num_parameters].
            num_samples: of this worker's batch; may be 0.
            is_reached: by parameter, whether it has a gradient.

        Returns:
            The samples of all, and which parameters have a gradient of anyone.

        Raises:
            ExchangeError: a worker of the group went away or took too long; the gradients
                are as they were.
        """
        self._gradients.copy_(gradients).mul_(num_samples)
        self._is_reached.copy_(torch.frombuffer(is_reached, dtype=torch.uint8))
        self._samples[0] = num_samples
        self._group.start_allreduce(self._message, round=self._step).wait()
        self._step += 1
        total = int(self._samples[0])
        gradients.copy_(self._gradients)
        if total:
            gradients.div_(total)
        return total, bytearray((self._is_reached > 0).tolist())

    def bytes_of_first(self, data: bytes, *, is_first: bool) -> bytes:
        """Return the bytes that the group's first worker gives; the others' count for nothing.

        Raises:
            ExchangeError: it went away or took too long.
        """
        device = self._message.device
        size = torch.tensor([len(data) if is_first else 0], device=device)
        self._group.start_allreduce(size, round=self._step).wait()
        content = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if is_first:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._group.start_allreduce(content, round=self._step).wait()
        return content.cpu().numpy().tobytes()

    def copy_first_(self, tensors: list[Tensor], *, is_first: bool) -> list[bool]:
        """Replace tensors by those of the group's first worker; return which were others.

        Raises:
            ExchangeError: it went away or took too long; the tensors are as they were.
        """
        copies = [t.to(self._message.device, copy=True) for t in tensors]
        for copy in copies:
            if not is_first:
                copy.zero_()
            self._group.start_allreduce(copy, round=self._step).wait()
        pairs = [(t, copy.to(t.device)) for t, copy in zip(tensors, copies, strict=True)]
        were_others = [not torch.equal(tensor, copy) for tensor, copy in pairs]
        for tensor, copy in pairs:
            tensor.copy_(copy)
        return were_others
