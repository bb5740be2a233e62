"""The controller, stepped with a fake worker group: how a run starts, waits, is scored and ends.

``test_control_rounds``, ``test_control_messages`` and ``test_control_simulated`` use the stage.
"""

import pytest
from stages import BOTH, Stage, record, report, scored

from raydl.core.worker_group import (
    Draining,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import ProcessLostError, RaydlError, ResourceError
from raydl.faults import FaultPlan
from raydl.faults.plan import Fault

# the start


def test_workers_are_asked_for_and_train_when_all_are_ready_in_the_order_of_their_numbers():
    stage = Stage()
    assert stage.worker_group.told == [("request_worker", "w0"), ("request_worker", "w1")]
    assert stage.step(WorkerReady("w1")) == []
    assert stage.step(WorkerReady("w0")) == [("form", 1, ("w0", "w1"), 0)]
    assert stage.said == ["1 of 2 workers are ready", "generation 1: w0, w1 start"]


def test_a_new_state_acts_without_a_wait():
    stage = Stage().start()
    stage.steps(2)
    assert [timeout == 0 for timeout in stage.worker_group.timeouts[-2:]] == [True, False]


def test_a_resumed_run_numbers_its_memberships_on():
    stage = Stage(first_round=40, first_generation=7)
    told = stage.step(WorkerReady("w0"), WorkerReady("w1"))
    assert told == [("form", 8, ("w0", "w1"), 40)]
    assert stage.controller.num_generations == 1


def test_workers_start_while_the_center_does_and_train_once_it_is_up():
    stage = Stage()
    stage.worker_group.events.clear()
    stage.step(WorkerReady("w0"), WorkerReady("w1"))
    stage.now += 100.0
    assert stage.step() == []
    assert ("form", 1, ("w0", "w1"), 0) in stage.step(Published((0,)))


def test_a_center_that_does_not_start_ends_the_run_with_a_sentence():
    stage = Stage()
    stage.worker_group.events.clear()
    stage.step(WorkerReady("w0"), WorkerReady("w1"))
    stage.now += 301.0
    with pytest.raises(RaydlError, match=r"^the center did not start within 300 s; the same"):
        stage.step()


def test_groups_that_share_a_replica_are_put_on_one_node_where_they_fit():
    stage = Stage(4, group_size=2, name="sync-easgd")
    nodes = {"w0": "a", "w1": "b", "w2": "b", "w3": "a"}
    told = stage.step(*[WorkerReady(worker_id, node) for worker_id, node in nodes.items()])
    assert told == [("form", 1, ("w0", "w3", "w1", "w2"), 0)]


def test_resumed_groups_are_the_groups_of_the_checkpoint_and_get_their_states():
    states = {"w0": {"a": 0}, "w3": {"a": 3}, "w2": {"a": 2}, "w1": {"a": 1}}
    stage = Stage(4, group_size=2, own_states=states)
    told = stage.step(*[WorkerReady(f"w{i}", "b" if i else "a") for i in range(4)])
    assert told == [("form", 1, ("w0", "w3", "w2", "w1"), 0)]
    assert stage.worker_group.own_states == states


def test_waiting_is_bounded_and_the_log_gives_its_reason():
    stage = Stage().after(WorkerReady("w0"))
    stage.now = 6.0
    stage.step()
    what = "waiting for 1 more worker with {CPU: 1}; the cluster has {CPU: 1}"
    assert stage.said[-1] == f"1 of 2 workers are ready; {what}"
    stage.now = 61.0
    with pytest.raises(ResourceError, match=r"1 of 2 workers .* after 61 s; waiting for 1 more"):
        stage.step()


def test_a_newcomer_that_dies_while_it_starts_is_replaced_and_the_others_train_on():
    stage = Stage((2, 3)).start()
    assert stage.step(Lost("w2", "the actor died")) == [("request_worker", "w3")]
    assert stage.state is State.TRAINING


def test_losses_in_a_row_without_progress_are_bounded():
    stage = Stage(2, max_restarts=3)
    for i in range(2, 5):
        stage.step(Lost(f"w{i - 1}", "the actor died"))
    with pytest.raises(ProcessLostError, match=r"loss 4 in a row .* elastic.max_restarts"):
        stage.step(Lost("w4", "the actor died"))


def test_progress_between_losses_makes_them_no_row():
    stage = Stage((2, 3), max_restarts=2).start()
    for i in range(2, 9):
        stage.step(Lost(f"w{i}", "the actor died"), report("w0", i))
    assert stage.state is State.TRAINING


@BOTH
def test_a_center_lost_before_the_first_generation_is_started_again_as_it_was(is_sync):
    stage = Stage(is_sync=is_sync)
    assert stage.step(Lost("center", "the actor died")) == [("rebuild_center", None)]
    ready = [WorkerReady("w0"), WorkerReady("w1")]
    assert stage.step(*ready) == []
    assert stage.step(Published((0,))) == [("form", 1, ("w0", "w1"), 0)]


def test_a_worker_that_drains_before_it_trains_is_ended_and_replaced():
    stage = Stage().after(WorkerReady("w0"))
    assert stage.step(Draining("w0")) == [("end", "w0"), ("request_worker", "w2")]


# scores and curves


def test_points_of_the_curves_may_be_sent_by_the_center():
    stage = Stage(is_sync=False).start()
    stage.step(Published((0,), (record(3), record(5))))
    assert [r.progress.round for r in stage.recorder.records] == [3, 5]


def test_in_rounds_only_the_first_rank_sends_points():
    stage = Stage().start().after(report("w1", 3), report("w0", 4))
    assert [r.progress.round for r in stage.recorder.records] == [4]


def test_the_newest_snapshot_is_scored_and_only_one_at_a_time():
    stage = Stage().start()
    assert stage.step(Published((0, 2, 4))) == [("evaluate", 4)]
    assert stage.step(Published((2, 4, 6))) == []
    assert stage.step(scored(4)) == [("evaluate", 6)]


def test_a_score_that_was_given_up_is_asked_for_again():
    stage = Stage().start().after(Published((0, 4)))
    assert stage.step(GaveUp("evaluation", "the evaluator died")) == [("evaluate", 4)]


# faults by plan


@BOTH
def test_a_fault_of_the_center_fires_once(is_sync):
    plan = FaultPlan((Fault(0, "kill", "center", "round", 3.0),))
    stage = Stage(is_sync=is_sync, faults=plan).start()
    news = Published((0,), (record(3),))
    assert ("inflict", plan.faults[0]) in stage.step(news)
    assert stage.said[-1] == "fault 1: kill center at round 3"
    assert all(told[0] != "inflict" for told in [*stage.step(news), *stage.steps(3)])
    assert stage.controller.planned_faults.fired == ["fault 1: kill center at round 3"]


def test_a_fault_of_any_worker_is_logged_with_the_id_of_that_worker():
    plan = FaultPlan((Fault(0, "kill", "rank 0", "round", 3.0), Fault(1, "stop", "w1", "step", 9)))
    stage = Stage(faults=plan).start()
    stage.step(Published((0,), faults=((0, "w0"), (1, "w1"))))
    told = ["fault 1: kill rank 0 at round 3 (w0)", "fault 2: stop w1 at step 9"]
    assert stage.said[-2:] == stage.controller.planned_faults.fired == told


# what comes late


def test_late_events_of_workers_that_are_gone_change_nothing():
    stage = Stage().start().after(Lost("w1", "the actor died"))
    stage.step(*stage.end("broken", 4, "w0"), Published((0, 4)))
    stage.step()
    before = len(stage.said)
    assert stage.step(*stage.end("finished", 99, "w1"), report("w1", 99)) == []
    told = stage.step(Draining("w1"), HandedIn("w1", {}), Lost("w1", "again"))
    assert told == [("forget", {})], "nobody will delete its file"
    assert len(stage.said) == before
    assert stage.state is State.WAITING
