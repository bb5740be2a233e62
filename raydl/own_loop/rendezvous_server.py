"""Where workers with loops of their own meet: who is there, and the center that they start from.

A plain object behind a lock, for any number of threads. An actor wraps one; a test uses it as
it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raydl.center import Snapshot
from raydl.center_server import CenterServer
from raydl.coordinator import Due
from raydl.errors import AttachError, ConfigError
from raydl.job import Job
from raydl.membership import Membership
from raydl.own_loop.rendezvous import Age, Invitation, Rendezvous, Signal
from raydl.untrained import Untrained


class RendezvousServer:
    """The meeting of one run, and its center.

    In rounds every worker holds the center; here lies a copy for those who come later. By
    messages the center itself is here.

    Args:
        name: of the run.
        job: what all workers do.
        terms: what all workers must agree on, by setting.
        has_neighbours: workers may be other processes of this node, and map the center's memory.
        clock: seconds, rising.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        terms: Mapping[str, Any],
        *,
        has_neighbours: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        scaling = job.config.scaling
        self._name = name
        self._job = job
        self._terms = dict(terms)
        self._has_neighbours = has_neighbours
        self._lock = threading.RLock()
        self._rendezvous = Rendezvous(
            name,
            num_workers=(scaling.min_workers, scaling.max_workers),
            in_rounds=job.method.is_sync,
            lease_s=job.config.elastic.lease_s,
            timeout_s=scaling.start_timeout_s,
            clock=clock,
        )
        self._service: CenterServer | None = None
        self._copy: Snapshot | None = None
        self._copied_in = 0
        self._untrained: Untrained | None = None
        self._starts: dict[str, Snapshot] = {}
        self._members: frozenset[str] = frozenset()

    @property
    def service(self) -> CenterServer:
        """The center, for methods that exchange by messages."""
        assert self._service is not None, "sync methods send no messages"
        return self._service

    def register(self, wish: str | None, terms: Mapping[str, Any]) -> str:
        """Return the id of a worker that comes for the first time, the wished one if it is free.

        Raises:
            ConfigError: its settings are others than those of the run.
        """
        for setting, value in terms.items():
            if value != self._terms.get(setting):
                raise ConfigError(
                    setting,
                    f"must be the same for all workers of {self._name!r}: it is "
                    f"{self._terms.get(setting)}, got {value}",
                )
        with self._lock:
            return self._rendezvous.name_one(wish)

    def ask(self, worker_id: str, generation: int, age: Age) -> Invitation | None:
        """Return the generation that a worker waiting to join is called into; None: ask again.

        Raises:
            AttachError: it waited for too long.
        """
        with self._lock:
            try:
                return self._rendezvous.ask(worker_id, generation=generation, age=age)
            finally:
                self._follow()

    def hear(self, worker_id: str, generation: int) -> Signal:
        """Note that a worker is there; return what it should do."""
        with self._lock:
            signal = self._rendezvous.hear(worker_id, generation)
            self._follow()
            return signal

    def leave(self, worker_id: str, generation: int) -> bool:
        """Let a worker go; return whether its copy of the center should stay here."""
        with self._lock:
            is_last = self._rendezvous.leave(worker_id, generation)
            self._follow()
            return is_last and self._job.method.is_sync

    def put(self, generation: int, snapshot: Snapshot, untrained: Untrained | None = None) -> None:
        """Take in the center that a generation starts from, or ends with.

        Args:
            generation: which.
            snapshot: the center.
            untrained: all of the untrained state, from a worker that enters for the first time;
                the first that comes is everybody's.
        """
        with self._lock:
            if self._untrained is None:
                self._untrained = untrained
            if generation != self._rendezvous.membership.generation or self._service is not None:
                return  # others went on meanwhile
            if self._job.method.is_sync:
                self._copy, self._copied_in = snapshot, generation
            else:
                self._service = CenterServer(
                    self._job, snapshot, has_neighbours=self._has_neighbours
                )
                self._rendezvous.take_changes()  # the center was there for none of them
                self._change(self._service, self._rendezvous.membership)
            self._rendezvous.take_center()
            self._follow()

    def fetch(self, worker_id: str, call: Invitation) -> Snapshot | None:
        """Return what a worker that was called starts from; None: it is not here yet.

        Raises:
            AttachError: nobody has it.
        """
        with self._lock:
            if not self._job.method.is_sync:
                return self._starts.pop(worker_id, None)
            if call.source is None and self._copy is None:
                raise AttachError(
                    self._name,
                    "the center was lost with the worker that had it; take another name, and a "
                    "state that you kept",
                )
            return self._copy if call.source is None or self._copied_in == call.generation else None

    def first_untrained(self) -> Untrained:
        """Return the untrained state that all workers begin with; after the center has come."""
        with self._lock:
            assert self._untrained is not None, "it comes with the first center"
            return self._untrained

    def center(self) -> Snapshot | None:
        """Return the center as it is now; None: the workers have it."""
        if self._service is None:
            return None
        return self._service.snapshot(Due(self._service.coordinator.version, is_kept=False), list)

    def quiet_s(self) -> float:
        """Return for how many seconds nobody has been here."""
        with self._lock:
            quiet_s = self._rendezvous.quiet_s()
            self._follow()
            return quiet_s

    def _follow(self) -> None:
        """Let the center follow who came and went."""
        if self._job.method.is_sync:
            self._rendezvous.take_changes()
        elif self._service is not None:
            for membership in self._rendezvous.take_changes():
                self._change(self._service, membership)
            self._service.coordinator.take_records()  # nobody reads them; they would pile up
            self._service.coordinator.take_due()

    def _change(self, service: CenterServer, membership: Membership) -> None:
        """Let workers come and go at the center; keep what the new ones start from."""
        before, self._members = self._members, frozenset(membership.worker_ids)
        if before:
            snapshot = service.change(membership, [])
        else:  # in rank order, where the method keeps to it
            service.open(membership)
            snapshot = service.snapshot(Due(service.coordinator.version, is_kept=False), list)
        self._starts = {w: s for w, s in self._starts.items() if w in self._members}
        self._starts.update(dict.fromkeys(self._members - before, snapshot))
