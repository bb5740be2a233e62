"""Messages to the center's shards as calls of Ray actors."""

from __future__ import annotations

import functools
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

from raydl.errors import ExchangeError, ExchangeTimeoutError, RaydlError
from raydl.exchange.messages import HOME, Orders, Push, Reply, Stamp

_AGAIN_S = 0.2
"""How long after a broken connection a message is sent again, in seconds."""
_TURN_GRACE_S = 10.0
"""How much longer than the dispatcher's own bound a call for a turn may take, in seconds."""


class RayPost:
    """How one worker reaches the center of a generation.

    Args:
        shards: the actors, the home shard first.
        timeout_s: the longest wait for an answer, in seconds.
    """

    def __init__(self, shards: Sequence[ActorHandle], *, timeout_s: float) -> None:
        self._shards = list(shards)
        self._timeout_s = timeout_s
        self._turn_end: RayDelivery | None = None

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        return len(self._shards)

    def push(self, shard: int, push: Push) -> RayDelivery:
        """Send a copy of the message: Ray has taken it when this returns.

        The message itself must stay as it is until the answer has come, for it may have to
        be sent again.
        """
        timeout_s = self._timeout_s
        if push.waits_for_turn:
            self._finish_turn()
            timeout_s += _TURN_GRACE_S
        send = functools.partial(self._shards[shard].exchange.remote, push)
        return RayDelivery(send, shard, push.stamp, timeout_s)

    def enter(self, stamp: Stamp, local_step: int) -> Orders:
        """Return the first orders."""
        send = functools.partial(self._shards[HOME].enter.remote, stamp, local_step)
        delivery = RayDelivery(send, HOME, stamp, self._timeout_s + _TURN_GRACE_S)
        orders: Orders = delivery.wait_for_any()
        return orders

    def take_turn(self, stamp: Stamp) -> None:
        """Wait until it is this worker's turn."""
        self._finish_turn()
        send = functools.partial(self._shards[HOME].take_turn.remote, stamp)
        RayDelivery(send, HOME, stamp, self._timeout_s + _TURN_GRACE_S).wait_for_any()

    def end_turn(self, stamp: Stamp) -> None:
        """Let the next in rank order begin."""
        send = functools.partial(self._shards[HOME].end_turn.remote, stamp)
        self._turn_end = RayDelivery(send, HOME, stamp, self._timeout_s)

    def _finish_turn(self) -> None:
        """Make sure that the end of the last turn has arrived, which no one waited for."""
        if self._turn_end is not None:
            self._turn_end.wait_for_any()
            self._turn_end = None

    def leave(self, stamp: Stamp) -> None:
        """Leave the generation."""
        self._finish_turn()
        send = functools.partial(self._shards[HOME].leave.remote, stamp)
        RayDelivery(send, HOME, stamp, self._timeout_s).wait_for_any()

    def close(self) -> None:
        """Do nothing: there is no connection of our own."""


class RayDelivery:
    """A call under way.

    Args:
        send: makes the call, and the same one again.
        shard: which shard it goes to.
        stamp: of the message.
        timeout_s: the longest wait for the answer, in seconds.
    """

    def __init__(self, send: Callable[[], Any], shard: int, stamp: Stamp, timeout_s: float) -> None:
        self._send = send
        self._ref = send()
        self._shard = shard
        self._stamp = stamp
        self._timeout_s = timeout_s

    def wait(self) -> Reply:
        """Wait for the answer.

        Raises:
            ExchangeTimeoutError: it did not come in time.
            ExchangeError: the shard is gone.
        """
        reply: Reply = self.wait_for_any()
        return reply

    def wait_for_any(self) -> Any:
        """Wait for whatever the call returns; see :meth:`wait`."""
        number, generation = self._stamp.sequence, self._stamp.generation
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return ray.get(self._ref, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError as error:
                who = [f"center shard {self._shard}"]
                raise ExchangeTimeoutError(number, generation, self._timeout_s, who) from error
            except ActorUnavailableError as error:
                # The call may or may not have run. Sent again under the same number it is
                # applied once, whichever it was.
                if time.monotonic() >= deadline:
                    raise ExchangeError(number, generation, str(error).strip()) from error
                time.sleep(_AGAIN_S)
                self._ref = self._send()
            except RayTaskError as error:
                # Raised at the center: the error as it was, not Ray's text around it.
                if isinstance(error.cause, RaydlError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                reason = f"center shard {self._shard} went away"
                raise ExchangeError(number, generation, reason) from error
