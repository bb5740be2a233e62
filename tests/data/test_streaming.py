"""Streamed Parquet: each row is read once, memory is bounded, and errors name bad rows."""

import io
import json
import pickle
import threading
from collections import Counter
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ensembles import Ensemble, linear, tiny_images
from PIL import Image

from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.config import InputConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.reports import Losses
from raydl.core.strategy import Round
from raydl.core.worker_group import Collected
from raydl.data import Batches, Dataset, load
from raydl.data.ledger import Claim, Ledger, share_round
from raydl.data.loader import Feed
from raydl.data.order import InBlocks
from raydl.data.part import Part, Streamed
from raydl.data.pieces import Piece
from raydl.data.row_groups import GroupCache
from raydl.data.schema import Feature
from raydl.data.values import Decoder
from raydl.errors import ConfigError, DataError
from raydl.metrics import TimeParts
from raydl.tasks import Classification, evaluate

STREAMED = InputConfig(stream="always", shuffle_samples=8)


def encoded(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def pictures(count, *, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4), dtype=np.uint8)


def write_pictures(path, cells, labels, *, rows_per_group=5, names=("0", "1", "2")):
    features = {"label": {"names": list(names)}} if names else {}
    table = pa.table({"image": [{"bytes": c, "path": None} for c in cells], "label": labels})
    hub = json.dumps({"info": {"features": features}})
    table = table.replace_schema_metadata({"huggingface": hub})
    pq.write_table(table, path, row_group_size=rows_per_group)


@pytest.fixture
def folder(tmp_path):
    """23 training pictures in row groups of 5, and 7 test pictures."""
    labels = np.arange(23) % 3
    write_pictures(tmp_path / "train-0.parquet", [encoded(p) for p in pictures(23)], labels)
    test = [encoded(p) for p in pictures(7, seed=1)]
    write_pictures(tmp_path / "test-0.parquet", test, np.arange(7) % 3)
    return tmp_path


# the same samples as in memory


def test_a_streamed_set_holds_the_same_samples_as_in_memory(folder):
    whole, streamed = load(str(folder)), load(str(folder), input=STREAMED)
    assert streamed.train.is_streamed
    assert not whole.train.is_streamed
    assert streamed.train.shape == whole.train.shape
    for part in ("train", "test"):
        ours, theirs = getattr(streamed, part), getattr(whole, part)
        assert ours.num_samples == theirs.num_samples
        rows = np.random.default_rng(0).permutation(ours.num_samples)
        for got, expected in zip(ours.fetch(rows), theirs.fetch(rows), strict=True):
            assert torch.equal(got, expected)


def test_a_streamed_set_is_pickled_without_its_cache(folder):
    streamed = load(str(folder), input=STREAMED).train
    rows = np.arange(23)
    before = streamed.fetch(rows)
    again = pickle.loads(pickle.dumps(streamed))
    assert not again._groups._cached
    assert torch.equal(again.fetch(rows)[0], before[0])


@pytest.mark.parametrize(("side", "by"), [(128, "decode"), (127, "MainThread")])
def test_threads_decode_large_pictures_and_the_caller_decodes_small_ones(
    tmp_path, monkeypatch, side, by
):
    cells = [encoded(np.zeros((side, side), np.uint8))] * 6
    for part in ("train", "test"):
        write_pictures(tmp_path / f"{part}-0.parquet", cells, np.arange(6) % 3)
    train, threads = load(str(tmp_path), input=STREAMED).train, []

    decode = Decoder.decode

    def decode_and_note(decoder, image):
        threads.append(threading.current_thread().name)
        return decode(decoder, image)

    monkeypatch.setattr(Decoder, "decode", decode_and_note)
    train.fetch(np.arange(6))
    assert len(threads) == 6
    assert all(thread.startswith(by) for thread in threads)


def test_a_set_whose_bad_samples_are_skipped_is_streamed(folder):
    assert load(str(folder), input=InputConfig(on_bad_sample="skip")).train.is_streamed
    with pytest.raises(ConfigError, match=r"input.stream must be auto or always with .* skip"):
        InputConfig(stream="never", on_bad_sample="skip")


def test_a_set_is_streamed_when_it_would_take_more_memory_than_allowed(folder):
    num_bytes = 23 * 16
    for limit, is_streamed in ((num_bytes, False), (num_bytes - 1, True)):
        config = InputConfig(max_memory_bytes=limit)
        assert load(str(folder), input=config).train.is_streamed == is_streamed


