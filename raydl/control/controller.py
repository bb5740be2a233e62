"""The states of a run, and what all methods share of them.

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
from collections.abc import Callable
from typing import Any

from raydl.config import TrainConfig
from raydl.control.chaos import Chaos
from raydl.control.generation import Generation
from raydl.control.keeper import CenterKeeper
from raydl.control.staff import Staff
from raydl.control.state import Recorder, State
from raydl.control.workforce import Phase, Workforce
from raydl.crew import (
    Changed,
    Collected,
    Crew,
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
    WorkerReady,
)
from raydl.errors import RaydlError
from raydl.faults import FaultPlan
from raydl.membership import Membership
from raydl.method import Method
from raydl.pace import Pace
from raydl.reports import Outcome, Record, WorkerReport
from raydl.rules import Sends

_POLL_S = 0.25
_FINISH_S = 300.0
"""The longest wait for the last states and the last evaluation, in seconds."""
_NO_FAULTS = FaultPlan()


class Controller:
    """Brings a run from its first snapshot to its end.

    Args:
        crew: the processes; the center is open.
        config: the run's settings.
        method: the run's method.
        recorder: where results go.
        first_round: the round whose snapshot the center holds.
        own_states: states of workers from a checkpoint, by id, in the order of their ranks.
        first_generation: memberships before this start.
        faults: what is inflicted on the run.
        clock: seconds, rising.
    """

    def __init__(
        self,
        crew: Crew,
        config: TrainConfig,
        method: Method,
        recorder: Recorder,
        *,
        first_round: int,
        own_states: dict[str, Any],
        first_generation: int = 0,
        faults: FaultPlan = _NO_FAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = State.WAITING
        self.outcome: Outcome | None = None
        self.generation = first_generation
        """Number of the newest membership."""
        self.num_generations = 0
        """Memberships since this start."""
        self.stop_reason = ""
        self.workforce = Workforce(
            lease_s=config.elastic.lease_s, first_step_s=config.exchange.timeout_s, clock=clock
        )
        self._said = ""
        self._recorder = recorder
        self._crew = crew
        self._config = config
        self._method = method
        self._clock = clock
        self._staff = Staff(
            crew,
            config,
            self.workforce,
            own_states=own_states,
            takes_over=method.rule.sends is Sends.WEIGHTS,
            say=self._say,
        )
        self._keeper = CenterKeeper(crew, config, first_round=first_round, clock=clock)
        self.pace = Pace()
        self.chaos = Chaos(crew, faults, clock)
        self._round = first_round
        self._run: Generation | None = None
        self._state_since = clock()
        self._stop_voted = False
        self._is_idle = False
        self._last_record: Record | None = None

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return len(self._run.at_work) if self._run else 0

    def request_stop(self, reason: str) -> None:
        """Ask for an end after the next round, with a checkpoint. Safe in a signal handler."""
        self.stop_reason = reason

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave; return (whether it will, a sentence)."""
        return self._staff.remove(worker_id)

    def step(self) -> bool:
        """Poll, decide and act once; return whether the run is done.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        for event in self._crew.poll(_POLL_S):
            self._take(event)
        if self.outcome is not Outcome.STOPPED:
            self._keeper.evaluate_newest()
        for worker_id in self._staff.lose_stuck():
            self._wait_no_more_for(worker_id)
        act = {
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.REGROUPING: self._regroup,
            State.RECOVERING: self._recover,
            State.FINISHING: self._finish,
        }.get(self.state)
        if act:
            act()
        if not self._keeper.times.collecting:  # leavers may be part of it
            self._staff.part_with_leavers()
        self._recorder.show(self.state, self.num_workers)
        return self.state is State.DONE

    def _enter(self, state: State) -> None:
        self.state = state
        self._state_since = self._clock()

    @property
    def _in_state_s(self) -> float:
        return self._clock() - self._state_since

    def _say(self, sentence: str) -> None:
        """Hand on an event, once."""
        if sentence != self._said:
            self._said = sentence
            self._recorder.event(sentence)

    # what happened

    def _take(self, event: Event) -> None:
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.workforce:
                self.workforce.came_up(worker_id, node)
            case Draining(worker_id) if worker_id in self.workforce:
                self._staff.send_away(worker_id, "drains")
            case Published():
                self._take_published(event)
            case Reported(report):
                self._take_report(report)
            case RunEnded():
                self._take_end_of(event)
            case Changed():
                self._take_change()
            case HandedIn(worker_id, state):
                self._staff.take_over(worker_id, state)
            case GaveUp(task, reason):
                self._take_failure_of(task, reason)
            case Failed(_, error):
                raise error
            case Lost(name, reason):
                self._take_loss(name, reason)
            case Evaluated():
                self._keeper.take_score(event)
                self._recorder.evaluated(event)
            case Collected():
                self._keeper.take_collected(event)
                self._recorder.checkpoint(event)

    def _take_published(self, published: Published) -> None:
        self._keeper.take_published(published)
        for number in published.faults:
            self._say(self.chaos.note(number))
        self._take_records(published.records)

    def _take_report(self, report: WorkerReport) -> None:
        self.workforce.take_report(report)
        run = self._run
        if run is None or report.worker_id not in run.present:
            return
        run.reports[report.worker_id] = report
        self.pace.note_round(report.round, report.round_s)
        if report.round > run.began_at_round:
            self.pace.resume(self._clock())
        if report.worker_id == run.membership.worker_ids[0]:
            self._take_records(report.records)

    def _take_records(self, records: tuple[Record, ...]) -> None:
        if self._run is None:
            return
        for record in records:
            before, self._last_record = self._last_record, record
            if before is None or record.num_samples > before.num_samples:
                self._staff.saw_progress()
            self._keeper.times.saw_epoch(int(record.epoch))
            self._recorder.record(record, self._run.reports)

    def _take_end_of(self, end: RunEnded) -> None:
        if end.worker_id not in self.workforce:
            return
        self.workforce.left_loop(end.worker_id)
        if self._run and self._run.take_end(end, self._clock()):
            is_pause = end.outcome in (Outcome.REGROUP, Outcome.BROKEN)
            if is_pause and self._method.is_sync:
                self.pace.pause(self._clock())

    def _take_change(self) -> None:
        """Take note that the center knows the newest membership."""

    def _take_loss(self, name: str, reason: str) -> None:
        if name in self.workforce:
            self._staff.lose(name, reason)
            self._wait_no_more_for(name)
        elif name == "center" or name.startswith("shard"):
            self._say(f"{name} was lost: {reason}")
            self._staff.count_loss(name, reason)
            self._keeper.is_lost = True

    def _wait_no_more_for(self, worker_id: str) -> None:
        if self._run and worker_id in self._run.present:
            self._run.lose(worker_id)

    def _take_failure_of(self, task: str, reason: str) -> None:
        self._keeper.gave_up(task)
        if task == "checkpoint":
            self._say(f"a checkpoint was given up: {reason}")
        elif task.startswith("state of"):
            self._staff.let_go(task.removeprefix("state of "))

    # what follows from it

    def _wait(self) -> None:
        if self.stop_reason:
            self._stop_while_waiting()
            return
        if self._keeper.is_lost:
            self._say(self._keeper.rebuild(self._run.freshest() if self._run else None))
        if not self._keeper.published:  # the center is on its way
            return
        if self._is_idle and self.workforce.named(Phase.LEFT_OUT):
            self._say("what is left to train is with workers that were left out")
            return
        waited_s = self._in_state_s
        membership, reason = self._staff.decide(
            self._run.membership if self._run else None, waited_s=waited_s
        )
        if membership is not None:
            self._form(membership, reason)
            return
        if self._run:
            self._keeper.collect(self._run, self._round)  # it may be a long wait
        self._say(self._staff.waiting(reason, waited_s, has_trained=self._run is not None))

    def _stop_while_waiting(self) -> None:
        self.outcome = Outcome.STOPPED
        if self._run is None:
            self._say(f"{self.stop_reason}: the run ends before it trained")
            self._enter(State.DONE)
        else:  # between two generations
            self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
            self._enter(State.FINISHING)

    def _number(self, membership: Membership, reason: str) -> Membership:
        """Give a membership its number, and tell it."""
        self.generation += 1
        self.num_generations += 1
        self._say(f"generation {self.generation}: {reason}")
        return dataclasses.replace(membership, generation=self.generation)

    def _form(self, membership: Membership, reason: str) -> None:
        """Let a membership train, all of it from the same round on."""
        if self._run and membership == self._run.membership:
            reason = "the same go on"
        membership = self._number(membership, reason)
        states = self._staff.states_for(membership.worker_ids)
        self._crew.form(membership, self._round, states)
        self._run = Generation(membership, self._round)
        self.workforce.formed(membership)
        self._stop_voted = False  # votes end with their generation
        self._keeper.times.voted = False
        self._is_idle = False
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run = self._run
        assert run is not None
        for sentence in self.chaos.inflict(self._last_record):
            self._say(sentence)
        if self.stop_reason and not self._stop_voted:
            self._stop_voted = True
            self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
            self._crew.vote(run.membership.generation, stop=1.0)
        self._train_on(run)
        if self.state is State.TRAINING and not run.ended:
            self._keeper.keep_checkpoints(run, is_writing=self._recorder.is_writing)

    def _train_on(self, run: Generation) -> None:
        """Watch a generation train."""
        raise NotImplementedError

    def _regroup(self) -> None:
        """Wait until all have left by vote."""
        raise NotImplementedError

    def _abandon(self, run: Generation) -> None:
        """Free all who wait in an exchange that will not complete."""
        self.pace.pause(self._clock())
        self._crew.abandon(run.membership.generation)
        self._enter(State.RECOVERING)

    def _recover(self) -> None:
        """Wait until all who can have come out of the broken exchange."""
        run = self._run
        assert run is not None
        if run.at_work and self._in_state_s <= self._answer_s():
            return
        self._leave_out(run, run.at_work)
        self._after_generation(run)

    def _answer_s(self) -> float:
        """Return how long survivors may take to come out of an exchange that was abandoned."""
        raise NotImplementedError

    def _leave_out(self, run: Generation, worker_ids: tuple[str, ...]) -> None:
        self.workforce.leave_out(worker_ids)
        for worker_id in worker_ids:
            run.lose(worker_id)

    def _after_generation(self, run: Generation) -> None:
        """Go on from the copy of the center that is furthest."""
        end = run.freshest()
        if self._keeper.is_lost:
            self._say(self._keeper.rebuild(self._source_of_center(run)))
        if not self._keeper.published:  # the center is on its way
            return
        if end is None or end.round < 0:
            self._round = self._keeper.newest
            self._say(f"no worker has the center: it goes on from round {self._round}")
        elif not self._has_center_of(run, end.round):
            return
        else:
            self._round = end.round if self._method.is_sync else self._keeper.newest
        self._keeper.published_all()
        outcome = run.outcome()
        is_over = outcome is Outcome.STOPPED or (
            outcome is Outcome.FINISHED and self._keeper.is_complete
        )
        if is_over:
            self.outcome = outcome
            self._enter(State.FINISHING)
            return
        self._is_idle = outcome is Outcome.REGROUP and self.state is State.TRAINING
        self._enter(State.WAITING)

    def _source_of_center(self, run: Generation) -> RunEnded | None:
        """Return whose copy of the center a new center starts from; None: one comes later."""
        raise NotImplementedError

    def _has_center_of(self, run: Generation, round: int) -> bool:
        """Whether the center holds a round; asks for it where it does not come by itself."""
        raise NotImplementedError

    def _finish(self) -> None:
        run = self._run
        assert run is not None
        if self._in_state_s > _FINISH_S:
            raise RaydlError(
                f"the run did not finish within {_FINISH_S:.0f} s after its last round"
            )
        if self._keeper.is_lost:
            self._say(self._keeper.rebuild(self._source_of_center(run)))
        if self._has_center_of(run, self._round):
            self._keeper.collect(run, self._round)
        is_scored = self.outcome is Outcome.STOPPED or self._keeper.is_scored(self._round)
        if self._keeper.is_collected(self._round) and is_scored and run.is_told():
            self._enter(State.DONE)
