"""What the control of a run knows.

The state is the fold of the facts (``facts.apply``), and nothing else changes it. Reports and the
progress of scores are telemetry: they steer, but their fields start empty in a new driver.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raydl.core import worker_group as group
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.elastic.run_state import State
from raydl.elastic.stragglers import StragglerDetector

if TYPE_CHECKING:
    from raydl.elastic.facts import Ended, Fail, Halt

INF = math.inf
ERROR_AGE_S = 3600.0
"""Seconds for which the error of a worker counts."""


class Phase(enum.Enum):
    """The phase of a worker."""

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
class Worker:
    """A worker, from its request until it has left or was lost; times are the control's clock."""

    worker_id: str
    phase: Phase
    since: float
    """When the phase began."""
    number: int = 0
    """Its number in the order of the requests."""
    is_spare: bool = False
    """Whether it was requested as a hot spare, without CPUs of its own."""
    origin: str = ""
    """The first worker in its chain of replacements after errors."""
    node: str = ""
    cause: str = ""
    """Why it leaves or was left out: the rest of a sentence that begins with its id."""
    in_loop: bool = False
    generation: int = 0
    """The generation that it was last asked to enter."""
    has_trained: bool = False
    copy: Copy | None = None
    """Its copy of the center when it last left its loop; None: it has none."""
    replica: str = ""
    """What it will start from: a leaver's id, or its own for its state in the checkpoint; empty:
    the center."""
    is_dismissed: bool = False
    """Whether it was ordered to leave after its next exchange."""
    hands_in: bool | None = None
    """Whether its replica is being written; None: it was not asked, False: that has ended."""
    has_passed_on: bool = False
    """Whether its replica is in the storage, with what its messages have left out."""
    leave_by: float = INF
    """When it has to leave, since its node will be removed."""
    num_late: int = 0
    """The number of times that it was left out."""
    # Telemetry:
    report: WorkerReport | None = None
    reported_at: float = 0.0
    """When its last report arrived."""
    moved_at: float = 0.0
    """When it last made progress, or waited for others."""
    busy_at: float = 0.0
    """When its process was last seen to use CPU time."""

    def enter(self, phase: Phase, now: float, cause: str = "") -> None:
        """Enter a phase."""
        self.phase, self.since, self.cause = phase, now, cause

    @property
    def is_staying(self) -> bool:
        """Whether it trains or may train later, and need not leave."""
        return self.phase is not Phase.LEAVING and self.leave_by == INF

    @property
    def needs_replica(self) -> bool:
        """Whether it would have to start from the center."""
        return not self.replica and not self.has_trained

    @property
    def is_handed_over(self) -> bool:
        """Whether it starts from the replica of a leaver."""
        return self.replica not in ("", self.worker_id)


@dataclass
class Center:
    """The center, as far as the control knows."""

    rounds: tuple[int, ...] = ()
    """Rounds that it holds; empty while it starts."""
    num_changes: int = 0
    """Changes of the ledger in its newest snapshot."""
    generation: int = 0
    """The generation that made its newest snapshot; 0: the center itself did."""
    is_complete: bool = True
    """Whether nothing is left to train, as far as it knows."""
    num_snapshots: int = 0
    """Answers since it has confirmed the newest membership; the first may be older than that."""
    is_lost: bool = False
    """Whether it has to be restarted."""
    is_new: bool = False
    """Whether it was restarted since the newest generation formed."""
    was_up: bool = False
    """Whether any center of this start has answered."""
    publishing: Copy | None = None
    """The copy that a worker is sending to it."""
    process: str = ""
    """Id of its process; empty: not known."""
    former: frozenset[str] = frozenset()
    """Processes of centers that were lost: what they said may arrive late."""
    sent_s: float = 0.0
    """When its newest answer was sent, by its own clock."""

    @property
    def newest(self) -> int:
        """The newest round that it holds; -1: it is starting."""
        return max(self.rounds, default=-1)

    def holds(self, copy: Copy) -> bool:
        """Whether it has the round of a copy, with all the claims that the copy has.

        A copy does not replace a snapshot of a later generation.
        """
        if copy.round not in self.rounds:
            return False
        has_more_claims = copy.num_changes > self.num_changes and copy.round == self.newest
        return not has_more_claims or copy.generation < self.generation