def test_without_a_test_part_a_tenth_of_the_row_groups_becomes_the_test_set(tmp_path):
    cells = [encoded(p) for p in pictures(100)]
    write_pictures(tmp_path / "all.parquet", cells, np.arange(100) % 3)
    data = load(str(tmp_path), input=STREAMED)
    assert (data.train.num_samples, data.test.num_samples) == (90, 10)
    seen = torch.cat([data.train.fetch(np.arange(90))[0], data.test.fetch(np.arange(10))[0]])
    assert sorted(seen.flatten(1).tolist()) == sorted(pictures(100).reshape(100, -1).tolist())


def test_a_single_row_group_cannot_be_split(tmp_path):
    write_pictures(tmp_path / "all.parquet", [encoded(p) for p in pictures(5)], [0] * 5)
    with pytest.raises(DataError, match=r"only one row group: too few to split; name files train-"):
        load(str(tmp_path), input=STREAMED)


def test_classes_without_names_are_counted_from_the_labels_alone(tmp_path):
    cells = [encoded(p) for p in pictures(12)]
    write_pictures(tmp_path / "train-0.parquet", cells, [0, 4] * 6, names=None)
    assert load(str(tmp_path), input=STREAMED).train.shape.num_classes == 5


# the order


def test_every_row_has_one_position_per_epoch_and_another_in_the_next_epoch():
    order = InBlocks([5, 5, 5, 5, 3], 0, block_samples=8)
    epochs = [order.rows(e, np.arange(23)).tolist() for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    assert epochs[0] != epochs[1]
    assert (
        InBlocks([5, 5, 5, 5, 3], 0, block_samples=8).rows(1, np.arange(23)).tolist() == epochs[1]
    )


def test_a_block_is_whole_row_groups_and_mixes_their_rows():
    order = InBlocks([10] * 12, 3, block_samples=30)
    rows = order.rows(0, np.arange(120))
    assert list(order.cuts(0)) == [30, 60, 90, 120]
    for start in range(0, 120, 30):
        groups = rows[start : start + 30] // 10
        assert len(set(groups.tolist())) == 3
        assert groups.tolist() != sorted(groups.tolist())
    assert pickle.loads(pickle.dumps(order)).rows(0, np.arange(120)).tolist() == rows.tolist()


@pytest.mark.parametrize("block_samples", [1, 7, 1000])
def test_blocks_hold_the_requested_samples_or_one_row_group(block_samples):
    sizes = np.random.default_rng(0).integers(1, 20, 40)
    cuts = InBlocks(sizes, 0, block_samples=block_samples).cuts(2)
    assert cuts[-1] == sizes.sum()
    widths = np.diff([0, *cuts])
    assert (widths > 0).all()
    assert widths.max() < block_samples + 2 * 20


# reading


class CountedGroups(Piece):
    """Row groups of given sizes that record their reads, and can delay or fail them."""

    name = "counted"
    schema: ClassVar = {"x": Feature("number", "float32")}

    def __init__(self, sizes):
        self.groups, self.num_rows = sizes, sum(sizes)
        self.reads = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.fails = False

    def read_group(self, number, names):
        assert self.may_read.wait(10)
        self.reads.append(number)
        if self.fails:
            raise DataError(f"row group {number}", "cannot be read")
        return {"x": np.full(self.groups[number], number, np.float32)}

    def where(self, row):
        return f"row {row}"


def cached(groups):
    """Return a cache of the numbers of groups."""
    return GroupCache(groups.groups, lambda number: groups.read_group(number, ["x"]) and number)


def test_a_row_group_is_read_once_while_prefetched_and_then_dropped():
    groups = CountedGroups([4] * 6)
    cache = cached(groups)
    cache.prefetch(np.arange(8))
    assert [cache.get(n) for n in (0, 1, 0, 1)] == [0, 1, 0, 1]
    assert groups.reads == [0, 1]
    cache.prefetch(np.arange(8, 16))
    assert cache.get(2) == 2
    assert sorted(cache._cached) == [2, 3]


def test_a_row_group_that_could_not_be_read_is_read_again_in_the_next_round():
    groups = CountedGroups([2] * 5)
    groups.fails = True
    cache = cached(groups)
    cache.prefetch(np.arange(2))
    for _ in range(2):  # both samples of the group, which is read once
        with pytest.raises(DataError):
            cache.get(0)
    assert groups.reads == [0]
    groups.fails = False
    cache.prefetch(np.arange(2))
    assert cache.get(0) == 0


def test_few_row_groups_that_were_not_prefetched_are_cached():
    cache = cached(CountedGroups([1] * 50))
    for number in range(50):
        assert cache.get(number) == number
    assert len(cache._cached) <= 3


def test_memory_is_bounded_by_the_blocks_that_a_worker_reserves():
    groups = CountedGroups([10] * 40)
    order = InBlocks(groups.groups, 0, block_samples=20)
    ledger, cache = Ledger(400, cuts=order.cuts), cached(groups)
    most = 0
    while ledger.epoch < 2:
        epoch, spans = ledger.claim("w0", 7)
        held = [(epoch, span) for span in spans] + ledger.reserved_by("w0")
        rows = [order.rows(e, np.arange(*span)) for e, span in held]
        cache.prefetch(np.concatenate(rows))
        most = max(most, len(cache._cached))
        ledger.complete("w0")
    assert most <= 6  # the last, the current and the next block: two groups each


def test_a_worker_reads_its_own_row_groups_and_not_those_of_the_others():
    groups = CountedGroups([10] * 40)
    order = InBlocks(groups.groups, 0, block_samples=20)
    ledger = Ledger(400, cuts=order.cuts)
    caches = {w: cached(groups) for w in ("w0", "w1", "w2")}
    while ledger.epoch < 1:
        for worker_id, cache in caches.items():
            epoch, spans = ledger.claim(worker_id, 7)
            held = [span for e, span in ledger.reserved_by(worker_id) if e == epoch == 0]
            positions = [np.arange(*span) for span in [*spans, *held]]
            cache.prefetch(order.rows(epoch, np.concatenate(positions)))
            for number in np.unique(cache.locate(order.rows(epoch, positions[0]))[0]).tolist():
                cache.get(number)
            ledger.complete(worker_id)
    assert set(groups.reads) == set(range(40))
    assert len(groups.reads) < 2 * 40  # workers share groups between two epochs


# the feed


def test_batches_of_this_round_and_the_next_are_fetched_ahead(folder):
    data, parts = load(str(folder), input=STREAMED), TimeParts()
    feed = Feed(
        Batches(data.train, lambda batch, rows, epoch: batch),
        data.train.order(0),
        device=torch.device("cpu"),
        time_parts=parts,
    )
    steps = [np.arange(0, 4), np.arange(4, 8)]
    feed.prefetch([(0, positions) for positions in steps], [(0, (8, 16))])
    assert len(feed._prefetched) == 4
    order = data.train.order(0)
    for positions in (*steps, np.arange(8, 12)):
        got = feed.batch(0, positions)
        assert torch.equal(got[0], data.train.fetch(order.rows(0, positions))[0])


def test_each_batch_is_fetched_once_over_several_rounds(folder):
    data, fetched = load(str(folder), input=STREAMED).train, []
    fetch = data.fetch_readable

    def fetch_and_note(rows):
        fetched.append(tuple(rows.tolist()))
        return fetch(rows)

    data.fetch_readable = fetch_and_note
    train(Dataset(data, data, ""), num_workers=1)
    assert len(fetched) == len(set(fetched))
    order = data.order(0)
    needed = [row for epoch in (0, 1) for row in order.rows(epoch, np.arange(23)).tolist()]
    beyond = Counter(row for batch in fetched for row in batch)
    beyond.subtract(needed)
    assert min(beyond.values()) == 0
    assert beyond.total() <= 4 * 3  # the first batches of an epoch that never begins


def test_batches_that_other_workers_have_claimed_are_not_fetched(folder):
    data, fetched, may_fetch = load(str(folder), input=STREAMED).train, [], threading.Event()
    fetch = data.fetch_readable

    def slow(rows):
        fetched.append(rows.tolist())
        assert may_fetch.wait(60)
        return fetch(rows)

    data.fetch_readable = slow
    order = data.order(0)
    feed = Feed(
        Batches(data, lambda batch, rows, epoch: batch),
        order,
        device=torch.device("cpu"),
        time_parts=TimeParts(),
    )
    feed.prefetch([(0, np.arange(0, 4))], [(0, (4, 16))])
    feed.prefetch([(0, np.arange(0, 4))], [(0, (16, 20))])  # other workers got the rest
    may_fetch.set()
    for positions in (np.arange(0, 4), np.arange(16, 20)):
        feed.batch(0, positions)
    assert fetched == [order.rows(0, np.arange(start, start + 4)).tolist() for start in (0, 16)]


def most_groups_cached(
    groups, *, num_workers=1, block_samples, period, batch_size=20, num_epochs=2
):
    """Train workers in turn, like a synchronous method; return the most groups that one cached."""
    most = 0
    part = Part((groups,), {"x": "x"}, groups.schema)
    tables = [
        Streamed(part, shuffle_samples=block_samples, num_threads=1) for _ in range(num_workers)
    ]
    order = tables[0].order(0)
    feeds = [
        Feed(
            Batches(table, lambda batch, rows, epoch: batch),
            order,
            device=torch.device("cpu"),
            time_parts=TimeParts(),
        )
        for table in tables
    ]
    ledger = Ledger(order.num_samples, cuts=order.cuts)
    while ledger.epoch < num_epochs:
        rounds = [Round([], 0) for _ in feeds]
        while (num_steps := rounds[0].num_steps) < period:  # a round may span epochs
            share = share_round(
                ledger.num_free,
                max_steps=[period - num_steps] * num_workers,
                batch_size=batch_size,
            )
            for i, (round, count) in enumerate(zip(rounds, share.counts, strict=True)):
                round.claims.append(Claim(*ledger.claim(f"w{i}", count), share.num_steps[i]))
        for i, (feed, round) in enumerate(zip(feeds, rounds, strict=True)):
            feed.prefetch(round.steps(), ledger.reserved_by(f"w{i}"))
            for epoch, positions in round.steps():
                batch = feed.batch(epoch, positions)
                rows = order.rows(epoch, positions)
                assert (
                    batch["x"].tolist()
                    == np.searchsorted(np.cumsum(groups.groups), rows, "right").tolist()
                )
                most = max(most, len(tables[i]._groups._cached))
            ledger.complete(f"w{i}")
    return most


@pytest.mark.parametrize("period", [1, 50, 200])
def test_row_groups_in_memory_do_not_grow_with_the_period(period):
    groups = CountedGroups([20] * 400)
    most = most_groups_cached(groups, block_samples=40, period=period)
    assert most <= 14  # two groups each of the blocks of five steps and of two ahead
    assert len(groups.reads) <= 1.1 * 2 * 400


def test_the_first_row_group_is_read_no_more_often_than_others():
    groups = CountedGroups([20] * 100)
    most_groups_cached(groups, block_samples=40, period=2)
    assert groups.reads.count(0) <= 1 + 2


def test_workers_that_help_at_the_end_of_an_epoch_prefetch_their_rows():
    groups = CountedGroups([20] * 100)
    unexpected = []
    get = GroupCache.get

    def get_and_note(cache, number):
        if cache._prefetched and number not in cache._prefetched:
            unexpected.append(number)
        return get(cache, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupCache, "get", get_and_note)
        most_groups_cached(groups, num_workers=4, block_samples=400, period=1)
    assert not unexpected


def test_a_data_set_in_memory_starts_no_thread():
    images = tiny_images()
    feed = Feed(
        Batches(images, lambda batch, rows, epoch: batch),
        images.order(0),
        device=torch.device("cpu"),
        time_parts=TimeParts(),
    )
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    feed.prefetch([(0, np.arange(4))], [])
    feed.batch(0, np.arange(4))
    assert not set(threading.enumerate()) - before


# whole runs


def train(data, method="sync-easgd", *, num_workers=2, seen=None):
    """Train two epochs in threads; add the (epoch, row) of each trained sample to ``seen``."""

    def prepare(batch, rows, epoch):
        if seen is not None:
            seen.extend((epoch, row) for row in rows.tolist())
        return batch[0].float().div(255), batch[1]

    config = TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(epochs=2, batch_size=3),
        optimizer=OptimizerConfig(lr=0.01),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=data.train)
    ensemble.batches.prepare = prepare
    ensemble.join().run()
    return ensemble


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "async-easgd", "original-easgd"])
def test_every_row_of_an_epoch_is_trained_on_once(folder, method, num_workers):
    data, seen = load(str(folder), input=STREAMED), []
    train(data, method, num_workers=num_workers, seen=seen)
    assert sorted(seen) == [(e, row) for e in (0, 1) for row in range(23)]


