"""The exchange between one worker and the shards of the center, by messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydl.core.center import Mirror
from raydl.core.codecs import parse_codec
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import (
    Arrival,
    Header,
    Staging,
    mean_message,
    toward_center,
)
from raydl.core.method import Method
from raydl.core.non_trainable import BufferChanges, NonTrainableState
from raydl.core.rules import Message, Now
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

_EMPTY = Message({})


class MessageExchange:
    """One worker's exchange of one fragment with the center.

    Compressed messages of a lane around the center are differences to the mirror, a copy of the
    center that worker and shard both hold: the worker sends the difference between its weights and
    the mirror, the shard answers with the difference between center and mirror. What either codec
    leaves out is part of the next difference. All else is sent as it is, a sum of gradients as the
    mean over its samples, and error feedback adds its residual to the next message.

    Args:
        client: reaches the center.
        mirror: the fragment of the center as this worker last received it; moved in place.
        span: the fragment's span.
        shards: (shard, span) of each part of the fragment.
        method: of the exchange; its codec, of which there is one for all parts, answers, too.
        is_last: whether a round ends with this exchange.
        session: numbers the messages and makes the completions.
        feedback: returns the codec of a part, with its residual so far.
    """

    def __init__(
        self,
        client: CenterClient,
        mirror: Mirror,
        *,
        span: slice,
        shards: Sequence[tuple[int, Span]],
        method: Method,
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
        self._rule = method.rule
        self._is_last = is_last
        self._session = session
        self._feedback = {part: feedback(part) for _, part in shards}
        self._staging = {part: Staging() for _, part in shards}
        self._staging_of_buffers = Staging()
        self._codec = parse_codec(method.compression)
        self._is_plain = self._codec.name == "none"
        self._seen = torch.empty_like(mirror.weights[: 0 if self._is_plain else None])
        self._pending: list[tuple[Span, PendingResponse]] = []
        self._responses: list[tuple[Span, Response]] = []
        self._now = Now(1)
        self._distrust = 0.0

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Send each shard its part and return at once; in rank order, wait for the turn first.

        The shard applies the distrust: its center may be newer than the mirror.

        Raises:
            ExchangeError: if the turn did not come, or this worker was removed; nothing was sent.
        """
        assert not self._pending, "an exchange is in progress"
        session = self._session
        if session.takes_turn:
            session.takes_turn = False
            self._client.take_turn(session.next_message_id())
        self._now = session.now()
        self._distrust = distrust
        for shard, part in self._shards:
            is_home = self._is_last and shard == HOME
            values = self._encoded(message, part)
            session.num_bytes += values.nbytes
            session.num_messages += 1
            request = session.make_request(
                header, part, values, buffers if is_home else None, message, distrust=distrust
            )
            if part in self._feedback and self._feedback[part].is_open:
                self._feedback[part].message = session.generation, request.message_id.sequence
            self._pending.append((part, self._client.request(shard, request)))

    def _at(self, part: Span) -> slice:
        """Return a part's slice of this fragment."""
        return slice(part[0] - self.span.start, part[1] - self.span.start)

    def _encoded(self, message: Message, part: Span) -> np.ndarray:
        """Return the values to send to one shard: floats, or a codec's bytes."""
        if part[0] == part[1]:
            return NOTHING
        lanes = {name: lane.detach()[self._at(part)] for name, lane in message.lanes.items()}
        values, feedback = self._rule.joined(replace(message, lanes=lanes)), self._feedback[part]
        weight, is_sum = message.weight, not self._rule.takes_steps
        if self._is_plain and not feedback.holds_back:
            feedback.clear()
            if not (is_sum or weight == 1):
                values = values * weight
            return self._staging[part].fetch(values)
        if not self._rule.ahead:
            mean = mean_message(values, weight) if is_sum else values.contiguous()
            encoded = feedback.encode(mean, share=float(weight > 0))
            if self._is_plain:  # the first messages since the codec was changed to none
                encoded = feedback.decoded.mul_(weight)
            return np.array(encoded.cpu().numpy())
        mirror, seen = self.center.weights[self._at(part)], self._seen[self._at(part)]
        encoded = self._codec.encode(torch.sub(values, mirror, out=seen))
        self._codec.decode(encoded, out=seen).add_(mirror)
        return np.asarray(encoded.cpu().numpy())

    def wait(self) -> Arrival:
        """Wait for the answers of all shards.

        Raises:
            ExchangeError: if a shard did not answer, or refused the message.
        """
        pending, self._pending = self._pending, []
        self._responses = [(part, response.wait()) for part, response in pending]
        for _, response in self._responses:
            self._session.raise_if(response.refusal)
        if self._rule.ahead:
            self._update_mirror()
        if not self._rule.ahead:
            return Arrival(self._now, sent=self._decoded_lanes())
        if self._is_plain:
            return Arrival(self._now)
        seen = toward_center(self._seen, self.center.weights, self._distrust)
        return Arrival(self._now, seen=seen)

    def _decoded_lanes(self) -> dict[str, Tensor] | None:
        """Return the lanes of the message as the shards decoded them, if a rule keeps them."""
        if self._is_plain or not self._rule.keeps:
            return None
        num_lanes = len(self._rule.lanes)
        parts = [feedback.decoded.view(num_lanes, -1) for feedback in self._feedback.values()]
        return self._rule.lanes_of(torch.cat(parts, dim=1).view(-1))

    def commit(self) -> None:
        """Accept the answers; the center itself moved when it received the messages."""
        if not self._rule.ahead:
            self._update_mirror()
        for feedback in self._feedback.values():
            if feedback.is_open:
                feedback.commit()
        for _, response in self._responses:
            if response.assignment is not None:
                self._session.set_assignment(response.assignment)
        self._responses = []

    def _update_mirror(self) -> None:
        """Move the mirror by the shards' answers."""
        for part, response in self._responses:
            values, mirror = response.weights, self.center.weights[self._at(part)]
            self._session.num_bytes += values.nbytes
            if part[0] < part[1] and self._is_plain:
                self._staging[part].put_(mirror, values)
            elif part[0] < part[1]:
                message = torch.tensor(values, device=mirror.device)
                change = self._codec.decode(message, out=torch.empty_like(mirror))
                mirror.add_(change)
            if response.buffers.size and self.center.buffers.numel():
                self._staging_of_buffers.put_(self.center.buffers, response.buffers)


