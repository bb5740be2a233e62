"""The controller, stepped with a fake crew through every state."""

import numpy as np
import pytest

from raydl.center import Snapshot
from raydl.config import CheckpointConfig, MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
from raydl.control import Controller, State
from raydl.crew import (
    Collected,
    Evaluated,
    Failed,
    Lost,
    Published,
    Reported,
    RunEnded,
    WorkerReady,
)
from raydl.errors import (
    ExchangeError,
    ExchangeTimeoutError,
    NonFiniteLossError,
    ProcessLostError,
    RaydlError,
    ResourceError,
)
from raydl.metrics import TimeParts
from raydl.reports import Record, WorkerReport
from raydl.worker import Outcome


def snapshot(round, epoch=0):
    empty = np.empty(0, np.float32)
    return Snapshot(
        round=round,
        generation=1,
        epoch=epoch,
        num_samples=round,
        local_step=round,
        seconds=0.0,
        is_kept=False,
        weights=empty,
        buffers=empty,
        optimizer={},
        ledger={},
    )


def record(round, epoch=0.0):
    return Record(
        round=round,
        generation=1,
        num_workers=2,
        epoch=epoch,
        num_samples=round,
        local_step=round,
        lr=0.1,
        loss=1.0,
        distance=0.0,
        exchange_s=0.0,
        exchange_bytes=0,
        staleness=0.0,
    )


def report(worker_id, round, *, kept=(), epoch=0.0):
    parts = TimeParts().as_dict()
    return Reported(WorkerReport(worker_id, round, (record(round, epoch),), tuple(kept), parts))


class FakeCrew:
    """Hands out what the test says, and writes down what it is told."""

    def __init__(self):
        self.events = []
        self.told = []
        self.formed = []

    def poll(self, timeout_s):
        events, self.events = self.events, []
        return events

    def form(self, membership, round, own_states):
        self.formed.append(membership)
        self.told.append(("form", membership.generation, membership.worker_ids, round))

    def vote(self, generation, **votes):
        assert generation == self.formed[-1].generation
        self.told.append(("vote", votes))

    def evaluate(self, round):
        self.told.append(("evaluate", round))

    def collect(self, round, worker_ids):
        self.told.append(("collect", round, worker_ids))

    def waiting_for(self):
        return "1 more worker(s), each needs {CPU: 1}; the cluster has {CPU: 1}"


class FakeRecorder:
    def __init__(self):
        self.events, self.records, self.checkpoints, self.scores = [], [], [], []

    def event(self, sentence):
        self.events.append(sentence)

    def record(self, record, reports):
        self.records.append(record)

    def evaluated(self, evaluated):
        self.scores.append(evaluated)

    def checkpoint(self, collected):
        self.checkpoints.append(collected)

    is_writing = False

    def show(self, state, num_workers):
        pass


class Stage:
    """A controller with fakes around it and a clock that the test turns."""

    def __init__(self, num_workers=2, group_size=1, own_states=None, **checkpoint):
        self.crew, self.recorder, self.now = FakeCrew(), FakeRecorder(), 0.0
        config = TrainConfig(
            method=MethodConfig(group_size=group_size),
            scaling=ScalingConfig(num_workers=num_workers, start_timeout_s=60.0),
            training=TrainingConfig(epochs=5),
            checkpoint=CheckpointConfig(**{"every_s": None, **checkpoint}),
        )
        self.controller = Controller(
            self.crew,
            config,
            self.recorder,
            first_round=0,
            own_states=own_states or {},
            clock=lambda: self.now,
        )

    def step(self, *events):
        self.crew.events += events
        self.crew.told.clear()
        self.controller.step()
        return self.crew.told

    def start(self):
        self.step(WorkerReady("w0"), WorkerReady("w1"))
        assert self.controller.state is State.TRAINING
        return self


def test_training_starts_when_all_workers_are_ready_in_the_order_of_their_numbers():
    stage = Stage()
    assert stage.step(WorkerReady("w1")) == []
    assert stage.controller.state is State.WAITING
    assert stage.step(WorkerReady("w0")) == [("form", 1, ("w0", "w1"), 0)]
    assert stage.recorder.events == [
        "1 of 2 workers are ready",
        "generation 1: w0, w1 start",
    ]


def test_groups_that_share_a_replica_are_put_on_one_node_where_they_fit():
    stage = Stage(num_workers=4, group_size=2)
    nodes = {"w0": "a", "w1": "b", "w2": "b", "w3": "a"}
    told = stage.step(*[WorkerReady(worker_id, node) for worker_id, node in nodes.items()])
    assert told == [("form", 1, ("w0", "w3", "w1", "w2"), 0)]


def test_points_of_the_curves_may_come_from_the_center():
    stage = Stage().start()
    stage.step(Published((0,), (record(3), record(5))))
    assert [r.round for r in stage.recorder.records] == [3, 5]


