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
from dataclasses import dataclass, field
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
from raydl.errors import ExchangeError, ProcessLostError, RaydlError, ResourceError
from raydl.membership import Candidates, Membership, next_membership
from raydl.reports import Outcome, Record, WorkerReport

_POLL_S = 0.25
_CAUSE_GRACE_S = 3.0
"""How long a failed exchange waits for the failure that caused it, in seconds."""
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

    def show(self, state: State, num_workers: int) -> None:
        """Refresh what a person sees."""
        ...


@dataclass
class _Run:
    """What is true of the generation that trains."""

    membership: Membership
    ended: dict[str, RunEnded] = field(default_factory=dict)
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    failed_at: float = 0.0


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
        self._started_at = self._state_since = clock()
        self._ready: list[str] = []
        self._nodes: dict[str, str] = {}
        self._run: _Run | None = None
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
        """Return the sort key of a worker: by number, in groups by node first."""
        node = self._nodes[worker_id] if self._config.method.group_size > 1 else ""
        return node, int(worker_id.lstrip("w"))

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
            case Failed(name, error):
                self._take_failure(name, error)
            case Lost(name, reason):
                self._take_failure(name, ProcessLostError(name, reason))
            case Evaluated():
                self._evaluated = event.round
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
        for record in records:
            self._checkpoints.saw_epoch(int(record.epoch))
            self._recorder.record(record, self._run.reports if self._run else {})

    def _take_failure(self, name: str, error: Exception) -> None:
        if self._run is None:
            raise error
        if isinstance(error, ProcessLostError) and self._is_bystander(name):
            if name in self._ready:
                self._ready.remove(name)
            self._say(f"{name} was lost before it joined; the others train on")
            return
        if not self._run.failures:
            self._run.failed_at = self._clock()
        self._run.failures.append(error)

    def _is_bystander(self, name: str) -> bool:
        """Whether this is a worker that does not train."""
        assert self._run is not None
        return name[1:].isdigit() and name not in self._run.membership.worker_ids

    def _raise_failure(self, run: _Run) -> None:
        """Raise the failure behind all others, once it had time to show itself.

        When one worker fails, its peers' exchange fails a moment later, or sooner: what
        they report is the consequence.
        """
        causes = [e for e in run.failures if not isinstance(e, ExchangeError)]
        ours = [e for e in causes if not isinstance(e, ProcessLostError)]
        if ours:
            raise ours[0]
        if run.failures and self._clock() - run.failed_at >= _CAUSE_GRACE_S:
            raise (causes or run.failures)[0]

    # what follows from it

    def _wait(self) -> None:
        scaling = self._config.scaling
        waited_s = self._clock() - self._state_since
        if self.stop_reason:
            self._say(f"{self.stop_reason}: the run ends before it trained")
            self.outcome = Outcome.STOPPED
            self._enter(State.DONE)
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
        self._run = _Run(membership)
        self._stop_voted = False  # votes end with their generation
        self._checkpoints.voted = False
        self._say(f"generation {membership.generation}: {reason}")
        self._enter(State.TRAINING)

    def _train(self) -> None:
        run = self._run
        assert run is not None
        self._raise_failure(run)
        if len(run.ended) == run.membership.num_workers:
            self._take_end(run)
            return
        if run.ended:
            return
        if self.stop_reason and not self._stop_voted:
            self._stop_voted = True
            self._say(f"{self.stop_reason}: stopping after this round, with a checkpoint")
            self._crew.vote(run.membership.generation, stop=1.0)
        elif self._can_grow(run.membership):
            self._say("a worker is ready to join: regrouping after this round")
            self._crew.vote(run.membership.generation, regroup=1.0)
            self._enter(State.REGROUPING)
        self._keep_checkpoints(run)

    def _can_grow(self, now: Membership) -> bool:
        waiting = [w for w in self._ready if w not in now.worker_ids]
        enough = len(waiting) >= self._config.method.group_size
        return enough and now.num_workers < self._config.scaling.max_workers

    def _keep_checkpoints(self, run: _Run) -> None:
        if self._checkpoints.due(self._clock()):
            self._checkpoints.voted = True
            self._crew.vote(run.membership.generation, checkpoint=1.0)
        if self._checkpoints.voted:
            kept = [set(r.kept) for r in run.reports.values()]
            everywhere = (
                set.intersection(*kept) if len(kept) == run.membership.num_workers else set()
            )
            # Reports may still show the round that was collected last.
            newer = {r for r in everywhere if r > self._last_collected}
            ready = newer & set(self._published)
            if ready and not self._checkpoints.collecting:
                self._checkpoints.collecting = True
                self._crew.collect(max(ready), run.membership.worker_ids)

    def _take_end(self, run: _Run) -> None:
        end = _last_end(run)
        self._round = end.round
        if end.outcome is Outcome.REGROUP:
            self._regroup()
        else:
            self.outcome = end.outcome
            self._enter(State.FINISHING)

    def _regroup(self) -> None:
        run = self._run
        assert run is not None
        self._raise_failure(run)
        if len(run.ended) < run.membership.num_workers:
            return
        end = _last_end(run)
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
        self._raise_failure(run)
        is_published = self._round in self._published
        if is_published and not self._checkpoints.collecting and not self._is_collected:
            self._checkpoints.collecting = True
            self._crew.collect(self._round, run.membership.worker_ids)
        is_scored = self.outcome is Outcome.STOPPED or self._evaluated >= self._round
        is_told = all(
            w in run.reports and run.reports[w].round >= end.round for w, end in run.ended.items()
        )
        if self._is_collected and is_scored and is_told:
            self._enter(State.DONE)

    @property
    def _is_collected(self) -> bool:
        return self._last_collected >= self._round


def _last_end(run: _Run) -> RunEnded:
    """Return how the worker that left last ended; in a synchronous round all leave at once.

    An outcome that ends the run counts before one that only regroups: where workers come one
    by one, some may have found no more work when the vote to regroup came.
    """
    ends = sorted(run.ended.values(), key=lambda end: end.round)
    last = ends[-1]
    if all(end.outcome is not Outcome.REGROUP for end in ends):
        return last
    return RunEnded(last.worker_id, Outcome.REGROUP, last.round)
