"""Facts of a run: what happens to it, and what the control decides.

Most events come from the processes (``raydl.core.worker_group``); those that the driver adds are
here. An action is a decision with its reason; the loop carries it out (``controller``). An action
has all that carrying it out needs, since others may follow it in the same answer. Each fact says
how it changes the state; it decides nothing and compares no limit of the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydl.core import worker_group as group
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.scores import Evaluated
from raydl.elastic.heartbeat import has_computed
from raydl.elastic.run_state import State
from raydl.elastic.state import (
    INF,
    Copy,
    Generation,
    Phase,
    RunState,
    Worker,
    is_part_of_center,
    number_of,
)

_NUM_SCORED = 128
"""The number of scored rounds that are remembered."""
_NUM_SNAPSHOTS = 2
"""Answers of the center that are counted after it has confirmed a membership."""


class Fact:
    """An event of the driver, or an action."""

    def apply(self, s: RunState, now: float) -> None:
        """Change the state, at a time in seconds."""


# Events of the driver


@dataclass(frozen=True)
class Tick(Fact):
    """All events of one poll have arrived: now the policies decide, and time-outs count."""

    missing: str = ""
    """The resources that pending workers need, if the run waits for workers."""


@dataclass(frozen=True)
class Stop(Fact):
    """A signal or the user requests the end of the run, with a checkpoint."""

    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.stop = self.why


@dataclass(frozen=True)
class Ended(Fact):
    """A callback requests the end of the run."""

    by: str
    """The callback's name."""
    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.ended = s.ended or self


@dataclass(frozen=True)
class Remove(Fact):
    """The user removes a worker."""

    worker_id: str


@dataclass(frozen=True)
class Unfrozen(Fact):
    """The models of workers have unfrozen parameters: the run stops, to go on with them."""

    names: tuple[str, ...]

    def apply(self, s: RunState, now: float) -> None:
        # In an order that does not depend on which report came first.
        s.unfrozen = tuple(sorted({*s.unfrozen, *self.names}))


@dataclass(frozen=True)
class Cut(Fact):
    """The plateau schedule cuts the learning rate."""

    number: int
    """Cuts since the run began."""
    why: str = ""

    def apply(self, s: RunState, now: float) -> None:
        s.cuts = self.number


@dataclass(frozen=True)
class Trained(Fact):
    """A record or a checkpoint says how many samples are trained."""

    num_samples: int

    def apply(self, s: RunState, now: float) -> None:
        s.most_trained = self.num_samples


@dataclass(frozen=True)
class EpochsDone(Fact):
    """A record says how many epochs are complete."""

    number: int

    def apply(self, s: RunState, now: float) -> None:
        s.epoch = self.number


@dataclass(frozen=True)
class Writing(Fact):
    """A checkpoint begins or ends to be written to the storage."""

    is_on: bool
    is_given_up: bool = False
    """Whether the storage has been silent for too long, so that nothing should wait for it."""

    def apply(self, s: RunState, now: float) -> None:
        k = s.checkpoints
        k.is_writing, k.is_given_up = self.is_on, self.is_given_up
        if not k.waits_for_files:
            k.writing = frozenset()


@dataclass(frozen=True)
class FaultFired(Fact):
    """A fault of the fault plan is inflicted."""

    sentence: str


# Actions about workers


@dataclass(frozen=True)
class Start(Fact):
    """Request a worker."""

    worker_id: str
    is_spare: bool = False
    """Whether it is a hot spare, which reserves no CPU."""
    origin: str = ""
    """The first worker in its chain of replacements, whose errors it inherits."""

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id] = Worker(
            self.worker_id,
            Phase.STARTING,
            now,
            number=s.num_requests,
            is_spare=self.is_spare,
            origin=self.origin,
            replica=self.worker_id if self.worker_id in s.saved_order else "",
        )
        s.num_requests += 1
        s.num_staying[self.is_spare] += 1
        s.next_id = max(s.next_id, 1 + number_of(self.worker_id))


@dataclass(frozen=True)
class End(Fact):
    """End a worker's process, or withdraw its request."""

    worker_id: str
    why: str
    """The rest of a sentence that begins with its id; if it is lost, the reason."""
    is_loss: bool = False
    """Whether it counts as lost: it is stuck, or has raised an error."""
    is_error: bool = False
    """Whether it has raised an error."""

    def apply(self, s: RunState, now: float) -> None:
        w = s.workers[self.worker_id]
        if self.is_error:
            recent = s.recent_errors(now)
            s.budgets.errors = (*recent, (now, w.origin or w.worker_id, w.node))
        if self.is_loss:
            s.count_loss(w)
        s.forget_worker(self.worker_id, "was lost" if self.is_loss else self.why, now)


