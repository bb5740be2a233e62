"""An error in one worker: it is replaced, or the run stops after a checkpoint."""

import json
import math
import os
import re

import numpy as np
import pytest
import torch
from clusters import cluster_environment
from controller_harness import BOTH, DIED, ControllerHarness, collected, report
from ensembles import linear
from programs import run_program
from safetensors.torch import load_file

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.config import ElasticConfig
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.worker_group import Changed, Failed, GaveUp, Lost, Published, RunEnded, WorkerReady
from raydl.elastic.membership_policy import is_changing
from raydl.elastic.run_state import State
from raydl.errors import ConfigError, InfrastructureError, NonFiniteCenterError, NonFiniteLossError
from raydl.methods.outer import Outer
from raydl.storage import Storage

MACHINE_ERROR = InfrastructureError("w1", "OSError: [Errno 5] Input/output error")
USER_ERROR = ZeroDivisionError("my own mistake")


def failed(worker_id):
    return Failed(worker_id, InfrastructureError(worker_id, "MemoryError"))


# workers that may be replaced


@BOTH
def test_a_worker_whose_machine_failed_is_ended_and_replaced(is_sync):
    harness = ControllerHarness((1, 2), is_sync=is_sync).start()
    calls = harness.step(Failed("w1", MACHINE_ERROR))
    assert ("end", "w1") in calls
    assert ("request_worker", "w2") in calls
    assert any(
        "w1 was lost: the machine of w1 failed: OSError" in line for line in harness.log_lines
    )
    assert harness.state is not State.DONE


@BOTH
def test_a_newcomer_whose_machine_fails_as_it_starts_is_replaced_too(is_sync):
    harness = ControllerHarness((1, 2), is_sync=is_sync).start("w0")
    assert harness.step(failed("w1")) == [("end", "w1"), ("request_worker", "w2")]


@BOTH
def test_the_budget_of_a_worker_passes_to_its_replacements(is_sync):
    harness = ControllerHarness((1, 2), is_sync=is_sync, elastic={"max_worker_errors": 2}).start(
        "w0"
    )
    harness.step(failed("w1"))
    harness.step(failed("w2"))
    assert harness.step(failed("w3")) != []
    assert harness.controller.run_state.why_stop == (
        "w3, which replaces w1, failed for the third time within an hour, more often than "
        "elastic.max_worker_errors"
    )


def test_errors_of_an_hour_ago_do_not_count():
    harness = ControllerHarness((1, 2), elastic={"max_worker_errors": 1}).start("w0")
    for number in range(1, 5):
        assert harness.step(failed(f"w{number}"))[-1] == ("request_worker", f"w{number + 1}")
        harness.now += 3601.0
        harness.step(report("w0", number))


def test_errors_of_two_workers_are_counted_apart():
    harness = ControllerHarness((1, 3), elastic={"max_worker_errors": 1}).start("w0")
    assert ("request_worker", "w3") in harness.step(failed("w1"))
    assert ("request_worker", "w4") in harness.step(failed("w2"))


def test_no_further_worker_is_started_on_a_node_whose_workers_fail_again_and_again():
    harness = ControllerHarness((1, 4), elastic={"max_worker_errors": 2}).start("w0")
    calls = []
    for number, node in ((1, "n1"), (2, "n1"), (3, "n2"), (4, "n1")):
        calls += harness.step(WorkerReady(f"w{number}", node))
        calls += harness.step(failed(f"w{number}"))
    assert [call for call in calls if call[0] == "avoid"] == [("avoid", "n1")]


def test_the_policy_replace_replaces_a_worker_after_any_error():
    harness = ControllerHarness((1, 2), elastic={"on_worker_error": "replace"}).start("w0")
    assert ("request_worker", "w2") in harness.step(Failed("w1", USER_ERROR))
    assert any(
        "w1 was lost: ZeroDivisionError: my own mistake" in line for line in harness.log_lines
    )


def test_an_unknown_policy_is_refused_with_one_sentence():
    with pytest.raises(ConfigError, match=r"elastic.on_worker_error has no 'repalce'; .*"):
        ElasticConfig(on_worker_error="repalce")


