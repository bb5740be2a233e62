"""The calls that workers make to the center's actor, both in a run and under ``raydl.attach``."""

from __future__ import annotations

from raydl.collective.key_store import StoreServer
from raydl.data.ledger import Span
from raydl.parameter_server.protocol import Assignment, CellAddress, MessageId, Request, Response
from raydl.parameter_server.server import CenterServer


class CenterEndpoint(StoreServer):
    """The keys of synchronous groups and, for methods with messages, the calls of a CenterServer.

    Ray calls the methods of the actor itself, so the center's actors inherit these. Any thread may
    call. A call that waits for other workers holds its thread (``wait_for_keys``, ``enter``,
    ``take_turn``, ``exchange`` of a repeated message), so an actor needs more threads than calls
    can wait at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._center_server: CenterServer | None = None
        """None until it starts, and in methods that send no messages."""

    @property
    def center_server(self) -> CenterServer:
        """The center of a method with messages, once it has started."""
        assert self._center_server is not None, "sync methods send no messages"
        return self._center_server

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the memory of the home shard that a worker on a node may map."""
        return self.center_server.shared_cells(worker_id, node)

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return a worker's first assignment."""
        return self.center_server.enter(message_id, local_step)

    def exchange(self, request: Request) -> Response:
        """Apply a message to the home shard, and answer it."""
        return self.center_server.exchange(request)

    def applied(self, worker_id: str, generation: int) -> dict[Span, int]:
        """Return which messages of a worker the home shard has applied, by span."""
        return self.center_server.applied(worker_id, generation)

    def take_turn(self, message_id: MessageId) -> None:
        """Wait for a worker's turn."""
        self.center_server.take_turn(message_id)

    def end_turn(self, message_id: MessageId) -> None:
        """End a worker's turn."""
        self.center_server.end_turn(message_id)

    def leave_generation(self, message_id: MessageId) -> None:
        """Record that a worker has left its generation."""
        self.center_server.leave_generation(message_id)
