"""The shelf of snapshots holds what is still needed, and no more."""

import dataclasses

from conftest import SHAPE, linear

from raydl.center import SnapshotShelf, first_snapshot
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
