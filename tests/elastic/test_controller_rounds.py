"""The controller of synchronous methods: who joins, leaves, is late or lost, state by state."""

from dataclasses import replace

import pytest
from stages import DIED, Stage, collected, report, scored

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
from raydl.elastic.run_state import State
from raydl.elastic.worker_registry import Phase
from raydl.errors import ProcessLostError, RaydlError, ResourceError


def regrouping():
    """Return a stage where w2 came, and the others are about to leave their loops."""
    stage = Stage((2, 3)).start()
    assert stage.step(WorkerReady("w2")) == [("vote", "regroup")]
    assert stage.state is State.REGROUPING
    return stage


# joining and leaving


def test_a_newcomer_joins_at_a_round_boundary():
    stage = regrouping()
    told = stage.step(*stage.end("regroup", 7, "w0", "w1"), scored(7))
    assert told == [("publish", "w0")], "one that is there hands over the center"
    assert stage.step(Published((0, 7))) == []
    assert stage.step() == [("form", 2, ("w0", "w1", "w2"), 7)]
    assert stage.said[-1] == "generation 2: w2 joins"


def test_the_copy_that_a_new_generation_starts_from_is_not_scored_but_the_next_snapshot_is():
    """The evaluator would take CPU time from the workers at each loss."""
    stage = regrouping()
    stage.step(*stage.end("regroup", 7, "w0", "w1"))
    assert stage.step(Published((0, 7))) == []  # ("evaluate", 7) would be here
    stage.step()
    assert stage.step(Published((0, 7, 9))) == [("evaluate", 9)]


def test_a_round_that_is_trained_again_is_scored_when_it_is_due():
    stage = regrouping()
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 5)))
    stage.step(Lost("center", DIED))
    stage.step(Published((0, 5)), scored(5))
    stage.step(Lost("w0", DIED), Lost("w1", DIED), Lost("w2", DIED))
    stage.step(*(WorkerReady(f"w{n}") for n in range(3, 6)))
    assert ("form", 2, ("w3", "w4", "w5"), 5) in [*stage.worker_group.told, *stage.steps(3)]
    assert ("evaluate", 7) in stage.step(Published((0, 5, 7)))


def test_a_newcomer_that_dies_before_the_regroup_is_over_is_forgotten():
    stage = regrouping().after(Lost("w2", DIED))
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert ("form", 2, ("w0", "w1"), 7) in stage.step()


def test_a_newcomer_that_dies_while_it_joins_is_left_behind():
    stage = regrouping()
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    stage.step()
    assert stage.step(Lost("w2", DIED)) == [("request_worker", "w3"), ("abandon", 2)]
    stage.step(*stage.end("broken", 7, "w0", "w1"))
    assert stage.step() == [("form", 3, ("w0", "w1"), 7)]
    assert stage.said[-1] == "generation 3: w2 was lost"


def test_a_run_that_ends_in_the_round_of_a_regroup_just_ends():
    stage = regrouping()
    stage.step(*stage.end("finished", 7, "w0", "w1"), Published((0, 7)))
    assert stage.state is State.FINISHING


@pytest.mark.parametrize("leaver", ["w0", "w1"])
def test_a_leaver_hands_in_its_state_and_its_replacement_gets_it(leaver):
    stage = Stage().start()
    assert stage.step(Draining(leaver)) == [("request_worker", "w2"), ("vote", "regroup")]
    stage.step(WorkerReady("w2"))
    told = stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)), scored(7))
    assert told == [("hand_in", leaver)], "but it stays: its copy may be needed"
    assert stage.step() == [], "its state is on its way to the one that comes"
    other = "w1" if leaver == "w0" else "w0"
    state = {"mine": 1}
    assert stage.step(HandedIn(leaver, state)) == [("hand_over", "w2", state)]
    assert stage.step() == [], "nobody waits for it in an exchange"
    told = stage.step(TookOver("w2"))
    assert told == [("forget", state), ("form", 2, (other, "w2"), 7), ("end", leaver)]
    assert stage.worker_group.own_states == {"w2": state}
    assert leaver not in stage.controller.worker_registry


