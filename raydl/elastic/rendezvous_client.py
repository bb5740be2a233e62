"""The rendezvous as a worker uses it: enters and leaves generations, and sends heartbeats."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from raydl.collective.sync_exchange import Group
from raydl.core.center import Snapshot
from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainable
from raydl.elastic.rendezvous import (
    HEARTBEAT_EVERY_S,
    NO_COPY,
    Age,
    Invitation,
    RendezvousServer,
    Signal,
)
from raydl.errors import AttachError, ExchangeError
from raydl.parameter_server.protocol import CenterClient

_POLL_EVERY_S = 0.05


class Transport(Protocol):
    """The connection of a worker with its group, or with the center."""

    def close(self) -> None:
        """Close the connection."""
        ...


MakeTransport = Callable[[str, Membership, threading.Event], Any]
"""Connects a worker with a membership, until the event is set. Raises ExchangeError on failure."""


@dataclass(frozen=True)
class Entry:
    """A worker's entry into a generation."""

    membership: Membership
    transport: Group | CenterClient
    snapshot: Snapshot | None
    """The snapshot to start from; None: this worker's own copy of the center."""
    non_trainable: NonTrainable | None = None
    """The non-trainable state that all workers begin with; None: this worker has it already."""
    has_ended: bool = False
    """Whether the training has ended: another worker has reached its end."""


@dataclass
class _Participation:
    """A worker's participation in a generation."""

    generation: int = 0
    signal: Signal = Signal.GO_ON
    """Answer to the last heartbeat."""
    abandoned: threading.Event = field(default_factory=threading.Event)


