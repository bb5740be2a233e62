"""The exchange by messages: a worker and the shards of the center, no other worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydl.core.center import Mirror
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Arrival, Header, Staging
from raydl.core.non_trainable import BufferNews, NonTrainableState
from raydl.core.rules import Sends, Tally
from raydl.data.ledger import Span
from raydl.errors import ExchangeError
from raydl.parameter_server.protocol import (
    HOME,
    NOTHING,
    Assignment,
    CenterClient,
    Completion,
    MessageId,
    PendingResponse,
    Request,
    Response,
)


class MessageExchange:
    """One worker's exchange of one fragment with the center.

    Shortened messages go by a copy of the center that worker and shard both hold, the
    mirror: the worker sends how far its weights are from it, the shard answers with how far
    the center is, and what either side leaves out is still there the next time. Progress
    and gradients are sent as they are; what is left out of them is added to the next message.

    Args:
        client: reaches the center.
        mirror: the fragment of the center as this worker last saw it; moved in place.
        span: which of the flat parameters it is.
        shards: (shard, span) of every part of it.
        sends: what the rule sends.
        is_last: whether a round ends with this exchange.
        session: numbers the messages and knows what the worker must tell.
        feedback: the codec of each part, with what it left out so far.
    """

    def __init__(
        self,
        client: CenterClient,
        mirror: Mirror,
        *,
        span: slice,
        shards: Sequence[tuple[int, Span]],
        sends: Sends,
        is_last: bool,
        session: ClientSession,
        feedback: Callable[[Span], ErrorFeedback],
    ) -> None:
        self.center = mirror
        self.span = span
        self._client = client
        self._shards = list(shards)
        if is_last and HOME not in [shard for shard, _ in shards]:
            self._shards.append((HOME, (0, 0)))
        self._sends = sends
        self._is_last = is_last
        self._session = session
        self._feedback = {part: feedback(part) for _, part in shards}
        self._staging = {part: Staging() for _, part in shards}
        self._staging_of_buffers = Staging()
        self._is_plain = all(f.codec.name == "none" for f in self._feedback.values())
        self._seen = torch.empty_like(mirror.weights[: 0 if self._is_plain else None])
        self._flying: list[tuple[Span, PendingResponse]] = []
        self._replies: list[tuple[Span, Response]] = []
        self._tally = Tally(1, 1, 0.0)

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Send each shard its part, and return at once; in rank order, once it is its turn.

        Raises:
            ExchangeError: the turn did not come, or somebody was removed; nothing was sent.
        """
        assert not self._flying, "an exchange is under way"
        session = self._session
        if session.takes_turn:
            session.takes_turn = False
            self._client.take_turn(session.next_message_id())
        self._tally = Tally(session.num_workers, 1, header.num_samples)
        for shard, part in self._shards:
            is_home = self._is_last and shard == HOME
            values = self._encoded(weights.detach(), part)
            session.num_bytes += values.nbytes
            message = session.message(header, part, values, settled=buffers if is_home else None)
            self._flying.append((part, self._client.request(shard, message)))

    def _at(self, part: Span) -> slice:
        """Return where a part of the flat parameters lies within this fragment."""
        return slice(part[0] - self.span.start, part[1] - self.span.start)

    def _encoded(self, weights: Tensor, part: Span) -> np.ndarray:
        """Return the message to one shard: floats, or a codec's bytes."""
        if part[0] == part[1]:
            return NOTHING
        values, feedback = weights[self._at(part)], self._feedback[part]
        if self._is_plain:
            return self._staging[part].fetch(values)
        if self._sends is not Sends.WEIGHTS:
            return np.array(feedback.encode(values.contiguous()).cpu().numpy())
        mirror, seen = self.center.weights[self._at(part)], self._seen[self._at(part)]
        message = feedback.codec.encode(torch.sub(values, mirror, out=seen))
        feedback.codec.decode(message, out=seen).add_(mirror)
        return np.asarray(message.cpu().numpy())

    def wait(self) -> Arrival:
        """Wait for all shards.

        Raises:
            ExchangeError: a shard did not answer, or refused.
        """
        flying, self._flying = self._flying, []
        self._replies = [(part, delivery.wait()) for part, delivery in flying]
        for _, response in self._replies:
            self._session.raise_if(response.refusal)
        if self._sends is Sends.WEIGHTS:
            self._take()
        is_changed = not self._is_plain and self._sends is Sends.WEIGHTS
        return Arrival(self._tally, seen=self._seen if is_changed else None)

    def commit(self) -> None:
        """Take note: the center itself moved when the message came in."""
        if self._sends is not Sends.WEIGHTS:
            self._take()
            if not self._is_plain:
                for feedback in self._feedback.values():
                    feedback.commit()
        for _, response in self._replies:
            if response.assignment is not None:
                self._session.set_assignment(response.assignment)
        self._replies = []

    def _take(self) -> None:
        """Bring the mirror up to the replies."""
        for part, response in self._replies:
            self._session.num_bytes += response.weights.nbytes
            if part[0] < part[1]:
                self._take_part(part, response.weights)
            if response.buffers.size and self.center.buffers.numel():
                self._staging_of_buffers.put_(self.center.buffers, response.buffers)

    def _take_part(self, part: Span, values: np.ndarray) -> None:
        mirror = self.center.weights[self._at(part)]
        if self._is_plain:
            self._staging[part].put_(mirror, values)
            return
        change = torch.empty_like(mirror)
        message = torch.tensor(values, device=mirror.device)
        mirror.add_(self._feedback[part].codec.decode(message, out=change))


