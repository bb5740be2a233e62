"""How a run ends, and ends even if workers or the center are lost meanwhile."""

import pytest
from stages import BOTH, Stage, collected, report, scored

from raydl.config import (
    OptimizerConfig,
)
from raydl.core.callbacks import StopAtAccuracy
from raydl.core.reports import Outcome
from raydl.core.worker_group import Draining, GaveUp, Lost, Published, Scoring
from raydl.elastic.run_state import State
from raydl.errors import RaydlError


@BOTH
def test_a_finished_run_is_collected_scored_and_reported_before_it_is_done(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.step(*stage.end("finished", 9, "w0"))
    assert stage.state is State.TRAINING
    stage.step(*stage.end("finished", 9, "w1"), Published((0, 9)))
    assert stage.state is State.FINISHING
    assert stage.step() == [("collect", 9, ("w0", "w1"))]
    stage.step(collected(9, "w0", "w1"))
    stage.step(scored(9))
    assert stage.state is State.FINISHING, "the last records are not here yet"
    stage.step(report("w0", 9), report("w1", 9))
    assert stage.state is State.DONE
    assert stage.controller.outcome is Outcome.FINISHED
    assert len(stage.recorder.checkpoints) == 1


@BOTH
def test_a_stop_is_voted_once_and_ends_with_a_checkpoint_without_a_score(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.controller.request_stop("SIGTERM")
    assert stage.step() == [("vote", "stop")]
    assert stage.step() == []
    stage.step(*stage.end("stopped", 3, "w0", "w1"), report("w0", 3), report("w1", 3))
    told = [*stage.step(Published((0, 3))), *stage.step()]
    assert ("collect", 3, ("w0", "w1")) in told
    stage.step(collected(3))
    assert (stage.state, stage.controller.outcome) == (State.DONE, Outcome.STOPPED)


@BOTH
@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_run_that_a_callback_ends_is_finished_unless_a_signal_came_too(is_sync, is_signalled):
    stage = Stage(is_sync=is_sync, callbacks=[StopAtAccuracy(0.5)]).start()
    assert stage.step(Published((0, 2)), scored(2)) == [("vote", "stop")]
    if is_signalled:
        stage.controller.request_stop("SIGTERM")
    stage.step(*stage.end("stopped", 3, "w0", "w1"), Published((0, 3)))
    controller = stage.controller
    assert stage.state is State.FINISHING
    assert controller.outcome is (Outcome.STOPPED if is_signalled else Outcome.FINISHED)
    name, reason = "training.stop_at_accuracy 0.5", "reached accuracy 0.5000"
    assert controller.ended_by == ("" if is_signalled else name)
    assert controller.ended_because == ("" if is_signalled else reason)


def test_scores_that_stand_still_cut_the_learning_rate_but_not_after_the_last_round():
    plateau = OptimizerConfig(lr_schedule="plateau", patience=0, warmup=0.0)
    stage = Stage(optimizer=plateau).start()
    stage.step(Published((0, 2)), scored(2))
    assert stage.step(Published((0, 2, 4)), scored(4)) == [("vote", "num_cuts")]
    assert "the center stopped improving at accuracy 0.5000" in stage.said[-1]
    stage.step(*stage.end("finished", 9, "w0", "w1"), Published((0, 9)))
    stage.step(scored(9))
    assert sum("stopped improving" in said for said in stage.said) == 1


def test_a_stop_before_anything_was_trained_ends_at_once():
    stage = Stage()
    stage.controller.request_stop("SIGINT")
    assert stage.step() == []
    assert stage.state is State.DONE


@BOTH
def test_silence_of_the_last_states_ends_the_run_with_a_sentence(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.step(*stage.end("finished", 9, "w0", "w1"), Published((0, 9)))
    stage.now += 299.0
    stage.step()
    stage.now += 2.0
    with pytest.raises(RaydlError, match="there was no progress for 300 s"):
        stage.step()


@pytest.fixture
def unscored(request):
    """Return a stage that waits for nothing but the score of its last center."""
    stage = Stage(is_sync=request.param).start()
    stage.step(*stage.end("finished", 9, "w0", "w1"), Published((0, 9)))
    stage.step(report("w0", 9), report("w1", 9), collected(9))
    assert stage.state is State.FINISHING
    return stage


UNSCORED = pytest.mark.parametrize(
    "unscored", [True, False], indirect=True, ids=["rounds", "messages"]
)


@UNSCORED
def test_a_score_may_take_as_long_as_it_moves(unscored):
    for number in range(20):
        unscored.now += 290.0
        unscored.step(Scoring(10 * number))
    assert unscored.state is State.FINISHING
    unscored.step(scored(9))
    assert unscored.state is State.DONE
    assert len(unscored.recorder.scores) == 1
    assert not unscored.controller.lacks_score


@UNSCORED
def test_a_score_that_does_not_move_is_a_missing_score_and_no_failure(unscored):
    for _ in range(4):
        unscored.step(Scoring(10))
        unscored.now += 100.0
    unscored.step(Scoring(10))
    assert (unscored.state, unscored.controller.outcome) == (State.DONE, Outcome.FINISHED)
    assert unscored.said[-1] == (
        "the evaluator has scored nothing for 300 s: the run ends without a score of its last "
        "center"
    )
    assert unscored.recorder.scores == []
    assert unscored.controller.lacks_score


@UNSCORED
def test_an_evaluator_that_is_lost_repeatedly_is_logged_and_given_up(unscored):
    for _ in range(5):
        assert unscored.state is State.FINISHING
        unscored.step()  # asks for the score again
        unscored.step(GaveUp("evaluation", "its process was killed, or crashed"))
    assert unscored.state is State.DONE
    assert "an evaluation was abandoned: its process was killed, or crashed" in unscored.said
    assert unscored.said[-1].startswith(
        "the evaluation was abandoned 5 times: the run ends without a"
    )


@BOTH
@pytest.mark.parametrize(("end", "is_last"), [("finished", True), ("stopped", False)])
def test_the_last_checkpoint_of_a_finished_run_has_the_trained_center(is_sync, end, is_last):
    stage = Stage(is_sync=is_sync).start()
    if end == "stopped":
        stage.controller.request_stop("SIGTERM")
    stage.step(*stage.end(end, 9, "w0", "w1"), Published((0, 9)))
    stage.step(report("w0", 9), report("w1", 9))
    stage.step(collected(9))
    assert [c.is_last for c in stage.recorder.checkpoints] == [is_last]


@UNSCORED
def test_a_center_that_is_lost_before_its_score_costs_the_score_alone(unscored):
    told = unscored.step(Lost("center", "its node was lost"))
    assert told == [("rebuild_center", "w0")]
    for _ in range(4):
        unscored.now += 100.0
        unscored.step()
    assert (unscored.state, unscored.controller.outcome) == (State.DONE, Outcome.FINISHED)
    assert unscored.controller.lacks_score


@UNSCORED
def test_a_score_that_arrives_while_the_last_files_are_written_counts(unscored):
    unscored.recorder.is_writing = True
    unscored.controller.request_stop("SIGTERM")
    unscored.step()
    unscored.step(scored(9))
    unscored.recorder.is_writing = False
    unscored.step()
    assert unscored.state is State.DONE
    assert not any("without a score" in sentence for sentence in unscored.said)


@UNSCORED
def test_the_end_waits_for_the_last_files(unscored):
    unscored.recorder.is_writing = True
    unscored.step(scored(9))
    assert unscored.state is State.FINISHING
    unscored.recorder.is_writing = False
    unscored.step()
    assert unscored.state is State.DONE


@pytest.fixture
def finishing(request):
    """Return a stage whose last states are under way."""
    stage = Stage(is_sync=request.param).start()
    stage.step(*stage.end("finished", 9, "w0", "w1"), Published((0, 9)), scored(9))
    stage.step(report("w0", 9))
    assert stage.state is State.FINISHING
    return stage


AT_THE_END = pytest.mark.parametrize(
    "finishing", [True, False], indirect=True, ids=["rounds", "messages"]
)


@AT_THE_END
def test_a_worker_lost_while_the_last_states_are_collected_is_left_out_of_them(finishing):
    told = finishing.step(Lost("w1", "the actor died"))
    assert told == [("collect", 9, ("w0",))], "nobody is asked for any more"
    assert finishing.step(collected(9, "w0")) == []
    assert finishing.state is State.DONE


@AT_THE_END
def test_all_workers_may_be_lost_while_the_last_states_are_collected(finishing):
    told = finishing.step(Lost("w1", "the actor died"), Lost("w0", "the actor died"))
    assert told == [("collect", 9, ())]
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_the_center_lost_while_the_last_states_are_collected_is_rebuilt(finishing):
    assert finishing.step(Lost("center", "the actor died")) == [("rebuild_center", "w0")]
    assert "the center is rebuilt from the last copy of w0, of round 9" in finishing.said
    assert finishing.step(report("w1", 9)) == []
    assert finishing.step(Published((9,))) == [("collect", 9, ("w0", "w1"))]
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_late_events_do_not_delay_the_end(finishing):
    finishing.controller.worker_registry.left_loop("w1", 11)  # a copy that nobody waits for
    assert finishing.step(Published((0, 9)), report("w1", 9)) == []
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_last_states_that_were_given_up_are_asked_for_again(finishing):
    told = finishing.step(GaveUp("checkpoint", "an actor died"))
    assert told == [("collect", 9, ("w0", "w1"))]


@AT_THE_END
def test_a_worker_that_drains_at_the_very_end_stays_until_its_state_is_here(finishing):
    assert finishing.step(Draining("w1")) == []
    finishing.step(collected(9), report("w1", 9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_with_the_center_and_its_furthest_copies_lost_the_run_ends_with_an_earlier_round(finishing):
    gone = [Lost(name, "the node died") for name in ("w0", "w1", "center")]
    assert finishing.step(*gone) == [("rebuild_center", None)]
    assert finishing.step(Published((0,)))[-1:] == [("collect", 0, ())]
    finishing.step(collected(0), scored(0))
    finishing.step()
    assert finishing.state is State.DONE


# whole runs, simulated


def test_lost_scores_are_logged_one_by_one_and_then_every_tenth():
    stage = Stage(1).start("w0")
    told = []
    for number in range(1, 45):
        before = len(stage.said)
        stage.step(GaveUp("evaluation", "it was killed"))
        told += [number] * (len(stage.said) - before)
    assert told == [*range(1, 21), 30, 40]
    assert stage.said[-1] == "an evaluation was abandoned, 40 in a row: it was killed"
    assert stage.said[-22:-20] == [
        "an evaluation was abandoned: it was killed",
        "an evaluation was abandoned, 2 in a row: it was killed",
    ]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("checkpoint", "a checkpoint was abandoned: it was killed"),
        ("saved state of w0", "w0 starts from the center: it was killed"),
    ],
)
def test_a_result_that_will_not_arrive_is_logged_with_its_cause(task, sentence):
    stage = Stage(1).start("w0")
    stage.step(GaveUp(task, "it was killed"))
    assert stage.said[-1] == sentence
