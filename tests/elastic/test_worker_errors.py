"""An error in one worker: it is replaced, or the run stops after a checkpoint."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from clusters import address_of
from ensembles import linear
from safetensors.torch import load_file
from stages import BOTH, DIED, Stage, collected, report

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.config import ElasticConfig
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.rules import Outer
from raydl.core.worker_group import Changed, Failed, GaveUp, Lost, Published, RunEnded, WorkerReady
from raydl.elastic.run_state import State
from raydl.errors import ConfigError, InfrastructureError, NonFiniteCenterError, NonFiniteLossError
from raydl.storage import Storage

FAILED = InfrastructureError("w1", "OSError: [Errno 5] Input/output error")
OWN = ZeroDivisionError("my own mistake")


def failed(worker_id):
    return Failed(worker_id, InfrastructureError(worker_id, "MemoryError"))


# what may be replaced


@BOTH
def test_a_worker_whose_machine_failed_is_ended_and_replaced(is_sync):
    stage = Stage((1, 2), is_sync=is_sync).start()
    told = stage.step(Failed("w1", FAILED))
    assert ("end", "w1") in told
    assert ("request_worker", "w2") in told
    assert any("w1 was lost: the machine of w1 failed: OSError" in said for said in stage.said)
    assert stage.state is not State.DONE


@BOTH
def test_a_newcomer_whose_machine_fails_as_it_starts_is_replaced_too(is_sync):
    stage = Stage((1, 2), is_sync=is_sync).start("w0")
    assert stage.step(failed("w1")) == [("end", "w1"), ("request_worker", "w2")]


@BOTH
def test_the_budget_of_a_worker_passes_to_its_replacements(is_sync):
    stage = Stage((1, 2), is_sync=is_sync, elastic={"max_worker_errors": 2}).start("w0")
    stage.step(failed("w1"))
    stage.step(failed("w2"))
    assert stage.step(failed("w3")) != []
    assert stage.controller._why_stop == (
        "w3, which replaces w1, failed for the third time within an hour, more often than "
        "elastic.max_worker_errors"
    )


def test_errors_of_an_hour_ago_do_not_count():
    stage = Stage((1, 2), elastic={"max_worker_errors": 1}).start("w0")
    for number in range(1, 5):
        assert stage.step(failed(f"w{number}"))[-1] == ("request_worker", f"w{number + 1}")
        stage.now += 3601.0
        stage.step(report("w0", number))


def test_errors_of_two_workers_are_counted_apart():
    stage = Stage((1, 3), elastic={"max_worker_errors": 1}).start("w0")
    assert ("request_worker", "w3") in stage.step(failed("w1"))
    assert ("request_worker", "w4") in stage.step(failed("w2"))


def test_no_further_worker_is_started_on_a_node_whose_workers_fail_again_and_again():
    stage = Stage((1, 4), elastic={"max_worker_errors": 2}).start("w0")
    told = []
    for number, node in ((1, "n1"), (2, "n1"), (3, "n2"), (4, "n1")):
        told += stage.step(WorkerReady(f"w{number}", node))
        told += stage.step(failed(f"w{number}"))
    assert [t for t in told if t[0] == "avoid"] == [("avoid", "n1")]


def test_replace_replaces_a_worker_whatever_was_raised():
    stage = Stage((1, 2), elastic={"on_worker_error": "replace"}).start("w0")
    assert ("request_worker", "w2") in stage.step(Failed("w1", OWN))
    assert any("w1 was lost: ZeroDivisionError: my own mistake" in said for said in stage.said)


def test_an_unknown_policy_is_one_sentence():
    with pytest.raises(ConfigError, match=r"elastic.on_worker_error has no 'repalce'; .*"):
        ElasticConfig(on_worker_error="repalce")


# what stops the run


def stop_of(stage, *ends):
    """Step a run that stops on an error to its end; return what was raised there."""
    stage.step(*ends)
    for _ in range(6):
        if not stage.is_sync and stage.controller._run.is_changing:
            stage.step(Changed())
        stage.now += 1.0
        told = stage.step(Published((0, 7)))
        if any(t[0] == "collect" for t in told):
            stage.step(report("w0", 7), report("w1", 7))
            with pytest.raises((ZeroDivisionError, raydl.RaydlError)) as error:
                stage.step(collected(7, "w0", "w1"))
            return error.value
    raise AssertionError(f"it does not end: {stage.state}, {stage.said}")


@BOTH
@pytest.mark.parametrize("is_stop", [False, True])
def test_a_users_own_error_stops_the_run_after_a_checkpoint_and_is_raised_then(is_sync, is_stop):
    """As any error does where the policy is stop."""
    elastic = {"on_worker_error": "stop"} if is_stop else {}
    error = FAILED if is_stop else OWN
    stage = Stage(is_sync=is_sync, elastic=elastic).start()
    told = stage.step(Failed("w1", error))
    assert ("request_worker", "w2") not in told
    outcome = "broken" if is_sync else "stopped"
    ends = stage.end(outcome, 7, "w0", generation=1)
    ends += [] if is_stop else stage.end("broken", 7, "w1", generation=1)
    assert stop_of(stage, *ends) is error
    assert len(stage.recorder.checkpoints) == 1
    assert any("stopping after this round, with a checkpoint" in said for said in stage.said)


@BOTH
def test_a_run_of_one_worker_stops_with_a_checkpoint_of_its_center(is_sync):
    stage = Stage(1, is_sync=is_sync).start("w0")
    stage.step(Failed("w0", OWN))
    assert stop_of(stage, *stage.end("broken", 7, "w0")) is OWN
    assert len(stage.recorder.checkpoints) == 1


def test_the_center_is_asked_once_more_before_the_last_checkpoint():
    """Its newest snapshot may be as old as an epoch; it makes one as the last worker goes."""
    stage = Stage(1, is_sync=False).start("w0")
    stage.step(Failed("w0", OWN), *stage.end("broken", 7, "w0"))
    assert ("change", 2, ()) in [
        *stage.worker_group.told,
        *stage.steps(1),
    ] or stage.worker_group.formed[-1] == (Membership(2, ()))
    assert stage.step(Changed(), Published((0,))) == []
    told = [*stage.step(Published((0, 7))), *stage.steps(3)]
    assert ("collect", 7, ()) in told


@BOTH
def test_an_error_before_the_first_round_is_raised_at_once(is_sync):
    stage = Stage(is_sync=is_sync)
    with pytest.raises(ZeroDivisionError):
        stage.step(Failed("w0", OWN))


@BOTH
def test_the_same_mistake_in_all_workers_leaves_a_checkpoint_too(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.step(Failed("w1", OWN), Failed("w0", ZeroDivisionError("in another process")))
    ends = stage.end("broken", 7, "w0", "w1", generation=1)
    assert stop_of(stage, *ends) is OWN
    assert len(stage.recorder.checkpoints) == 1


@BOTH
def test_a_last_checkpoint_that_can_not_be_gathered_raises_the_first_error(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.step(Failed("w1", OWN))
    with pytest.raises(ZeroDivisionError):
        stage.step(Failed("w1", ValueError("a state that no file holds")))


@BOTH
def test_an_error_of_the_evaluator_stops_the_run_after_a_checkpoint_too(is_sync):
    stage = Stage(is_sync=is_sync).start()
    stage.step(Failed("evaluator", OWN))
    assert stage.state is State.TRAINING
    assert stop_of(stage, *stage.end("stopped", 7, "w0", "w1")) is OWN


def test_an_error_of_the_center_is_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        Stage(is_sync=False).start().step(Failed("center", OWN))


def test_a_worker_that_raised_and_dies_before_it_tells_how_far_it_was_holds_nothing_up():
    stage = Stage().start()
    stage.step(Failed("w1", OWN), Lost("w1", "the actor died"))
    assert stop_of(stage, *stage.end("broken", 7, "w0")) is OWN


# replicas that diverge


def diverged(stage, worker_id, round=3):
    error = NonFiniteLossError(worker_id, 57, math.nan)
    generation = stage.worker_group.formed[-1].generation
    return RunEnded(worker_id, Outcome.BROKEN, round, generation, str(error), error=error)


def form_again(stage, *others):
    """Let all join again after a rollback."""
    for _ in range(6):
        told = stage.step(*others, Published((0, 3)), *([] if stage.is_sync else [Changed()]))
        others = ()
        if any(t[0] in ("form", "change") and "w1" in t[2] for t in told):
            return
    raise AssertionError(f"w1 does not come back: {stage.said}")


@BOTH
def test_a_replica_that_diverges_is_rolled_back_three_times_in_an_epoch(is_sync):
    stage = Stage(is_sync=is_sync).start()
    for number in (1, 2, 3):
        stage.step(diverged(stage, "w1"))
        assert stage.said.count(
            f"the loss became nan at local step 57 of worker w1; lower optimizer.lr, or look at "
            f"the data of that step; w1 is rolled back to the center (rollback {number} of 3 "
            f"in this epoch)"
        ), stage.said
        form_again(stage, *(stage.end("broken", 3, "w0") if is_sync else ()))
        if not is_sync:
            stage.step(Changed())
    stage.step(diverged(stage, "w1", 7))
    assert stage.controller._why_stop == (
        "w1 diverged for the 4th time in this epoch, more often than elastic.max_rollbacks"
    )
    outcome = "broken" if is_sync else "stopped"
    end = stage.end(outcome, 7, "w0", generation=None if is_sync else 1)
    assert isinstance(stop_of(stage, *end), NonFiniteLossError)


def test_rollbacks_do_not_count_as_losses():
    stage = Stage(max_restarts=1, elastic={"max_rollbacks": 9}).start()
    for _ in range(5):
        stage.step(diverged(stage, "w1"), *stage.end("broken", 3, "w0"))
        form_again(stage)


def test_a_new_epoch_begins_a_new_count():
    stage = Stage(elastic={"max_rollbacks": 1}).start()
    for epoch in range(4):
        stage.step(report("w0", 3 + epoch, epoch=float(epoch)))
        stage.step(diverged(stage, "w1"), *stage.end("broken", 3, "w0"))
        form_again(stage)


# whole runs in this process


class Fails(torch.nn.Module):
    """A linear model that does something bad in chosen calls of its training."""

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


def run(folder, what, at, *, method="sync-easgd", resume=False, **elastic):
    return raydl.Trainer(
        raydl.Classification(lambda shape, classes: Fails(shape, classes, at, what)),
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
        run(folder, raises, {60}, method=method).fit()
    assert any(entry.name == "raises" for entry in error.traceback), "not the user's own line"
    store = CheckpointStore(Storage(str(folder)))
    kept = store.read()[0].progress.num_samples
    # The steps before it, but for those of the round that was under way; 23 steps are an epoch.
    assert 55 <= kept * 23 / 1438 <= 59.5
    result = run(folder, raises, {}, method=method, resume=True).fit()
    assert result.metrics["samples"] == 3 * 1438


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_nan_once_costs_one_replica_its_memory_and_nothing_else(tmp_path, method):
    folder = tmp_path / "run"
    result = run(folder, lambda logits: logits * math.nan, {50}, method=method).fit()
    assert result.metrics["samples"] == 3 * 1438
    center = load_file(folder / "center.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in center.values())
    said = json.loads((folder / "status.json").read_text())["events"]
    assert sum("w0 is rolled back to the center (rollback 1 of 3" in line for line in said) == 1
    assert result.metrics["center_accuracy"] > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_stays_nan_ends_the_run_with_a_finite_checkpoint(tmp_path, method):
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteLossError, match=r"of worker w0") as error:
        run(folder, lambda logits: logits * math.nan, range(50, 999), method=method).fit()
    assert error.value.exit_status == 1
    checkpoint = CheckpointStore(Storage(str(folder))).read()[0]
    for state in [checkpoint.center, checkpoint.workers["w0"].load()["replica"]]:
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(bool(torch.isfinite(t).all()) for t in tensors)
    said = json.loads((folder / "status.json").read_text())["events"]
    why = "w0 diverged for the 4th time in this epoch, more often than elastic.max_rollbacks"
    assert sum(why in line for line in said) == 1


class Leaps(Outer):
    """A mean of progress that once leads the center out of all bounds."""

    period = 4
    num_left = 0
    round = 0

    def update_center_(self, center, total, tally, optimizer):
        super().update_center_(center, total, tally, optimizer)
        if center.numel() < 100:  # the trial before the run
            return
        Leaps.round += 1
        if Leaps.round > 20 and Leaps.num_left:
            Leaps.num_left -= 1
            center[7] = math.inf


class AsyncLeaps(Leaps):
    strategy = "async"


def train_with_leaps(folder, count, rule=Leaps):
    Leaps.num_left, Leaps.round = count, 0
    return raydl.Trainer(
        "mlp",
        "digits",
        method=rule(),
        training=raydl.TrainingConfig(epochs=6),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(folder), progress="plain"),
    ).fit()


@pytest.mark.parametrize("rule", [Leaps, AsyncLeaps])
def test_a_center_that_diverges_goes_back_to_the_newest_good_one(tmp_path, capsys, rule):
    result = train_with_leaps(tmp_path / "run", 1, rule)
    said = capsys.readouterr().out
    count = "rollback 1 of 3 in this epoch"
    assert f"all workers are rolled back to the newest good center ({count})" in said
    assert result.metrics["samples"] == 6 * 1438
    center = load_file(tmp_path / "run" / "center.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in center.values())


def test_a_center_that_stays_bad_ends_the_run_and_is_not_kept(tmp_path):
    with pytest.raises(NonFiniteCenterError, match=r"the center of round \d+ has values"):
        train_with_leaps(tmp_path / "run", 99)
    center = CheckpointStore(Storage(str(tmp_path / "run"))).read()[0].center
    assert all(torch.isfinite(tensor).all() for tensor in center.values())


def test_by_messages_a_center_that_stays_bad_ends_the_run(tmp_path):
    with pytest.raises(NonFiniteCenterError, match=r"the center of round \d+ has values"):
        train_with_leaps(tmp_path / "run", 99, AsyncLeaps)
    said = json.loads((tmp_path / "run/status.json").read_text())["events"]
    assert sum("rollback 3 of 3" in line for line in said) == 1


def bad_center(stage, *worker_ids):
    """Return the ends of workers that were to take in a center that is not finite."""
    error, generation = NonFiniteCenterError(7), stage.worker_group.formed[-1].generation
    return [RunEnded(w, Outcome.BROKEN, 3, generation, str(error), error=error) for w in worker_ids]


def test_in_rounds_a_center_that_diverges_is_one_rollback_for_all_workers_that_see_it():
    stage = Stage(elastic={"max_rollbacks": 1}).start()
    for worker_id in ("w0", "w1"):
        error = NonFiniteCenterError(7)
        stage.step(RunEnded(worker_id, Outcome.BROKEN, -1, 1, str(error), error=error))
    assert stage.controller._failure.error is None
    assert (
        sum("all workers are rolled back to the newest good center" in said for said in stage.said)
        == 1
    )


def test_the_same_center_is_bad_news_once_but_the_next_one_again():
    stage = Stage(elastic={"max_rollbacks": 1}).start()
    stage.step(*bad_center(stage, "w0", "w1"))
    form_again(stage)
    stage.step(*bad_center(stage, "w0", "w1"))
    assert stage.controller._why_stop == (
        "the center diverged for the second time in this epoch, more often than "
        "elastic.max_rollbacks"
    )


def test_a_replica_that_diverges_with_its_center_does_not_hide_that():
    stage = Stage().start()
    stage.step(diverged(stage, "w1"), *bad_center(stage, "w0"))
    told = [said for said in stage.said if "(rollback " in said]
    assert [said.split("; ")[-1] for said in told] == [
        "w1 is rolled back to the center (rollback 1 of 3 in this epoch)",
        "all workers are rolled back to the newest good center (rollback 2 of 3 in this epoch)",
    ]


@pytest.mark.parametrize("what", ["w1", "the center"])
def test_with_the_policy_stop_the_first_divergence_stops_the_run(what):
    stage = Stage(elastic={"on_worker_error": "stop"}).start()
    stage.step(diverged(stage, "w1") if what == "w1" else bad_center(stage, "w1")[0])
    assert stage.controller._why_stop == f"{what} diverged"


@pytest.mark.parametrize("name", ["center", "w7"])
def test_an_error_elsewhere_while_the_run_stops_raises_the_first_one(name):
    stage = Stage().start()
    stage.step(Failed("w1", OWN))
    with pytest.raises(ZeroDivisionError):
        stage.step(Failed(name, ValueError()))


def test_an_evaluator_that_fails_while_the_run_stops_costs_no_checkpoint():
    stage = Stage().start()
    stage.step(Failed("w1", OWN), Failed("evaluator", ValueError()))
    assert stop_of(stage, *stage.end("broken", 7, "w0", "w1")) is OWN


@pytest.mark.parametrize("has_copy", [True, False])
def test_by_messages_a_center_that_diverges_restarts_from_a_good_snapshot(has_copy):
    stage = Stage(is_sync=False).start()
    stage.step(Failed("center", NonFiniteCenterError(40)))
    assert stage.state is State.RECOVERING
    stage.step(*stage.end("broken", 39 if has_copy else -1, "w0", "w1"))
    told = [*stage.worker_group.told, *stage.steps(2)]
    assert ("rebuild_center", "w0" if has_copy else None) in told


def pulled(stage, *worker_ids):
    """Return the ends of workers whose copies of the center are not finite."""
    error, generation = NonFiniteCenterError(40), stage.worker_group.formed[-1].generation
    return [
        RunEnded(w, Outcome.BROKEN, -1, generation, str(error), error=error, has_bad_copy=True)
        for w in worker_ids
    ]


@pytest.mark.parametrize("has_copy", [True, False])
def test_by_messages_a_bad_center_that_a_worker_notices_restarts_as_well(has_copy):
    stage = Stage(is_sync=False, elastic={"max_rollbacks": 1}).start()
    stage.step(*pulled(stage, "w1"))
    assert stage.state is State.RECOVERING
    stage.step(*(stage.end("broken", 39, "w0") if has_copy else pulled(stage, "w0")))
    told = [*stage.worker_group.told, *stage.steps(2)]
    assert ("rebuild_center", "w0" if has_copy else None) in told
    told = stage.step(Published((39,))) + stage.steps(1)
    assert ("form", 2, ("w0", "w1"), 39) in told
    good = "all workers are rolled back to the newest good center (rollback 1 of 1 in this epoch)"
    assert sum(good in said for said in stage.said) == 1


def test_by_messages_a_bad_center_at_the_limit_of_rollbacks_is_not_restarted():
    stage = Stage(is_sync=False, elastic={"max_rollbacks": 0}).start()
    told = stage.step(*pulled(stage, "w1")) + stage.steps(2)
    assert stage.controller._why_stop.startswith("the center diverged for the first time")
    assert not [call for call in told if call[0] == "rebuild_center"]


@BOTH
def test_an_earlier_copy_of_a_worker_whose_copy_is_bad_does_not_count(is_sync):
    """Its process has only the newest one, which would become the center."""
    stage = Stage(is_sync=is_sync).start()
    stage.step(Lost("center", DIED))
    stage.step(*stage.end("broken", 30, "w0", "w1"))
    stage.step(Published((30,)))
    stage.steps(2)
    assert stage.worker_group.formed[-1].generation == 2
    if not is_sync:
        stage.step(Changed())
    told = stage.step(Lost("center", DIED)) + stage.step(*pulled(stage, "w0", "w1"))
    told += stage.steps(2)
    assert [call for call in told if call[0] == "rebuild_center"] == [("rebuild_center", None)]
    assert not [call for call in told if call[0] == "publish"]


def test_a_diverged_replica_has_no_memory_that_is_not_finite(tmp_path):
    """Momentum and gradients of before would spoil the very next step."""
    seen = []

    class Watched(Fails):
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
    # One call in C, which never gives the interpreter lock back: all other threads stand still.
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
    try:  # one worker of all, once
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
    """Return a function that runs the script on a cluster: what fails, by which method."""
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    words = [str(tmp_path / "run"), str(tmp_path / "mark")]

    def run_script(what, method):
        return subprocess.run(
            [sys.executable, str(script), what, *words, method],
            env={**os.environ, **address_of(four_cpus.address)},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run_script


@pytest.mark.cluster
def test_a_flaky_disk_one_bad_step_and_a_held_interpreter_lock_cost_a_run_nothing(
    run_script, tmp_path
):
    """The lock is held for longer than the lease; that one is waited for."""
    done = run_script("passing", "async-easgd")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["samples"] == 20 * 1438
    for said in (
        r"(w\d) was lost: the machine of \1 failed: OSError: \[Errno 5\] Input/output error",
        r"of worker (w\d); lower .*; \1 is rolled back to the center \(rollback 1 of 3",
        r"(w\d) has not answered for .* but is busy: a long call may hold the interpreter lock",
    ):
        assert re.search(said, done.stdout), done.stdout
    assert done.stdout.count(" was lost: ") == 1


@pytest.mark.cluster
def test_memory_that_is_never_enough_ends_the_run_with_a_checkpoint_and_status_75(
    run_script, tmp_path
):
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


def test_a_lost_score_for_want_of_memory_is_asked_for_again():
    stage = Stage().start().after(Published((0, 4)))
    assert stage.step(GaveUp("evaluation", "the machine of evaluator failed")) == [("evaluate", 4)]
