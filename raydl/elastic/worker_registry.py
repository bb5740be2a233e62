"""The registry of workers: each one's phase, node and last report, from its request on."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydl.core.membership import Candidates, Membership
from raydl.core.reports import WorkerReport
from raydl.elastic.heartbeat import has_computed

_STUCK_STEPS = 20
"""A worker that has not finished a step in the time of so many usual ones is stuck."""
_SILENT_S = 1.0
"""A worker that has not answered for so long may not wait any more, whatever it said."""
_LONGEST_STAY_S = 60.0
"""The longest that a worker which is late again and again stays out, in seconds."""


class Phase(enum.Enum):
    """State of one worker, as the controller knows it."""

    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    LEFT_OUT = "left out"
    """Late: it finishes what it has claimed, by itself."""
    LEAVING = "leaving"
    """It goes after its next exchange, or has gone out of its loop."""


@dataclass(frozen=True)
class Copy:
    """A worker's copy of the center, as it was when the worker left its loop."""

    worker_id: str
    round: int
    num_changes: int = 0
    """Of the ledger: of two copies of a round the one with more knows more claims."""
    generation: int = 0
    """The one that made it; 0: the center itself did."""
    ledger_round: int | None = None
    """Up to which it knows the ledger; None: its own."""

    @property
    def age(self) -> tuple[int, int, int, int]:
        """Of two copies the one of greater age makes fewer samples be trained again."""
        known = self.round if self.ledger_round is None else self.ledger_round
        return known, self.round, self.generation, self.num_changes


@dataclass
class WorkerEntry:
    """One worker."""

    worker_id: str
    phase: Phase
    since: float
    """When it came into this phase."""
    node: str = ""
    cause: str = ""
    """Why it leaves, or was left out: the rest of a sentence that begins with its id."""
    report: WorkerReport | None = None
    moved_at: float = 0.0
    """When it was last seen to have gone on."""
    busy_at: float = 0.0
    """When its process was last seen to compute."""
    heard_at: float = 0.0
    """When it last answered."""
    in_loop: bool = False
    has_trained: bool = False
    copy: Copy | None = None
    """Its copy of the center, as it was when it last left its loop; None: it has none."""
    is_dismissed: bool = False
    """It was told to leave after its next exchange."""
    asked_at: float | None = None
    """When it was asked for its state, since it leaves; None: it was not."""
    has_handed_in: bool = False
    """Its state is kept, or will not come."""
    num_late: int = 0
    """How often it was left out."""