def test_where_workers_end_one_by_one_the_last_exchange_is_the_end():
    stage = Stage().start()
    stage.step(RunEnded("w0", Outcome.FINISHED, 40), RunEnded("w1", Outcome.FINISHED, 52))
    assert stage.controller.state is State.FINISHING
    assert ("collect", 52, ("w0", "w1")) in stage.step(Published((0, 52)))
    stage.step(Collected(snapshot(52), {}), Evaluated(52, 5, 52, 1.0, {}))
    stage.step(report("w0", 40))
    assert stage.controller.state is State.FINISHING
    stage.step(report("w1", 52))
    assert stage.controller.state is State.DONE


def test_waiting_is_bounded_and_says_what_for():
    stage = Stage()
    stage.step(WorkerReady("w0"))
    stage.now = 6.0
    stage.step()
    assert stage.recorder.events[-1] == (
        "1 of 2 workers are ready; waiting for 1 more worker(s), each needs {CPU: 1}; "
        "the cluster has {CPU: 1}"
    )
    stage.now = 61.0
    with pytest.raises(ResourceError, match=r"1 of 2 workers .* after 61 s; waiting for 1 more"):
        stage.step()


def test_a_finished_run_is_collected_scored_and_reported_before_it_is_done():
    stage = Stage().start()
    ends = [RunEnded(w, Outcome.FINISHED, 9) for w in ("w0", "w1")]
    stage.step(ends[0])
    assert stage.controller.state is State.TRAINING
    stage.step(ends[1])
    assert stage.controller.state is State.FINISHING
    told = stage.step(Published((0, 9)))
    assert told == [("evaluate", 9), ("collect", 9, ("w0", "w1"))]
    stage.step(Collected(snapshot(9), {}))
    assert stage.controller.state is State.FINISHING
    stage.step(Evaluated(9, 5, 9, 1.0, {"accuracy": 0.5}))
    assert stage.controller.state is State.FINISHING  # the last records are not here yet
    stage.step(report("w0", 9), report("w1", 9))
    assert stage.controller.state is State.DONE
    assert stage.recorder.records[-1].round == 9
    assert len(stage.recorder.checkpoints) == 1


def test_a_stop_is_voted_once_and_ends_with_a_checkpoint_without_a_score():
    stage = Stage().start()
    stage.controller.request_stop("SIGTERM")
    assert stage.step() == [("vote", {"stop": 1.0})]
    assert stage.step() == []
    stage.step(*[RunEnded(w, Outcome.STOPPED, 3) for w in ("w0", "w1")])
    assert stage.step(Published((0, 3))) == [("collect", 3, ("w0", "w1"))]
    stage.step(Collected(snapshot(3), {}), report("w0", 3), report("w1", 3))
    assert stage.controller.state is State.DONE
    assert stage.controller.outcome is Outcome.STOPPED


def test_a_stop_between_two_generations_ends_with_a_checkpoint():
    stage = Stage(num_workers=(1, 2))
    stage.step(WorkerReady("w0"))
    stage.now = 6.0
    stage.step()
    stage.step(WorkerReady("w1"))
    assert stage.controller.state is State.REGROUPING
    stage.controller.request_stop("SIGTERM")
    stage.step(RunEnded("w0", Outcome.REGROUP, 4), Published((0, 4)))
    stage.step()
    assert stage.controller.state is State.FINISHING
    stage.step(Collected(snapshot(4), {}), report("w0", 4))
    assert stage.controller.state is State.DONE
    assert stage.controller.outcome is Outcome.STOPPED
    assert len(stage.recorder.checkpoints) == 1


def test_a_worker_that_hangs_when_the_others_are_done_is_named_in_bounded_time():
    stage = Stage().start()
    stage.step(RunEnded("w0", Outcome.FINISHED, 9))
    stage.now = 59.0
    stage.step(Published((0,), (record(10),)))  # it goes on
    stage.now = 118.0
    stage.controller.request_stop("SIGTERM")
    assert ("vote", {"stop": 1.0}) in stage.step()
    stage.now = 120.0
    with pytest.raises(ExchangeTimeoutError, match=r"waiting for workers \['w1'\]"):
        stage.step()


def test_no_checkpoint_is_voted_for_while_the_last_one_is_being_written():
    stage = Stage(every_s=10.0).start()
    stage.recorder.is_writing, stage.now = True, 10.0
    assert stage.step() == []
    stage.recorder.is_writing = False
    assert stage.step() == [("vote", {"checkpoint": 1.0})]


def test_resumed_groups_are_the_groups_of_the_checkpoint():
    stage = Stage(num_workers=4, group_size=2, own_states={"w0": 0, "w3": 0, "w2": 0, "w1": 0})
    told = stage.step(*[WorkerReady(f"w{i}", "b" if i else "a") for i in range(4)])
    assert told == [("form", 1, ("w0", "w3", "w2", "w1"), 0)]


