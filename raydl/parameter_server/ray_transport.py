"""Messages to the center's shards as calls of Ray actors."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from raydl.data.ledger import Span
from raydl.errors import ExchangeError, ExchangeTimeoutError, RaydlError
from raydl.parameter_server.protocol import (
    HOME,
    Assignment,
    CellAddress,
    MessageId,
    Request,
    Response,
)

_AGAIN_S = 0.2
"""How long after a broken connection a message is sent again, in seconds."""
_LOOK_EVERY_S = 0.1
"""How often a wait looks whether it was abandoned, in seconds."""
_TURN_GRACE_S = 10.0
"""How much longer than the coordinator's own bound a call for a turn may take, in seconds."""


class RayCenterClient:
    """How one worker reaches the center of a generation.

    Args:
        shards: the actors, the home shard first.
        timeout_s: the longest wait for an answer, in seconds.
        abandoned: set when the center is given up. All waits then end soon; Ray itself may
            take a minute to notice that a process does not answer.
    """

    def __init__(
        self,
        shards: Sequence[ActorHandle],
        *,
        timeout_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        self._shards = list(shards)
        self._timeout_s = timeout_s
        self._abandoned = abandoned or threading.Event()
        self._turn_end: RayPendingResponse | None = None

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        return len(self._shards)

    def request(self, shard: int, request: Request) -> RayPendingResponse:
        """Send a copy of the message: Ray has taken it when this returns.

        The message itself must stay as it is until the answer has come, for it may have to
        be sent again.
        """
        return self._call(request.message_id, shard, "exchange", request)

    def _call(
        self,
        message_id: MessageId,
        shard: int,
        method: str,
        *arguments: Any,
        extra_s: float = 0.0,
    ) -> RayPendingResponse:
        """Call a method of a shard's actor.

        Args:
            message_id: for errors.
            shard: which.
            method: of ``raydl.elastic.center_endpoint.CenterEndpoint``; away from home
                ``exchange`` and ``shared_cells`` alone.
            arguments: of the method.
            extra_s: how much longer than ``timeout_s`` the answer may take, in seconds.
        """
        send = functools.partial(getattr(self._shards[shard], method).remote, *arguments)
        timeout_s = self._timeout_s + extra_s
        return RayPendingResponse(send, shard, message_id, timeout_s, self._abandoned)

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the memory that the shards of this node let its workers map."""
        node = ray.get_runtime_context().get_node_id()
        flying = [
            self._call(message_id, shard, "shared_cells", message_id.worker_id, node)
            for shard in range(self.num_shards)
        ]
        found: dict[Span, CellAddress] = {}
        for response in flying:
            found |= response.wait_for_any()
        return found

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return the first orders."""
        arguments = message_id, local_step
        entering = self._call(message_id, HOME, "enter", *arguments, extra_s=_TURN_GRACE_S)
        assignment: Assignment = entering.wait_for_any()
        return assignment

    def take_turn(self, message_id: MessageId) -> None:
        """Wait until it is this worker's turn."""
        self._finish_turn()
        turn = self._call(message_id, HOME, "take_turn", message_id, extra_s=_TURN_GRACE_S)
        turn.wait_for_any()

    def end_turn(self, message_id: MessageId) -> None:
        """Let the next in rank order begin."""
        self._turn_end = self._call(message_id, HOME, "end_turn", message_id)

    def _finish_turn(self) -> None:
        """Make sure that the end of the last turn has arrived, which no one waited for."""
        if self._turn_end is not None:
            self._turn_end.wait_for_any()
            self._turn_end = None

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation."""
        self._finish_turn()
        self._call(message_id, HOME, "leave_generation", message_id).wait_for_any()

    def close(self) -> None:
        """Do nothing: there is no connection of our own."""


class RayPendingResponse:
    """A call under way.

    Args:
        send: makes the call, and the same one again.
        shard: which shard it goes to.
        message_id: of the message.
        timeout_s: the longest wait for the answer, in seconds.
        abandoned: ends the wait soon once it is set.
    """

    def __init__(
        self,
        send: Callable[[], Any],
        shard: int,
        message_id: MessageId,
        timeout_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        self._send = send
        self._ref = send()
        self._shard = shard
        self._message_id = message_id
        self._timeout_s = timeout_s
        self._abandoned = abandoned or threading.Event()

    def wait(self) -> Response:
        """Wait for the answer.

        Raises:
            ExchangeTimeoutError: it did not come in time.
            ExchangeError: the shard is gone, or was abandoned.
        """
        response: Response = self.wait_for_any()
        return response

    def wait_for_any(self) -> Any:
        """Wait for whatever the call returns; see ``wait``."""
        number, generation = self._message_id.sequence, self._message_id.generation
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._wait_until_here(deadline)
                return ray.get(self._ref, timeout=max(_LOOK_EVERY_S, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise self._timeout() from error
            except ActorUnavailableError as error:
                # The call may or may not have run. Sent again under the same number it is
                # applied once, whichever it was.
                self._check()
                if time.monotonic() >= deadline:
                    raise ExchangeError(number, generation, str(error).strip()) from error
                self._abandoned.wait(_AGAIN_S)
                self._ref = self._send()
            except RayTaskError as error:
                # Raised at the center: the error as it was, not Ray's text around it.
                if isinstance(error.cause, RaydlError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                reason = f"center shard {self._shard} went away"
                raise ExchangeError(number, generation, reason) from error

    def _wait_until_here(self, deadline: float) -> None:
        """Wait for the answer in short slices, so that an abandoned one is noticed soon.

        By ``ray.wait``: a ``ray.get`` that times out cancels the fetch of a large answer from
        another node, so that a slow one might never arrive.
        """
        while True:
            slice_s = max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic()))
            if ray.wait([self._ref], timeout=slice_s)[0]:
                return
            self._check()
            if time.monotonic() >= deadline:
                raise self._timeout()

    def _check(self) -> None:
        if self._abandoned.is_set():
            reason = (
                f"center shard {self._shard} did not answer; it was abandoned: the run goes on "
                f"with another center"
            )
            raise ExchangeError(self._message_id.sequence, self._message_id.generation, reason)

    def _timeout(self) -> ExchangeTimeoutError:
        number, generation = self._message_id.sequence, self._message_id.generation
        who = [f"center shard {self._shard}"]
        return ExchangeTimeoutError(number, generation, self._timeout_s, who)