@dataclass(frozen=True)
class Release(Fact):
    """Let a worker leave after its next exchange; one that does not train leaves now."""

    worker_id: str
    why: str
    is_now: bool = False

    def apply(self, s: RunState, now: float) -> None:
        if not self.is_now:
            w = s.workers[self.worker_id]
            s.num_staying[w.is_spare] -= w.is_staying
            w.enter(Phase.LEAVING, now, self.why)


@dataclass(frozen=True)
class Stay(Fact):
    """A worker on a draining node trains on until its replacement is ready."""

    worker_id: str
    stay_s: float
    """Seconds at most."""

    def apply(self, s: RunState, now: float) -> None:
        w = s.workers[self.worker_id]
        s.num_staying[w.is_spare] -= w.is_staying
        w.leave_by = now + self.stay_s


@dataclass(frozen=True)
class FewerPlaces(Fact):
    """The run has fewer places for workers, or for spares, from now on."""

    max_workers: int
    spares: int
    why: str = ""

    def apply(self, s: RunState, now: float) -> None:
        s.max_workers, s.spares = self.max_workers, self.spares


@dataclass(frozen=True)
class Avoid(Fact):
    """Start no further worker on a node; the worker group refuses if there is no other."""

    node: str
    why: str


@dataclass(frozen=True)
class LeaveOut(Fact):
    """Go on without stragglers, which may rejoin."""

    worker_ids: tuple[str, ...]

    def apply(self, s: RunState, now: float) -> None:
        for worker_id in self.worker_ids:
            w = s.workers[worker_id]
            if w.phase is not Phase.LEAVING:
                w.enter(Phase.LEFT_OUT, now, "is late and left out")
                w.num_late += 1
            s.lose_member(worker_id)


@dataclass(frozen=True)
class Drop(Fact):
    """A member has left its loop alone while the others train (messages)."""

    worker_id: str
    why: str = ""
    """The rest of a sentence that begins with its id; empty: the exchange failed."""
    problem: str = ""
    """Set if nothing explains the failed exchange: it counts as a loss."""

    def apply(self, s: RunState, now: float) -> None:
        s.budgets.losses += bool(self.problem)
        w = s.workers[self.worker_id]
        if w.phase is Phase.TRAINING:
            w.enter(Phase.READY, now, self.why)
        s.lose_member(self.worker_id)


@dataclass(frozen=True)
class Blame(Fact):
    """An exchange has failed and nothing explains it: it counts as a loss."""

    worker_id: str
    problem: str

    def apply(self, s: RunState, now: float) -> None:
        s.budgets.losses += 1


@dataclass(frozen=True)
class Dismiss(Fact):
    """Let one member leave after its next exchange (messages)."""

    worker_id: str

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].is_dismissed = True


# Actions about replicas of leavers


@dataclass(frozen=True)
class HandIn(Fact):
    """Have a leaver write its replica to the storage."""

    worker_id: str

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].hands_in = True


@dataclass(frozen=True)
class PassOn(Fact):
    """A leaver's replica is in the storage, with what its messages have left out."""

    worker_id: str
    residual: float
    """L2 norm of what was left out."""

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].has_passed_on = True
        s.replicas[self.worker_id] = self.residual
        s.handed_in.add(self.worker_id)


@dataclass(frozen=True)
class HandOver(Fact):
    """Have a newcomer read a leaver's replica."""

    worker_id: str
    leaver: str

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].replica = self.leaver


@dataclass(frozen=True)
class NoHandIn(Fact):
    """A leaver's replica will not be in the storage."""

    worker_id: str
    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].hands_in = False
        s.waits.pop(("hand in", self.worker_id), None)


@dataclass(frozen=True)
class NoHandOver(Fact):
    """A newcomer starts from the center, since it could not read a leaver's replica."""

    worker_id: str
    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.workers[self.worker_id].replica = ""
        s.waits.pop(("hand over", self.worker_id), None)


@dataclass(frozen=True)
class Forget(Fact):
    """Delete a leaver's replica from the storage."""

    leaver: str
    is_taken: bool = False
    """Whether another worker has it in memory."""

    def apply(self, s: RunState, now: float) -> None:
        s.replicas.pop(self.leaver, None)
        s.handed_in.add(self.leaver)


@dataclass(frozen=True)
class ResidualLost(Fact):
    """What a worker's messages have left out is lost; an event if the worker itself reports it."""

    worker_id: str
    norm: float | None
    """L2 norm; None: not known."""
    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.budgets.lost_residuals += 1


