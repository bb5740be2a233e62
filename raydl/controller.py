"""The controller: poll, decide, act; one iteration per call.

    WAITING ──form──> TRAINING ──someone joins or leaves──> REGROUPING ──all left──┐
       ^                 │  └────somebody lost, or late───> RECOVERING ──all left──┤
       └─────────────────┼────────────────────────────────────────────────────────┘
                         └──finished or stopped──> FINISHING ──> DONE

In methods with messages workers join and leave while the others train: they stay in TRAINING
unless the center is lost, or too few workers are left.

It owns no process and no file: a crew acts for it, a recorder takes what it learns. So it
is tested with fakes, a step at a time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from raydl.checkpoint_times import CheckpointTimes
from raydl.config import TrainConfig
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
from raydl.errors import ProcessLostError, RaydlError, ResourceError
from raydl.faults import FaultPlan
from raydl.generation import Generation
from raydl.membership import Membership, next_membership
from raydl.method import Method
from raydl.pace import Pace, late_workers
from raydl.reports import Outcome, Record, WorkerReport
from raydl.rules import Sends
from raydl.run_state import Recorder, State
from raydl.workforce import Phase, Workforce

_POLL_S = 0.25
_NO_FAULTS = FaultPlan()
_FINISH_S = 300.0
"""The longest wait for the last states and the last evaluation, in seconds."""
_ANSWER_S = 0.75
"""The least time that a survivor has to come out of an abandoned exchange, in seconds."""
_CAUSE_S = 2.0
"""How long a broken exchange with the center waits for news that the center was lost."""
_PATIENCE_S = 5.0
"""How long a run that has its fewest workers waits for more before it starts."""


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
        self.num_generations = 0
        self.stop_reason = ""
        self.faults_fired: list[str] = []
        self.longest_pause_s = 0.0
        self.workforce = Workforce(
            lease_s=config.elastic.lease_s, first_step_s=config.exchange.timeout_s, clock=clock
        )
        self._crew = crew
        self._config = config
        self._method = method
        self._recorder = recorder
        self._clock = clock
        self._round = first_round
        self._own_states = dict(own_states)
        self._legacies: list[dict[str, Any]] = []
        self._generation = first_generation
        self._state_since = clock()
        self._saved_order = list(own_states)  # by rank
        self._run: Generation | None = None
        self._published: tuple[int, ...] = (first_round,)
        self._publishing = ""
        self._evaluating = self._evaluated = first_round
        self._stop_voted = False
        self._is_changing = False
        self._center_lost = False
        self._is_idle = False
        self._checkpoints = CheckpointTimes(config, clock())
        self._last_collected = -1
        self._num_restarts = 0
        self._max_workers = max(1, config.scaling.max_workers)
        self._pace = Pace()
        self._paused_at: float | None = None
        self._last_record: Record | None = None
        self._center_faults = list(faults.for_center)
        self._is_complete = True
        self._has_new_center = False
        self._is_regroup_voted = False
        self._began_at = clock()
        self._faults = faults
        self._said = ""
        for worker_id in self._saved_order[: self._max_workers]:
            self._ask(worker_id)
        self._ask_for_missing()

    @property
    def generation(self) -> int:
        """Number of the newest membership; 0: there was none."""
        return self._generation

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return len(self._run.at_work) if self._run else 0

    def request_stop(self, reason: str) -> None:
        """Ask for an end after the next round, with a checkpoint. Safe in a signal handler."""
        self.stop_reason = reason

    def step(self) -> bool:
        """Poll, decide and act once; return whether the run is done.

        Raises:
            RaydlError: what ends the run; a user's own exception comes as it is.
        """
        for event in self._crew.poll(_POLL_S):
            self._take(event)
        self._evaluate_newest()
        for worker_id, seconds in self.workforce.stuck():
            self._crew.end(worker_id)
            self._lose_worker(worker_id, f"it is stuck, in one step for {seconds:.0f} s")
        act = {
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.REGROUPING: self._regroup,
            State.RECOVERING: self._recover,
            State.FINISHING: self._finish,
        }.get(self.state)
        if act:
            act()
        if not self._checkpoints.collecting:  # leavers may be part of it
            self._part_with_leavers()
        self._recorder.show(self.state, self.num_workers)
        return self.state is State.DONE

    def _enter(self, state: State) -> None:
        self.state = state
        self._state_since = self._clock()

    def _say(self, sentence: str) -> None:
        """Hand on an event, once."""
        if sentence != self._said:
            self._said = sentence
            self._recorder.event(sentence)

    # who is asked for, who is let go

    def _ask(self, worker_id: str) -> None:
        self.workforce.add(worker_id)
        self._crew.ask(worker_id)

    def _ask_for_missing(self) -> None:
        while self.workforce.num_coming < self._max_workers:
            self._ask(self.workforce.new_id())

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave because the user wants it; return (whether it will, a sentence).

        Another one takes its place only if too few would be left.
        """
        if worker_id not in self.workforce:
            there = ", ".join(e.worker_id for e in self.workforce.entries())
            return False, f"there is no worker {worker_id}; there are {there}"
        self._max_workers = max(self._config.scaling.min_workers, self._max_workers - 1)
        self._send_away(worker_id, "was removed")
        return True, f"{worker_id} leaves after its next exchange"

    def _send_away(self, worker_id: str, cause: str) -> None:
        entry = self.workforce[worker_id]
        if entry.phase is Phase.LEAVING:
            return
        self._say(f"{worker_id} {cause}")
        if entry.phase in (Phase.STARTING, Phase.READY):
            self._crew.end(worker_id)
            self.workforce.remove(worker_id, cause)
        else:
            self.workforce.send_away(worker_id, cause)
        self._ask_for_missing()

    def _part_with_leavers(self) -> None:
        """Take over the states of those who have left, then let them go."""
        for worker_id in self.workforce.named(Phase.LEAVING):
            entry = self.workforce[worker_id]
            if entry.in_loop or entry.is_parting:
                continue
            entry.is_parting = True
            if self._method.rule.sends is Sends.WEIGHTS:
                self._crew.hand_in(worker_id)
            else:  # its replica is the center's copy
                self._let_go(worker_id)

    def _let_go(self, worker_id: str) -> None:
        if worker_id in self.workforce:
            self._crew.end(worker_id)
            self.workforce.remove(worker_id, self.workforce[worker_id].cause)

    # what happened

    def _take(self, event: Event) -> None:
        match event:
            case WorkerReady(worker_id, node) if worker_id in self.workforce:
                self.workforce.came_up(worker_id, node)
            case Draining(worker_id) if worker_id in self.workforce:
                self._send_away(worker_id, "drains")
            case Published():
                self._take_published(event)
            case Reported(report):
                self._take_report(report)
            case RunEnded():
                self._take_end_of(event)
            case Changed():
                self._is_changing = False
            case HandedIn(worker_id, state):
                self._legacies.append(state)
                self._let_go(worker_id)
            case GaveUp(task, reason):
                self._take_failure_of(task, reason)
            case Failed(_, error):
                raise error
            case Lost(name, reason):
                self._take_loss(name, reason)
            case Evaluated():  # of the round asked for, or a newer one
                self._evaluated = self._evaluating = event.round
                self._recorder.evaluated(event)
            case Collected(snapshot, _):
                self._last_collected = snapshot.round
                self._checkpoints.done(self._clock(), snapshot.epoch)
                self._recorder.checkpoint(event)

    def _take_published(self, published: Published) -> None:
        self._published, self._is_complete = published.rounds, published.is_complete
        for number in published.faults:
            self._note_fault(self._faults.faults[number].sentence)
        self._take_records(published.records)

    def _note_fault(self, sentence: str) -> None:
        self.faults_fired.append(sentence)
        self._say(sentence)

    def _take_report(self, report: WorkerReport) -> None:
        self.workforce.take_report(report)
        run = self._run
        if run is None or report.worker_id not in run.present:
            return
        run.reports[report.worker_id] = report
        if report.round_s:
            self._pace.note_round(report.round_s)
        if self._paused_at is not None and report.round > run.began_at_round:
            pause_s, self._paused_at = self._clock() - self._paused_at, None
            self._pace.note_pause(pause_s)
            self.longest_pause_s = max(self.longest_pause_s, pause_s)
        if report.worker_id == run.membership.worker_ids[0]:
            self._take_records(report.records)

    def _take_records(self, records: tuple[Record, ...]) -> None:
        for record in records if self._run else ():
            before, self._last_record = self._last_record, record
            if before is None or record.num_samples > before.num_samples:
                self._num_restarts = 0
            self._checkpoints.saw_epoch(int(record.epoch))
            self._recorder.record(record, self._run.reports if self._run else {})

    def _take_end_of(self, end: RunEnded) -> None:
        if end.worker_id not in self.workforce:
            return
        self.workforce.left_loop(end.worker_id)
        run = self._run
        if (
            run
            and end.worker_id in run.present
            and end.generation == run.entered_with(end.worker_id)
        ):
            run.ended[end.worker_id] = end
            if end.outcome is Outcome.BROKEN:
                run.broken_at = min(run.broken_at, self._clock())
            if self._paused_at is None and end.outcome in (Outcome.REGROUP, Outcome.BROKEN):
                self._paused_at = self._clock()

    def _take_loss(self, name: str, reason: str) -> None:
        if name in self.workforce:
            self._lose_worker(name, reason)
        elif name == "center" or name.startswith("shard"):
            self._count_restart(name, reason)
            self._say(f"{name} was lost: {reason}")
            self._center_lost = True

    def _lose_worker(self, worker_id: str, reason: str) -> None:
        self._say(f"{worker_id} was lost: {reason}")
        self._count_restart(worker_id, reason)
        if self._run and worker_id in self._run.present:
            self._run.lose(worker_id)
        self.workforce.remove(worker_id, "was lost")
        self._ask_for_missing()

    def _count_restart(self, name: str, reason: str) -> None:
        self._num_restarts += 1
        if self._num_restarts > self._config.elastic.max_restarts:
            raise ProcessLostError(
                name,
                f"{reason}; {self._num_restarts} processes in a row were lost while the training "
                f"did not go on (elastic.max_restarts)",
            )

    def _take_failure_of(self, task: str, reason: str) -> None:
        match task:
            case "checkpoint":
                self._checkpoints.voted = self._checkpoints.collecting = False
                self._say(f"a checkpoint was given up: {reason}")
            case "evaluation":
                self._evaluating = self._evaluated
            case "publication":
                self._publishing = ""
            case _:  # the state of a worker that left
                self._let_go(task.removeprefix("state of "))

    # what follows from it

    def _decide(self, *, waited_s: float = 0.0) -> tuple[Membership | None, str]:
        """Return who should train next, and why; the generation's number is yet to come."""
        scaling = self._config.scaling
        candidates = self.workforce.candidates(waited_s)
        if self._run is None and self._config.method.group_size > 1:
            ready = tuple(sorted(candidates.ready, key=self._place))
            candidates = dataclasses.replace(candidates, ready=ready)
        return next_membership(
            self._run.membership if self._run else None,
            candidates,
            min_workers=max(1, scaling.min_workers),
            max_workers=self._max_workers,
            patience_s=_PATIENCE_S,
            group_size=self._config.method.group_size,
        )

    def _place(self, worker_id: str) -> tuple[str, int]:
        """Return the sort key of a worker: in groups as they were; else by node."""
        if worker_id in self._saved_order:
            return "", self._saved_order.index(worker_id)
        return self.workforce[worker_id].node, int(worker_id.lstrip("w"))

    def _wait(self) -> None:
        scaling = self._config.scaling
        waited_s = self._clock() - self._state_since
        if self.stop_reason:
            self._stop_while_waiting()
            return
        if self._center_lost:
            self._rebuild_center()
        if self._is_idle and self.workforce.named(Phase.LEFT_OUT):
            self._say("what is left to train is with workers that were left out")
            return
        membership, reason = self._decide(waited_s=waited_s)
        if membership is not None:
            self._form(membership, reason)
            return
        missing = f"; waiting for {self._crew.waiting_for()}" if waited_s > _PATIENCE_S else ""
        self._say(f"{reason}{missing}")
        if self._run and not self._is_collected and not self._checkpoints.collecting:
            self._collect(self._run)  # it may be a long wait
        if waited_s > scaling.start_timeout_s:
            raise ResourceError(
                f"{reason} after {waited_s:.0f} s; waiting for {self._crew.waiting_for()}; "
                f"lower scaling.num_workers or raise scaling.start_timeout_s"
            )

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
        self._generation += 1
        self.num_generations += 1
        self._say(f"generation {self._generation}: {reason}")
        return dataclasses.replace(membership, generation=self._generation)

    def _form(self, membership: Membership, reason: str) -> None:
        if self._run and membership == self._run.membership:
            reason = "the center is back" if self._has_new_center else "the same go on"
        membership = self._number(membership, reason)
        self._is_changing = not self._method.is_sync
        self._crew.form(membership, self._round, self._states_for(membership.worker_ids))
        self._run = Generation(membership, self._round)
        self.workforce.formed(membership)
        self._stop_voted = False  # votes end with their generation
        self._checkpoints.voted = False
        self._is_idle = self._has_new_center = False
        self._enter(State.TRAINING)

    def _states_for(self, worker_ids: tuple[str, ...]) -> dict[str, Any]:
        """Return what newcomers start from besides the center: their own, or a leaver's."""
        states = {}
        for worker_id in worker_ids:
            if worker_id in self._own_states:
                states[worker_id] = self._own_states.pop(worker_id)
            elif self._legacies and not self.workforce[worker_id].has_trained:
                states[worker_id] = self._legacies.pop(0)
        return states

    def _train(self) -> None:
        run = self._run
        assert run is not None
        self._inflict_on_center()
        if self._is_changing:
            return
        if self.stop_reason and not self._stop_voted:
            self._stop_voted = True
            self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
            self._crew.vote(run.membership.generation, stop=1.0)
        if self._method.is_sync:
            self._train_in_rounds(run)
        else:
            self._train_with_messages(run)
        if self.state is State.TRAINING and not run.ended:
            self._keep_checkpoints(run)

    def _train_in_rounds(self, run: Generation) -> None:
        if run.lost or run.is_broken:
            self._abandon(run)
        elif not run.at_work:
            self._after_generation(run)
        elif not run.ended and not self._leave_out_late(run):
            self._regroup_if_wanted(run)

    def _regroup_if_wanted(self, run: Generation) -> None:
        if self._center_lost:
            self._rebuild_center()
            self._has_new_center = True
            return
        membership, reason = self._decide()
        if membership == run.membership:
            if not (self._has_new_center and self._published):
                return
            reason = "the center is back"
        self._say(f"{reason}: regrouping after this round")
        self._crew.vote(run.membership.generation, regroup=1.0)
        self._enter(State.REGROUPING)

    def _leave_out_late(self, run: Generation) -> bool:
        """Go on without workers that the others wait for beyond all that is usual."""
        elastic = self._config.elastic
        if not elastic.leave_out_slow or not run.membership.num_workers > 1:
            return False
        late = late_workers(
            self.workforce.waiting_s(run.at_work),
            grace_s=self._pace.grace_s(),
            quorum=max(elastic.quorum, self._config.scaling.min_workers / len(run.at_work)),
        )
        if late:
            self.workforce.leave_out(late)
            for worker_id in late:
                run.lose(worker_id)
            self._abandon(run)
        return bool(late)

    def _abandon(self, run: Generation) -> None:
        """Free all who wait in an exchange that will not complete."""
        self._paused_at = self._clock()
        self._crew.abandon(run.membership.generation)
        self._enter(State.RECOVERING)

    def _recover(self) -> None:
        run = self._run
        assert run is not None
        if run.at_work and self._clock() - self._state_since <= self._answer_s():
            return
        if run.at_work:
            self.workforce.leave_out(run.at_work)
            for worker_id in run.at_work:
                run.lose(worker_id)
        self._after_generation(run)

    def _answer_s(self) -> float:
        """Return how long survivors may take to come out of an exchange that was abandoned."""
        if not self._method.is_sync:  # nobody waits but for the center
            return self._config.elastic.lease_s
        return max(_ANSWER_S, min(self._pace.grace_s(), self._config.exchange.timeout_s))

    def _regroup(self) -> None:
        run = self._run
        assert run is not None
        if self._method.is_sync:
            if run.lost or run.is_broken:
                self._abandon(run)
            elif not run.at_work:
                self._after_generation(run)
            elif not run.ended:
                self._leave_out_late(run)
        elif self._center_lost:
            self._abandon(run)
        elif not self._is_changing:
            self._regroup_with_messages(run)

    def _train_with_messages(self, run: Generation) -> None:
        """Let workers join and leave while the others train on."""
        if self._center_lost:
            self._abandon(run)
            return
        is_leaving = self._drop_those_out(run)
        if not run.at_work and not is_leaving:
            self._after_generation(run)
            return
        membership, reason = self._decide()
        if membership is not None:
            self._dismiss_leavers(run)
        if membership is None:
            self._say(f"{reason}: all leave after their next exchange")
            self._enter(State.REGROUPING)
            self._is_regroup_voted = False
        elif membership.worker_ids != run.membership.worker_ids and not self._waits_for_leaver(run):
            self._change(run, membership, reason)

    def _dismiss_leavers(self, run: Generation) -> None:
        for worker_id in self.workforce.named(Phase.LEAVING):
            entry = self.workforce[worker_id]
            if worker_id in run.at_work and not entry.is_parting:
                entry.is_parting = True
                self._crew.dismiss(worker_id)

    def _waits_for_leaver(self, run: Generation) -> bool:
        """Whether somebody is on the way to the exchange after which it leaves."""
        return any(self.workforce[w].phase is Phase.LEAVING for w in run.at_work)

    def _drop_those_out(self, run: Generation) -> bool:
        """Count out those whose loop has ended while the run goes on; return whether any had."""
        out = [w for w, e in run.ended.items() if e.outcome is Outcome.LEFT]
        if self._clock() - run.broken_at > _CAUSE_S:  # it was not the center that went away
            out += [w for w, e in run.ended.items() if e.outcome is Outcome.BROKEN]
        for worker_id in out:
            if run.ended[worker_id].outcome is Outcome.BROKEN:
                self._count_restart(worker_id, run.ended[worker_id].problem)
                self._say(f"{worker_id} left its exchange: {run.ended[worker_id].problem}")
                self.workforce.stand_by(worker_id)
            elif self.workforce[worker_id].phase is Phase.LEAVING:
                self.workforce[worker_id].is_parting = False
            run.lose(worker_id)
        return bool(run.lost & set(run.membership.worker_ids))

    def _change(self, run: Generation, membership: Membership, reason: str) -> None:
        membership = self._number(membership, reason)
        self._is_changing = True
        new = tuple(w for w in membership.worker_ids if w not in run.membership.worker_ids)
        self._crew.change(membership, self._states_for(new))
        run.change(membership)
        self.workforce.formed(membership)

    def _regroup_with_messages(self, run: Generation) -> None:
        if self._drop_those_out(run):
            staying = tuple(w for w in run.membership.worker_ids if w in run.present)
            self._change(run, Membership(0, staying), self._decide()[1])
        elif not self._is_regroup_voted:
            self._is_regroup_voted = True
            self._crew.vote(run.membership.generation, regroup=1.0)
        elif not run.at_work:
            self._after_generation(run)

    def _after_generation(self, run: Generation) -> None:
        """Go on from the copy of the center that is furthest."""
        end = run.freshest()
        if self._center_lost:
            self._rebuild_center()
        if not self._published:  # the center is on its way
            return
        if end is None or end.round < 0:
            self._round = max(self._published, default=self._round)
            self._say(f"nobody is left: the center goes on from round {self._round}")
        elif not self._has_published(end.round):
            if not self._publishing and self._method.is_sync:
                self._publishing = end.worker_id
                self._crew.publish(end.worker_id)
            return
        else:
            self._round = end.round if self._method.is_sync else max(self._published)
        self._publishing = ""
        outcome = run.outcome()
        if outcome in (Outcome.FINISHED, Outcome.STOPPED) and (
            outcome is Outcome.STOPPED or self._is_complete
        ):
            self.outcome = outcome
            self._enter(State.FINISHING)
            return
        self._is_idle = outcome is Outcome.REGROUP and self.state is State.TRAINING
        self._enter(State.WAITING)

    def _has_published(self, round: int) -> bool:
        if self._method.is_sync:
            return round in self._published
        return max(self._published, default=-1) >= round

    def _rebuild_center(self) -> None:
        """Start the center again, from the freshest copy that a worker has seen."""
        self._center_lost, self._published, self._publishing = False, (), ""
        end = None if self._method.is_sync or self._run is None else self._run.freshest()
        source = end.worker_id if end is not None and end.round >= 0 else None
        self._crew.rebuild_center(source)
        if end is not None and source is not None:
            self._say(f"the center is rebuilt from what {source} saw last, of round {end.round}")
        else:
            self._say("the center is started again, and takes in the workers' copy")
        self._checkpoints.voted = self._checkpoints.collecting = False
        self._evaluating = self._evaluated

    def _inflict_on_center(self) -> None:
        record = self._last_record
        if record is None or not self._center_faults:
            return
        now = {"round": float(record.round), "second": self._clock() - self._began_at}
        for fault in [f for f in self._center_faults if f.at <= now[f.when]]:
            self._center_faults.remove(fault)
            self._note_fault(fault.sentence)
            self._crew.inflict(fault)

    def _keep_checkpoints(self, run: Generation) -> None:
        if self._checkpoints.due(self._clock()) and not self._recorder.is_writing:
            self._checkpoints.voted = True
            run.note_vote()
            self._crew.vote(run.membership.generation, checkpoint=1.0)
        if self._checkpoints.voted and not self._checkpoints.collecting:
            newer = {r for r in run.kept_everywhere() if r > self._last_collected}
            ready = newer & set(self._published)
            if ready:
                self._checkpoints.collecting = True
                self._crew.collect(max(ready), run.present)

    def _collect(self, run: Generation) -> None:
        """Gather the states of all who have left their loops."""
        self._checkpoints.collecting = True
        self._crew.collect(self._round, tuple(w for w in run.ended if w in self.workforce))

    def _evaluate_newest(self) -> None:
        """Keep the evaluator busy with the newest snapshot it has not seen."""
        newest = max(self._published, default=-1)
        is_idle = self._evaluating == self._evaluated
        if is_idle and newest > self._evaluated and self.outcome is not Outcome.STOPPED:
            self._evaluating = newest
            self._crew.evaluate(newest)

    def _finish(self) -> None:
        run = self._run
        assert run is not None
        if self._clock() - self._state_since > _FINISH_S:
            raise RaydlError(
                f"the run did not finish within {_FINISH_S:.0f} s after its last round"
            )
        if self._center_lost:
            self._rebuild_center()
        if not self._has_published(self._round):
            end = run.freshest()
            if not self._publishing and end is not None and self._method.is_sync:
                self._publishing = end.worker_id
                self._crew.publish(end.worker_id)
        elif not self._checkpoints.collecting and not self._is_collected:
            self._collect(run)
        is_scored = self.outcome is Outcome.STOPPED or self._evaluated >= self._round
        if self._is_collected and is_scored and run.is_told():
            self._enter(State.DONE)

    @property
    def _is_collected(self) -> bool:
        return self._last_collected >= self._round
