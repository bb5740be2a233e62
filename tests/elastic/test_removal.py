"""A worker is removed by name: who takes its place, if anybody, and what the user is told."""

from stages import BOTH, Stage

from raydl.core.worker_group import WorkerReady


def test_who_is_not_there_can_not_be_removed_and_it_is_said_who_is():
    told = Stage().start().controller.remove("w7")
    assert told == (False, "there is no worker w7; there are w0, w1")


@BOTH
def test_who_trains_leaves_after_its_next_exchange_and_nobody_takes_its_place(is_sync):
    stage = Stage((1, 3), is_sync=is_sync).start("w0", "w1", "w2")
    assert stage.controller.remove("w1") == (True, "w1 leaves after its next exchange")
    assert not [told for told in stage.steps(2) if told[0] == "request_worker"]
    assert stage.controller.remove("w1") == (True, "w1 is leaving already")
    assert stage.controller.remove("w2") == (True, "w2 leaves after its next exchange")
    assert not [told for told in stage.steps(2) if told[0] == "request_worker"]


def test_with_the_fewest_that_may_train_another_one_takes_its_place():
    stage = Stage((2, 3)).start("w0", "w1", "w2")
    assert stage.controller.remove("w2")[1] == "w2 leaves after its next exchange"
    assert stage.controller.remove("w1")[1] == (
        "w1 leaves after its next exchange; another one takes its place, for fewer may not train"
    )
    assert stage.worker_group.told[-1] == ("request_worker", "w3")


def test_who_does_not_train_yet_is_ended_at_once():
    stage = Stage((1, 3)).start("w0")
    stage.worker_group.told.clear()
    assert stage.controller.remove("w2") == (True, "w2 is ended; it did not train")
    assert stage.worker_group.told == [("end", "w2")]
    stage.step(WorkerReady("w1"))
    assert stage.controller.remove("w2") == (
        False,
        "there is no worker w2; there are w0, w1",
    )