def test_the_run_does_not_wait_for_a_state_that_will_not_arrive():
    stage = Stage().start().after(Draining("w1"), WorkerReady("w2"))
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    told = stage.step(GaveUp("state of w1", "it died"))
    assert told == [("form", 2, ("w0", "w2"), 7), ("end", "w1")]
    assert stage.worker_group.own_states == {}
    assert "the replica of w1 is not handed over: it died" in stage.said


def handing_over():
    """A run in which w2 takes over what w1 has handed in."""
    stage = Stage().start().after(Draining("w1"), WorkerReady("w2"))
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert stage.step(HandedIn("w1", {"mine": 1})) == [("hand_over", "w2", {"mine": 1})]
    return stage


def test_a_replica_that_can_not_be_taken_over_costs_no_more_than_itself():
    stage = handing_over()
    told = stage.step(GaveUp("handover to w2", "it is damaged"))
    assert told == [("forget", {"mine": 1}), ("form", 2, ("w0", "w2"), 7), ("end", "w1")]
    assert stage.worker_group.own_states == {}
    assert "w2 starts from the center: it is damaged" in stage.said


def test_a_replica_that_was_lost_with_its_newcomer_is_not_handed_over_again():
    stage = handing_over()
    assert stage.step(Lost("w2", DIED))[:2] == [("forget", {"mine": 1}), ("request_worker", "w3")]
    assert ("form", 2, ("w0", "w3"), 7) in stage.step(WorkerReady("w3"))
    assert stage.worker_group.own_states == {}


@pytest.mark.parametrize("part", ["hand in", "take over"])
def test_the_run_does_not_wait_for_a_handover_that_takes_minutes(part):
    stage = Stage().start().after(Draining("w1"), WorkerReady("w2"))
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    if part == "take over":
        stage.step(HandedIn("w1", {"mine": 1}))
    stage.now += 119.0
    assert stage.step() == []
    stage.now += 2.0
    assert ("form", 2, ("w0", "w2"), 7) in stage.steps(2)
    assert stage.worker_group.own_states == {}
    assert any("it took longer than 120 s" in said for said in stage.said)
    late = TookOver("w2") if part == "take over" else HandedIn("w1", {"mine": 1})
    assert stage.step(late) == ([] if part == "take over" else [("forget", {"mine": 1})])


def test_a_replica_that_no_newcomer_needs_is_not_handed_in():
    stage = Stage((1, 2)).start()
    assert stage.controller.remove("w1")[0]
    assert stage.step() == [("vote", "regroup")]
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    assert stage.worker_group.told == [("evaluate", 7)]
    assert stage.step() == [("form", 2, ("w0",), 7), ("end", "w1")]


def test_the_others_train_on_while_a_late_newcomer_reads_a_replica():
    stage = Stage((1, 2)).start().after(Draining("w1"))
    stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    stage.step(HandedIn("w1", {"mine": 1}))
    assert stage.worker_group.formed[-1].worker_ids == ("w0",), "w2 is not up yet"
    assert stage.step(WorkerReady("w2")) == [("hand_over", "w2", {"mine": 1})]
    assert stage.step() == []
    assert stage.step(TookOver("w2")) == [("vote", "regroup")]


def test_two_drains_may_overlap():
    stage = Stage((1, 3)).start("w0", "w1", "w2")
    stage.step(Draining("w1"))
    assert stage.state is State.REGROUPING
    stage.step(Draining("w0"))
    stage.step(*stage.end("regroup", 7, "w0", "w1", "w2"), Published((0, 7)))
    assert ("form", 2, ("w2",), 7) in stage.step()
    assert stage.said[-1] == "generation 2: w0 is on a draining node, w1 is on a draining node"


