"""Workers are removed by id: whether a worker is replaced, and the message to the user."""

from controller_harness import BOTH, ControllerHarness

from raydl.core.worker_group import WorkerReady


def test_removing_an_unknown_worker_lists_the_known_ones():
    refusal = ControllerHarness().start().controller.remove("w7")
    assert refusal == (False, "the run has no worker w7; it has w0, w1")


@BOTH
def test_a_training_worker_leaves_after_its_next_exchange_without_a_replacement(is_sync):
    harness = ControllerHarness((1, 3), is_sync=is_sync).start("w0", "w1", "w2")
    assert harness.controller.remove("w1") == (True, "w1 leaves after its next exchange")
    calls = harness.steps(2)
    assert not [call for call in calls if call[0] == "request_worker"]
    assert [call for call in calls if call[0] in ("vote", "dismiss")], "it is told to leave"
    assert harness.controller.remove("w1") == (True, "w1 is leaving already")
    assert harness.controller.remove("w2") == (True, "w2 leaves after its next exchange")
    assert not [call for call in harness.steps(2) if call[0] == "request_worker"]


def test_a_removed_worker_is_replaced_if_too_few_would_train():
    harness = ControllerHarness((2, 3)).start("w0", "w1", "w2")
    assert harness.controller.remove("w2")[1] == "w2 leaves after its next exchange"
    assert harness.controller.remove("w1")[1] == (
        "w1 leaves after its next exchange; it is replaced, since at least 2 must train"
    )
    assert harness.worker_group.calls[-1] == ("request_worker", "w3")


def test_a_worker_that_does_not_train_yet_is_ended_at_once():
    harness = ControllerHarness((1, 3)).start("w0")
    harness.worker_group.calls.clear()
    assert harness.controller.remove("w2") == (True, "w2 was ended; it was not training")
    assert harness.worker_group.calls == [("end", "w2")]
    harness.step(WorkerReady("w1"))
    assert harness.controller.remove("w2") == (
        False,
        "the run has no worker w2; it has w0, w1",
    )
