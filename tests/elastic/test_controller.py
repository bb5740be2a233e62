"""The controller with a fake worker group: how a run starts, waits and is scored.

Further tests of the controller are in the other ``test_controller_*`` files.
"""

import dataclasses

import pytest
from controller_harness import BOTH, DIED, ControllerHarness, collected, record, report, scored

from raydl.core.reports import WorkerReport
from raydl.core.worker_group import (
    Draining,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Reported,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import ProcessLostError, RaydlError, ResourceError
from raydl.faults import FaultPlan
from raydl.faults.plan import Fault

# the start


def test_workers_are_requested_and_train_in_the_order_of_their_numbers_once_all_are_ready():
    harness = ControllerHarness()
    assert harness.worker_group.calls == [("request_worker", "w0"), ("request_worker", "w1")]
    assert harness.step(WorkerReady("w1")) == []
    assert harness.step(WorkerReady("w0")) == [("form", 1, ("w0", "w1"), 0)]
    assert harness.log_lines == ["1 of 2 workers are ready", "generation 1: w0, w1 start"]


def test_the_controller_acts_in_a_new_state_without_waiting():
    harness = ControllerHarness().start()
    harness.steps(2)
    assert [timeout == 0 for timeout in harness.worker_group.timeouts[-2:]] == [True, False]


def test_a_resumed_run_continues_the_numbers_of_its_generations():
    harness = ControllerHarness(first_round=40, first_generation=7)
    calls = harness.step(WorkerReady("w0"), WorkerReady("w1"))
    assert calls == [("form", 8, ("w0", "w1"), 40)]
    assert harness.controller.num_generations == 1


def test_workers_start_while_the_center_does_and_train_once_it_is_up():
    harness = ControllerHarness()
    harness.worker_group.events.clear()
    harness.step(WorkerReady("w0"), WorkerReady("w1"))
    harness.now += 100.0
    assert harness.step() == []
    assert ("form", 1, ("w0", "w1"), 0) in harness.step(Published((0,)))


def test_a_center_that_does_not_start_ends_the_run_with_an_error_message():
    harness = ControllerHarness()
    harness.worker_group.events.clear()
    harness.step(WorkerReady("w0"), WorkerReady("w1"))
    harness.now += 301.0
    with pytest.raises(RaydlError, match=r"^the center did not start within 300 s; the same"):
        harness.step()


def test_groups_that_share_a_replica_are_put_on_one_node_where_they_fit():
    harness = ControllerHarness(4, group_size=2, name="sync-easgd")
    nodes = {"w0": "a", "w1": "b", "w2": "b", "w3": "a"}
    calls = harness.step(*[WorkerReady(worker_id, node) for worker_id, node in nodes.items()])
    assert calls == [("form", 1, ("w0", "w3", "w1", "w2"), 0)]


def test_resumed_groups_are_the_groups_of_the_checkpoint_and_get_their_states():
    states = {"w0": {"a": 0}, "w3": {"a": 3}, "w2": {"a": 2}, "w1": {"a": 1}}
    harness = ControllerHarness(4, group_size=2, own_states=states)
    calls = harness.step(*[WorkerReady(f"w{i}", "b" if i else "a") for i in range(4)])
    assert calls == [("form", 1, ("w0", "w3", "w2", "w1"), 0)]
    assert harness.worker_group.own_states == states


@BOTH
def test_a_run_resumed_with_fewer_workers_uses_no_state_and_no_id_of_the_others_later(is_sync):
    states = {f"w{i}": {"number": i} for i in range(4)}
    harness = ControllerHarness(2, is_sync=is_sync, own_states=states).start()
    assert harness.worker_group.requested_states == {"w0": states["w0"], "w1": states["w1"]}
    assert ("request_worker", "w4") in harness.step(Lost("w0", "the actor died"))
    assert harness.worker_group.requested_states["w4"] is None


def test_a_resumed_worker_that_cannot_read_its_state_may_get_the_replica_of_a_leaver():
    harness = ControllerHarness(2, own_states={"w0": {"number": 0}, "w1": {"number": 1}})
    harness.step(GaveUp("saved state", "it is damaged", "w1"))
    assert "w1 starts from the center: it is damaged" in harness.log_lines
    harness.start()
    assert harness.worker_group.own_states == {"w0": {"number": 0}}


def test_waiting_is_bounded_and_the_log_gives_its_reason():
    harness = ControllerHarness().after(WorkerReady("w0"))
    harness.now = 6.0
    harness.step()
    what = "waiting for 1 more worker with {CPU: 1}; the cluster has {CPU: 1}"
    assert harness.log_lines[-1] == f"1 of 2 workers are ready; {what}"
    harness.now = 61.0
    with pytest.raises(ResourceError, match=r"1 of 2 workers .* after 61 s; waiting for 1 more"):
        harness.step()


def test_a_newcomer_that_dies_while_it_starts_is_replaced_and_the_others_train_on():
    harness = ControllerHarness((2, 3)).start()
    assert harness.step(Lost("w2", "the actor died")) == [("request_worker", "w3")]
    assert harness.state is State.TRAINING


def test_losses_in_a_row_without_progress_are_bounded():
    harness = ControllerHarness(2, max_restarts=3)
    for i in range(2, 5):
        harness.step(Lost(f"w{i - 1}", "the actor died"))
    with pytest.raises(ProcessLostError, match=r"loss 4 in a row .* elastic.max_restarts"):
        harness.step(Lost("w4", "the actor died"))


def test_losses_with_progress_between_them_are_not_in_a_row():
    harness = ControllerHarness((2, 3), max_restarts=2).start()
    for i in range(2, 9):
        harness.step(Lost(f"w{i}", "the actor died"), report("w0", i))
    assert harness.state is State.TRAINING


def test_the_records_of_any_worker_are_progress_between_losses_of_rank_0():
    harness = ControllerHarness((1, 3), max_restarts=2).start("w0", "w1", "w2")
    for number in range(3, 20):
        rank_0, *others = harness.worker_group.formed[-1].worker_ids
        reports = [report(w, number) for w in others]
        harness.step(Lost(rank_0, DIED), *reports, *harness.end("broken", number, *others))
        harness.step(Published((0, number)), WorkerReady(f"w{number}", "node"))
        harness.steps(3)
        assert harness.state is State.TRAINING


def test_a_checkpoint_that_was_collected_is_progress_between_losses():
    harness = ControllerHarness((2, 3), max_restarts=2, every_s=1.0).start()
    for number in range(2, 9):
        collect(harness, number)
        harness.step(collected(number), Lost(f"w{number}", DIED))
    assert harness.state is State.TRAINING


def collect(harness, round):
    """Let the controller ask for the states of a round."""
    harness.now += 2.0
    harness.step()
    kept = [Reported(WorkerReport(w, round, (), (round,), {})) for w in ("w0", "w1")]
    assert ("collect", round, ("w0", "w1")) in harness.step(Published((0, round)), *kept)


def test_a_checkpoint_of_a_round_that_was_reached_before_is_no_progress_between_losses():
    harness = ControllerHarness((2, 3), max_restarts=2, every_s=1.0).start()
    harness.step(Reported(WorkerReport("w0", 4, (record(9),), (), {})))
    for round, worker_id in ((5, "w2"), (6, "w3")):
        collect(harness, round)
        harness.step(collected(round), Lost(worker_id, DIED))
    collect(harness, 7)
    with pytest.raises(ProcessLostError, match=r"loss 3 in a row"):
        harness.step(collected(7), Lost("w4", DIED))


def test_rounds_that_are_trained_again_are_no_progress_between_losses():
    harness = ControllerHarness((2, 3), max_restarts=2).start()
    rounds = [report("w0", round) for round in (1, 2, 3)]
    harness.step(*rounds)
    for worker_id in ("w2", "w3"):
        harness.step(Lost(worker_id, "the actor died"), *rounds)
    with pytest.raises(ProcessLostError, match=r"loss 3 in a row"):
        harness.step(Lost("w4", "the actor died"), *rounds)


@BOTH
@pytest.mark.parametrize("is_first_scored", [True, False])
def test_the_center_of_a_resumed_run_is_scored_if_the_earlier_driver_had_no_score_of_it(
    is_sync, is_first_scored
):
    harness = ControllerHarness(is_sync=is_sync, first_round=40, is_first_scored=is_first_scored)
    evaluated = []
    harness.worker_group.evaluate = evaluated.append
    harness.start().steps(2)
    assert evaluated == ([] if is_first_scored else [40])


@BOTH
def test_a_center_lost_before_the_first_generation_restarts_from_its_first_state(is_sync):
    harness = ControllerHarness(is_sync=is_sync)
    assert harness.step(Lost("center", "the actor died")) == [("rebuild_center", None)]
    ready = [WorkerReady("w0"), WorkerReady("w1")]
    assert harness.step(*ready) == []
    assert harness.step(Published((0,))) == [("form", 1, ("w0", "w1"), 0)]


def test_a_worker_that_drains_before_it_trains_is_ended_and_replaced():
    harness = ControllerHarness().after(WorkerReady("w0"))
    assert harness.step(Draining("w0")) == [("end", "w0"), ("request_worker", "w2")]


# scores and curves


def test_points_of_the_curves_may_be_sent_by_the_center():
    harness = ControllerHarness(is_sync=False).start()
    harness.step(Published((0,), (record(3), record(5))))
    assert [r.progress.round for r in harness.recorder.records] == [3, 5]


def test_in_rounds_only_the_first_rank_sends_points():
    harness = ControllerHarness().start().after(report("w1", 3), report("w0", 4))
    assert [r.progress.round for r in harness.recorder.records] == [4]


def test_the_newest_snapshot_is_scored_and_only_one_at_a_time():
    harness = ControllerHarness().start()
    assert harness.step(Published((0, 2, 4))) == [("evaluate", 4)]
    assert harness.step(Published((2, 4, 6))) == []
    assert harness.step(scored(4)) == [("evaluate", 6)]


def test_a_score_that_was_given_up_is_requested_again():
    harness = ControllerHarness().start().after(Published((0, 4)))
    assert harness.step(GaveUp("evaluation", "the evaluator died")) == [("evaluate", 4)]


# faults by plan


@BOTH
def test_a_fault_of_the_center_fires_once(is_sync):
    plan = FaultPlan((Fault(0, "kill", "center", "round", 3.0),))
    harness = ControllerHarness(is_sync=is_sync, faults=plan).start()
    news = Published((0,), (record(3),))
    assert ("inflict", plan.faults[0]) in harness.step(news)
    assert harness.log_lines[-1] == "fault 1: kill center at round 3"
    assert all(call[0] != "inflict" for call in [*harness.step(news), *harness.steps(3)])
    assert harness.controller.planned_faults.fired == ["fault 1: kill center at round 3"]


def after_seconds(seconds):
    news = record(41)
    progress = dataclasses.replace(news.progress, seconds=seconds)
    return Published((0,), (dataclasses.replace(news, progress=progress),))


def test_the_seconds_of_a_fault_of_the_center_are_seconds_of_training():
    plan = FaultPlan((Fault(0, "kill", "center", "second", 12.0),))
    harness = ControllerHarness(faults=plan)
    harness.now = 100.0  # the start took long
    harness.start()
    assert all(call[0] != "inflict" for call in harness.step(after_seconds(11.0)))
    assert ("inflict", plan.faults[0]) in harness.step(after_seconds(12.5))


def test_a_fault_of_the_center_that_was_due_in_an_earlier_start_does_not_fire_again():
    plan = FaultPlan(
        (
            Fault(0, "kill", "center", "round", 3.0),
            Fault(1, "kill", "center", "second", 12.0),
            Fault(2, "kill", "center", "round", 41.0),
        )
    )
    harness = ControllerHarness(faults=plan, first_round=40, first_seconds=30.0).start()
    calls = harness.step(after_seconds(31.0))
    assert [call for call in calls if call[0] == "inflict"] == [("inflict", plan.faults[2])]


def test_a_fault_of_any_worker_is_logged_with_the_id_of_that_worker():
    plan = FaultPlan((Fault(0, "kill", "rank 0", "round", 3.0), Fault(1, "stop", "w1", "step", 9)))
    harness = ControllerHarness(faults=plan).start()
    harness.step(Published((0,), faults=((0, "w0"), (1, "w1"))))
    fired = ["fault 1: kill rank 0 at round 3 (w0)", "fault 2: stop w1 at step 9"]
    assert harness.log_lines[-2:] == harness.controller.planned_faults.fired == fired


# late events


def test_late_events_of_workers_that_are_gone_change_nothing():
    harness = ControllerHarness().start().after(Lost("w1", "the actor died"))
    harness.step(*harness.end("broken", 4, "w0"), Published((0, 4)))
    harness.step()
    before = len(harness.log_lines)
    assert harness.step(*harness.end("finished", 99, "w1"), report("w1", 99)) == []
    calls = harness.step(Draining("w1"), HandedIn("w1", {}), Lost("w1", "again"))
    assert calls == [("forget", {})], "nothing else will delete its file"
    assert len(harness.log_lines) == before
    assert harness.state is State.WAITING