class RendezvousClient:
    """Enters and leaves generations for one worker.

    A thread sends heartbeats, whatever the worker's loop does, and receives the signals of the
    rendezvous. When the generation is over, it interrupts the worker's waits.

    Args:
        name: name of the run, for messages.
        register: registers this worker at the rendezvous server when it first enters: given the
            preferred id, it returns (the server, the worker's id). If the server is a proxy of
            another process, each of its calls may raise an AttachError: the server was lost, or
            does not answer.
        make_transport: connects this worker with the others, or with the center.
        lease_s: seconds without a heartbeat after which a worker is lost, if its process lives.
        in_rounds: whether each worker holds the center, instead of the server.
        preferred_id: the worker's id, if no other worker has it.
    """

    def __init__(
        self,
        name: str,
        register: Callable[[str | None], tuple[RendezvousServer, str]],
        make_transport: MakeTransport,
        *,
        lease_s: float,
        in_rounds: bool,
        preferred_id: str | None = None,
    ) -> None:
        self.name = name
        self.worker_id = preferred_id or ""
        self._register = register
        self._make_transport = make_transport
        self._every_s = min(HEARTBEAT_EVERY_S, lease_s / 4)
        self._in_rounds = in_rounds
        self._preferred_id = preferred_id
        self._stale_age: Age | None = None
        self._has_entered = False
        self._has_ended_training = False
        self._server: RendezvousServer | None = None
        self._transport: Transport | None = None
        self._current = _Participation()
        self._ended = threading.Event()

    @property
    def signal(self) -> Signal:
        """The newest signal of the rendezvous."""
        return self._current.signal

    def enter(
        self, age: Age, own: Callable[[], Snapshot], own_non_trainable: Callable[[], NonTrainable]
    ) -> Entry:
        """Leave the current generation, if any, and enter the next one.

        Args:
            age: age of this worker's copy of the center.
            own: returns this worker's copy of the center.
            own_non_trainable: returns the non-trainable state of this worker's model. If this
                worker is the source of the first center, all workers begin with it.

        Raises:
            ExchangeError: if another invited worker was lost; call again.
            AttachError: if too few workers arrived in time, or the server was lost.
            ConfigError: if this worker's settings differ from those of the run.
        """
        server = self._registered()
        self._close_transport()
        own_age, age = age, NO_COPY if age == self._stale_age else age
        # The server bounds this wait.
        last = self._current.generation
        while (invitation := server.poll_invitation(self.worker_id, last, age)) is None:
            time.sleep(_POLL_EVERY_S)
        self._current = current = _Participation(invitation.generation)
        # Copies of equal age are equal, except those of new workers, and those of a worker that
        # missed a generation: the others may have trained other samples up to the same age.
        is_member = self._has_entered and last == invitation.generation - 1
        is_equal = is_member and invitation.source is not None and age == invitation.age
        has_newest = is_equal or invitation.source == self.worker_id
        # Until it enters, its own copy is stale: the others continue from another one.
        is_new_copy = not self._has_entered and age == invitation.age != NO_COPY
        is_current = has_newest or is_new_copy
        self._stale_age = None if is_current else own_age
        if invitation.source == self.worker_id:
            non_trainable = None if self._has_entered else own_non_trainable()
            server.put(invitation.generation, own(), non_trainable)
        is_here = has_newest and self._in_rounds
        snapshot = None if is_here else self._wait_for_center(server, invitation, current)
        is_new = not self._has_entered and invitation.source != self.worker_id
        first = server.first_non_trainable() if is_new else None
        self._transport = transport = self._make_transport(
            self.worker_id, invitation.membership, current.abandoned
        )
        self._stale_age, self._has_entered, self._has_ended_training = None, True, False
        return Entry(invitation.membership, transport, snapshot, first, invitation.has_ended)

    def check(self) -> None:
        """Raise an AttachError if this worker is detached."""
        if self._ended.is_set():
            raise AttachError(self.name, f"worker {self.worker_id} is detached; attach again")

    def _registered(self) -> RendezvousServer:
        """Return the server; register this worker there first, if it is new."""
        self.check()
        if self._server is None:
            self._server, self.worker_id = self._register(self._preferred_id)
            # A daemon: the end of the process does not wait for it.
            threading.Thread(
                target=self._send_heartbeats, args=(self._server,), daemon=True
            ).start()
        return self._server

    def _wait_for_center(
        self, server: RendezvousServer, invitation: Invitation, current: _Participation
    ) -> Snapshot:
        """Return the center to start from; the wait ends with the generation."""
        while (snapshot := server.fetch(self.worker_id, invitation)) is None:
            if current.signal is Signal.OVER:
                raise ExchangeError(0, invitation.generation, "the center did not arrive")
            time.sleep(_POLL_EVERY_S)
        if not self._in_rounds:
            server.forget_start(self.worker_id)
        return snapshot

    def _send_heartbeats(self, server: RendezvousServer) -> None:
        while not self._ended.wait(self._every_s):
            current = self._current
            try:
                current.signal = server.heartbeat(self.worker_id, current.generation)
            except AttachError:
                continue  # the generation continues; a call that needs the server will raise
            if current.signal is Signal.OVER:
                current.abandoned.set()

    def center(self) -> Snapshot | None:
        """Return the current center, or None if the workers hold it."""
        return self._server.center() if self._server and not self._ended.is_set() else None

    def leave_rendezvous(self, own: Callable[[], Snapshot] | None) -> None:
        """Leave for good, while the others train on.

        Args:
            own: returns this worker's copy of the center, kept for later workers; None: it has
                none.
        """
        server, was_ended = self._server, self._ended.is_set()
        try:
            if server is not None and not was_ended:
                self._leave(server, None if self._has_ended_training else own)
        finally:
            self._ended.set()
            self._close_transport()

    def end_training(self, own: Callable[[], Snapshot]) -> None:
        """Say that this worker has reached the end of the training, so that the others end, too.

        It may go on to read the center, and leaves with ``leave_rendezvous``.

        Args:
            own: returns this worker's copy of the center, with which the others end.
        """
        if self._server is not None and not self._ended.is_set():
            self._leave(self._server, own, has_ended=True)
            self._has_ended_training = True

    def _leave(
        self,
        server: RendezvousServer,
        own: Callable[[], Snapshot] | None,
        *,
        has_ended: bool = False,
    ) -> None:
        """Leave at the server; the heartbeats go on until then."""
        generation = self._current.generation
        has_copy = own is not None and self._has_entered and self._stale_age is None
        with contextlib.suppress(AttachError):  # the server was lost
            leave = server.leave_rendezvous
            if leave(self.worker_id, generation, has_copy, has_ended) and own is not None:
                server.put(generation, own())
                leave(self.worker_id, generation, False, has_ended)

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats: within a lease this worker counts as lost."""
        self._ended.set()

    def _close_transport(self) -> None:
        """Leave the generation: the exchange of the peers fails, and they return as well."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
