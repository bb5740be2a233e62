"""Messages to the center's shards, as calls of Ray actors."""

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

_RETRY_S = 0.2
"""Delay before a message is resent after a broken connection, in seconds."""
_POLL_S = 0.1
"""Interval at which a wait checks whether the center was abandoned, in seconds."""
_TURN_GRACE_S = 10.0
"""How much longer than the coordinator's own time-out a call that waits for a turn may take, in
seconds."""


class RayCenterClient:
    """One worker's connection to the center, in one generation.

    Args:
        shards: the actors, the home shard first.
        timeout_s: the longest wait for an answer, in seconds.
        abandoned: set when the center is abandoned, which ends all waits soon; Ray itself may take
            a minute to notice that a process does not answer.
    """

    def __init__(
        self,
        shards: Sequence[ActorHandle],
        *,
        timeout_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        self._shards = list(shards)
        self.num_shards = len(self._shards)
        self._timeout_s = timeout_s
        self._abandoned = abandoned or threading.Event()
        self._turn_end: RayPendingResponse | None = None

    def request(self, shard: int, request: Request) -> RayPendingResponse:
        """Send a copy of the message; Ray has the copy when this returns.

        The message must not change until the answer arrives, since it may be resent.
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
            shard: index of the shard.
            method: of ``raydl.elastic.center_endpoint.CenterEndpoint``; other shards than the home
                shard have only ``exchange``, ``applied`` and ``shared_cells``.
            arguments: of the method.
            extra_s: how much longer than ``timeout_s`` the answer may take, in seconds.
        """
        send = functools.partial(getattr(self._shards[shard], method).remote, *arguments)
        timeout_s = self._timeout_s + extra_s
        return RayPendingResponse(send, shard, message_id, timeout_s, self._abandoned)

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the memory that the shards on this node share with its workers."""
        node = ray.get_runtime_context().get_node_id()
        calls = [
            self._call(message_id, shard, "shared_cells", message_id.worker_id, node)
            for shard in range(self.num_shards)
        ]
        addresses: dict[Span, CellAddress] = {}
        for call in calls:
            addresses |= call.result()
        return addresses

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return the first assignment."""
        arguments = message_id, local_step
        call = self._call(message_id, HOME, "enter", *arguments, extra_s=_TURN_GRACE_S)
        assignment: Assignment = call.result()
        return assignment

    def applied(self, message_id: MessageId, generation: int) -> dict[Span, int]:
        """Return which messages of this worker's earlier generation the shards have applied."""
        calls = [
            self._call(message_id, shard, "applied", message_id.worker_id, generation)
            for shard in range(self.num_shards)
        ]
        applied: dict[Span, int] = {}
        for call in calls:
            applied |= call.result()
        return applied

    def take_turn(self, message_id: MessageId) -> None:
        """Wait for this worker's turn."""
        self._confirm_turn_end()
        call = self._call(message_id, HOME, "take_turn", message_id, extra_s=_TURN_GRACE_S)
        call.result()

    def end_turn(self, message_id: MessageId) -> None:
        """Pass the turn to the next rank."""
        self._turn_end = self._call(message_id, HOME, "end_turn", message_id)

    def _confirm_turn_end(self) -> None:
        """Wait until the end of the last turn has arrived, since ``end_turn`` does not wait."""
        if self._turn_end is not None:
            self._turn_end.result()
            self._turn_end = None

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation."""
        self._confirm_turn_end()
        self._call(message_id, HOME, "leave_generation", message_id).result()

    def close(self) -> None:
        """Do nothing: Ray owns the connections."""


class RayPendingResponse:
    """A call in progress.

    Args:
        send: makes the call; called again to resend it.
        shard: index of the shard.
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
            ExchangeTimeoutError: if it did not arrive in time.
            ExchangeError: if the shard was lost or abandoned.
        """
        response: Response = self.result()
        return response

    def result(self) -> Any:
        """Wait for the call and return its result; see ``wait``."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._wait_until_ready(deadline)
                return ray.get(self._ref, timeout=max(_POLL_S, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise self._timeout() from error
            except ActorUnavailableError as error:
                # The call may have run, may run still, or may never run. It is sent again under the
                # same number, so that it is applied once in each case: see ``AppliedCalls``.
                self._check_abandoned()
                if time.monotonic() >= deadline:
                    raise self._error(str(error).strip()) from error
                self._abandoned.wait(_RETRY_S)
                self._ref = self._send()
            except RayTaskError as error:
                # Raised at the center: raise the original error, without Ray's text around it.
                if isinstance(error.cause, RaydlError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                raise self._error(f"center shard {self._shard} was lost") from error

    def _wait_until_ready(self, deadline: float) -> None:
        """Wait for the answer in short slices, to notice soon that the center was abandoned.

        With ``ray.wait``: a ``ray.get`` that times out cancels the transfer of a large answer from
        another node, so that a slow one might never arrive.
        """
        while True:
            slice_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            if ray.wait([self._ref], timeout=slice_s)[0]:
                return
            self._check_abandoned()
            if time.monotonic() >= deadline:
                raise self._timeout()

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise self._error(
                f"center shard {self._shard} did not answer and was abandoned: the run continues "
                f"with another center"
            )

    def _error(self, problem: str) -> ExchangeError:
        return ExchangeError(self._message_id.sequence, self._message_id.generation, problem)

    def _timeout(self) -> ExchangeTimeoutError:
        number, generation = self._message_id.sequence, self._message_id.generation
        missing = [f"center shard {self._shard}"]
        return ExchangeTimeoutError(number, generation, self._timeout_s, missing)
