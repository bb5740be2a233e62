"""The synchronous exchange: one all-reduce of one packed message, then a commit.

The message is ``weights | buffers | header`` in one contiguous tensor. It is reduced into scratch
memory; replica and center do not change until the complete sum has arrived.

SC17's three co-design steps are settings of it. EASGD1: staged through host memory, without
overlap; EASGD2: resident on the device; EASGD3: overlapped with the gradient
(``StepPlan.overlap``). All three compute the same.

Encoded values cannot be added. So each rank sends its compressed message to all others, and each
decodes and sums all messages in rank order: the same bits everywhere. A rank then sends p - 1 short
messages, where the all-reduce of uncompressed ones sends less than 2. Of weights, which are sent
ahead, a lossy codec loses nothing: the message is the difference to the center, replica and
center apply the difference as decoded, and the remainder is still part of the difference at the
next exchange. All else is sent only once, so error feedback adds the residual to the next message.
A sum of gradients is encoded as the mean over its samples, and each rank weighs it by their number,
from the header: the residual of a full batch may meet a small one, or none. If the codec was
changed to none, the next uncompressed message contains the residual.

SC17 partitions a chip into groups of cores that keep identical weights by summing gradients; here
a group of workers is one replica in several processes. Only groups exchange with the center.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from raydl.core.center import Center, Mirror
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Arrival, Header, host_like, mean_message, toward_center
from raydl.core.reports import AllreduceReport
from raydl.core.rules import Letter, Mail, Message, Now, Rule, State
from raydl.metrics import TimeParts

HEADER_SIZE = len(dataclasses.fields(Header))
"""Number of header values in a message."""
_EXACT = 2**24
"""Whole numbers up to this one are exact in float32."""


class Work(Protocol):
    """A collective operation in progress."""

    def wait(self) -> None:
        """Wait until the tensor holds the result.

        Raises:
            ExchangeError: if it failed or timed out; the tensor's content is undefined.
        """
        ...


class Group(Protocol):
    """Workers that sum and gather tensors together."""

    num_workers: int
    """Number of members."""

    def start_allreduce(self, tensor: Tensor, *, round: int) -> Work:
        """Start to replace ``tensor`` by its sum over the members, and return at once."""
        ...

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> Work:
        """Start to fill ``out``, shape [num_workers, n], with every ``tensor``, shape [n]."""
        ...

    def raise_if_abandoned(self, *, round: int) -> None:
        """Raise an ExchangeError if this member is to leave the group at once."""
        ...

    def report(self) -> AllreduceReport | None:
        """Return how large messages are summed, or None if the group does not choose."""
        ...


def gather_numbers(
    group: Group, rank: int, numbers: Sequence[float], *, round: int, device: torch.device
) -> list[list[float]]:
    """Return some numbers of all workers, the same on all ranks, by one small all-reduce.

    Args:
        group: the workers.
        rank: of this worker.
        numbers: of this worker; they are rounded to float32.
        round: number of the round.
        device: where the group sums.

    Returns:
        A list for each number, with its values by rank.

    Raises:
        ExchangeError: if a worker did not take part.
    """
    table = torch.zeros(len(numbers), group.num_workers, dtype=torch.float32, device=device)
    table[:, rank] = torch.tensor(numbers, dtype=torch.float32, device=device)
    group.start_allreduce(table.view(-1), round=round).wait()
    gathered: list[list[float]] = table.tolist()
    return gathered


def gather_bytes(
    group: Group, rank: int, own: bytes, *, round: int, device: torch.device
) -> list[bytes]:
    """Return some bytes of all workers, by rank, the same on all ranks.

    Args:
        group: the workers.
        rank: of this worker.
        own: of this worker; their number may differ from rank to rank.
        round: number of the round.
        device: where the group gathers.

    Raises:
        ExchangeError: if a worker did not take part.
    """
    parts = gather_numbers(group, rank, divmod(len(own), _EXACT), round=round, device=device)
    sizes = [int(high) * _EXACT + int(low) for high, low in zip(*parts, strict=True)]
    message = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    if own:
        message[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    gathered = torch.empty(group.num_workers, len(message), dtype=torch.uint8, device=device)
    group.start_allgather(message.to(device), gathered, round=round).wait()
    rows = gathered.cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _whole() -> float:
    return 1.0


class _Tail:
    """The numbers at the end of a message: those of the header, then those of the rule.

    Args:
        rule: names its numbers.
    """

    def __init__(self, rule: Rule) -> None:
        self._names = rule.numbers
        self.size = HEADER_SIZE + len(rule.numbers)
        """How many numbers it has."""

    def write(self, out: Tensor, message: Message, header: Header) -> None:
        """Write the numbers, with the weight of the message, and those of the rule times it."""
        header = replace(header, weight=message.weight)
        own = [message.numbers[name] * message.weight for name in self._names]
        out.copy_(torch.tensor([*header.numbers(), *own], dtype=out.dtype))

    def read(self, values: Sequence[float]) -> tuple[Header, dict[str, float]]:
        """Return the header and the numbers of a message, or their sums over several."""
        own = zip(self._names, values[HEADER_SIZE:], strict=True)
        return Header(*values[:HEADER_SIZE]), dict(own)


class _Sums:
    """The sums of one exchange over all ranks, in scratch memory.

    Args:
        rule: of the exchange.
        group_size: number of workers that share one replica and send the same values.
        share_of_round: see ``raydl.core.rules.Now``.
    """

    def __init__(self, rule: Rule, group_size: int, share_of_round: Callable[[], float]) -> None:
        self._rule = rule
        self._group_size = group_size
        self._share_of_round = share_of_round
        self.header = Header()
        self.now = Now(1)
        self.mail = Mail({}, count=0, weight=0.0)

    def take(
        self,
        num_workers: int,
        values: Tensor,
        buffers: Tensor,
        header: Header,
        numbers: dict[str, float],
        *,
        lanes: Sequence[str] = (),
    ) -> None:
        """Turn sums over workers into sums over replicas, in place.

        The sums contain each replica once for each of the workers that share it.

        Args:
            num_workers: number of workers.
            values: sums of the lanes, one after the other.
            buffers: sums of the float buffers.
            header: sums of the header.
            numbers: sums of the rule's numbers.
            lanes: names of the lanes; empty: all.
        """
        size = self._group_size
        num_replicas = num_workers // size
        if size > 1:
            values.div_(size)
            buffers.div_(size)
            numbers = {name: number / size for name, number in numbers.items()}
        self.header, self.now = header, Now(num_replicas, self._share_of_round())
        sums = self._rule.lanes_of(values, lanes)
        self.mail = Mail(sums, num_replicas, header.weight / size, numbers)


class _Feedback:
    """What a rank's messages have left out, in one span.

    Args:
        feedback: this worker's codec, with its residual so far.
        rule: of the exchange.
        num_workers: number of messages in a sum.
    """

    def __init__(self, feedback: ErrorFeedback, rule: Rule, num_workers: int) -> None:
        self._feedback = feedback
        self._is_sum = not rule.takes_steps
        self._num_workers = num_workers
        self._weight = 1.0

    def encode(self, values: Tensor, weight: float) -> Tensor:
        """Return the message of values + residual; of a sum, in the unit of its mean."""
        self._weight = weight
        mean = mean_message(values, weight) if self._is_sum else values.contiguous()
        return self._feedback.encode(mean, share=float(weight > 0))

    def complete(self, values: Tensor, weight: float) -> Tensor:
        """Return values + residual, times the weight, without a codec."""
        if self._feedback.holds_back:
            self.encode(values, weight)
            return self._feedback.decoded.mul_(weight)
        self._feedback.clear()
        return values if self._is_sum or weight == 1 else values * weight

    @property
    def decoded(self) -> Tensor:
        """The newest message, as its receivers decoded it."""
        return self._feedback.decoded

    def commit(self, sums: Header) -> None:
        """Keep what the message has left out, by what it counted in the sum."""
        if not self._feedback.is_open:
            return
        mean_weight = sums.weight / self._num_workers
        self._feedback.commit(self._weight / mean_weight if mean_weight else 0.0)


class SyncExchange:
    """One rank's exchanges with one span of the center, in one generation.

    Args:
        group: the workers of this generation.
        center: this rank's copy of the span, the same on all ranks.
        span: the span, in the flat parameters.
        round: number of the first round.
        pieces: sizes of the parts to send one by one, which sum to the number of values; None:
            all in one message.
        feedback: what messages of an earlier codec have left out; None for weights.
        group_size: number of workers that share one replica and send the same weights.
        share_of_round: returns the share of a whole round that this round has, as all ranks know it
            (``raydl.core.rules.Now``).
    """

    def __init__(
        self,
        group: Group,
        center: Center,
        *,
        span: slice,
        round: int,
        pieces: Sequence[int] | None = None,
        feedback: ErrorFeedback | None = None,
        group_size: int = 1,
        share_of_round: Callable[[], float] = _whole,
    ) -> None:
        self.center = center
        self.span = span
        self.round = round
        self._group = group
        self._rule = center.rule
        self._tail = _Tail(center.rule)
        self._sums = _Sums(center.rule, group_size, share_of_round)
        self._feedback = (
            None if feedback is None else _Feedback(feedback, center.rule, group.num_workers)
        )
        self._work: list[Work] = []
        self._piece_sizes = pieces
        num_values = len(self._rule.lanes) * center.weights.numel()
        assert pieces is None or sum(pieces) == num_values
        rest = center.buffers.numel() + self._tail.size
        self._memory = center.weights.new_zeros(num_values + rest)
        self._lanes = self._rule.lanes
        """Those of the newest message, in order."""
        self._lay_out(num_values)

    def _lay_out(self, num_values: int) -> None:
        """Divide the memory for messages with so many values."""
        num_buffers = self.center.buffers.numel()
        rest = num_buffers + self._tail.size
        message = self._memory[: num_values + rest]
        self.num_bytes = message.nbytes
        """Bytes of the newest message."""
        self._values, self._buffers, self._numbers = torch.split(
            message, [num_values, num_buffers, self._tail.size]
        )
        self._pieces: tuple[Tensor, ...] = (message,)
        if self._piece_sizes is not None:
            num_sent = len(self._piece_sizes) * num_values // (len(self._memory) - rest)
            self._pieces = torch.split(message, [*self._piece_sizes[:num_sent], rest])

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Copy the message to scratch memory and start the sum."""
        assert not self._work, "an exchange is in progress"
        values = toward_center(self._rule.joined(message), self.center.weights, distrust)
        if self._feedback is not None:
            values = self._feedback.complete(values, message.weight)
        self._lanes = self._rule.lanes_in(message)
        if values.numel() != self._values.numel():
            self._lay_out(values.numel())
        self._values.copy_(values)
        if self._buffers.numel():
            self._buffers.copy_(buffers)
        self._tail.write(self._numbers, message, header)
        self._work = [
            self._group.start_allreduce(piece, round=self.round) for piece in self._pieces
        ]

    def wait(self) -> Arrival:
        """Wait for the sum.

        Raises:
            ExchangeError: if it failed or timed out; only scratch memory has changed.
        """
        assert self._work, "begin comes first"
        work, self._work = self._work, []
        for piece in work:
            piece.wait()
        self._sums.take(
            self._group.num_workers,
            self._values,
            self._buffers,
            *self._tail.read(self._numbers.tolist()),
            lanes=self._lanes,
        )
        return Arrival(self._sums.now, self._sums.header)

    def commit(self) -> None:
        """Move the center by the sum."""
        self.center.apply_(self._sums.mail, self._buffers, self._sums.now)
        if self._feedback is not None:
            self._feedback.commit(self._sums.header)
        self.round += 1


