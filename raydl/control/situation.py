"""What is known of a run, and how events change it; what follows from it, others decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raydl.callbacks import Listeners
from raydl.config import ElasticConfig
from raydl.control.center_manager import CenterManager
from raydl.control.curves import Curves
from raydl.control.generation import Generation
from raydl.control.planned_faults import PlannedFaults
from raydl.control.plateau import Plateau
from raydl.control.refusals import Refusals
from raydl.control.state import Recorder
from raydl.control.worker_errors import ordinal
from raydl.control.worker_pool import WorkerPool
from raydl.control.worker_registry import Copy, WorkerRegistry
from raydl.errors import InfrastructureError, NonFiniteCenterError, NonFiniteError
from raydl.machine_failures import in_one_line
from raydl.reports import Outcome, Record, WorkerReport
from raydl.stragglers import StragglerDetector
from raydl.worker_group import (
    Busy,
    Changed,
    Collected,
    Draining,
    Evaluated,
    Event,
    Failed,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Refused,
    Reported,
    RunEnded,
    Scoring,
    StatesLost,
    TookOver,
    WorkerReady,
)

_TOLD_SCORES = 20


@dataclass(kw_only=True)
class Situation:
    """All that events change."""

    worker_registry: WorkerRegistry
    worker_pool: WorkerPool
    center_manager: CenterManager
    curves: Curves
    stragglers: StragglerDetector
    planned_faults: PlannedFaults
    plateau: Plateau
    listeners: Listeners
    recorder: Recorder
    is_sync: bool
    """Whether all workers exchange at once."""
    say: Callable[[str], None]
    """Takes one line on what happened."""
    clock: Callable[[], float]
    """Seconds, rising."""
    elastic: ElasticConfig
    run: Generation | None = None
    """The newest generation."""
    finished_at: int | None = None
    """The round with which all is trained; None: it is not."""
    error: Exception | None = None
    """What a worker or the evaluator raised: the run ends with it, after a checkpoint."""
    failed: set[str] = field(default_factory=set)
    """The processes that have raised since."""
    why_error: str = ""
    """Why the run ends with it."""
    num_rollbacks: int = 0
    """Replicas that diverged in this epoch."""
    bad_center_in: int = 0
    """The generation in which the center diverged last; 0: it has not."""
    rollback_epoch: int = -1
    """The epoch that is meant."""
    num_news: int = 0
    """Answers of the center since it learned of a membership: the second was asked for later."""
    refusals: Refusals = field(default_factory=Refusals)
    """What came too late."""
    is_changing: bool = False
    """Whether the center has yet to learn of the newest membership."""

    def take(self, event: Event) -> None:
        """Take in what happened.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.worker_registry:
                self.worker_registry.came_up(worker_id, node)
                self.worker_pool.hand_over()
            case Draining(worker_id) if worker_id in self.worker_registry:
                self.worker_pool.send_away(worker_id, "drains")
            case Published():
                self._take_published(event)
            case Refused(process, num_messages):
                self.note_refused(process, {"messages": num_messages})
            case Reported(report):
                self._take_report(report)
            case RunEnded():
                self._take_end_of(event)
            case Changed():
                self.is_changing, self.num_news = False, 0
            case HandedIn(worker_id, state):
                self.worker_pool.take_in(worker_id, state)
            case TookOver(worker_id):
                self.worker_pool.took_over(worker_id)
            case GaveUp(task, reason):
                self._take_failure_of(task, reason)
            case Failed(name, error):
                self._take_error(name, error)
            case Lost(name, reason):
                self._take_loss(name, reason)
            case Busy(name, silent_s):
                self.say(
                    f"{name} has not answered for {silent_s:.0f} s but is busy: a long call may "
                    f"hold the interpreter lock, or a large state is on its way; it is waited for, "
                    f"{self.elastic.max_busy_s:g} s at most (elastic.max_busy_s)"
                )
            case Evaluated() if self.center_manager.take_score(event):
                self._take_score(event)
            case Scoring(num_samples):
                self.center_manager.take_progress(num_samples)
            case Collected():
                self.center_manager.take_collected(event)
                is_last = event.snapshot.round == self.finished_at
                self.recorder.checkpoint(dataclasses.replace(event, is_last=is_last))
            case StatesLost(round, reason):
                self.center_manager.lost_states(round)
                self.say(f"a checkpoint was given up: {reason}")

    def _take_error(self, name: str, error: Exception) -> None:
        """Go on without a worker that raised, or stop after a checkpoint and raise it then.

        Raises:
            Exception: the error, where no checkpoint can come of it: before the first round, at
                the center, and where the run stops already.
        """
        if self.error is not None:
            self._take_further_error(name, error)
            return
        if name == "center" and isinstance(error, NonFiniteError) and self.run is not None:
            self._take_divergence(name, error)
            self.center_manager.is_lost = self.error is None  # it starts again, from what was good
            return
        why = f"{name} raised {in_one_line(error)}"
        if name in self.worker_registry:
            why = self.worker_pool.take_error(name, error)
            if not why:
                self.expect_nothing_from(name)
                return
        is_in_loop = name in self.worker_registry and self.worker_pool.is_hiring
        if self.run is None or not (is_in_loop or name == "evaluator"):
            raise error
        self.error, self.why_error, self.failed = error, why, {name}
        self._end_failed(name, error)

    def _take_further_error(self, name: str, error: Exception) -> None:
        """Take in that another process raised while the run stops: the same mistake, as a rule."""
        assert self.error is not None
        if name == "evaluator":
            return
        if (
            name in self.failed
            or name not in self.worker_registry
            or not self.worker_pool.is_hiring
        ):
            raise self.error  # the last checkpoint itself fails
        self.failed.add(name)
        self._end_failed(name, error)

    def _end_failed(self, name: str, error: Exception) -> None:
        """End the process of a worker whose machine failed: its state is of no use any more."""
        if isinstance(error, InfrastructureError) and name in self.worker_registry:
            self.worker_pool.end(name)
            self.expect_nothing_from(name)

    def _take_divergence(self, name: str, error: NonFiniteError) -> None:
        """Let a replica that diverged go on from the center, a bounded number of times.

        Where the center diverged itself, all go on from the newest one that was kept.
        """
        elastic = self.elastic
        is_of_center = isinstance(error, NonFiniteCenterError)
        assert self.run is not None
        generation = self.run.membership.generation
        if is_of_center and generation == self.bad_center_in:  # in rounds each worker sees it
            return
        self.bad_center_in = generation if is_of_center else self.bad_center_in
        epoch = int(self.curves.epoch)
        if epoch != self.rollback_epoch:
            self.rollback_epoch, self.num_rollbacks = epoch, 0
        self.num_rollbacks += 1
        if self.num_rollbacks <= elastic.max_rollbacks and elastic.on_worker_error != "stop":
            who, where = ("all", "newest good center") if is_of_center else (name, "center")
            self.say(
                f"{error}; {who} {'go' if is_of_center else 'is rolled'} back to the {where} "
                f"({self.num_rollbacks} of {elastic.max_rollbacks} times in this epoch)"
            )
        elif self.error is None:
            self.error = error
            self.why_error = f"{'the center' if is_of_center else name} diverged"
            if elastic.on_worker_error != "stop":
                self.why_error += (
                    f" for the {ordinal(self.num_rollbacks)} time in this epoch, more often than "
                    f"elastic.max_rollbacks"
                )

    def _take_score(self, evaluated: Evaluated) -> None:
        self.recorder.evaluated(evaluated)
        self.listeners.take(evaluated.without_center())
        if not self.worker_pool.is_hiring:  # no round is left in which to learn more slowly
            return
        sentence = self.plateau.take(evaluated.metrics)
        if sentence:
            self.say(sentence)

    def _take_published(self, published: Published) -> None:
        self.num_news += 1
        self.center_manager.take_published(published)
        for number, worker_id in published.faults:
            self.say(self.planned_faults.note(number, worker_id))
        self.note_refused(published.process, published.refused)
        self._take_records(published.records, f"center {published.process}", published.told_s)

    def note_refused(self, process: str, refused: Mapping[str, int]) -> None:
        """Note what a process has refused so far, and tell what is news."""
        for sentence in self.refusals.take(process, refused):
            self.say(sentence)

    def _take_report(self, report: WorkerReport) -> None:
        self.worker_registry.take_report(report)
        run = self.run
        if run is None or not run.is_present(report.worker_id):
            return
        run.reports[report.worker_id] = report
        self.stragglers.note_round(report.round, report.round_s)
        self.stragglers.resume(self.clock(), report.generation)
        if report.worker_id == run.membership.worker_ids[0]:
            self._take_records(report.records, report.worker_id, report.told_s)

    def _take_records(self, records: tuple[Record, ...], sender: str, told_s: float) -> None:
        run = self.run
        if run and self.curves.take(records, run.reports, sender=sender, told_s=told_s):
            self.worker_pool.saw_progress()
            self.center_manager.times.saw_epoch(self.curves.epoch)

    def _take_end_of(self, end: RunEnded) -> None:
        run = self.run
        if end.worker_id not in self.worker_registry:
            return
        if run and run.is_present(end.worker_id):
            if not run.take_end(end, self.clock()):
                return  # of a generation before this one
            if end.error is not None:
                self._take_divergence(end.worker_id, end.error)
            is_pause = end.outcome in (Outcome.REGROUP, Outcome.BROKEN)
            if is_pause and self.is_sync:
                self.stragglers.pause(self.clock(), run.membership.generation)
            self._note_if_nobody_trains(run)
        age = end.round, end.num_changes, end.copy_generation, end.ledger_round
        copy = Copy(end.worker_id, *age) if end.round >= 0 else None
        self.worker_registry.left_loop(end.worker_id, copy)

    def _note_if_nobody_trains(self, run: Generation) -> None:
        """Begin a pause where nobody is at work; by messages one alone trains on."""
        if not run.at_work:
            self.stragglers.pause(self.clock(), run.membership.generation)

    def _take_loss(self, name: str, reason: str) -> None:
        if name in self.worker_registry:
            self.worker_pool.lose(name, reason)
        elif name == "center" or name.startswith("shard"):
            self.say(f"{name} was lost: {reason}")
            self.worker_pool.count_loss(name, reason)
            self.center_manager.is_lost = True
        self.expect_nothing_from(name)

    def expect_nothing_from(self, name: str) -> None:
        """Go on without what a process was asked for that has gone."""
        self.center_manager.lost(name)
        if self.run and self.run.is_present(name):
            self.run.lose(name)
            self._note_if_nobody_trains(self.run)

    def _take_failure_of(self, task: str, reason: str) -> None:
        self.center_manager.gave_up(task)
        if task == "checkpoint":
            self.say(f"a checkpoint was given up: {reason}")
        elif task == "evaluation":
            self.center_manager.num_lost_scores += 1
            self._tell_lost_score(self.center_manager.num_lost_scores, reason)
        elif task.startswith("saved state of"):
            self.say(f"{task.removeprefix('saved state of ')} starts at the center: {reason}")
        elif task.startswith("state of"):
            self.worker_pool.take_in(task.removeprefix("state of "), None, reason)
        elif task.startswith("handover to"):
            self.worker_pool.took_nothing_over(task.removeprefix("handover to "), reason)

    def _tell_lost_score(self, number: int, reason: str) -> None:
        """Tell each of the first scores that are lost in a row, then every tenth."""
        if number == 1:
            self.say(f"a score was given up: {reason}")
        elif number <= _TOLD_SCORES or number % 10 == 0:
            self.say(f"a score was given up, {number} in a row by now: {reason}")
