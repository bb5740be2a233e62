"""The end of a run, also if workers or the center are lost during it."""

import dataclasses
import math
from unittest.mock import Mock

import pytest
from controller_harness import BOTH, DIED, ControllerHarness, collected, report, scored

from raydl.config import (
    OptimizerConfig,
)
from raydl.core.callbacks import StopAtAccuracy
from raydl.core.reports import Outcome
from raydl.core.worker_group import (
    Changed,
    Draining,
    Failed,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Scoring,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import NonFiniteLossError, RaydlError


@BOTH
def test_a_finished_run_is_collected_scored_and_reported_before_it_is_done(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(*harness.end("finished", 9, "w0"))
    assert harness.state is State.TRAINING
    harness.step(*harness.end("finished", 9, "w1"), Published((0, 9)))
    assert harness.state is State.FINISHING
    assert harness.step() == [("collect", 9, ("w0", "w1"))]
    harness.step(collected(9, "w0", "w1"))
    harness.step(scored(9))
    assert harness.state is State.FINISHING, "the last records have not arrived yet"
    harness.step(report("w0", 9), report("w1", 9))
    assert harness.state is State.DONE
    assert harness.controller.outcome is Outcome.FINISHED
    assert len(harness.recorder.checkpoints) == 1


@BOTH
def test_a_stop_is_voted_once_and_ends_with_a_checkpoint_without_a_score(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.controller.request_stop("SIGTERM")
    assert harness.step() == [("vote", "stop")]
    assert harness.step() == []
    harness.step(*harness.end("stopped", 3, "w0", "w1"), report("w0", 3), report("w1", 3))
    calls = [*harness.step(Published((0, 3))), *harness.step()]
    assert ("collect", 3, ("w0", "w1")) in calls
    harness.step(collected(3))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.STOPPED)


@BOTH
@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_run_stops_to_train_what_a_model_has_unfrozen_unless_a_signal_came_too(
    is_sync, is_signalled
):
    harness = ControllerHarness(is_sync=is_sync).start()
    controller, recorder = harness.controller, harness.recorder
    calls = harness.step(report("w1", 1, unfrozen=("b", "a")))
    assert calls == ([] if is_sync else [("vote", "stop")])  # in rounds the worker votes itself
    if is_signalled:
        controller.request_stop("SIGTERM")
    harness.step(*harness.end("stopped", 3, "w0", "w1"), report("w0", 3, unfrozen=("c",)))
    harness.step(Published((0, 3)), report("w1", 3))
    harness.step(collected(3))
    assert (harness.state, controller.outcome) == (State.DONE, Outcome.STOPPED)
    assert controller.unfrozen == ("a", "b", "c")
    assert recorder.checkpoints[-1].unfrozen == ("a", "b", "c")
    assert controller.restarts is not is_signalled
    # Only a signal is logged here: of the parameters the next start says that they are trained.
    assert len(recorder.events) == (2 if is_signalled and is_sync else 1)


def test_after_an_abandoned_generation_the_stop_is_voted_again():
    harness = ControllerHarness(is_sync=False).start()
    harness.step(report("w1", 1, unfrozen=("a",)))
    harness.step(*harness.end("regroup", 2, "w0", "w1"), Published((0, 2)))
    calls = [call for _ in range(3) for call in harness.step(Changed())]
    assert ("vote", "stop") in calls


@BOTH
@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_run_that_a_callback_ends_is_finished_unless_a_signal_came_too(is_sync, is_signalled):
    harness = ControllerHarness(is_sync=is_sync, callbacks=[StopAtAccuracy(0.5)]).start()
    assert harness.step(Published((0, 2)), scored(2)) == [("vote", "stop")]
    if is_signalled:
        harness.controller.request_stop("SIGTERM")
    harness.step(*harness.end("stopped", 3, "w0", "w1"), Published((0, 3)))
    controller = harness.controller
    assert harness.state is State.FINISHING
    assert controller.outcome is (Outcome.STOPPED if is_signalled else Outcome.FINISHED)
    name, reason = "training.stop_at_accuracy 0.5", "reached accuracy 0.5000"
    assert controller.ended_by == ("" if is_signalled else name)
    assert controller.ended_because == ("" if is_signalled else reason)


def test_scores_that_do_not_improve_cut_the_learning_rate_but_not_after_the_last_round():
    plateau = OptimizerConfig(lr_schedule="plateau", patience=0, warmup=0.0)
    harness = ControllerHarness(optimizer=plateau).start()
    harness.step(Published((0, 2)), scored(2))
    assert harness.step(Published((0, 2, 4)), scored(4)) == [("vote", "num_cuts")]
    assert "the center stopped improving at accuracy 0.5000" in harness.log_lines[-1]
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.step(scored(9))
    assert sum("stopped improving" in line for line in harness.log_lines) == 1


def test_a_stop_before_anything_was_trained_ends_at_once():
    harness = ControllerHarness()
    harness.controller.request_stop("SIGINT")
    assert harness.step() == []
    assert harness.state is State.DONE


@BOTH
def test_a_run_whose_last_states_do_not_arrive_ends_with_an_error_message(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.now += 299.0
    harness.step()
    harness.now += 2.0
    with pytest.raises(RaydlError, match="there was no progress for 300 s"):
        harness.step()


@pytest.fixture
def unscored(request):
    """Return a harness that waits only for the score of its last center."""
    harness = ControllerHarness(is_sync=request.param).start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.step(report("w0", 9), report("w1", 9), collected(9))
    assert harness.state is State.FINISHING
    return harness


UNSCORED = pytest.mark.parametrize(
    "unscored", [True, False], indirect=True, ids=["rounds", "messages"]
)


@UNSCORED
def test_an_evaluation_may_take_any_time_while_it_makes_progress(unscored):
    for number in range(20):
        unscored.now += 290.0
        unscored.step(Scoring(10 * number))
    assert unscored.state is State.FINISHING
    unscored.step(scored(9))
    assert unscored.state is State.DONE
    assert len(unscored.recorder.scores) == 1
    assert not unscored.controller.lacks_score


@UNSCORED
def test_an_evaluation_without_progress_costs_the_score_but_does_not_fail_the_run(unscored):
    for _ in range(4):
        unscored.step(Scoring(10))
        unscored.now += 100.0
    unscored.step(Scoring(10))
    assert (unscored.state, unscored.controller.outcome) == (State.DONE, Outcome.FINISHED)
    assert unscored.log_lines[-1] == (
        "the evaluator has scored nothing for 300 s: the run ends without a score of its last "
        "center"
    )
    assert unscored.recorder.scores == []
    assert unscored.controller.lacks_score


@UNSCORED
def test_an_evaluator_that_is_lost_repeatedly_is_logged_and_given_up(unscored):
    for _ in range(5):
        assert unscored.state is State.FINISHING
        unscored.step()  # requests the score again
        unscored.step(GaveUp("evaluation", "its process was killed, or crashed"))
    assert unscored.state is State.DONE
    assert "an evaluation was abandoned: its process was killed, or crashed" in unscored.log_lines
    assert unscored.log_lines[-1].startswith(
        "the evaluation was abandoned 5 times: the run ends without a"
    )


@BOTH
@pytest.mark.parametrize(("end", "is_last"), [("finished", True), ("stopped", False)])
def test_the_last_checkpoint_of_a_finished_run_has_the_trained_center(is_sync, end, is_last):
    harness = ControllerHarness(is_sync=is_sync).start()
    if end == "stopped":
        harness.controller.request_stop("SIGTERM")
    harness.step(*harness.end(end, 9, "w0", "w1"), Published((0, 9)))
    harness.step(report("w0", 9), report("w1", 9))
    harness.step(collected(9))
    assert [c.is_last for c in harness.recorder.checkpoints] == [is_last]


@UNSCORED
def test_a_center_that_is_lost_before_its_score_costs_only_the_score(unscored):
    calls = unscored.step(Lost("center", "its node was lost"))
    assert calls == [("rebuild_center", "w0")]
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
    assert not any("without a score" in sentence for sentence in unscored.log_lines)


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
    """Return a harness that is collecting the last states of its workers."""
    harness = ControllerHarness(is_sync=request.param).start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)), scored(9))
    harness.step(report("w0", 9))
    assert harness.state is State.FINISHING
    return harness