def test_when_all_nodes_drain_the_run_keeps_a_checkpoint_waits_and_continues():
    stage = Stage().start().after(Draining("w0"), Draining("w1"))
    told = stage.step(*stage.end("regroup", 7, "w0", "w1"), Published((0, 7)), scored(7))
    assert told == [("hand_in", "w0"), ("hand_in", "w1")]
    assert stage.step(HandedIn("w0", {}), HandedIn("w1", {})) == [("collect", 7, ("w0", "w1"))]
    assert stage.step(collected(7, "w0", "w1")) == [("end", "w0"), ("end", "w1")]
    why = "0 of 2 workers are left (w0 is on a draining node, w1 is on a draining node)"
    assert stage.said[-1] == why
    stage.now += 20.0
    stage.step()
    assert stage.said[-1].startswith(f"{why}; waiting for")
    told = stage.step(WorkerReady("w2"), WorkerReady("w3"))
    assert told == [("hand_over", "w2", {}), ("hand_over", "w3", {})]
    assert ("form", 2, ("w2", "w3"), 7) in stage.step(TookOver("w2"), TookOver("w3"))


def test_below_the_minimum_it_does_not_wait_for_ever():
    stage = Stage().start().after(Lost("w1", DIED))
    stage.step(*stage.end("broken", 7, "w0"), Published((0, 7)))
    stage.now += 61.0
    with pytest.raises(ResourceError, match=r"1 of 2 workers are left .* --resume resumes the run"):
        stage.step()


def test_a_removed_worker_leaves_after_the_round():
    stage = Stage((1, 2)).start()
    ok, sentence = stage.controller.remove("w1")
    assert (ok, sentence) == (True, "w1 leaves after its next exchange")
    assert stage.step() == [("vote", "regroup")]
    stage.step(*stage.end("regroup", 3, "w0", "w1"), Published((0, 3)))
    assert ("form", 2, ("w0",), 3) in stage.step()
    assert stage.said[-1] == "generation 2: w1 was removed"


# losing workers


@pytest.mark.parametrize("lost", ["w0", "w1", "w2"])
def test_when_a_worker_is_lost_the_others_go_on_from_the_furthest_round(lost):
    stage = Stage((1, 3)).start("w0", "w1", "w2")
    assert stage.step(Lost(lost, DIED)) == [("request_worker", "w3"), ("abandon", 1)]
    assert stage.state is State.RECOVERING
    first, second = (w for w in ("w0", "w1", "w2") if w != lost)
    assert stage.step(*stage.end("broken", 6, first)) == []
    assert stage.step(*stage.end("broken", 7, second)) == [("publish", second)]
    stage.step(Published((0, 7)))
    assert ("form", 2, (first, second), 7) in stage.step()
    assert stage.said[-1] == f"generation 2: {lost} was lost"


def test_a_copy_with_more_claims_replaces_the_snapshot_of_the_center():
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    behind, ahead = stage.end("broken", 7, "w0", "w1")
    told = stage.step(
        replace(behind, num_changes=20), replace(ahead, num_changes=23),
        Published((0, 7), num_changes=20),
    )  # fmt: skip
    assert ("publish", "w1") in told
    assert stage.step(Published((0, 7), num_changes=20)) == []
    stage.step(Published((0, 7), num_changes=23))
    assert ("form", 2, ("w0", "w1"), 7) in stage.step()


@pytest.mark.parametrize("news", [Lost("w1", DIED), GaveUp("publication", DIED)])
def test_a_publisher_that_is_lost_is_replaced_by_the_next_one(news):
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    stage.step(*stage.end("broken", 6, "w0"))
    assert stage.step(*stage.end("broken", 7, "w1")) == [("publish", "w1")]
    told = stage.step(news)
    assert ("publish", "w0" if isinstance(news, Lost) else "w1") in told


@pytest.mark.parametrize("is_published", [False, True])
def test_a_late_workers_copy_with_more_claims_is_requested_as_well(is_published):
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    stage.now += 120.0  # w0 does not come out of the exchange: it is left out
    assert stage.step(*stage.end("broken", 6, "w1")) == [("publish", "w1")]
    late = stage.end("broken", 7, "w0")
    assert ("publish", "w0") in stage.step(*([Published((0, 6))] if is_published else []), *late)
    assert ("publish", "w0") not in stage.step(Published((0, 6))), "it is on its way"
    stage.step(Published((0, 6, 7)))
    assert 7 in next(told for told in stage.step() if told[0] == "form")


