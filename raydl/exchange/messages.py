"""The exchange by messages: a worker and the shards of the center, no other worker.

A message carries worker, generation, incarnation and sequence number, so that the center
refuses what is late and does not apply twice what is repeated. Workers come and go while the
others exchange: a message counts while its worker is a member, and is of the generation that
this worker entered with. The home shard answers the last message of a round with orders:
what to do next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raydl.center import Mirror
from raydl.compression import ErrorFeedback
from raydl.errors import ExchangeError
from raydl.ledger import Span, split_evenly
from raydl.reports import Outcome
from raydl.rules import Sends, Tally
from raydl.talk import Header

HOME = 0
"""The shard that the dispatcher lives beside."""
_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class Stamp:
    """Who sends, in which life, and which of its messages it is."""

    worker_id: str
    generation: int
    """The membership that the worker entered with; others may have come and gone since."""
    incarnation: int
    """Which life of the worker: a process started again counts its messages anew."""
    sequence: int


def refusal_of(stamp: Stamp, entered: int | None, generation: int) -> str:
    """Return why a message does not count; empty: it does.

    Args:
        entered: the generation that its worker entered with; None: it is no member.
        generation: the membership of now.
    """
    who = f"the center refused {stamp.worker_id}"
    if entered is None:
        return f"{who}: it is no longer a member (generation {generation})"
    if entered != stamp.generation:
        return f"{who}: it entered generation {entered}, the message is of {stamp.generation}"
    return ""


@dataclass(frozen=True)
class Settlement:
    """What ends a worker's round: its samples count as done, and it asks for orders."""

    header: Header
    local_step: int
    """Local steps of this worker when its round ends."""
    lr: float
    num_bytes: int
    """Bytes this worker sent and received since its last settlement."""


@dataclass(frozen=True)
class Orders:
    """What the dispatcher tells a worker."""

    outcome: Outcome
    epoch: int
    spans: list[Span]
    ahead: list[tuple[int, Span]]
    """What the worker will claim next, as far as it is known: (epoch, positions)."""
    """Positions of the epoch that the worker claims."""
    num_steps: int
    """Local steps to take over them."""
    num_workers: int
    """Workers that train now (p)."""
    rank: int
    """Of this worker among them."""
    num_done: int
    """Samples done by all workers."""
    seconds: float
    """Seconds of training."""
    version: int
    """Exchanges that the center has settled."""
    ledger: dict[str, Any]
    """The ledger with all claims, so that a lost center can be made again from a worker."""
    keep: int | None = None
    """Keep the state as it is after this exchange, under this number."""
    num_cuts: int = 0
    """How often the learning rate was cut, for the schedule ``plateau``."""


@dataclass(frozen=True)
class Push:
    """One message to a shard."""

    stamp: Stamp
    span: Span
    """Which of the flat parameters it is about; empty: none, the message only settles."""
    weights: np.ndarray
    """What the rule sends, shape [stop - start], or a codec's bytes for it."""
    buffers: np.ndarray
    """Float buffers, or empty."""
    num_workers: int
    num_samples: float
    lr: float
    settlement: Settlement | None = None
    waits_for_turn: bool = False
    """The message counts when it is its worker's turn; it may come before."""


@dataclass(frozen=True)
class Reply:
    """A shard's answer."""

    weights: np.ndarray
    """The center's span: before the message for rules that send weights, else after it. With
    a codec the bytes of how far that is from the mirror."""
    buffers: np.ndarray
    orders: Orders | None = None
    refusal: str = ""
    """Why the message was not taken; empty: it was."""


class Delivery(Protocol):
    """A message on its way."""

    def wait(self) -> Reply:
        """Wait for the answer.

        Raises:
            ExchangeError: it did not come, or not in time.
        """
        ...


class Post(Protocol):
    """How one worker reaches the center."""

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        ...

    def push(self, shard: int, push: Push) -> Delivery:
        """Send a message, or a copy of it, and return at once."""
        ...

    def enter(self, stamp: Stamp, local_step: int) -> Orders:
        """Begin to train in a generation; return the first orders."""
        ...

    def take_turn(self, stamp: Stamp) -> None:
        """Wait until it is this worker's turn, for methods in rank order.

        Raises:
            ExchangeTimeoutError: the turn did not come in time.
        """
        ...

    def end_turn(self, stamp: Stamp) -> None:
        """Let the next in rank order begin. Does not wait."""
        ...

    def leave(self, stamp: Stamp) -> None:
        """Leave the generation, all messages being answered."""
        ...


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


