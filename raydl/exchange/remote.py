"""Messages to the center's shards as calls of Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.exchange.messages import HOME, Orders, Push, Reply, Stamp

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

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        return len(self._shards)

    def push(self, shard: int, push: Push) -> RayDelivery:
        """Send a copy of the message: Ray has taken it when this returns."""
        ref = self._shards[shard].exchange.remote(push)
        return RayDelivery(ref, shard, push.stamp, self._timeout_s)

    def enter(self, stamp: Stamp, local_step: int) -> Orders:
        """Return the first orders."""
        ref = self._shards[HOME].enter.remote(stamp, local_step)
        orders: Orders = RayDelivery(ref, HOME, stamp, self._timeout_s).wait_for_any()
        return orders

    def take_turn(self, stamp: Stamp) -> None:
        """Wait until it is this worker's turn."""
        ref = self._shards[HOME].take_turn.remote(stamp)
        RayDelivery(ref, HOME, stamp, self._timeout_s + _TURN_GRACE_S).wait_for_any()

    def end_turn(self, stamp: Stamp) -> None:
        """Let the next in rank order begin."""
        self._shards[HOME].end_turn.remote(stamp)

    def close(self) -> None:
        """Do nothing: there is no connection of our own."""


class RayDelivery:
    """A call under way."""

    def __init__(self, ref: Any, shard: int, stamp: Stamp, timeout_s: float) -> None:
        self._ref = ref
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
        """Wait for whatever the call returns."""
        number, generation = self._stamp.sequence, self._stamp.generation
        try:
            return ray.get(self._ref, timeout=self._timeout_s)
        except GetTimeoutError as error:
            who = [f"center shard {self._shard}"]
            raise ExchangeTimeoutError(number, generation, self._timeout_s, who) from error
        except RayActorError as error:
            reason = f"center shard {self._shard} went away"
            raise ExchangeError(number, generation, reason) from error