class WorkerRegistry:
    """All workers of a run that have not gone.

    Args:
        lease_s: the shortest time without a step after which a worker may be stuck.
        first_step_s: how long the first step of a worker may take.
        max_busy_s: how long any step may take in which it computes.
        clock: seconds, rising.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        first_step_s: float,
        max_busy_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._first_step_s = first_step_s
        self._max_busy_s = max_busy_s
        self._clock = clock
        self._entries: dict[str, WorkerEntry] = {}
        self._next_number = 0
        self._causes: dict[str, str] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._entries

    def __getitem__(self, worker_id: str) -> WorkerEntry:
        return self._entries[worker_id]

    def entries(self) -> list[WorkerEntry]:
        """Return all, in the order in which they were asked for."""
        return list(self._entries.values())

    def named(self, phase: Phase) -> list[str]:
        """Return the workers in a phase."""
        return [e.worker_id for e in self._entries.values() if e.phase is phase]

    def counts(self) -> dict[str, int]:
        """Return how many workers train, are ready, start, were left out and leave, by word."""
        phases = [
            Phase.READY if e.phase is Phase.TRAINING and not e.in_loop else e.phase
            for e in self._entries.values()
        ]
        order = (Phase.TRAINING, Phase.READY, Phase.STARTING, Phase.LEFT_OUT, Phase.LEAVING)
        return {phase.value: phases.count(phase) for phase in order if phase in phases}

    @property
    def num_coming(self) -> int:
        """Workers that train or could, now or later: all but those that leave."""
        return sum(e.phase is not Phase.LEAVING for e in self._entries.values())

    def new_id(self) -> str:
        """Return an id that no worker of this run has had."""
        return f"w{self._next_number}"

    def add(self, worker_id: str) -> None:
        """Note that a worker was asked for."""
        self._next_number = max(self._next_number, int(worker_id.lstrip("w")) + 1)
        self._entries[worker_id] = WorkerEntry(worker_id, Phase.STARTING, self._clock())

    def came_up(self, worker_id: str, node: str) -> None:
        """Note that a worker is up."""
        self._entries[worker_id].node = node
        self._enter(worker_id, Phase.READY)

    def _enter(self, worker_id: str, phase: Phase, cause: str = "") -> None:
        entry = self._entries[worker_id]
        entry.phase, entry.since, entry.cause = phase, self._clock(), cause

    def remove(self, worker_id: str, cause: str) -> None:
        """Forget a worker that has gone; the cause is told with the next membership."""
        entry = self._entries.pop(worker_id, None)
        if entry is not None and entry.has_trained:  # no membership lacks any other
            self._causes[worker_id] = cause

    def send_away(self, worker_id: str, cause: str) -> None:
        """Note that a worker is to leave."""
        self._enter(worker_id, Phase.LEAVING, cause)

    def leave_out(self, worker_ids: tuple[str, ...]) -> None:
        """Go on without some; each time one stays away for longer."""
        for worker_id in worker_ids:
            if self._entries[worker_id].phase is not Phase.LEAVING:
                self._enter(worker_id, Phase.LEFT_OUT, "is late and left out")
                self._entries[worker_id].num_late += 1

    def stand_by(self, worker_id: str, cause: str = "") -> None:
        """Note that a worker is out of its loop, and could join again; the cause is told."""
        if self._entries[worker_id].phase is Phase.TRAINING:
            self._enter(worker_id, Phase.READY, cause)

    def left_loop(self, worker_id: str, copy: Copy | None = None) -> None:
        """Note that a worker does not train any more; None: it did not begin."""
        entry = self._entries[worker_id]
        entry.in_loop = entry.is_dismissed = False
        entry.copy = copy or entry.copy

    def freshest_copy(self, *, since: int) -> Copy | None:
        """Return the furthest copy of the center; None: nobody has one of round ``since`` or later.

        Of two copies of a round rather that of the newer generation, which was recorded last; of
        equal ones rather that of a worker that stays.
        """
        ages = [
            ((*c.age, e.phase is not Phase.LEAVING), c)
            for e in self._entries.values()
            if (c := e.copy) is not None and not e.in_loop and c.round >= since
        ]
        return max(ages, key=lambda age: age[0])[1] if ages else None

    def formed(self, membership: Membership) -> None:
        """Note who trains now."""
        now = self._clock()
        for worker_id in membership.worker_ids:
            entry = self._entries[worker_id]
            if entry.phase not in (Phase.TRAINING, Phase.LEAVING):
                self._enter(worker_id, Phase.TRAINING)
            if not entry.in_loop:
                entry.in_loop = entry.has_trained = True
                entry.moved_at = now
        self._causes.clear()

    def cause_of(self, worker_id: str) -> str:
        """Return why a member does not train any more: the rest of a sentence."""
        entry = self._entries.get(worker_id)
        cause = entry.cause if entry else self._causes.get(worker_id)
        return cause or "left its exchange"

    def candidates(
        self, waited_s: float, *, sort_key: Callable[[str], Any] | None = None
    ) -> Candidates:
        """Return the facts that decide the next membership.

        Args:
            waited_s: seconds since the wait for workers began.
            sort_key: puts those that are ready in an order; None: as they were asked for.
        """
        entries = self._entries.values()
        ready = [e.worker_id for e in entries if self._could_train(e)]
        if sort_key is not None:
            ready.sort(key=sort_key)
        causes = {e.worker_id: e.cause for e in entries if e.cause}
        return Candidates(
            ready=tuple(ready),
            waited_s=waited_s,
            absent=tuple(w for w in self.named(Phase.LEFT_OUT) if w not in ready),
            causes={**self._causes, **causes},
        )

    def _could_train(self, entry: WorkerEntry) -> bool:
        if entry.phase is not Phase.LEFT_OUT:
            return entry.phase in (Phase.READY, Phase.TRAINING)
        stay_s = min(_LONGEST_STAY_S, 2.0 ** (entry.num_late - 1))
        return not entry.in_loop and self._clock() - entry.since >= stay_s

    # how they get on

    def note_report(self, report: WorkerReport) -> None:
        """Take a worker's answer."""
        entry = self._entries.get(report.worker_id)
        if entry is None:
            return
        before, entry.report = entry.report, report
        if before is not None:
            used_s, span_s = report.cpu_s - before.cpu_s, report.told_s - before.told_s
            if has_computed(used_s, span_s):
                entry.busy_at = self._clock()
        entry.heard_at = self._clock()
        has_moved = before is None or (before.local_step, before.round) != (
            report.local_step,
            report.round,
        )
        if has_moved or report.waiting_s > 0:
            entry.moved_at = self._clock()

    def stuck(self) -> list[tuple[str, float]]:
        """Return the workers that are in a step for too long, with the seconds.

        One that computes has longer: a step may be a long one for once.
        """
        now = self._clock()
        found = []
        for entry in self._entries.values():
            is_heard = now - entry.heard_at <= _SILENT_S  # otherwise its lease decides
            step_s = now - entry.moved_at
            idle_s = min(step_s, now - entry.busy_at)
            is_stuck = idle_s > self._patience_s(entry) or step_s > self._max_busy_s
            if entry.in_loop and is_heard and is_stuck:
                found.append((entry.worker_id, step_s))
        return found

    def _patience_s(self, entry: WorkerEntry) -> float:
        step_s = entry.report.step_s if entry.report else 0.0
        if step_s == 0.0:
            return max(self._lease_s, self._first_step_s)
        return max(self._lease_s, _STUCK_STEPS * step_s)

    def waiting_s(self, worker_ids: tuple[str, ...], *, generation: int) -> dict[str, float]:
        """Return for how long each member of a generation has waited for others; 0: it is at work.

        What one last told of the generation before is no wait in this one, which those who have
        told of this one would seem late by.
        """
        waits = {}
        for worker_id in worker_ids:
            entry = self._entries[worker_id]
            is_silent = self._clock() - entry.heard_at > _SILENT_S
            report = entry.report
            is_told = report is not None and report.generation == generation and not is_silent
            waits[worker_id] = report.waiting_s if report and is_told else 0.0
        return waits
