"""The shelf of snapshots holds what is still needed; a center is made of another one's copy."""

import dataclasses

import pytest
from conftest import SHAPE, Ensemble, linear
from histories import assert_same, config

from raydl.center import SnapshotShelf, first_snapshot
from raydl.center_service import CenterService, make_shard
from raydl.flat import FlatModel


def snapshot(round, *, is_kept=False):
    first = first_snapshot(FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes)), 10)
    return dataclasses.replace(first, round=round, is_kept=is_kept)


def test_only_the_newest_snapshots_are_held():
    shelf = SnapshotShelf(num_newest=2)
    for round in (3, 1, 2, 9):
        shelf.put(snapshot(round))
    assert shelf.rounds() == (3, 9)
    assert shelf.get(1) is None
    assert shelf.get(9).round == 9


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
    again = CenterService(ensemble.job, snapshot)
    others = [make_shard(ensemble.job, snapshot, i, None) for i in range(1, shards)]
    after = again.optimizer_state([shard.optimizer_states() for shard in others])
    assert_same(after, before)
