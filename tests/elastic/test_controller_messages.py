"""The controller of methods with messages: workers join and leave while the others train."""

from dataclasses import replace

import pytest
from stages import Stage, collected, report, scored, snapshot

from raydl.core.callbacks import StopAtAccuracy
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.worker_group import (
    Changed,
    Collected,
    Draining,
    Evaluated,
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


def stage_of(num_workers=2, *worker_ids, **more):
    return Stage(num_workers, is_sync=False, **more).start(*worker_ids)


# joining and leaving


def test_a_newcomer_joins_while_the_others_train():
    stage = stage_of((2, 3))
    assert stage.step(WorkerReady("w2")) == [("change", 2, ("w0", "w1", "w2"))]
    assert stage.state is State.TRAINING
    assert stage.said[-1] == "generation 2: w2 joins"


def test_until_the_center_knows_of_a_change_nothing_else_is_decided():
    stage = stage_of((2, 3)).after(WorkerReady("w2"))
    assert stage.step(Lost("w1", DIED)) == [("request_worker", "w3")]
    stage.controller.request_stop("SIGTERM")
    assert stage.step() == []
    assert stage.step(Changed()) == [("vote", "stop"), ("change", 3, ("w0", "w2"))]


def test_a_lost_worker_is_counted_out_and_its_replacement_joins():
    stage = stage_of((1, 2))
    told = stage.step(Lost("w1", DIED))
    assert told == [("request_worker", "w2"), ("change", 2, ("w0",))]
    assert stage.said[-1] == "generation 2: w1 was lost"
    stage.step(Changed())
    assert stage.step(WorkerReady("w2")) == [("change", 3, ("w0", "w2"))]


def test_several_may_be_lost_at_once_and_all_of_them():
    stage = stage_of((1, 2))
    stage.step(Lost("w0", DIED), Lost("w1", DIED))
    assert stage.state is State.REGROUPING
    assert stage.step() == [("change", 2, ())]
    assert stage.step(Changed()) == [("vote", "regroup")]
    stage.step(Published((6,)))
    assert stage.state is State.WAITING
    stage.step(WorkerReady("w2"), WorkerReady("w3"))
    assert stage.worker_group.formed[-1].worker_ids == ("w2", "w3")


def test_a_leaver_leaves_after_an_exchange_and_its_replacement_gets_its_state():
    stage = stage_of((1, 2))
    assert stage.step(Draining("w0")) == [("request_worker", "w2"), ("dismiss", "w0")]
    assert stage.step(WorkerReady("w2")) == [], "it is on its way to its next exchange"
    told = stage.step(*stage.end("left", 5, "w0"))
    assert told == [("change", 2, ("w1",)), ("hand_in", "w0")]
    assert stage.step(Changed()) == [], "its state is on its way"
    state = {"mine": 1}
    assert stage.step(HandedIn("w0", state)) == [("hand_over", "w2", state), ("end", "w0")]
    told = stage.step(TookOver("w2"))
    assert told == [("forget", state), ("change", 3, ("w1", "w2"))]
    assert stage.worker_group.own_states == {"w2": state}


@pytest.mark.parametrize("outcome", ["regroup", "finished", "broken"])
def test_a_leaver_is_ended_however_its_loop_ended(outcome):
    stage = stage_of((1, 2)).after(Draining("w0"))
    told = stage.step(*stage.end(outcome, 5, "w0", "w1"), Published((0,), is_complete=False))
    for _ in range(12):
        stage.now += 1.0
        told += stage.step(Changed(), Published((9,), is_complete=False), HandedIn("w0", {}))
    assert ("hand_in", "w0") in told
    assert ("end", "w0") in told


def test_with_too_few_left_all_leave_and_the_run_waits_with_a_checkpoint():
    stage = stage_of(2).after(Lost("w1", DIED))
    assert (
        stage.said[-1] == "1 of 2 workers are left (w1 was lost): all workers leave after their "
        "next exchange"
    )
    assert stage.step() == [("change", 2, ("w0",))]
    assert stage.step(Changed()) == [("vote", "regroup")]
    stage.step(*stage.end("regroup", 8, "w0", generation=1), Published((8,)), scored(8))
    assert ("collect", 8, ("w0",)) in stage.step()
    stage.step(collected(8, "w0"))
    assert ("form", 3, ("w0", "w2"), 8) in stage.step(WorkerReady("w2"))


@pytest.mark.parametrize("are_lost", [True, False])
def test_time_without_any_training_worker_is_a_pause(are_lost):
    stage = stage_of(2).after(report("w0", 1, generation=1), report("w1", 1, generation=1))
    stage.now = 10.0
    if are_lost:
        stage.step(Lost("w0", DIED), Lost("w1", DIED))
    else:
        stage.step(Lost("w1", DIED))
        stage.now = 20.0
        stage.step(Changed(), report("w0", 2, generation=1))
        stage.step(*stage.end("regroup", 2, "w0", generation=1), Published((2,)))
    for _ in range(4):
        stage.step(Changed(), Published((2,)))
    stage.now = 60.0
    stage.step(WorkerReady("w2", "node"), WorkerReady("w3", "node"), Published((2,)))
    stage.steps(3)
    newest = stage.controller.generation
    stage.now = 61.0
    stage.step(*[report(w, 3, generation=newest) for w in stage.worker_group.formed[-1].worker_ids])
    assert stage.controller.stragglers.longest_pause_s == (51.0 if are_lost else 41.0)


def test_a_leaver_whose_run_is_over_is_not_waited_for_at_the_end():
    stage = stage_of((1, 3), "w0", "w1", "w2").after(Draining("w0"))
    stage.step(*stage.end("finished", 20, "w0"))
    stage.step(Changed(), HandedIn("w0", {}))
    stage.steps(2)
    assert "w0" not in stage.controller.worker_registry
    stage.step(*stage.end("finished", 22, "w1", "w2", generation=1), Published((22,)), scored(22))
    assert stage.step(report("w1", 22), report("w2", 22)) == [("collect", 22, ("w1", "w2"))]
    stage.step(collected(22))
    assert stage.state is State.DONE


# the end


def test_workers_end_one_by_one_and_the_last_exchange_is_the_end():
    stage = stage_of()
    stage.step(*stage.end("finished", 40, "w0"))
    stage.step(*stage.end("finished", 52, "w1"))
    assert stage.state is State.TRAINING, "the last snapshot is on its way"
    stage.step(Published((0, 52)))
    assert stage.state is State.FINISHING
    assert ("collect", 52, ("w0", "w1")) in stage.step()


def test_claims_of_a_lost_worker_are_trained_before_the_run_ends():
    stage = stage_of((1, 2))
    stage.step(*stage.end("finished", 40, "w0"))
    stage.step(Lost("w1", DIED))
    stage.step(Changed(), Published((41,), is_complete=False), scored(41))
    stage.steps(2)
    assert stage.worker_group.told == [] or stage.state is State.TRAINING
    assert stage.worker_group.formed[-1].worker_ids == ("w0",)
    assert stage.worker_group.formed[-1].generation == 3
    assert stage.controller.outcome is None
    stage.step(Changed(), *stage.end("finished", 43, "w0"), Published((43,)))
    assert stage.controller.outcome is Outcome.FINISHED


# the center


@pytest.mark.parametrize("name", ["center", "shard 1"])
def test_when_the_center_is_lost_all_leave_and_it_is_rebuilt_from_the_freshest(name):
    stage = stage_of()
    assert stage.step(Lost(name, DIED)) == [("abandon", 1)]
    told = stage.step(*stage.end("broken", 7, "w0"), *stage.end("broken", 9, "w1"))
    assert told == [("rebuild_center", "w1")]
    assert stage.said[-1] == "the center is rebuilt from the last copy of w1, of round 9"
    stage.step(Published((9,)))
    assert ("form", 2, ("w0", "w1"), 9) in stage.step()


def test_a_lost_center_is_rebuilt_from_the_worker_with_the_newest_ledger():
    stage = stage_of(3, "w0", "w1", "w2")
    first, second, third = stage.end("broken", 7, "w0", "w1", "w2")
    stage.step(
        Lost("center", DIED), replace(first, round=9, ledger_round=2),
        replace(second, round=8, ledger_round=6),
    )  # fmt: skip
    told = stage.step(replace(third, round=7, ledger_round=5))
    assert ("rebuild_center", "w1") in told


def test_further_shards_that_are_lost_before_the_center_is_rebuilt_are_no_further_losses():
    """A worker in a long round leaves late, and the node of several shards may be gone."""
    stage = stage_of(max_restarts=1)
    stage.step(Lost("shard 1", DIED), *stage.end("broken", 9, "w0"))
    stage.step(Lost("shard 2", DIED), Lost("center", DIED))
    assert stage.state is State.RECOVERING
    assert ("rebuild_center", "w1") in stage.step(*stage.end("broken", 11, "w1"))
    with pytest.raises(ProcessLostError, match="loss 2 in a row"):
        stage.step(Lost("shard 1", DIED))  # of the new center


def test_the_center_is_rebuilt_from_a_checkpoint_that_is_newer_than_every_copy():
    stage = stage_of().after(Published((0, 12)), collected(12, "w0", "w1"), Lost("center", DIED))
    told = stage.step(*stage.end("broken", 7, "w0"), *stage.end("broken", 9, "w1"))
    assert told == [("rebuild_center", None)]
    assert stage.said[-1].endswith("from the newest checkpoint, or from where this run began")
    stage.step(Published((12,)))
    assert ("form", 2, ("w0", "w1"), 12) in stage.step()


@pytest.mark.parametrize("is_changing", [True, False])
def test_the_center_may_be_lost_while_all_are_about_to_leave(is_changing):
    stage = stage_of(2).after(Lost("w1", DIED))
    assert stage.state is State.REGROUPING
    stage.steps(1) if is_changing else stage.steps(0)
    assert ("abandon", stage.worker_group.formed[-1].generation) in stage.step(Lost("center", DIED))
    told = stage.step(*stage.end("broken", 6, "w0", generation=1))
    assert ("rebuild_center", "w0") in told
    stage.step(Published((6,)))
    assert stage.state is State.WAITING


def test_broken_ends_wait_for_news_of_the_center():
    stage = stage_of()
    stage.step(Published((0, 9)), *stage.end("broken", 7, "w0"), *stage.end("broken", 9, "w1"))
    stage.now += 1.0
    assert all(told[0] == "evaluate" for told in stage.step())
    assert stage.state is State.TRAINING
    stage.step(Lost("center", DIED))
    assert ("rebuild_center", "w1") in stage.step()


def test_copies_of_dropped_members_are_kept():
    stage = stage_of()
    stage.step(*stage.end("broken", 7, "w0"), *stage.end("broken", 9, "w1"))
    stage.now += 2.5
    assert ("change", 2, ()) in stage.step()
    stage.step(Lost("center", DIED))
    assert ("rebuild_center", "w1") in stage.step()


def test_a_worker_that_left_its_exchange_by_itself_joins_again():
    stage = stage_of((1, 2)).after(*stage_of().end("broken", 7, "w1"))
    stage.now += 2.5
    assert stage.step() == [("change", 2, ("w0",))]
    assert "w1 left its exchange: a reset" in stage.said
    assert stage.step(Changed()) == [("change", 3, ("w0", "w1"))]


def test_a_broken_end_is_not_forgotten_when_another_worker_is_lost():
    stage = stage_of((1, 3), "w0", "w1", "w2")
    stage.step(*stage.end("broken", 7, "w1"), Lost("w2", DIED))
    assert stage.worker_group.formed[-1].worker_ids == ("w0", "w1")
    stage.now += 2.5
    assert stage.step(Changed()) == [("change", 3, ("w0",))]
    assert stage.step(Changed()) == [("change", 4, ("w0", "w1"))]


def test_a_rebuilt_center_may_be_behind_the_lost_one():
    stage = stage_of().after(Published((0, 20)), scored(20))
    stage.step(Lost("center", DIED))
    stage.step(*stage.end("broken", 18, "w0", "w1"))
    stage.step(Published((18,)))
    assert stage.step() == [("evaluate", 18), ("form", 2, ("w0", "w1"), 18)]


@pytest.mark.parametrize("is_late", [True, False])
def test_a_score_of_a_lost_center_ends_no_run_and_keeps_no_later_one_back(is_late):
    stage = stage_of(callbacks=[StopAtAccuracy(0.5)])
    assert ("evaluate", 100) in stage.step(Published((0, 100)))
    stage.step(Lost("center", DIED))
    assert ("rebuild_center", "w0") in stage.step(*stage.end("broken", 50, "w0", "w1"))
    if is_late:
        assert ("evaluate", 50) in stage.after(Published((50,))).worker_group.told
    stage.step(scored(100))
    assert stage.recorder.scores == []
    stage.step(Published((50,)))
    stage.step(Changed(), Published((50, 60)), Evaluated(Progress(round=50), {"accuracy": 0.1}))
    assert stage.worker_group.told[0] == ("evaluate", 60)
    assert [score.progress.round for score in stage.recorder.scores] == [50]
    assert not stage.controller.ended_because
    assert "stop" not in str(stage.said)


def test_no_round_is_heard_of_twice_though_the_center_went_back_to_it():
    stage = stage_of().after(Published((0, 18)), scored(18))
    stage.step(Published((18, 20)))
    stage.step(scored(20), Lost("center", DIED))
    stage.step(*stage.end("broken", 18, "w0", "w1"))
    stage.step(Published((18,)))
    assert ("evaluate", 18) not in stage.step()
    stage.step(scored(18))
    assert [score.progress.round for score in stage.recorder.scores] == [18, 20]
    assert stage.step(Changed(), Published((18, 20))) == [("evaluate", 20)]  # another than then
    stage.step(scored(20))
    assert [score.progress.round for score in stage.recorder.scores] == [18, 20, 20]


# checkpoints


def test_a_checkpoint_is_collected_once_all_present_members_have_kept_their_states():
    stage = stage_of(2, every_s=10.0)
    stage.now += 10.0
    assert stage.step() == [("vote", "checkpoint")]
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    assert stage.step(*kept, Published((0,))) == []
    assert ("collect", 5, ("w0", "w1")) in stage.step(Published((0, 5)))
    stage.step(Collected(snapshot(5), {}))
    assert len(stage.recorder.checkpoints) == 1


def test_a_vote_that_a_newcomer_has_not_heard_is_cast_again():
    stage = stage_of((2, 3), every_s=10.0)
    stage.now += 10.0
    assert stage.step() == [("vote", "checkpoint")]
    stage.step(report("w0", 6, kept=[5]), report("w1", 7, kept=[5]), WorkerReady("w2"))
    assert stage.step() == [], "the center does not know the newcomer yet"
    assert stage.step(Changed()) == [("vote", "checkpoint")]


@pytest.mark.parametrize("news", [Lost("w1", DIED), GaveUp("checkpoint", "w1 died")])
def test_a_checkpoint_that_needs_a_lost_worker_is_given_up_and_voted_for_again(news):
    stage = stage_of((1, 2), every_s=10.0)
    stage.now += 10.0
    stage.step()
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    assert ("collect", 5, ("w0", "w1")) in stage.step(*kept, Published((0, 5)))
    told = stage.step(news) + stage.step(Changed())
    assert ("vote", "checkpoint") in told
    assert all(what[0] != "collect" for what in told), "what they kept for the old vote is gone"


def test_a_leaver_stays_while_its_state_is_collected():
    stage = stage_of((1, 2), every_s=10.0)
    stage.now += 10.0
    stage.step()
    kept = [report("w0", 6, kept=[5]), report("w1", 7, kept=[5])]
    stage.step(*kept, Published((0, 5)), Draining("w1"))
    stage.step(*stage.end("left", 8, "w1"))
    told = stage.step(Changed(), HandedIn("w1", {}))
    assert ("end", "w1") not in told
    assert ("end", "w1") in stage.step(collected(5, "w0", "w1"))


def test_no_checkpoint_is_voted_for_while_the_last_one_is_being_written():
    stage = stage_of(2, every_s=10.0)
    stage.recorder.is_writing, stage.now = True, stage.now + 10.0
    assert stage.step() == []
    stage.recorder.is_writing = False
    assert stage.step() == [("vote", "checkpoint")]


def test_one_that_leaves_its_exchange_is_no_pause_while_another_trains():
    stage = Stage(is_sync=False).start()
    stage.now = 10.0
    stage.step(*stage.end("broken", 3, "w0"))
    stage.now = 20.0
    stage.step(Changed(), Published((0, 3)))
    stage.step(report("w1", 9, generation=stage.worker_group.formed[-1].generation))
    assert stage.controller.stragglers.longest_pause_s == 0.0
