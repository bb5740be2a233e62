"""The registry of workers: the phase, node and last report of each, from its request on."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raydl.core.membership import Candidates, Membership
from raydl.core.reports import WorkerReport
from raydl.elastic.heartbeat import has_computed

_STUCK_STEPS = 20
"""A worker whose step takes longer than this many of its usual steps is stuck."""
_SILENT_S = 1.0
"""Age in seconds from which a report no longer counts: the worker may have stopped waiting."""
_LONGEST_STAY_S = 60.0
"""The longest time that a worker stays left out, in seconds."""


class Phase(enum.Enum):
    """The phase of a worker, as the controller knows it."""

    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    LEFT_OUT = "left out"
    """A straggler, which finishes the samples that it has claimed by itself."""
    LEAVING = "leaving"
    """It leaves after its next exchange, or has left its loop."""


@dataclass(frozen=True)
class Copy:
    """A worker's copy of the center when the worker left its loop."""

    worker_id: str
    round: int
    num_changes: int = 0
    """Changes of its ledger: of two copies of a round, one with more changes has more claims."""
    generation: int = 0
    """The generation that made the copy; 0: the center itself did."""
    ledger_round: int | None = None
    """The round up to which its ledger is known; None: ``round``."""

    @property
    def age(self) -> tuple[int, int, int, int]:
        """The order of copies: from the greatest one, the fewest samples are trained again."""
        known = self.round if self.ledger_round is None else self.ledger_round
        return known, self.round, self.generation, self.num_changes


@dataclass
class WorkerEntry:
    """One worker; times are seconds of the registry's clock."""

    worker_id: str
    phase: Phase
    since: float
    """When the phase began."""
    node: str = ""
    cause: str = ""
    """Why it leaves or was left out: the rest of a sentence that begins with its id."""
    report: WorkerReport | None = None
    moved_at: float = 0.0
    """When it last made progress, or waited for others."""
    busy_at: float = 0.0
    """When its process was last seen to use CPU time."""
    reported_at: float = 0.0
    """When its last report arrived."""
    in_loop: bool = False
    generation: int = 0
    """The generation that it was last asked to enter."""
    has_trained: bool = False
    copy: Copy | None = None
    """Its copy of the center when it last left its loop; None: it has none."""
    is_dismissed: bool = False
    """Whether it was ordered to leave after its next exchange."""
    hand_in_since: float | None = None
    """When it was asked to hand in its replica; None: it was not."""
    has_handed_in: bool = False
    """Whether its replica is in the storage, or will not arrive."""
    has_passed_on: bool = False
    """Whether its replica is in the storage, with what its messages have left out."""
    leave_by: float | None = None
    """When it has to leave, since its node will be removed; None: it may stay."""
    num_late: int = 0
    """The number of times that it was left out."""
    reserves_cpu: bool = True
    """Whether it has CPUs of its own; a worker that was requested as a hot spare has none."""