class ClientSession:
    """A worker's session with the center: its message numbers and its current assignment.

    Args:
        worker_id: of the worker.
        generation: the generation that it enters.
        non_trainable: non-trainable state of the worker's model.
        ledger: of the snapshot that it starts from.
        ledger_round: exchanges that the center had completed in that ledger.
    """

    def __init__(
        self,
        worker_id: str,
        generation: int,
        non_trainable: NonTrainableState,
        *,
        ledger: dict[str, Any],
        ledger_round: int,
    ) -> None:
        self.generation = generation
        self.lr = 0.0
        self.local_step = 0
        self.num_trained = 0
        """Positions trained since this worker entered that a message sent now would contain."""
        self.num_bytes = 0
        """Bytes sent and received since the last completion."""
        self.num_messages = 0
        """Messages sent since the last completion."""
        self.takes_turn = False
        """Whether the next exchange waits for this worker's turn before it sends anything."""
        self.assignment: Assignment | None = None
        self.ledger = ledger
        """The newest ledger that this worker received."""
        self.ledger_round = ledger_round
        """Exchanges that the center had completed in that ledger."""
        self._worker_id = worker_id
        self._buffer_changes = BufferChanges(non_trainable)
        self._numbers = itertools.count()

    @property
    def num_workers(self) -> int:
        """Number of workers that train, by the newest assignment."""
        assert self.assignment is not None
        return self.assignment.num_workers

    @property
    def version(self) -> int:
        """Exchanges that the center has completed, by the newest assignment."""
        return self.assignment.version if self.assignment else 0

    def now(self) -> Now:
        """Return what is known of an exchange in the assigned round."""
        assert self.assignment is not None
        return Now(self.num_workers, self.assignment.share_of_round)

    def next_message_id(self) -> MessageId:
        """Return the id of the next message."""
        return MessageId(self._worker_id, self.generation, next(self._numbers))

    def make_request(
        self,
        header: Header,
        span: Span,
        weights: np.ndarray,
        buffers: Tensor | None,
        message: Message = _EMPTY,
        *,
        distrust: float = 0.0,
    ) -> Request:
        """Return a message to a shard.

        Args:
            header: of the exchange.
            span: the span of the flat parameters; empty for a completion alone.
            weights: the values to send.
            buffers: float buffers, for the message that ends the round; None for any other.
            message: has its weight and numbers.
            distrust: how little the weights count, 0..1.
        """
        completion = None
        if buffers is not None:
            num_bytes, self.num_bytes = self.num_bytes, 0
            num_messages, self.num_messages = self.num_messages, 0
            changes, replaces = self._pop_buffer_changes()
            completion = Completion(
                header,
                self.local_step,
                self.num_trained,
                self.lr,
                num_bytes,
                changes,
                replaces,
                num_messages,
            )
        now = self.now()
        return Request(
            message_id=self.next_message_id(),
            span=span,
            weights=weights,
            buffers=NOTHING if buffers is None else buffers.detach().cpu().numpy(),
            num_workers=now.num_workers,
            lr=self.lr,
            weight=message.weight,
            numbers=dict(message.numbers),
            completion=completion,
            distrust=distrust,
            share_of_round=now.share_of_round,
        )

    def _pop_buffer_changes(self) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Return changed buffers, and the names of all if they are the first of this worker.

        The center takes them from rank 0 alone: a mixture of several workers' would fit none. So
        the others compare nothing, and when one of them becomes rank 0 it sends all changes.
        """
        if self.assignment is None or self.assignment.rank != 0:
            self._buffer_changes.forget()
            return {}, ()
        replaces = () if self._buffer_changes.has_begun else self._buffer_changes.names
        return self._buffer_changes.pop_changes(), replaces

    def raise_if(self, refusal: str) -> None:
        """Raise an ExchangeError if the text of a refusal is not empty."""
        if refusal:
            raise ExchangeError(self.version, self.generation, refusal)

    def set_assignment(self, assignment: Assignment) -> None:
        """Accept an assignment, and its ledger if it has one."""
        self.assignment = assignment
        if assignment.ledger is not None:
            self.ledger, self.ledger_round = assignment.ledger, assignment.version