def test_a_synchronous_run_on_a_streamed_set_gives_the_same_bits_again(folder):
    data = load(str(folder), input=STREAMED)
    first, second = (train(data).newest.weights for _ in range(2))
    assert np.array_equal(first, second)


def whole_run(data, method, num_workers):
    config = TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(epochs=2, batch_size=3),
        optimizer=OptimizerConfig(lr=0.01),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=data.train)
    ensemble.batches.prepare = lambda batch, rows, epoch: (batch[0].float().div(255), batch[1])
    return ensemble


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd"])
def test_a_streamed_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    tmp_path, method, num_workers
):
    cells = [encoded(p) for p in pictures(120)]
    write_pictures(tmp_path / "train-0.parquet", cells, np.arange(120) % 3)
    write_pictures(tmp_path / "test-0.parquet", cells[:7], np.arange(7) % 3)
    data = load(str(tmp_path), input=STREAMED)
    uninterrupted = whole_run(data, method, num_workers).join()
    uninterrupted.run()

    stopped = whole_run(data, method, num_workers).join()
    stopped.run(4)
    strategy = stopped.workers[0].runner.strategy
    snapshot = strategy.snapshot(is_kept=True, local_step=stopped.workers[0].local_step)
    states = {worker.worker_id: worker._state_dict() for worker in stopped.workers}
    checkpoint = checkpoint_of(Collected(snapshot, states), stopped.flat, seconds=0.0)
    assert checkpoint.state["ledger"]["reserved"]

    resumed = whole_run(data, method, num_workers)
    resumed.join(snapshot_of(checkpoint, stopped.flat), states).run()
    assert np.array_equal(resumed.newest.weights, uninterrupted.newest.weights)


