"""The rendezvous: decides who trains together, where workers come and go by themselves.

A run of raydl has a controller that starts workers and watches them. Users who keep their own loop
start their workers, too; so these come to a rendezvous and say which they are. It forms a
generation of the workers that are there, and tells the members when it is over.
``Rendezvous`` knows no Ray and no thread; ``RendezvousServer`` holds the lock, and the
center to start from. An actor inherits from it; a test uses it as it is.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydl.core.center import Snapshot
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainable
from raydl.elastic.center_endpoint import CenterEndpoint
from raydl.errors import AttachError, ConfigError
from raydl.parameter_server.server import CenterServer

Age = tuple[int, int]
"""(Rounds, changes of the ledger) that a copy of the center has seen; (0, 0): a new model."""
NO_COPY: Age = (-1, -1)
"""Of a worker that has no copy that others could go on with."""
_GRACE_S = 1.0
"""Time that members have to leave a round that others have completed, in seconds."""


class Signal(enum.Enum):
    """The rendezvous' signal to a member."""

    GO_ON = "go on"
    REGROUP = "regroup"
    """Somebody waits to join: leave the generation together, after the next exchange."""
    OVER = "over"
    """The generation is over, or goes on without this worker: come again."""


@dataclass(frozen=True)
class Invitation:
    """A generation that a worker is called into."""

    membership: Membership
    source: str | None
    """Whose copy of the center all start from; None: the one that is at the meeting."""
    age: Age
    """Of that copy."""

    @property
    def generation(self) -> int:
        """The one that this worker enters with."""
        return self.membership.generation


@dataclass
class _Comer:
    """A worker waiting to join."""

    generation: int
    """The one that it comes from; 0: it is new."""
    age: Age
    came_at: float


