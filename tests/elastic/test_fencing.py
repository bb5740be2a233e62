"""What an earlier generation made and comes late changes nothing, and is counted."""

from dataclasses import replace

import numpy as np
import pytest
from snapshots import center_snapshot as snapshot
from snapshots import with_progress
from stages import Stage

from raydl.core.center import SnapshotShelf
from raydl.core.worker_group import Lost, Published, Refused
from raydl.elastic.fencing import Refusals


def made(round, generation, *, value=0.0, is_kept=False):
    """Return a snapshot of a generation, with weights of one value."""
    one = snapshot(round, is_kept=is_kept)
    one = with_progress(one, generation=generation)
    return replace(one, weights=np.full_like(one.weights, value))


def test_a_late_snapshot_of_an_older_generation_does_not_overwrite_a_kept_one():
    """w0 completed round 7 alone, was cut off, and the others trained it anew without it."""
    shelf = SnapshotShelf()
    shelf.put(made(6, 1))
    shelf.begin(2, 6)
    assert shelf.put(made(7, 2, value=2.0, is_kept=True))
    assert not shelf.put(made(7, 1, value=1.0, is_kept=True))
    assert shelf.get(7).weights[0] == 2.0
    assert (shelf.get(7).progress.generation, shelf.get(7).is_kept) == (2, True)
    assert shelf.num_refused == 1


@pytest.mark.parametrize("round", [5, 6, 7, 8, 100])
def test_a_snapshot_of_an_older_generation_is_refused_whatever_its_round(round):
    shelf = SnapshotShelf()
    shelf.put(made(6, 1))
    shelf.begin(2, 6)
    shelf.put(made(7, 2))
    assert not shelf.put(made(round, 1, value=1.0))
    assert shelf.rounds() == (6, 7)
    assert shelf.newest().progress.generation == 2
    assert shelf.num_refused == 1


def test_a_generation_begins_without_the_rounds_that_nobody_goes_on_from():
    """Else a kept one of the last generation would be taken for this one's, by its number."""
    shelf = SnapshotShelf()
    shelf.put(made(6, 1))
    shelf.put(made(7, 1, value=1.0, is_kept=True))
    assert shelf.begin(2, 6).progress.round == 6
    assert shelf.rounds() == (6,)
    shelf.put(made(7, 2, value=2.0))
    assert not shelf.get(7).is_kept, "that it was kept was said of the other"


def test_a_center_that_has_lost_the_round_of_a_generation_holds_what_it_has():
    shelf = SnapshotShelf()
    shelf.put(made(9, 1))
    assert shelf.begin(2, 6) is None
    assert shelf.newest().progress.round == 9


def test_the_copy_that_the_controller_goes_on_from_counts_although_its_generation_is_over():
    shelf = SnapshotShelf()
    shelf.put(made(6, 1))
    shelf.begin(2, 6)
    shelf.adopt(made(7, 1, value=1.0))  # all of generation 2 are lost, and one of 1 was left out
    assert shelf.begin(3, 7).weights[0] == 1.0
    assert shelf.num_refused == 0


def test_a_copy_of_an_older_generation_does_not_replace_a_newer_snapshot_of_its_round():
    shelf = SnapshotShelf()
    shelf.begin(2, 6)
    shelf.put(made(7, 2, value=2.0, is_kept=True))
    shelf.adopt(made(7, 1, value=1.0))
    assert (shelf.get(7).weights[0], shelf.get(7).is_kept) == (2.0, True)


def test_a_new_center_takes_the_snapshots_of_those_who_train_on_meanwhile():
    shelf = SnapshotShelf()
    shelf.adopt(made(0, 0))
    assert shelf.put(made(9, 4))


# what the controller makes of it


def published(*rounds, generation, made_by=None):
    return Published(rounds, generation=generation, newest_generation=made_by or generation)


def test_what_the_center_held_before_a_generation_began_is_no_news_of_it():
    stage = Stage((2, 3)).start("w0", "w1", "w2").after(Lost("w2", "it died"))
    stage.step(*ended(stage, 1, w0=6, w1=6), published(0, 6, 7, generation=1))
    assert ("form", 2, ("w0", "w1"), 6) in stage.step()
    stage.step(published(0, 6, 7, generation=1))  # asked before, answered after
    assert stage.controller._center_manager.published == (0, 6)
    stage.step(published(0, 6, 8, generation=2))
    assert stage.controller._center_manager.published == (0, 6, 8)


def ended(stage, generation, **rounds):
    """Return how workers came out of a broken exchange, each with its copy."""
    return [
        replace(*stage.end("broken", at, worker, generation=generation), copy_generation=generation)
        for worker, at in rounds.items()
    ]


@pytest.mark.parametrize(("made_by", "goes_on_from"), [(2, 8), (1, 7)])
def test_a_copy_from_before_is_not_gone_on_from_where_the_center_has_a_newer_generations(
    made_by, goes_on_from
):
    """w2 completed round 7 of generation 1 late and alone; the others trained it anew in 2."""
    stage = Stage((1, 3)).start("w0", "w1", "w2")
    stage.controller._worker_pool.leave_out(stage.controller._run, ("w2",))
    stage.controller._abandon(stage.controller._run)
    stage.step(*ended(stage, 1, w0=6, w1=6), published(0, 6, generation=1))
    assert ("form", 2, ("w0", "w1"), 6) in stage.step()
    newest = (8,) if made_by == 2 else ()
    stage.step(*ended(stage, 1, w2=7), published(0, 6, *newest, generation=2, made_by=made_by))
    told = stage.step(Lost("w0", "it died"), Lost("w1", "it died")) + stage.step()
    told += stage.step(published(0, 6, *newest or (7,), generation=2, made_by=made_by))
    assert (("publish", "w2") in told) == (made_by == 1), "of generation 2 nothing is left"
    assert stage.controller._round == goes_on_from


def test_refusals_are_counted_by_kind_and_told_less_often_the_more_there_are():
    refusals = Refusals()
    assert refusals.note_refused("center a", {"snapshots": 0}) == []
    assert refusals.note_refused("center a", {"snapshots": 1}) == [
        "refused a late snapshot that an earlier generation had made: nothing was changed by it"
    ]
    told = [refusals.note_refused("center a", {"snapshots": n}) for n in range(1, 1000)]
    assert sum(map(len, told)) < 10
    (sentence,) = refusals.note_refused("shard 1", {"messages": 3})
    assert sentence.startswith("refused 3 late messages that a worker ")
    refusals.note_refused(
        "center b", {"snapshots": 1}
    )  # the center was started again, and counts anew
    assert refusals.counts == {"snapshots": 1000, "messages": 3}


def test_the_controller_tells_and_counts_what_center_and_shards_have_refused():
    stage = Stage().start()
    stage.step(replace(Published((0,), process="a"), refused={"messages": 2}), Refused("b", 1))
    assert stage.controller.refused == {"messages": 3}
    assert any(line.startswith("refused 2 late messages") for line in stage.said)
