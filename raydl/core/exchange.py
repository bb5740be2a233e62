"""The exchange between a replica and the center, as both sides see it.

``StepPlan`` says which exchanges start and complete in one local step; ``Exchange`` is
what every transport implements. Spans say which of the flat parameters each shard of the center
and each fragment holds; where a device's parameters go to a center that lies elsewhere, they are
staged through host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raydl.core.center import Center, Mirror
from raydl.core.rules import Tally
from raydl.data.ledger import Span, split_evenly


@dataclass(frozen=True)
class Header:
    """A few numbers that travel with a message and are summed with it.

    In a synchronous round every rank sees the same sums, so all take the same decision with
    no message of its own. All fields describe the time since the last message.
    """

    stop: float = 0.0
    """Votes to end the run after this round."""
    regroup: float = 0.0
    """Votes to leave this generation after this round."""
    checkpoint: float = 0.0
    """Votes to keep the state as it is after this round."""
    lr_cut: float = 0.0
    """Votes to cut the learning rate once more after this round."""
    num_samples: float = 0.0
    """Samples whose gradients are in this message, since the last one of the same span."""
    loss_sum: float = 0.0
    """Sum of the losses of ``loss_samples`` samples."""
    loss_samples: float = 0.0
    """Samples behind ``loss_sum``: all up to the step before this one."""
    distance: float = 0.0
    """Squared distance to the center at the exchange before."""
    step_s: float = 0.0
    """Seconds per local step in the round before, waiting not counted."""
    waited_s: float = 0.0
    """Seconds waited for exchanges in the round before."""
    elapsed_s: float = 0.0
    """Seconds of training so far, by this worker's clock."""

    def __add__(self, other: Header) -> Header:
        return Header(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def numbers(self) -> list[float]:
        """Return the fields in their order; ``astuple`` takes forty times as long."""
        return list(vars(self).values())


@dataclass(frozen=True)
class Arrival:
    """What an exchange has brought, before it is committed."""

    tally: Tally
    """What the sums are made of."""
    sums: Header = Header()
    """Of the headers of all messages."""
    seen: Tensor | None = None
    """The weights that were sent as the center sees them, where a codec has changed them."""
    pull: Tensor | None = None
    """What the replica subtracts, where it was found together with the center's move; else the
    replica finds it by the center as it was."""
    distance_squared: float = 0.0
    """Squared distance between replica and center before, where ``pull`` is given."""


class Exchange(Protocol):
    """A replica's view of a transport: transactions with one span of the center."""

    @property
    def span(self) -> slice:
        """Which of the flat parameters travel."""
        ...

    @property
    def center(self) -> Center | Mirror:
        """The center's span as it was before this exchange, until ``commit``."""
        ...

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Send copies and return at once.

        Args:
            weights: what the rule sends, the span of it.
            buffers: float buffers, shape [num_buffers].
            header: the numbers that ride along.
        """
        ...

    def wait(self) -> Arrival:
        """Wait until the exchange has arrived; return what it has brought.

        Raises:
            ExchangeError: it failed or took too long; no tensor was changed.
        """
        ...

    def commit(self) -> None:
        """Move the center. Cannot fail."""
        ...


class Partners(Protocol):
    """Workers that share one replica; see ``raydl.collective.sync_exchange.GradientGroup``."""

    def mean_(
        self, gradients: Tensor, num_samples: int, is_reached: bytearray
    ) -> tuple[int, bytearray]:
        """Replace mean gradients by that of the joined batch; return its samples.

        Args:
            gradients: shape [num_parameters].
            num_samples: behind them.
            is_reached: by parameter, whether it has a gradient.

        Returns:
            The samples of all, and which parameters have a gradient of anyone.
        """
        ...

    def copy_first_(self, tensors: list[Tensor], *, is_first: bool) -> list[bool]:
        """Replace tensors by the first worker's; return which were others."""
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
    """Exchanges that are waited for and take effect in this step."""
    header: Header = Header()
    """Header of the last exchange that begins."""
    overlap: bool = True
    """Weights travel while the gradient is computed, rather than before."""

    @classmethod
    def around(
        cls,
        exchanges: Sequence[Exchange],
        begin: Sequence[int],
        join: Sequence[int],
        *,
        make_header: Callable[[], Header],
        overlap: bool = True,
    ) -> StepPlan:
        """Return what a step has to do with some of a round's exchanges, by their numbers.

        Args:
            exchanges: of the round; its header travels with the last one.
            begin: those that begin around the step.
            join: those that take effect in it.
            make_header: asked only if the header travels.
            overlap: weights travel while the gradient is computed.
        """
        is_last = len(exchanges) - 1 in begin
        return cls(
            begin=tuple(exchanges[f] for f in begin),
            join=tuple(exchanges[f] for f in join),
            header=make_header() if is_last else Header(),
            overlap=overlap,
        )


def shard_spans(size: int, num_shards: int) -> list[Span]:
    """Return which of ``size`` parameters each shard, or each fragment, holds."""
    edges = [0, *itertools.accumulate(split_evenly(size, num_shards))]
    return list(itertools.pairwise(edges))


def cells(size: int, *, num_shards: int, num_fragments: int) -> list[list[Span]]:
    """Return the spans of each shard: its part of every fragment that meets it."""
    fragments = shard_spans(size, num_fragments)
    return [
        [span for part in fragments if (span := _common(part, shard))]
        for shard in shard_spans(size, num_shards)
    ]


def cell_size(size: int, *, num_shards: int, num_fragments: int) -> int:
    """Return how many parameters the first cell has: what a rule gets to see at once."""
    start, stop = cells(size, num_shards=num_shards, num_fragments=num_fragments)[0][0]
    return stop - start


def _common(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def host_like(tensor: Tensor) -> Tensor:
    """Return new host memory for a tensor's values; pinned for a CUDA tensor.

    The device copies to and from pinned memory by itself; of other memory the host would first
    make a pinned copy, and wait for it.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class Staging:
    """Takes the parameters of one span off their device and puts what comes back on it.

    Parameters in host memory are handed over as they are, without a copy. For others the memory
    is made once, at the first use.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._is_taken: Any = None
        """A CUDA event: the device has what was received last."""

    def fetch(self, values: Tensor) -> np.ndarray:
        """Return values as an array in host memory; the next call may overwrite it.

        It waits until the device has computed them, and for nothing that is asked of it later.
        """
        if not values.is_cuda:
            return np.asarray(values.numpy())
        if self._sent is None:
            self._sent = host_like(values)
        self._sent.copy_(values)
        return np.asarray(self._sent.numpy())

    def put_(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array into a tensor; on a device without waiting for what it computes now."""
        if not target.is_cuda:
            np.copyto(target.numpy(), values)  # torch itself takes no read-only arrays, Ray's
            return
        if self._received is None:
            self._received = host_like(target)
            self._is_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_taken.synchronize()  # before the first recording it is over
        np.copyto(self._received.numpy(), values)
        target.copy_(self._received, non_blocking=True)
        self._is_taken.record()
