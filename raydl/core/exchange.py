"""The protocol of an exchange between a replica and the center.

``StepPlan`` lists the exchanges that start and complete in one local step. Every transport
implements ``Exchange``. Spans say which of the flat parameters a shard of the center or a fragment
holds. ``Staging`` moves parameters between a device and host memory, for a center elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raydl.core.center import Center, Mirror
from raydl.core.rules import Message, Now
from raydl.data.ledger import Span, split_evenly


@dataclass(frozen=True)
class Header:
    """Numbers that are sent with a message and summed over all workers.

    In a synchronous round every rank receives the same sums, so all ranks take the same decision
    without further messages. All fields describe the time since the last message.
    """

    stop: float = 0.0
    """Votes to end the run after this round."""
    regroup: float = 0.0
    """Votes to leave this generation after this round."""
    checkpoint: float = 0.0
    """Votes to keep the state of this round for a checkpoint."""
    lr_cut: float = 0.0
    """Votes to cut the learning rate again after this round."""
    score: float = 0.0
    """Votes to score the center of this round, the last one, if the workers score."""
    weight: float = 0.0
    """What this message counts in the sum."""
    loss_sum: float = 0.0
    """Sum of the mean losses of batches, each times what the batch counts."""
    loss_samples: float = 0.0
    """What the samples behind ``loss_sum`` count: all up to the previous step."""
    distance: float = 0.0
    """Squared distance to the center at the previous exchange."""
    step_s: float = 0.0
    """Seconds per local step in the previous round, without waiting."""
    waited_s: float = 0.0
    """Seconds waited for exchanges in the previous round."""
    elapsed_s: float = 0.0
    """Seconds of training so far, by this worker's clock."""
    equality: float = 0.0
    """Of two workers, their checksums with opposite signs; see
    ``raydl.collective.equal_replicas``."""

    def __add__(self, other: Header) -> Header:
        return Header(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def numbers(self) -> list[float]:
        """Return the fields in order; ``dataclasses.astuple`` takes forty times as long."""
        return list(vars(self).values())


@dataclass(frozen=True)
class Arrival:
    """Result of an exchange before it is committed."""

    now: Now
    sums: Header = Header()
    """Sums of the headers of all messages."""
    seen: Tensor | None = None
    """Weights as the center decoded and counted them, or None if no codec changed them."""
    sent: Mapping[str, Tensor] | None = None
    """The lanes of this worker's message as all decoded them, or None if no codec changed them."""
    pull: Tensor | None = None
    """Update that the replica subtracts, if the transport computed it while it moved the center.
    If None, the replica computes it from the center before the exchange."""
    distance_squared: float = 0.0
    """Squared distance between replica and center before the exchange, if ``pull`` is given."""


class Exchange(Protocol):
    """A replica's interface to a transport: transactions with one span of the center."""

    @property
    def span(self) -> slice:
        """The flat parameters that are exchanged."""
        ...

    @property
    def center(self) -> Center | Mirror:
        """The span of the center; until ``commit`` with its values before this exchange."""
        ...

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Begin to send copies; do not wait.

        Args:
            message: the rule's message for this span.
            buffers: float buffers, shape [num_buffers].
            header: numbers sent with the message.
            distrust: how little the weights count, 0..1: the center moves as if they were
                ``toward_center(weights, center, distrust)``, for the center that they meet.
        """
        ...

    def wait(self) -> Arrival:
        """Wait for the exchange to complete and return its result.

        Raises:
            ExchangeError: if the exchange failed or timed out; no tensor has changed.
        """
        ...

    def commit(self) -> None:
        """Update the center. Can not fail."""
        ...


def mean_message(message: Tensor, weight: float) -> Tensor:
    """Return a sum divided by its weight, contiguous: the mean gradient for a sum of gradients.

    Its unit is the same for every batch, so that it may be added to what earlier messages have left
    out. Without weight the sum is zero already.
    """
    return message.contiguous() if weight in (0, 1) else message / weight


def toward_center(weights: Tensor, center: Tensor, distrust: float) -> Tensor:
    """Return x + f * (c - x): the weights, closer to the center the less they are trusted."""
    return torch.lerp(weights, center, distrust) if distrust else weights


class Partners(Protocol):
    """Workers that share one replica; see ``raydl.collective.sync_exchange.GradientGroup``."""

    def mean_(
        self, gradients: Tensor, count: float, is_reached: bytearray
    ) -> tuple[float, bytearray]:
        """Replace a worker's mean gradient by the mean gradient of the joined batch.

        Args:
            gradients: shape [num_parameters].
            count: how much the batch of this worker counts.
            is_reached: for each parameter, whether it has a gradient.

        Returns:
            The count of all workers, and for each parameter whether any worker has a gradient.
        """
        ...

    def copy_first_(self, tensors: list[Tensor], *, is_first: bool) -> list[bool]:
        """Replace tensors by those of the first worker and return which of them differed."""
        ...

    def bytes_of_first(self, data: bytes, *, is_first: bool) -> bytes:
        """Return the first worker's bytes."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """Exchanges that start and complete in one local step."""

    begin: tuple[Exchange, ...] = ()
    """Exchanges that begin around this step."""
    join: tuple[Exchange, ...] = ()
    """Exchanges that complete in this step: the worker waits for them and applies them."""
    header: Header = Header()
    """Header of the last exchange that begins."""
    overlap: bool = True
    """Whether weights are sent while the gradient is computed, rather than before."""
    round: int = 0
    """Number of the round of a synchronous method; some lanes travel in some rounds only."""

    @classmethod
    def around(
        cls,
        exchanges: Sequence[Exchange],
        begin: Sequence[int],
        join: Sequence[int],
        *,
        make_header: Callable[[], Header],
        overlap: bool = True,
        round: int = 0,
    ) -> StepPlan:
        """Return the plan of one local step.

        Args:
            exchanges: all exchanges of the round; its header is sent with the last one.
            begin: indices of the exchanges that begin around the step.
            join: indices of the exchanges that take effect in the step.
            make_header: called only if the header is sent.
            overlap: whether weights are sent while the gradient is computed.
            round: number of the round.
        """
        return cls(
            begin=tuple(exchanges[f] for f in begin),
            join=tuple(exchanges[f] for f in join),
            header=make_header() if len(exchanges) - 1 in begin else Header(),
            overlap=overlap,
            round=round,
        )


def shard_spans(size: int, num_shards: int) -> list[Span]:
    """Return the span of each shard, or of each fragment, of ``size`` parameters."""
    edges = [0, *itertools.accumulate(split_evenly(size, num_shards))]
    return list(itertools.pairwise(edges))


def tensor_spans(sizes: Sequence[int], num_fragments: int) -> list[Span]:
    """Return spans of about equal length that end where a tensor ends; fewer if there are fewer.

    Args:
        sizes: number of parameters of each tensor.
        num_fragments: the most spans.
    """
    *ends, size = itertools.accumulate(sizes)
    aims = [k * size / num_fragments for k in range(1, num_fragments)]
    cuts = {_nearest(ends, aim) for aim in aims if ends}
    return list(itertools.pairwise([0, *sorted(cuts), size]))


def _nearest(numbers: Sequence[int], aim: float) -> int:
    return min(numbers, key=lambda number: abs(number - aim))


def cells(size: int, *, num_shards: int, num_fragments: int) -> list[list[Span]]:
    """Return the spans of each shard: its intersection with every fragment, if not empty."""
    fragments = shard_spans(size, num_fragments)
    return [
        [span for fragment in fragments if (span := _intersection(fragment, shard))]
        for shard in shard_spans(size, num_shards)
    ]


def cell_size(size: int, *, num_shards: int, num_fragments: int) -> int:
    """Return the number of parameters in the first cell, which a rule gets in one call."""
    start, stop = cells(size, num_shards=num_shards, num_fragments=num_fragments)[0][0]
    return stop - start


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def host_like(tensor: Tensor) -> Tensor:
    """Return new host memory for the values of a tensor; pinned for a CUDA tensor.

    The device copies to and from pinned memory asynchronously. For other memory the host would
    first make a pinned copy, and wait.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class Staging:
    """Copies the parameters of one span from their device to host memory and back.

    Parameters in host memory are passed on without a copy. For others the host memory is allocated
    at the first use.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._is_copied: Any = None
        """CUDA event: the device has copied the last received values."""

    def fetch(self, values: Tensor) -> np.ndarray:
        """Return values as an array in host memory; the next call may overwrite it.

        Waits until the device has computed them, but not for work that is queued later.
        """
        if not values.is_cuda:
            return np.asarray(values.numpy())
        if self._sent is None:
            self._sent = host_like(values)
        self._sent.copy_(values)
        return np.asarray(self._sent.numpy())

    def put_(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array into a tensor, without waiting for the device."""
        if not target.is_cuda:
            np.copyto(target.numpy(), values)  # torch refuses read-only arrays, such as Ray's
            return
        if self._received is None:
            self._received = host_like(target)
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_copied.synchronize()  # returns at once before the first record
        np.copyto(self._received.numpy(), values)
        target.copy_(self._received, non_blocking=True)
        self._is_copied.record()
