"""The protocol between a worker and the center: messages, and the transport that carries them.

A message carries worker, generation and sequence number, so that the center refuses late messages
and applies repeated ones once. Workers join and leave while the others exchange: a message is
accepted while its worker is a member, and if it carries the generation that the worker entered. The
home shard answers the last message of a round with an assignment: what to do next.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from raydl.core.exchange import Header
from raydl.core.reports import Outcome
from raydl.data.ledger import Claim, Span

HOME = 0
"""Index of the home shard, which has the coordinator beside it."""
NOTHING = np.empty(0, np.float32)
"""The values of a message without parameters."""


@dataclass(frozen=True)
class MessageId:
    """Identifies a message: its sender, and a sequence number."""

    worker_id: str
    generation: int
    """The generation that the worker entered; the membership may have changed since."""
    sequence: int


class AppliedCalls:
    """The calls of one member that were applied: the rule for all calls that may be sent again.

    A call is sent again, under the same number, if its connection broke. The center may then have
    two copies of it, at once or one long after the other. The copy that gets first to where it
    changes anything is applied; any other is only answered. The numbers of one kind of call rise,
    so a call with a lower number than an applied one was applied too, or nobody waits for it.

    The caller holds a lock.
    """

    def __init__(self) -> None:
        self._newest: dict[Hashable, int] = {}

    def has(self, kind: Hashable, message_id: MessageId) -> bool:
        """Return whether a copy of a call was applied.

        Args:
            kind: the method that is called, or for a push the span that it moves.
            message_id: of the call.
        """
        return message_id.sequence <= self._newest.get(kind, -1)

    def is_first(self, kind: Hashable, message_id: MessageId) -> bool:
        """Note that a call is being applied; return False if a copy of it was, see ``has``."""
        if self.has(kind, message_id):
            return False
        self._newest[kind] = message_id.sequence
        return True


def refusal_of(message_id: MessageId, entered: int | None, generation: int) -> str:
    """Return why a message is refused, or an empty text if it is accepted.

    Args:
        message_id: of the message.
        entered: the generation that its worker entered, or None if it is no member.
        generation: of the current membership.
    """
    refused = f"the center refused {message_id.worker_id}"
    if entered is None:
        return f"{refused}: it is no longer a member (generation {generation})"
    if entered != message_id.generation:
        return (
            f"{refused}: it entered generation {entered}, but the message is of generation "
            f"{message_id.generation}"
        )
    return ""


@dataclass(frozen=True)
class Completion:
    """Ends a worker's round: reports its completed samples, and requests an assignment."""

    header: Header
    local_step: int
    """Local steps of this worker at the end of the round."""
    num_trained: int
    """Positions trained since the worker entered whose training is in its messages so far. Its
    next message covers the steps after that."""
    lr: float
    num_bytes: int
    """Bytes that this worker sent and received since its last completion."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """By name, the buffers of rank 0 that are not averaged and have changed since its last
    completion; of other ranks none."""
    replaces: tuple[str, ...] = ()
    """In the first completion of a worker as rank 0, the names of all these buffers: those that are
    not in ``non_trainable`` are as in the run's first model."""
    num_messages: int = 1
    """Messages that it sent since its last completion, this one included."""


@dataclass(frozen=True)
class Assignment:
    """The coordinator's answer to a completion: the next work of the worker."""

    outcome: Outcome
    claims: list[Claim]
    """The worker's claims, one per epoch, in order; none if it has no more work."""
    ahead: list[tuple[int, Span]]
    """The worker's next claims, as far as they are known: (epoch, positions)."""
    num_workers: int
    """Number of workers that train now (p)."""
    rank: int
    """Rank of this worker."""
    generation: int
    """The generation of these workers."""
    num_done: int
    """Samples completed by all workers."""
    seconds: float
    """Seconds of training."""
    version: int
    """Exchanges that the center has completed."""
    ledger: dict[str, Any] | None = None
    """The ledger, with claimed samples as free, from which a worker can restore a lost center. With
    many workers only some assignments have it: see ``raydl.parameter_server.coordinator.COPIES``.
    """
    keep: int | None = None
    """The number under which to keep the state after this exchange, or None."""
    num_cuts: int = 0
    """How often the learning rate was cut, for the schedule ``plateau``."""
    share_of_round: float = 1.0
    """Local steps of the claims / those of a whole round of this worker; below 1 in its last."""
    num_bytes: int = 0
    """Bytes of all completed exchanges; see ``raydl.core.progress.Progress``."""
    num_messages: int = 0
    """Messages of all completed exchanges."""


@dataclass(frozen=True)
class Request:
    """A push: a message from a worker to a shard, which the shard applies and answers."""

    message_id: MessageId
    span: Span
    """The span of the flat parameters; empty if the message has only a completion."""
    weights: np.ndarray
    """The values that the rule sends, shape [stop - start], or a codec's bytes for them."""
    buffers: np.ndarray
    """Float buffers, or empty."""
    num_workers: int
    lr: float
    weight: float = 1.0
    """What the message counts."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers of the rule, by name."""
    completion: Completion | None = None
    distrust: float = 0.0
    """How little the weights count, 0..1: see ``raydl.core.exchange.toward_center``."""
    share_of_round: float = 1.0
    """See ``raydl.core.rules.Now``."""


@dataclass(frozen=True)
class Response:
    """A shard's answer."""

    weights: np.ndarray
    """The center's span: before the message if messages are composed ahead, else after it. With a
    codec, the encoded difference to the mirror."""
    buffers: np.ndarray
    assignment: Assignment | None = None
    refusal: str = ""
    """Why the message was refused, or empty if it was accepted."""


@dataclass(frozen=True)
class CellAddress:
    """A span of the center in shared memory on the worker's node."""

    path: str
    """Path of the unnamed file, through the process that holds it."""
    token: int
    """The first bytes of the memory: after its process has ended, another may get its number."""
    slot: int
    """The worker's slot in the table of members."""


class PendingResponse(Protocol):
    """A message that was sent."""

    def wait(self) -> Response:
        """Wait for the answer.

        Raises:
            ExchangeError: if it did not arrive, or not in time.
        """
        ...


class CenterClient(Protocol):
    """One worker's connection to the center."""

    num_shards: int
    """Number of shards of the center."""

    def request(self, shard: int, request: Request) -> PendingResponse:
        """Send a message, or a copy of it, and return at once."""
        ...

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the spans of the center whose memory this worker's process may map."""
        ...

    def applied(self, message_id: MessageId, generation: int) -> dict[Span, int]:
        """Return which messages of this worker's earlier generation were applied.

        Returns:
            By span, the number of the newest message that was applied; -1: none was. Spans of a
            shard that has started since are missing.
        """
        ...

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Start training in a generation; return the first assignment."""
        ...

    def take_turn(self, message_id: MessageId) -> None:
        """Wait for this worker's turn, in methods that exchange in rank order.

        Raises:
            ExchangeTimeoutError: if the turn did not come in time.
        """
        ...

    def end_turn(self, message_id: MessageId) -> None:
        """Pass the turn to the next rank. Does not wait."""
        ...

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation; all messages have been answered."""
        ...
