"""The controller: poll, decide, act; one iteration per call.

    WAITING ──form──> TRAINING ──a worker joins──> REGROUPING ──all left──> WAITING
                         └──────────────finished or stopped─────────> FINISHING ──> DONE

It owns no process and no file: a crew acts for it, a recorder takes what it learns. So it
is tested with fakes, a step at a time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Any, Protocol

from raydl.checkpoint_times import CheckpointTimes
from raydl.config import TrainConfig
from raydl.crew import (
    Collected,
    Crew,
    Evaluated,
    Event,
    Failed,
    Lost,
    Published,
    Reported,
    RunEnded,
    WorkerReady,
)
from raydl.errors import (
    ProcessLostError,
    RaydlError,
    ResourceError,
)
from raydl.generation import Generation
from raydl.membership import Candidates, Membership, next_membership
from raydl.reports import Outcome, Record, WorkerReport

_POLL_S = 0.25
_FINISH_S = 300.0
"""The longest wait for the last states and the last evaluation, in seconds."""
_PATIENCE_S = 5.0
"""How long a run that has its fewest workers waits for more before it starts."""


class State(enum.Enum):
    """Where a run stands."""

    WAITING = "waiting for workers"
    TRAINING = "training"
    REGROUPING = "regrouping"
    FINISHING = "finishing"
    DONE = "done"


class Recorder(Protocol):
    """Takes what the controller learns to people and files."""

    def event(self, sentence: str) -> None:
        """Take one line on what the cluster did."""
        ...

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        """Take a point of the curves, and the newest report of each worker."""
        ...

    def evaluated(self, evaluated: Evaluated) -> None:
        """Take a score of the center."""
        ...

    def checkpoint(self, collected: Collected) -> None:
        """Write a checkpoint; must not block for long."""
        ...

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        ...

    def show(self, state: State, num_workers: int) -> None:
        """Refresh what a person sees."""
        ...


class Controller:
    """Brings a run from its first snapshot to its end.

    Args:
        crew: the processes; already open.
        config: the run's settings.
        recorder: where results go.
        first_round: the round whose snapshot the center holds.
        own_states: states of workers from a checkpoint, by id.
        clock: seconds, rising.
    """

    def __init__(
        self,
        crew: Crew,
        config: TrainConfig,
        recorder: Recorder,
        *,
        first_round: int,
        own_states: dict[str, Any],
        first_generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = State.WAITING
        self.outcome: Outcome | None = None
        self.num_generations = 0
        self._crew = crew
        self._config = config
        self._recorder = recorder
        self._clock = clock
        self._round = first_round
        self._own_states = own_states
        self._generation = first_generation
        self._state_since = clock()
        self._ready: list[str] = []
        self._nodes: dict[str, str] = {}
        self._saved_order = list(own_states)  # by rank
        self._run: Generation | None = None
        self._published: tuple[int, ...] = (first_round,)
        self._evaluating = self._evaluated = first_round
        self.stop_reason = ""
        self._stop_voted = False
        self._checkpoints = CheckpointTimes(config, clock())
        self._last_collected = -1
        self._said = ""

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return self._run.membership.num_workers if self._run else 0

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
        act = {
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.REGROUPING: self._regroup,
            State.FINISHING: self._finish,
        }.get(self.state)
        if act:
            act()
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

    def _place(self, worker_id: str) -> tuple[str, int]:
        """Return the sort key of a worker: by number; in groups as they were, then by node."""
        number = int(worker_id.lstrip("w"))
        if self._config.method.group_size == 1:
            return "", number
        if worker_id in self._saved_order:
            return "", self._saved_order.index(worker_id)
        return self._nodes[worker_id], number

    # what happened

    def _take(self, event: Event) -> None:
        match event:
            case WorkerReady(worker_id, node):
                self._nodes[worker_id] = node
                self._ready = sorted([*self._ready, worker_id], key=self._place)
            case Published(rounds, records):
                self._published = rounds
                self._take_records(records)
            case Reported(report):
                self._take_report(report)
            case RunEnded(worker_id) if self._run:
                self._run.ended[worker_id] = event
                self._run.progress_at = self._clock()
            case Failed(name, error):
                self._take_failure(name, error)
            case Lost(name, reason):
                self._take_failure(name, ProcessLostError(name, reason))
            case Evaluated():  # of the round asked for, or a newer one
                self._evaluated = self._evaluating = event.round
                self._recorder.evaluated(event)
            case Collected(snapshot, _):
                self._last_collected = snapshot.round
                self._checkpoints.done(self._clock(), snapshot.epoch)
                self._recorder.checkpoint(event)

    def _take_report(self, report: WorkerReport) -> None:
        if self._run is None or report.worker_id not in self._run.membership.worker_ids:
            return
        self._run.reports[report.worker_id] = report
        if report.worker_id == self._run.membership.worker_ids[0]:
            self._take_records(report.records)

    def _take_records(self, records: tuple[Record, ...]) -> None:
        if records and self._run:
            self._run.progress_at = self._clock()
        for record in records:
            self._checkpoints.saw_epoch(int(record.epoch))
            self._recorder.record(record, self._run.reports if self._run else {})

    def _take_failure(self, name: str, error: Exception) -> None:
        if self._run is None:
            raise error
        if isinstance(error, ProcessLostError) and self._run.is_bystander(name):
            if name in self._ready:
                self._ready.remove(name)
            self._say(f"{name} was lost before it joined; the others train on")
            return
        self._run.add_failure(error, self._clock())

    # what follows from it

    def _wait(self) -> None:
        scaling = self._config.scaling
        waited_s = self._clock() - self._state_since
        if self.stop_reason:
            self.outcome = Outcome.STOPPED
            if self._run is None:
                self._say(f"{self.stop_reason}: the run ends before it trained")
                self._enter(State.DONE)
            else:  # between two generations
                self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
                self._enter(State.FINISHING)
            return
        membership, reason = next_membership(
            self._run.membership if self._run else None,
            Candidates(ready=tuple(self._ready), waited_s=waited_s),
            min_workers=max(1, scaling.min_workers),
            max_workers=max(1, scaling.max_workers),
            patience_s=_PATIENCE_S,
            group_size=self._config.method.group_size,
        )
        if membership is None:
            missing = f"; waiting for {self._crew.waiting_for()}" if waited_s > _PATIENCE_S else ""
            self._say(f"{reason}{missing}")
            if waited_s > scaling.start_timeout_s:
                raise ResourceError(
                    f"{reason} after {waited_s:.0f} s; waiting for {self._crew.waiting_for()}; "
                    f"lower scaling.num_workers or raise scaling.start_timeout_s"
                )
            return
        self._form(membership, reason)

    def _form(self, membership: Membership, reason: str) -> None:
        self._generation += 1
        self.num_generations += 1
        membership = Membership(self._generation, membership.worker_ids)
        self._crew.form(membership, self._round, self._own_states)
        self._own_states = {}
        self._run = Generation(membership, self._clock())
        self._stop_voted = False  # votes end with their generation
        self._checkpoints.voted = False
        self._say(f"generation {membership.generation}: {reason}")
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run = self._run
        assert run is not None
        run.raise_failure(self._clock())
        if run.has_ended:
            self._take_end(run)
            return
        if self.stop_reason and not self._stop_voted:
            self._stop_voted = True
            self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
            self._crew.vote(run.membership.generation, stop=1.0)
        if run.ended:
            run.raise_for_stragglers(self._clock(), self._config.exchange.timeout_s)
            return
        if self._can_grow(run.membership):
            self._say("a worker is ready to join: regrouping after this round")
            self._crew.vote(run.membership.generation, regroup=1.0)
            self._enter(State.REGROUPING)
        self._keep_checkpoints(run)

    def _can_grow(self, now: Membership) -> bool:
        waiting = [w for w in self._ready if w not in now.worker_ids]
        enough = len(waiting) >= self._config.method.group_size
        return enough and now.num_workers < self._config.scaling.max_workers

    def _keep_checkpoints(self, run: Generation) -> None:
        if self._checkpoints.due(self._clock()) and not self._recorder.is_writing:
            self._checkpoints.voted = True
            run.note_vote()
            self._crew.vote(run.membership.generation, checkpoint=1.0)
        if self._checkpoints.voted:
            newer = {r for r in run.kept_everywhere() if r > self._last_collected}
            ready = newer & set(self._published)
            if ready and not self._checkpoints.collecting:
                self._checkpoints.collecting = True
                self._crew.collect(max(ready), run.membership.worker_ids)

    def _take_end(self, run: Generation) -> None:
        end = run.end()
        self._round = end.round
        if end.outcome is Outcome.REGROUP:
            self._regroup()
        else:
            self.outcome = end.outcome
            self._enter(State.FINISHING)

    def _regroup(self) -> None:
        run = self._run
        assert run is not None
        run.raise_failure(self._clock())
        if not run.has_ended:
            return
        end = run.end()
        if end.outcome is not Outcome.REGROUP:  # the run ended in that very round
            self._enter(State.TRAINING)
            return
        self._round = end.round
        if self._round in self._published:
            self._enter(State.WAITING)

    def _evaluate_newest(self) -> None:
        """Keep the evaluator busy with the newest snapshot it has not seen."""
        newest = max(self._published)
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
        run.raise_failure(self._clock())
        is_published = self._round in self._published
        if is_published and not self._checkpoints.collecting and not self._is_collected:
            self._checkpoints.collecting = True
            self._crew.collect(self._round, run.membership.worker_ids)
        is_scored = self.outcome is Outcome.STOPPED or self._evaluated >= self._round
        if self._is_collected and is_scored and run.is_told():
            self._enter(State.DONE)

    @property
    def _is_collected(self) -> bool:
        return self._last_collected >= self._round