@dataclass
class Generation:
    """One membership, from its first round to its last."""

    membership: Membership
    began_at_round: int
    formed_as: int = 0
    """Its number when it formed; later numbers are changes of it."""
    ended: dict[str, group.RunEnded] = field(default_factory=dict)
    """Members that have left their loops."""
    lost: set[str] = field(default_factory=set)
    """Members that were lost or left out: nothing waits for them."""
    broken_at: float = INF
    """When the first failed exchange was reported."""
    voted_at_round: int = 0
    """The newest reported round at the last vote for a checkpoint."""
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    """Telemetry: the newest report of each member."""

    @property
    def number(self) -> int:
        """The number of its newest membership."""
        return self.membership.generation

    @property
    def present(self) -> tuple[str, ...]:
        """Members that were not lost, in their loops or out of them."""
        return tuple(w for w in self.membership.worker_ids if w not in self.lost)

    def is_present(self, worker_id: str) -> bool:
        """Whether a worker is a member and was not lost."""
        return worker_id not in self.lost and worker_id in self.membership

    @property
    def at_work(self) -> tuple[str, ...]:
        """Members in their loops."""
        return tuple(w for w in self.present if w not in self.ended)

    @property
    def is_idle(self) -> bool:
        """Whether no member is in its loop. With many members this is faster than ``at_work``."""
        return len(self.ended) + len(self.lost) >= self.membership.num_workers

    @property
    def is_broken(self) -> bool:
        """Whether an exchange did not complete."""
        return any(end.outcome is Outcome.BROKEN for end in self.ended.values())

    @property
    def has_diverged(self) -> bool:
        """Whether a replica diverged, which also fails the exchanges of the other members."""
        return any(end.error is not None for end in self.ended.values())

    @property
    def newest_end(self) -> group.RunEnded | None:
        """The end of the member that got furthest, or None if none has ended.

        Of equal ones it is that of a member whose loop did not break: the loss of another one may
        have been NaN in the last step.
        """

        def key(end: group.RunEnded) -> tuple[int, int, bool]:
            return end.round, end.num_changes, end.outcome is not Outcome.BROKEN

        return max(self.ended.values(), key=key, default=None)

    @property
    def outcome(self) -> Outcome:
        """The outcome, once its members have ended.

        In synchronous methods they end in the same round. A vote to regroup takes precedence over
        the end of the run: where members join one by one, some may have run out of samples before
        the vote arrived. Otherwise the furthest member decides: if its round is the run's last
        one, that holds for the members that missed it, too.
        """
        newest = self.newest_end
        outcomes = {end.outcome for end in self.ended.values()}
        if newest is None or Outcome.REGROUP in outcomes:
            return Outcome.REGROUP
        return newest.outcome

    @property
    def scorers(self) -> tuple[str, ...]:
        """Members that have left their loops with a score of the run's last center."""
        return tuple(w for w, end in self.ended.items() if end.score is not None)

    def has_final_reports(self) -> bool:
        """Whether every ended member has reported up to its end."""
        return all(
            w in self.reports and self.reports[w].round >= end.round
            for w, end in self.ended.items()
        )


@dataclass
class Checkpoints:
    """The checkpoint in progress, and the newest ones."""

    at: float
    """When states were last collected."""
    epoch: int = 0
    """Completed epochs then."""
    is_collecting: bool = False
    round: int = -1
    """The round whose states are being collected."""
    sources: tuple[str, ...] = ()
    """Workers whose kept states are being collected."""
    collected: int = -1
    """The newest collected round."""
    before: tuple[float, int, int] = (0.0, 0, -1)
    """``at``, ``epoch`` and ``collected`` of the one before, which holds if this one is lost."""
    is_writing: bool = False
    is_given_up: bool = False
    """Whether the storage has been silent for too long."""
    writing: frozenset[str] = frozenset()
    """Workers whose states of a collected round are being written."""

    @property
    def waits_for_files(self) -> bool:
        """Whether a checkpoint is being written to a storage that answers."""
        return self.is_writing and not self.is_given_up


@dataclass
class Scores:
    """Which centers were scored."""

    evaluating: int
    """The newest round whose score was requested."""
    evaluated: int
    """The newest round with a score."""
    rounds: frozenset[int] = frozenset()
    """Rounds with a score."""
    not_to_score: int = -1
    """The round that was last sent to the center for the next generation, not for a score."""
    lost_round: int = -1
    """The furthest round of the center that was lost last."""
    num_lost: int = 0
    """Scores that were given up since the last one arrived."""
    used: frozenset[str] = frozenset()
    """Workers whose score of the last center was taken."""
    num_samples: int = 0
    """Telemetry: test samples that the evaluator has scored."""

    def give_up(self) -> None:
        """Note that the requested score will not arrive."""
        self.evaluating = self.evaluated


