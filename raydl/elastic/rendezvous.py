"""The rendezvous: forms generations of workers that join and leave by themselves.

In a run of raydl, a controller starts and watches the workers. Under ``raydl.attach`` users start
their own, which register at a rendezvous. It forms a generation of the workers that are waiting,
and signals its members when the generation is over. ``Rendezvous`` uses neither Ray nor threads;
``RendezvousServer`` adds a lock, and the center to start from. An actor inherits from the server;
tests use it directly.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""(Round, changes of the ledger) of a copy of the center; (0, 0): a new model."""
NO_COPY: Age = (-1, -1)
"""Age reported by a worker without a copy that others could start from."""
Process = tuple[str, int]
"""(Ray actor id, process id) of a worker."""
HEARTBEAT_EVERY_S = 0.5
"""Seconds between two heartbeats of a member, at the most."""
_LATE_S = 0.6
"""Silence of a worker after which its process may have ended, in seconds."""
_GRACE_S = 1.0
"""Time for members to complete a round that others have completed, in seconds."""


def age_of(snapshot: Snapshot) -> Age:
    """Return the age of a center that a worker has loaded, or that the server keeps."""
    return snapshot.progress.round, int(snapshot.ledger["num_changes"])


class Signal(enum.Enum):
    """The answer of the rendezvous to a member's heartbeat."""

    GO_ON = "go on"
    REGROUP = "regroup"
    """A worker waits to join: all members leave the generation after the next exchange."""
    OVER = "over"
    """The generation is over or continues without this worker: wait for another invitation."""
    ENDED = "ended"
    """The training has ended: a member has reached its end. This one ends after its exchange."""


@dataclass(frozen=True)
class Invitation:
    """An invitation of a worker into a generation."""

    membership: Membership
    source: str | None
    """The worker whose copy of the center all start from; None: the server has the center."""
    age: Age
    """Age of that copy."""
    has_ended: bool = False
    """Whether the training has ended, so that the worker only fetches the center."""

    @property
    def generation(self) -> int:
        """Number of the generation."""
        return self.membership.generation


@dataclass
class _WaitingWorker:
    """A worker that waits for an invitation."""

    generation: int
    """The generation that it left; 0: it is new."""
    age: Age
    since: float


