"""Hot spares stand by until a worker is lost or leaves, and then train in its place."""

import pytest
from controller_harness import BOTH, DIED, ControllerHarness

from raydl.config import ScalingConfig
from raydl.core.membership import Candidates, Membership, next_membership
from raydl.core.reports import Outcome
from raydl.core.saved_state import SavedState
from raydl.core.worker_group import (
    Changed,
    Draining,
    Failed,
    HandedIn,
    Lost,
    Published,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import ConfigError, InfrastructureError


def with_spare(num_workers=2, *, spares=1, nodes=("spare node",), **more):
    """Return a harness whose two workers train, and whose spares are ready on these nodes."""
    harness = ControllerHarness(num_workers, spares=spares, **more).start()
    ready = [WorkerReady(f"w{2 + i}", node) for i, node in enumerate(nodes)]
    return harness.after(*ready)


def formed(harness):
    return harness.worker_group.formed[-1].worker_ids


def replace_lost(harness, lost="w1", survivor="w0"):
    """Lose a worker and end its generation; return the calls to the worker group."""
    calls = harness.step(Lost(lost, DIED))
    if harness.is_sync:
        calls += harness.step(*harness.end(Outcome.BROKEN, 4, survivor))
        calls += harness.step(Published((0, 4)))
        return calls + harness.steps(2)
    return calls + harness.step(Changed()) + harness.step(Changed())


@BOTH
def test_spares_are_requested_when_the_first_generation_trains(is_sync):
    harness = ControllerHarness(2, spares=1, is_sync=is_sync)
    assert harness.step() == []
    calls = harness.step(WorkerReady("w0", "a"), WorkerReady("w1", "b"))
    assert [call[0] for call in calls] == ["form", "request_spare"]
    assert calls[1] == ("request_spare", "w2")


@BOTH
def test_a_spare_that_is_ready_does_not_train_beside_the_others(is_sync):
    harness = with_spare(is_sync=is_sync)
    assert harness.steps(3) == []
    assert formed(harness) == ("w0", "w1")
    assert harness.controller.run_state.counts() == {"training": 2, "ready": 1}


@BOTH
def test_a_spare_takes_the_place_of_a_lost_worker_whose_replacement_is_the_next_spare(is_sync):
    harness = with_spare(is_sync=is_sync)
    calls = replace_lost(harness)
    assert ("request_worker", "w3") in calls
    assert not [call for call in calls if call[0] == "request_spare"], "w2 has no CPU of its own"
    assert formed(harness) == ("w0", "w2")
    assert harness.state is State.TRAINING
    harness.step(WorkerReady("w3", "node"))
    assert harness.steps(2) == []
    assert formed(harness) == ("w0", "w2")


@BOTH
def test_a_spare_that_trained_and_is_lost_is_replaced_by_a_spare(is_sync):
    harness = with_spare(is_sync=is_sync)
    replace_lost(harness)
    harness.step(WorkerReady("w3", "node"))
    calls = replace_lost(harness, "w2")
    assert ("request_spare", "w4") in calls
    assert formed(harness) == ("w0", "w3")


@BOTH
def test_a_spare_that_is_lost_while_it_stands_by_is_replaced_without_a_pause(is_sync):
    harness = with_spare(is_sync=is_sync)
    assert harness.step(Lost("w2", DIED)) == [("request_spare", "w3")]
    assert harness.state is State.TRAINING


def failed(worker_id):
    return Failed(worker_id, InfrastructureError(worker_id, "MemoryError"))


@BOTH
def test_a_spare_that_fails_again_and_again_is_not_replaced_and_the_run_continues(is_sync):
    harness = with_spare(nodes=(), is_sync=is_sync, elastic={"max_worker_errors": 2})
    assert harness.step(failed("w2")) == [("end", "w2"), ("request_spare", "w3")]
    assert harness.step(failed("w3")) == [("end", "w3"), ("request_spare", "w4")]
    assert harness.step(failed("w4")) + harness.steps(3) == [("end", "w4")]
    too_often = (
        "w4, which replaces w2, failed for the third time within an hour, more often than "
        "elastic.max_worker_errors; it was a spare and is not replaced"
    )
    assert harness.log_lines.count(too_often) == 1
    assert not [call for call in replace_lost(harness) if call[0] == "request_spare"]
    assert harness.controller.run_state.why_stop == ""


@BOTH
def test_a_spare_that_trains_and_fails_too_often_stops_a_run_that_needs_it(is_sync):
    harness = with_spare(is_sync=is_sync, elastic={"max_worker_errors": 0})
    replace_lost(harness)  # w3 is still pending
    harness.step(failed("w2"))
    assert harness.controller.run_state.why_stop.startswith(
        "w2 failed for the first time within an hour"
    )


def test_a_spare_that_fails_again_and_again_does_not_affect_other_spares():
    harness = with_spare(nodes=(), spares=2, elastic={"max_worker_errors": 1})
    assert harness.step(failed("w2"))[-1] == ("request_spare", "w4")
    assert harness.step(failed("w4")) == [("end", "w4")]
    assert harness.step(Lost("w3", DIED)) == [("request_spare", "w5")]


def test_the_errors_of_a_worker_do_not_pass_to_a_spare_requested_with_its_replacement():
    harness = with_spare(nodes=(), elastic={"max_worker_errors": 1})
    harness.step(failed("w2"))
    calls = harness.step(failed("w1"))
    assert ("request_worker", "w4") in calls
    assert harness.step(failed("w3")) == [("end", "w3")], "the second error of this spare"
    harness.step(failed("w4"))
    assert harness.controller.run_state.why_stop.startswith(
        "w4, which replaces w1, failed for the second"
    )


def test_an_error_of_your_own_code_in_a_spare_stops_the_run():
    harness = with_spare(nodes=())
    harness.step(Failed("w2", ZeroDivisionError("my own mistake")))
    assert harness.controller.run_state.why_stop == "w2 raised ZeroDivisionError: my own mistake"


def test_a_run_of_a_fixed_number_of_workers_does_not_wait_for_a_new_process():
    harness = with_spare(2)
    replace_lost(harness)
    assert harness.state is State.TRAINING
    assert not any("workers are left" in line for line in harness.log_lines)


def test_the_spare_on_the_node_with_the_fewest_workers_joins():
    harness = with_spare(spares=2, nodes=("node", "another node"), is_sync=True)
    replace_lost(harness)
    assert formed(harness) == ("w0", "w3")


def on_two_nodes(num_workers, *, is_sync=True, **more):
    """Return a harness with w0 on node a, w1 on node b, and the spare w2 ready on node a."""
    harness = ControllerHarness(num_workers, spares=1, is_sync=is_sync, **more)
    harness.step(WorkerReady("w0", "a"), WorkerReady("w1", "b"))
    if not is_sync:
        harness.step(Changed())
    return harness.after(WorkerReady("w2", "a"))


@BOTH
def test_a_spare_on_a_full_node_stands_by_if_the_run_may_go_on_with_fewer_workers(is_sync):
    harness = on_two_nodes((1, 2), is_sync=is_sync)
    replace_lost(harness)
    assert formed(harness) == ("w0",)
    assert harness.controller.run_state.counts() == {"training": 1, "ready": 1, "starting": 1}


@BOTH
def test_a_spare_joins_on_the_node_that_lost_a_worker(is_sync):
    harness = on_two_nodes((1, 2), is_sync=is_sync)
    replace_lost(harness, "w0", "w1")
    assert set(formed(harness)) == {"w1", "w2"}


def test_a_spare_on_a_full_node_joins_if_it_has_its_own_device():
    harness = on_two_nodes((1, 2), gpus=1.0)
    replace_lost(harness)
    assert formed(harness) == ("w0", "w2")


@BOTH
def test_a_spare_that_shares_a_node_makes_room_for_a_worker_on_an_idle_one(is_sync):
    harness = on_two_nodes(2, is_sync=is_sync)
    replace_lost(harness)
    assert formed(harness) == ("w0", "w2"), "a fixed number of workers trains"
    calls = harness.step(WorkerReady("w3", "c"))
    if is_sync:
        assert calls == [("vote", "regroup")]
        calls = harness.step(*harness.end(Outcome.REGROUP, 6, "w0", "w2"), Published((4, 6)))
    else:
        assert calls == [("dismiss", "w2")]
        calls = harness.step(*harness.end(Outcome.LEFT, 6, "w2"))
        calls += harness.step(Changed()) + harness.step(Changed())
    harness.steps(2)
    assert formed(harness) == ("w0", "w3")
    assert harness.controller.run_state.counts() == {"training": 2, "ready": 1}
    assert harness.steps(3) == [], "w2 is the spare again"
    assert any("w2 makes room" in line or "w2 made room" in line for line in harness.log_lines)


@BOTH
def test_a_spare_that_shares_no_node_trains_on_when_another_worker_is_ready(is_sync):
    harness = on_two_nodes(2, is_sync=is_sync)
    replace_lost(harness, "w0", "w1")
    assert set(formed(harness)) == {"w1", "w2"}
    assert harness.step(WorkerReady("w3", "c")) + harness.steps(2) == []


def test_a_spare_that_shares_a_node_trains_on_if_the_other_worker_is_lost_as_well():
    harness = on_two_nodes(2)
    replace_lost(harness)
    assert harness.step(WorkerReady("w3", "c")) == [("vote", "regroup")]
    harness.step(Lost("w3", DIED))
    harness.step(*harness.end(Outcome.REGROUP, 6, "w0", "w2"), Published((4, 6)))
    harness.steps(2)
    assert formed(harness) == ("w0", "w2")


def test_a_spare_replaces_a_straggler_which_becomes_the_spare():
    now = Membership(1, ("w0", "w1"))
    limits = {"min_workers": 2, "max_workers": 2, "patience_s": 5.0}
    late = Candidates(
        ready=("w0", "w2"), waited_s=9.0, absent=("w1",), causes={"w1": "is late and left out"}
    )
    without, reason = next_membership(now, late, **limits)
    assert (without.worker_ids, reason) == (("w0", "w2"), "w1 is late and left out, w2 joins")
    back = Candidates(ready=("w0", "w1", "w2"), waited_s=9.0)
    assert next_membership(without, back, **limits)[0].worker_ids == ("w0", "w2")


def test_a_spare_continues_with_the_replica_of_a_worker_that_leaves_with_notice():
    harness = with_spare(is_sync=True)
    assert harness.step(Draining("w1")) == [("request_worker", "w3"), ("vote", "regroup")]
    harness.step(*harness.end(Outcome.REGROUP, 4, "w0", "w1"), Published((0, 4)))
    state = SavedState(None, "w1", None)
    calls = harness.step(HandedIn("w1", state))
    assert ("hand_over", "w2", state) in calls


def test_the_replica_of_a_worker_that_no_other_replaces_is_not_kept_for_a_spare():
    harness = with_spare((1, 2), is_sync=True)
    assert harness.controller.remove("w1")[0]
    harness.step()
    calls = harness.step(*harness.end(Outcome.REGROUP, 4, "w0", "w1"), Published((0, 4)))
    calls += harness.steps(3)
    assert not [call for call in calls if call[0] in ("hand_in", "hand_over")]
    assert formed(harness) == ("w0",)


def test_a_spare_that_is_removed_by_its_id_is_not_replaced():
    harness = with_spare()
    assert harness.controller.remove("w2") == (True, "w2 was ended; it was a spare")
    assert harness.steps(2) == []


@BOTH
def test_the_spare_after_one_that_trains_can_be_removed_for_good_too(is_sync):
    harness = with_spare(is_sync=is_sync)
    replace_lost(harness)
    harness.step(WorkerReady("w3", "node"))
    assert harness.controller.remove("w3") == (True, "w3 was ended; it was a spare")
    assert [call for call in harness.steps(3) if call[0].startswith("request")] == []
    calls = harness.step(Lost("w2", DIED)) + harness.steps(2)
    assert ("request_worker", "w4") in calls, "two workers shall train"


def test_a_run_that_ends_requests_no_more_spares():
    harness = with_spare()
    harness.step(*harness.end(Outcome.FINISHED, 8, "w0", "w1"), Published((0, 8)))
    assert harness.state is State.FINISHING
    assert not [call for call in harness.step(Lost("w2", DIED)) if call[0] == "request_spare"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"spares": -1}, "scaling.spares must be 0 or more, got -1"),
        ({"spares": 0.5}, "scaling.spares must be a whole number, got 0.5"),
        ({"spares": 1, "num_workers": 0}, "scaling.spares must be 0 without workers, got 1"),
    ],
)
def test_a_wrong_number_of_spares_is_refused_with_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as error:
        ScalingConfig(**settings)
    assert str(error.value) == sentence