# Actions about the membership


@dataclass(frozen=True)
class Form(Fact):
    """Members train from a round on."""

    membership: Membership
    round: int
    why: str
    replicas: Mapping[str, str] = field(default_factory=dict)
    """By newcomer, the leaver whose replica it starts from, or its own id: its own state."""

    def apply(self, s: RunState, now: float) -> None:
        s.run = Generation(self.membership, self.round, self.membership.generation)
        s.votes, s.is_idle = {}, False  # votes end with their generation
        s.center.rounds = tuple(r for r in s.center.rounds if r <= self.round)
        s.center.is_new = False
        if self.round < s.scores.not_to_score:  # it will be trained again
            s.scores.not_to_score = -1
        s.enter_members(self.membership, self.replicas, self.membership.worker_ids, now)
        s.enter(State.TRAINING, now)


@dataclass(frozen=True)
class Change(Fact):
    """Members join and leave at the center while the others train on (messages)."""

    membership: Membership
    why: str
    replicas: Mapping[str, str] = field(default_factory=dict)

    def apply(self, s: RunState, now: float) -> None:
        run = s.run
        assert run is not None
        entering = [w for w in self.membership.worker_ids if w not in run.membership]
        run.membership = self.membership
        # Ends and reports of former members have no effect any more.
        run.ended = {w: e for w, e in run.ended.items() if w in self.membership}
        run.reports = {w: r for w, r in run.reports.items() if w in self.membership}
        run.lost.clear()
        if not run.is_broken:
            run.broken_at = INF
        if not s.checkpoints.is_collecting:  # newcomers have not kept the states voted for
            s.votes.pop("checkpoint", None)
        s.enter_members(self.membership, self.replicas, entering, now)


@dataclass(frozen=True)
class Vote(Fact):
    """Cast votes that travel with the exchange; see ``raydl.core.exchange.Header``."""

    generation: int
    votes: Mapping[str, float]
    why: str = ""
    at_round: int = 0
    """Newest round reported so far: states of older rounds are not those of this vote."""

    def apply(self, s: RunState, now: float) -> None:
        s.votes |= self.votes
        if "checkpoint" in self.votes and s.run is not None:
            s.run.voted_at_round = self.at_round


@dataclass(frozen=True)
class Abandon(Fact):
    """Release the members from an exchange that cannot complete, and wait for them."""

    generation: int
    answer_s: float
    """Seconds that they have to leave."""

    def apply(self, s: RunState, now: float) -> None:
        s.waits.pop(("change", ""), None)
        s.pace.pause(now, self.generation)
        s.enter(State.RECOVERING, now)
        s.waits["answer", ""] = now + self.answer_s


# Actions about the center


@dataclass(frozen=True)
class Rebuild(Fact):
    """Restart the center from a worker's copy or from the newest checkpoint."""

    source: str = ""
    """The worker; empty: the checkpoint."""
    round: int = -1
    """Round of the worker's copy."""
    is_adopting: bool = False
    """Whether it will adopt the copy of the workers, who train on meanwhile."""

    def apply(self, s: RunState, now: float) -> None:
        c = s.center
        s.scores.lost_round = max(c.newest, s.scores.evaluating)
        c.is_lost, c.is_new, c.rounds = False, True, ()
        c.former = frozenset({c.process, *c.former} - {""})
        c.process, c.sent_s, c.publishing = "", 0.0, None
        s.give_up_checkpoint()
        s.scores.give_up()
        if self.source:
            s.scores.not_to_score = self.round


@dataclass(frozen=True)
class Publish(Fact):
    """Have a worker send its copy of the center to the center."""

    worker_id: str
    round: int
    num_changes: int
    generation: int

    def apply(self, s: RunState, now: float) -> None:
        s.center.publishing = s.workers[self.worker_id].copy
        s.scores.not_to_score = self.round


@dataclass(frozen=True)
class GoOnFrom(Fact):
    """The center holds the round that training continues from."""

    round: int
    instead_of: int
    """The round that the run had reached."""

    def apply(self, s: RunState, now: float) -> None:
        """Continue from the newest round of the center: later rounds will have the same numbers."""
        s.round, s.center.publishing = self.round, None
        s.waits.pop(("center", ""), None)
        newest, scores, k = s.center.newest, s.scores, s.checkpoints
        if scores.evaluated > newest:
            scores.rounds = frozenset(round for round in scores.rounds if round <= newest)
            is_scored = newest in scores.rounds
            scores.evaluating = scores.evaluated = newest if is_scored else newest - 1
        if k.collected > newest:
            k.collected = newest - 1


