"""Data that differ between workers are still trained once an epoch each."""

import pickle
import threading
from collections import Counter

import numpy as np
import pytest
from coordinators import change, enter, make_coordinator
from ensembles import Ensemble
from hypothesis import given
from hypothesis import strategies as st

from raydl.config import (
    InputConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.data import ImageSet, load
from raydl.data.in_memory import TableSet
from raydl.data.ledger import Ledger
from raydl.data.skew import Skewed, order_of, shares_by_class
from raydl.errors import ConfigError
from raydl.methods import resolve

LABELS = np.repeat(np.arange(4), 250)


def config_of(method="sync-easgd", *, skew=0.1, workers=2, data="digits", epochs=2):
    return TrainConfig(
        data=data,
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(epochs=epochs, batch_size=3),
        optimizer=OptimizerConfig(lr=0.01),
        input=InputConfig(skew=skew),
        scaling=ScalingConfig(num_workers=workers),
    )


def mixes(labels, shares):
    """Return the share of each class in each share of the samples."""
    return np.array([np.bincount(labels[s], minlength=labels.max() + 1) / len(s) for s in shares])


# the division


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(1, 7),
    st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
    st.integers(0, 5),
)
def test_every_sample_is_in_one_share_and_the_shares_are_equally_large(labels, count, alpha, seed):
    shares = shares_by_class(np.array(labels), count, alpha=alpha, seed=seed)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    again = shares_by_class(np.array(labels), count, alpha=alpha, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


def test_a_low_concentration_gives_shares_of_few_classes_and_a_high_one_the_whole_mix():
    few = mixes(LABELS, shares_by_class(LABELS, 4, alpha=0.01, seed=0))
    assert few.max(axis=1).mean() > 0.8
    all_of_them = mixes(LABELS, shares_by_class(LABELS, 4, alpha=1e5, seed=0))
    assert np.abs(all_of_them - 0.25).max() < 0.1


def test_the_mean_mix_follows_the_dirichlet_distribution():
    """A component of Dir(a, ..., a) has the variance (C - 1) / C^2 / (C a + 1)."""
    alpha, num_classes = 0.5, 4
    divisions = (shares_by_class(LABELS, 10, alpha=alpha, seed=seed) for seed in range(300))
    first = [mixes(LABELS, shares[:1]) for shares in divisions]
    expected = (num_classes - 1) / num_classes**2 / (num_classes * alpha + 1)
    assert np.var(np.concatenate(first)) == pytest.approx(expected, rel=0.15)


def test_rare_classes_are_rare_in_most_shares():
    labels = np.repeat([0, 1], [950, 50])
    mix = mixes(labels, shares_by_class(labels, 5, alpha=1e4, seed=0))
    assert np.abs(mix[:, 1] - 0.05).max() < 0.05


# the order


def test_the_shares_stay_and_their_order_changes_from_epoch_to_epoch():
    order = Skewed(LABELS, alpha=0.1, num_shares=3, seed=1)
    ends = order.cuts(0)
    assert (ends, order.cuts(7)) == ([334, 667, 1000], ends)
    first, later = (order.rows(epoch, np.arange(1000)) for epoch in (0, 1))
    assert not np.array_equal(first, later)
    for start, stop in zip([0, *ends], ends, strict=False):
        assert set(first[start:stop]) == set(later[start:stop])


def test_a_worker_gets_the_same_order_as_the_driver():
    order = Skewed(LABELS, alpha=0.1, num_shares=3, seed=1)
    expected = order.rows(2, np.arange(1000))
    copy = pickle.loads(pickle.dumps(order))
    assert np.array_equal(copy.rows(2, np.arange(1000)), expected)


def test_the_name_of_the_order_tells_a_resumed_run_with_other_shares():
    names = {Skewed(LABELS, alpha=a, num_shares=n, seed=0).name for a in (0.1, 1) for n in (2, 3)}
    assert len(names) == 4


def test_the_note_says_how_much_the_shares_differ():
    note = Skewed(np.array([0] * 5 + [1] * 5), alpha=1e-3, num_shares=2, seed=0).note
    assert note.endswith("the most frequent class of a share has 100% to 100% of it")


# who claims what


def shares_ledger(*ends):
    return Ledger(ends[-1], cuts=lambda epoch: ends)


def test_a_worker_claims_its_own_share_first_and_then_the_one_with_the_most_left():
    ledger = shares_ledger(4, 10, 20)
    assert ledger.claim("w0", 3, share=0) == (0, [(0, 3)])
    assert ledger.claim("w1", 4, share=1) == (0, [(4, 8)])
    assert ledger.claim("w0", 3, share=0) == (0, [(3, 4), (10, 12)])
    assert ledger.claim("w2", 9, share=2) == (0, [(12, 20), (8, 9)])
    assert ledger.claim("w0", 3, share=0) == (0, [(9, 10)])
    assert ledger.claim("w0", 2, share=0) == (1, [(0, 2)])


def test_what_a_lost_worker_had_claimed_returns_to_its_share():
    ledger = shares_ledger(4, 8)
    ledger.claim("w0", 3, share=0)
    ledger.claim("w1", 2, share=1)
    ledger.release(keep=("w1",))
    assert ledger.claim("w2", 4, share=0) == (0, [(0, 3), (3, 4)])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.booleans()), max_size=40))
