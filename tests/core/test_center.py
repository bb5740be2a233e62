"""The snapshot cache holds the needed rounds; a rebuilt center keeps the optimizer's state."""

import dataclasses

import numpy as np
import pytest
import torch
from coordinators import request
from ensembles import Ensemble
from histories import assert_same, config
from scenarios import scenario_config
from snapshots import center_snapshot as snapshot
from snapshots import with_progress

from raydl.config import ExchangeConfig
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
from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.saved_state import pack, unpack
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
@pytest.mark.parametrize("method", ["async-msgd", "async-diloco", "cgad", "heloco"])
def test_a_center_rebuilt_from_a_workers_copy_has_the_optimizer_of_the_lost_center(method, shards):
    ensemble = Ensemble(config(method, exchange={"center_shards": shards}), num_workers=2).join()
    ensemble.run(3)
    before = ensemble.service.optimizer_state([s.optimizer_states() for s in ensemble.others])
    [whole] = split_states(before, [ensemble.flat.weights.numel()])
    assert whole["state"][0]["momentum_buffer"].abs().sum() > 0
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
    [joined] = split_states(joined_states(parts, [2, 3]), [5])
    assert joined["param_groups"] == state["param_groups"]
    assert torch.equal(joined["state"][0]["momentum_buffer"], torch.arange(5.0))
    assert joined["state"][0]["step"] == 3


def test_an_empty_optimizer_state_is_split_and_joined_unchanged():
    state = {"state": {}, "param_groups": [{"lr": 0.1}]}
    parts = split_states(state, [2, 3])
    assert parts == [state, state]
    assert split_states(joined_states(parts, [2, 3]), [5]) == [state]
    assert joined_states([{}, {}], [2, 3]) == {}


def delayed(arrivals, *, sums, momentum):
    """Return the state of a span under ``async-diloco``, with these vectors."""
    values = {
        "arrivals": arrivals,
        "sum": torch.tensor(sums),
        "momentum_buffer": torch.tensor(momentum),
    }
    return {"state": {0: values}, "param_groups": [{"lr": 0.7}]}


NOT_EXCHANGED = {"state": {}, "param_groups": [{"lr": 0.7}]}


def values_of(states):
    """Return arrivals, sum and momentum of each span, or None for one without a state."""
    return [
        (state["state"][0]["arrivals"], *(v.tolist() for v in list(state["state"][0].values())[1:]))
        if state["state"]
        else None
        for state in states
    ]


def test_every_span_keeps_its_own_count():
    spans = [
        delayed(0, sums=[0.0], momentum=[1.0]),
        NOT_EXCHANGED,
        delayed(1, sums=[4.0, 5.0], momentum=[2.0, 3.0]),
    ]
    again = split_states(joined_states(spans, [1, 1, 2]), [1, 1, 2])
    assert values_of(again) == values_of(spans)
    assert values_of(again)[0][0] == 0
    assert values_of(again)[2][0] == 1


def test_a_new_span_has_the_count_of_the_old_one_with_which_it_shares_most():
    spans = [
        {"state": {0: {"step": torch.tensor(float(n)), "exp_avg": torch.full((2,), float(n))}}}
        for n in (1, 2, 3)
    ]
    states = split_states(joined_states(spans, [2, 2, 2]), [1, 4, 1])
    assert [s["state"][0]["step"].item() for s in states] == [1.0, 2.0, 3.0]
    assert [s["state"][0]["exp_avg"].tolist() for s in states] == [[1.0], [1, 2, 2, 3], [3.0]]


def test_a_new_span_without_an_exchanged_element_has_no_state():
    spans = [NOT_EXCHANGED, delayed(1, sums=[4.0], momentum=[2.0])]
    joined = joined_states(spans, [4, 1])
    assert values_of(split_states(joined, [3, 2])) == [None, (0, [0.0, 0.0], [0.0, 2.0])]


@pytest.mark.parametrize(
    ("arrivals", "sums"),
    [(2, [6.0, 6.0, 8.0, 8.0]), (4, [12.0, 12.0, 16.0, 16.0])],
)
def test_other_spans_never_make_an_average_wrong(arrivals, sums):
    """The averages are 3 and 4: 6/2 and 16/4, or 12/4 and 16/4."""
    spans = [delayed(arrivals, sums=sums[:2], momentum=[1.0, 1.0])]
    spans.append(delayed(4, sums=[16.0, 16.0], momentum=[2.0, 2.0]))
    [whole] = split_states(joined_states(spans, [2, 2]), [4])
    assert values_of([whole]) == [(arrivals, sums, [1.0, 1.0, 2.0, 2.0])]


def test_a_state_of_an_earlier_version_has_one_value_for_all_spans():
    old = delayed(1, sums=[1.0, 2.0, 3.0], momentum=[4.0, 5.0, 6.0])
    assert values_of(split_states(old, [1, 2])) == [(1, [1.0], [4.0]), (1, [2.0, 3.0], [5.0, 6.0])]


def test_a_checkpoint_and_a_backup_keep_the_values_of_each_span():
    spans = [delayed(0, sums=[0.0], momentum=[1.0]), NOT_EXCHANGED]
    joined = joined_states([*spans, delayed(1, sums=[4.0], momentum=[2.0])], [1, 1, 1])
    stored = b"".join(bytes(piece) for piece in pack(joined).pieces())
    for back in (unpack(bytearray(stored)), as_tensors(as_arrays(joined))):
        assert values_of(split_states(back, [1, 1, 1])) == [
            (0, [0.0], [1.0]),
            None,
            (1, [4.0], [2.0]),
        ]


@pytest.mark.parametrize("spans", [{"fragments": 2}, {"center_shards": 2}])
def test_a_center_in_spans_goes_on_from_its_snapshot_as_if_nothing_had_happened(spans):
    """One span has received a message more than the other when the snapshot is made."""
    settings = ExchangeConfig(timeout_s=20.0, **spans)
    run = Ensemble(scenario_config("async-diloco", steps=40, exchange=settings), num_workers=2)
    before = CenterOfTwo(run.job, run.first)
    before.receive(1, num_spans=1)
    after = CenterOfTwo(run.job, before.snapshot())
    for center in (before, after):
        center.receive(2, num_spans=2)
    assert np.array_equal(before.snapshot().weights, after.snapshot().weights)


class CenterOfTwo:
    """The shards of a center that two workers exchange with, without the workers."""

    def __init__(self, job, snapshot):
        self._home = CenterServer(job, snapshot)
        num_shards = job.config.exchange.center_shards
        self._others = [make_shard(job, snapshot, i, None) for i in range(1, num_shards)]
        membership = Membership(1, ("w0", "w1"))
        self._home.begin_generation(membership)
        for shard in self._others:
            shard.begin_generation(membership)

    def receive(self, number, *, num_spans):
        """Apply messages of ones to the first spans."""
        shards = [self._home.home, *self._others]
        spans = sorted((span, index) for index, s in enumerate(shards) for span in s.state().spans)
        for span, index in spans[:num_spans]:
            ones = [1.0] * (span[1] - span[0])
            shards[index].exchange(request("w0", number, ones, generation=1, span=span))

    def snapshot(self):
        return self._home.snapshot(lambda: [shard.state() for shard in self._others])


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