def test_a_wait_in_an_earlier_generation_does_not_make_a_worker_late():
    stage = Stage((1, 3)).start("w0", "w1", "w2")
    for round in range(1, 8):
        stage.step(*[report(w, round, generation=1, round_s=0.05) for w in ("w0", "w1", "w2")])
    waiting = [report(w, 7, generation=1, waiting_s=9.0) for w in ("w0", "w1")]
    assert ("abandon", 1) in stage.step(*waiting, report("w2", 7, generation=1))
    stage.step(*stage.end("broken", 7, "w0", "w1"), Published((0, 7)))
    assert ("form", 2, ("w0", "w1"), 7) in stage.step()
    assert stage.step(report("w1", 8, generation=2)) == []
    assert stage.state is State.TRAINING
    late = stage.step(report("w1", 8, generation=2, waiting_s=9.0))
    assert ("abandon", 2) in late, "w0 keeps it waiting now"


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_late_worker_is_left_out_but_never_of_a_deterministic_run(is_deterministic):
    """Deterministic runs have a fixed number of workers: no quorum is smaller than all of them."""
    num_workers = 3 if is_deterministic else (2, 3)
    stage = Stage(num_workers, deterministic=is_deterministic).start("w0", "w1", "w2")
    for round in range(1, 8):
        stage.step(*[report(w, round, generation=1, round_s=0.05) for w in ("w0", "w1", "w2")])
    waiting = [report(w, 7, generation=1, waiting_s=900.0) for w in ("w0", "w1")]
    told = stage.step(*waiting, report("w2", 7, generation=1))
    assert (("abandon", 1) in told) is not is_deterministic
    assert stage.state is (State.TRAINING if is_deterministic else State.RECOVERING)


def test_a_center_that_never_starts_ends_the_run_with_a_sentence():
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    stage.step(*stage.end("broken", 7, "w0", "w1"))
    stage.now += 299.0
    stage.step()
    stage.now += 2.0
    with pytest.raises(
        RaydlError, match="did not receive its newest copy within 300 s; the same command"
    ):
        stage.step()


def test_when_all_workers_are_lost_the_run_continues_from_the_centers_newest_round():
    stage = Stage().start().after(Published((0, 4)), report("w0", 9))
    stage.step(Lost("w0", DIED), Lost("w1", DIED))
    stage.step()
    assert stage.state is State.WAITING
    assert ("form", 2, ("w2", "w3"), 4) in stage.step(WorkerReady("w2"), WorkerReady("w3"))


def test_a_leaver_and_a_loss_at_once():
    stage = Stage((1, 3)).start("w0", "w1", "w2")
    stage.step(Draining("w0"), Lost("w1", DIED))
    assert stage.state is State.RECOVERING
    stage.step(*stage.end("broken", 5, "w0", "w2"), Published((5,)))
    assert ("form", 2, ("w2",), 5) in stage.step()
    assert stage.said[-1] == "generation 2: w0 is on a draining node, w1 was lost"


def test_a_worker_stuck_in_a_failed_exchange_is_left_out_and_rejoins():
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    stage.step(*stage.end("broken", 5, "w0"))
    stage.now += 61.0  # few rounds are known
    stage.step(Published((5,)))
    stage.step()
    assert stage.worker_group.formed[-1].worker_ids == ("w0",)
    assert stage.worker_group.formed[-1].absent == ("w1",)
    stage.step(*stage.end("broken", 4, "w1", generation=1))
    assert stage.state is State.TRAINING, "an end of another generation"
    stage.now += 1.5
    assert stage.step() == [("vote", "regroup")]
    stage.step(*stage.end("regroup", 9, "w0"), Published((9,)))
    assert ("form", 3, ("w0", "w1"), 9) in stage.step()
    assert stage.said[-1] == "generation 3: w1 returns"