class WorkerRegistry:
    """The workers of a run, from their requests until they have left or were lost.

    Args:
        lease_s: the longest silence of a worker, in seconds.
        max_step_s: the longest step in which a worker uses no CPU time, unless its usual steps are
            long, in seconds.
        first_step_s: the longest first step of a worker, if that is more, and the longest time for
            a group to form, in seconds.
        max_busy_s: the longest step in which a worker uses CPU time, in seconds.
        clock: seconds, rising.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        max_step_s: float,
        first_step_s: float,
        max_busy_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._max_step_s = max_step_s
        self._first_step_s = first_step_s
        self._max_busy_s = max_busy_s
        self._clock = clock
        self._entries: dict[str, WorkerEntry] = {}
        self._num_places: Counter[str] = Counter()
        self._next_number = 0
        self._causes: dict[str, str] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._entries

    def __getitem__(self, worker_id: str) -> WorkerEntry:
        return self._entries[worker_id]

    def entries(self) -> list[WorkerEntry]:
        """Return all workers, in the order of their requests."""
        return list(self._entries.values())

    def in_phase(self, phase: Phase) -> list[str]:
        """Return the workers in a phase."""
        return [e.worker_id for e in self._entries.values() if e.phase is phase]

    def counts(self) -> dict[str, int]:
        """Return the number of workers in each phase, by its name; empty phases are absent."""
        phases = [
            Phase.READY if e.phase is Phase.TRAINING and not e.in_loop else e.phase
            for e in self._entries.values()
        ]
        order = (Phase.TRAINING, Phase.READY, Phase.STARTING, Phase.LEFT_OUT, Phase.LEAVING)
        return {phase.value: phases.count(phase) for phase in order if phase in phases}

    def num_coming(self, *, reserves_cpu: bool = True) -> int:
        """Return how many workers train or may train later: all except leaving ones.

        Args:
            reserves_cpu: count the workers with CPUs of their own; otherwise those without.
        """
        present = (e for e in self._entries.values() if e.phase is not Phase.LEAVING)
        staying = (e for e in present if e.leave_by is None)
        return sum(e.reserves_cpu == reserves_cpu for e in staying)

    def num_training_by_node(self) -> Counter[str]:
        """Return how many workers train on each node."""
        return Counter(e.node for e in self._entries.values() if e.phase is Phase.TRAINING)

    def num_places(self, node: str) -> int:
        """Return how many workers with CPUs of their own a node has had at once; 0: unknown."""
        return self._num_places[node]

    def reserve_ids(self, worker_ids: Iterable[str]) -> None:
        """Give none of these ids to a new worker: they are of a checkpoint."""
        numbers = [int(worker_id.lstrip("w")) for worker_id in worker_ids]
        self._next_number = max(self._next_number, 1 + max(numbers, default=-1))

    def new_id(self) -> str:
        """Return an id that no worker of this run has had."""
        return f"w{self._next_number}"

    def add(self, worker_id: str, *, reserves_cpu: bool = True) -> None:
        """Add a worker that was requested."""
        self.reserve_ids([worker_id])
        self._entries[worker_id] = WorkerEntry(
            worker_id, Phase.STARTING, self._clock(), reserves_cpu=reserves_cpu
        )

    def note_ready(self, worker_id: str, node: str) -> None:
        """Note that a worker has started, and its node."""
        self._entries[worker_id].node = node
        self._enter(worker_id, Phase.READY)
        there = sum(e.reserves_cpu and e.node == node for e in self._entries.values())
        self._num_places[node] = max(there, self._num_places[node])

    def _enter(self, worker_id: str, phase: Phase, cause: str = "") -> None:
        entry = self._entries[worker_id]
        entry.phase, entry.since, entry.cause = phase, self._clock(), cause

    def remove(self, worker_id: str, cause: str) -> None:
        """Remove a worker that has ended; the log of the next membership gives the cause."""
        entry = self._entries.pop(worker_id, None)
        if entry is not None and entry.has_trained:  # no membership had the others
            self._causes[worker_id] = cause

    def note_leaving(self, worker_id: str, cause: str) -> None:
        """Note that a worker is to leave."""
        self._enter(worker_id, Phase.LEAVING, cause)

    def leave_out(self, worker_ids: tuple[str, ...]) -> None:
        """Note that workers are left out, each time for longer."""
        for worker_id in worker_ids:
            if self._entries[worker_id].phase is not Phase.LEAVING:
                self._enter(worker_id, Phase.LEFT_OUT, "is late and left out")
                self._entries[worker_id].num_late += 1

    def stand_by(self, worker_id: str, cause: str = "") -> None:
        """Note that a worker has left its loop and may rejoin; the log gives the cause."""
        if self._entries[worker_id].phase is Phase.TRAINING:
            self._enter(worker_id, Phase.READY, cause)

    def left_loop(
        self, worker_id: str, copy: Copy | None = None, *, has_bad_copy: bool = False
    ) -> None:
        """Note that a worker has left its loop.

        Args:
            worker_id: the worker.
            copy: its copy of the center; None: it has no new one.
            has_bad_copy: whether the new one has values that are not finite: it has replaced the
                earlier one.
        """
        entry = self._entries[worker_id]
        entry.in_loop = entry.is_dismissed = False
        if copy is not None or has_bad_copy:
            entry.copy = copy

    def newest_copy(self, *, since: int) -> Copy | None:
        """Return the furthest copy of the center from round ``since`` on, or None if there is none.

        Of two copies of a round, the newer generation's is preferred; of equal copies, that of a
        worker that stays.
        """
        ages = [
            ((*c.age, e.phase is not Phase.LEAVING), c)
            for e in self._entries.values()
            if (c := e.copy) is not None and not e.in_loop and c.round >= since
        ]
        return max(ages, key=lambda age: age[0])[1] if ages else None

    def formed(self, membership: Membership, *, entering: Sequence[str]) -> None:
        """Note that the members of a new membership train, and that former members stand by.

        Args:
            membership: the new membership.
            entering: the members that enter their loops now. The others are in them already, or
                have left them for good: their copies of the center and their replicas count.
        """
        now = self._clock()
        for entry in self._entries.values():
            if entry.worker_id not in membership and not entry.in_loop:
                self.stand_by(entry.worker_id)
        for worker_id in membership.worker_ids:
            entry = self._entries[worker_id]
            if entry.phase not in (Phase.TRAINING, Phase.LEAVING):
                self._enter(worker_id, Phase.TRAINING)
        for worker_id in entering:
            entry = self._entries[worker_id]
            entry.in_loop = entry.has_trained = True
            entry.generation, entry.moved_at = membership.generation, now
        self._causes.clear()

    def cause_of(self, worker_id: str) -> str:
        """Return why a member no longer trains: the rest of a sentence that begins with its id."""
        entry = self._entries.get(worker_id)
        cause = entry.cause if entry else self._causes.get(worker_id)
        return cause or "left its exchange"

    def candidates(
        self, waited_s: float, *, sort_key: Callable[[str], Any] | None = None
    ) -> Candidates:
        """Return the facts that decide the next membership.

        Args:
            waited_s: seconds since the wait for workers began.
            sort_key: the order of the ready workers; None: the order of their requests.
        """
        entries = self._entries.values()
        ready = [e.worker_id for e in entries if self._could_train(e)]
        if sort_key is not None:
            ready.sort(key=sort_key)
        causes = {e.worker_id: e.cause for e in entries if e.cause}
        return Candidates(
            ready=tuple(ready),
            waited_s=waited_s,
            absent=tuple(w for w in self.in_phase(Phase.LEFT_OUT) if w not in ready),
            causes={**self._causes, **causes},
        )

    def _could_train(self, entry: WorkerEntry) -> bool:
        if entry.phase is not Phase.LEFT_OUT:
            return entry.phase in (Phase.READY, Phase.TRAINING)
        stay_s = min(_LONGEST_STAY_S, 2.0 ** (entry.num_late - 1))
        return not entry.in_loop and self._clock() - entry.since >= stay_s

    # progress

    def note_report(self, report: WorkerReport) -> None:
        """Record a worker's report."""
        entry = self._entries.get(report.worker_id)
        if entry is None:
            return
        before, entry.report = entry.report, report
        now = entry.reported_at = self._clock()
        if before is None or report.waiting_s > 0 or _place(report) != _place(before):
            entry.moved_at = now
        if before is not None:
            used_s, span_s = report.cpu_s - before.cpu_s, report.sent_s - before.sent_s
            if has_computed(used_s, span_s):
                entry.busy_at = now

    def stuck(self) -> list[tuple[str, float]]:
        """Return the workers that are stuck in a step, with the seconds that they are.

        A worker that answers is alive, however long its step takes: a read from a file server may
        stall, which a replacement would only repeat. So a limit of its own decides, not the lease.
        While a worker uses CPU time only ``max_busy_s`` limits its step: a single step may be long.
        A worker that enters a generation waits for its group to form, which ends by its own
        time-out.
        """
        now = self._clock()
        stuck = []
        for entry in self._entries.values():
            is_heard = now - entry.reported_at <= _SILENT_S  # otherwise its lease decides
            step_s = now - entry.moved_at
            idle_s = min(step_s, now - entry.busy_at)
            longest_s = self._longest_step_s(entry)
            is_stuck = idle_s > longest_s or step_s > max(longest_s, self._max_busy_s)
            if entry.in_loop and is_heard and is_stuck:
                stuck.append((entry.worker_id, step_s))
        return stuck

    def _longest_step_s(self, entry: WorkerEntry) -> float:
        """Return the longest time without progress of a worker that uses no CPU, in seconds."""
        report = entry.report
        usual_s = report.step_s if report else 0.0
        if report is None or report.generation < entry.generation:  # its group forms
            return max(_STUCK_STEPS * usual_s, self._first_step_s + self._lease_s)
        limit_s = max(self._max_step_s, _STUCK_STEPS * usual_s)
        if report.is_starting or not usual_s:
            return max(limit_s, self._first_step_s)
        return limit_s

    def waiting_s(self, worker_ids: tuple[str, ...], *, generation: int) -> dict[str, float]:
        """Return how many seconds each member has waited for others; 0: it computes or is silent.

        A report of an earlier generation counts as 0. Its wait would make the members that have
        reported this generation look late. So does a wait for others that still score: a score
        takes longer than a round.
        """
        waits = dict.fromkeys(worker_ids, 0.0)
        for worker_id in worker_ids:
            entry = self._entries[worker_id]
            is_silent = self._clock() - entry.reported_at > _SILENT_S
            report = entry.report
            if report is None or report.generation != generation or is_silent:
                continue
            if report.num_scored is None:
                waits[worker_id] = report.waiting_s
        return waits


def _place(report: WorkerReport) -> tuple[int, int, int, int | None]:
    """Return how far a worker has got; a change is progress."""
    return report.generation, report.local_step, report.round, report.num_scored