class Rendezvous:
    """Forms generations of the waiting workers, and ends them.

    In synchronous methods, all members leave a generation together and form the next one. In
    methods with messages, each worker joins and leaves alone while the others train on. The first
    generation always forms together, to agree on a center.

    The training ends for all when the first member says that it has reached the end. The others end
    after the exchange that they are in. A worker that comes later receives the center and ends.

    Args:
        name: name of the run, for messages.
        num_workers: (fewest workers to start, most workers that train).
        in_rounds: whether the method is synchronous.
        lease_s: seconds without a heartbeat after which a worker is lost, unless ``lose`` says it
            before. It also limits how long members that have left a generation wait for the others.
        timeout_s: the longest wait of a worker for an invitation, in seconds.
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
        """The workers that train; generation 0 has none."""
        self._names: set[str] = set()
        self._entered: dict[str, int] = {}
        """By member, the generation of its invitation."""
        self._heartbeat_at: dict[str, float] = {}
        self._waiting: dict[str, _WaitingWorker] = {}
        self._invitations: dict[str, Invitation] = {}
        self._changes: list[Membership] = []
        self._has_center = False
        self._copy_age = NO_COPY
        """Age of the server's copy of the center."""
        self._over_since: float | None = None
        self.has_ended = False
        """Whether a member has reached the end of the training."""
        self._ended: set[str] = set()
        """The workers that have ended and may still read the center."""
        self._num_left = 0
        self._unused_since = clock()

    # calls of workers

    def new_worker_id(self, preferred_id: str | None = None) -> str:
        """Return a new worker id: the preferred one, if no worker has had it."""
        number = len(self._names)
        worker_id = preferred_id or f"w{number}"
        while worker_id in self._names:
            number += 1
            worker_id = f"{preferred_id}-{number}" if preferred_id else f"w{number}"
        self._names.add(worker_id)
        self._unused_since = self._clock()  # it is about to poll
        return worker_id

    def poll_invitation(self, worker_id: str, *, generation: int, age: Age) -> Invitation | None:
        """Let a worker wait for the next generation.

        Args:
            worker_id: its id.
            generation: the generation that it was last invited into; 0: none.
            age: age of its copy of the center.

        Returns:
            Its invitation, or None if it is to poll again.

        Raises:
            AttachError: if it has waited for too long.
        """
        now = self._clock()
        self._heartbeat_at[worker_id] = now
        self._drop_silent(now)
        if self._invitation_for(worker_id, generation) is None and worker_id not in self._waiting:
            self._waiting[worker_id] = _WaitingWorker(generation, age, now)
            if self._entered.get(worker_id) == generation:
                if not self._is_together:  # its claims are returned, and it joins as a newcomer
                    self._remove(worker_id, now)
                elif self._over_since is None:
                    self._over_since = now
        self._form(now)
        invitation = self._invitation_for(worker_id, generation)
        if invitation is None and now - self._waiting[worker_id].since >= self._timeout_s:
            problem = self._why_not(worker_id)
            del self._waiting[worker_id]
            raise AttachError(self._name, problem)
        return invitation

    def heartbeat(self, worker_id: str, generation: int) -> Signal:
        """Record a heartbeat of a member, and return the signal for it.

        Args:
            worker_id: its id.
            generation: the generation that it was last invited into.
        """
        now = self._clock()
        if self._entered.get(worker_id) == generation:
            self._heartbeat_at[worker_id] = now
        self._drop_silent(now)
        if worker_id in self._ended:
            self._unused_since = now
        if self._entered.get(worker_id) != generation:
            return Signal.OVER
        if self._over_since is None:
            is_wanted = self._is_together and len(self._entered) < self._max and self._newcomers()
            if is_wanted:
                return Signal.REGROUP
            return Signal.ENDED if self.has_ended else Signal.GO_ON
        # Unless a member was lost, this one may still complete the round of the others.
        is_whole = self.has_ended or len(self._entered) == self.membership.num_workers
        grace_s = _GRACE_S if is_whole else 0.0
        return Signal.OVER if now - self._over_since >= grace_s else Signal.REGROUP

    def may_have_ended(self) -> list[str]:
        """Return the workers that are late with a heartbeat, or that the others wait for."""
        now = self._clock()
        late = [w for w, at in self._heartbeat_at.items() if now - at >= _LATE_S]
        if self._over_since is None:
            return late
        missing = [w for w in self._entered if w not in self._waiting and w not in late]
        return late + missing

    def lose(self, worker_ids: Iterable[str]) -> None:
        """Remove workers whose processes have ended, without waiting for the end of their leases.

        Args:
            worker_ids: their ids; unknown ones are ignored.
        """
        now = self._clock()
        for worker_id in worker_ids:
            if self._heartbeat_at.pop(worker_id, None) is not None:
                self._drop(worker_id, now)
        self._form(now)

    def is_last(self, worker_id: str, generation: int) -> bool:
        """Return whether a worker is the only member, or was the last one; others may wait.

        It was the last one if its lease has expired meanwhile.
        """
        self._drop_silent(self._clock())
        if not self._entered:
            return generation == self.membership.generation
        return self._entered == {worker_id: generation}

    def leave_rendezvous(self, worker_id: str, generation: int, *, has_ended: bool = False) -> None:
        """Remove a worker that leaves for good.

        Args:
            worker_id: its id.
            generation: the generation that it was last invited into.
            has_ended: whether it has reached the end of the training, which then has ended for the
                other members, too. It may go on to read the center, and leaves again after that.
        """
        now = self._clock()
        self._waiting.pop(worker_id, None)
        self._heartbeat_at.pop(worker_id, None)
        (self._ended.add if has_ended else self._ended.discard)(worker_id)
        if self._entered.get(worker_id) == generation:
            self.has_ended |= has_ended
            self._num_left += 1
            self._remove(worker_id, now)
        self._drop_silent(now)

    # calls of the server

    def note_center(self, age: Age = (0, 0)) -> None:
        """Note that the server has the center: with messages, each worker now moves alone.

        Args:
            age: age of that center.
        """
        self._copy_age = age
        if self._has_center:
            return
        self._has_center, self._over_since = True, None
        staying = tuple(w for w in self._entered if w not in self._waiting)
        if not self._in_rounds and staying != self.membership.worker_ids:
            self._entered = {w: g for w, g in self._entered.items() if w in staying}
            self._number(staying)

    def pop_changes(self) -> list[Membership]:
        """Return the memberships since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def unused_s(self) -> float:
        """Return the seconds without any member, or waiting or new worker."""
        now = self._clock()
        self._drop_silent(now)
        return now - self._unused_since

    # decisions

    @property
    def _is_together(self) -> bool:
        """Whether all members enter and leave together."""
        return self._in_rounds or not self._has_center

    def _invitation_for(self, worker_id: str, generation: int) -> Invitation | None:
        """Return the invitation of a worker into a later generation, if it has one."""
        invitation = self._invitations.get(worker_id)
        is_later = invitation is not None and invitation.generation > generation
        return invitation if is_later else None

    def _drop_silent(self, now: float) -> None:
        """Remove the workers whose lease has expired."""
        for worker_id in [w for w, at in self._heartbeat_at.items() if now - at >= self._lease_s]:
            del self._heartbeat_at[worker_id]
            self._drop(worker_id, now)
        if self._entered or self._waiting:
            self._unused_since = now

    def _drop(self, worker_id: str, now: float) -> None:
        """Remove a lost worker, whether it trained or waited."""
        self._waiting.pop(worker_id, None)
        if worker_id in self._entered:
            self._remove(worker_id, now)

    def _remove(self, worker_id: str, now: float) -> None:
        """Remove a member."""
        del self._entered[worker_id]
        self._invitations.pop(worker_id, None)
        if not self._is_together:
            self._number(tuple(w for w in self.membership.worker_ids if w != worker_id))
        elif self._over_since is None:
            self._over_since = now
        if not self._entered and not any(w.generation for w in self._waiting.values()):
            self._num_left = 0  # the next workers start like the first ones

    def _newcomers(self) -> list[str]:
        """Return the waiting workers that are not members, in the order of their ids."""
        new = (w for w in self._waiting if w not in self._entered)
        return sorted(new, key=lambda worker_id: (len(worker_id), worker_id))  # w2 before w10

    def _returned(self) -> list[str]:
        """Return the members that wait for the next generation, by rank."""
        return [w for w in self.membership.worker_ids if w in self._entered and w in self._waiting]

    def _num_needed(self) -> int:
        """Return the fewest members: workers that left for good need no replacement."""
        return 1 if self.has_ended else max(1, self._min - self._num_left)

    def _form(self, now: float) -> None:
        """Form the next generation, if it can form now."""
        if self._entered and not self._is_together:
            new = self._newcomers()[: max(0, self._max - len(self._entered))]
            if new:
                self._number((*self.membership.worker_ids, *new))
                self._invite(new, None, NO_COPY)
            return
        returned = self._returned()
        if self._entered:
            if self._over_since is None or not returned:
                return
            if len(returned) < len(self._entered) and now - self._over_since < self._lease_s:
                return
        chosen = (*returned, *self._newcomers()[: max(0, self._max - len(returned))])
        if len(chosen) >= self._num_needed():
            source, age = self._furthest(chosen)
            self._number(chosen)
            self._entered, self._invitations, self._over_since = {}, {}, None
            self._invite(chosen, source, age)

    def _number(self, worker_ids: tuple[str, ...]) -> None:
        """Make workers the members of the next generation."""
        self.membership = Membership(self.membership.generation + 1, worker_ids)
        self._changes.append(self.membership)

    def _invite(self, worker_ids: Sequence[str], source: str | None, age: Age) -> None:
        for worker_id in worker_ids:
            del self._waiting[worker_id]
            self._entered[worker_id] = self.membership.generation
            self._invitations[worker_id] = Invitation(self.membership, source, age, self.has_ended)

    def _furthest(self, chosen: tuple[str, ...]) -> tuple[str | None, Age]:
        """Return (the worker with the furthest copy of the center, the age of that copy).

        Only members of the previous generation have one: the rounds of a worker that was left out
        are not in the others' center. In the first generation, all workers are new. Later a new
        worker has one if no member is left, and it has loaded a center further than the server's.
        After the end of the training the server has the center of the worker that reached it.
        """
        if not self._is_together:
            return None, NO_COPY
        before, waiting = self.membership.generation, {w: self._waiting[w] for w in chosen}
        least = self._copy_age if self.has_ended else NO_COPY
        known = {w: x.age for w, x in waiting.items() if x.generation == before and x.age > least}
        loaded = {
            w: x.age for w, x in waiting.items() if x.generation == 0 and x.age > self._copy_age
        }
        ages = known or loaded
        if not ages:
            return None, NO_COPY
        source = max(ages, key=lambda w: ages[w])  # the first of equals
        return source, ages[source]

    def _why_not(self, worker_id: str) -> str:
        """Return why a worker received no invitation in time."""
        waited = f"worker {worker_id} waited for {self._timeout_s:g} s"
        if len(self._entered) >= self._max and worker_id not in self._entered:
            return f"{waited} for a place: {self._max} workers are attached; raise num_workers"
        returned = self._returned()
        if self._entered and not returned:
            return (
                f"{waited} for an exchange of the {len(self._entered)} workers that train; raise "
                f"start_timeout_s or lower method.period"
            )
        num_waiting = len(returned) + len(self._newcomers())
        return (
            f"{waited}: {num_waiting} of {self._num_needed()} workers arrived; start the others, "
            f"lower num_workers or raise start_timeout_s"
        )


class RendezvousServer(CenterEndpoint):
    """The rendezvous of one run, and its center.

    In synchronous methods each worker holds the center, and the server keeps a copy for newcomers.
    In methods with messages the server holds the center itself.

    Args:
        name: name of the run.
        job: the job of all workers.
        terms: values that all workers must share, by setting.
        node: this process's node, if the workers are other processes; see ``make_shard``.
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
        self._copy_generation = 0
        self._non_trainable: NonTrainable | None = None
        self._starts: dict[str, Snapshot] = {}
        self._registered: dict[str, str] = {}
        """Ids of the workers by their tokens."""
        self._members: frozenset[str] = frozenset()
        self._processes: dict[str, Process] = {}

    def register(
        self,
        preferred_id: str | None,
        terms: Mapping[str, Any],
        token: str | None = None,
        process: Process | None = None,
    ) -> str:
        """Register a new worker; return its id: the preferred one, if it is free.

        Args:
            preferred_id: the id that it would like to have; None: any.
            terms: its settings that all workers must share.
            token: names this worker: if its answer was lost, it registers again.
            process: its process, if it is one that Ray knows.

        Raises:
            ConfigError: if its settings differ from those of the run.
        """
        for setting, value in terms.items():
            if value != self._terms.get(setting):
                raise ConfigError(
                    setting,
                    f"must be the same for all workers of {self._name!r}: it is "
                    f"{self._terms.get(setting)}, got {value}",
                )
        with self._lock:
            worker_id = self._registered.get(token) if token else None
            worker_id = worker_id or self._rendezvous.new_worker_id(preferred_id)
            if token:
                self._registered[token] = worker_id
            if process:
                self._processes[worker_id] = process
            return worker_id

    def lose_ended(self, has_ended: Callable[[str, int], bool]) -> None:
        """Remove the workers whose processes have ended.

        Args:
            has_ended: returns whether a process (actor id, process id) has ended. It is asked only
                about workers that are silent, or that others wait for.
        """
        with self._lock:
            suspects = self._rendezvous.may_have_ended()
            processes = {w: self._processes[w] for w in suspects if w in self._processes}
        ended = [w for w, process in processes.items() if has_ended(*process)]
        if ended:
            with self._lock:
                self._rendezvous.lose(ended)
                self._apply_changes()

    def poll_invitation(self, worker_id: str, generation: int, age: Age) -> Invitation | None:
        """Return the invitation of a waiting worker, or None if it is to poll again.

        Raises:
            AttachError: if it has waited for too long.
        """
        with self._lock:
            try:
                return self._rendezvous.poll_invitation(worker_id, generation=generation, age=age)
            finally:
                self._apply_changes()

    def heartbeat(self, worker_id: str, generation: int) -> Signal:
        """Record a heartbeat of a member, and return the signal for it."""
        with self._lock:
            signal = self._rendezvous.heartbeat(worker_id, generation)
            self._apply_changes()
            return signal

    def leave_rendezvous(
        self, worker_id: str, generation: int, has_copy: bool, has_ended: bool = False
    ) -> bool:
        """Remove a worker that leaves for good, unless it is to ``put`` its copy before.

        The last member stays until its copy is here: waiting workers would start from an older one.
        So does the first that has reached the end: all others end with its center.

        Args:
            worker_id: its id.
            generation: the generation that it was last invited into.
            has_copy: whether it has a copy of the center that it has not ``put``.
            has_ended: as for ``Rendezvous.leave_rendezvous``.

        Returns:
            Whether it is to ``put`` its copy, and to leave then.
        """
        with self._lock:
            is_to_put = (
                has_copy
                and self._job.method.is_sync
                and (
                    self._rendezvous.is_last(worker_id, generation)
                    or (has_ended and not self._rendezvous.has_ended)
                )
            )
            if not is_to_put:
                self._rendezvous.leave_rendezvous(worker_id, generation, has_ended=has_ended)
            self._apply_changes()
            return is_to_put

    def put(
        self, generation: int, snapshot: Snapshot, non_trainable: NonTrainable | None = None
    ) -> None:
        """Store the center that a generation starts from or ends with.

        Args:
            generation: number of the generation. The center of an earlier one is ignored.
            snapshot: the center.
            non_trainable: the non-trainable state of a new worker. Workers that enter from now on
                begin with it.
        """
        with self._lock:
            is_late = generation != self._rendezvous.membership.generation
            # A worker that was suspended may come after another one of its generation has left.
            if self._copy is not None and generation == self._copy_generation:
                is_late |= age_of(snapshot) < age_of(self._copy)
            if is_late or self._center_server is not None:
                return
            if non_trainable is not None:
                self._non_trainable = non_trainable
            if self._job.method.is_sync:
                self._copy, self._copy_generation = snapshot, generation
            else:
                self._center_server = CenterServer(self._job, snapshot, node=self._node)
                self._rendezvous.pop_changes()  # they were before this center
                self._change(self._rendezvous.membership)
            self._rendezvous.note_center(age_of(snapshot))
            self._apply_changes()

    def fetch(self, worker_id: str, invitation: Invitation) -> Snapshot | None:
        """Return the center that an invited worker starts from, or None before it has arrived.

        Raises:
            AttachError: if the center was lost.
        """
        with self._lock:
            if not self._job.method.is_sync:
                return self._starts.get(worker_id)  # again if the answer is lost
            if invitation.source is None and self._copy is None:
                raise AttachError(
                    self._name,
                    "the center was lost with the worker that had it; attach under another name, "
                    "from a state that you saved",
                )
            is_newest = self._copy_generation == invitation.generation
            return self._copy if invitation.source is None or is_newest else None

    def forget_start(self, worker_id: str) -> None:
        """Release the snapshot that a worker starts from: it has arrived there."""
        with self._lock:
            self._starts.pop(worker_id, None)

    def first_non_trainable(self) -> NonTrainable:
        """Return the non-trainable state that new workers begin with; call it after ``fetch``."""
        with self._lock:
            assert self._non_trainable is not None, "it arrives with the first center"
            return self._non_trainable

    def center(self) -> Snapshot | None:
        """Return the current center, or None if the workers hold it."""
        return None if self._center_server is None else self._center_server.snapshot()

    def unused_s(self) -> float:
        """Return the seconds without any member, or waiting or new worker."""
        with self._lock:
            unused_s = self._rendezvous.unused_s()
            self._apply_changes()
            return unused_s

    def _apply_changes(self) -> None:
        """Apply new memberships to the center of a method with messages."""
        if self._job.method.is_sync:
            self._rendezvous.pop_changes()
        elif self._center_server is not None:
            for membership in self._rendezvous.pop_changes():
                self._change(membership)
            coordinator = self._center_server.coordinator
            coordinator.pop_records()  # they are not used, and would accumulate
            coordinator.pop_due()

    def _change(self, membership: Membership) -> None:
        """Change the members at the center, and keep the snapshots that new members start from."""
        before, self._members = self._members, frozenset(membership.worker_ids)
        if before:
            snapshot = self.center_server.change(membership, [])
        else:  # turns are taken in rank order
            self.center_server.begin_generation(membership)
            snapshot = self.center_server.snapshot()
        self._starts = {w: s for w, s in self._starts.items() if w in self._members}
        newcomers = [w for w in membership.worker_ids if w not in before]
        self._starts.update(dict.fromkeys(newcomers, snapshot))