def test_remaining_samples_wait_for_the_worker_that_has_claimed_them():
    stage = Stage((1, 2)).start()
    stage.controller.worker_registry.leave_out(("w1",))
    stage.controller.worker_registry["w1"].num_late = 3
    stage.step()
    stage.step(*stage.end("regroup", 5, "w0", "w1"), Published((5,)))
    stage.step()  # w0 alone
    stage.step(*stage.end("regroup", 6, "w0"), Published((6,)))  # nothing is left for it
    stage.step()
    assert stage.state is State.WAITING
    assert stage.said[-1] == (
        "all remaining samples are claimed by workers that were left out; the run waits until "
        "they return"
    )
    stage.now += 9.0
    assert ("form", 3, ("w0", "w1"), 6) in stage.step()


def test_exchanges_that_break_without_a_cause_are_tried_again_but_not_for_ever():
    stage = Stage(max_restarts=2).start()
    for _ in range(2):
        stage.step(*stage.end("broken", 0, "w0", "w1"))
        assert stage.state is State.RECOVERING, "news of the cause may follow"
        stage.now += 2.5
        stage.step()
        stage.step()
        assert stage.said[-1].endswith("the same workers continue")
    stage.step(*stage.end("broken", 0, "w0", "w1"))
    stage.now += 2.5
    with pytest.raises(
        ProcessLostError, match="a reset; this is loss 3 in a row without training progress"
    ):
        stage.step()


# losing the center


def test_a_lost_center_is_started_again_while_the_workers_train_and_they_meet_there():
    stage = Stage().start()
    assert stage.step(Lost("center", DIED)) == [("rebuild_center", None)]
    assert stage.step() == []
    assert stage.step(Published((0,))) == [("vote", "regroup")]
    assert stage.said[-1] == "the center has restarted: regrouping after this round"
    assert stage.step(*stage.end("regroup", 8, "w0", "w1")) == [("publish", "w0")]
    stage.step(Published((0, 8)), scored(8))
    assert stage.step() == [("form", 2, ("w0", "w1"), 8)]
    assert stage.step() == [], "once"


@pytest.mark.parametrize("state", [State.REGROUPING, State.RECOVERING, State.WAITING])
def test_between_generations_a_lost_center_is_rebuilt_from_the_furthest_copy(state):
    stage = Stage().start()
    what = Draining("w1") if state is State.REGROUPING else Lost("w1", DIED)
    stage.step(what)
    if state is State.WAITING:
        stage.step(*stage.end("broken", 7, "w0"), Published((7,)))
        assert stage.state is state
        told = stage.step(Lost("center", DIED))
    else:
        assert stage.state is state
        assert stage.step(Lost("center", DIED)) == [], "workers do not need it"
        how = "regroup" if state is State.REGROUPING else "broken"
        told = stage.step(*stage.end(how, 7, *stage.controller._run.at_work))
    assert ("rebuild_center", "w0") in told
    assert "the center is rebuilt from the last copy of w0, of round 7" in stage.said
    stage.step(Published((7,)), WorkerReady("w2"), HandedIn("w1", {}))
    stage.step(TookOver("w2"))
    stage.step()
    assert stage.worker_group.formed[-1].worker_ids == ("w0", "w2")


def test_ends_before_the_loss_of_the_center_is_reported_lose_no_copies():
    stage = Stage().start().after(Draining("w1"), WorkerReady("w2"))
    stage.step(*stage.end("regroup", 40, "w0", "w1"), Published((40,)))
    stage.step(HandedIn("w1", {}))
    stage.step(TookOver("w2"))
    assert stage.worker_group.formed[-1].worker_ids == ("w0", "w2")
    assert stage.step(*stage.end("broken", -1, "w0", "w2")) == [("abandon", 2)]
    assert stage.step() == []
    assert stage.step(Lost("center", DIED)) == [("rebuild_center", "w0")]
    stage.step(Published((40,)))
    assert ("form", 3, ("w0", "w2"), 40) in stage.step()


