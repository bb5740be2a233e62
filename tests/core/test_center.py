"""The shelf of snapshots holds what is still needed; a center is made of another one's copy."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from histories import assert_same, config
from snapshots import center_snapshot as snapshot
from snapshots import with_progress

from raydl.core.center import (
    SnapshotShelf,
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


def test_only_the_newest_snapshots_are_held():
    shelf = SnapshotShelf(num_newest=2)
    for round in (3, 1, 2, 9):
        shelf.put(snapshot(round))
    assert shelf.rounds() == (3, 9)
    assert shelf.get(1) is None
    assert shelf.get(9).progress.round == 9


def test_the_two_newest_snapshots_that_a_checkpoint_needs_stay():
    shelf = SnapshotShelf(num_newest=2)
    shelf.put(snapshot(1, is_kept=True))
    for round in range(2, 50):
        shelf.put(snapshot(round))
    assert shelf.rounds() == (1, 48, 49)
    shelf.put(snapshot(50, is_kept=True))  # the last round, while 1 is still to be collected
    assert shelf.rounds() == (1, 49, 50)
    shelf.put(snapshot(51, is_kept=True))
    assert shelf.rounds() == (50, 51)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("method", ["async-msgd", "async-diloco"])
def test_a_center_from_a_workers_copy_has_the_optimizer_of_the_one_before(method, shards):
    ensemble = Ensemble(config(method, exchange={"center_shards": shards}), num_workers=2).join()
    ensemble.run(3)
    before = ensemble.service.optimizer_state([s.optimizer_states() for s in ensemble.others])
    assert before["state"][0]["momentum_buffer"].abs().sum() > 0
    copy = ensemble.workers[0].center()
    assert copy.optimizer == {}, "a worker knows the center's weights alone"
    snapshot = dataclasses.replace(copy, optimizer=before)
    again = CenterServer(ensemble.job, snapshot)
    others = [make_shard(ensemble.job, snapshot, i, None) for i in range(1, shards)]
    after = again.optimizer_state([shard.optimizer_states() for shard in others])
    assert_same(after, before)


def test_a_state_that_travels_as_arrays_comes_back_with_every_tensor_at_its_place():
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
    assert torch.equal(back["state"][0]["exp_avg"], torch.arange(3.0)), "it is a copy"


def test_a_copy_of_the_same_generation_that_the_controller_chose_takes_the_place_of_another():
    shelf = SnapshotShelf()
    shelf.put(with_progress(snapshot(4), generation=2, num_samples=1))
    for generation, num_samples, kept in ((2, 5, 5), (1, 9, 5), (3, 7, 7)):
        other = with_progress(snapshot(4), generation=generation, num_samples=num_samples)
        shelf.adopt(other)
        assert shelf.get(4).progress.num_samples == kept


def test_the_state_of_an_optimizer_splits_by_spans_and_joins_again():
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


def test_an_optimizer_that_remembers_nothing_yet_splits_and_joins_to_the_same():
    state = {"state": {}, "param_groups": [{"lr": 0.1}]}
    parts = split_states(state, [2, 3])
    assert parts == [state, state]
    assert joined_states(parts, [2, 3]) == state


def test_a_rate_is_each_groups_share_of_it():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0)
    optimizer.param_groups[1]["lr_share"] = 0.1
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_a_run_begins_at_round_0_of_no_generation():
    flat = FlatModel(torch.nn.Linear(3, 2))
    first = first_snapshot(flat, 60)
    assert (first.progress, first.is_kept) == (Progress(), False)
    assert np.array_equal(first.weights, flat.weights.numpy())


@pytest.mark.parametrize("where", ["weights", "buffers"])
def test_a_snapshot_is_finite_where_all_of_it_is(where):
    good = dataclasses.replace(
        first_snapshot(FlatModel(torch.nn.Linear(3, 2)), 60), buffers=np.ones(4, np.float32)
    )
    assert good.is_finite()
    spoiled = getattr(good, where).copy()
    spoiled[1] = np.inf
    assert not dataclasses.replace(good, **{where: spoiled}).is_finite()


def test_a_snapshot_that_a_checkpoint_needs_is_needed_too_when_its_equal_replaces_it():
    for put in (SnapshotShelf.put, SnapshotShelf.adopt):
        shelf = SnapshotShelf()
        put(shelf, with_progress(snapshot(4, is_kept=True), generation=2))
        put(shelf, with_progress(snapshot(4), generation=2))
        assert shelf.get(4).is_kept
        put(shelf, with_progress(snapshot(4), generation=3))
        assert not shelf.get(4).is_kept, "of another generation, which was not asked to keep it"


def test_what_an_earlier_generation_made_is_refused_and_counted():
    shelf = SnapshotShelf()
    assert shelf.put(with_progress(snapshot(4), generation=3))
    assert not shelf.put(with_progress(snapshot(4), generation=2))
    shelf.begin(5, 4)
    assert not shelf.put(with_progress(snapshot(6), generation=4))
    assert shelf.num_refused == 2
    assert shelf.rounds() == (4,)
    assert shelf.get(4).progress.generation == 3


def test_the_changes_of_the_ledger_are_those_of_the_newest_snapshot():
    shelf = SnapshotShelf()
    shelf.put(dataclasses.replace(snapshot(4), ledger={}))
    assert shelf.num_changes() == 0
    shelf.put(dataclasses.replace(snapshot(5), ledger={"num_changes": 3}))
    assert shelf.num_changes() == 3
