"""Late messages and snapshots of an earlier generation change nothing and are counted."""

from dataclasses import replace

import numpy as np
import pytest
from controller_harness import ControllerHarness
from snapshots import center_snapshot as snapshot
from snapshots import with_progress

from raydl.core.center import SnapshotCache
from raydl.core.worker_group import Lost, Published, Refused
from raydl.elastic.facts import Abandon, LeaveOut
from raydl.elastic.fencing import Refusals


def snapshot_of(round, generation, *, value=0.0, is_kept=False):
    """Return a snapshot of a generation, with weights of one value."""
    one = snapshot(round, is_kept=is_kept)
    one = with_progress(one, generation=generation)
    return replace(one, weights=np.full_like(one.weights, value))


def test_a_late_snapshot_of_an_older_generation_does_not_overwrite_a_kept_one():
    """w0 completed round 7 alone and was cut off; the others trained the round again without it."""
    cache = SnapshotCache()
    cache.put(snapshot_of(6, 1))
    cache.begin(2, 6)
    assert cache.put(snapshot_of(7, 2, value=2.0, is_kept=True))
    assert not cache.put(snapshot_of(7, 1, value=1.0, is_kept=True))
    assert cache.get(7).weights[0] == 2.0
    assert (cache.get(7).progress.generation, cache.get(7).is_kept) == (2, True)
    assert cache.num_refused == 1


@pytest.mark.parametrize("round", [5, 6, 7, 8, 100])
def test_a_snapshot_of_an_older_generation_is_refused_whatever_its_round(round):
    cache = SnapshotCache()
    cache.put(snapshot_of(6, 1))
    cache.begin(2, 6)
    cache.put(snapshot_of(7, 2))
    assert not cache.put(snapshot_of(round, 1, value=1.0))
    assert cache.rounds() == (6, 7)
    assert cache.newest().progress.generation == 2
    assert cache.num_refused == 1


def test_a_new_generation_drops_snapshots_of_rounds_after_its_first():
    """Otherwise a kept snapshot of the last generation would count as one of this generation."""
    cache = SnapshotCache()
    cache.put(snapshot_of(6, 1))
    cache.put(snapshot_of(7, 1, value=1.0, is_kept=True))
    assert cache.begin(2, 6).progress.round == 6
    assert cache.rounds() == (6,)
    cache.put(snapshot_of(7, 2, value=2.0))
    assert not cache.get(7).is_kept, "only the earlier snapshot of round 7 was kept"


def test_a_center_without_the_first_round_of_a_generation_keeps_its_snapshots():
    cache = SnapshotCache()
    cache.put(snapshot_of(9, 1))
    assert cache.begin(2, 6) is None
    assert cache.newest().progress.round == 9


def test_a_copy_that_the_controller_chooses_counts_although_its_generation_is_over():
    cache = SnapshotCache()
    cache.put(snapshot_of(6, 1))
    cache.begin(2, 6)
    cache.adopt(snapshot_of(7, 1, value=1.0))  # generation 2 is lost, and one of 1 was left out
    assert cache.begin(3, 7).weights[0] == 1.0
    assert cache.num_refused == 0


def test_a_copy_of_an_older_generation_does_not_replace_a_newer_snapshot_of_its_round():
    cache = SnapshotCache()
    cache.begin(2, 6)
    cache.put(snapshot_of(7, 2, value=2.0, is_kept=True))
    cache.adopt(snapshot_of(7, 1, value=1.0))
    assert (cache.get(7).weights[0], cache.get(7).is_kept) == (2.0, True)


def test_a_restarted_center_stores_snapshots_of_the_current_generation():
    cache = SnapshotCache()
    cache.adopt(snapshot_of(0, 0))
    assert cache.put(snapshot_of(9, 4))


# the controller


def published(*rounds, generation, made_by=None):
    return Published(rounds, generation=generation, newest_generation=made_by or generation)


def test_a_poll_from_before_a_generation_does_not_count():
    harness = ControllerHarness((2, 3)).start("w0", "w1", "w2").after(Lost("w2", "it died"))
    harness.step(*ended(harness, 1, w0=6, w1=6), published(0, 6, 7, generation=1))
    assert ("form", 2, ("w0", "w1"), 6) in harness.step()
    harness.step(published(0, 6, 7, generation=1))  # requested before generation 2, answered after
    assert harness.controller.run_state.center.rounds == (0, 6)
    harness.step(published(0, 6, 8, generation=2))
    assert harness.controller.run_state.center.rounds == (0, 6, 8)


def ended(harness, generation, **rounds):
    """Return the ends of workers that left a broken exchange, each with its copy."""
    return [
        replace(
            *harness.end("broken", at, worker, generation=generation), copy_generation=generation
        )
        for worker, at in rounds.items()
    ]


@pytest.mark.parametrize(("made_by", "first_round"), [(2, 8), (1, 7)])
def test_a_copy_of_an_earlier_generation_is_not_used_if_the_center_has_one_of_a_newer(
    made_by, first_round
):
    """w2 completed round 7 of generation 1 late and alone; generation 2 trained it again."""
    harness = ControllerHarness((1, 3)).start("w0", "w1", "w2")
    harness.note(LeaveOut(("w2",)))
    harness.note(Abandon(1, answer_s=1.0))
    harness.step(*ended(harness, 1, w0=6, w1=6), published(0, 6, generation=1))
    assert ("form", 2, ("w0", "w1"), 6) in harness.step()
    newest = (8,) if made_by == 2 else ()
    harness.step(*ended(harness, 1, w2=7), published(0, 6, *newest, generation=2, made_by=made_by))
    calls = harness.step(Lost("w0", "it died"), Lost("w1", "it died")) + harness.step()
    calls += harness.step(published(0, 6, *newest or (7,), generation=2, made_by=made_by))
    assert (("publish", "w2") in calls) == (made_by == 1), "nothing of generation 2 is left"
    assert harness.controller.run_state.round == first_round


def test_refusals_are_counted_by_kind_and_logged_at_each_doubling():
    refusals = Refusals()
    assert refusals.note_refused("center a", {"snapshots": 0}) == []
    assert refusals.note_refused("center a", {"snapshots": 1}) == [
        "refused a late snapshot from an earlier generation: it changed nothing"
    ]
    sentences = [refusals.note_refused("center a", {"snapshots": n}) for n in range(1, 1000)]
    assert sum(map(len, sentences)) < 10
    (sentence,) = refusals.note_refused("shard 1", {"messages": 3})
    assert sentence.startswith("refused 3 late messages from outside ")
    refusals.note_refused(
        "center b", {"snapshots": 1}
    )  # the center was restarted and counts from 0
    assert refusals.counts == {"snapshots": 1000, "messages": 3}


def test_the_controller_logs_and_counts_refusals_of_center_and_shards():
    harness = ControllerHarness().start()
    harness.step(replace(Published((0,), process="a"), refused={"messages": 2}), Refused("b", 1))
    assert harness.controller.refused == {"messages": 3}
    assert any(line.startswith("refused 2 late messages") for line in harness.log_lines)