def test_workers_of_every_strategy_reserve_different_blocks(folder):
    """The first round of a worker lies in one block, and it has a reservation after that."""
    data = load(str(folder), input=STREAMED)
    cuts = data.train.order(0).cuts(0)
    for method in ("sync-easgd", "async-easgd"):
        ensemble = whole_run(data, method, 2).join()
        rounds = [worker.runner.strategy.next_round(0) for worker in ensemble.workers]
        spans = [round.claims[0].spans for round in rounds]
        blocks = [{int(np.searchsorted(cuts, a, "right")) for a, _ in s} for s in spans]
        assert blocks[0] != blocks[1]
        assert all(round.ahead for round in rounds)


# bad samples


def bad_folder(tmp_path, how):
    cells, labels = [encoded(p) for p in pictures(23)], (np.arange(23) % 3).tolist()
    if how == "cut off":
        cells[17] = cells[17][:-25]
    elif how == "null":
        cells[17] = None
    elif how == "label":
        labels[17] = 9
    elif how == "no label":
        labels[17] = None
    elif how == "size":
        cells[17] = encoded(np.zeros((5, 4), np.uint8))
    write_pictures(tmp_path / "train-0.parquet", cells, labels)
    test = [encoded(p) for p in pictures(7, seed=1)]
    write_pictures(tmp_path / "test-0.parquet", test, np.arange(7) % 3)
    return tmp_path