def test_every_position_counts_once_whoever_comes_and_goes(calls):
    ledger, done = shares_ledger(5, 9, 20), Counter()
    for worker, count, is_lost in calls:
        epoch, spans = ledger.claim(f"w{worker}", count, share=worker)
        if is_lost:
            ledger.give_back(f"w{worker}")
            continue
        assert ledger.complete(f"w{worker}") == sum(stop - start for start, stop in spans)
        done.update((epoch, p) for start, stop in spans for p in range(start, stop))
    assert set(done.values()) <= {1}
    assert ledger.num_done_ever == len(done)


def test_the_coordinator_assigns_by_the_rank_that_a_worker_has_now():
    ledger = shares_ledger(10, 20, 30)
    coordinator = make_coordinator(ledger=ledger, workers=("w0", "w1", "w2"), skew=0.1)
    assert [enter(coordinator, w).claims[0].spans for w in ("w2", "w0", "w1")] == [
        [(20, 30)], [(0, 10)], [(10, 20)],
    ]  # fmt: skip
    change(coordinator, 2, "w1", "w2", "w3")
    assert enter(coordinator, "w3", generation=2).claims[0].spans == [(0, 10)]


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd", "sync-sgd"])
def test_workers_train_their_shares_and_every_sample_once_an_epoch(method):
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 40)
    images = ImageSet(random.integers(0, 256, (120, 1, 4, 4), np.uint8), labels, ("a", "b", "c"))
    run = Ensemble(config_of(method, skew=0.01), num_workers=2, images=images)
    seen, prepare = [], run.batches.prepare

    def recorded(batch, rows, epoch):
        seen.extend((threading.get_ident(), epoch, row) for row in rows.tolist())
        return prepare(batch, rows, epoch)

    run.batches.prepare = recorded
    run.join().run()
    assert Counter((epoch, row) for _, epoch, row in seen) == Counter(
        (epoch, row) for epoch in range(2) for row in range(120)
    )
    if method == "async-easgd":  # the faster worker also takes from the share of the other
        return
    first, second = (Counter(labels[row] for t, _, row in seen if t == thread)
                     for thread in dict.fromkeys(t for t, _, _ in seen))  # fmt: skip
    shares = shares_by_class(labels, 2, alpha=0.01, seed=0)
    assert {tuple(sorted(c.items())) for c in (first, second)} == {
        tuple(sorted(Counter({k: 2 * v for k, v in Counter(labels[s]).items()}.items())))
        for s in shares
    }


# what has no classes


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (TableSet({"x": np.zeros((8, 2), np.float32)}), "these have no classes: name the column"),
        (
            TableSet({"x": np.zeros(8, np.float32), "y": np.zeros(8, np.float32)}, target="y"),
            "these have no classes: name the column",
        ),
    ],
)
def test_samples_without_classes_are_refused(data, sentence):
    with pytest.raises(ConfigError, match=f"input.skew needs samples in memory .*{sentence}"):
        order_of(data, config_of())


def test_streamed_samples_and_texts_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    with pytest.raises(ConfigError, match=r"no classes in memory: .* --input.stream never"):
        order_of(load(str(tmp_path / "a.txt"), input=InputConfig(context=4)).train, config_of())


def test_a_table_is_divided_by_the_column_that_is_predicted():
    labels = np.repeat(np.arange(2), 10)
    table = TableSet({"x": np.zeros(20, np.float32), "y": labels}, "y", ("no", "yes"))
    assert order_of(table, config_of()).name == "in 2 shares by input.skew 0.1"
    assert order_of(table, config_of(skew=None)).name == "in memory"


@pytest.mark.parametrize("workers", [0, 1])
def test_one_worker_has_nobody_to_differ_from(workers):
    with pytest.raises(ConfigError, match=r"input.skew needs at least 2 workers"):
        resolve(config_of(workers=workers))


@pytest.mark.parametrize("skew", [0.0, -1.0, float("nan")])
def test_the_concentration_is_positive(skew):
    with pytest.raises(ConfigError, match=r"input.skew must be a positive number"):
        InputConfig(skew=skew)
