"""The faults of a fault plan, on the controller's side."""

from __future__ import annotations

from raydl.core.reports import Record
from raydl.core.worker_group import WorkerGroup
from raydl.faults import Fault, FaultPlan


class PlannedFaults:
    """Inflicts the faults planned for the center, and records every fault that fired.

    A worker inflicts its own faults, at their exact steps.

    Args:
        worker_group: the processes.
        plan: the faults.
        first_round: the round that this start begins with; earlier faults were due in an earlier
            start.
        first_seconds: seconds of training before this start.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        plan: FaultPlan,
        *,
        first_round: int = 0,
        first_seconds: float = 0.0,
    ) -> None:
        self.fired: list[str] = []
        """A sentence for each fault that fired, in order."""
        self._worker_group = worker_group
        self._plan = plan
        first = {"round": first_round, "second": first_seconds}
        self._left = [f for f in plan.for_center if f.at > first[f.when] or not first[f.when]]

    def note(self, number: int, worker_id: str) -> str:
        """Record that a worker inflicts a fault on itself, and return a sentence."""
        return self._fire(self._plan.faults[number], worker_id)

    def _fire(self, fault: Fault, who: str) -> str:
        self.fired.append(fault.sentence if who == fault.target else f"{fault.sentence} ({who})")
        return self.fired[-1]

    def inflict(self, record: Record | None) -> list[str]:
        """Inflict the center's faults that are due at the newest record; return their sentences."""
        if record is None:
            return []
        now = {"round": float(record.progress.round), "second": record.progress.seconds}
        due = [fault for fault in self._left if fault.at <= now[fault.when]]
        for fault in due:
            self._left.remove(fault)
            self._worker_group.inflict(fault)
        return [self._fire(fault, fault.target) for fault in due]