SENTENCES = {
    "cut off": "row group 3, row 2: the image does not decode",
    "null": "row group 3, row 2: it holds no image",
    "label": "row group 3, row 2: column 'label' is 9; labels must be 0 to 2",
    "no label": "row group 3, row 2: column 'label' is null",
    "size": "row group 3, row 2: the image is 1x5x4, but the first one is 1x4x4",
}


@pytest.mark.parametrize("how", SENTENCES)
def test_a_bad_sample_is_named_by_file_row_group_and_row(tmp_path, how):
    data = load(str(bad_folder(tmp_path, how)), input=STREAMED)
    data.train.fetch(np.arange(17))
    with pytest.raises(DataError, match=SENTENCES[how]) as caught:
        data.train.fetch(np.arange(15, 20))
    assert "train-0.parquet" in str(caught.value)


@pytest.mark.parametrize("how", SENTENCES)
def test_a_bad_sample_can_be_skipped_and_is_counted(tmp_path, how):
    skips = InputConfig(stream="always", shuffle_samples=8, on_bad_sample="skip")
    data = load(str(bad_folder(tmp_path, how)), input=skips)
    ensemble = train(data)
    left_out = [worker.report().left_out for worker in ensemble.workers]
    assert sum(found.num_samples for found in left_out) == 2  # once per epoch
    assert any(SENTENCES[how] in found.last for found in left_out)
    assert ensemble.newest.progress.num_samples == 2 * 23


