"""The snapshot cache holds the needed rounds; a rebuilt center keeps the optimizer's state."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from histories import assert_same, config
from snapshots import center_snapshot as snapshot
from snapshots import with_progress

from raydl.core.center import (
    SnapshotCache,
    as_arrays,
    as_tensors,
    first_snapshot,
    joined_states,
    set_lr,
    split_states,
)
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress
from raydl.parameter_server.server import CenterServer, make_shard


def test_the_cache_holds_only_the_newest_snapshots():
    cache = SnapshotCache(num_newest=2)
    for round in (3, 1, 2, 9):
        cache.put(snapshot(round))
    assert cache.rounds() == (3, 9)
    assert cache.get(1) is None
    assert cache.get(9).progress.round == 9


def test_the_two_newest_snapshots_that_a_checkpoint_needs_stay():
    cache = SnapshotCache(num_newest=2)
    cache.put(snapshot(1, is_kept=True))
    for round in range(2, 50):
        cache.put(snapshot(round))
    assert cache.rounds() == (1, 48, 49)
    cache.put(snapshot(50, is_kept=True))  # the last round, before round 1 is collected
    assert cache.rounds() == (1, 49, 50)
    cache.put(snapshot(51, is_kept=True))
    assert cache.rounds() == (50, 51)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("method", ["async-msgd", "async-diloco"])
def test_a_center_rebuilt_from_a_workers_copy_has_the_optimizer_of_the_lost_center(method, shards):
    ensemble = Ensemble(config(method, exchange={"center_shards": shards}), num_workers=2).join()
    ensemble.run(3)
    before = ensemble.service.optimizer_state([s.optimizer_states() for s in ensemble.others])
    assert before["state"][0]["momentum_buffer"].abs().sum() > 0
    copy = ensemble.workers[0].center()
    assert copy.optimizer == {}, "a worker knows only the weights of the center"
    snapshot = dataclasses.replace(copy, optimizer=before)
    again = CenterServer(ensemble.job, snapshot)
    others = [make_shard(ensemble.job, snapshot, i, None) for i in range(1, shards)]
    after = again.optimizer_state([shard.optimizer_states() for shard in others])
    assert_same(after, before)


def test_a_state_sent_as_arrays_is_restored_with_every_tensor_in_its_place():
    half = torch.ones(2, dtype=torch.bfloat16)  # NumPy has no such type
    state = {"step": 3, "state": {0: {"exp_avg": torch.arange(3.0)}}, "groups": [half, {"a": 1}]}
    sent = as_arrays(state)
    assert isinstance(sent["state"][0]["exp_avg"], np.ndarray)
    assert sent["groups"][0] is half
    back = as_tensors(sent)
    assert torch.equal(back["state"][0]["exp_avg"], torch.arange(3.0))
    assert back["groups"] == [half, {"a": 1}]
    assert back["step"] == 3
    sent["state"][0]["exp_avg"][:] = 0.0
    assert torch.equal(back["state"][0]["exp_avg"], torch.arange(3.0)), "tensors are copies"


def test_an_adopted_copy_replaces_a_snapshot_of_its_round_unless_of_a_later_generation():
    cache = SnapshotCache()
    cache.put(with_progress(snapshot(4), generation=2, num_samples=1))
    for generation, num_samples, kept in ((2, 5, 5), (1, 9, 5), (3, 7, 7)):
        other = with_progress(snapshot(4), generation=generation, num_samples=num_samples)
        cache.adopt(other)
        assert cache.get(4).progress.num_samples == kept


def test_an_optimizer_state_is_split_by_spans_and_joined_again():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "momentum_buffer": torch.arange(5.0)}},
        "param_groups": [{"lr": 0.1}],
    }
    parts = split_states(state, [2, 3])
    assert [p["state"][0]["momentum_buffer"].tolist() for p in parts] == [[0, 1], [2, 3, 4]]
    joined = joined_states(parts, [2, 3])
    assert joined["param_groups"] == state["param_groups"]
    assert torch.equal(joined["state"][0]["momentum_buffer"], torch.arange(5.0))
    assert joined["state"][0]["step"] == 3


def test_an_empty_optimizer_state_is_split_and_joined_unchanged():
    state = {"state": {}, "param_groups": [{"lr": 0.1}]}
    parts = split_states(state, [2, 3])
    assert parts == [state, state]
    assert joined_states(parts, [2, 3]) == state


def test_each_group_gets_its_share_of_the_learning_rate():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0)
    optimizer.param_groups[1]["lr_share"] = 0.1
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_a_run_begins_with_a_snapshot_of_round_0_and_generation_0():
    flat = FlatModel(torch.nn.Linear(3, 2))
    first = first_snapshot(flat, 60)
    assert (first.progress, first.is_kept) == (Progress(), False)
    assert np.array_equal(first.weights, flat.weights.numpy())


@pytest.mark.parametrize("where", ["weights", "buffers"])
def test_a_snapshot_is_finite_if_all_weights_and_buffers_are(where):
    good = dataclasses.replace(
        first_snapshot(FlatModel(torch.nn.Linear(3, 2)), 60), buffers=np.ones(4, np.float32)
    )
    assert good.is_finite()
    spoiled = getattr(good, where).copy()
    spoiled[1] = np.inf
    assert not dataclasses.replace(good, **{where: spoiled}).is_finite()


def test_a_kept_snapshot_stays_kept_when_one_of_its_round_and_generation_replaces_it():
    for put in (SnapshotCache.put, SnapshotCache.adopt):
        cache = SnapshotCache()
        put(cache, with_progress(snapshot(4, is_kept=True), generation=2))
        put(cache, with_progress(snapshot(4), generation=2))
        assert cache.get(4).is_kept
        put(cache, with_progress(snapshot(4), generation=3))
        assert not cache.get(4).is_kept, "no checkpoint needs the round of the other generation"


def test_a_snapshot_of_an_earlier_generation_is_refused_and_counted():
    cache = SnapshotCache()
    assert cache.put(with_progress(snapshot(4), generation=3))
    assert not cache.put(with_progress(snapshot(4), generation=2))
    cache.begin(5, 4)
    assert not cache.put(with_progress(snapshot(6), generation=4))
    assert cache.num_refused == 2
    assert cache.rounds() == (4,)
    assert cache.get(4).progress.generation == 3


def test_the_number_of_ledger_changes_is_that_of_the_newest_snapshot():
    cache = SnapshotCache()
    cache.put(dataclasses.replace(snapshot(4), ledger={}))
    assert cache.num_changes() == 0
    cache.put(dataclasses.replace(snapshot(5), ledger={"num_changes": 3}))
    assert cache.num_changes() == 3
