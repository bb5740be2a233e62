"""Brings a run from its first snapshot to its end: polls events, decides, acts.

    WAITING ──form──> TRAINING ──someone joins or leaves──> REGROUPING ──all left──┐
       ^                 │  └────somebody lost, or late───> RECOVERING ──all left──┤
       └─────────────────┼────────────────────────────────────────────────────────┘
                         └──finished or stopped──> FINISHING ──> DONE

In methods with messages workers join and leave while the others train: they stay in TRAINING
unless the center is lost, or too few workers are left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydl.config import TrainConfig
from raydl.core.callbacks import Callback, Listeners
from raydl.core.membership import Membership
from raydl.core.methods import Method
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.rules import Sends
from raydl.core.worker_group import (
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
    WorkerGroup,
    WorkerReady,
)
from raydl.elastic.center_manager import CenterManager
from raydl.elastic.failures import RunFailure, in_one_line
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
from raydl.elastic.planned_faults import PlannedFaults
from raydl.elastic.plateau import Plateau
from raydl.elastic.record_forwarder import RecordForwarder
from raydl.elastic.state import Recorder, State
from raydl.elastic.stragglers import StragglerDetector
from raydl.elastic.worker_pool import WorkerPool
from raydl.elastic.worker_registry import Copy, WorkerRegistry
from raydl.errors import InfrastructureError, NonFiniteError, StalledError
from raydl.faults import FaultPlan

_POLL_S = 0.25
_SILENCE_S = 300.0
"""How long, after the last round, nothing may be heard of the last states, or of the score."""
_MAX_LOST_SCORES = 5
"""How often in a row a score may be given up before the run ends without one."""
_TOLD_SCORES = 20
"""Scores lost in a row that are told one by one; of further ones every tenth."""
_NO_FAULTS = FaultPlan()


class Controller:
    """Brings a run from its first snapshot to its end.

    Args:
        worker_group: the processes; the center is up, or starts.
        config: the run's settings.
        method: the run's method.
        recorder: where results go.
        first_round: the round that the center starts from.
        own_states: states of workers from a checkpoint, by id, in the order of their ranks.
        first_generation: memberships before this start.
        first_cuts: cuts of the learning rate before this start.
        faults: what is inflicted on the run.
        callbacks: hear of each score of the center, and may end the run.
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
        own_states: dict[str, Any],
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
        """The signal that asked for an end; empty: none did."""
        self.ended_by = ""
        """The callback that ended the run; see ``raydl.core.callbacks.Listeners``."""
        self.ended_because = ""
        """The reason that it gave."""
        self.worker_registry = WorkerRegistry(
            lease_s=config.elastic.lease_s,
            first_step_s=config.exchange.timeout_s,
            max_busy_s=config.elastic.max_busy_s,
            clock=clock,
        )
        self.stragglers = StragglerDetector()
        self.planned_faults = PlannedFaults(worker_group, faults, clock)
        self._recorder = recorder
        self._worker_group = worker_group
        self._config = config
        self._method = method
        self._clock = clock
        self._logged = self._logged_stop = ""
        self._worker_pool = WorkerPool(
            worker_group,
            config,
            self.worker_registry,
            own_states=own_states,
            takes_over=method.rule.sends is Sends.WEIGHTS,
            log=self._log,
            clock=clock,
        )
        self._center_manager = CenterManager(
            worker_group, config, first_round=first_round, clock=clock
        )
        self._failure = RunFailure(config.elastic, self._log)
        self._policy = self._make_policy()
        self._curves = RecordForwarder(recorder, clock)
        self._plateau = Plateau(config.optimizer, num_cuts=first_cuts)
        self._listeners = Listeners(callbacks)
        self._refusals = Refusals()
        self._run: Generation | None = None  # the newest generation
        self._first_round = self._round = first_round
        self._finished_at: int | None = None  # the round with which all is trained
        self._state_since = clock()
        self._has_moved = False  # what is to be done in a new state need not wait
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
        """How many late messages, snapshots and checkpoints were refused, by kind."""
        return self._refusals.counts

    def note_refused(self, process: str, refused: Mapping[str, int]) -> None:
        """Note what a process has refused so far, by kind, and log what is news."""
        for sentence in self._refusals.note_refused(process, refused):
            self._log(sentence)

    def request_stop(self, reason: str) -> None:
        """Ask for an end after the next round, with a checkpoint. Safe in a signal handler."""
        self.stop_reason = reason

    @property
    def _why_stop(self) -> str:
        """Why the run should end before its time; empty: it should not."""
        return self.stop_reason or self._failure.why or self._listeners.ended_because

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave; return (whether it will, a sentence)."""
        return self._worker_pool.remove(worker_id)

    def step(self) -> bool:
        """Poll, decide and act once; return whether the run is done.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        timeout_s, self._has_moved = 0.0 if self._has_moved else _POLL_S, False
        for event in self._worker_group.poll(timeout_s):
            self._on_event(event)
        if self.outcome is not Outcome.STOPPED and self._failure.error is None:
            self._center_manager.evaluate_newest()
        for worker_id in self._worker_pool.lose_stuck():
            self._expect_nothing_from(worker_id)
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

    def _enter(self, state: State) -> None:
        self.state, self._has_moved = state, True
        self._state_since = self._clock()
        if state is State.FINISHING:
            self._worker_pool.stop_requesting()

    @property
    def _in_state_s(self) -> float:
        return self._clock() - self._state_since

    def _log(self, sentence: str) -> None:
        """Log what happened, once."""
        if sentence != self._logged:
            self._logged = sentence
            self._recorder.event(sentence)

    def _release_leavers(self) -> None:
        """End workers that have left, once nobody needs their copy and state any more."""
        if self.state is State.FINISHING:
            return
        run, center_manager = self._run, self._center_manager
        if not self._waits_for_files:
            center_manager.wrote()
        is_settled = self.state is State.WAITING and center_manager.is_collected(self._round)
        needed = set(run.ended) if run and not is_settled else set()
        for worker_id in self._worker_pool.release_leavers(
            needed | center_manager.giving | center_manager.writing
        ):
            self._expect_nothing_from(worker_id)

    # events

    def _on_event(self, event: Event) -> None:
        """Note what happened.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.worker_registry:
                self.worker_registry.came_up(worker_id, node)
                self._worker_pool.hand_over()
            case Draining(worker_id) if worker_id in self.worker_registry:
                self._worker_pool.send_away(worker_id, "drains")
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
                    f"hold the interpreter lock, or a large state is on its way; it is waited for, "
                    f"{self._config.elastic.max_busy_s:g} s at most (elastic.max_busy_s)"
                )
            case Evaluated() if self._center_manager.note_score(event):
                self._on_score(event)
            case Scoring(num_samples):
                self._center_manager.note_scoring(num_samples)
            case Collected():
                self._center_manager.note_collected(event)
                is_last = event.snapshot.progress.round == self._finished_at
                self._recorder.checkpoint(dataclasses.replace(event, is_last=is_last))
            case StatesLost(round, reason):
                self._center_manager.lost_states(round)
                self._log(f"a checkpoint was given up: {reason}")

    def _on_error(self, name: str, error: Exception) -> None:
        """Go on without a worker that raised, or stop after a checkpoint and raise it then.

        Raises:
            Exception: the error, where no checkpoint can come of it: before the first round, at
                the center, and where the run stops already.
        """
        if self._failure.error is not None:
            self._on_further_error(name, error)
            return
        if name == "center" and isinstance(error, NonFiniteError) and self._run is not None:
            self._note_divergence(name, error, self._run)
            # It starts again, from the newest good snapshot.
            self._center_manager.is_lost = self._failure.error is None
            return
        why = f"{name} raised {in_one_line(error)}"
        if name in self.worker_registry:
            why = self._worker_pool.note_error(name, error)
            if not why:
                self._expect_nothing_from(name)
                return
        if self._run is None or not (self._is_needed(name) or name == "evaluator"):
            raise error
        self._failure.stop_with(name, error, why)
        self._end_failed(name, error)

    def _is_needed(self, name: str) -> bool:
        """Whether a process is a worker of a run that may go on."""
        return name in self.worker_registry and self._worker_pool.is_requesting

    def _on_further_error(self, name: str, error: Exception) -> None:
        """Note an error while the run stops: the same mistake in another process, as a rule."""
        assert self._failure.error is not None
        if name == "evaluator":
            return
        if not self._is_needed(name) or not self._failure.note_further(name):
            raise self._failure.error  # the last checkpoint itself fails
        self._end_failed(name, error)

    def _end_failed(self, name: str, error: Exception) -> None:
        """End the process of a worker whose machine failed: its state is of no use any more."""
        if isinstance(error, InfrastructureError) and name in self.worker_registry:
            self._worker_pool.end(name)
            self._expect_nothing_from(name)

    def _note_divergence(self, name: str, error: NonFiniteError, run: Generation) -> None:
        self._failure.note_divergence(
            name, error, generation=run.membership.generation, epoch=int(self._curves.epoch)
        )

    def _on_score(self, evaluated: Evaluated) -> None:
        self._recorder.evaluated(evaluated)
        self._listeners.note_score(evaluated.without_center())
        if not self._worker_pool.is_requesting:  # no round is left in which to learn more slowly
            return
        sentence = self._plateau.note_score(evaluated.metrics)
        if sentence:
            self._log(sentence)

    def _on_published(self, published: Published) -> None:
        if self._run is not None:
            self._run.num_snapshots += 1
        self._center_manager.note_published(published)
        for number, worker_id in published.faults:
            self._log(self.planned_faults.note(number, worker_id))
        self.note_refused(published.process, published.refused)
        self._add_records(published.records, f"center {published.process}", published.told_s)

    def _on_report(self, report: WorkerReport) -> None:
        self.worker_registry.note_report(report)
        run = self._run
        if run is None or not run.is_present(report.worker_id):
            return
        run.reports[report.worker_id] = report
        self.stragglers.note_round(report.round, report.round_s)
        self.stragglers.resume(self._clock(), report.generation)
        if report.worker_id == run.membership.worker_ids[0]:
            self._add_records(report.records, report.worker_id, report.told_s)

    def _add_records(self, records: tuple[Record, ...], sender: str, told_s: float) -> None:
        run = self._run
        if run and self._curves.add_records(records, run.reports, sender=sender, told_s=told_s):
            self._worker_pool.saw_progress()
            self._center_manager.times.saw_epoch(self._curves.epoch)

    def _on_run_ended(self, end: RunEnded) -> None:
        run = self._run
        if end.worker_id not in self.worker_registry:
            return
        if run and run.is_present(end.worker_id):
            if not run.note_end(end, self._clock()):
                return  # of a generation before this one
            if end.error is not None:
                self._note_divergence(end.worker_id, end.error, run)
            is_pause = end.outcome in (Outcome.REGROUP, Outcome.BROKEN)
            if is_pause and self._method.is_sync:
                self.stragglers.pause(self._clock(), run.membership.generation)
            self._note_if_nobody_trains(run)
        age = end.round, end.num_changes, end.copy_generation, end.ledger_round
        copy = Copy(end.worker_id, *age) if end.round >= 0 else None
        self.worker_registry.left_loop(end.worker_id, copy)

    def _note_if_nobody_trains(self, run: Generation) -> None:
        """Begin a pause where nobody is at work; by messages one alone trains on."""
        if not run.at_work:
            self.stragglers.pause(self._clock(), run.membership.generation)

    def _on_loss(self, name: str, reason: str) -> None:
        if name in self.worker_registry:
            self._worker_pool.lose(name, reason)
        elif name == "center" or name.startswith("shard"):
            self._log(f"{name} was lost: {reason}")
            self._worker_pool.count_loss(name, reason)
            self._center_manager.is_lost = True
        self._expect_nothing_from(name)

    def _expect_nothing_from(self, name: str) -> None:
        """Go on without what a process was asked for that has gone."""
        self._center_manager.lost(name)
        if self._run and self._run.is_present(name):
            self._run.lose(name)
            self._note_if_nobody_trains(self._run)

    def _on_given_up(self, task: str, reason: str) -> None:
        self._center_manager.gave_up(task)
        if task == "checkpoint":
            self._log(f"a checkpoint was given up: {reason}")
        elif task == "evaluation":
            self._center_manager.num_lost_scores += 1
            self._log_lost_score(self._center_manager.num_lost_scores, reason)
        elif task.startswith("saved state of"):
            self._log(f"{task.removeprefix('saved state of ')} starts at the center: {reason}")
        elif task.startswith("state of"):
            self._worker_pool.note_handed_in(task.removeprefix("state of "), None, reason)
        elif task.startswith("handover to"):
            self._worker_pool.note_not_taken_over(task.removeprefix("handover to "), reason)

    def _log_lost_score(self, number: int, reason: str) -> None:
        """Log each of the first scores that are lost in a row, then every tenth."""
        if number == 1:
            self._log(f"a score was given up: {reason}")
        elif number <= _TOLD_SCORES or number % 10 == 0:
            self._log(f"a score was given up, {number} in a row by now: {reason}")

    # states

    def _wait(self) -> None:
        run = self._run
        if self._why_stop:
            self._stop_while_waiting()
            return
        if not self._has_center(run):
            return
        waited_s = self._in_state_s
        if self._is_idle and self._worker_pool.are_all_absent():
            self._log("what is left to train is with workers that were left out")
            return
        membership, reason = self._worker_pool.decide(
            run.membership if run else None, waited_s=waited_s
        )
        if membership is None:
            self.stragglers.wait_for_workers()
            if run:
                self._center_manager.collect(run, self._round)  # it may be a long wait
            self._log(self._worker_pool.waiting(reason, waited_s, has_trained=run is not None))
        elif not self._worker_pool.awaits_handover(membership.worker_ids):
            self._form(membership, reason)

    def _stop_while_waiting(self) -> None:
        self.outcome = self._outcome_of_stop()
        if self._run is None:
            self._log(f"{self._why_stop}: the run ends before it trained")
            self._enter(State.DONE)
        else:  # between two generations
            self._log_stop()
            self._enter(State.FINISHING)

    def _log_stop(self) -> None:
        """Log, once, why the run stops."""
        if self._why_stop != self._logged_stop:
            self._logged_stop = self._why_stop
            self._log(f"{self._why_stop}: stopping after this round, with a checkpoint")

    def _outcome_of_stop(self) -> Outcome:
        """Return the state after a stop: a run that a callback ended is as complete as any."""
        listeners = self._listeners
        if self.stop_reason or self._failure.error or not listeners.ended_by:
            return Outcome.STOPPED
        self.ended_by, self.ended_because = listeners.ended_by, listeners.ended_because
        return Outcome.FINISHED

    def _number(self, membership: Membership, reason: str) -> Membership:
        """Give a membership its number, and tell it."""
        self.generation += 1
        self.num_generations += 1
        self._log(f"generation {self.generation}: {reason}")
        numbered = dataclasses.replace(membership, generation=self.generation)
        self._recorder.formed(numbered, reason)
        return numbered

    def _form(self, membership: Membership, reason: str) -> None:
        """Let a membership train, all of it from the same round on."""
        if self._run and membership == self._run.membership:
            reason = "the same go on"
        membership = self._number(membership, reason)
        states = self._worker_pool.states_for(membership.worker_ids)
        self._worker_group.form(membership, self._round, states)
        self._run = Generation(membership, self._round, is_changing=not self._method.is_sync)
        self.worker_registry.formed(membership)
        self._center_manager.formed(membership.generation, self._round)
        self._stop_voted = self._is_idle = False  # votes end with their generation
        self._cuts_voted = self._first_cuts
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run, center = self._run, self._center_manager
        assert run is not None
        if not center.is_lost:
            if run.is_changing:  # a vote would not count: the center decides
                return
            self._vote_and_inflict(run)
        self._follow(self._policy.watch(run), run)
        if self.state is State.TRAINING and not run.ended and not run.is_changing:
            center.keep_checkpoints(run, is_writing=self._recorder.is_writing)

    def _vote_and_inflict(self, run: Generation) -> None:
        for sentence in self.planned_faults.inflict(self._curves.last):
            self._log(sentence)
        if self._why_stop and not self._stop_voted:
            self._stop_voted = True
            self._log_stop()
            self._worker_group.vote(run.membership.generation, stop=1.0)
        num_cuts = self._plateau.num_cuts
        if num_cuts > self._cuts_voted:
            self._cuts_voted = num_cuts
            self._worker_group.vote(run.membership.generation, num_cuts=num_cuts)

    def _regroup(self) -> None:
        assert self._run is not None
        self._follow(self._policy.watch_regroup(self._run), self._run)

    def _follow(self, action: Next | Change, run: Generation) -> None:
        """Do what the policy has decided."""
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
        """Let the center know members that come and go while the others train."""
        membership = self._number(membership, reason)
        new = tuple(w for w in membership.worker_ids if w not in run.membership)
        self._worker_group.change(membership, self._worker_pool.states_for(new))
        run.change(membership)
        self.worker_registry.formed(membership)
        if not self._center_manager.times.collecting:  # who comes has not kept what others have
            self._center_manager.times.voted = False

    def _abandon(self, run: Generation) -> None:
        """Free all who wait in an exchange that will not complete."""
        self.stragglers.pause(self._clock(), run.membership.generation)
        self._worker_group.abandon(run.membership.generation)
        self._enter(State.RECOVERING)

    def _recover(self) -> None:
        """Wait until all who can have come out of the broken exchange."""
        run = self._run
        assert run is not None
        if run.at_work and self._in_state_s <= self._policy.answer_s:
            return
        self._worker_pool.leave_out(run, run.at_work)
        if self._is_explained(run) or self._clock() - run.broken_at > CAUSE_S:
            self._after_generation(run)

    def _after_generation(self, run: Generation) -> None:
        """Go on from the copy of the center that is furthest."""
        if not self._has_center(run):
            return
        outcome = run.outcome()
        is_stop = outcome is Outcome.STOPPED
        if is_stop or (outcome is Outcome.FINISHED and self._center_manager.is_complete):
            self.outcome = self._outcome_of_stop() if is_stop else outcome
            self._enter(State.FINISHING)
            return
        if outcome is Outcome.BROKEN and not self._is_explained(run):
            self._count_unexplained(run)
        is_idle = outcome is Outcome.REGROUP and self.state is State.TRAINING
        self._is_idle = is_idle and self._method.is_sync
        self._enter(State.WAITING)

    def _is_explained(self, run: Generation) -> bool:
        """Whether it is known why an exchange did not complete."""
        is_of_center = self._center_manager.is_lost or self._center_manager.is_new
        is_of_worker = bool(run.lost) or run.has_diverged or self._failure.error is not None
        return is_of_center or is_of_worker

    def _count_unexplained(self, run: Generation) -> None:
        """End the run after too many failures in a row without a known cause."""
        end = next(e for e in run.ended.values() if e.outcome is Outcome.BROKEN)
        self._log(f"{end.worker_id} left its exchange: {end.problem}")
        self._worker_pool.count_loss(end.worker_id, end.problem)

    def _has_center(self, run: Generation | None) -> bool:
        """Whether the center holds the round that all go on from; if not, see to it.

        Raises:
            RaydlError: for too long it has not come to it.
        """
        return self._center_manager.note_presence(self._sees_to_center(run))

    def _sees_to_center(self, run: Generation | None) -> bool:
        copy = self.worker_registry.freshest_copy(since=self._first_round)
        if self._center_manager.is_lost:
            self._log(self._center_manager.rebuild(copy))
        if not self._center_manager.published:  # it is on its way
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
            self._log(f"no worker has the center of round {self._round}: it goes on from {round}")
        self._round = round
        self._center_manager.go_on()
        return True

    def _finish(self) -> None:
        run = self._run
        assert run is not None
        if not self._center_manager.is_collected(self._round):
            self._collect_last(run)
            return
        if self._center_manager.is_lost:  # for the score alone, which is no condition
            self._log(
                self._center_manager.rebuild(
                    self.worker_registry.freshest_copy(since=self._first_round)
                )
            )
        is_told = run.is_told() and not self._waits_for_files
        if not is_told and self._silent_s <= _SILENCE_S:
            return
        if self.lacks_score:
            why = self._why_no_score()
            if not why:
                return
            self._log(f"{why}: the run ends without a score of its last center")
        self._enter(State.DONE)

    def _collect_last(self, run: Generation) -> None:
        is_held = self._round in self._center_manager.published and not self._center_manager.is_lost
        if not is_held and not self._has_center(run):
            return
        if self.outcome is Outcome.FINISHED:
            self._finished_at = self._round
        self._center_manager.collect(run, self._round)
        if self._silent_s > _SILENCE_S:
            raise self._failure.error or StalledError(
                f"the last states of the workers did not come: nothing was heard of them for "
                f"{_SILENCE_S:.0f} s; the same command with --resume goes on from the newest "
                f"checkpoint"
            )

    @property
    def _waits_for_files(self) -> bool:
        """Whether a checkpoint is being written, to a storage that answers."""
        return self._recorder.is_writing and not self._recorder.is_given_up

    @property
    def lacks_score(self) -> bool:
        """Whether the run is finished, and its last center has no score."""
        is_finished = self.outcome is Outcome.FINISHED
        return is_finished and not self._center_manager.is_scored(self._round)

    @property
    def _silent_s(self) -> float:
        """Seconds since something was heard of what the end waits for."""
        return self._clock() - max(self._state_since, self._center_manager.heard_at)

    def _why_no_score(self) -> str:
        """Return why the last center will have no score; empty: it may come yet."""
        if self.stop_reason:  # whoever asked may not wait so long
            return self.stop_reason
        if self._failure.error is not None:
            return self._failure.why
        if self._center_manager.num_lost_scores >= _MAX_LOST_SCORES:
            return f"the score was given up {_MAX_LOST_SCORES} times"
        if self._silent_s > _SILENCE_S:
            return f"the evaluator has scored nothing for {_SILENCE_S:.0f} s"
        return ""
