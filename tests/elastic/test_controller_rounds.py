"""The controller of synchronous methods: workers join, leave, are late or lost in each state."""

from dataclasses import replace

import pytest
from controller_harness import DIED, ControllerHarness, collected, report, scored

from raydl.core.reports import Outcome
from raydl.core.worker_group import (
    Draining,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    TookOver,
    WorkerReady,
)
from raydl.elastic.facts import LeaveOut
from raydl.elastic.membership_policy import could_train
from raydl.elastic.run_state import State
from raydl.elastic.state import Phase
from raydl.errors import ProcessLostError, RaydlError, ResourceError


def regrouping():
    """Return a harness in which w2 is ready and the others are about to leave their loops."""
    harness = ControllerHarness((2, 3)).start()
    assert harness.step(WorkerReady("w2")) == [("vote", "regroup")]
    assert harness.state is State.REGROUPING
    return harness


# joining and leaving


def test_a_newcomer_joins_at_a_round_boundary():
    harness = regrouping()
    calls = harness.step(*harness.end("regroup", 7, "w0", "w1"), scored(7))
    assert calls == [("publish", "w0")], "a present worker publishes the center"
    assert harness.step(Published((0, 7))) == []
    assert harness.step() == [("form", 2, ("w0", "w1", "w2"), 7)]
    assert harness.log_lines[-1] == "generation 2: w2 joins"


def test_the_copy_that_a_new_generation_starts_from_is_not_scored_but_the_next_snapshot_is():
    """The evaluator would take CPU time from the workers at each loss."""
    harness = regrouping()
    harness.step(*harness.end("regroup", 7, "w0", "w1"))
    assert harness.step(Published((0, 7))) == []  # ("evaluate", 7) would be here
    harness.step()
    assert harness.step(Published((0, 7, 9))) == [("evaluate", 9)]


def test_a_round_that_is_trained_again_is_scored_when_it_is_due():
    harness = regrouping()
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 5)))
    harness.step(Lost("center", DIED))
    harness.step(Published((0, 5)), scored(5))
    harness.step(Lost("w0", DIED), Lost("w1", DIED), Lost("w2", DIED))
    harness.step(*(WorkerReady(f"w{n}") for n in range(3, 6)))
    assert ("form", 2, ("w3", "w4", "w5"), 5) in [*harness.worker_group.calls, *harness.steps(3)]
    assert ("evaluate", 7) in harness.step(Published((0, 5, 7)))


def test_a_newcomer_that_dies_before_the_regroup_is_over_is_forgotten():
    harness = regrouping().after(Lost("w2", DIED))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert ("form", 2, ("w0", "w1"), 7) in harness.step()


def test_the_others_continue_without_a_newcomer_that_dies_while_it_joins():
    harness = regrouping()
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    harness.step()
    assert harness.step(Lost("w2", DIED)) == [("request_worker", "w3"), ("abandon", 2)]
    harness.step(*harness.end("broken", 7, "w0", "w1"))
    assert harness.step() == [("form", 3, ("w0", "w1"), 7)]
    assert harness.log_lines[-1] == "generation 3: w2 was lost"


def test_a_run_that_ends_in_the_round_of_a_regroup_just_ends():
    harness = regrouping()
    harness.step(*harness.end("finished", 7, "w0", "w1"), Published((0, 7)))
    assert harness.state is State.FINISHING


@pytest.mark.parametrize("leaver", ["w0", "w1"])
def test_a_leaver_hands_in_its_state_and_its_replacement_gets_it(leaver):
    harness = ControllerHarness().start()
    assert harness.step(Draining(leaver)) == [("request_worker", "w2"), ("vote", "regroup")]
    harness.step(WorkerReady("w2"))
    calls = harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)), scored(7))
    assert calls == [("hand_in", leaver)], "the leaver stays: its copy may be needed"
    assert harness.step() == [], "its state is being handed to the newcomer"
    other = "w1" if leaver == "w0" else "w0"
    state = {"mine": 1}
    assert harness.step(HandedIn(leaver, state)) == [("hand_over", "w2", state)]
    assert harness.step() == [], "no worker waits for it in an exchange"
    calls = harness.step(TookOver("w2"))
    assert calls == [("forget", state), ("form", 2, (other, "w2"), 7), ("end", leaver)]
    assert harness.worker_group.own_states == {"w2": state}
    assert leaver not in harness.controller.run_state.workers


