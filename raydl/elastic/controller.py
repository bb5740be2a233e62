"""Runs the training from the first snapshot to the end: polls events, decides, acts.

    WAITING ──form──> TRAINING ──a worker joins or leaves──> REGROUPING ──all left──┐
       ^                 │  └────a worker is lost or late──> RECOVERING ──all left──┤
       └─────────────────┼─────────────────────────────────────────────────────────┘
                         └──finished or stopped──> FINISHING ──> DONE

In methods with messages, workers join and leave while the others train. The run stays in TRAINING
unless the center is lost or too few workers are left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydl.config import TrainConfig
from raydl.core.callbacks import Callback, Listeners
from raydl.core.membership import Membership
from raydl.core.method import Method
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import (
    Busy,
    Changed,
    Collected,
    Draining,
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
    WorkerGroup,
    WorkerReady,
)
from raydl.elastic.center_manager import CenterManager
from raydl.elastic.failures import RunFailure
from raydl.elastic.fencing import Refusals
from raydl.elastic.generation import Generation
from raydl.elastic.membership_policy import (
    CAUSE_S,
    AsyncMembership,
    Change,
    MembershipPolicy,
    Next,
    SyncMembership,
)
from raydl.elastic.pauses import TrainingPauses
from raydl.elastic.planned_faults import PlannedFaults
from raydl.elastic.plateau import Plateau
from raydl.elastic.record_forwarder import RecordForwarder
from raydl.elastic.residuals import LostResiduals, may_leave_out
from raydl.elastic.run_state import Recorder, State
from raydl.elastic.stragglers import StragglerDetector
from raydl.elastic.worker_pool import WorkerPool
from raydl.elastic.worker_registry import Copy, WorkerRegistry
from raydl.errors import (
    InfrastructureError,
    NonFiniteCenterError,
    NonFiniteError,
    StalledError,
    in_one_line,
)
from raydl.faults import FaultPlan

_POLL_S = 0.25
_SILENCE_S = 300.0
"""The longest wait after the last round without progress of the last states or the score, in
seconds."""
_MAX_LOST_SCORES = 5
"""Lost scores in a row after which the run ends without a score of its last center."""
_LOGGED_SCORES = 20
"""Lost scores in a row that are logged one by one; after them, every tenth is logged."""
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
        self.state = State.WAITING
        self.outcome: Outcome | None = None
        self.generation = first_generation
        """Number of the newest membership."""
        self.num_generations = 0
        """Memberships since this start."""
        self.stop_reason = ""
        """The signal that requested a stop; empty: none did."""
        self.ended_by = ""
        """Name of the callback that ended the run; see ``raydl.core.callbacks.Listeners``."""
        self.ended_because = ""
        """The reason that the callback gave."""
        self.unfrozen: tuple[str, ...] = ()
        """Frozen parameters that the models of workers have unfrozen. The run stops, to go on with
        them from its checkpoint."""
        self.worker_registry = WorkerRegistry(
            lease_s=config.elastic.lease_s,
            max_step_s=config.elastic.max_step_s,
            first_step_s=config.exchange.timeout_s,
            max_busy_s=config.elastic.max_busy_s,
            clock=clock,
        )
        self.stragglers = StragglerDetector()
        self.pauses = TrainingPauses()
        self.planned_faults = PlannedFaults(
            worker_group, faults, first_round=first_round, first_seconds=first_seconds
        )
        self._recorder = recorder
        self._worker_group = worker_group
        self._config = config
        self._method = method
        self._clock = clock
        self._logged = self._logged_stop = ""
        self.lost_residuals = LostResiduals(self._log, may_exist=may_leave_out(config, method))
        """What compressed messages have left out and no later message will contain."""
        self._worker_pool = WorkerPool(
            worker_group,
            config,
            self.worker_registry,
            own_states=own_states,
            hands_over=method.rule.ahead
            or bool(method.rule.keeps)
            or self.lost_residuals.may_exist,
            lost_residuals=self.lost_residuals,
            log=self._log,
            clock=clock,
        )
        self._center_manager = CenterManager(
            worker_group,
            config,
            first_round=first_round,
            is_first_scored=is_first_scored,
            clock=clock,
        )
        self._failure = RunFailure(config.elastic, self._log)
        self._policy = self._make_policy()
        self._curves = RecordForwarder(recorder, clock)
        self._plateau = Plateau(config.optimizer, num_cuts=first_cuts, evaluation=config.evaluation)
        self._listeners = Listeners(callbacks)
        self._refusals = Refusals()
        self._run: Generation | None = None  # the newest generation
        self._first_round = self._round = first_round
        self._finished_at: int | None = None  # the round that completed the training
        self._state_since = clock()
        self._is_new_state = False  # the next poll does not wait
        self._stop_voted = self._is_idle = False
        self._first_cuts = self._cuts_voted = first_cuts

    def _make_policy(self) -> MembershipPolicy:
        if self._method.is_sync:
            return SyncMembership(
                config=self._config,
                worker_group=self._worker_group,
                worker_pool=self._worker_pool,
                worker_registry=self.worker_registry,
                center_manager=self._center_manager,
                stragglers=self.stragglers,
                log=self._log,
            )
        return AsyncMembership(
            config=self._config,
            worker_group=self._worker_group,
            worker_pool=self._worker_pool,
            worker_registry=self.worker_registry,
            center_manager=self._center_manager,
            failure=self._failure,
            log=self._log,
            clock=self._clock,
        )

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return len(self._run.at_work) if self._run else 0

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

    @property
    def _why_stop(self) -> str:
        """Why the run is to stop early, or "" if it is not."""
        return self.stop_reason or self._failure.why or self._listeners.ended_because

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave at the user's request; return (whether it will, a sentence)."""
        return self._worker_pool.remove(worker_id)

    def step(self) -> bool:
        """Poll, decide and act once; return whether the run is done.

        Raises:
            RaydlError: if the run ends by an error. A user's exception is raised unchanged.
        """
        timeout_s, self._is_new_state = 0.0 if self._is_new_state else _POLL_S, False
        for event in self._worker_group.poll(timeout_s):
            self._on_event(event)
        # Not between two events: the loss of a newcomer may be one of them.
        self._worker_pool.hand_over()
        # The start of the workers has priority over a score of the center that they start from.
        has_begun = self._run is not None or self.state is State.FINISHING
        if has_begun and self.outcome is not Outcome.STOPPED and self._failure.error is None:
            self._evaluate()
        for worker_id in self._worker_pool.lose_stuck():
            self._stop_waiting_for(worker_id)
        self._worker_pool.release_draining()
        act = {
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.REGROUPING: self._regroup,
            State.RECOVERING: self._recover,
            State.FINISHING: self._finish,
        }.get(self.state)
        if act:
            act()
        self._release_leavers()
        self._recorder.show(self.state, self.worker_registry.counts())
        if self.state is State.DONE and self._failure.error is not None:
            raise self._failure.error
        return self.state is State.DONE

    def _evaluate(self) -> None:
        is_end = self.state is State.FINISHING
        if not (is_end and self._run is not None and self._run.last_score is not None):
            self._center_manager.evaluate_newest(is_end=is_end)

    def _enter(self, state: State) -> None:
        self.state, self._is_new_state = state, True
        self._state_since = self._clock()
        if state is State.FINISHING:
            self._worker_pool.is_requesting = False

    def _log(self, sentence: str) -> None:
        """Log a sentence, unless it was the last one logged."""
        if sentence != self._logged:
            self._logged = sentence
            self._recorder.event(sentence)

    def _release_leavers(self) -> None:
        """End workers that have left, once their copies and states are no longer needed."""
        if self.state is State.FINISHING:
            return
        run, center_manager = self._run, self._center_manager
        if not self._waits_for_files:
            center_manager.writing = frozenset()
        is_settled = self.state is State.WAITING and center_manager.is_collected(self._round)
        needed = set(run.ended) if run and not is_settled else set()
        needed |= center_manager.collecting_from | center_manager.writing
        for worker_id in self._worker_pool.end_leavers(needed):
            self._stop_waiting_for(worker_id)

    # events

    def _on_event(self, event: Event) -> None:
        """Handle an event.

        Raises:
            RaydlError: if the run ends by an error. A user's exception is raised unchanged.
        """
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.worker_registry:
                self.worker_registry.note_ready(worker_id, node)
            case Draining(worker_id, left_s) if worker_id in self.worker_registry:
                self._worker_pool.drain(worker_id, left_s)
            case Published():
                self._on_published(event)
            case Refused(process, num_messages):
                self.note_refused(process, {"messages": num_messages})
            case Reported(report):
                self._on_report(report)
            case RunEnded():
                self._on_run_ended(event)
            case Changed() if self._run is not None:
                self._run.note_changed()
            case HandedIn(worker_id, state):
                self._worker_pool.note_handed_in(worker_id, state)
            case TookOver(worker_id):
                self._worker_pool.note_taken_over(worker_id)
            case GaveUp(task, reason):
                self._on_given_up(task, reason)
            case Failed(name, error):
                self._on_error(name, error)
            case Lost(name, reason):
                self._on_loss(name, reason)
            case Busy(name, silent_s):
                self._log(
                    f"{name} has not answered for {silent_s:.0f} s but is busy: a long call may "
                    f"hold the interpreter lock, or a large state is being sent; it counts as lost "
                    f"after {self._config.elastic.max_busy_s:g} s (elastic.max_busy_s)"
                )
            case Evaluated():
                self._on_score(event)
            case Scoring(num_samples):
                self._center_manager.note_scoring(num_samples)
            case Collected():
                self._center_manager.note_collected(event)
                self._worker_pool.note_trained(event.snapshot.progress.num_samples)
                is_last = event.snapshot.progress.round == self._finished_at
                self._recorder.checkpoint(
                    dataclasses.replace(event, is_last=is_last, unfrozen=self.unfrozen)
                )
            case StatesLost(round, reason):
                self._center_manager.note_states_lost(round)
                self._log(f"a checkpoint was abandoned: {reason}")

    def _on_error(self, name: str, error: Exception) -> None:
        """Continue without a worker that raised an error, or stop the run after a checkpoint.

        Raises:
            Exception: the error, if no checkpoint can follow: before the first round, in the
                center, and if the last checkpoint itself fails.
        """
        is_worker = name in self.worker_registry
        is_needed = is_worker and self._worker_pool.is_requesting
        if self._failure.error is not None:  # mostly the same mistake in another process
            if name == "evaluator":
                return
            if not is_needed or not self._failure.note_further(name):
                raise self._failure.error
        elif name == "center" and isinstance(error, NonFiniteError) and self._run is not None:
            self._note_divergence(name, error, self._run)
            return
        else:
            why = f"{name} raised {in_one_line(error)}"
            if is_worker:
                why = self._worker_pool.note_error(name, error)
                if not why:
                    self._stop_waiting_for(name)
                    return
            if self._run is None or not (is_needed or name == "evaluator"):
                raise error
            self._failure.stop_with(name, error, why)
        if is_worker and isinstance(error, InfrastructureError):  # its state is unusable
            self._worker_pool.end(name, "failed")
            self._stop_waiting_for(name)

    def _note_divergence(self, name: str, error: NonFiniteError, run: Generation) -> None:
        self._failure.note_divergence(
            name, error, generation=run.membership.generation, epoch=int(self._curves.epoch)
        )
        is_of_center = isinstance(error, NonFiniteCenterError)
        if is_of_center and not self._method.is_sync and self._failure.error is None:
            # It restarts from a good copy. In rounds each worker has the newest good one.
            self._center_manager.is_lost = True

    def _on_score(self, evaluated: Evaluated) -> None:
        if not self._center_manager.note_score(evaluated):
            return
        self._recorder.evaluated(evaluated)
        try:
            self._listeners.note_score(evaluated.without_center())
        except Exception as error:
            if self.state is not State.FINISHING or self._failure.error is not None:
                raise
            # The training is complete: its last states are collected and written first.
            self._failure.stop_with("callback", error, f"a callback raised {in_one_line(error)}")
        if not self._worker_pool.is_requesting:  # no round is left for another learning rate
            return
        if sentence := self._plateau.note_score(evaluated.metrics):
            self._log(sentence)

    def _on_published(self, published: Published) -> None:
        if self._run is not None:
            self._run.num_snapshots += 1
        self._center_manager.note_published(published)
        for number, worker_id in published.faults:
            self._log(self.planned_faults.note(number, worker_id))
        self.note_refused(published.process, published.refused)
        self._note_trained(published.records)
        self._add_records(published.records, f"center {published.process}", published.sent_s)

    def _on_report(self, report: WorkerReport) -> None:
        self.worker_registry.note_report(report)
        # In an order that does not depend on which report came first.
        self.unfrozen = tuple(sorted({*self.unfrozen, *report.unfrozen}))
        if report.worker_id in self.worker_registry:
            self.pauses.note(report, self._clock())
        for score in report.scores:
            self._on_score(score)
        for lost in report.lost_residuals:
            self.lost_residuals.note(report.worker_id, lost)
        run = self._run
        if run is None or not run.is_present(report.worker_id):
            return
        run.reports[report.worker_id] = report
        self._note_trained(report.records)  # of any rank: rank 0 may be lost again and again
        self.stragglers.note_round(report.round, report.round_s)
        self.stragglers.resume(self._clock(), report.generation)
        if report.worker_id == run.membership.worker_ids[0]:
            self._add_records(report.records, report.worker_id, report.sent_s)

    def _add_records(self, records: tuple[Record, ...], sender: str, sent_s: float) -> None:
        run = self._run
        if run is None:
            return
        self._curves.add_records(records, run.reports, sender=sender, sent_s=sent_s)
        self._center_manager.checkpoint_times.epoch = self._curves.epoch

    def _note_trained(self, records: tuple[Record, ...]) -> None:
        for record in records:
            self._worker_pool.note_trained(record.progress.num_samples)

    def _on_run_ended(self, end: RunEnded) -> None:
        run = self._run
        if end.worker_id not in self.worker_registry:
            return
        if run and run.is_present(end.worker_id):
            if not run.note_end(end, self._clock()):
                return  # it left an earlier generation
            if end.error is not None:
                self._note_divergence(end.worker_id, end.error, run)
            is_pause = end.outcome in (Outcome.REGROUP, Outcome.BROKEN)
            if is_pause and self._method.is_sync:
                self.stragglers.pause(self._clock(), run.membership.generation)
            self._pause_if_idle(run)
        age = end.round, end.num_changes, end.copy_generation, end.ledger_round
        copy = Copy(end.worker_id, *age) if end.round >= 0 else None
        self.worker_registry.left_loop(end.worker_id, copy, has_bad_copy=end.has_bad_copy)

    def _pause_if_idle(self, run: Generation) -> None:
        """Begin a pause if no member trains any more."""
        if run.is_idle:
            self.stragglers.pause(self._clock(), run.membership.generation)

    def _on_loss(self, name: str, reason: str) -> None:
        if name in self.worker_registry:
            self._worker_pool.lose(name, reason)
        elif name == "center" or name.startswith("shard"):
            self._log(f"{name} was lost: {reason}")
            if not self._center_manager.is_lost:  # otherwise it is restarted anyway
                self._worker_pool.count_loss(name, reason)
            self._center_manager.is_lost = True
        self._stop_waiting_for(name)

    def _stop_waiting_for(self, name: str) -> None:
        """Continue without the results requested from a process that has ended."""
        self._center_manager.note_lost(name)
        if self._run and self._run.is_present(name):
            self._run.lose(name)
            self._pause_if_idle(self._run)

    def _on_given_up(self, task: str, reason: str) -> None:
        self._center_manager.gave_up(task)
        if task == "checkpoint":
            self._log(f"a checkpoint was abandoned: {reason}")
        elif task == "evaluation":
            self._center_manager.num_lost_scores += 1
            number = self._center_manager.num_lost_scores
            if number == 1:
                self._log(f"an evaluation was abandoned: {reason}")
            elif number <= _LOGGED_SCORES or number % 10 == 0:
                self._log(f"an evaluation was abandoned, {number} in a row: {reason}")
        elif task.startswith("saved state of"):
            worker_id = task.removeprefix("saved state of ")
            self._worker_pool.note_state_unreadable(worker_id)
            self._log(f"{worker_id} starts from the center: {reason}")
        elif task.startswith("state of"):
            self._worker_pool.note_handed_in(task.removeprefix("state of "), None, reason)
        elif task.startswith("handover to"):
            self._worker_pool.note_not_taken_over(task.removeprefix("handover to "), reason)

    # states

    def _wait(self) -> None:
        run = self._run
        if self._why_stop:
            self.outcome = self._outcome_of_stop()
            if run is None:
                self._log(f"{self._why_stop}: the run ends before it trained")
                self._enter(State.DONE)
            else:
                self._log_stop()
                self._enter(State.FINISHING)
            return
        if not self._has_center(run):
            return
        self._worker_pool.request_again()  # what had ended the training may have been lost
        waited_s = self._clock() - self._state_since
        if self._is_idle and self._worker_pool.are_all_absent():
            self._log(
                "all remaining samples are claimed by workers that were left out; the run waits "
                "until they return"
            )
            return
        now = run.membership if run else None
        membership, reason = self._worker_pool.decide(now, waited_s=waited_s)
        if membership is None:
            self.stragglers.wait_for_workers()
            if run:
                self._center_manager.collect(run, self._round)  # the wait may be long
            self._log(self._worker_pool.waiting(reason, waited_s, has_trained=run is not None))
        elif not self._worker_pool.awaits_handover(membership.worker_ids):
            self._form(membership, reason)

    def _log_stop(self) -> None:
        """Log, once, why the run stops."""
        if self._why_stop != self._logged_stop:
            self._logged_stop = self._why_stop
            self._log(f"{self._why_stop}: stopping after this round, with a checkpoint")

    def _votes_to_stop(self) -> dict[str, float]:
        """Return the votes of a stop: the last center is scored, unless the stop is urgent."""
        is_scored = self._config.evaluation.is_by_workers and self._is_ended_by_callback
        return {"stop": 1.0, "score": 1.0} if is_scored else {"stop": 1.0}

    @property
    def restarts(self) -> bool:
        """Whether the run stopped only to go on with parameters that the models have unfrozen."""
        return self.outcome is Outcome.STOPPED and not self.stop_reason

    @property
    def _is_ended_by_callback(self) -> bool:
        is_urgent = self.stop_reason or self._failure.error is not None
        return bool(self._listeners.ended_by) and not is_urgent

    def _outcome_of_stop(self) -> Outcome:
        """Return the outcome of a stop: a run that a callback ended counts as finished."""
        listeners = self._listeners
        if not self._is_ended_by_callback:
            return Outcome.STOPPED
        self.ended_by, self.ended_because = listeners.ended_by, listeners.ended_because
        return Outcome.FINISHED

    def _number(self, membership: Membership, reason: str) -> Membership:
        """Return the membership with the next generation number, and log it."""
        self.generation += 1
        self.num_generations += 1
        self._log(f"generation {self.generation}: {reason}")
        self.pauses.keep_only({e.worker_id for e in self.worker_registry.entries()})
        numbered = dataclasses.replace(membership, generation=self.generation)
        self._recorder.formed(numbered, reason)
        return numbered

    def _form(self, membership: Membership, reason: str) -> None:
        """Form a generation, which trains from the center's round on."""
        if self._run and membership == self._run.membership:
            reason = "the same workers continue"
        membership = self._number(membership, reason)
        states = self._worker_pool.states_for(membership.worker_ids)
        self._worker_group.form(membership, self._round, states)
        self._run = Generation(membership, self._round, is_changing=not self._method.is_sync)
        self.worker_registry.formed(membership, entering=membership.worker_ids)
        self._worker_pool.note_formed(membership)
        self._center_manager.formed(membership.generation, self._round)
        self._stop_voted = self._is_idle = False  # votes end with their generation
        self._cuts_voted = self._first_cuts
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run, center = self._run, self._center_manager
        assert run is not None
        if not center.is_lost:
            if run.is_changing:  # the center would not count a vote yet
                return
            for sentence in self.planned_faults.inflict(self._curves.last):
                self._log(sentence)
            generation, num_cuts = run.membership.generation, self._plateau.num_cuts
            # In rounds the worker votes itself, in a round that does not depend on the clock.
            has_unfrozen = bool(self.unfrozen) and not self._method.is_sync
            if (self._why_stop or has_unfrozen) and not self._stop_voted:
                self._stop_voted = True
                if self._why_stop:
                    self._log_stop()
                self._worker_group.vote(generation, **self._votes_to_stop())
            if num_cuts > self._cuts_voted:
                self._cuts_voted = num_cuts
                self._worker_group.vote(generation, num_cuts=num_cuts)
        self._follow(self._policy.watch(run), run)
        if self.state is State.TRAINING and not run.ended and not run.is_changing:
            center.keep_checkpoints(run, is_writing=self._recorder.is_writing)

    def _regroup(self) -> None:
        assert self._run is not None
        self._follow(self._policy.watch_regroup(self._run), self._run)

    def _follow(self, action: Next | Change, run: Generation) -> None:
        """Carry out a decision of the membership policy."""
        match action:
            case Change(membership, reason):
                self._change(run, membership, reason)
            case Next.ABANDON:
                self._abandon(run)
            case Next.END:
                self._after_generation(run)
            case Next.REGROUP if self.state is State.TRAINING:
                self._enter(State.REGROUPING)

    def _change(self, run: Generation, membership: Membership, reason: str) -> None:
        """Change the membership at the center while the members that stay train on."""
        membership = self._number(membership, reason)
        new = tuple(w for w in membership.worker_ids if w not in run.membership)
        self._worker_group.change(membership, self._worker_pool.states_for(new))
        run.change(membership)
        self.worker_registry.formed(membership, entering=new)
        times = self._center_manager.checkpoint_times
        if not times.collecting:  # newcomers have not kept the states voted for
            times.voted = False

    def _abandon(self, run: Generation) -> None:
        """Release the members from an exchange that cannot complete."""
        self.stragglers.pause(self._clock(), run.membership.generation)
        self._worker_group.abandon(run.membership.generation)
        self._enter(State.RECOVERING)

    def _recover(self) -> None:
        """Wait for the members to leave the failed exchange, and leave out those that do not."""
        run = self._run
        assert run is not None
        if not run.is_idle and self._clock() - self._state_since <= self._policy.answer_s:
            return
        self._worker_pool.leave_out(run, run.at_work)
        if self._is_explained(run) or self._clock() - run.broken_at > CAUSE_S:
            self._after_generation(run)

    def _after_generation(self, run: Generation) -> None:
        """End the generation: finish the run, or wait for the next one to form."""
        if not self._has_center(run):
            return
        outcome = run.outcome()
        is_stop = outcome is Outcome.STOPPED
        if is_stop or (outcome is Outcome.FINISHED and self._center_manager.is_complete):
            self.outcome = self._outcome_of_stop() if is_stop else outcome
            self._enter(State.FINISHING)
            return
        if outcome is Outcome.BROKEN and not self._is_explained(run):
            end = next(e for e in run.ended.values() if e.outcome is Outcome.BROKEN)
            self._log(f"{end.worker_id} left its exchange: {end.problem}")
            self._worker_pool.count_loss(end.worker_id, end.problem)
        is_idle = outcome is Outcome.REGROUP and self.state is State.TRAINING
        self._is_idle = is_idle and self._method.is_sync
        self.outcome = self._finished_at = None  # it may have finished with a center that was lost
        self._enter(State.WAITING)

    def _is_explained(self, run: Generation) -> bool:
        """Whether the cause of a failed exchange is known."""
        is_of_center = self._center_manager.is_lost or self._center_manager.is_new
        is_of_worker = bool(run.lost) or run.has_diverged or self._failure.error is not None
        return is_of_center or is_of_worker

    def _has_center(self, run: Generation | None) -> bool:
        """Whether the center holds the round that training continues from; if not, request it.

        Raises:
            StalledError: if the center has lacked that round for too long.
        """
        return self._center_manager.note_presence(self._ensure_center(run))

    def _ensure_center(self, run: Generation | None) -> bool:
        copy = self.worker_registry.newest_copy(since=self._first_round)
        if self._center_manager.is_lost:
            self._log(self._center_manager.rebuild(copy))
        if not self._center_manager.published:  # it is starting
            return False
        round = self._policy.round_to_go_on_from(run, copy, self._round)
        if round is None:
            return False
        if copy is not None and copy.round == round and not self._center_manager.holds(copy):
            self._center_manager.publish(copy)
            return False
        if round not in self._center_manager.published:
            return False
        if round < self._round:
            self._log(
                f"no worker has the center of round {self._round}: continuing from round {round}"
            )
        self._round = round
        self._center_manager.restart_from_newest()
        return True

    def _finish(self) -> None:
        run = self._run
        assert run is not None
        if not self._center_manager.is_collected(self._round):
            self._collect_last(run)
            return
        if self._center_manager.is_lost:  # needed only for the score, which is optional
            self._log(
                self._center_manager.rebuild(
                    self.worker_registry.newest_copy(since=self._first_round)
                )
            )
        is_complete = run.has_final_reports() and not self._waits_for_files
        if not is_complete and self._silent_s <= _SILENCE_S:
            return
        if run.last_score is not None:  # not before: earlier scores are in the reports
            self._on_score(run.last_score)
        if self.lacks_score:
            why = self._why_no_score()
            if not why:
                return
            self._log(f"{why}: the run ends without a score of its last center")
        self._enter(State.DONE)

    def _collect_last(self, run: Generation) -> None:
        if not self._holds_end():
            self._after_generation(
                run
            )  # the center was lost: whether this is the end is open again
            return
        if self.outcome is Outcome.FINISHED:
            self._finished_at = self._round
        self._center_manager.collect(run, self._round)
        if self._silent_s > _SILENCE_S:
            raise self._failure.error or StalledError(
                f"the last states of the workers did not arrive: there was no progress for "
                f"{_SILENCE_S:.0f} s; the same command with --resume resumes from the newest "
                f"checkpoint"
            )

    def _holds_end(self) -> bool:
        """Whether the center holds the round that the training ended with, and what it knew."""
        center, is_early = self._center_manager, self.outcome is Outcome.STOPPED or self.ended_by
        is_held = self._round in center.published and not center.is_lost
        return is_held and (bool(is_early) or center.is_complete)

    @property
    def _waits_for_files(self) -> bool:
        """Whether a checkpoint is being written to a storage that answers."""
        return self._recorder.is_writing and not self._recorder.is_given_up

    @property
    def lacks_score(self) -> bool:
        """Whether the run has finished without a score of its last center."""
        is_finished = self.outcome is Outcome.FINISHED
        return is_finished and not self._center_manager.is_scored(self._round)

    @property
    def _silent_s(self) -> float:
        """Seconds without progress of the last states and the score."""
        return self._clock() - max(self._state_since, self._center_manager.progress_at)

    def _why_no_score(self) -> str:
        """Return why the last center will have no score, or "" if the score may still arrive."""
        if self.stop_reason:  # the process may be killed soon
            return self.stop_reason
        if self._failure.error is not None:
            return self._failure.why
        if self._center_manager.num_lost_scores >= _MAX_LOST_SCORES:
            return f"the evaluation was abandoned {_MAX_LOST_SCORES} times"
        if self._silent_s > _SILENCE_S:
            return f"the evaluator has scored nothing for {_SILENCE_S:.0f} s"
        return ""