def _common(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class MessageExchange:
    """One worker's exchange of one fragment with the center.

    Shortened messages go by a copy of the center that worker and shard both hold, the
    mirror: the worker sends how far its weights are from it, the shard answers with how far
    the center is, and what either side leaves out is still there the next time. Progress
    and gradients are sent as they are; what is left out of them is added to the next message.

    Args:
        post: reaches the center.
        mirror: the fragment of the center as this worker last saw it; moved in place.
        span: which of the flat parameters it is.
        shards: (shard, span) of every part of it.
        sends: what the rule sends.
        is_last: whether a round ends with this exchange.
        desk: numbers the messages and knows what the worker must tell.
        feedback: the codec of each part, with what it left out so far.
    """

    def __init__(
        self,
        post: Post,
        mirror: Mirror,
        *,
        span: slice,
        shards: Sequence[tuple[int, Span]],
        sends: Sends,
        is_last: bool,
        desk: Desk,
        feedback: Callable[[Span], ErrorFeedback],
    ) -> None:
        self.center = mirror
        self.span = span
        self._post = post
        self._shards = list(shards)
        if is_last and HOME not in [shard for shard, _ in shards]:
            self._shards.append((HOME, (0, 0)))
        self._sends = sends
        self._is_last = is_last
        self._desk = desk
        self._feedback = {part: feedback(part) for _, part in shards}
        self._is_plain = all(f.codec.name == "none" for f in self._feedback.values())
        self._seen = torch.empty_like(mirror.weights[: 0 if self._is_plain else None])
        self._flying: list[tuple[Span, Delivery]] = []
        self._replies: list[tuple[Span, Reply]] = []
        self._tally = Tally(1, 1, 0.0)

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Send each shard its part, and return at once."""
        assert not self._flying, "an exchange is under way"
        desk = self._desk
        self._tally = Tally(desk.num_workers, 1, header.num_samples)
        for shard, part in self._shards:
            is_home = self._is_last and shard == HOME
            values = self._encoded(weights.detach(), part)
            desk.num_bytes += values.nbytes
            message = Push(
                stamp=desk.next_stamp(),
                span=part,
                weights=values,
                buffers=buffers.detach().cpu().numpy() if is_home else _NOTHING,
                num_workers=desk.num_workers,
                num_samples=header.num_samples,
                lr=desk.lr,
                settlement=desk.settlement(header) if is_home else None,
                waits_for_turn=desk.take_wait(),
            )
            self._flying.append((part, self._post.push(shard, message)))

    def _at(self, part: Span) -> slice:
        """Return where a part of the flat parameters lies within this fragment."""
        return slice(part[0] - self.span.start, part[1] - self.span.start)

    def _encoded(self, weights: Tensor, part: Span) -> np.ndarray:
        """Return what is sent to one shard: floats, or a codec's bytes."""
        if part[0] == part[1]:
            return _NOTHING
        values, feedback = weights[self._at(part)], self._feedback[part]
        if self._is_plain:
            return np.asarray(values.cpu().numpy())
        if self._sends is not Sends.WEIGHTS:
            return np.array(feedback.encode(values.contiguous()).cpu().numpy())
        mirror, seen = self.center.weights[self._at(part)], self._seen[self._at(part)]
        message = feedback.codec.encode(torch.sub(values, mirror, out=seen))
        feedback.codec.decode(message, out=seen).add_(mirror)
        return np.asarray(message.cpu().numpy())

    def as_seen(self, weights: Tensor) -> Tensor:
        """Return the weights that were sent as the shards decode them."""
        return weights if self._is_plain else self._seen

    def wait(self) -> tuple[Tally, Header]:
        """Wait for all shards.

        Raises:
            ExchangeError: a shard did not answer, or refused.
        """
        flying, self._flying = self._flying, []
        self._replies = [(part, delivery.wait()) for part, delivery in flying]
        for _, reply in self._replies:
            if reply.refusal:
                desk = self._desk
                raise ExchangeError(desk.version, desk.generation, reply.refusal)
        if self._sends is Sends.WEIGHTS:
            self._take()
        return self._tally, Header()

    def commit(self) -> None:
        """Take note: the center itself moved when the message came in."""
        if self._sends is not Sends.WEIGHTS:
            self._take()
            if not self._is_plain:
                for feedback in self._feedback.values():
                    feedback.commit()
        for _, reply in self._replies:
            if reply.orders is not None:
                self._desk.take_orders(reply.orders)
        self._replies = []

    def _take(self) -> None:
        """Bring the mirror up to the replies."""
        for part, reply in self._replies:
            self._desk.num_bytes += reply.weights.nbytes
            if part[0] < part[1]:
                self._take_part(part, reply.weights)
            if reply.buffers.size and self.center.buffers.numel():
                _copy_in_(self.center.buffers, reply.buffers)

    def _take_part(self, part: Span, values: np.ndarray) -> None:
        mirror = self.center.weights[self._at(part)]
        if self._is_plain:
            _copy_in_(mirror, values)
            return
        change = torch.empty_like(mirror)
        message = torch.tensor(values, device=mirror.device)
        mirror.add_(self._feedback[part].codec.decode(message, out=change))


def _copy_in_(target: Tensor, values: np.ndarray) -> None:
    """Copy an array into a tensor; torch itself takes no read-only arrays, as Ray's are."""
    if target.device.type == "cpu":
        np.copyto(target.numpy(), values)
    else:
        target.copy_(torch.tensor(values))


class Desk:
    """What a worker of a method with messages knows of the center's orders.

    Args:
        worker_id: who it is.
        generation: the membership that it enters with.
        incarnation: which life of the worker.
    """

    def __init__(self, worker_id: str, generation: int, incarnation: int) -> None:
        self.generation = generation
        self.lr = 0.0
        self.local_step = 0
        self.num_bytes = 0
        """Bytes sent and received since the last settlement."""
        self.waits_for_turn = False
        self.orders: Orders | None = None
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._numbers = itertools.count()

    @property
    def num_workers(self) -> int:
        """Workers that train, by the newest orders."""
        assert self.orders is not None
        return self.orders.num_workers

    @property
    def version(self) -> int:
        """Exchanges settled, by the newest orders."""
        return self.orders.version if self.orders else 0

    def next_stamp(self) -> Stamp:
        """Return the stamp of the next message."""
        return Stamp(self._worker_id, self.generation, self._incarnation, next(self._numbers))

    def take_wait(self) -> bool:
        """Return whether the message waits for the turn: the first one of a round at most."""
        waits, self.waits_for_turn = self.waits_for_turn, False
        return waits

    def settlement(self, header: Header) -> Settlement:
        """Return what ends the round."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        return Settlement(header, self.local_step, self.lr, num_bytes)

    def take_orders(self, orders: Orders) -> None:
        """Note what to do next."""
        self.orders = orders