AT_THE_END = pytest.mark.parametrize(
    "finishing", [True, False], indirect=True, ids=["rounds", "messages"]
)


@AT_THE_END
def test_a_worker_lost_while_the_last_states_are_collected_is_left_out_of_them(finishing):
    calls = finishing.step(Lost("w1", "the actor died"))
    assert calls == [("collect", 9, ("w0",))], "no worker is requested any more"
    assert finishing.step(collected(9, "w0")) == []
    assert finishing.state is State.DONE


@AT_THE_END
def test_all_workers_may_be_lost_while_the_last_states_are_collected(finishing):
    calls = finishing.step(Lost("w1", "the actor died"), Lost("w0", "the actor died"))
    assert calls == [("collect", 9, ())]
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_the_center_lost_while_the_last_states_are_collected_is_rebuilt(finishing):
    assert finishing.step(Lost("center", "the actor died")) == [("rebuild_center", "w0")]
    assert "the center is rebuilt from the last copy of w0, of round 9" in finishing.log_lines
    assert finishing.step(report("w1", 9)) == []
    assert finishing.step(Published((9,))) == [("collect", 9, ("w0", "w1"))]
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_late_events_do_not_delay_the_end(finishing):
    late = finishing.end("finished", 11, "w1")  # a copy that is not needed
    assert finishing.step(*late, Published((0, 9)), report("w1", 9)) == []
    finishing.step(collected(9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_last_states_that_were_given_up_are_requested_again(finishing):
    calls = finishing.step(GaveUp("checkpoint", "an actor died"))
    assert calls == [("collect", 9, ("w0", "w1"))]


@AT_THE_END
def test_a_worker_that_drains_at_the_very_end_stays_until_its_state_is_collected(finishing):
    assert finishing.step(Draining("w1")) == []
    finishing.step(collected(9), report("w1", 9))
    assert finishing.state is State.DONE


@AT_THE_END
def test_with_the_center_and_all_copies_lost_the_run_trains_on_from_an_earlier_round(finishing):
    gone = [Lost(name, "the node died") for name in ("w0", "w1", "center")]
    assert finishing.step(*gone) == [("rebuild_center", None)]
    finishing.step(Published((0,)))
    assert (finishing.state, finishing.controller.outcome) == (State.WAITING, None)
    calls = finishing.step()
    assert [call for call in calls if call[0] == "request_worker"] == [
        ("request_worker", "w2"),
        ("request_worker", "w3"),
    ]
    finishing.step(collected(0), WorkerReady("w2"), WorkerReady("w3"))
    assert ("form", 2, ("w2", "w3"), 0) in finishing.worker_group.calls
    finishing.step(Changed(), *finishing.end("finished", 8, "w2", "w3"), Published((0, 8)))
    assert ("collect", 8, ("w2", "w3")) in finishing.steps(2)
    finishing.step(collected(8), report("w2", 8), report("w3", 8), scored(8))
    assert finishing.state is State.DONE
    assert [c.is_last for c in finishing.recorder.checkpoints] == [False, True]


@BOTH
def test_a_run_whose_center_and_furthest_worker_are_lost_at_the_end_trains_the_rest(is_sync):
    harness = ControllerHarness((1, 2), is_sync=is_sync).start()
    ends = [*harness.end("finished", 9, "w0"), *harness.end("broken", 8, "w1")]
    if not is_sync:
        ends[1] = harness.end("finished", 8, "w1")[0]
    harness.step(*ends, Published((0, 9)))
    harness.now += 3.0
    harness.step()
    assert harness.state is State.FINISHING
    assert harness.step(Lost("w0", DIED), Lost("center", DIED)) == [("rebuild_center", "w1")]
    calls = harness.step(Published((8,), is_complete=is_sync)) + harness.steps(2)
    assert ("form", 2, ("w1",), 8) in calls
    assert ("request_worker", "w2") in calls
    assert not any(call[0] == "collect" for call in calls)
    assert harness.controller.outcome is None


def test_a_center_that_is_rebuilt_with_fewer_claims_done_at_the_last_round_trains_the_rest():
    harness = ControllerHarness(is_sync=False).start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.step(Lost("center", DIED))
    harness.step(Published((9,), is_complete=False))
    assert harness.state is State.WAITING
    assert ("form", 2, ("w0", "w1"), 9) in harness.step()


@BOTH
def test_a_stopped_run_that_loses_its_center_and_its_workers_ends_with_what_is_left(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.controller.request_stop("SIGTERM")
    harness.step(*harness.end("stopped", 9, "w0", "w1"), Published((0, 9)))
    gone = [Lost(name, DIED) for name in ("w0", "w1", "center")]
    assert harness.step(*gone) == [("rebuild_center", None)]
    calls = harness.step(Published((0,))) + harness.steps(3)
    assert calls == [("collect", 0, ())], "and no worker is requested"
    harness.step(collected(0))
    assert (harness.state, harness.controller.outcome) == (State.DONE, Outcome.STOPPED)


def test_a_run_that_a_callback_ended_early_is_not_trained_to_its_end_after_losses():
    harness = ControllerHarness(is_sync=False, callbacks=[StopAtAccuracy(0.5)]).start()
    harness.step(Published((0, 2)), scored(2))
    harness.step(*harness.end("stopped", 3, "w0", "w1"), Published((0, 3), is_complete=False))
    harness.step(Lost("w0", DIED), Lost("center", DIED))
    calls = harness.step(Published((3,), is_complete=False)) + harness.steps(2)
    assert ("collect", 3, ("w1",)) in calls
    assert harness.controller.outcome is Outcome.FINISHED


# results that do not arrive


def test_lost_scores_are_logged_one_by_one_and_then_every_tenth():
    harness = ControllerHarness(1).start("w0")
    logged = []
    for number in range(1, 45):
        before = len(harness.log_lines)
        harness.step(GaveUp("evaluation", "it was killed"))
        logged += [number] * (len(harness.log_lines) - before)
    assert logged == [*range(1, 21), 30, 40]
    assert harness.log_lines[-1] == "an evaluation was abandoned, 40 in a row: it was killed"
    assert harness.log_lines[-22:-20] == [
        "an evaluation was abandoned: it was killed",
        "an evaluation was abandoned, 2 in a row: it was killed",
    ]


@pytest.mark.parametrize(
    ("task", "worker_id", "sentence"),
    [
        ("checkpoint", "", "a checkpoint was abandoned: it was killed"),
        ("saved state", "w0", "w0 starts from the center: it was killed"),
    ],
)
def test_a_result_that_will_not_arrive_is_logged_with_its_cause(task, worker_id, sentence):
    harness = ControllerHarness(1).start("w0")
    harness.step(GaveUp(task, "it was killed", worker_id))
    assert harness.log_lines[-1] == sentence


# scores by the workers


def scoring():
    """Return a harness whose workers train, and score the center."""
    return ControllerHarness(scored_by="workers").start()


def evaluations(calls):
    return [call for call in calls if call[0] == "evaluate"]


def test_the_evaluator_scores_no_center_during_the_training_if_the_workers_do():
    harness = scoring()
    calls = harness.step(Published((0, 2))) + harness.step(report("w0", 2, scores=(scored(2),)))
    assert evaluations(calls + harness.step(Published((0, 2, 4)))) == []
    assert [score.progress.round for score in harness.recorder.scores] == [2]


def test_a_score_that_the_workers_report_twice_counts_once():
    harness = scoring()
    for _ in range(2):
        harness.step(Published((0, 2)), report("w0", 2, scores=(scored(2),)))
    assert len(harness.recorder.scores) == 1


@pytest.mark.parametrize("has_score", [True, False])
def test_the_last_center_is_scored_by_the_evaluator_only_if_the_workers_could_not(has_score):
    harness = scoring()
    first, second = harness.end("finished", 9, "w0", "w1")
    first = dataclasses.replace(first, score=scored(9) if has_score else None)
    calls = harness.step(first, second, Published((0, 9)))
    calls += harness.step(report("w0", 9), report("w1", 9), collected(9))
    assert evaluations(calls) == ([] if has_score else [("evaluate", 9)])
    if not has_score:
        harness.step(scored(9))
    assert harness.state is State.DONE
    assert len(harness.recorder.scores) == 1


def test_scores_that_arrive_after_the_end_of_the_loop_come_before_the_last_one():
    harness = scoring()
    first, second = harness.end("finished", 9, "w0", "w1")
    harness.step(dataclasses.replace(first, score=scored(9)), second, Published((0, 9)))
    harness.step(collected(9), report("w1", 9))
    assert harness.state is State.FINISHING
    calls = harness.step(report("w0", 9, scores=(scored(3), scored(6))))
    assert [score.progress.round for score in harness.recorder.scores] == [3, 6, 9]
    assert (harness.state, evaluations(calls)) == (State.DONE, [])


def test_the_evaluator_scores_the_last_center_if_the_worker_that_has_its_score_is_lost():
    harness = scoring()
    first, second = harness.end("finished", 9, "w0", "w1")
    harness.step(dataclasses.replace(first, score=scored(9)), second, Published((0, 9)))
    assert evaluations(harness.step(Lost("w0", "the actor died"))) == [("evaluate", 9)]


@pytest.mark.parametrize("is_signalled", [False, True])
def test_workers_score_the_last_center_of_a_run_that_a_callback_ends_but_not_after_a_signal(
    is_signalled,
):
    harness = ControllerHarness(scored_by="workers", callbacks=[StopAtAccuracy(0.5)]).start()
    if is_signalled:
        harness.controller.request_stop("SIGTERM")
    calls = harness.step(Published((0, 2)), report("w0", 2, scores=(scored(2),)))
    assert calls == [("vote", "stop") if is_signalled else ("vote", "stop", "score")]
    if is_signalled:
        return
    first, second = harness.end("stopped", 3, "w0", "w1")
    harness.step(dataclasses.replace(first, score=scored(3)), second, Published((0, 2, 3)))
    calls = harness.step(report("w0", 3), report("w1", 3), collected(3))
    assert (harness.state, evaluations(calls)) == (State.DONE, [])
    assert [score.progress.round for score in harness.recorder.scores] == [2, 3]


# what a review of the control found


@BOTH
def test_the_last_checkpoint_is_the_last_one_also_if_its_collection_began_before_the_end(is_sync):
    harness = ControllerHarness(is_sync=is_sync, every_s=1.0).start()
    harness.now += 2.0
    harness.step()
    kept = [report(w, 9, kept=(9,)) for w in ("w0", "w1")]
    assert ("collect", 9, ("w0", "w1")) in harness.step(Published((0, 9)), *kept)
    harness.step(*harness.end("finished", 9, "w0", "w1"))
    assert harness.state is State.FINISHING
    harness.step(collected(9), scored(9))
    assert harness.state is State.DONE
    assert [c.is_last for c in harness.recorder.checkpoints] == [True]


def test_states_that_arrive_after_their_collection_was_given_up_are_released():
    harness = ControllerHarness(every_s=1.0).start()
    harness.now += 2.0
    harness.step()
    kept = [report(w, 5, kept=(5,)) for w in ("w0", "w1")]
    assert ("collect", 5, ("w0", "w1")) in harness.step(Published((0, 5)), *kept)
    harness.step(Lost("w1", DIED))
    state = Mock()
    harness.worker_group.events.append(
        dataclasses.replace(collected(5), workers={"w0": state, "w1": {}})
    )
    harness.controller.step()
    state.release.assert_called_once_with()
    assert harness.recorder.checkpoints == []
    assert any(line.startswith("a checkpoint was abandoned") for line in harness.log_lines)


def test_a_leaver_is_ended_although_a_checkpoint_waits_for_a_silent_storage():
    harness = ControllerHarness().start()
    harness.recorder.is_writing = harness.recorder.is_given_up = True
    harness.step(Draining("w1"))
    ends = harness.end("regroup", 5, "w0", "w1")
    calls = harness.step(*ends, Published((0, 5))) + harness.steps(2)
    assert ("collect", 5, ("w0", "w1")) in calls
    assert ("hand_in", "w1") in calls
    calls = harness.step(HandedIn("w1", {}), collected(5)) + harness.steps(2)
    assert ("end", "w1") in calls


def test_a_driver_that_was_busy_looks_again_before_a_wait_ends():
    slow = [lambda: None]

    class Slow:
        def evaluated(self, evaluated):
            slow[0]()

        def ended(self, result):
            pass

    harness = ControllerHarness((2, 3), is_sync=False, callbacks=[Slow()]).start()

    def sleep():
        harness.now += 700.0
        harness.worker_group.events.append(Changed())  # it has come meanwhile

    assert ("change", 2, ("w0", "w1", "w2")) in harness.step(WorkerReady("w2", "node"))
    slow[0] = sleep
    harness.step(Published((0, 4)), scored(4))
    assert harness.state is State.TRAINING


def test_a_halted_run_whose_center_does_not_answer_raises_the_error_that_has_halted_it():
    harness = ControllerHarness((2, 3), is_sync=False).start()
    harness.step(WorkerReady("w2", "node"))
    harness.step(Failed("w1", ZeroDivisionError("my own mistake")))
    harness.now += 601.0
    with pytest.raises(ZeroDivisionError):
        harness.step()


def test_after_a_halt_by_divergence_another_error_of_that_worker_is_one_more():
    harness = ControllerHarness(is_sync=False, elastic={"max_rollbacks": 0}).start()
    bad = NonFiniteLossError("w1", 3, math.nan)
    [end] = harness.end("broken", 3, "w1")
    harness.step(dataclasses.replace(end, error=bad))
    harness.step(Failed("w1", ValueError("another")))
    assert harness.state is State.TRAINING, "the others leave by vote"
    with pytest.raises(NonFiniteLossError):
        harness.step(Failed("w1", ValueError("a third one")))