class ClientSession:
    """A worker's session with the center: its message numbers and its current assignment.

    Args:
        worker_id: who it is.
        generation: the membership that it enters with.
        incarnation: which life of the worker.
        non_trainable: of the worker's model.
        ledger: that of the snapshot which it starts from.
        ledger_round: exchanges that the center had settled by then.
    """

    def __init__(
        self,
        worker_id: str,
        generation: int,
        incarnation: int,
        non_trainable: NonTrainableState,
        *,
        ledger: dict[str, Any],
        ledger_round: int,
    ) -> None:
        self.generation = generation
        self.lr = 0.0
        self.local_step = 0
        self.num_trained = 0
        """Positions that a message sent now has in it, of all since this worker entered."""
        self.num_bytes = 0
        """Bytes sent and received since the last settlement."""
        self.takes_turn = False
        """The next exchange waits for this worker's turn before it sends anything."""
        self.assignment: Assignment | None = None
        self.ledger = ledger
        """The newest that it was told."""
        self.ledger_round = ledger_round
        """Exchanges that the center had settled by then."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._news = BufferNews(non_trainable)
        self._numbers = itertools.count()

    @property
    def num_workers(self) -> int:
        """Workers that train, by the newest orders."""
        assert self.assignment is not None
        return self.assignment.num_workers

    @property
    def version(self) -> int:
        """Exchanges settled, by the newest orders."""
        return self.assignment.version if self.assignment else 0

    def next_message_id(self) -> MessageId:
        """Return the stamp of the next message."""
        return MessageId(self._worker_id, self.generation, self._incarnation, next(self._numbers))

    def message(
        self, header: Header, span: Span, weights: np.ndarray, *, settled: Tensor | None
    ) -> Request:
        """Return a message to a shard.

        Args:
            header: the numbers that ride along.
            span: which of the flat parameters it is about; empty: none.
            weights: what is sent of them.
            settled: the float buffers, in the message that ends the round; None in any other.
        """
        return Request(
            message_id=self.next_message_id(),
            span=span,
            weights=weights,
            buffers=NOTHING if settled is None else settled.detach().cpu().numpy(),
            num_workers=self.num_workers,
            num_samples=header.num_samples,
            lr=self.lr,
            completion=None if settled is None else self._completion(header),
        )

    def _completion(self, header: Header) -> Completion:
        """Return the response that ends the round."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        news = self._news.pop_changes()
        return Completion(header, self.local_step, self.num_trained, self.lr, num_bytes, news)

    def raise_if(self, refusal: str) -> None:
        """Raise an ExchangeError if the center refused; an empty text says that it did not."""
        if refusal:
            raise ExchangeError(self.version, self.generation, refusal)

    def set_assignment(self, assignment: Assignment) -> None:
        """Note what to do next."""
        self.assignment = assignment
        if assignment.ledger is not None:
            self.ledger, self.ledger_round = assignment.ledger, assignment.version
