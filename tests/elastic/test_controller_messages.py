"""The controller of methods with messages: workers join and leave while the others train."""

from dataclasses import replace

import pytest
from controller_harness import ControllerHarness, collected, report, scored, snapshot

from raydl.core.callbacks import StopAtAccuracy
from raydl.core.compression import LostResidual
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.scores import Evaluated
from raydl.core.worker_group import (
    Changed,
    Collected,
    Draining,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    TookOver,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import ProcessLostError

DIED = "the actor died"


def training(num_workers=2, *worker_ids, **more):
    return ControllerHarness(num_workers, is_sync=False, **more).start(*worker_ids)


# joining and leaving


def test_a_newcomer_joins_while_the_others_train():
    harness = training((2, 3))
    assert harness.step(WorkerReady("w2")) == [("change", 2, ("w0", "w1", "w2"))]
    assert harness.state is State.TRAINING
    assert harness.log_lines[-1] == "generation 2: w2 joins"


def test_the_controller_decides_nothing_until_the_center_has_confirmed_a_change():
    harness = training((2, 3)).after(WorkerReady("w2"))
    assert harness.step(Lost("w1", DIED)) == [("request_worker", "w3")]
    harness.controller.request_stop("SIGTERM")
    assert harness.step() == []
    assert harness.step(Changed()) == [("vote", "stop"), ("change", 3, ("w0", "w2"))]


def test_a_lost_worker_is_removed_from_the_membership_and_its_replacement_joins():
    harness = training((1, 2))
    calls = harness.step(Lost("w1", DIED))
    assert calls == [("request_worker", "w2"), ("change", 2, ("w0",))]
    assert harness.log_lines[-1] == "generation 2: w1 was lost"
    harness.step(Changed())
    assert harness.step(WorkerReady("w2")) == [("change", 3, ("w0", "w2"))]


def test_all_workers_may_be_lost_at_once():
    harness = training((1, 2))
    harness.step(Lost("w0", DIED), Lost("w1", DIED))
    assert harness.state is State.REGROUPING
    assert harness.step() == [("change", 2, ())]
    assert harness.step(Changed()) == [("vote", "regroup")]
    harness.step(Published((6,)))
    assert harness.state is State.WAITING
    harness.step(WorkerReady("w2"), WorkerReady("w3"))
    assert harness.worker_group.formed[-1].worker_ids == ("w2", "w3")


def test_a_leaver_leaves_after_an_exchange_and_its_replacement_gets_its_state():
    harness = training((1, 2))
    assert harness.step(Draining("w0")) == [("request_worker", "w2"), ("dismiss", "w0")]
    assert harness.step(WorkerReady("w2")) == [], "w0 has not reached its next exchange yet"
    calls = harness.step(*harness.end("left", 5, "w0"))
    assert calls == [("change", 2, ("w1",)), ("hand_in", "w0")]
    assert harness.step(Changed()) == [], "its state has not arrived yet"
    state = {"mine": 1}
    assert harness.step(HandedIn("w0", state)) == [("hand_over", "w2", state), ("end", "w0")]
    calls = harness.step(TookOver("w2"))
    assert calls == [("forget", state), ("change", 3, ("w1", "w2"))]
    assert harness.worker_group.own_states == {"w2": state}


@pytest.mark.parametrize("outcome", ["regroup", "finished", "broken"])
def test_a_leaver_is_ended_after_any_outcome_of_its_loop(outcome):
    harness = training((1, 2)).after(Draining("w0"))
    calls = harness.step(*harness.end(outcome, 5, "w0", "w1"), Published((0,), is_complete=False))
    for _ in range(12):
        harness.now += 1.0
        calls += harness.step(Changed(), Published((9,), is_complete=False), HandedIn("w0", {}))
    assert ("hand_in", "w0") in calls
    assert ("end", "w0") in calls


def test_with_too_few_left_all_leave_and_the_run_waits_with_a_checkpoint():
    harness = training(2).after(Lost("w1", DIED))
    assert (
        harness.log_lines[-1]
        == "1 of 2 workers are left (w1 was lost): all workers leave after their "
        "next exchange"
    )
    assert harness.step() == [("change", 2, ("w0",))]
    assert harness.step(Changed()) == [("vote", "regroup")]
    harness.step(*harness.end("regroup", 8, "w0", generation=1), Published((8,)), scored(8))
    assert ("collect", 8, ("w0",)) in harness.step()
    harness.step(collected(8, "w0"))
    assert ("form", 3, ("w0", "w2"), 8) in harness.step(WorkerReady("w2"))


@pytest.mark.parametrize("are_lost", [True, False])
def test_time_without_any_training_worker_is_a_pause(are_lost):
    harness = training(2).after(report("w0", 1, generation=1), report("w1", 1, generation=1))
    harness.now = 10.0
    harness.step(*(report(w, 1, generation=1, computed_s=10.0) for w in ("w0", "w1")))
    if are_lost:
        harness.step(Lost("w0", DIED), Lost("w1", DIED))
    else:
        harness.step(Lost("w1", DIED))
        harness.now = 20.0
        harness.step(Changed(), report("w0", 2, generation=1, computed_s=20.0))
        harness.step(*harness.end("regroup", 2, "w0", generation=1), Published((2,)))
    for _ in range(4):
        harness.step(Changed(), Published((2,)))
    harness.now = 60.0
    harness.step(WorkerReady("w2", "node"), WorkerReady("w3", "node"), Published((2,)))
    harness.steps(3)
    newest = harness.controller.generation
    harness.now = 61.5
    computed_s = {"w0": 20.5, "w1": 10.5, "w2": 0.5, "w3": 0.5}
    members = harness.worker_group.formed[-1].worker_ids
    harness.step(*(report(w, 3, generation=newest, computed_s=computed_s[w]) for w in members))
    assert harness.controller.pauses.longest_s == (51.0 if are_lost else 41.0)


def test_the_end_does_not_wait_for_a_leaver_that_has_finished():
    harness = training((1, 3), "w0", "w1", "w2").after(Draining("w0"))
    harness.step(*harness.end("finished", 20, "w0"))
    harness.step(Changed(), HandedIn("w0", {}))
    harness.steps(2)
    assert "w0" not in harness.controller.run_state.workers
    harness.step(
        *harness.end("finished", 22, "w1", "w2", generation=1), Published((22,)), scored(22)
    )
    assert harness.step(report("w1", 22), report("w2", 22)) == [("collect", 22, ("w1", "w2"))]
    harness.step(collected(22))
    assert harness.state is State.DONE


# the end


def test_workers_end_one_by_one_and_the_last_exchange_is_the_end():
    harness = training()
    harness.step(*harness.end("finished", 40, "w0"))
    harness.step(*harness.end("finished", 52, "w1"))
    assert harness.state is State.TRAINING, "the last snapshot has not arrived yet"
    harness.step(Published((0, 52)))
    assert harness.state is State.FINISHING
    assert ("collect", 52, ("w0", "w1")) in harness.step()


def test_claims_of_a_lost_worker_are_trained_before_the_run_ends():
    harness = training((1, 2))
    harness.step(*harness.end("finished", 40, "w0"))
    harness.step(Lost("w1", DIED))
    harness.step(Changed(), Published((41,), is_complete=False), scored(41))
    harness.steps(2)
    assert harness.worker_group.calls == []
    assert harness.state is State.TRAINING
    assert harness.worker_group.formed[-1].worker_ids == ("w0",)
    assert harness.worker_group.formed[-1].generation == 3
    assert harness.controller.outcome is None
    harness.step(Changed(), *harness.end("finished", 43, "w0"), Published((43,)))
    assert harness.controller.outcome is Outcome.FINISHED


def test_a_member_that_has_finished_is_not_stuck_while_the_others_train_what_is_left():
    harness = training((1, 3), "w0", "w1", "w2").after(*training().end("finished", 40, "w0"))
    harness.step(Lost("w2", DIED))
    for round in range(40, 240):
        harness.now += 0.5
        harness.step(
            Changed(), *(report(w, r, generation=1) for w, r in (("w0", 40), ("w1", round)))
        )
    assert not any("stuck" in line for line in harness.log_lines)


def test_a_drained_member_that_has_finished_hands_in_after_a_change():
    harness = training((1, 3), "w0", "w1", "w2").after(*training().end("finished", 40, "w0"))
    calls = harness.step(Draining("w0"), Lost("w1", DIED))
    calls += harness.step(Changed(), WorkerReady("w3"))
    assert ("hand_in", "w0") in calls + harness.step(Changed())


def test_the_center_is_rebuilt_from_a_member_that_had_finished_before_a_change():
    harness = training((1, 3), "w0", "w1", "w2").after(*training().end("finished", 40, "w0"))
    harness.step(Lost("w2", DIED))
    harness.step(Changed(), Lost("center", DIED))
    calls = harness.step(*harness.end("broken", 38, "w1", generation=1))
    assert ("rebuild_center", "w0") in calls


# the center


@pytest.mark.parametrize("name", ["center", "shard 1"])
def test_a_lost_center_makes_all_leave_and_is_rebuilt_from_the_newest_copy(name):
    harness = training()
    assert harness.step(Lost(name, DIED)) == [("abandon", 1)]
    calls = harness.step(*harness.end("broken", 7, "w0"), *harness.end("broken", 9, "w1"))
    assert calls == [("rebuild_center", "w1")]
    assert harness.log_lines[-1] == "the center is rebuilt from the last copy of w1, of round 9"
    harness.step(Published((9,)))
    assert ("form", 2, ("w0", "w1"), 9) in harness.step()


def test_a_lost_center_is_rebuilt_from_the_worker_with_the_newest_ledger():
    harness = training(3, "w0", "w1", "w2")
    first, second, third = harness.end("broken", 7, "w0", "w1", "w2")
    harness.step(
        Lost("center", DIED), replace(first, round=9, ledger_round=2),
        replace(second, round=8, ledger_round=6),
    )  # fmt: skip
    calls = harness.step(replace(third, round=7, ledger_round=5))
    assert ("rebuild_center", "w1") in calls


def test_shards_lost_before_the_center_is_rebuilt_count_as_one_loss():
    """A worker in a long round leaves late, and the node of several shards may be gone."""
    harness = training(max_restarts=1)
    harness.step(Lost("shard 1", DIED), *harness.end("broken", 9, "w0"))
    harness.step(Lost("shard 2", DIED), Lost("center", DIED))
    assert harness.state is State.RECOVERING
    assert ("rebuild_center", "w1") in harness.step(*harness.end("broken", 11, "w1"))
    with pytest.raises(ProcessLostError, match="loss 2 in a row"):
        harness.step(Lost("shard 1", DIED))  # of the new center


def test_the_center_is_rebuilt_from_a_checkpoint_that_is_newer_than_every_copy():
    harness = training(every_s=1.0)
    harness.now += 2.0
    harness.step()
    kept = [report(w, 12, kept=(12,)) for w in ("w0", "w1")]
    assert ("collect", 12, ("w0", "w1")) in harness.step(Published((0, 12)), *kept)
    harness.step(collected(12, "w0", "w1"), Lost("center", DIED))
    calls = harness.step(*harness.end("broken", 7, "w0"), *harness.end("broken", 9, "w1"))
    assert calls == [("rebuild_center", None)]
    assert harness.log_lines[-1].endswith(
        "from the newest checkpoint, or from where this run began"
    )
    harness.step(Published((12,)))
    assert ("form", 2, ("w0", "w1"), 12) in harness.step()


@pytest.mark.parametrize("is_changing", [True, False])
def test_the_center_may_be_lost_while_all_are_about_to_leave(is_changing):
    harness = training(2).after(Lost("w1", DIED))
    assert harness.state is State.REGROUPING
    harness.steps(1) if is_changing else harness.steps(0)
    assert ("abandon", harness.worker_group.formed[-1].generation) in harness.step(
        Lost("center", DIED)
    )
    calls = harness.step(*harness.end("broken", 6, "w0", generation=1))
    assert ("rebuild_center", "w0") in calls
    harness.step(Published((6,)))
    assert harness.state is State.WAITING


def test_the_controller_waits_for_news_of_the_center_after_broken_exchanges():
    harness = training()
    harness.step(
        Published((0, 9)), *harness.end("broken", 7, "w0"), *harness.end("broken", 9, "w1")
    )
    harness.now += 1.0
    assert all(call[0] == "evaluate" for call in harness.step())
    assert harness.state is State.TRAINING
    harness.step(Lost("center", DIED))
    assert ("rebuild_center", "w1") in harness.step()


def test_copies_of_dropped_members_are_kept():
    harness = training()
    harness.step(*harness.end("broken", 7, "w0"), *harness.end("broken", 9, "w1"))
    harness.now += 2.5
    assert ("change", 2, ()) in harness.step()
    harness.step(Lost("center", DIED))
    assert ("rebuild_center", "w1") in harness.step()


def test_a_worker_that_left_its_exchange_by_itself_joins_again():
    harness = training((1, 2)).after(*training().end("broken", 7, "w1"))
    harness.now += 2.5
    assert harness.step() == [("change", 2, ("w0",))]
    assert "w1 left its exchange: a reset" in harness.log_lines
    assert harness.step(Changed()) == [("change", 3, ("w0", "w1"))]


def test_a_broken_end_is_not_forgotten_when_another_worker_is_lost():
    harness = training((1, 3), "w0", "w1", "w2")
    harness.step(*harness.end("broken", 7, "w1"), Lost("w2", DIED))
    assert harness.worker_group.formed[-1].worker_ids == ("w0", "w1")
    harness.now += 2.5
    assert harness.step(Changed()) == [("change", 3, ("w0",))]
    assert harness.step(Changed()) == [("change", 4, ("w0", "w1"))]


def test_a_rebuilt_center_may_be_behind_the_lost_one():
    harness = training().after(Published((0, 20)), scored(20))
    harness.step(Lost("center", DIED))
    harness.step(*harness.end("broken", 18, "w0", "w1"))
    assert ("form", 2, ("w0", "w1"), 18) in [*harness.step(Published((18,))), *harness.step()]
    assert ("evaluate", 19) in harness.step(Changed(), Published((18, 19)))


def test_the_copy_that_a_center_is_rebuilt_from_is_not_scored():
    """The evaluator would take CPU time from workers that have just waited for the center."""
    harness = training().after(Lost("center", DIED))
    harness.step(*harness.end("broken", 18, "w0", "w1"))
    calls = [*harness.step(Published((18,))), *harness.step(Changed()), *harness.steps(3)]
    assert ("form", 2, ("w0", "w1"), 18) in calls
    assert ("evaluate", 18) not in calls


@pytest.mark.parametrize("is_late", [True, False])
def test_a_score_of_a_lost_center_neither_ends_the_run_nor_blocks_later_scores(is_late):
    harness = training(callbacks=[StopAtAccuracy(0.5)])
    assert ("evaluate", 100) in harness.step(Published((0, 100)))
    harness.step(Lost("center", DIED))
    assert ("rebuild_center", "w0") in harness.step(*harness.end("broken", 50, "w0", "w1"))
    if is_late:
        harness.step(Published((50,)))
        assert ("evaluate", 60) in harness.step(Changed(), Published((50, 60)))
    harness.step(scored(100))
    assert harness.recorder.scores == []
    harness.step(Published((50,)))
    harness.step(Changed(), Published((50, 60)))
    harness.step(Published((60, 70)), Evaluated(Progress(round=60), {"accuracy": 0.1}))
    assert harness.worker_group.calls[0] == ("evaluate", 70)
    assert [score.progress.round for score in harness.recorder.scores] == [60]
    assert not harness.controller.ended_because
    assert "stop" not in str(harness.log_lines)


def test_no_round_is_scored_twice_for_the_same_center_after_a_rebuild():
    harness = training().after(Published((0, 18)), scored(18))
    harness.step(Published((18, 20)))
    harness.step(scored(20), Lost("center", DIED))
    harness.step(*harness.end("broken", 18, "w0", "w1"))
    harness.step(Published((18,)))
    assert ("evaluate", 18) not in harness.step()
    harness.step(scored(18))
    assert [score.progress.round for score in harness.recorder.scores] == [18, 20]
    assert harness.step(Changed(), Published((18, 20))) == [
        ("evaluate", 20)
    ]  # round 20 of the rebuilt center
    harness.step(scored(20))
    assert [score.progress.round for score in harness.recorder.scores] == [18, 20, 20]


# checkpoints


def test_a_checkpoint_is_collected_once_all_present_members_have_kept_their_states():
    harness = training(2, every_s=10.0)
    harness.now += 10.0
    assert harness.step() == [("vote", "checkpoint")]
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    assert harness.step(*kept, Published((0,))) == []
    assert ("collect", 5, ("w0", "w1")) in harness.step(Published((0, 5)))
    harness.step(Collected(snapshot(5), {}))
    assert len(harness.recorder.checkpoints) == 1


def test_a_vote_that_a_newcomer_has_not_received_is_cast_again():
    harness = training((2, 3), every_s=10.0)
    harness.now += 10.0
    assert harness.step() == [("vote", "checkpoint")]
    harness.step(report("w0", 6, kept=[5]), report("w1", 7, kept=[5]), WorkerReady("w2"))
    assert harness.step() == [], "the center does not know the newcomer yet"
    assert harness.step(Changed()) == [("vote", "checkpoint")]


@pytest.mark.parametrize("news", [Lost("w1", DIED), GaveUp("checkpoint", "w1 died")])
def test_a_checkpoint_that_needs_a_lost_worker_is_given_up_and_voted_for_again(news):
    harness = training((1, 2), every_s=10.0)
    harness.now += 10.0
    harness.step()
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    assert ("collect", 5, ("w0", "w1")) in harness.step(*kept, Published((0, 5)))
    calls = harness.step(news) + harness.step(Changed())
    assert ("vote", "checkpoint") in calls
    assert all(call[0] != "collect" for call in calls), (
        "the states kept for the old vote are dropped"
    )


def test_a_leaver_stays_while_its_state_is_collected():
    harness = training((1, 2), every_s=10.0)
    harness.now += 10.0
    harness.step()
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    harness.step(*kept, Published((0, 5)), Draining("w1"))
    harness.step(*harness.end("left", 8, "w1"))
    calls = harness.step(Changed(), HandedIn("w1", {}))
    assert ("end", "w1") not in calls
    assert ("end", "w1") in harness.step(collected(5, "w0", "w1"))


def test_no_checkpoint_is_voted_for_while_the_last_one_is_being_written():
    harness = training(2, every_s=10.0)
    harness.recorder.is_writing, harness.now = True, harness.now + 10.0
    assert harness.step() == []
    harness.recorder.is_writing = False
    assert harness.step() == [("vote", "checkpoint")]


def test_a_worker_that_leaves_its_exchange_causes_no_pause_while_another_trains():
    harness = ControllerHarness(is_sync=False).start()
    harness.now = 10.0
    harness.step(*(report(w, 3, generation=1, computed_s=10.0) for w in ("w0", "w1")))
    harness.step(*harness.end("broken", 3, "w0"))
    harness.now = 20.0
    harness.step(Changed(), Published((0, 3)))
    newest = harness.worker_group.formed[-1].generation
    harness.step(report("w1", 9, generation=newest, computed_s=20.0))
    assert harness.controller.pauses.longest_s == 0.0


# what compressed messages leave out


def compressed(num_workers=2, *worker_ids, residuals=(0.5, 0.25), **more):
    """Return a run in which the messages of w0 and w1 have left out something."""
    harness = training(num_workers, *worker_ids, name="async-sgd", compression="int8", **more)
    reports = [report(w, 4, residual=r) for w, r in zip(("w0", "w1"), residuals, strict=True)]
    return harness.after(*reports)


def lost_lines(harness):
    return [line for line in harness.log_lines if line.startswith("what compressed messages")]


def test_the_loss_of_a_worker_names_what_its_messages_had_left_out():
    harness = compressed((1, 2)).after(Lost("w1", DIED))
    assert lost_lines(harness) == [
        "what compressed messages of w1 had left out, of L2 norm 0.25, is lost: w1 was lost"
    ]
    assert harness.controller.num_lost_residuals == 1


def test_a_worker_whose_messages_have_left_out_nothing_is_lost_without_a_further_word():
    harness = compressed((1, 2), residuals=(0.5, 0.0)).after(Lost("w1", DIED))
    assert lost_lines(harness) == []
    assert harness.controller.num_lost_residuals == 0


def test_a_leaver_hands_over_what_its_messages_have_left_out():
    harness = compressed((1, 2)).after(Draining("w0"), WorkerReady("w2"))
    assert ("hand_in", "w0") in harness.step(*harness.end("left", 5, "w0"))
    state = {"mine": 1}
    harness.step(Changed(), report("w0", 5, residual=0.5))
    assert ("hand_over", "w2", state) in harness.step(HandedIn("w0", state))
    harness.step(TookOver("w2"))
    assert harness.worker_group.own_states == {"w2": state}
    harness.step(Changed(), Lost("w1", DIED))
    assert len(lost_lines(harness)) == 1, "of w1 alone"


@pytest.mark.parametrize("part", ["hand in", "take over", "newcomer"])
def test_what_a_leaver_could_not_hand_over_is_counted_once(part):
    harness = compressed((1, 2)).after(Draining("w0"), WorkerReady("w2"))
    harness.step(*harness.end("left", 5, "w0"))
    harness.step(Changed())
    if part == "hand in":
        harness.step(GaveUp("hand in", "no space left", "w0"))
    else:
        harness.step(HandedIn("w0", {"mine": 1}))
        is_lost = part == "newcomer"
        harness.step(Lost("w2", DIED) if is_lost else GaveUp("hand over", "it is damaged", "w2"))
    harness.steps(3)
    (line,) = lost_lines(harness)
    assert "messages of w0 had left out, of L2 norm 0.5, is lost" in line
    assert harness.controller.num_lost_residuals == 1


def test_a_leaver_without_a_replacement_takes_what_its_messages_have_left_out_with_it():
    harness = compressed((1, 2))
    harness.controller.remove("w1")
    harness.step(*harness.end("left", 5, "w1"))
    harness.step(Changed())
    harness.steps(2)
    assert lost_lines(harness) == [
        "what compressed messages of w1 had left out, of L2 norm 0.25, is lost: w1 was removed"
    ]


def test_what_a_worker_reports_as_lost_is_logged_and_counted():
    lost = LostResidual(0.125, "it copied the replica of its partner")
    harness = compressed().after(report("w1", 5, residual=0.25, lost_residuals=(lost,)))
    assert lost_lines(harness) == [
        "what compressed messages of w1 had left out, of L2 norm 0.125, is lost: it copied the "
        "replica of its partner"
    ]
    assert harness.controller.num_lost_residuals == 1


@pytest.mark.parametrize(("compression", "count"), [("int8", 1), ("none", 0)])
def test_a_run_resumed_with_fewer_workers_says_whose_state_is_not_resumed(compression, count):
    states = {"w0": {}, "w1": {}}
    harness = ControllerHarness(
        1, is_sync=False, name="async-sgd", compression=compression, own_states=states
    )
    assert harness.controller.num_lost_residuals == count
    expected = "what compressed messages of w1 had left out is lost: fewer workers resume"
    assert lost_lines(harness) == [expected] * count
