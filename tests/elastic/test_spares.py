"""Hot spares stand by until a worker is lost or leaves, and then train in its place."""

import pytest
from stages import BOTH, DIED, Stage

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
    """Return a stage whose two workers train, and whose spares are ready on these nodes."""
    stage = Stage(num_workers, spares=spares, **more).start()
    ready = [WorkerReady(f"w{2 + i}", node) for i, node in enumerate(nodes)]
    return stage.after(*ready)


def formed(stage):
    return stage.worker_group.formed[-1].worker_ids


def replace_lost(stage, lost="w1", survivor="w0"):
    """Let a worker be lost, and its generation end; return the calls to the worker group."""
    told = stage.step(Lost(lost, DIED))
    if stage.is_sync:
        told += stage.step(*stage.end(Outcome.BROKEN, 4, survivor))
        told += stage.step(Published((0, 4)))
        return told + stage.steps(2)
    return told + stage.step(Changed()) + stage.step(Changed())


@BOTH
def test_spares_are_requested_when_the_first_generation_trains(is_sync):
    stage = Stage(2, spares=1, is_sync=is_sync)
    assert stage.step() == []
    told = stage.step(WorkerReady("w0", "a"), WorkerReady("w1", "b"))
    assert [call[0] for call in told] == ["form", "request_spare"]
    assert told[1] == ("request_spare", "w2")


@BOTH
def test_a_spare_that_is_ready_does_not_train_beside_the_others(is_sync):
    stage = with_spare(is_sync=is_sync)
    assert stage.steps(3) == []
    assert formed(stage) == ("w0", "w1")
    assert stage.controller.worker_registry.counts() == {"training": 2, "ready": 1}


@BOTH
def test_a_spare_takes_the_place_of_a_lost_worker_whose_replacement_is_the_next_spare(is_sync):
    stage = with_spare(is_sync=is_sync)
    told = replace_lost(stage)
    assert ("request_worker", "w3") in told
    assert not [call for call in told if call[0] == "request_spare"], "w2 has no CPU of its own"
    assert formed(stage) == ("w0", "w2")
    assert stage.state is State.TRAINING
    stage.step(WorkerReady("w3", "node"))
    assert stage.steps(2) == []
    assert formed(stage) == ("w0", "w2")


@BOTH
def test_a_spare_that_trained_and_is_lost_is_replaced_by_a_spare(is_sync):
    stage = with_spare(is_sync=is_sync)
    replace_lost(stage)
    stage.step(WorkerReady("w3", "node"))
    told = replace_lost(stage, "w2")
    assert ("request_spare", "w4") in told
    assert formed(stage) == ("w0", "w3")


@BOTH
def test_a_spare_that_is_lost_while_it_stands_by_is_replaced_without_a_pause(is_sync):
    stage = with_spare(is_sync=is_sync)
    assert stage.step(Lost("w2", DIED)) == [("request_spare", "w3")]
    assert stage.state is State.TRAINING


def failed(worker_id):
    return Failed(worker_id, InfrastructureError(worker_id, "MemoryError"))


@BOTH
def test_a_spare_that_fails_again_and_again_is_not_replaced_and_the_run_continues(is_sync):
    stage = with_spare(nodes=(), is_sync=is_sync, elastic={"max_worker_errors": 2})
    assert stage.step(failed("w2")) == [("end", "w2"), ("request_spare", "w3")]
    assert stage.step(failed("w3")) == [("end", "w3"), ("request_spare", "w4")]
    assert stage.step(failed("w4")) + stage.steps(3) == [("end", "w4")]
    too_often = (
        "w4, which replaces w2, failed for the third time within an hour, more often than "
        "elastic.max_worker_errors; it was a spare and is not replaced"
    )
    assert stage.said.count(too_often) == 1
    assert not [call for call in replace_lost(stage) if call[0] == "request_spare"]
    assert stage.controller._why_stop == ""


@BOTH
def test_a_spare_that_trains_and_fails_too_often_stops_a_run_that_needs_it(is_sync):
    stage = with_spare(is_sync=is_sync, elastic={"max_worker_errors": 0})
    replace_lost(stage)  # w3 is still pending
    stage.step(failed("w2"))
    assert stage.controller._why_stop.startswith("w2 failed for the first time within an hour")


def test_one_spare_that_fails_again_and_again_takes_no_other_spare_with_it():
    stage = with_spare(nodes=(), spares=2, elastic={"max_worker_errors": 1})
    assert stage.step(failed("w2"))[-1] == ("request_spare", "w4")
    assert stage.step(failed("w4")) == [("end", "w4")]
    assert stage.step(Lost("w3", DIED)) == [("request_spare", "w5")]


def test_the_errors_of_a_worker_do_not_pass_to_a_spare_requested_with_its_replacement():
    stage = with_spare(nodes=(), elastic={"max_worker_errors": 1})
    stage.step(failed("w2"))
    told = stage.step(failed("w1"))
    assert ("request_worker", "w4") in told
    assert stage.step(failed("w3")) == [("end", "w3")], "the second error of this spare"
    stage.step(failed("w4"))
    assert stage.controller._why_stop.startswith("w4, which replaces w1, failed for the second")


def test_an_error_of_your_own_code_in_a_spare_stops_the_run():
    stage = with_spare(nodes=())
    stage.step(Failed("w2", ZeroDivisionError("my own mistake")))
    assert stage.controller._why_stop == "w2 raised ZeroDivisionError: my own mistake"