class Rendezvous:
    """Forms generations of the workers that are waiting, and ends them.

    In rounds all members leave a generation together and form the next one. By messages
    everybody comes and goes alone, and the others stay as they are; all the same the first
    generation forms together, to agree on a center.

    Args:
        name: of the run, for messages.
        num_workers: the fewest that start, and the most that train.
        in_rounds: whether all members exchange at once.
        lease_s: who is not heard of for so long is lost, in seconds; so long members that have
            left a generation wait for the others.
        timeout_s: the longest wait of a worker for its generation, in seconds.
        clock: seconds, rising.
    """

    def __init__(
        self,
        name: str,
        *,
        num_workers: tuple[int, int],
        in_rounds: bool,
        lease_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._min, self._max = num_workers
        self._in_rounds = in_rounds
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._clock = clock
        self.membership = Membership(0, ())
        """The workers that train; in generation 0 none."""
        self._names: set[str] = set()
        self._entered: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}
        self._rendezvous: dict[str, _Comer] = {}
        self._calls: dict[str, Invitation] = {}
        self._changes: list[Membership] = []
        self._has_center = False
        self._over_since: float | None = None
        self._num_done = 0
        self._quiet_since = clock()

    # what workers say

    def new_worker_id(self, wish: str | None = None) -> str:
        """Return an id that no worker had before, the wished one if it is none of those."""
        number = len(self._names)
        worker_id = wish or f"w{number}"
        while worker_id in self._names:
            number += 1
            worker_id = f"{wish}-{number}" if wish else f"w{number}"
        self._names.add(worker_id)
        return worker_id

    def poll_invitation(self, worker_id: str, *, generation: int, age: Age) -> Invitation | None:
        """Wait to join; return what a worker is called into, or None: ask again.

        Args:
            worker_id: who comes.
            generation: the one that it was called into last; 0: none.
            age: of its copy of the center.

        Raises:
            AttachError: it waited for too long.
        """
        now = self._clock()
        self._heard_at[worker_id] = now
        self._look_around(now)
        if self._call_of(worker_id, generation) is None and worker_id not in self._rendezvous:
            self._come(worker_id, _Comer(generation, age, now))
        self._form(now)
        call = self._call_of(worker_id, generation)
        if call is None and now - self._rendezvous[worker_id].came_at >= self._timeout_s:
            problem = self._why_not(worker_id)
            del self._rendezvous[worker_id]
            raise AttachError(self._name, problem)
        return call

    def hear(self, worker_id: str, generation: int) -> Signal:
        """Note that a worker is there; return what it should do.

        Args:
            generation: the one that it was called into.
        """
        now = self._clock()
        if self._entered.get(worker_id) == generation:
            self._heard_at[worker_id] = now
        self._look_around(now)
        if self._entered.get(worker_id) != generation:
            return Signal.OVER
        if self._over_since is None:
            is_wanted = self._is_together and len(self._entered) < self._max and self._newcomers()
            return Signal.REGROUP if is_wanted else Signal.GO_ON
        return Signal.OVER if now - self._over_since >= self._grace_s() else Signal.REGROUP

    def leave_rendezvous(self, worker_id: str, generation: int) -> bool:
        """Let a worker go for good; return whether nobody is left."""
        now = self._clock()
        self._rendezvous.pop(worker_id, None)
        self._heard_at.pop(worker_id, None)
        if self._entered.get(worker_id) == generation:
            self._num_done += 1
            self._remove(worker_id, now)
        self._look_around(now)
        return not self._entered and not self._rendezvous

    # what the room asks for

    def note_center(self) -> None:
        """Note that the center is at the meeting: by messages everybody moves alone from now on."""
        if self._has_center:
            return
        self._has_center, self._over_since = True, None
        staying = tuple(w for w in self._entered if w not in self._rendezvous)
        if not self._in_rounds and staying != self.membership.worker_ids:
            self._entered = {w: g for w, g in self._entered.items() if w in staying}
            self._number(staying)

    def pop_changes(self) -> list[Membership]:
        """Return the memberships that nobody has taken yet, in their order."""
        changes, self._changes = self._changes, []
        return changes

    def quiet_s(self) -> float:
        """Return for how many seconds nobody has been here: no member, nobody waiting to join."""
        now = self._clock()
        self._look_around(now)
        return now - self._quiet_since

    # decisions

    @property
    def _is_together(self) -> bool:
        """Whether all members enter and leave together."""
        return self._in_rounds or not self._has_center

    def _call_of(self, worker_id: str, generation: int) -> Invitation | None:
        """Return a worker's invitation, if it does not come from that generation."""
        call = self._calls.get(worker_id)
        return call if call is not None and call.generation > generation else None

    def _grace_s(self) -> float:
        """Return how long members may need for a round that others have completed."""
        is_whole = len(self._entered) == self.membership.num_workers
        return _GRACE_S if is_whole else 0.0

    def _come(self, worker_id: str, comer: _Comer) -> None:
        self._rendezvous[worker_id] = comer
        if self._entered.get(worker_id) != comer.generation:
            return
        if not self._is_together:  # what it had claimed goes back; it enters anew
            self._remove(worker_id, comer.came_at)
        elif self._over_since is None:
            self._over_since = comer.came_at

    def _look_around(self, now: float) -> None:
        """Let those go who were not heard of for the time of a lease."""
        for worker_id in [w for w, at in self._heard_at.items() if now - at >= self._lease_s]:
            del self._heard_at[worker_id]
            self._rendezvous.pop(worker_id, None)
            if worker_id in self._entered:
                self._remove(worker_id, now)
        if self._entered or self._rendezvous:
            self._quiet_since = now

    def _remove(self, worker_id: str, now: float) -> None:
        """Take out a member."""
        del self._entered[worker_id]
        self._calls.pop(worker_id, None)
        if not self._is_together:
            self._number(tuple(w for w in self.membership.worker_ids if w != worker_id))
        elif self._over_since is None:
            self._over_since = now
        if not self._entered and not self._rendezvous:  # the next ones begin as the first ones did
            self._num_done = 0

    def _newcomers(self) -> list[str]:
        """Return those waiting to join that were no members, in the order of their ids."""
        return sorted((w for w in self._rendezvous if w not in self._entered), key=_natural)

    def _back(self) -> list[str]:
        """Return the members that have come back to join, by rank."""
        return [
            w for w in self.membership.worker_ids if w in self._entered and w in self._rendezvous
        ]

    def _needed(self) -> int:
        """Return how many must be there: who has left for good need not be replaced."""
        return max(1, self._min - self._num_done)

    def _form(self, now: float) -> None:
        """Form the next generation, if it can be formed now."""
        if self._entered and not self._is_together:
            new = self._newcomers()[: max(0, self._max - len(self._entered))]
            if new:
                self._number((*self.membership.worker_ids, *new))
                self._call_in(new, None, NO_COPY)
            return
        back = self._back()
        if self._entered and not self._is_time(back, now):
            return
        chosen = (*back, *self._newcomers()[: max(0, self._max - len(back))])
        if len(chosen) >= self._needed():
            source, age = self._furthest(chosen)
            self._number(chosen)
            self._entered, self._calls, self._over_since = {}, {}, None
            self._call_in(chosen, source, age)

    def _is_time(self, back: list[str], now: float) -> bool:
        """Whether those who came back wait no longer for the others."""
        if self._over_since is None or not back:
            return False
        return len(back) == len(self._entered) or now - self._over_since >= self._lease_s

    def _number(self, worker_ids: tuple[str, ...]) -> None:
        """Make these the members, under the next number."""
        self.membership = Membership(self.membership.generation + 1, worker_ids)
        self._changes.append(self.membership)

    def _call_in(self, worker_ids: Sequence[str], source: str | None, age: Age) -> None:
        for worker_id in worker_ids:
            del self._rendezvous[worker_id]
            self._entered[worker_id] = self.membership.generation
            self._calls[worker_id] = Invitation(self.membership, source, age)

    def _furthest(self, chosen: tuple[str, ...]) -> tuple[str | None, Age]:
        """Return (who has the newest copy of the center, its age).

        Only who comes from the generation before can have one: what somebody else did, who was
        left out of it, is not in the others' center. Before the first generation all are new.
        """
        if not self._is_together:
            return None, NO_COPY
        before = self.membership.generation
        ages = {
            w: self._rendezvous[w].age for w in chosen if self._rendezvous[w].generation == before
        }
        known = [w for w, age in ages.items() if age > NO_COPY]
        if not known:
            return None, NO_COPY
        source = max(known, key=lambda w: ages[w])  # the first of equals
        return source, ages[source]

    def _why_not(self, worker_id: str) -> str:
        """Return in words what a worker waiting to join has waited for in vain."""
        waited = f"worker {worker_id} waited for {self._timeout_s:g} s"
        if len(self._entered) >= self._max and worker_id not in self._entered:
            return f"{waited} for a place: {self._max} workers are attached; raise num_workers"
        back = self._back()
        if self._entered and not back:
            return (
                f"{waited} for an exchange of the {len(self._entered)} workers that train; raise "
                f"start_timeout_s or lower method.period"
            )
        num_here = len(back) + len(self._newcomers())
        return (
            f"{waited}: {num_here} of {self._needed()} workers came; start the others, lower "
            f"num_workers or raise start_timeout_s"
        )


