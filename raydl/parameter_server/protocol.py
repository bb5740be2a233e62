"""The protocol between a worker and the center: messages, and the transport that carries them.

A message carries worker, generation, incarnation and sequence number, so that the center
refuses what is late and does not apply twice what is repeated. Workers come and go while the
others exchange: a message counts while its worker is a member, and is of the generation that
this worker entered with. The home shard answers the last message of a round with orders:
what to do next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from raydl.core.exchange import Header
from raydl.core.reports import Outcome
from raydl.data.ledger import Claim, Span

HOME = 0
"""The shard that the coordinator lives beside."""
NOTHING = np.empty(0, np.float32)
"""The values of a message that is about no parameter."""


@dataclass(frozen=True)
class MessageId:
    """Identifies a message: its sender, the sender's incarnation, and a sequence number."""

    worker_id: str
    generation: int
    """The membership that the worker entered with; others may have come and gone since."""
    incarnation: int
    """Which life of the worker: a process started again counts its messages anew."""
    sequence: int


def refusal_of(message_id: MessageId, entered: int | None, generation: int) -> str:
    """Return why a message does not count; empty: it does.

    Args:
        entered: the generation that its worker entered with; None: it is no member.
        generation: the membership of now.
    """
    who = f"the center refused {message_id.worker_id}"
    if entered is None:
        return f"{who}: it is no longer a member (generation {generation})"
    if entered != message_id.generation:
        return f"{who}: it entered generation {entered}, the message is of {message_id.generation}"
    return ""


@dataclass(frozen=True)
class Completion:
    """Ends a worker's round: its samples count as done, and it asks for an assignment."""

    header: Header
    local_step: int
    """Local steps of this worker when its round ends."""
    num_trained: int
    """Positions whose training is in what the worker has sent, of all since it entered. Those of
    the steps after that are in its next message."""
    lr: float
    num_bytes: int
    """Bytes this worker sent and received since its last settlement."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """Buffers that are not averaged and have changed since the last settlement, by name."""


@dataclass(frozen=True)
class Assignment:
    """The coordinator's answer to a worker."""

    outcome: Outcome
    claims: list[Claim]
    """The worker's claims, one for each epoch, in their order; none: it has no more to do."""
    ahead: list[tuple[int, Span]]
    """The worker's next claims, as far as they are known: (epoch, positions)."""
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
    ledger: dict[str, Any] | None = None
    """The ledger, what is claimed as free, so that a lost center can be made again from a worker.
    Where many train, with some assignments alone: see
    ``raydl.parameter_server.coordinator.COPIES``."""
    keep: int | None = None
    """Keep the state as it is after this exchange, under this number."""
    num_cuts: int = 0
    """How often the learning rate was cut, for the schedule ``plateau``."""

    @property
    def num_steps(self) -> int:
        """Local steps to take over what the worker claims."""
        return sum(claim.num_steps for claim in self.claims)


@dataclass(frozen=True)
class Request:
    """One message to a shard."""

    message_id: MessageId
    span: Span
    """Which of the flat parameters it is about; empty: none, the message only settles."""
    weights: np.ndarray
    """The values that the rule sends, shape [stop - start], or a codec's bytes for them."""
    buffers: np.ndarray
    """Float buffers, or empty."""
    num_workers: int
    num_samples: float
    lr: float
    completion: Completion | None = None


@dataclass(frozen=True)
class Response:
    """A shard's answer."""

    weights: np.ndarray
    """The center's span: before the message for rules that send weights, else after it. With
    a codec the bytes of how far that is from the mirror."""
    buffers: np.ndarray
    assignment: Assignment | None = None
    refusal: str = ""
    """Why the message was not taken; empty: it was."""


@dataclass(frozen=True)
class CellAddress:
    """Location of a span of the center on the worker's own node, and the worker's place in it."""

    path: str
    """Of a file without a name, by way of the process that holds it."""
    token: int
    """The first bytes of the memory; a process may have ended, and another got its number."""
    slot: int


class PendingResponse(Protocol):
    """A message on its way."""

    def wait(self) -> Response:
        """Wait for the answer.

        Raises:
            ExchangeError: it did not come, or not in time.
        """
        ...


class CenterClient(Protocol):
    """How one worker reaches the center."""

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        ...

    def request(self, shard: int, request: Request) -> PendingResponse:
        """Send a message, or a copy of it, and return at once."""
        ...

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the spans of the center whose memory this worker's process may map."""
        ...

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Begin to train in a generation; return the first orders."""
        ...

    def take_turn(self, message_id: MessageId) -> None:
        """Wait until it is this worker's turn, for methods in rank order.

        Raises:
            ExchangeTimeoutError: the turn did not come in time.
        """
        ...

    def end_turn(self, message_id: MessageId) -> None:
        """Let the next in rank order begin. Does not wait."""
        ...

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation, all messages being answered."""
        ...
