"""What is known of a run, and how events change it; what follows from it, others decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from raydl.callbacks import Listeners
from raydl.control.chaos import Chaos
from raydl.control.curves import Curves
from raydl.control.generation import Generation
from raydl.control.keeper import CenterKeeper
from raydl.control.plateau import Plateau
from raydl.control.staff import Staff
from raydl.control.state import Recorder
from raydl.control.workforce import Copy, Workforce
from raydl.crew import (
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
    Reported,
    RunEnded,
    Scoring,
    WorkerReady,
)
from raydl.pace import Pace
from raydl.reports import Outcome, Record, WorkerReport


@dataclass(kw_only=True)
class Situation:
    """All that events change."""

    workforce: Workforce
    staff: Staff
    keeper: CenterKeeper
    curves: Curves
    pace: Pace
    chaos: Chaos
    plateau: Plateau
    listeners: Listeners
    recorder: Recorder
    is_sync: bool
    """Whether all workers exchange at once."""
    say: Callable[[str], None]
    """Takes one line on what happened."""
    clock: Callable[[], float]
    """Seconds, rising."""
    run: Generation | None = None
    """The newest generation."""
    finished_at: int | None = None
    """The round with which all is trained; None: it is not."""
    is_changing: bool = False
    """Whether the center has yet to learn of the newest membership."""

    def take(self, event: Event) -> None:
        """Take in what happened.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.workforce:
                self.workforce.came_up(worker_id, node)
            case Draining(worker_id) if worker_id in self.workforce:
                self.staff.send_away(worker_id, "drains")
            case Published():
                self._take_published(event)
            case Reported(report):
                self._take_report(report)
            case RunEnded():
                self._take_end_of(event)
            case Changed():
                self.is_changing = False
            case HandedIn(worker_id, state):
                self.staff.take_over(worker_id, state)
            case GaveUp(task, reason):
                self._take_failure_of(task, reason)
            case Failed(_, error):
                raise error
            case Lost(name, reason):
                self._take_loss(name, reason)
            case Evaluated() if self.keeper.take_score(event):
                self._take_score(event)
            case Scoring(num_samples):
                self.keeper.take_progress(num_samples)
            case Collected():
                self.keeper.take_collected(event)
                is_last = event.snapshot.round == self.finished_at
                self.recorder.checkpoint(dataclasses.replace(event, is_last=is_last))

    def _take_score(self, evaluated: Evaluated) -> None:
        self.recorder.evaluated(evaluated)
        self.listeners.take(evaluated.without_center())
        if not self.staff.is_hiring:  # no round is left in which to learn more slowly
            return
        sentence = self.plateau.take(evaluated.metrics)
        if sentence:
            self.say(sentence)

    def _take_published(self, published: Published) -> None:
        self.keeper.take_published(published)
        for number, worker_id in published.faults:
            self.say(self.chaos.note(number, worker_id))
        self._take_records(published.records, f"center {published.process}", published.told_s)

    def _take_report(self, report: WorkerReport) -> None:
        self.workforce.take_report(report)
        run = self.run
        if run is None or not run.is_present(report.worker_id):
            return
        run.reports[report.worker_id] = report
        self.pace.note_round(report.round, report.round_s)
        self.pace.resume(self.clock(), report.generation)
        if report.worker_id == run.membership.worker_ids[0]:
            self._take_records(report.records, report.worker_id, report.told_s)

    def _take_records(self, records: tuple[Record, ...], sender: str, told_s: float) -> None:
        run = self.run
        if run and self.curves.take(records, run.reports, sender=sender, told_s=told_s):
            self.staff.saw_progress()
            self.keeper.times.saw_epoch(self.curves.epoch)

    def _take_end_of(self, end: RunEnded) -> None:
        run = self.run
        if end.worker_id not in self.workforce:
            return
        if run and run.is_present(end.worker_id):
            if not run.take_end(end, self.clock()):
                return  # of a generation before this one
            is_pause = end.outcome in (Outcome.REGROUP, Outcome.BROKEN)
            if is_pause and self.is_sync:
                self.pace.pause(self.clock(), run.membership.generation)
            self._note_if_nobody_trains(run)
        copy = Copy(end.worker_id, end.round, end.num_changes, end.ledger_round)
        self.workforce.left_loop(end.worker_id, copy if end.round >= 0 else None)

    def _note_if_nobody_trains(self, run: Generation) -> None:
        """Begin a pause where nobody is at work; by messages one alone trains on."""
        if not run.at_work:
            self.pace.pause(self.clock(), run.membership.generation)

    def _take_loss(self, name: str, reason: str) -> None:
        if name in self.workforce:
            self.staff.lose(name, reason)
        elif name == "center" or name.startswith("shard"):
            self.say(f"{name} was lost: {reason}")
            self.staff.count_loss(name, reason)
            self.keeper.is_lost = True
        self.expect_nothing_from(name)

    def expect_nothing_from(self, name: str) -> None:
        """Go on without what a process was asked for that has gone."""
        self.keeper.lost(name)
        if self.run and self.run.is_present(name):
            self.run.lose(name)
            self._note_if_nobody_trains(self.run)

    def _take_failure_of(self, task: str, reason: str) -> None:
        self.keeper.gave_up(task)
        if task == "checkpoint":
            self.say(f"a checkpoint was given up: {reason}")
        elif task == "evaluation":
            self.keeper.num_lost_scores += 1
            self.say(f"a score was given up: {reason}")
        elif task.startswith("state of"):
            self.staff.take_over(task.removeprefix("state of "), None)