# errors that stop the run


def error_of_stopped_run(harness, *ends):
    """Step a run that stops on an error to its end; return the error that it raises."""
    harness.step(*ends)
    for _ in range(6):
        if not harness.is_sync and is_changing(harness.controller.run_state):
            harness.step(Changed())
        harness.now += 1.0
        calls = harness.step(Published((0, 7)))
        if any(call[0] == "collect" for call in calls):
            harness.step(report("w0", 7), report("w1", 7))
            with pytest.raises((ZeroDivisionError, raydl.RaydlError)) as error:
                harness.step(collected(7, "w0", "w1"))
            return error.value
    raise AssertionError(f"it does not end: {harness.state}, {harness.log_lines}")


@BOTH
@pytest.mark.parametrize("is_stop", [False, True])
def test_a_users_own_error_stops_the_run_after_a_checkpoint_and_is_raised_then(is_sync, is_stop):
    """With the policy stop, any error does the same."""
    elastic = {"on_worker_error": "stop"} if is_stop else {}
    error = MACHINE_ERROR if is_stop else USER_ERROR
    harness = ControllerHarness(is_sync=is_sync, elastic=elastic).start()
    calls = harness.step(Failed("w1", error))
    assert ("request_worker", "w2") not in calls
    outcome = "broken" if is_sync else "stopped"
    ends = harness.end(outcome, 7, "w0", generation=1)
    ends += [] if is_stop else harness.end("broken", 7, "w1", generation=1)
    assert error_of_stopped_run(harness, *ends) is error
    assert len(harness.recorder.checkpoints) == 1
    assert any("stopping after this round, with a checkpoint" in line for line in harness.log_lines)


@BOTH
def test_a_run_of_one_worker_stops_with_a_checkpoint_of_its_center(is_sync):
    harness = ControllerHarness(1, is_sync=is_sync).start("w0")
    harness.step(Failed("w0", USER_ERROR))
    assert error_of_stopped_run(harness, *harness.end("broken", 7, "w0")) is USER_ERROR
    assert len(harness.recorder.checkpoints) == 1


def test_the_center_is_polled_once_more_before_the_last_checkpoint():
    """The newest snapshot may be an epoch old; the center makes one as the last worker leaves."""
    harness = ControllerHarness(1, is_sync=False).start("w0")
    harness.step(Failed("w0", USER_ERROR), *harness.end("broken", 7, "w0"))
    harness.step()
    assert harness.worker_group.formed[-1] == Membership(2, ())
    assert harness.step(Changed(), Published((0,))) == []
    calls = [*harness.step(Published((0, 7))), *harness.steps(3)]
    assert ("collect", 7, ()) in calls


@BOTH
def test_an_error_before_the_first_round_is_raised_at_once(is_sync):
    harness = ControllerHarness(is_sync=is_sync)
    with pytest.raises(ZeroDivisionError):
        harness.step(Failed("w0", USER_ERROR))


