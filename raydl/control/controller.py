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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydl.callbacks import Callback, Listeners
from raydl.config import TrainConfig
from raydl.control.center_manager import CenterManager
from raydl.control.curves import Curves
from raydl.control.generation import Generation
from raydl.control.planned_faults import PlannedFaults
from raydl.control.plateau import Plateau
from raydl.control.situation import Situation
from raydl.control.state import Recorder, State
from raydl.control.worker_pool import WorkerPool
from raydl.control.worker_registry import Copy, WorkerRegistry
from raydl.errors import StalledError
from raydl.faults import FaultPlan
from raydl.membership import Membership
from raydl.method import Method
from raydl.reports import Outcome
from raydl.rules import Sends
from raydl.stragglers import StragglerDetector
from raydl.worker_group import WorkerGroup

_POLL_S = 0.25
_SILENCE_S = 300.0
"""How long, after the last round, nothing may be heard of the last states, or of the score."""
_MAX_LOST_SCORES = 5
"""How often in a row a score may be given up before the run ends without one."""
CAUSE_S = 2.0
"""How long a broken exchange waits for news of its cause: that somebody, or the center, was
lost."""
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
        """What asked for an end that is none of the run's own: a signal."""
        self.ended_by = ""
        """The callback that ended the run; see :class:`raydl.callbacks.Listeners`."""
        self.ended_because = ""
        """What it said."""
        self.worker_registry = WorkerRegistry(
            lease_s=config.elastic.lease_s,
            first_step_s=config.exchange.timeout_s,
            max_busy_s=config.elastic.max_busy_s,
            clock=clock,
        )
        self._said = self._stop_said = ""
        self._recorder = recorder
        self._worker_group = worker_group
        self._config = config
        self._method = method
        self._clock = clock
        self._worker_pool = WorkerPool(
            worker_group,
            config,
            self.worker_registry,
            own_states=own_states,
            takes_over=method.rule.sends is Sends.WEIGHTS,
            say=self._say,
            clock=clock,
        )
        self._center_manager = CenterManager(
            worker_group, config, first_round=first_round, clock=clock
        )
        self._curves = Curves(recorder, clock)
        self.stragglers = StragglerDetector()
        self.planned_faults = PlannedFaults(worker_group, faults, clock)
        self._first_round = self._round = first_round
        self._known = Situation(
            worker_registry=self.worker_registry,
            worker_pool=self._worker_pool,
            center_manager=self._center_manager,
            curves=self._curves,
            stragglers=self.stragglers,
            planned_faults=self.planned_faults,
            plateau=Plateau(config.optimizer, num_cuts=first_cuts),
            listeners=Listeners(callbacks),
            recorder=recorder,
            is_sync=method.is_sync,
            say=self._say,
            clock=clock,
            elastic=config.elastic,
        )
        self._state_since = clock()
        self._has_moved = False  # what is to be done in a new state need not wait
        self._stop_voted = self._is_idle = False
        self._first_cuts = self._cuts_voted = first_cuts

    @property
    def _run(self) -> Generation | None:
        """The newest generation."""
        return self._known.run

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return len(self._run.at_work) if self._run else 0

    @property
    def refused(self) -> dict[str, int]:
        """How many late messages, snapshots and checkpoints were refused, by kind."""
        return self._known.refusals.counts

    def note_refused(self, process: str, refused: Mapping[str, int]) -> None:
        """Note what came too late elsewhere: how many so far, by kind."""
        self._known.note_refused(process, refused)

    def request_stop(self, reason: str) -> None:
        """Ask for an end after the next round, with a checkpoint. Safe in a signal handler."""
        self.stop_reason = reason

    @property
    def _why_stop(self) -> str:
        """Why the run should end before its time; empty: it should not."""
        known = self._known
        return self.stop_reason or known.why_error or known.listeners.ended_because

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
            self._known.take(event)
        if self.outcome is not Outcome.STOPPED and self._known.error is None:
            self._center_manager.evaluate_newest()
        for worker_id in self._worker_pool.lose_stuck():
            self._known.expect_nothing_from(worker_id)
        act = {
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.REGROUPING: self._regroup,
            State.RECOVERING: self._recover,
            State.FINISHING: self._finish,
        }.get(self.state)
        if act:
            act()
        self._part_with_leavers()
        self._recorder.show(self.state, self.worker_registry.counts())
        if self.state is State.DONE and self._known.error is not None:
            raise self._known.error
        return self.state is State.DONE

    def _enter(self, state: State) -> None:
        self.state, self._has_moved = state, True
        self._state_since = self._clock()
        if state is State.FINISHING:
            self._worker_pool.stop_hiring()

    @property
    def _in_state_s(self) -> float:
        return self._clock() - self._state_since

    def _say(self, sentence: str) -> None:
        """Hand on an event, once."""
        if sentence != self._said:
            self._said = sentence
            self._recorder.event(sentence)

    def _part_with_leavers(self) -> None:
        """Let those go who have left, and whose copy and state nobody needs any more."""
        if self.state is State.FINISHING:
            return
        run, center_manager = self._run, self._center_manager
        if not self._waits_for_files:
            center_manager.wrote()
        is_settled = self.state is State.WAITING and center_manager.is_collected(self._round)
        needed = set(run.ended) if run and not is_settled else set()
        for worker_id in self._worker_pool.part_with_leavers(
            needed | center_manager.giving | center_manager.writing
        ):
            self._known.expect_nothing_from(worker_id)

    # what follows from it

    def _wait(self) -> None:
        run = self._run
        if self._why_stop:
            self._stop_while_waiting()
            return
        if not self._has_center(run):
            return
        waited_s = self._in_state_s
        if self._is_idle and self._worker_pool.are_all_absent():
            self._say("what is left to train is with workers that were left out")
            return
        membership, reason = self._worker_pool.decide(
            run.membership if run else None, waited_s=waited_s
        )
        if membership is None:
            self.stragglers.wait_for_workers()
            if run:
                self._center_manager.collect(run, self._round)  # it may be a long wait
            self._say(self._worker_pool.waiting(reason, waited_s, has_trained=run is not None))
        elif not self._worker_pool.awaits_legacy(membership.worker_ids):
            self._form(membership, reason)

    def _stop_while_waiting(self) -> None:
        self.outcome = self._outcome_of_stop()
        if self._run is None:
            self._say(f"{self._why_stop}: the run ends before it trained")
            self._enter(State.DONE)
        else:  # between two generations
            self._say_stop()
            self._enter(State.FINISHING)

    def _say_stop(self) -> None:
        """Tell, once, why the run stops."""
        if self._why_stop != self._stop_said:
            self._stop_said = self._why_stop
            self._say(f"{self._why_stop}: stopping after this round, with a checkpoint")

    def _outcome_of_stop(self) -> Outcome:
        """Return what a stop amounts to: a run that a callback ended is as complete as any."""
        listeners = self._known.listeners
        if self.stop_reason or self._known.error or not listeners.ended_by:
            return Outcome.STOPPED
        self.ended_by, self.ended_because = listeners.ended_by, listeners.ended_because
        return Outcome.FINISHED

    def _number(self, membership: Membership, reason: str) -> Membership:
        """Give a membership its number, and tell it."""
        self.generation += 1
        self.num_generations += 1
        self._say(f"generation {self.generation}: {reason}")
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
        self._known.run = Generation(membership, self._round)
        self.worker_registry.formed(membership)
        self._center_manager.formed(membership.generation, self._round)
        self._stop_voted = self._is_idle = False  # votes end with their generation
        self._cuts_voted = self._first_cuts
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run = self._run
        assert run is not None
        if not self._center_manager.is_lost:
            self._vote_and_inflict(run)
        self._train_on(run)
        if self.state is State.TRAINING and not run.ended and self._center_knows_all:
            self._center_manager.keep_checkpoints(run, is_writing=self._recorder.is_writing)

    def _vote_and_inflict(self, run: Generation) -> None:
        for sentence in self.planned_faults.inflict(self._curves.last):
            self._say(sentence)
        if self._why_stop and not self._stop_voted:
            self._stop_voted = True
            self._say_stop()
            self._worker_group.vote(run.membership.generation, stop=1.0)
        num_cuts = self._known.plateau.num_cuts
        if num_cuts > self._cuts_voted:
            self._cuts_voted = num_cuts
            self._worker_group.vote(run.membership.generation, num_cuts=num_cuts)

    @property
    def _center_knows_all(self) -> bool:
        """Whether a vote would count: who decides knows the newest membership."""
        return True

    def _train_on(self, run: Generation) -> None:
        """Watch a generation train."""
        raise NotImplementedError

    def _regroup(self) -> None:
        """Wait until all have left by vote."""
        raise NotImplementedError

    def _abandon(self, run: Generation) -> None:
        """Free all who wait in an exchange that will not complete."""
        self.stragglers.pause(self._clock(), run.membership.generation)
        self._worker_group.abandon(run.membership.generation)
        self._enter(State.RECOVERING)

    def _recover(self) -> None:
        """Wait until all who can have come out of the broken exchange."""
        run = self._run
        assert run is not None
        if run.at_work and self._in_state_s <= self._answer_s():
            return
        self._leave_out(run, run.at_work)
        if self._is_explained(run) or self._clock() - run.broken_at > CAUSE_S:
            self._after_generation(run)

    def _answer_s(self) -> float:
        """Return how long survivors may take to come out of an exchange that was abandoned."""
        raise NotImplementedError

    def _leave_out(self, run: Generation, worker_ids: tuple[str, ...]) -> None:
        self.worker_registry.leave_out(worker_ids)
        for worker_id in worker_ids:
            run.lose(worker_id)

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
        is_of_worker = bool(run.lost) or run.has_diverged or self._known.error is not None
        return is_of_center or is_of_worker

    def _count_unexplained(self, run: Generation) -> None:
        """Let what breaks again and again, for no cause that is known, end the run some time."""
        end = next(e for e in run.ended.values() if e.outcome is Outcome.BROKEN)
        self._say(f"{end.worker_id} left its exchange: {end.problem}")
        self._worker_pool.count_loss(end.worker_id, end.problem)

    def _has_center(self, run: Generation | None) -> bool:
        """Whether the center holds the round that all go on from; if not, see to it.

        Raises:
            RaydlError: for too long it has not come to it.
        """
        return self._center_manager.note_that_it_is_here(self._sees_to_center(run))

    def _sees_to_center(self, run: Generation | None) -> bool:
        copy = self.worker_registry.freshest_copy(since=self._first_round)
        if self._center_manager.is_lost:
            self._say(self._center_manager.rebuild(copy))
        if not self._center_manager.published:  # it is on its way
            return False
        round = self._round_to_go_on_from(run, copy)
        if round is None:
            return False
        if copy is not None and copy.round == round and not self._center_manager.holds(copy):
            self._center_manager.publish(copy)
            return False
        if round not in self._center_manager.published:
            return False
        if round < self._round:
            self._say(f"no worker has the center of round {self._round}: it goes on from {round}")
        self._round = round
        self._center_manager.go_on()
        return True

    def _round_to_go_on_from(self, run: Generation | None, copy: Copy | None) -> int | None:
        """Return the furthest round, of a copy or of the center itself; None: wait for it."""
        raise NotImplementedError

    def _finish(self) -> None:
        run = self._run
        assert run is not None
        if not self._center_manager.is_collected(self._round):
            self._collect_last(run)
            return
        if self._center_manager.is_lost:  # for the score alone, which is no condition
            self._say(
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
            self._say(f"{why}: the run ends without a score of its last center")
        self._enter(State.DONE)

    def _collect_last(self, run: Generation) -> None:
        is_held = self._round in self._center_manager.published and not self._center_manager.is_lost
        if not is_held and not self._has_center(run):
            return
        if self.outcome is Outcome.FINISHED:
            self._known.finished_at = self._round
        self._center_manager.collect(run, self._round)
        if self._silent_s > _SILENCE_S:
            raise self._known.error or StalledError(
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
        if self._known.error is not None:
            return self._known.why_error
        if self._center_manager.num_lost_scores >= _MAX_LOST_SCORES:
            return f"the score was given up {_MAX_LOST_SCORES} times"
        if self._silent_s > _SILENCE_S:
            return f"the evaluator has scored nothing for {_SILENCE_S:.0f} s"
        return ""