@dataclass(frozen=True)
class Evaluate(Fact):
    """Score the center of a round, or of a newer one."""

    round: int

    def apply(self, s: RunState, now: float) -> None:
        s.scores.evaluating = self.round


@dataclass(frozen=True)
class UseScore(Fact):
    """Take the score of the last center from the worker that has left its loop with it."""

    worker_id: str

    def apply(self, s: RunState, now: float) -> None:
        s.scores.used |= {self.worker_id}


@dataclass(frozen=True)
class Collect(Fact):
    """Collect the states of a round for a checkpoint."""

    round: int
    worker_ids: tuple[str, ...]

    def apply(self, s: RunState, now: float) -> None:
        k = s.checkpoints
        k.is_collecting, k.round, k.sources = True, self.round, self.worker_ids


# Actions about the run


@dataclass(frozen=True)
class Await(Fact):
    """A wait begins, or its reason changes; it has an end."""

    what: str
    wait_s: float
    """Seconds at most, from now on."""
    why: str = ""
    worker_id: str = ""
    """The worker that it is for, if for one."""

    def apply(self, s: RunState, now: float) -> None:
        s.waits[self.what, self.worker_id] = now + self.wait_s
        s.why_waiting = self.why or s.why_waiting
        if self.what == "workers":
            s.pace.wait_for_workers()


@dataclass(frozen=True)
class Enter(Fact):
    """The run enters a state."""

    state: str
    """Name of a ``State``."""
    why: str = ""
    outcome: str = ""
    """At the end: ``finished`` or ``stopped``."""
    ended_by: str = ""
    """The callback that has ended it."""
    is_idle: bool = False
    """Whether workers that were left out may have claimed all remaining samples."""

    def apply(self, s: RunState, now: float) -> None:
        s.enter(State[self.state], now)
        s.is_idle = self.is_idle
        if s.stage is not State.DONE or self.outcome:
            s.outcome = Outcome(self.outcome) if self.outcome else None
            s.ended_by = self.ended_by


@dataclass(frozen=True)
class Stopping(Fact):
    """The run stops after this round, with a checkpoint."""

    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.why_stopping = self.why


@dataclass(frozen=True)
class Progressed(Fact):
    """More samples are trained than ever: the count of losses in a row starts again."""

    num_samples: int

    def apply(self, s: RunState, now: float) -> None:
        s.budgets.losses = s.budgets.next_loss_from = 0


@dataclass(frozen=True)
class RollBack(Fact):
    """A replica that diverged, or all if the center did, restarts from the newest good center."""

    name: str
    """The worker, or ``center``."""
    number: int
    """Rollbacks in this epoch."""
    epoch: int
    problem: str
    is_allowed: bool = True
    """False: it would be one too many; the run stops instead."""

    def apply(self, s: RunState, now: float) -> None:
        s.budgets.rollbacks, s.budgets.rollback_epoch = (
            self.number,
            max(s.budgets.rollback_epoch, self.epoch),
        )
        if self.name == "center":
            assert s.run is not None
            s.budgets.bad_center_in = s.run.number
            if self.is_allowed and not s.is_sync and s.halt is None:
                s.center.is_lost = True  # in rounds each worker has the newest good one


@dataclass(frozen=True)
class Halt(Fact):
    """Stop after a last checkpoint because of an error, which the run raises at its end."""

    name: str
    """The process that raised it."""
    why: str
    is_divergence: bool = False
    """Whether its values were not finite; a further error of it is another one."""

    def apply(self, s: RunState, now: float) -> None:
        s.halt = s.halt or self
        if not self.is_divergence:
            s.raised |= {self.name}


@dataclass(frozen=True)
class Fail(Fact):
    """End the run now with an error: no checkpoint can follow."""

    kind: str
    """``lost``: too many losses; ``capacity``, ``stalled``: a wait was too long; ``raised``: the
    error that a process raised."""
    name: str
    """The process."""
    why: str

    def apply(self, s: RunState, now: float) -> None:
        s.failed = self
        s.enter(State.DONE, now)


# The change of the state