def _natural(worker_id: str) -> tuple[int, str]:
    """Return a key that sorts w2 before w10."""
    return len(worker_id), worker_id


class RendezvousServer(CenterEndpoint):
    """The rendezvous of one run, and its center.

    In rounds every worker holds the center; here lies a copy for those who come later. By
    messages the center itself is here.

    Args:
        name: of the run.
        job: what all workers do.
        terms: what all workers must agree on, by setting.
        node: of this process, where workers are other processes; see ``make_shard``.
        clock: seconds, rising.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        terms: Mapping[str, Any],
        *,
        node: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        scaling = job.config.scaling
        self._name = name
        self._job = job
        self._terms = dict(terms)
        self._node = node
        self._lock = threading.RLock()
        self._rendezvous = Rendezvous(
            name,
            num_workers=(scaling.min_workers, scaling.max_workers),
            in_rounds=job.method.is_sync,
            lease_s=job.config.elastic.lease_s,
            timeout_s=scaling.start_timeout_s,
            clock=clock,
        )
        self._copy: Snapshot | None = None
        self._copied_in = 0
        self._non_trainable: NonTrainable | None = None
        self._starts: dict[str, Snapshot] = {}
        self._members: frozenset[str] = frozenset()

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
            return self._rendezvous.new_worker_id(wish)

    def poll_invitation(self, worker_id: str, generation: int, age: Age) -> Invitation | None:
        """Return the generation that a worker waiting to join is called into; None: ask again.

        Raises:
            AttachError: it waited for too long.
        """
        with self._lock:
            try:
                return self._rendezvous.poll_invitation(worker_id, generation=generation, age=age)
            finally:
                self._follow()

    def hear(self, worker_id: str, generation: int) -> Signal:
        """Note that a worker is there; return what it should do."""
        with self._lock:
            signal = self._rendezvous.hear(worker_id, generation)
            self._follow()
            return signal

    def leave_rendezvous(self, worker_id: str, generation: int) -> bool:
        """Let a worker go; return whether its copy of the center should stay here."""
        with self._lock:
            is_last = self._rendezvous.leave_rendezvous(worker_id, generation)
            self._follow()
            return is_last and self._job.method.is_sync

    def put(
        self, generation: int, snapshot: Snapshot, non_trainable: NonTrainable | None = None
    ) -> None:
        """Take in the center that a generation starts from, or ends with.

        Args:
            generation: which.
            snapshot: the center.
            non_trainable: all of the non-trainable state, from a worker that enters for the first
                time; the first that comes is everybody's.
        """
        with self._lock:
            if self._non_trainable is None:
                self._non_trainable = non_trainable
            is_late = generation != self._rendezvous.membership.generation
            if is_late or self._center_server is not None:
                return  # others went on meanwhile
            if self._job.method.is_sync:
                self._copy, self._copied_in = snapshot, generation
            else:
                self._center_server = CenterServer(self._job, snapshot, node=self._node)
                self._rendezvous.pop_changes()  # the center was there for none of them
                self._change(self._rendezvous.membership)
            self._rendezvous.note_center()
            self._follow()

    def fetch(self, worker_id: str, call: Invitation) -> Snapshot | None:
        """Return the center that an invited worker starts from; None: it is not here yet.

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

    def first_non_trainable(self) -> NonTrainable:
        """Return the non-trainable state that all workers begin with; after the center has come."""
        with self._lock:
            assert self._non_trainable is not None, "it comes with the first center"
            return self._non_trainable

    def center(self) -> Snapshot | None:
        """Return the center as it is now; None: the workers have it."""
        return None if self._center_server is None else self._center_server.snapshot()

    def quiet_s(self) -> float:
        """Return for how many seconds nobody has been here."""
        with self._lock:
            quiet_s = self._rendezvous.quiet_s()
            self._follow()
            return quiet_s

    def _follow(self) -> None:
        """Let the center follow who came and went."""
        if self._job.method.is_sync:
            self._rendezvous.pop_changes()
        elif self._center_server is not None:
            for membership in self._rendezvous.pop_changes():
                self._change(membership)
            coordinator = self._center_server.coordinator
            coordinator.pop_records()  # nobody reads them; they would pile up
            coordinator.pop_due()

    def _change(self, membership: Membership) -> None:
        """Let workers come and go at the center; keep what the new ones start from."""
        before, self._members = self._members, frozenset(membership.worker_ids)
        if before:
            snapshot = self.center_server.change(membership, [])
        else:  # in rank order, where the method keeps to it
            self.center_server.begin_generation(membership)
            snapshot = self.center_server.snapshot()
        self._starts = {w: s for w, s in self._starts.items() if w in self._members}
        self._starts.update(dict.fromkeys(self._members - before, snapshot))