@BOTH
def test_the_same_mistake_in_all_workers_leaves_a_checkpoint_too(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(Failed("w1", USER_ERROR), Failed("w0", ZeroDivisionError("in another process")))
    ends = harness.end("broken", 7, "w0", "w1", generation=1)
    assert error_of_stopped_run(harness, *ends) is USER_ERROR
    assert len(harness.recorder.checkpoints) == 1


@BOTH
def test_a_run_whose_last_checkpoint_cannot_be_collected_raises_the_first_error(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(Failed("w1", USER_ERROR))
    with pytest.raises(ZeroDivisionError):
        harness.step(Failed("w1", ValueError("a state that no file holds")))


@BOTH
def test_an_error_of_the_evaluator_stops_the_run_after_a_checkpoint_too(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(Failed("evaluator", USER_ERROR))
    assert harness.state is State.TRAINING
    assert error_of_stopped_run(harness, *harness.end("stopped", 7, "w0", "w1")) is USER_ERROR


def test_an_error_of_the_center_is_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        ControllerHarness(is_sync=False).start().step(Failed("center", USER_ERROR))


def test_a_worker_that_raised_and_dies_before_it_reports_its_round_delays_nothing():
    harness = ControllerHarness().start()
    harness.step(Failed("w1", USER_ERROR), Lost("w1", "the actor died"))
    assert error_of_stopped_run(harness, *harness.end("broken", 7, "w0")) is USER_ERROR


# replicas that diverge


def diverged(harness, worker_id, round=3):
    error = NonFiniteLossError(worker_id, 57, math.nan)
    generation = harness.worker_group.formed[-1].generation
    return RunEnded(worker_id, Outcome.BROKEN, round, generation, str(error), error=error)


def step_until_reformed(harness, *others):
    """Step until all workers have joined again after a rollback."""
    for _ in range(6):
        calls = harness.step(*others, Published((0, 3)), *([] if harness.is_sync else [Changed()]))
        others = ()
        if any(call[0] in ("form", "change") and "w1" in call[2] for call in calls):
            return
    raise AssertionError(f"w1 does not come back: {harness.log_lines}")


@BOTH
def test_a_replica_that_diverges_is_rolled_back_three_times_in_an_epoch(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    for number in (1, 2, 3):
        harness.step(diverged(harness, "w1"))
        assert harness.log_lines.count(
            f"the loss became nan at local step 57 of worker w1; lower optimizer.lr, or look at "
            f"the data of that step; w1 is rolled back to the center (rollback {number} of 3 "
            f"in this epoch)"
        ), harness.log_lines
        step_until_reformed(harness, *(harness.end("broken", 3, "w0") if is_sync else ()))
        if not is_sync:
            harness.step(Changed())
    harness.step(diverged(harness, "w1", 7))
    assert harness.controller.run_state.why_stop == (
        "w1 diverged for the 4th time in this epoch, more often than elastic.max_rollbacks"
    )
    outcome = "broken" if is_sync else "stopped"
    end = harness.end(outcome, 7, "w0", generation=None if is_sync else 1)
    assert isinstance(error_of_stopped_run(harness, *end), NonFiniteLossError)


def test_rollbacks_do_not_count_as_losses():
    harness = ControllerHarness(max_restarts=1, elastic={"max_rollbacks": 9}).start()
    for _ in range(5):
        harness.step(diverged(harness, "w1"), *harness.end("broken", 3, "w0"))
        step_until_reformed(harness)


def test_each_epoch_counts_its_rollbacks_from_zero():
    harness = ControllerHarness(elastic={"max_rollbacks": 1}).start()
    for epoch in range(4):
        harness.step(report("w0", 3 + epoch, epoch=float(epoch)))
        harness.step(diverged(harness, "w1"), *harness.end("broken", 3, "w0"))
        step_until_reformed(harness)


def test_an_epoch_that_is_trained_again_after_a_rollback_has_no_budget_of_its_own():
    """The first batches of an epoch diverge, and the center's newest good copy is before them."""
    harness = ControllerHarness().start()
    for number in range(6):
        harness.step(report("w0", 3 + number, epoch=4.0 + number % 2))
        harness.step(diverged(harness, "w1"), *harness.end("broken", 3, "w0"))
        if harness.controller.run_state.why_stop:
            break
        step_until_reformed(harness)
    assert harness.controller.run_state.why_stop == (
        "w1 diverged for the 4th time in this epoch, more often than elastic.max_rollbacks"
    )


# whole runs in this process


class FailingModel(torch.nn.Module):
    """A linear model that fails in chosen calls of its training."""

    def __init__(self, image_shape, num_classes, at, what):
        super().__init__()
        self.inner = linear(image_shape, num_classes)
        self.calls, self.at, self.what = 0, at, what

    def forward(self, images):
        self.calls += self.training
        if self.training and self.calls in self.at:
            return self.what(self.inner(images))
        return self.inner(images)


def raises(logits):
    raise ZeroDivisionError("my own mistake")


def make_trainer(folder, what, at, *, method="sync-easgd", resume=False, **elastic):
    return raydl.Trainer(
        raydl.Classification(lambda shape, classes: FailingModel(shape, classes, at, what)),
        "digits",
        method=raydl.MethodConfig(name=method, period=4),
        training=raydl.TrainingConfig(epochs=3),
        scaling=raydl.ScalingConfig(num_workers=0),
        elastic=ElasticConfig(**elastic),
        run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
    )


METHODS = ["sync-easgd", "sync-sgd", "diloco", "async-easgd", "async-sgd"]


@pytest.mark.parametrize("method", METHODS)
def test_an_error_in_a_step_leaves_a_checkpoint_to_resume_from(tmp_path, method):
    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError, match="my own mistake") as error:
        make_trainer(folder, raises, {60}, method=method).fit()
    assert any(entry.name == "raises" for entry in error.traceback), (
        "the traceback lacks the user's line"
    )
    store = CheckpointStore(Storage(str(folder)))
    kept = store.read()[0].progress.num_samples
    # The steps before it, but for those of the round that was under way; 23 steps are an epoch.
    assert 55 <= kept * 23 / 1438 <= 59.5
    result = make_trainer(folder, raises, {}, method=method, resume=True).fit()
    assert result.metrics["samples"] == 3 * 1438


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_nan_once_only_resets_one_replica_to_the_center(tmp_path, method):
    folder = tmp_path / "run"
    result = make_trainer(folder, lambda logits: logits * math.nan, {50}, method=method).fit()
    assert result.metrics["samples"] == 3 * 1438
    center = load_file(folder / "center.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in center.values())
    events = json.loads((folder / "status.json").read_text())["events"]
    assert sum("w0 is rolled back to the center (rollback 1 of 3" in line for line in events) == 1
    assert result.metrics["center_accuracy"] > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_stays_nan_ends_the_run_with_a_finite_checkpoint(tmp_path, method):
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteLossError, match=r"of worker w0") as error:
        make_trainer(folder, lambda logits: logits * math.nan, range(50, 999), method=method).fit()
    assert error.value.exit_status == 1
    checkpoint = CheckpointStore(Storage(str(folder))).read()[0]
    for state in [checkpoint.center, checkpoint.workers["w0"].load()["replica"]]:
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(bool(torch.isfinite(t).all()) for t in tensors)
    events = json.loads((folder / "status.json").read_text())["events"]
    why = "w0 diverged for the 4th time in this epoch, more often than elastic.max_rollbacks"
    assert sum(why in line for line in events) == 1


class DivergingRule(Outer):
    """A mean of progress that makes one value of the center infinite, a given number of times."""

    period = 4
    num_left = 0
    round = 0

    def merge_(self, center, mail, state, now):
        super().merge_(center, mail, state, now)
        if center.numel() < 100:  # the trial before the run
            return
        DivergingRule.round += 1
        if DivergingRule.round > 20 and DivergingRule.num_left:
            DivergingRule.num_left -= 1
            center[7] = math.inf


class AsyncDivergingRule(DivergingRule):
    strategy = "async"


def train_with_diverging_center(folder, count, rule=DivergingRule):
    DivergingRule.num_left, DivergingRule.round = count, 0
    return raydl.Trainer(
        "mlp",
        "digits",
        method=rule(),
        training=raydl.TrainingConfig(epochs=6),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(folder), progress="plain"),
    ).fit()


@pytest.mark.parametrize("rule", [DivergingRule, AsyncDivergingRule])
def test_a_center_that_diverges_goes_back_to_the_newest_good_one(tmp_path, capsys, rule):
    result = train_with_diverging_center(tmp_path / "run", 1, rule)
    output = capsys.readouterr().out
    count = "rollback 1 of 3 in this epoch"
    assert f"all workers are rolled back to the newest good center ({count})" in output
    assert result.metrics["samples"] == 6 * 1438
    center = load_file(tmp_path / "run" / "center.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in center.values())


def test_a_center_that_stays_bad_ends_the_run_and_is_not_kept(tmp_path):
    with pytest.raises(NonFiniteCenterError, match=r"the center of round \d+ has values"):
        train_with_diverging_center(tmp_path / "run", 99)
    center = CheckpointStore(Storage(str(tmp_path / "run"))).read()[0].center
    assert all(torch.isfinite(tensor).all() for tensor in center.values())


def test_by_messages_a_center_that_stays_bad_ends_the_run(tmp_path):
    with pytest.raises(NonFiniteCenterError, match=r"the center of round \d+ has values"):
        train_with_diverging_center(tmp_path / "run", 99, AsyncDivergingRule)
    events = json.loads((tmp_path / "run/status.json").read_text())["events"]
    assert sum("rollback 3 of 3" in line for line in events) == 1


def ends_with_bad_center(harness, *worker_ids):
    """Return the ends of workers that received a center that is not finite."""
    error, generation = NonFiniteCenterError(7), harness.worker_group.formed[-1].generation
    return [RunEnded(w, Outcome.BROKEN, 3, generation, str(error), error=error) for w in worker_ids]


def test_in_rounds_a_center_that_diverges_is_one_rollback_for_all_workers_that_see_it():
    harness = ControllerHarness(elastic={"max_rollbacks": 1}).start()
    for worker_id in ("w0", "w1"):
        error = NonFiniteCenterError(7)
        harness.step(RunEnded(worker_id, Outcome.BROKEN, -1, 1, str(error), error=error))
    assert harness.controller.run_state.halt is None
    assert (
        sum(
            "all workers are rolled back to the newest good center" in line
            for line in harness.log_lines
        )
        == 1
    )


def test_a_diverged_center_counts_once_and_the_next_one_counts_again():
    harness = ControllerHarness(elastic={"max_rollbacks": 1}).start()
    harness.step(*ends_with_bad_center(harness, "w0", "w1"))
    step_until_reformed(harness)
    harness.step(*ends_with_bad_center(harness, "w0", "w1"))
    assert harness.controller.run_state.why_stop == (
        "the center diverged for the second time in this epoch, more often than "
        "elastic.max_rollbacks"
    )


def test_a_diverged_replica_does_not_hide_that_the_center_diverged_too():
    harness = ControllerHarness().start()
    harness.step(diverged(harness, "w1"), *ends_with_bad_center(harness, "w0"))
    rollbacks = [line for line in harness.log_lines if "(rollback " in line]
    assert [line.split("; ")[-1] for line in rollbacks] == [
        "w1 is rolled back to the center (rollback 1 of 3 in this epoch)",
        "all workers are rolled back to the newest good center (rollback 2 of 3 in this epoch)",
    ]


@pytest.mark.parametrize("what", ["w1", "the center"])
def test_with_the_policy_stop_the_first_divergence_stops_the_run(what):
    harness = ControllerHarness(elastic={"on_worker_error": "stop"}).start()
    harness.step(
        diverged(harness, "w1") if what == "w1" else ends_with_bad_center(harness, "w1")[0]
    )
    assert harness.controller.run_state.why_stop == f"{what} diverged"


@pytest.mark.parametrize("name", ["center", "shard 1"])
def test_an_error_elsewhere_while_the_run_stops_raises_the_first_one(name):
    harness = ControllerHarness().start()
    harness.step(Failed("w1", USER_ERROR))
    with pytest.raises(ZeroDivisionError):
        harness.step(Failed(name, ValueError()))


def test_a_run_that_stops_writes_its_checkpoint_although_the_evaluator_fails():
    harness = ControllerHarness().start()
    harness.step(Failed("w1", USER_ERROR), Failed("evaluator", ValueError()))
    assert error_of_stopped_run(harness, *harness.end("broken", 7, "w0", "w1")) is USER_ERROR


@pytest.mark.parametrize("has_copy", [True, False])
def test_by_messages_a_center_that_diverges_restarts_from_a_good_snapshot(has_copy):
    harness = ControllerHarness(is_sync=False).start()
    harness.step(Failed("center", NonFiniteCenterError(40)))
    assert harness.state is State.RECOVERING
    harness.step(*harness.end("broken", 39 if has_copy else -1, "w0", "w1"))
    calls = [*harness.worker_group.calls, *harness.steps(2)]
    assert ("rebuild_center", "w0" if has_copy else None) in calls


def ends_with_bad_copies(harness, *worker_ids):
    """Return the ends of workers whose copies of the center are not finite."""
    error, generation = NonFiniteCenterError(40), harness.worker_group.formed[-1].generation
    return [
        RunEnded(w, Outcome.BROKEN, -1, generation, str(error), error=error, has_bad_copy=True)
        for w in worker_ids
    ]


@pytest.mark.parametrize("has_copy", [True, False])
def test_by_messages_a_bad_center_that_a_worker_notices_restarts_as_well(has_copy):
    harness = ControllerHarness(is_sync=False, elastic={"max_rollbacks": 1}).start()
    harness.step(*ends_with_bad_copies(harness, "w1"))
    assert harness.state is State.RECOVERING
    harness.step(
        *(harness.end("broken", 39, "w0") if has_copy else ends_with_bad_copies(harness, "w0"))
    )
    calls = [*harness.worker_group.calls, *harness.steps(2)]
    assert ("rebuild_center", "w0" if has_copy else None) in calls
    calls = harness.step(Published((39,))) + harness.steps(1)
    assert ("form", 2, ("w0", "w1"), 39) in calls
    good = "all workers are rolled back to the newest good center (rollback 1 of 1 in this epoch)"
    assert sum(good in line for line in harness.log_lines) == 1


def test_by_messages_a_bad_center_at_the_limit_of_rollbacks_is_not_restarted():
    harness = ControllerHarness(is_sync=False, elastic={"max_rollbacks": 0}).start()
    calls = harness.step(*ends_with_bad_copies(harness, "w1")) + harness.steps(2)
    assert harness.controller.run_state.why_stop.startswith(
        "the center diverged for the first time"
    )
    assert not [call for call in calls if call[0] == "rebuild_center"]


@BOTH
def test_an_earlier_copy_of_a_worker_whose_copy_is_bad_does_not_count(is_sync):
    """The worker's process has only the newest copy, which would become the center."""
    harness = ControllerHarness(is_sync=is_sync).start()
    harness.step(Lost("center", DIED))
    harness.step(*harness.end("broken", 30, "w0", "w1"))
    harness.step(Published((30,)))
    harness.steps(2)
    assert harness.worker_group.formed[-1].generation == 2
    if not is_sync:
        harness.step(Changed())
    calls = harness.step(Lost("center", DIED)) + harness.step(
        *ends_with_bad_copies(harness, "w0", "w1")
    )
    calls += harness.steps(2)
    assert [call for call in calls if call[0] == "rebuild_center"] == [("rebuild_center", None)]
    assert not [call for call in calls if call[0] == "publish"]


def test_a_diverged_replica_keeps_no_values_that_are_not_finite(tmp_path):
    """Momentum and gradients from before the rollback would spoil the next step."""
    seen = []

    class Watched(FailingModel):
        def forward(self, images):
            if self.training and self.calls == 51:
                seen.append([p.detach().clone() for p in self.parameters()])
            return super().forward(images)

    trainer = raydl.Trainer(
        raydl.Classification(lambda s, c: Watched(s, c, {50}, lambda x: x * math.inf)),
        "digits",
        method=raydl.MethodConfig(name="sync-easgd", period=4),
        training=raydl.TrainingConfig(steps=60),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    trainer.fit()
    assert seen
    assert all(np.isfinite(p.numpy()).all() for p in seen[0])


# on Ray

SCRIPT = """
import collections, itertools, os, sys, time, torch, raydl

WHAT, FOLDER, MARK = sys.argv[1:4]

def hold(seconds):
    # One call in C that does not release the interpreter lock: all other threads stand still.
    until = time.perf_counter() + seconds
    clock = iter(time.perf_counter, None)
    collections.deque(itertools.takewhile(until.__gt__, clock), maxlen=0)

class Model(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(64, num_classes)
        self.calls = 0

    def forward(self, images):
        self.calls += self.training
        if self.training and self.calls > 20:
            self.fail()
        return self.linear(images.flatten(1)) * (float("nan") if self.is_bad() else 1.0)

    def is_bad(self):
        return WHAT == "passing" and self.training and self.calls == 30 and is_first("nan")

    def fail(self):
        if WHAT == "passing" and is_first("disk"):
            raise OSError(5, "Input/output error")
        if WHAT == "passing" and self.calls == 60 and is_first("hold"):
            hold(10.0)
        if WHAT == "own":
            raise ZeroDivisionError("my own mistake")
        if WHAT == "memory":
            torch.empty(10**15)

def is_first(what):
    try:  # only one worker, once
        os.close(os.open(f"{MARK}-{what}", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def model(image_shape, num_classes):
    return Model(num_classes)

try:
    raydl.Trainer(
        raydl.Classification(model), "digits",
        method=raydl.MethodConfig(name=sys.argv[4], period=4),
        training=raydl.TrainingConfig(epochs=20),
        elastic=raydl.ElasticConfig(
            max_worker_errors=2, lease_s=4.0 if WHAT == "passing" else 10.0
        ),
        run=raydl.RunConfig(run_dir=FOLDER, progress="plain"),
    ).fit()
except raydl.RaydlError as error:
    print("error:", error)
    sys.exit(error.exit_status)
"""


@pytest.fixture
def run_script(four_cpus, tmp_path):
    """Return a function that runs the script on a cluster with a kind of failure and a method."""
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    places = [str(tmp_path / "run"), str(tmp_path / "mark")]

    def run_script(what, method):
        environment = {**os.environ, **cluster_environment(four_cpus.address)}
        words = [str(script), what, *places, method]
        return run_program(words, environment=environment, timeout=150)

    return run_script


@pytest.mark.cluster
@pytest.mark.slow
def test_a_run_survives_a_flaky_disk_one_bad_step_and_a_held_interpreter_lock(run_script, tmp_path):
    """The lock is held for longer than the lease; the run waits for that worker."""
    done = run_script("passing", "async-easgd")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["samples"] == 20 * 1438
    for pattern in (
        r"(w\d) was lost: the machine of \1 failed: OSError: \[Errno 5\] Input/output error",
        r"of worker (w\d); lower .*; \1 is rolled back to the center \(rollback 1 of 3",
        r"(w\d) has not answered for .* but is busy: a long call may hold the interpreter lock",
    ):
        assert re.search(pattern, done.stdout), done.stdout
    assert done.stdout.count(" was lost: ") == 1


@pytest.mark.cluster
def test_a_run_that_lacks_memory_ends_with_a_checkpoint_and_status_75(run_script, tmp_path):
    done = run_script("memory", "sync-easgd")
    assert done.returncode == 75, done.stdout + done.stderr
    assert re.search(r"error: the machine of w\d failed: RuntimeError: .*alloc", done.stdout)
    assert re.search(r"w\d, which replaces w\d, failed for the third time within", done.stdout)
    assert CheckpointStore(Storage(str(tmp_path / "run"))).names()


@pytest.mark.cluster
def test_an_error_of_the_users_own_leaves_a_checkpoint_and_its_own_traceback(run_script, tmp_path):
    done = run_script("own", "sync-easgd")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ZeroDivisionError: my own mistake" in done.stderr
    assert 'own.py", line' in done.stderr
    assert re.search(
        r"w\d raised ZeroDivisionError: my own mistake: stopping after this round", done.stdout
    )
    kept = CheckpointStore(Storage(str(tmp_path / "run"))).read()[0]
    assert kept.progress.num_samples >= 16 * 32


def test_a_score_that_was_lost_for_lack_of_memory_is_requested_again():
    harness = ControllerHarness().start().after(Published((0, 4)))
    assert harness.step(GaveUp("evaluation", "the machine of evaluator failed")) == [
        ("evaluate", 4)
    ]