def apply(s: RunState, fact: Any, now: float) -> None:
    """Change the state by one fact: an action, or an event that is news.

    Args:
        s: the state, which is changed in place: a copy of many workers per fact would cost more
            than the run.
        fact: what happened, or was decided.
        now: when, in seconds.
    """
    c, k = s.center, s.checkpoints
    match fact:
        case group.Reported(report):
            _note_report(s, report, now)
        case Fact():
            fact.apply(s, now)
        case group.WorkerReady(worker_id, node):
            w = s.workers[worker_id]
            w.node = node
            w.enter(Phase.READY, now)
            s.num_on_node[node] += not w.is_spare
            s.num_places[node] = max(s.num_on_node[node], s.num_places[node])
        case group.RunEnded():
            _note_end(s, fact, now)
        case group.Lost(name) if name in s.workers:
            s.count_loss(s.workers[name])
            s.forget_worker(name, "was lost", now)
        case group.Lost(name) if is_part_of_center(name):
            s.budgets.losses += not c.is_lost
            c.is_lost = True
        case group.HandedIn(worker_id):
            s.workers[worker_id].hands_in = False
            s.waits.pop(("hand in", worker_id), None)
        case group.TookOver(worker_id):
            s.waits.pop(("hand over", worker_id), None)
        case group.GaveUp():
            _note_given_up(s, fact)
        case group.Published():
            c.was_up, c.process, c.sent_s = True, fact.process, fact.sent_s
            c.num_snapshots = min(_NUM_SNAPSHOTS, c.num_snapshots + 1)
            c.rounds, c.num_changes = fact.rounds, fact.num_changes
            c.generation, c.is_complete = fact.newest_generation, fact.is_complete
        case group.Changed():
            s.waits.pop(("change", ""), None)
            c.num_snapshots = 0
        case group.Collected(snapshot):
            s.progress_at = now
            k.before = k.at, k.epoch, k.collected
            k.at, k.epoch, k.collected = now, int(snapshot.progress.epoch), snapshot.progress.round
            k.writing, k.is_writing = k.writing | set(k.sources), True
            s.give_up_checkpoint()
        case group.StatesLost(round) if round == k.collected:
            k.at, k.epoch, k.collected = k.before
        case group.Scoring(num_samples) if num_samples != s.scores.num_samples:
            s.scores.num_samples, s.progress_at = num_samples, now
        case Evaluated(progress):
            _note_score(s, progress.round, now)


def _note_report(s: RunState, report: WorkerReport, now: float) -> None:
    if (w := s.workers.get(report.worker_id)) is not None:
        before, w.report, w.reported_at = w.report, report, now
        if before is None or report.waiting_s > 0 or _place(report) != _place(before):
            w.moved_at = now
        if before is not None and has_computed(
            report.cpu_s - before.cpu_s, report.sent_s - before.sent_s
        ):
            w.busy_at = now
    if s.run is not None and s.is_member(report.worker_id):
        s.run.reports[report.worker_id] = report
        s.pace.note_round(report.round, report.round_s)
        s.pace.resume(now, report.generation)


def _place(report: WorkerReport) -> tuple[int, int, int, int | None]:
    """Return how far a worker has got; a change is progress."""
    return report.generation, report.local_step, report.round, report.num_scored


def _note_end(s: RunState, e: group.RunEnded, now: float) -> None:
    w, run = s.workers[e.worker_id], s.run
    if run is not None and s.is_member(e.worker_id):
        run.ended[e.worker_id] = e
        if e.outcome is Outcome.BROKEN:
            run.broken_at = min(run.broken_at, now)
        is_pause = s.is_sync and e.outcome in (Outcome.REGROUP, Outcome.BROKEN)
        if is_pause or run.is_idle:
            s.pace.pause(now, run.number)
    w.in_loop = w.is_dismissed = False
    if e.round >= 0:
        w.copy = Copy(e.worker_id, e.round, e.num_changes, e.copy_generation, e.ledger_round)
    elif e.has_bad_copy:
        w.copy = None


def _note_given_up(s: RunState, e: group.GaveUp) -> None:
    match e.task:
        case "checkpoint":
            s.give_up_checkpoint()
        case "evaluation":
            s.scores.give_up()
            s.scores.num_lost += 1
        case "publication":
            s.center.publishing = None
        case "saved state":
            w = s.workers[e.worker_id]
            w.replica = "" if w.replica == w.worker_id else w.replica


def _note_score(s: RunState, round: int, now: float) -> None:
    scores = s.scores
    if not s.counts_score(round):
        scores.give_up()
        return
    s.progress_at, scores.num_lost = now, 0
    known = sorted(scores.rounds)  # at worst an old round is scored again
    scores.rounds = frozenset({*known[-(_NUM_SCORED - 1) :], round})
    scores.evaluated = max(scores.evaluated, round)  # an earlier score may arrive later
    scores.evaluating = scores.evaluated