class StagedExchange:
    """An exchange whose message and center are in host memory, as in SC17's EASGD1.

    It copies the weights to the host before each exchange, and the center to the device after it.

    Args:
        inner: the exchange of tensors in host memory.
        device: the replica's device.
        time_parts: counts the time of the copies.
    """

    def __init__(
        self, inner: SyncExchange | GatheredExchange, device: torch.device, time_parts: TimeParts
    ) -> None:
        self.span = inner.span
        self._inner = inner
        self._parts = time_parts
        weights, buffers = inner.center.weights, inner.center.buffers
        state = State(
            {
                name: vector.to(device, copy=True)
                for name, vector in inner.center.state.vectors.items()
            }
        )
        self.center = Mirror(weights.to(device, copy=True), buffers.to(device, copy=True), state)
        num_values = len(inner.center.rule.lanes) * weights.numel()
        self._host = host_like(self.center.weights.new_empty(num_values))
        self._host_buffers = host_like(self.center.buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the newest message."""
        return self._inner.num_bytes

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Copy to the host and start the sum there."""
        rule = self._inner.center.rule
        lanes = rule.lanes_in(message)
        host = self._host[: len(lanes) * self.center.weights.numel()]
        with self._parts.measure("host_device_parameters"):
            host.copy_(toward_center(rule.joined(message), self.center.weights, distrust))
            if self._host_buffers.numel():
                self._host_buffers.copy_(buffers)
        on_host = replace(message, lanes=rule.lanes_of(host, lanes))
        self._inner.begin(on_host, self._host_buffers, header)

    def wait(self) -> Arrival:
        """Wait for the sum. Raises ExchangeError as the inner exchange does."""
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
            for name, vector in self._inner.center.state.vectors.items():
                self.center.state[name].copy_(vector)


class GatheredExchange:
    """One rank's exchanges of compressed messages with one span of the center.

    Args:
        group: the workers of this generation.
        center: this rank's copy of the span, the same on all ranks.
        span: the span, in the flat parameters.
        round: number of the first round.
        feedback: this worker's codec, with its residual so far.
        group_size: number of workers that share one replica and send the same weights.
        share_of_round: returns the share of a whole round that this round has, as all ranks know it
            (``raydl.core.rules.Now``).
    """

    def __init__(
        self,
        group: Group,
        center: Center,
        *,
        span: slice,
        round: int,
        feedback: ErrorFeedback,
        group_size: int = 1,
        share_of_round: Callable[[], float] = _whole,
    ) -> None:
        self.center = center
        self.span = span
        self.round = round
        self._group = group
        self._rule = center.rule
        self._tail = _Tail(center.rule)
        self._sums = _Sums(center.rule, group_size, share_of_round)
        self._feedback = _Feedback(feedback, center.rule, group.num_workers)
        self._codec = feedback.codec
        self._work: Work | None = None
        num_values = len(self._rule.lanes) * center.weights.numel()
        num_buffers = center.buffers.numel()
        self._num_encoded = self._codec.num_bytes(num_values)
        start = -(-self._num_encoded // 4) * 4  # floats begin at a multiple of their size
        self._rest = center.weights.new_zeros(num_buffers + self._tail.size)
        self._buffers, self._numbers = self._rest[:num_buffers], self._rest[num_buffers:]
        self.num_bytes = start + self._rest.nbytes
        """Bytes of one message."""
        self._message = torch.zeros(self.num_bytes, dtype=torch.uint8, device=center.weights.device)
        self._message_rest = self._message[start:].view(self._rest.dtype)
        self._all = self._message.new_zeros((group.num_workers, self.num_bytes))
        self._all_rest = self._all[:, start:].view(self._rest.dtype)
        self._total = center.weights.new_zeros(num_values)
        num_kept = 1 if self._rule.sums else group.num_workers
        self._decoded = center.weights.new_zeros(num_kept, num_values)
        """The newest message, or that of each rank for a rule without sums."""
        self._group_size = group_size
        self._seen = torch.zeros_like(center.weights)

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Encode the message and start to gather all messages."""
        assert self._work is None, "an exchange is in progress"
        values = toward_center(self._rule.joined(message), self.center.weights, distrust)
        encoded = self._message[: self._num_encoded]
        if self._rule.ahead:
            codec = self._codec
            codec.encode(torch.sub(values, self.center.weights, out=self._total), out=encoded)
            codec.decode(encoded, out=self._decoded[0])
            torch.add(self.center.weights, self._decoded[0], out=self._seen)
        else:
            encoded.copy_(self._feedback.encode(values, message.weight))
        num_buffers = self.center.buffers.numel()
        if num_buffers:
            self._message_rest[:num_buffers] = buffers
        self._tail.write(self._message_rest[num_buffers:], message, header)
        self._work = self._group.start_allgather(self._message, self._all, round=self.round)

    def wait(self) -> Arrival:
        """Wait for all messages and sum them.

        Raises:
            ExchangeError: if it failed or timed out; only scratch memory has changed.
        """
        assert self._work is not None, "begin comes first"
        work, self._work = self._work, None
        work.wait()
        weights: list[float] = []
        self._total.zero_()
        self._rest.zero_()
        for rank, numbers in enumerate(self._all_rest[:, self.center.buffers.numel() :].tolist()):
            decoded = self._decoded[rank % len(self._decoded)]
            self._codec.decode(self._all[rank, : self._num_encoded], out=decoded)
            header, _ = self._tail.read(numbers)
            weights.append(header.weight)
            self._total.add_(decoded, alpha=header.weight)
            self._rest.add_(self._all_rest[rank])
        self._sums.take(
            self._group.num_workers,
            self._total,
            self._buffers,
            *self._tail.read(self._numbers.tolist()),
        )
        sums = self._sums
        if not self._rule.sums:
            letters = zip(self._decoded, weights, strict=True)
            of_replicas = itertools.islice(letters, 0, None, self._group_size)
            sums.mail.letters = [Letter(self._rule.lanes_of(v), w) for v, w in of_replicas]
        if not self._rule.ahead:
            sent = self._rule.lanes_of(self._feedback.decoded)
            return Arrival(sums.now, sums.header, sent=sent)
        self._total.add_(self.center.weights, alpha=sums.mail.weight)
        return Arrival(sums.now, sums.header, seen=self._seen)

    def commit(self) -> None:
        """Move the center by the sum, and keep the residual of this rank's message."""
        self.center.apply_(self._sums.mail, self._buffers, self._sums.now)
        self._feedback.commit(self._sums.header)
        self.round += 1


class GradientGroup:
    """The workers that share one replica, as seen by one of them.

    Args:
        group: connects them.
        num_parameters: number of elements of a gradient.
        num_tensors: number of parameter tensors.
        dtype: of the gradients.
        device: where the group sums; the gradients may be on another device.
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
        self._gradients, self._is_reached, self._count = torch.split(self._message, sizes)
        self._step = 0

    def mean_(
        self, gradients: Tensor, count: float, is_reached: bytearray
    ) -> tuple[float, bytearray]:
        """Replace this worker's mean gradients by those of the joint batch.

        Args:
            gradients: of the mean loss over this worker's batch, shape [num_parameters].
            count: how much the batch counts; may be 0.
            is_reached: by parameter tensor, whether it has a gradient.

        Returns:
            The count of the joint batch, and by parameter tensor whether it has a gradient on any
            worker.

        Raises:
            ExchangeError: if a worker of the group disconnected or timed out; the gradients have
                not changed.
        """
        self._gradients.copy_(gradients).mul_(count)
        self._is_reached.copy_(torch.frombuffer(is_reached, dtype=torch.uint8))
        self._count[0] = count
        self._group.start_allreduce(self._message, round=self._step).wait()
        self._step += 1
        total = float(self._count[0])
        gradients.copy_(self._gradients)
        if total:
            gradients.div_(total)
        return total, bytearray((self._is_reached > 0).tolist())

    def bytes_of_first(self, data: bytes, *, is_first: bool) -> bytes:
        """Return the ``data`` of the group's first worker; that of the others is ignored.

        Raises:
            ExchangeError: if a worker of the group disconnected or timed out.
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
        """Replace tensors by those of the group's first worker; return which of them changed.

        Raises:
            ExchangeError: if a worker of the group disconnected or timed out; the tensors have not
                changed.
        """
        copies = [t.to(self._message.device, copy=True) for t in tensors]
        for copy in copies:
            if not is_first:
                copy.zero_()
            self._group.start_allreduce(copy, round=self._step).wait()
        pairs = [(t, copy.to(t.device)) for t, copy in zip(tensors, copies, strict=True)]
        have_changed = [not torch.equal(tensor, copy) for tensor, copy in pairs]
        for tensor, copy in pairs:
            tensor.copy_(copy)
        return have_changed