def test_the_run_does_not_wait_for_a_state_that_will_not_arrive():
    harness = ControllerHarness().start().after(Draining("w1"), WorkerReady("w2"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    calls = harness.step(GaveUp("hand in", "it died", "w1"))
    assert calls == [("form", 2, ("w0", "w2"), 7), ("end", "w1")]
    assert harness.worker_group.own_states == {}
    assert "the replica of w1 is not handed over: it died" in harness.log_lines


def handing_over():
    """Return a harness in which w2 takes over the state that w1 has handed in."""
    harness = ControllerHarness().start().after(Draining("w1"), WorkerReady("w2"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert harness.step(HandedIn("w1", {"mine": 1})) == [("hand_over", "w2", {"mine": 1})]
    return harness


def test_a_newcomer_that_cannot_take_over_a_replica_starts_from_the_center():
    harness = handing_over()
    calls = harness.step(GaveUp("hand over", "it is damaged", "w2"))
    assert calls == [("forget", {"mine": 1}), ("form", 2, ("w0", "w2"), 7), ("end", "w1")]
    assert harness.worker_group.own_states == {}
    assert "w2 starts from the center: it is damaged" in harness.log_lines


def test_a_replica_that_was_lost_with_its_newcomer_is_not_handed_over_again():
    harness = handing_over()
    assert harness.step(Lost("w2", DIED))[:2] == [("forget", {"mine": 1}), ("request_worker", "w3")]
    assert ("form", 2, ("w0", "w3"), 7) in harness.step(WorkerReady("w3"))
    assert harness.worker_group.own_states == {}


@pytest.mark.parametrize("part", ["hand in", "take over"])
def test_the_run_does_not_wait_for_a_handover_that_takes_minutes(part):
    harness = ControllerHarness().start().after(Draining("w1"), WorkerReady("w2"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    if part == "take over":
        harness.step(HandedIn("w1", {"mine": 1}))
    harness.now += 119.0
    assert harness.step() == []
    harness.now += 2.0
    assert ("form", 2, ("w0", "w2"), 7) in harness.steps(2)
    assert harness.worker_group.own_states == {}
    assert any("it took longer than 120 s" in line for line in harness.log_lines)
    late = TookOver("w2") if part == "take over" else HandedIn("w1", {"mine": 1})
    assert harness.step(late) == ([] if part == "take over" else [("forget", {"mine": 1})])


def test_a_replica_that_no_newcomer_needs_is_not_handed_in():
    harness = ControllerHarness((1, 2)).start()
    assert harness.controller.remove("w1")[0]
    assert harness.step() == [("vote", "regroup")]
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert harness.worker_group.calls == [("evaluate", 7)]
    assert harness.step() == [("form", 2, ("w0",), 7), ("end", "w1")]


def test_the_others_train_on_while_a_late_newcomer_reads_a_replica():
    harness = ControllerHarness((1, 2)).start().after(Draining("w1"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    harness.step(HandedIn("w1", {"mine": 1}))
    assert harness.worker_group.formed[-1].worker_ids == ("w0",), "w2 is not up yet"
    assert harness.step(WorkerReady("w2")) == [("hand_over", "w2", {"mine": 1})]
    assert harness.step() == []
    assert harness.step(TookOver("w2")) == [("vote", "regroup")]


def test_two_drains_may_overlap():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2")
    harness.step(Draining("w1"))
    assert harness.state is State.REGROUPING
    harness.step(Draining("w0"))
    harness.step(*harness.end("regroup", 7, "w0", "w1", "w2"), Published((0, 7)))
    assert ("form", 2, ("w2",), 7) in harness.step()
    assert (
        harness.log_lines[-1] == "generation 2: w0 is on a draining node, w1 is on a draining node"
    )


def test_when_all_nodes_drain_the_run_keeps_a_checkpoint_waits_and_continues():
    harness = ControllerHarness().start().after(Draining("w0"), Draining("w1"))
    calls = harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)), scored(7))
    assert calls == [("hand_in", "w0"), ("hand_in", "w1")]
    assert harness.step(HandedIn("w0", {}), HandedIn("w1", {})) == [("collect", 7, ("w0", "w1"))]
    assert harness.step(collected(7, "w0", "w1")) == [("end", "w0"), ("end", "w1")]
    why = "0 of 2 workers are left (w0 is on a draining node, w1 is on a draining node)"
    assert harness.log_lines[-1] == why
    harness.now += 20.0
    harness.step()
    assert harness.log_lines[-1].startswith(f"{why}; waiting for")
    calls = harness.step(WorkerReady("w2"), WorkerReady("w3"))
    assert calls == [("hand_over", "w2", {}), ("hand_over", "w3", {})]
    assert ("form", 2, ("w2", "w3"), 7) in harness.step(TookOver("w2"), TookOver("w3"))


def test_no_replica_goes_to_a_newcomer_whose_loss_is_among_the_same_news():
    harness = ControllerHarness().start().after(Draining("w1"), WorkerReady("w2"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    calls = harness.step(HandedIn("w1", {"mine": 1}), Lost("w2", DIED))
    assert not any(call[0] in ("hand_over", "forget") for call in calls)
    assert ("hand_over", "w3", {"mine": 1}) in harness.step(WorkerReady("w3"))


def test_replicas_that_newcomers_have_read_are_deleted_in_the_order_of_their_ranks():
    leavers, newcomers = [f"w{i}" for i in range(8)], [f"w{i}" for i in range(8, 16)]
    harness = ControllerHarness(8).start(*leavers).after(*map(Draining, leavers))
    harness.step(*harness.end("regroup", 7, *leavers), Published((0, 7)), scored(7))
    harness.step(*(HandedIn(w, {"of": w}) for w in leavers), collected(7, *leavers))
    harness.steps(2)
    harness.step(*map(WorkerReady, newcomers))
    calls = harness.step(*map(TookOver, newcomers))
    deleted = [call[1]["of"] for call in calls if call[0] == "forget"]
    assert deleted == leavers


def test_a_run_below_the_minimum_of_workers_does_not_wait_for_ever():
    harness = ControllerHarness().start().after(Lost("w1", DIED))
    harness.step(*harness.end("broken", 7, "w0"), Published((0, 7)))
    harness.now += 61.0
    with pytest.raises(ResourceError, match=r"1 of 2 workers are left .* --resume resumes the run"):
        harness.step()


def test_a_removed_worker_leaves_after_the_round():
    harness = ControllerHarness((1, 2)).start()
    ok, sentence = harness.controller.remove("w1")
    assert (ok, sentence) == (True, "w1 leaves after its next exchange")
    assert harness.step() == [("vote", "regroup")]
    harness.step(*harness.end("regroup", 3, "w0", "w1"), Published((0, 3)))
    assert ("form", 2, ("w0",), 3) in harness.step()
    assert harness.log_lines[-1] == "generation 2: w1 was removed"


# losing workers


@pytest.mark.parametrize("lost", ["w0", "w1", "w2"])
def test_when_a_worker_is_lost_the_others_continue_from_the_furthest_round(lost):
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2")
    assert harness.step(Lost(lost, DIED)) == [("request_worker", "w3"), ("abandon", 1)]
    assert harness.state is State.RECOVERING
    first, second = (w for w in ("w0", "w1", "w2") if w != lost)
    assert harness.step(*harness.end("broken", 6, first)) == []
    assert harness.step(*harness.end("broken", 7, second)) == [("publish", second)]
    harness.step(Published((0, 7)))
    assert ("form", 2, (first, second), 7) in harness.step()
    assert harness.log_lines[-1] == f"generation 2: {lost} was lost"


def test_a_copy_with_more_claims_replaces_the_snapshot_of_the_center():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    behind, ahead = harness.end("broken", 7, "w0", "w1")
    calls = harness.step(
        replace(behind, num_changes=20), replace(ahead, num_changes=23),
        Published((0, 7), num_changes=20),
    )  # fmt: skip
    assert ("publish", "w1") in calls
    assert harness.step(Published((0, 7), num_changes=20)) == []
    harness.step(Published((0, 7), num_changes=23))
    assert ("form", 2, ("w0", "w1"), 7) in harness.step()


@pytest.mark.parametrize("news", [Lost("w1", DIED), GaveUp("publication", DIED)])
def test_a_publisher_that_is_lost_is_replaced_by_the_next_one(news):
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    harness.step(*harness.end("broken", 6, "w0"))
    assert harness.step(*harness.end("broken", 7, "w1")) == [("publish", "w1")]
    calls = harness.step(news)
    assert ("publish", "w0" if isinstance(news, Lost) else "w1") in calls


@pytest.mark.parametrize("is_published", [False, True])
def test_a_late_workers_copy_with_more_claims_is_requested_as_well(is_published):
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    harness.now += 120.0  # w0 does not come out of the exchange: it is left out
    assert harness.step(*harness.end("broken", 6, "w1")) == [("publish", "w1")]
    late = harness.end("broken", 7, "w0")
    assert ("publish", "w0") in harness.step(*([Published((0, 6))] if is_published else []), *late)
    assert ("publish", "w0") not in harness.step(Published((0, 6))), "the copy has not arrived yet"
    harness.step(Published((0, 6, 7)))
    assert 7 in next(call for call in harness.step() if call[0] == "form")


def test_a_wait_in_an_earlier_generation_does_not_make_a_worker_late():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2")
    for round in range(1, 8):
        harness.step(*[report(w, round, generation=1, round_s=0.05) for w in ("w0", "w1", "w2")])
    waiting = [report(w, 7, generation=1, waiting_s=9.0) for w in ("w0", "w1")]
    assert ("abandon", 1) in harness.step(*waiting, report("w2", 7, generation=1))
    harness.step(*harness.end("broken", 7, "w0", "w1"), Published((0, 7)))
    assert ("form", 2, ("w0", "w1"), 7) in harness.step()
    assert harness.step(report("w1", 8, generation=2)) == []
    assert harness.state is State.TRAINING
    late = harness.step(report("w1", 8, generation=2, waiting_s=9.0))
    assert ("abandon", 2) in late, "w0 keeps it waiting now"


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_late_worker_is_left_out_except_in_a_deterministic_run(is_deterministic):
    """Deterministic runs have a fixed number of workers: no quorum is smaller than all of them."""
    num_workers = 3 if is_deterministic else (2, 3)
    harness = ControllerHarness(num_workers, deterministic=is_deterministic).start("w0", "w1", "w2")
    for round in range(1, 8):
        harness.step(*[report(w, round, generation=1, round_s=0.05) for w in ("w0", "w1", "w2")])
    waiting = [report(w, 7, generation=1, waiting_s=900.0) for w in ("w0", "w1")]
    calls = harness.step(*waiting, report("w2", 7, generation=1))
    assert (("abandon", 1) in calls) is not is_deterministic
    assert harness.state is (State.TRAINING if is_deterministic else State.RECOVERING)


def test_a_center_that_does_not_receive_the_newest_copy_ends_the_run_with_an_error_message():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    harness.step(*harness.end("broken", 7, "w0", "w1"))
    harness.now += 299.0
    harness.step()
    harness.now += 2.0
    with pytest.raises(
        RaydlError, match="did not receive its newest copy within 300 s; the same command"
    ):
        harness.step()


def test_when_all_workers_are_lost_the_run_continues_from_the_centers_newest_round():
    harness = ControllerHarness().start().after(Published((0, 4)), report("w0", 9))
    harness.step(Lost("w0", DIED), Lost("w1", DIED))
    harness.step()
    assert harness.state is State.WAITING
    assert ("form", 2, ("w2", "w3"), 4) in harness.step(WorkerReady("w2"), WorkerReady("w3"))


def test_one_worker_may_leave_while_another_is_lost():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2")
    harness.step(Draining("w0"), Lost("w1", DIED))
    assert harness.state is State.RECOVERING
    harness.step(*harness.end("broken", 5, "w0", "w2"), Published((5,)))
    assert ("form", 2, ("w2",), 5) in harness.step()
    assert harness.log_lines[-1] == "generation 2: w0 is on a draining node, w1 was lost"


def test_a_worker_stuck_in_a_failed_exchange_is_left_out_and_rejoins():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    harness.step(*harness.end("broken", 5, "w0"))
    harness.now += 61.0  # few rounds are known
    harness.step(Published((5,)))
    harness.step()
    assert harness.worker_group.formed[-1].worker_ids == ("w0",)
    assert harness.worker_group.formed[-1].absent == ("w1",)
    harness.step(*harness.end("broken", 4, "w1", generation=1))
    assert harness.state is State.TRAINING, "this end is from an earlier generation"
    harness.now += 1.5
    assert harness.step() == [("vote", "regroup")]
    harness.step(*harness.end("regroup", 9, "w0"), Published((9,)))
    assert ("form", 3, ("w0", "w1"), 9) in harness.step()
    assert harness.log_lines[-1] == "generation 3: w1 returns"


@pytest.mark.parametrize("is_sync", [True, False])
def test_a_blocked_read_costs_no_worker_and_a_stuck_loop_is_replaced(is_sync):
    harness = ControllerHarness((2, 2), is_sync=is_sync).start()

    def wait(seconds):
        """Let w0 wait for w1, which answers but stays in a step and uses no CPU."""
        for _ in range(seconds):
            harness.now += 1.0
            step = {"step_s": 0.1, "generation": 1, "local_step": 6}
            harness.step(report("w0", 5, waiting_s=1.0, **step), report("w1", 5, **step))

    wait(299)
    assert not [line for line in harness.log_lines if "lost" in line]
    wait(3)
    stuck = "w1 was lost: it is stuck: one step has taken 301 s (elastic.max_step_s, or "
    assert [line for line in harness.log_lines if line.startswith(stuck)]
    assert "w2" in harness.controller.run_state.workers, "it is replaced"


def test_others_that_gave_up_on_a_blocked_step_go_on_with_the_worker_once_it_ends():
    harness = ControllerHarness((2, 2)).start()

    def wait(seconds):
        for _ in range(seconds):
            harness.now += 1.0
            harness.step(report("w1", 4, step_s=0.1, generation=1, local_step=6))

    wait(60)
    harness.step(*harness.end("broken", 5, "w0"))  # exchange.timeout_s
    harness.step(Published((5,)))
    wait(120)
    harness.step(*harness.end("broken", 4, "w1", generation=1))
    wait(2)
    assert harness.worker_group.formed[-1].worker_ids == ("w0", "w1")
    assert harness.state is State.TRAINING
    assert not [line for line in harness.log_lines if "lost" in line]


def test_remaining_samples_wait_for_the_worker_that_has_claimed_them():
    harness = ControllerHarness((1, 2)).start()
    harness.note(LeaveOut(("w1",)))
    harness.controller.run_state.workers["w1"].num_late = 3
    harness.step()
    harness.step(*harness.end("regroup", 5, "w0", "w1"), Published((5,)))
    harness.step()  # w0 alone
    harness.step(*harness.end("regroup", 6, "w0"), Published((6,)))  # w0 finds no free samples
    harness.step()
    assert harness.state is State.WAITING
    assert harness.log_lines[-1] == (
        "all remaining samples are claimed by workers that were left out; the run waits until "
        "they return"
    )
    harness.now += 9.0
    assert ("form", 3, ("w0", "w1"), 6) in harness.step()


def test_exchanges_that_break_without_a_known_cause_are_retried_but_not_for_ever():
    harness = ControllerHarness(max_restarts=2).start()
    for _ in range(2):
        harness.step(*harness.end("broken", 0, "w0", "w1"))
        assert harness.state is State.RECOVERING, "news of the cause may follow"
        harness.now += 2.5
        harness.step()
        harness.step()
        assert harness.log_lines[-1].endswith("the same workers continue")
    harness.step(*harness.end("broken", 0, "w0", "w1"))
    harness.now += 2.5
    with pytest.raises(
        ProcessLostError, match="a reset; this is loss 3 in a row without training progress"
    ):
        harness.step()


# losing the center


def test_a_lost_center_restarts_while_the_workers_train_and_they_regroup_there():
    harness = ControllerHarness().start()
    assert harness.step(Lost("center", DIED)) == [("rebuild_center", None)]
    assert harness.step() == []
    assert harness.step(Published((0,))) == [("vote", "regroup")]
    assert harness.log_lines[-1] == "the center has restarted: regrouping after this round"
    assert harness.step(*harness.end("regroup", 8, "w0", "w1")) == [("publish", "w0")]
    harness.step(Published((0, 8)), scored(8))
    assert harness.step() == [("form", 2, ("w0", "w1"), 8)]
    assert harness.step() == [], "once"


@pytest.mark.parametrize("state", [State.REGROUPING, State.RECOVERING, State.WAITING])
def test_between_generations_a_lost_center_is_rebuilt_from_the_furthest_copy(state):
    harness = ControllerHarness().start()
    what = Draining("w1") if state is State.REGROUPING else Lost("w1", DIED)
    harness.step(what)
    if state is State.WAITING:
        harness.step(*harness.end("broken", 7, "w0"), Published((7,)))
        assert harness.state is state
        calls = harness.step(Lost("center", DIED))
    else:
        assert harness.state is state
        assert harness.step(Lost("center", DIED)) == [], "workers do not need it"
        how = "regroup" if state is State.REGROUPING else "broken"
        calls = harness.step(*harness.end(how, 7, *harness.controller.run_state.run.at_work))
    assert ("rebuild_center", "w0") in calls
    assert "the center is rebuilt from the last copy of w0, of round 7" in harness.log_lines
    harness.step(Published((7,)), WorkerReady("w2"), HandedIn("w1", {}))
    harness.step(TookOver("w2"))
    harness.step()
    assert harness.worker_group.formed[-1].worker_ids == ("w0", "w2")


def test_ends_before_the_loss_of_the_center_is_reported_lose_no_copies():
    harness = ControllerHarness().start().after(Draining("w1"), WorkerReady("w2"))
    harness.step(*harness.end("regroup", 40, "w0", "w1"), Published((40,)))
    harness.step(HandedIn("w1", {}))
    harness.step(TookOver("w2"))
    assert harness.worker_group.formed[-1].worker_ids == ("w0", "w2")
    assert harness.step(*harness.end("broken", -1, "w0", "w2")) == [("abandon", 2)]
    assert harness.step() == []
    assert harness.step(Lost("center", DIED)) == [("rebuild_center", "w0")]
    harness.step(Published((40,)))
    assert ("form", 3, ("w0", "w2"), 40) in harness.step()


def test_a_center_whose_source_dies_is_rebuilt_from_another_copy():
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    harness.step(*harness.end("broken", 6, "w0"))
    assert harness.step(*harness.end("broken", 7, "w1"), Lost("center", DIED)) == [
        ("rebuild_center", "w1")
    ]
    calls = harness.step(Lost("w1", DIED), Lost("center", "its source was lost"))
    assert ("rebuild_center", "w0") in calls
    harness.step(Published((6,)))
    assert ("form", 2, ("w0",), 6) in harness.step()


# stops and checkpoints


@pytest.mark.parametrize("state", [State.REGROUPING, State.RECOVERING, State.WAITING])
def test_a_stop_between_two_generations_ends_with_a_checkpoint(state):
    harness = ControllerHarness().start()
    harness.step(Draining("w1") if state is State.REGROUPING else Lost("w1", DIED))
    ends = harness.end("regroup", 4, *harness.controller.run_state.run.at_work)
    harness.step(*(ends if state is State.WAITING else []))
    harness.controller.request_stop("SIGTERM")
    harness.step(*ends, Published((0, 4)), report("w0", 4), report("w1", 4))
    harness.steps(2)
    assert harness.state is State.FINISHING
    harness.step(collected(4))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.STOPPED)
    assert harness.log_lines[-1] == "SIGTERM: stopping after this round, with a checkpoint"


def test_a_stop_vote_is_not_lost_when_its_generation_breaks():
    harness = ControllerHarness((1, 2)).start()
    harness.controller.request_stop("SIGTERM")
    assert ("vote", "stop") in harness.step()
    harness.step(Lost("w1", DIED))
    harness.step(*harness.end("broken", 4, "w0"), Published((4,)), report("w0", 4))
    harness.steps(2)
    harness.step(collected(4))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.STOPPED)


def test_a_late_worker_that_leaves_its_loop_is_a_candidate_again():
    harness = ControllerHarness((1, 2)).start()
    harness.note(LeaveOut(("w1",)))
    assert harness.controller.run_state.workers["w1"].phase is Phase.LEFT_OUT
    harness.step(*harness.end("broken", 3, "w1"))
    harness.now += 1.5
    assert could_train(harness.controller.run_state.workers["w1"], harness.now)


def test_a_pause_lasts_from_the_last_step_before_a_lost_exchange_to_the_next_generation():
    harness = ControllerHarness().start()
    harness.now = 9.0
    harness.step(*(report(w, 3, generation=1, computed_s=2.0, idle_s=1.0) for w in ("w0", "w1")))
    harness.now = 10.0
    harness.step(*harness.end("broken", 3, "w0"))
    harness.now = 14.0
    harness.step(*harness.end("broken", 3, "w1"), Published((0, 3)))
    harness.now = 17.0
    harness.steps(3)
    assert harness.worker_group.formed[-1].generation == 2
    harness.step(report("w0", 3, generation=2, computed_s=2.0, idle_s=9.0))
    assert harness.controller.pauses.longest_s == 0.0
    harness.now = 17.5
    harness.step(report("w0", 4, generation=2, computed_s=2.25, idle_s=0.25))
    assert harness.controller.pauses.longest_s == 17.0 - 8.0


def test_the_controller_waits_two_seconds_for_the_cause_of_broken_exchanges():
    harness = ControllerHarness().start()
    harness.now = 100.0
    harness.step(*harness.end("broken", 3, "w0", "w1"), Published((0, 3)))
    harness.now = 101.9
    harness.steps(2)
    assert harness.state is State.RECOVERING
    harness.now = 102.1
    harness.steps(2)
    assert harness.state is State.TRAINING
    assert any(line == "w0 left its exchange: a reset" for line in harness.log_lines)


def test_a_lost_center_is_rebuilt_from_a_copy_of_round_0():
    harness = ControllerHarness().start()
    harness.step(Lost("center", "the actor died"), *harness.end("broken", 0, "w0", "w1"))
    assert ("rebuild_center", "w0") in [*harness.worker_group.calls, *harness.steps(2)]


def test_what_partners_have_left_out_is_lost_with_the_last_of_them():
    harness = ControllerHarness((2, 4), group_size=2, name="local-sgd", compression="int8").start(
        "w0", "w1", "w2", "w3"
    )
    harness.step(*(report(f"w{i}", 4, residual=0.5) for i in range(4)))
    harness.step(Lost("w0", "it died"), Lost("w2", "it died"))
    assert harness.controller.num_lost_residuals == 0
    harness.step(Lost("w1", "it died"))
    assert harness.controller.num_lost_residuals == 1
    assert (
        "what compressed messages of w1 had left out, of L2 norm 0.5, is lost: w1 was lost"
        in harness.log_lines
    )
