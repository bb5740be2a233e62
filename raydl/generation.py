"""What the controller knows of the generation that trains."""

from __future__ import annotations

from dataclasses import dataclass, field

from raydl.crew import RunEnded
from raydl.errors import ExchangeError, ExchangeTimeoutError, ProcessLostError
from raydl.membership import Membership
from raydl.reports import Outcome, WorkerReport

_CAUSE_GRACE_S = 3.0
"""How long a failed exchange waits for the failure that caused it, in seconds."""


@dataclass
class Generation:
    """One membership's way from its first round to its last."""

    membership: Membership
    progress_at: float
    """When an exchange was last heard of, or an end, in seconds of the controller's clock."""
    ended: dict[str, RunEnded] = field(default_factory=dict)
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    failed_at: float = 0.0
    voted_at_round: int = 0
    """The newest round known when a checkpoint was voted for."""

    @property
    def has_ended(self) -> bool:
        """Whether all workers have left their loops."""
        return len(self.ended) == self.membership.num_workers

    def end(self) -> RunEnded:
        """Return how the worker that left last ended; in a synchronous round all leave at once.

        A vote to regroup counts before the end of the run: where workers come one by one,
        some may have found no more work when it came.
        """
        ends = sorted(self.ended.values(), key=lambda end: end.round)
        last = ends[-1]
        if all(end.outcome is not Outcome.REGROUP for end in ends):
            return last
        return RunEnded(last.worker_id, Outcome.REGROUP, last.round)

    def is_bystander(self, name: str) -> bool:
        """Whether this is a worker that does not train."""
        return name[1:].isdigit() and name not in self.membership.worker_ids

    def add_failure(self, error: Exception, now: float) -> None:
        """Note a failure."""
        if not self.failures:
            self.failed_at = now
        self.failures.append(error)

    def raise_failure(self, now: float) -> None:
        """Raise the failure behind all others, once it had time to show itself.

        When one worker fails, its peers' exchange fails a moment later, or sooner: what
        they report is the consequence.
        """
        causes = [e for e in self.failures if not isinstance(e, ExchangeError)]
        ours = [e for e in causes if not isinstance(e, ProcessLostError)]
        if ours:
            raise ours[0]
        if self.failures and now - self.failed_at >= _CAUSE_GRACE_S:
            raise (causes or self.failures)[0]

    def raise_for_stragglers(self, now: float, timeout_s: float) -> None:
        """Raise if those that have not left after the others show no sign of progress."""
        if now - self.progress_at > timeout_s:
            missing = [w for w in self.membership.worker_ids if w not in self.ended]
            newest = max(end.round for end in self.ended.values())
            raise ExchangeTimeoutError(newest, self.membership.generation, timeout_s, missing)

    def note_vote(self) -> None:
        """Remember what was known when a checkpoint was voted for."""
        self.voted_at_round = max((r.round for r in self.reports.values()), default=0)

    def kept_everywhere(self) -> set[int]:
        """Return the rounds whose states all workers keep since the newest vote.

        An older vote may have reached some workers a round later than others, and left a
        round that would look new.
        """
        kept = [set(report.kept) for report in self.reports.values()]
        if len(kept) < self.membership.num_workers:
            return set()
        return {r for r in set.intersection(*kept) if r > self.voted_at_round}

    def is_told(self) -> bool:
        """Whether every worker has reported up to its end."""
        return all(
            w in self.reports and self.reports[w].round >= end.round
            for w, end in self.ended.items()
        )
