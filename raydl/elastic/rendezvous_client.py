"""One worker's way into generations and out of them, and the news that it hears meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raydl.collective.sync_exchange import Group
from raydl.core.center import Snapshot
from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainable
from raydl.elastic.rendezvous import NO_COPY, Age, Invitation, RendezvousServer, Signal
from raydl.errors import AttachError, ExchangeError
from raydl.parameter_server.protocol import CenterClient

_ASK_EVERY_S = 0.05
_HEAR_EVERY_S = 0.5


class Transport(Protocol):
    """A group or a post that can be left."""

    def close(self) -> None:
        """Leave."""
        ...


MakeTransport = Callable[[str, Membership, threading.Event], Any]
"""Connects a worker with a membership, until the event is set. Raises ExchangeError."""


@dataclass(frozen=True)
class Entry:
    """A worker's entry into a generation."""

    membership: Membership
    transport: Group | CenterClient
    snapshot: Snapshot | None
    """The snapshot that all start from; None: this worker's own copy of the center."""
    non_trainable: NonTrainable | None = None
    """The non-trainable state that all begin with; None: this worker has it."""


@dataclass
class _Stay:
    """A worker's time in a generation, as far as news go."""

    generation: int = 0
    signal: Signal = Signal.GO_ON
    abandoned: threading.Event = field(default_factory=threading.Event)


class RendezvousClient:
    """One worker's way into generations and out of them.

    A thread tells the meeting that this worker is there, whatever its loop does, and hears
    what the meeting says. It ends a wait in a generation that is over.

    Args:
        name: of the run, for messages.
        find: finds the rendezvous server, or starts it; called once this worker comes. Where it is
            a proxy of one in another process, all calls may raise an AttachError: the server was
            lost, or does not answer.
        make_transport: connects it with the others, or with the center.
        terms: what all workers must agree on, by setting.
        lease_s: who is not heard of for so long is lost, in seconds.
        in_rounds: every worker has the center, rather than the meeting point.
        wish: the id that it would like to have.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], RendezvousServer],
        make_transport: MakeTransport,
        *,
        terms: Mapping[str, Any],
        lease_s: float,
        in_rounds: bool,
        wish: str | None = None,
    ) -> None:
        self.name = name
        self.worker_id = wish or ""
        self._find = find
        self._make_transport = make_transport
        self._terms = dict(terms)
        self._every_s = min(_HEAR_EVERY_S, lease_s / 4)
        self._in_rounds = in_rounds
        self._wish = wish
        self._void: Age | None = None
        self._has_entered = False
        self._point: RendezvousServer | None = None
        self._transport: Transport | None = None
        self._stay = _Stay()
        self._ended = threading.Event()

    @property
    def signal(self) -> Signal:
        """The newest that was heard."""
        return self._stay.signal

    def enter(
        self, age: Age, own: Callable[[], Snapshot], own_non_trainable: Callable[[], NonTrainable]
    ) -> Entry:
        """Leave the generation, if any, and wait for the next one.

        Args:
            age: of this worker's copy of the center.
            own: returns it.
            own_non_trainable: returns the non-trainable state of this worker's model, which all may
                begin with.

        Raises:
            ExchangeError: somebody who was called as well went away; to be tried again.
            AttachError: not enough workers came in time, or the meeting point was lost.
            ConfigError: this worker's settings are others than those of the run.
        """
        point = self._come()
        self._close_transport()
        age = NO_COPY if age == self._void else age
        call = self._wait_for_call(point, age)
        self._stay = stay = _Stay(call.generation)
        # Of one age are equal copies, but for those that newcomers bring.
        is_equal = self._has_entered and call.source is not None and age == call.age
        has_newest = is_equal or call.source == self.worker_id
        # Unless it enters, what it has leads nowhere: the others go on from something else.
        self._void = None if has_newest or age == call.age else age
        if call.source == self.worker_id:
            non_trainable = None if self._has_entered else own_non_trainable()
            point.put(call.generation, own(), non_trainable)
        is_here = has_newest and self._in_rounds
        snapshot = None if is_here else self._wait_for_center(point, call, stay)
        is_new = not self._has_entered and call.source != self.worker_id
        first = point.first_non_trainable() if is_new else None
        self._transport = transport = self._make_transport(
            self.worker_id, call.membership, stay.abandoned
        )
        self._void, self._has_entered = None, True
        return Entry(call.membership, transport, snapshot, first)

    def check(self) -> None:
        """Raise an AttachError if this worker has left for good."""
        if self._ended.is_set():
            raise AttachError(self.name, f"worker {self.worker_id} is detached; attach anew")

    def _come(self) -> RendezvousServer:
        self.check()
        if self._point is None:
            self._point = self._find()
            self.worker_id = self._point.register(self._wish, self._terms)
            # No process end waits for it, and it knows nothing of the loop.
            threading.Thread(target=self._listen, args=(self._point,), daemon=True).start()
        return self._point

    def _wait_for_call(self, point: RendezvousServer, age: Age) -> Invitation:
        """Wait to be called; the meeting itself bounds the wait."""
        while (call := point.poll_invitation(self.worker_id, self._stay.generation, age)) is None:
            time.sleep(_ASK_EVERY_S)
        return call

    def _wait_for_center(self, point: RendezvousServer, call: Invitation, stay: _Stay) -> Snapshot:
        """Return the center to start from; the wait ends with the generation."""
        while (snapshot := point.fetch(self.worker_id, call)) is None:
            if stay.signal is Signal.OVER:
                raise ExchangeError(0, call.generation, "the center did not come")
            time.sleep(_ASK_EVERY_S)
        return snapshot

    def _listen(self, point: RendezvousServer) -> None:
        while not self._ended.wait(self._every_s):
            stay = self._stay
            try:
                stay.signal = point.hear(self.worker_id, stay.generation)
            except AttachError:
                continue  # a generation goes on without it; who needs it is told
            if stay.signal is Signal.OVER:
                stay.abandoned.set()

    def center(self) -> Snapshot | None:
        """Return the center as it is now, where it is at the meeting point; None: it is not."""
        return self._point.center() if self._point and not self._ended.is_set() else None

    def leave_rendezvous(self, own: Callable[[], Snapshot]) -> None:
        """Leave for good; the others go on.

        Args:
            own: returns this worker's copy of the center, for those who may come later.
        """
        point, was_ended = self._point, self._ended.is_set()
        self._ended.set()
        if point is not None and not was_ended:
            with contextlib.suppress(AttachError):  # it was lost, and nobody comes any more
                if point.leave_rendezvous(self.worker_id, self._stay.generation):
                    point.put(self._stay.generation, own())
        self._close_transport()

    def fall_silent(self) -> None:
        """Say nothing any more: the meeting takes this worker for lost before long."""
        self._ended.set()

    def _close_transport(self) -> None:
        """Leave the generation: peers notice by it, and come as well."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