@dataclass
class Budgets:
    """What counts against a limit: losses, errors and rollbacks."""

    losses: int = 0
    """Losses in a row without progress."""
    next_loss_from: int = 0
    """The first request number whose loss counts as a further one."""
    errors: tuple[tuple[float, str, str], ...] = ()
    """(Time in seconds, origin, node) of the errors of workers."""
    rollbacks: int = 0
    rollback_epoch: int = -1
    """The furthest epoch with a rollback."""
    bad_center_in: int = 0
    """The generation in which the center was last found to have diverged."""
    lost_residuals: int = 0


@dataclass
class RunState:
    """Everything that the control knows of a run."""

    is_sync: bool
    """Whether all workers exchange at once."""
    max_workers: int
    """Places; the user may lower them."""
    spares: int
    checkpoints: Checkpoints
    scores: Scores
    first_round: int = 0
    first_cuts: int = 0
    saved_order: tuple[str, ...] = ()
    """Workers of the checkpoint, in the order of their ranks."""
    stage: State = State.WAITING
    since: float = 0.0
    """When the stage began."""
    workers: dict[str, Worker] = field(default_factory=dict)
    next_id: int = 0
    """Number of the next worker's id; no worker of the run had it."""
    num_requests: int = 0
    num_staying: Counter[bool] = field(default_factory=Counter)
    """By whether they are spares, the workers that need not leave."""
    num_on_node: Counter[str] = field(default_factory=Counter)
    """By node, the workers with CPUs of their own that have started."""
    num_places: Counter[str] = field(default_factory=Counter)
    """By node, the most workers with CPUs of their own at once."""
    causes: dict[str, str] = field(default_factory=dict)
    """Why members that are gone no longer train."""
    center: Center = field(default_factory=Center)
    run: Generation | None = None
    """The newest generation."""
    generation: int = 0
    """Number of the newest membership."""
    round: int = 0
    """The round that the newest generation began with, or that training continues from."""
    is_idle: bool = False
    """Whether workers that were left out may have claimed all remaining samples."""
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    """When each wait ends, by its name and its worker, if it has one."""
    why_waiting: str = ""
    replicas: dict[str, float] = field(default_factory=dict)
    """Leavers whose replicas are in the storage, for newcomers, with the norms of what their
    messages have left out."""
    handed_in: set[str] = field(default_factory=set)
    """Leavers whose replicas have arrived, in time or too late."""
    votes: dict[str, float] = field(default_factory=dict)
    """Votes of the newest generation."""
    cuts: int = 0
    """Cuts of the learning rate."""
    budgets: Budgets = field(default_factory=Budgets)
    stop: str = ""
    """The signal that requested a stop."""
    ended: Ended | None = None
    """The callback that has requested the end."""
    unfrozen: tuple[str, ...] = ()
    halt: Halt | None = None
    raised: frozenset[str] = frozenset()
    """Processes that have raised errors since the run was halted."""
    why_stopping: str = ""
    """What was last said about the stop."""
    failed: Fail | None = None
    outcome: Outcome | None = None
    ended_by: str = ""
    """The callback that has ended the run."""
    # Telemetry:
    pace: StragglerDetector = field(default_factory=StragglerDetector, compare=False)
    most_trained: int = -1
    """The most samples that a record or a checkpoint had."""
    epoch: int = 0
    """Completed epochs."""
    progress_at: float = 0.0
    """When a score, a part of one, or states last arrived."""

    @property
    def why_stop(self) -> str:
        """Why the run is to stop early, or "" if it is not."""
        halted = self.halt.why if self.halt else ""
        return self.stop or halted or (self.ended.why if self.ended else "")

    @property
    def is_ended_by_callback(self) -> bool:
        """Whether only a callback ends the run early."""
        return self.ended is not None and not self.stop and self.halt is None

    def is_member(self, worker_id: str) -> bool:
        """Whether a worker is a member that was not lost."""
        return self.run is not None and self.run.is_present(worker_id)

    def in_phase(self, *phases: Phase) -> list[Worker]:
        """Return the workers in some phases, in the order of their requests."""
        return [w for w in self.workers.values() if w.phase in phases]

    def counts(self) -> dict[str, int]:
        """Return the number of workers in each phase, by its name; empty phases are absent."""
        phases = [
            Phase.READY if w.phase is Phase.TRAINING and not w.in_loop else w.phase
            for w in self.workers.values()
        ]
        order = (Phase.TRAINING, Phase.READY, Phase.STARTING, Phase.LEFT_OUT, Phase.LEAVING)
        return {phase.value: phases.count(phase) for phase in order if phase in phases}

    def counts_score(self, round: int) -> bool:
        """Whether a score counts: its round has none yet, and was not lost with the center."""
        is_of_lost = self.center.newest < round <= self.scores.lost_round
        return not is_of_lost and round not in self.scores.rounds

    def recent_errors(self, now: float) -> list[tuple[float, str, str]]:
        """Return the errors of workers that still count."""
        return [error for error in self.budgets.errors if error[0] > now - ERROR_AGE_S]

    # Parts of a fact's change:

    def enter(self, stage: State, now: float) -> None:
        """Enter a stage, which ends the waits of the one before."""
        self.stage, self.since, self.why_waiting = stage, now, ""
        for what in ("answer", "workers", "absent"):
            self.waits.pop((what, ""), None)

    def count_loss(self, w: Worker) -> None:
        """Count a lost worker.

        Workers requested before a loss count as one loss with it, however many are lost: they may
        be those of a rack, or of a spot market that reclaims its machines.
        """
        if w.number >= self.budgets.next_loss_from:
            self.budgets.next_loss_from = self.num_requests
            self.budgets.losses += 1

    def forget_worker(self, worker_id: str, cause: str, now: float) -> None:
        """Remove a worker that has ended, and everything that waits for it."""
        w = self.workers.pop(worker_id)
        self.num_staying[w.is_spare] -= w.is_staying
        if w.phase is not Phase.STARTING:
            self.num_on_node[w.node] -= not w.is_spare
        if w.has_trained:  # no membership had the others
            self.causes[worker_id] = cause
        for what in ("hand in", "hand over"):
            self.waits.pop((what, worker_id), None)
        if self.center.publishing is not None and self.center.publishing.worker_id == worker_id:
            self.center.publishing = None
        if worker_id in self.checkpoints.sources:
            self.give_up_checkpoint()
        if self.run is not None and self.is_member(worker_id):
            self.lose_member(worker_id)
            if self.run.is_idle:
                self.pace.pause(now, self.run.number)

    def lose_member(self, worker_id: str) -> None:
        """Stop waiting for a member."""
        if self.run is not None and self.is_member(worker_id):
            self.run.lost.add(worker_id)
            self.run.ended.pop(worker_id, None)
            self.run.reports.pop(worker_id, None)

    def give_up_checkpoint(self) -> None:
        """Note that the states voted for or requested will not be collected."""
        self.votes.pop("checkpoint", None)
        self.checkpoints.is_collecting, self.checkpoints.sources = False, ()

    def enter_members(
        self, membership: Membership, replicas: Container[str], entering: Iterable[str], now: float
    ) -> None:
        """Note that members train, and that former members stand by.

        Args:
            membership: the new membership.
            replicas: newcomers that do not start from the center.
            entering: members that enter their loops now. The others are in them already, or have
                left them for good: their copies of the center and their replicas count.
            now: seconds.
        """
        self.generation = membership.generation
        for w in self.workers.values():
            if w.worker_id not in membership and not w.in_loop and w.phase is Phase.TRAINING:
                w.enter(Phase.READY, now)
        for worker_id in membership.worker_ids:
            w = self.workers[worker_id]
            if w.phase not in (Phase.TRAINING, Phase.LEAVING):
                w.enter(Phase.TRAINING, now)
            if worker_id in replicas:
                w.replica = ""
        for worker_id in entering:
            w = self.workers[worker_id]
            w.in_loop = w.has_trained = True
            w.generation, w.moved_at = self.generation, now
        self.causes.clear()


def is_part_of_center(name: str) -> bool:
    """Whether a process is the center or a shard of it."""
    return name == "center" or name.startswith("shard")


def is_worker_id(name: str) -> bool:
    """Whether a process is a worker, of which the run may know no more."""
    return name.startswith("w") and name[1:].isdigit()


def number_of(worker_id: str) -> int:
    """Return the number of a worker's id."""
    return int(worker_id.lstrip("w"))