def test_a_run_of_a_fixed_number_of_workers_does_not_wait_for_a_new_process():
    stage = with_spare(2)
    replace_lost(stage)
    assert stage.state is State.TRAINING
    assert not any("workers are left" in said for said in stage.said)


def test_the_spare_on_the_node_with_the_fewest_workers_joins():
    stage = with_spare(spares=2, nodes=("node", "another node"), is_sync=True)
    replace_lost(stage)
    assert formed(stage) == ("w0", "w3")


def on_two_nodes(num_workers, *, is_sync=True, **more):
    """Return a stage that trains w0 on node a and w1 on node b; the spare w2 is ready on node a."""
    stage = Stage(num_workers, spares=1, is_sync=is_sync, **more)
    stage.step(WorkerReady("w0", "a"), WorkerReady("w1", "b"))
    if not is_sync:
        stage.step(Changed())
    return stage.after(WorkerReady("w2", "a"))


@BOTH
def test_a_spare_on_a_full_node_stands_by_if_the_run_may_go_on_with_fewer_workers(is_sync):
    stage = on_two_nodes((1, 2), is_sync=is_sync)
    replace_lost(stage)
    assert formed(stage) == ("w0",)
    assert stage.controller.worker_registry.counts() == {"training": 1, "ready": 1, "starting": 1}


@BOTH
def test_a_spare_joins_on_the_node_that_lost_a_worker(is_sync):
    stage = on_two_nodes((1, 2), is_sync=is_sync)
    replace_lost(stage, "w0", "w1")
    assert set(formed(stage)) == {"w1", "w2"}


def test_a_spare_on_a_full_node_joins_if_it_has_a_device_of_its_own():
    stage = on_two_nodes((1, 2), gpus=1.0)
    replace_lost(stage)
    assert formed(stage) == ("w0", "w2")


@BOTH
def test_a_spare_that_shares_a_node_makes_room_for_a_worker_on_an_idle_one(is_sync):
    stage = on_two_nodes(2, is_sync=is_sync)
    replace_lost(stage)
    assert formed(stage) == ("w0", "w2"), "a fixed number of workers trains"
    told = stage.step(WorkerReady("w3", "c"))
    if is_sync:
        assert told == [("vote", "regroup")]
        told = stage.step(*stage.end(Outcome.REGROUP, 6, "w0", "w2"), Published((4, 6)))
    else:
        assert told == [("dismiss", "w2")]
        told = stage.step(*stage.end(Outcome.LEFT, 6, "w2"))
        told += stage.step(Changed()) + stage.step(Changed())
    stage.steps(2)
    assert formed(stage) == ("w0", "w3")
    assert stage.controller.worker_registry.counts() == {"training": 2, "ready": 1}
    assert stage.steps(3) == [], "w2 is the spare again"
    assert any("w2 makes room" in said or "w2 made room" in said for said in stage.said)


@BOTH
def test_a_spare_that_shares_no_node_trains_on_when_another_worker_is_ready(is_sync):
    stage = on_two_nodes(2, is_sync=is_sync)
    replace_lost(stage, "w0", "w1")
    assert set(formed(stage)) == {"w1", "w2"}
    assert stage.step(WorkerReady("w3", "c")) + stage.steps(2) == []


def test_a_spare_that_shares_a_node_trains_on_if_the_other_worker_is_lost_as_well():
    stage = on_two_nodes(2)
    replace_lost(stage)
    assert stage.step(WorkerReady("w3", "c")) == [("vote", "regroup")]
    stage.step(Lost("w3", DIED))
    stage.step(*stage.end(Outcome.REGROUP, 6, "w0", "w2"), Published((4, 6)))
    stage.steps(2)
    assert formed(stage) == ("w0", "w2")


def test_a_spare_takes_the_place_of_a_straggler_which_then_stands_by_itself():
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
    stage = with_spare(is_sync=True)
    assert stage.step(Draining("w1")) == [("request_worker", "w3"), ("vote", "regroup")]
    stage.step(*stage.end(Outcome.REGROUP, 4, "w0", "w1"), Published((0, 4)))
    state = SavedState(None, "w1", None)
    told = stage.step(HandedIn("w1", state))
    assert ("hand_over", "w2", state) in told


def test_the_replica_of_a_worker_that_no_other_replaces_is_not_kept_for_a_spare():
    stage = with_spare((1, 2), is_sync=True)
    assert stage.controller.remove("w1")[0]
    stage.step()
    told = stage.step(*stage.end(Outcome.REGROUP, 4, "w0", "w1"), Published((0, 4)))
    told += stage.steps(3)
    assert not [call for call in told if call[0] in ("hand_in", "hand_over")]
    assert formed(stage) == ("w0",)


def test_a_spare_that_is_removed_by_its_id_is_not_replaced():
    stage = with_spare()
    assert stage.controller.remove("w2") == (True, "w2 was ended; it was a spare")
    assert stage.steps(2) == []


def test_a_run_that_ends_requests_no_more_spares():
    stage = with_spare()
    stage.step(*stage.end(Outcome.FINISHED, 8, "w0", "w1"), Published((0, 8)))
    assert stage.state is State.FINISHING
    assert not [call for call in stage.step(Lost("w2", DIED)) if call[0] == "request_spare"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"spares": -1}, "scaling.spares must be 0 or more, got -1"),
        ({"spares": 0.5}, "scaling.spares must be a whole number, got 0.5"),
        ({"spares": 1, "num_workers": 0}, "scaling.spares must be 0 without workers, got 1"),
    ],
)
def test_a_wrong_number_of_spares_is_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as error:
        ScalingConfig(**settings)
    assert str(error.value) == sentence
