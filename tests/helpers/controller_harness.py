"""A harness for the controller: fakes, a clock that the test sets, events that it injects."""

import numpy as np
import pytest

from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    EvaluationConfig,
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.center import Snapshot
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import Changed, Collected, Published, Reported, RunEnded, WorkerReady
from raydl.elastic.controller import Controller
from raydl.elastic.facts import apply
from raydl.elastic.run_state import State
from raydl.faults import FaultPlan
from raydl.methods import resolve

BOTH = pytest.mark.parametrize("is_sync", [True, False], ids=["rounds", "messages"])


def progress_at(round, epoch=0.0):
    return Progress(round=round, generation=1, epoch=epoch, num_samples=round, local_step=round)


def snapshot(round, epoch=0):
    empty = np.empty(0, np.float32)
    return Snapshot(
        progress=progress_at(round, epoch),
        is_kept=False,
        weights=empty,
        buffers=empty,
        optimizer={},
        ledger={},
    )


def record(round, epoch=0.0):
    return Record(
        progress=progress_at(round, epoch),
        num_workers=2,
        lr=0.1,
        loss=1.0,
        distance=0.0,
        exchange_s=0.0,
        exchange_bytes=0,
        staleness=0.0,
        period=1.0,
        at_s=0.0,
    )


def report(worker_id, round, *, kept=(), epoch=0.0, computed_s=0.0, **more):
    records, parts = (record(round, epoch),), {"forward_backward": computed_s}
    return Reported(WorkerReport(worker_id, round, records, tuple(kept), parts, **more))


def collected(round, *worker_ids, epoch=0):
    return Collected(snapshot(round, epoch), {w: {} for w in worker_ids})


def scored(round):
    return Evaluated(progress_at(round, 5.0), {"accuracy": 0.5})


class FakeWorkerGroup:
    """A worker group that returns the test's events and records all calls."""

    def __init__(self):
        self.events, self.calls, self.formed = [], [], []
        self.timeouts, self.requested_states = [], {}

    def poll(self, timeout_s):
        self.timeouts.append(timeout_s)
        events, self.events = self.events, []
        return events

    def request_worker(self, worker_id, own_state=None):
        self.calls.append(("request_worker", worker_id))
        self.requested_states[worker_id] = own_state

    def form(self, membership, round, own_states):
        self.formed.append(membership)
        self.calls.append(("form", membership.generation, membership.worker_ids, round))
        self.own_states = own_states

    def change(self, membership, own_states):
        self.formed.append(membership)
        self.calls.append(("change", membership.generation, membership.worker_ids))
        self.own_states = own_states

    def vote(self, generation, **votes):
        assert generation == self.formed[-1].generation
        self.calls.append(("vote", *votes))

    def avoid(self, node):
        self.calls.append(("avoid", node))
        return True

    def waiting_for(self):
        return "1 more worker with {CPU: 1}; the cluster has {CPU: 1}"

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


class FakeRecorder:
    def __init__(self):
        self.events, self.records, self.checkpoints, self.scores = [], [], [], []
        self.facts = []
        self.evaluated, self.checkpoint = self.scores.append, self.checkpoints.append
        self.event = self.events.append
        self.is_writing = self.is_given_up = False

    def note(self, fact):
        self.facts.append(fact)

    def record(self, record, reports):
        self.records.append(record)

    def formed(self, membership, reason):
        assert f"generation {membership.generation}: {reason}" == self.events[-1]

    def show(self, state, workers):
        pass


class ControllerHarness:
    """A controller with a fake worker group, a fake recorder and a clock that the test sets."""

    def __init__(self, num_workers=2, *, is_sync=True, first_round=0, own_states=(), **more):
        self.worker_group, self.recorder, self.now = FakeWorkerGroup(), FakeRecorder(), 0.0
        name = "sync-easgd" if is_sync else "async-easgd"
        elastic = {"max_restarts": more.pop("max_restarts", 20), **more.pop("elastic", {})}
        callbacks = more.pop("callbacks", ())
        optimizer = more.pop("optimizer", OptimizerConfig())
        exchange = ExchangeConfig(compression=more.pop("compression", "none"))
        evaluation = EvaluationConfig(by=more.pop("scored_by", "evaluator"))
        faults, generation = more.pop("faults", FaultPlan()), more.pop("first_generation", 0)
        first_seconds = more.pop("first_seconds", 0.0)
        is_first_scored = more.pop("is_first_scored", True)
        config = TrainConfig(
            method=MethodConfig(name=more.pop("name", name), group_size=more.pop("group_size", 1)),
            scaling=ScalingConfig(
                num_workers=num_workers,
                start_timeout_s=60.0,
                spares=more.pop("spares", 0),
                gpus_per_worker=more.pop("gpus", 0.0),
            ),
            training=TrainingConfig(epochs=5, deterministic=more.pop("deterministic", False)),
            checkpoint=CheckpointConfig(**{"every_s": None, **more}),
            elastic=ElasticConfig(**elastic),
            optimizer=optimizer,
            evaluation=evaluation,
            exchange=exchange,
        )
        self.is_sync = is_sync
        self.controller = Controller(
            self.worker_group,
            config,
            resolve(config),
            self.recorder,
            first_round=first_round,
            first_seconds=first_seconds,
            first_generation=generation,
            is_first_scored=is_first_scored,
            own_states=dict(own_states),
            faults=faults,
            callbacks=callbacks,
            clock=lambda: self.now,
        )
        self.worker_group.events.append(Published((first_round,)))

    def step(self, *events):
        """Step with some events and return the calls to the worker group."""
        self.worker_group.calls.clear()
        is_collecting = self.controller.run_state.checkpoints.is_collecting
        if any(isinstance(event, Collected) for event in events) and not is_collecting:
            self.controller.step()  # which asks for the states
        self.worker_group.events += events
        self.controller.step()
        return list(self.worker_group.calls)

    def steps(self, count):
        return [call for _ in range(count) for call in self.step()]

    def note(self, fact):
        """Change the state by a fact that nobody carries out."""
        apply(self.controller.run_state, fact, self.now)

    def start(self, *worker_ids):
        """Let workers become ready and train."""
        worker_ids = worker_ids or ("w0", "w1")
        self.step(*[WorkerReady(w, "node") for w in worker_ids])
        if self.state is State.WAITING:  # fewer than the maximum
            self.now += 6.0
            self.step()
        assert self.state is State.TRAINING
        assert self.worker_group.formed[-1].worker_ids == worker_ids
        return self if self.is_sync else self.after(Changed())

    def after(self, *events):
        self.step(*events)
        return self

    def end(self, outcome, round, *worker_ids, generation=None):
        """Return the events at the end of loops, by default of the newest generation."""
        number = generation or self.worker_group.formed[-1].generation
        return [RunEnded(w, Outcome(outcome), round, number, "a reset") for w in worker_ids]

    @property
    def state(self):
        return self.controller.state

    @property
    def log_lines(self):
        """The lines that the controller has logged."""
        return self.recorder.events


DIED = "the actor died"
