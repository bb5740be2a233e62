"""The faults of a plan, as the controller sees them."""

from __future__ import annotations

from collections.abc import Callable

from raydl.core.reports import Record
from raydl.core.worker_group import WorkerGroup
from raydl.faults import Fault, FaultPlan


class PlannedFaults:
    """Inflicts the faults of the center, and keeps count of all that fired.

    Those of workers come from the workers themselves, at the very step.

    Args:
        worker_group: the processes.
        plan: the faults.
        clock: seconds, rising.
    """

    def __init__(
        self, worker_group: WorkerGroup, plan: FaultPlan, clock: Callable[[], float]
    ) -> None:
        self.fired: list[str] = []
        """A sentence for each fault that fired, in order."""
        self._worker_group = worker_group
        self._plan = plan
        self._clock = clock
        self._began_at = clock()
        self._left = list(plan.for_center)

    def note(self, number: int, worker_id: str) -> str:
        """Note that a worker inflicts a fault on itself; return a sentence."""
        return self._fire(self._plan.faults[number], worker_id)

    def _fire(self, fault: Fault, who: str) -> str:
        self.fired.append(fault.sentence if who == fault.target else f"{fault.sentence} ({who})")
        return self.fired[-1]

    def inflict(self, record: Record | None) -> list[str]:
        """Inflict what is due on the center by the newest record; return a sentence for each."""
        if record is None:
            return []
        now = {"round": float(record.progress.round), "second": self._clock() - self._began_at}
        due = [fault for fault in self._left if fault.at <= now[fault.when]]
        for fault in due:
            self._left.remove(fault)
            self._worker_group.inflict(fault)
        return [self._fire(fault, fault.target) for fault in due]