def test_a_new_center_whose_source_dies_is_made_again_from_another_copy():
    stage = Stage((1, 3)).start("w0", "w1", "w2").after(Lost("w2", DIED))
    stage.step(*stage.end("broken", 6, "w0"))
    assert stage.step(*stage.end("broken", 7, "w1"), Lost("center", DIED)) == [
        ("rebuild_center", "w1")
    ]
    told = stage.step(Lost("w1", DIED), Lost("center", "its source was lost"))
    assert ("rebuild_center", "w0") in told
    stage.step(Published((6,)))
    assert ("form", 2, ("w0",), 6) in stage.step()


# stops and checkpoints


@pytest.mark.parametrize("state", [State.REGROUPING, State.RECOVERING, State.WAITING])
def test_a_stop_between_two_generations_ends_with_a_checkpoint(state):
    stage = Stage().start()
    stage.step(Draining("w1") if state is State.REGROUPING else Lost("w1", DIED))
    ends = stage.end("regroup", 4, *stage.controller._run.at_work)
    stage.step(*(ends if state is State.WAITING else []))
    stage.controller.request_stop("SIGTERM")
    stage.step(*ends, Published((0, 4)), report("w0", 4), report("w1", 4))
    stage.steps(2)
    assert stage.state is State.FINISHING
    stage.step(collected(4))
    assert (stage.state, stage.controller.outcome) == (State.DONE, Outcome.STOPPED)
    assert stage.said[-1] == "SIGTERM: stopping after this round, with a checkpoint"


def test_a_stop_that_was_voted_in_a_generation_that_breaks_is_not_lost():
    stage = Stage((1, 2)).start()
    stage.controller.request_stop("SIGTERM")
    assert ("vote", "stop") in stage.step()
    stage.step(Lost("w1", DIED))
    stage.step(*stage.end("broken", 4, "w0"), Published((4,)), report("w0", 4))
    stage.steps(2)
    stage.step(collected(4))
    assert (stage.state, stage.controller.outcome) == (State.DONE, Outcome.STOPPED)


def test_a_late_worker_that_leaves_its_loop_is_a_candidate_again():
    stage = Stage((1, 2)).start()
    stage.controller.worker_registry.leave_out(("w1",))
    assert stage.controller.worker_registry["w1"].phase is Phase.LEFT_OUT
    stage.step(*stage.end("broken", 3, "w1"))
    stage.now += 1.5
    assert "w1" in stage.controller.worker_registry.candidates(0.0).ready


def test_a_pause_begins_when_the_first_leaves_its_exchange_and_ends_in_the_next_generation():
    stage = Stage().start()
    stage.now = 10.0
    stage.step(*stage.end("broken", 3, "w0"))
    stage.now = 14.0
    stage.step(*stage.end("broken", 3, "w1"), Published((0, 3)))
    stage.now = 17.0
    stage.steps(3)
    assert stage.worker_group.formed[-1].generation == 2
    stage.step(report("w0", 4, generation=2))
    assert stage.controller.stragglers.longest_pause_s == 7.0


def test_exchanges_that_broke_wait_two_seconds_for_news_of_the_cause():
    stage = Stage().start()
    stage.now = 100.0
    stage.step(*stage.end("broken", 3, "w0", "w1"), Published((0, 3)))
    stage.now = 101.9
    stage.steps(2)
    assert stage.state is State.RECOVERING
    stage.now = 102.1
    stage.steps(2)
    assert stage.state is State.TRAINING
    assert any(said == "w0 left its exchange: a reset" for said in stage.said)


def test_a_copy_of_the_very_first_center_is_a_copy_too():
    stage = Stage().start()
    stage.step(Lost("center", "the actor died"), *stage.end("broken", 0, "w0", "w1"))
    assert ("rebuild_center", "w0") in [*stage.worker_group.told, *stage.steps(2)]
