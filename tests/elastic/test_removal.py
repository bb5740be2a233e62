"""A worker is removed by its id: whether it is replaced, and the message to the user."""

from stages import BOTH, Stage

from raydl.core.worker_group import WorkerReady


def test_removing_an_unknown_worker_lists_the_known_ones():
    told = Stage().start().controller.remove("w7")
    assert told == (False, "the run has no worker w7; it has w0, w1")


@BOTH
def test_a_training_worker_leaves_after_its_next_exchange_without_a_replacement(is_sync):
    stage = Stage((1, 3), is_sync=is_sync).start("w0", "w1", "w2")
    assert stage.controller.remove("w1") == (True, "w1 leaves after its next exchange")
    assert not [told for told in stage.steps(2) if told[0] == "request_worker"]
    assert stage.controller.remove("w1") == (True, "w1 is leaving already")
    assert stage.controller.remove("w2") == (True, "w2 leaves after its next exchange")
    assert not [told for told in stage.steps(2) if told[0] == "request_worker"]


def test_a_removed_worker_is_replaced_if_too_few_would_train():
    stage = Stage((2, 3)).start("w0", "w1", "w2")
    assert stage.controller.remove("w2")[1] == "w2 leaves after its next exchange"
    assert stage.controller.remove("w1")[1] == (
        "w1 leaves after its next exchange; it is replaced, since at least 2 must train"
    )
    assert stage.worker_group.told[-1] == ("request_worker", "w3")


def test_a_worker_that_does_not_train_yet_is_ended_at_once():
    stage = Stage((1, 3)).start("w0")
    stage.worker_group.told.clear()
    assert stage.controller.remove("w2") == (True, "w2 was ended; it was not training")
    assert stage.worker_group.told == [("end", "w2")]
    stage.step(WorkerReady("w1"))
    assert stage.controller.remove("w2") == (
        False,
        "the run has no worker w2; it has w0, w1",
    )