@pytest.mark.parametrize("bad", [None, b"no picture", "cut off"])
def test_the_first_sample_may_be_the_bad_one(tmp_path, bad):
    cells, labels = [encoded(p) for p in pictures(23)], np.arange(23) % 3
    cells[0] = cells[0][:-25] if bad == "cut off" else bad
    write_pictures(tmp_path / "train-0.parquet", cells, labels)
    write_pictures(tmp_path / "test-0.parquet", [encoded(p) for p in pictures(7)], labels[:7])
    with pytest.raises(DataError, match=r"row group 0, row 0: (it|the image) "):
        load(str(tmp_path), input=STREAMED)
    skips = InputConfig(stream="always", shuffle_samples=8, on_bad_sample="skip")
    data = load(str(tmp_path), input=skips)
    assert data.train.shape.input_shape == (1, 4, 4)
    batch, rows, problems = data.train.fetch_readable(np.arange(3))
    assert (len(batch[0]), rows.tolist(), len(problems)) == (2, [1, 2], 1)


def test_a_file_that_was_truncated_during_a_run_is_named(folder):
    data = load(str(folder), input=STREAMED)
    path = folder / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"train-0.parquet, row group 4: cannot be read"):
        data.train.fetch(np.array([22]))


def test_the_reported_loss_is_the_mean_over_the_trained_samples(tmp_path, monkeypatch):
    good = [encoded(p) for p in pictures(23)]
    cells = [cell if n in (0, 7, 20) else None for n, cell in enumerate(good)]
    write_pictures(tmp_path / "train-0.parquet", cells, np.arange(23) % 3)
    write_pictures(tmp_path / "test-0.parquet", good[:3], np.arange(3))
    skips = InputConfig(stream="always", shuffle_samples=8, on_bad_sample="skip")
    counts, add = [], Losses.add

    def add_and_note(losses, step, count, loss):
        counts.append(count)
        add(losses, step, count, loss)

    monkeypatch.setattr(Losses, "add", add_and_note)
    train(load(str(tmp_path), input=skips), num_workers=1)
    assert sum(counts) == 2 * 3


def test_scores_are_means_over_the_samples_that_can_be_read():
    task, model = Classification(linear), linear((1, 4, 4), 3)
    batch = (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))

    def batch_at(start, stop):
        return tuple(tensor[: 2 if start else 0] for tensor in batch)

    scores = evaluate(task, model, batch_at, num_samples=4, batch_size=2)
    whole = evaluate(task, model, lambda start, stop: batch, num_samples=2, batch_size=2)
    assert scores == whole
    with pytest.raises(DataError, match="the test set: holds 2 samples, none of which can be read"):
        evaluate(task, model, batch_at, num_samples=2, batch_size=2)


# tables


def write_table(path, count, *, rows_per_group=5, **columns):
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    table = {"x": list(x), "y": x.sum(1).astype(np.float64), "n": np.arange(count), **columns}
    pq.write_table(pa.table(table), path, row_group_size=rows_per_group)
    return x


@pytest.mark.parametrize("stream", ["always", "never"])
def test_a_table_of_numbers_is_a_batch_of_its_columns(tmp_path, stream):
    x = write_table(tmp_path / "train-0.parquet", 23)
    write_table(tmp_path / "test-0.parquet", 7)
    data = load(str(tmp_path), input=InputConfig(stream=stream))
    assert data.train.shape.columns == {"x": (3,), "y": (), "n": ()}
    rows = np.array([22, 0, 7])
    batch = data.train.fetch(rows)
    assert np.array_equal(batch["x"].numpy(), x[rows])
    assert [t.dtype for t in batch.values()] == [torch.float32, torch.float32, torch.int64]
    assert batch["n"].tolist() == [22, 0, 7]


def test_only_the_columns_that_are_named_are_read(tmp_path):
    write_table(tmp_path / "t.parquet", 30, note=["text"] * 30)
    data = load(str(tmp_path), input=InputConfig(stream="always", columns="x, y"))
    assert list(data.train.fetch(np.arange(3))) == ["x", "y"]
    assert (data.train.num_samples, data.test.num_samples) == (25, 5)


@pytest.mark.parametrize(
    ("columns", "named", "sentence"),
    [
        (
            {"note": ["text"] * 20},
            "",
            "column 'note' must hold numbers, got string; name the column to predict by --target",
        ),
        ({"z": [[1.0]] * 19 + [[1.0, 2.0]]}, "", "row 4: column 'z' has 2 values, but others 1"),
        ({"z": [1.0] * 19 + [None]}, "", "row group 3, row 4: column 'z' is null"),
        ({}, "x,w", "must have a column w, got x, y, n"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, columns, named, sentence):
    write_table(tmp_path / "t.parquet", 20, **columns)
    with pytest.raises(DataError, match=sentence):
        load(str(tmp_path), input=InputConfig(columns=named))
