"""Synchronous methods under churn with fragments, groups that share a replica, and resizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ensembles import tiny_images
from histories import AllProgress, History, assert_same, config, counting

from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.core.worker_group import Collected
from raydl.methods.easgd import Elastic
from raydl.storage import Storage

# a round in several fragments

FRAGMENTS = ["sync-easgd", "sync-msgd", "diloco", "streaming diloco, int8"]


@pytest.mark.parametrize("method", FRAGMENTS)
def test_a_round_that_broke_after_its_first_fragment_leaves_the_center_as_it_was(method):
    plain = {"fragments": 2}
    name, _, codec = method.partition(", ")
    name = name.removeprefix("streaming ")
    exchange = {**plain, "compression": codec} if codec else plain
    case = config(name, period=4, exchange=exchange, optimizer={"lr": 0.1, "clip_grad_norm": None})
    history = History(case, images=tiny_images(100), model=with_buffer)
    history.train("w0", "w1", rounds=2)
    before = history.snapshot
    feedback = feedback_of(history.workers["w1"])
    history.train("w0", "w1", late={"w0": (0, 3)})  # the first fragment joins in step 1
    assert history.scripts["w1"].now == (0, 3)
    after = history.snapshot
    assert after.progress.round == before.progress.round
    for part in ("weights", "buffers", "optimizer"):  # the ledger has claims of that round
        assert_same(getattr(after, part), getattr(before, part))
    assert_same(feedback_of(history.workers["w1"]), feedback)


def feedback_of(worker):
    return [tensors for *_, tensors in worker.pop_kept(-1)["feedback"]]


def with_buffer(image_shape, num_classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, num_classes)
    )


@pytest.mark.parametrize("rule", [AllProgress(), Elastic(0.9)], ids=["progress", "weights"])
def test_the_update_of_a_fragment_is_undone_with_its_round(rule):
    """Two workers train alone; the exchange of their first fragment is undone."""
    history = counting(rule, num_samples=100, period=4, exchange={"fragments": 2})
    history.train("w0", "w1", late={"w0": (0, 3)})
    assert (history.snapshot.weights == 0).all()
    for worker_id in ("w0", "w1"):
        rows = history.batches[worker_id].open
        expected = np.bincount(rows, minlength=100)
        np.testing.assert_allclose(history.weights(worker_id).numpy(), expected, atol=1e-6)
        assert len(rows) == 8


# groups that share a replica


def pairs(*lost, method="sync-easgd"):
    history = History(config(method, group_size=2))
    history.train("w0", "w1", "w2", "w3", rounds=1)
    history.train("w0", "w1", "w2", "w3", lost=dict.fromkeys(lost, (1, 0)))
    return history


@pytest.mark.parametrize("method", ["sync-easgd", "diloco"])
@pytest.mark.parametrize(
    ("lost", "members"),
    [
        (("w3",), ("w0", "w1", "w2", "w4")),
        (("w0",), ("w2", "w3", "w1", "w4")),
        (("w0", "w3"), ("w1", "w2")),
        (("w0", "w1"), ("w2", "w3")),
    ],
)
def test_survivors_of_groups_share_one_replica_again(method, lost, members):
    history = pairs(*lost, method=method)
    for rounds in (0, 1):
        history.train(*members, rounds=rounds)
        for first, second in zip(members[::2], members[1::2], strict=True):
            assert_same(history.weights(first), history.weights(second))
    history.end(*members)
    assert history.snapshot.progress.num_samples == 75


def test_a_worker_that_adopts_a_partners_replica_returns_its_own_claims():
    history = pairs("w0", "w3")
    history.train("w1", "w2", rounds=0)
    kept = {w: len(history.workers[w].runner.trained) for w in ("w1", "w2")}
    assert kept["w2"] == 0


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_survivors_of_groups_share_the_state_of_their_optimizer(name):
    history = History(config("sync-easgd", group_size=2, optimizer={"name": name}))
    history.train("w0", "w1", "w2", "w3", rounds=2)
    history.train("w0", "w1", "w2", "w3", lost={"w0": (1, 0)})
    members = ("w2", "w3", "w1", "w4")  # w4 has never taken a step
    history.train(*members, rounds=2)
    for first, second in zip(members[::2], members[1::2], strict=True):
        one, other = (history.workers[w].replica.state_dict() for w in (first, second))
        assert_same(one["weights"], other["weights"])
        assert_same(one["optimizer"]["state"], other["optimizer"]["state"])


# resuming with another number of workers


@pytest.mark.parametrize("num_after", [2, 6])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-msgd", "diloco"])
def test_a_checkpoint_of_four_workers_resumes_with_two_and_with_six(method, num_after, tmp_path):
    case = config(method)
    before = History(case, images=tiny_images(60))
    before.train("w0", "w1", "w2", "w3", rounds=2)
    states = {w: worker.pop_kept(2) for w, worker in before.workers.items()}
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(checkpoint_of(Collected(before.snapshot, states), before.flat, seconds=1.0))

    checkpoint, damage = store.read()
    assert not damage
    after = History(case, images=tiny_images(60))
    after.snapshot = snapshot_of(checkpoint, after.flat)
    after.done = before.done
    members = [f"w{i}" for i in range(num_after)]
    after.train(*members, rounds=0, states=checkpoint.workers)
    assert_same(after.snapshot, before.snapshot)
    for worker_id in members:
        if worker_id in before.workers:
            replica = before.workers[worker_id].replica.state_dict()
            assert_same(after.workers[worker_id].replica.state_dict(), replica)
        else:
            assert_same(after.weights(worker_id).numpy(), before.snapshot.weights)
    after.end(*members)
    after.assert_every_sample_once_an_epoch()


def test_a_checkpoint_of_a_broken_generation_counts_nothing_twice(tmp_path):
    before = counting(AllProgress())
    before.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    states = {w: worker.pop_kept(0) for w, worker in before.workers.items()}
    after = counting(AllProgress())
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(checkpoint_of(Collected(before.snapshot, states), after.flat, seconds=1.0))
    checkpoint, _ = store.read()
    after.snapshot = snapshot_of(checkpoint, after.flat)
    after.train("w1", "w2", rounds=1, states=checkpoint.workers)
    after.end("w1", "w2")
    assert (after.snapshot.weights == 3).all()
