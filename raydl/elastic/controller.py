"""Runs the training from the first snapshot to the end: polls events, decides, acts.

What follows an event is decided in ``decide``. The controller carries out its actions, and keeps
what is no decision: a user's exception, the replicas of leavers, callbacks, curves, faults by plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydl.config import TrainConfig
from raydl.core.callbacks import Callback, Listeners
from raydl.core.method import Method
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import (
    Busy,
    Collected,
    Event,
    Failed,
    HandedIn,
    Lost,
    Published,
    Refused,
    Reported,
    RunEnded,
    WorkerGroup,
)
from raydl.elastic import facts, sentences
from raydl.elastic.decide import begin, decide, lacks_score, new_state
from raydl.elastic.fencing import Refusals
from raydl.elastic.limits import Limits
from raydl.elastic.membership_policy import PATIENCE_S, is_changing
from raydl.elastic.pauses import TrainingPauses
from raydl.elastic.planned_faults import PlannedFaults
from raydl.elastic.plateau import Plateau
from raydl.elastic.record_forwarder import RecordForwarder
from raydl.elastic.run_state import Recorder, State
from raydl.elastic.scaling_policy import is_removed_spare
from raydl.elastic.state import Phase, Worker
from raydl.errors import CapacityError, ProcessLostError, StalledError
from raydl.faults import FaultPlan

_POLL_S = 0.25
_LONG_S = 2.0
"""Seconds of a poll and its answers after which it is repeated: a callback may take long."""
_NO_FAULTS = FaultPlan()


class Controller:
    """Runs the training from the first snapshot to the end.

    Args:
        worker_group: the processes; its center has started or is starting.
        config: the run's settings.
        method: the run's method.
        recorder: shows and stores the results.
        first_round: the round that the center starts from.
        is_first_scored: whether the center of that round needs no score.
        own_states: states of workers from a checkpoint, by id, in the order of their ranks.
        first_seconds: seconds of training before this start.
        first_generation: number of the last generation before this start.
        first_cuts: cuts of the learning rate before this start.
        faults: the faults to inflict.
        callbacks: called with each score of the center; they may end the run.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainConfig,
        method: Method,
        recorder: Recorder,
        *,
        first_round: int,
        is_first_scored: bool = True,
        own_states: dict[str, Any],
        first_seconds: float = 0.0,
        first_generation: int = 0,
        first_cuts: int = 0,
        faults: FaultPlan = _NO_FAULTS,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = Limits.of(config, method)
        self.run_state = new_state(
            self.limits,
            clock(),
            first_round=first_round,
            is_first_scored=is_first_scored,
            first_generation=first_generation,
            first_cuts=first_cuts,
            saved=tuple(own_states),
        )
        """What the control knows of the run."""
        self.num_generations = 0
        """Memberships since this start."""
        self.stop_reason = ""
        """The signal that requested a stop; empty: none did."""
        self.pauses = TrainingPauses()
        self.planned_faults = PlannedFaults(
            worker_group, faults, first_round=first_round, first_seconds=first_seconds
        )
        self._worker_group = worker_group
        self._recorder = recorder
        self._clock = clock
        self._curves = RecordForwarder(recorder, clock)
        self._plateau = Plateau(config.optimizer, num_cuts=first_cuts, evaluation=config.evaluation)
        self._listeners = Listeners(callbacks)
        self._refusals = Refusals()
        self._states = dict(own_states)
        """By worker, its state in the checkpoint; by leaver, its replica in the storage."""
        self._errors: dict[str, Exception] = {}
        """By process, the newest error that it has raised."""
        self._later: deque[Any] = deque()
        """Events that follow from actions."""
        self._logged = ""
        self._is_new_stage = False  # the next poll does not wait
        self._carry_out(begin(self.run_state, self.limits, clock(), saved=tuple(own_states)))

    @property
    def state(self) -> State:
        """The stage of the run."""
        return self.run_state.stage

    @property
    def outcome(self) -> Outcome | None:
        """How the training has ended, once it has."""
        return self.run_state.outcome

    @property
    def generation(self) -> int:
        """Number of the newest membership."""
        return self.run_state.generation

    @property
    def workers(self) -> list[Worker]:
        """All workers, in the order of their requests."""
        return list(self.run_state.workers.values())

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return len(self.run_state.run.at_work) if self.run_state.run else 0

    @property
    def num_lost_residuals(self) -> int:
        """How often something that compressed messages had left out was lost."""
        return self.run_state.budgets.lost_residuals

    @property
    def unfrozen(self) -> tuple[str, ...]:
        """Frozen parameters that the models of workers have unfrozen.

        The run stops, to go on with them from its checkpoint.
        """
        return self.run_state.unfrozen

    @property
    def restarts(self) -> bool:
        """Whether the run stopped only to go on with parameters that the models have unfrozen."""
        return self.outcome is Outcome.STOPPED and not self.stop_reason

    @property
    def ended_by(self) -> str:
        """Name of the callback that ended the run; see ``raydl.core.callbacks.Listeners``."""
        return self.run_state.ended_by

    @property
    def ended_because(self) -> str:
        """The reason that the callback gave."""
        return self.run_state.ended.why if self.run_state.ended and self.run_state.ended_by else ""

    @property
    def lacks_score(self) -> bool:
        """Whether the run has finished without a score of its last center."""
        return lacks_score(self.run_state)

    @property
    def refused(self) -> dict[str, int]:
        """The number of late messages, snapshots and checkpoints that were refused, by kind."""
        return self._refusals.counts

    def note_refused(self, process: str, refused: Mapping[str, int]) -> None:
        """Record how much a process has refused so far, by kind; log it at each doubling."""
        for sentence in self._refusals.note_refused(process, refused):
            self._log(sentence)

    def request_stop(self, reason: str) -> None:
        """Request a stop after the next round, with a checkpoint. Safe in a signal handler."""
        self.stop_reason = reason

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave at the user's request; return (whether it will, a sentence).

        It is replaced only if too few workers would be left.
        """
        run, fewest = self.run_state, self.limits.min_workers
        w = run.workers.get(worker_id)
        if w is None:
            return False, f"the run has no worker {worker_id}; it has {', '.join(run.workers)}"
        if w.phase is Phase.LEAVING:
            return True, f"{worker_id} is leaving already"
        answer = sentences.removed(
            worker_id,
            is_spare=is_removed_spare(run, w),
            is_idle=w.phase in (Phase.STARTING, Phase.READY),
            fewest=fewest,
            is_replaced=run.max_workers <= fewest,
        )
        self._feed(facts.Remove(worker_id))
        return True, answer

    def step(self) -> bool:
        """Poll, decide and act once; return whether the run is done.

        Raises:
            RaydlError: if the run ends by an error. A user's exception is raised unchanged.
        """
        timeout_s, self._is_new_stage = 0.0 if self._is_new_stage else _POLL_S, False
        began = self._clock()
        for event in self._worker_group.poll(timeout_s):
            self._on_event(event)
        if self._clock() - began > _LONG_S:  # what has arrived meanwhile may end a wait
            for event in self._worker_group.poll(0.0):
                self._on_event(event)
        if self.stop_reason:
            self._feed(facts.Stop(self.stop_reason))
        self._note_files()
        self._inflict_faults()
        self._tick()
        while self._later:  # the score of the last center has come with the end of a loop
            self._on_event(self._later.popleft())
            self._tick()
        self._recorder.show(self.state, self.run_state.counts())
        if self.state is State.DONE and self.run_state.halt is not None:
            raise self._errors[self.run_state.halt.name]
        return self.state is State.DONE

    def _tick(self) -> None:
        waited_s = self._clock() - self.run_state.since
        is_long = self.state is State.WAITING and waited_s > PATIENCE_S
        self._feed(facts.Tick(self._worker_group.waiting_for() if is_long else ""))

    def _note_files(self) -> None:
        """Note whether a checkpoint is being written."""
        k, recorder = self.run_state.checkpoints, self._recorder
        if (k.is_writing, k.is_given_up) != (recorder.is_writing, recorder.is_given_up):
            self._feed(facts.Writing(recorder.is_writing, recorder.is_given_up))

    def _inflict_faults(self) -> None:
        is_open = self.state is State.TRAINING and not is_changing(self.run_state)
        if is_open and not self.run_state.center.is_lost:
            for sentence in self.planned_faults.inflict(self._curves.last):
                self._feed(facts.FaultFired(sentence))

    def _log(self, sentence: str) -> None:
        """Log a sentence, unless it was the last one logged."""
        if sentence and sentence != self._logged:
            self._logged = sentence
            self._recorder.event(sentence)

    # events

    def _on_event(self, event: Event) -> None:
        """Have an event answered, and keep what is no decision.

        Raises:
            RaydlError: if the run ends by an error. A user's exception is raised unchanged.
        """
        match event:
            case Published():
                self._on_published(event)
            case Reported(report):
                self._on_report(report)
            case Refused(process, num_messages):
                self.note_refused(process, {"messages": num_messages})
            case Busy():
                self._log(sentences.busy(event, self.limits.elastic.max_busy_s))
            case Failed(name, error):
                self._keep_error(name, error)
                self._feed(event)
            case RunEnded(worker_id, error=error) if error is not None:
                self._keep_error(worker_id, error)
                self._feed(event)
            case HandedIn(worker_id, state):
                self._states[worker_id] = state
                self._feed(event)
            case Evaluated():
                self._on_score(event)
            case Collected():
                self._on_collected(event)
            case _:
                self._feed(event)

    def _keep_error(self, name: str, error: Exception) -> None:
        """Keep the error of a process, but not instead of the one that stops the run."""
        if self.run_state.halt is None or name not in self._errors:
            self._errors[name] = error

    def _on_collected(self, event: Collected) -> None:
        progress = event.snapshot.progress
        is_end = self.state is State.FINISHING and self.outcome is Outcome.FINISHED
        is_last = is_end and progress.round == self.run_state.round
        if not self._feed(event):  # it was given up meanwhile
            self._log("a checkpoint was abandoned: what it needs was lost meanwhile")
            for state in event.workers.values():
                if not isinstance(state, dict):
                    state.release()
            return
        self._feed(facts.Trained(progress.num_samples))
        self._recorder.checkpoint(
            dataclasses.replace(event, is_last=is_last, unfrozen=self.unfrozen)
        )

    def _on_score(self, evaluated: Evaluated) -> None:
        counts = self.run_state.counts_score(evaluated.progress.round)
        self._feed(evaluated)
        if not counts:
            return
        self._recorder.evaluated(evaluated)
        try:
            self._listeners.note_score(evaluated.without_center())
        except Exception as error:
            self._keep_error("callback", error)
            self._feed(Failed("callback", error))
        listeners = self._listeners
        if listeners.ended_by and self.run_state.ended is None:
            self._feed(facts.Ended(listeners.ended_by, listeners.ended_because))
        if self.state in (State.FINISHING, State.DONE):  # no round is left for another rate
            return
        if sentence := self._plateau.note_score(evaluated.metrics):
            self._feed(facts.Cut(self._plateau.num_cuts, sentence))

    def _on_published(self, published: Published) -> None:
        self._feed(published)
        for number, worker_id in published.faults:
            self._feed(facts.FaultFired(self.planned_faults.note(number, worker_id)))
        self.note_refused(published.process, published.refused)
        self._note_trained(published.records)
        self._add_records(published.records, f"center {published.process}", published.sent_s)

    def _on_report(self, report: WorkerReport) -> None:
        worker_id, is_member = report.worker_id, self.run_state.is_member(report.worker_id)
        self._feed(Reported(report))
        if report.unfrozen:
            self._feed(facts.Unfrozen(report.unfrozen))
        if worker_id in self.run_state.workers:
            self.pauses.note(report, self._clock())
        for score in report.scores:
            self._on_score(score)
        for lost in report.lost_residuals:
            if lost.norm is not None or self.limits.may_leave_out:
                self._feed(facts.ResidualLost(worker_id, lost.norm, lost.why))
        if not is_member or self.run_state.run is None:
            return
        self._note_trained(report.records)  # of any rank: rank 0 may be lost again and again
        if worker_id == self.run_state.run.membership.worker_ids[0]:
            self._add_records(report.records, worker_id, report.sent_s)

    def _add_records(self, records: tuple[Record, ...], sender: str, sent_s: float) -> None:
        if self.run_state.run is not None:
            reports = self.run_state.run.reports
            self._curves.add_records(records, reports, sender=sender, sent_s=sent_s)
            self._feed(facts.EpochsDone(self._curves.epoch))

    def _note_trained(self, records: tuple[Record, ...]) -> None:
        for record in records:
            self._feed(facts.Trained(record.progress.num_samples))

    # actions

    def _feed(self, event: Any) -> bool:
        """Have an event answered, and carry out the actions; return whether it was news.

        Raises:
            RaydlError: if the run ends by an error. A user's exception is raised unchanged.
        """
        found = decide(self.run_state, event, self._clock(), self.limits)
        self._carry_out(found)
        return bool(found) and found[0] is event

    def _carry_out(self, found: Sequence[Any]) -> None:
        for fact in found:
            self._recorder.note(fact)
            sentence = sentences.sentence(
                fact,
                num_lost_scores=self.run_state.scores.num_lost,
                max_rollbacks=self.limits.elastic.max_rollbacks,
            )
            match fact:
                case facts.Fail():
                    raise self._error(fact)
                case facts.Avoid(node):
                    if self._worker_group.avoid(node):  # there is another one
                        self._log(sentence)
                case facts.Rebuild(source):
                    optimizer = self._worker_group.rebuild_center(source or None)
                    is_said = optimizer and source
                    self._log(f"{sentence}; {optimizer}" if is_said else sentence)
                case _:
                    self._log(sentence)
                    self._perform(fact)

    def _perform(self, fact: Any) -> None:
        """Carry out an action."""
        group = self._worker_group
        if isinstance(fact, (facts.Form, facts.Abandon, facts.Enter)):
            self._is_new_stage = True
        match fact:
            case facts.Start(worker_id, is_spare=True):
                group.request_spare(worker_id)
            case facts.Start(worker_id):
                group.request_worker(worker_id, self._states.get(worker_id))
            case facts.End(worker_id):
                group.end(worker_id)
                self._drop_kept(worker_id)
            case Lost(name):
                self._drop_kept(name)
            case facts.Form(membership, round):
                self._note_membership(fact)
                group.form(membership, round, self._states_for(fact))
            case facts.Change(membership):
                self._note_membership(fact)
                group.change(membership, self._states_for(fact))
            case facts.Vote(generation, votes):
                group.vote(generation, **votes)
            case facts.Dismiss(worker_id):
                group.dismiss(worker_id)
            case facts.Abandon(generation):
                group.abandon(generation)
            case facts.Publish(worker_id):
                group.publish(worker_id)
            case facts.HandIn(worker_id):
                group.hand_in(worker_id)
            case facts.HandOver(worker_id, leaver):
                group.hand_over(worker_id, self._states[leaver])
            case facts.Forget(leaver):
                group.forget(self._states[leaver] if fact.is_taken else self._states.pop(leaver))
            case facts.Evaluate(round):
                group.evaluate(round)
            case facts.UseScore(worker_id):
                assert self.run_state.run is not None
                self._later.append(self.run_state.run.ended[worker_id].score)
            case facts.Collect(round, worker_ids):
                group.collect(round, worker_ids)

    def _drop_kept(self, worker_id: str) -> None:
        """Free what is kept of a worker that has ended: its state in the checkpoint, its error."""
        if worker_id not in self.run_state.replicas:
            self._states.pop(worker_id, None)
        if self.run_state.halt is None or self.run_state.halt.name != worker_id:
            self._errors.pop(worker_id, None)

    def _note_membership(self, fact: facts.Form | facts.Change) -> None:
        self.num_generations += 1
        self._recorder.formed(fact.membership, fact.why)
        self.pauses.keep_only(self.run_state.workers.keys())

    def _states_for(self, fact: facts.Form | facts.Change) -> dict[str, Any]:
        """Return the states that newcomers start from: their own, or a leaver's replica."""
        return {worker_id: self._states.pop(key) for worker_id, key in fact.replicas.items()}

    def _error(self, fail: facts.Fail) -> Exception:
        """Return the error that ends the run."""
        match fail.kind:
            case "raised":
                return self._errors[fail.name]
            case "capacity":
                return CapacityError(fail.why)
            case "stalled":
                return StalledError(fail.why)
        return ProcessLostError(fail.name, fail.why)