def test_a_stop_while_waiting_ends_at_once():
    stage = Stage()
    stage.controller.request_stop("SIGINT")
    stage.step()
    assert stage.controller.state is State.DONE


def test_the_newest_snapshot_is_scored_and_only_one_at_a_time():
    stage = Stage().start()
    assert stage.step(Published((0, 2, 4))) == [("evaluate", 4)]
    assert stage.step(Published((2, 4, 6))) == []
    assert stage.step(Evaluated(4, 1, 4, 1.0, {})) == [("evaluate", 6)]


def test_a_checkpoint_by_time_is_voted_for_then_collected_when_it_is_held_everywhere():
    stage = Stage(every_s=10.0).start()
    assert stage.step() == []
    stage.now = 10.0
    assert stage.step() == [("vote", {"checkpoint": 1.0})]
    assert stage.step(report("w0", 5, kept=[5]), Published((0,))) == []
    assert stage.step(report("w1", 5, kept=[5])) == []
    assert ("collect", 5, ("w0", "w1")) in stage.step(Published((0, 5)))
    assert stage.step(Collected(snapshot(5), {})) == []
    stage.now = 19.0
    assert stage.step() == []
    stage.now = 20.0
    assert stage.step() == [("vote", {"checkpoint": 1.0})]


def test_a_checkpoint_by_epochs_waits_for_them():
    stage = Stage(every_epochs=2).start()
    assert stage.step(report("w0", 5, epoch=1.9)) == []
    assert stage.step(report("w0", 6, epoch=2.0)) == [("vote", {"checkpoint": 1.0})]


def test_a_worker_that_comes_later_joins_at_a_round_boundary():
    stage = Stage(num_workers=(2, 3))
    stage.step(WorkerReady("w0"), WorkerReady("w1"))
    assert stage.controller.state is State.WAITING
    stage.now = 6.0
    assert stage.step() == [("form", 1, ("w0", "w1"), 0)]
    assert stage.step(WorkerReady("w2")) == [("vote", {"regroup": 1.0})]
    assert stage.controller.state is State.REGROUPING
    stage.step(*[RunEnded(w, Outcome.REGROUP, 7) for w in ("w0", "w1")])
    stage.step(Published((0, 7)), Evaluated(7, 0, 7, 1.0, {}))
    told = stage.step()
    assert ("form", 2, ("w0", "w1", "w2"), 7) in told
    assert stage.recorder.events[-1] == "generation 2: w2 joins"
    assert stage.controller.num_generations == 2


def test_a_run_that_ends_in_the_round_of_a_regroup_just_ends():
    stage = Stage(num_workers=(2, 3))
    stage.step(WorkerReady("w0"), WorkerReady("w1"))
    stage.now = 6.0
    stage.step()
    stage.step(WorkerReady("w2"))
    stage.step(*[RunEnded(w, Outcome.FINISHED, 7) for w in ("w0", "w1")])
    stage.step()
    assert stage.controller.state is State.FINISHING


def test_the_cause_of_a_failure_is_raised_not_its_echo():
    stage = Stage().start()
    stage.step(Failed("w1", ExchangeError(3, 1, "connection closed")))
    with pytest.raises(NonFiniteLossError):
        stage.step(Failed("w0", NonFiniteLossError("w0", 5, float("nan"))))


def test_a_users_own_exception_arrives_as_it_is():
    stage = Stage().start()
    with pytest.raises(ZeroDivisionError):
        stage.step(Failed("w0", ZeroDivisionError()))


def test_a_lost_worker_is_named_after_a_grace_time_for_other_causes():
    stage = Stage().start()
    stage.step(Failed("w1", ExchangeError(3, 1, "connection closed")))
    stage.step(Lost("w0", "the actor died"))
    stage.now = 4.0
    with pytest.raises(ProcessLostError, match="w0 was lost: the actor died"):
        stage.step()


def test_a_newcomer_that_dies_while_it_starts_does_not_disturb_the_others():
    stage = Stage(num_workers=(2, 3))
    stage.step(WorkerReady("w0"), WorkerReady("w1"))
    stage.now = 6.0
    stage.step()
    assert stage.step(Lost("w2", "the actor died")) == []
    assert stage.recorder.events[-1] == "w2 was lost before it joined; the others train on"
    stage.now = 60.0
    stage.step()
    assert stage.controller.state is State.TRAINING


@pytest.mark.parametrize("name", ["center", "evaluator"])
def test_losing_the_center_or_the_evaluator_ends_the_run_by_name(name):
    stage = Stage().start()
    stage.step(Lost(name, "the actor died"))
    stage.now = 4.0
    with pytest.raises(ProcessLostError, match=f"process of {name} was lost"):
        stage.step()


def test_finishing_is_bounded():
    stage = Stage().start()
    stage.step(*[RunEnded(w, Outcome.FINISHED, 9) for w in ("w0", "w1")])
    stage.now = 301.0
    with pytest.raises(RaydlError, match="did not finish within 300 s"):
        stage.step()
