"""A torch IterableDataset as training data: each position of an epoch counts once."""

import collections
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from clusters import cluster_environment
from ensembles import Ensemble
from programs import run_program
from torch.utils import data as torch_data

import raydl
from raydl.config import (
    InputConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.data import iterable_style
from raydl.data.iterable_style import from_iterable, is_iterable
from raydl.data.map_style import is_map_style
from raydl.errors import ConfigError, DataError
from raydl.tasks import ModelAndLoss

LENGTH = 24


def sample(number):
    x = torch.tensor([float(number), 1.0])
    return x, x.sum(0, keepdim=True)


class Numbers(torch_data.IterableDataset):
    """Samples 0, 1, …; each process that reads the set gets all of them."""

    def __init__(self, length=LENGTH, *, fails_at=None):
        self.length, self.fails_at = length, fails_at

    def __iter__(self):
        for number in self.numbers():
            if number == self.fails_at:
                raise ConnectionError(f"no answer for {number}")
            yield sample(number)

    def numbers(self):
        return range(self.length)


class SplitNumbers(Numbers):
    """A set whose processes read a part each, as in torch's documentation."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.read = []

    def numbers(self):
        info = torch_data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            self.read.append(number)
            yield number


class ShuffledNumbers(Numbers):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        return np.random.default_rng(self.epoch).permutation(self.length)


TEST = [sample(number) for number in range(4)]


def opened(stream, *, test=TEST, **settings):
    settings.setdefault("samples_per_epoch", LENGTH)
    return from_iterable(
        {"train": stream, "test": test}, TrainConfig(input=InputConfig(**settings))
    )


def in_workers(train, num_workers):
    """Return copies of the set, one for each worker."""
    copies = [pickle.loads(pickle.dumps(train)) for _ in range(num_workers)]
    for rank, copy in enumerate(copies):
        copy.take_shard(rank, num_workers, start=0)
    return copies


def next_numbers(train, count):
    """Return the numbers of the next samples."""
    batch = train.fetch(np.arange(count))
    inputs = batch["x"] if isinstance(batch, dict) else batch[0]
    return [int(number) for number in (inputs[:, 0] if inputs.ndim > 1 else inputs)]


# shards


@pytest.mark.parametrize("stream", [Numbers(), SplitNumbers(), ShuffledNumbers()])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_shards_of_the_workers_hold_each_sample_once(stream, num_workers):
    workers = in_workers(opened(stream).train, num_workers)
    seen = [next_numbers(worker, LENGTH // num_workers) for worker in workers]
    assert sorted(itertools.chain(*seen)) == list(range(LENGTH))
    assert torch_data.get_worker_info() is None


def test_a_stream_that_splits_itself_reads_its_part_alone():
    worker = in_workers(opened(SplitNumbers()).train, 4)[1]
    assert next_numbers(worker, 6) == [1, 5, 9, 13, 17, 21]
    assert worker._loaded.dataset.read[-6:] == [1, 5, 9, 13, 17, 21]


class Files(Numbers):
    """A set that reads whole files; each process has a part of them."""

    def numbers(self):
        info = torch_data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for file in range(first, 2, step):
            yield from range(file * 12, file * 12 + 12)


def test_workers_without_a_part_of_their_own_read_a_share_of_the_whole_stream():
    first, second, third = in_workers(opened(Files()).train, 3)
    assert next_numbers(first, 12) == list(range(12))
    assert next_numbers(second, 12) == list(range(12, 24))
    assert next_numbers(third, 9) == [2, 5, 8, 11, 14, 17, 20, 23, 2]


@pytest.mark.parametrize(("num_shards", "num_parts"), [(2, 3), (3, 1), (1, 4)])
def test_each_part_is_in_one_shard_and_every_shard_has_early_parts(num_shards, num_parts):
    shards = [iterable_style._Shard(index, num_shards) for index in range(num_shards)]
    parts = [[shard.part(i, num_parts).index for i in range(num_parts)] for shard in shards]
    assert sorted(itertools.chain(*parts)) == list(range(num_shards * num_parts))
    assert [min(of_shard) for of_shard in parts] == list(range(num_shards))


class OpenedOnce(Numbers):
    """A set that opens its file at the first sample and cannot be pickled afterwards."""

    file = None

    def __iter__(self):
        self.file = threading.Lock()  # no handle can be pickled
        return super().__iter__()


def test_a_stream_that_opens_its_file_at_the_first_sample_can_be_sent_to_workers():
    (worker,) = in_workers(opened(OpenedOnce()).train, 1)
    assert next_numbers(worker, 2) == [0, 1]


def test_a_shard_starts_again_at_its_end():
    worker = in_workers(opened(Numbers(5)).train, 2)[1]
    assert next_numbers(worker, 5) == [1, 3, 1, 3, 1]


def test_each_pass_over_a_shard_has_the_order_of_its_epoch():
    worker = in_workers(opened(ShuffledNumbers()).train, 1)[0]
    orders = [next_numbers(worker, LENGTH) for _ in range(2)]
    expected = [np.random.default_rng(epoch).permutation(LENGTH).tolist() for epoch in range(2)]
    assert orders == expected
    worker.take_shard(0, 2, start=7)
    assert next_numbers(worker, 3) == np.random.default_rng(7).permutation(LENGTH)[:6:2].tolist()


def test_a_worker_continues_its_shard_and_begins_a_new_shard_at_its_start():
    worker = in_workers(opened(Numbers()).train, 2)[0]
    assert next_numbers(worker, 3) == [0, 2, 4]
    worker.take_shard(0, 2, start=5)
    assert next_numbers(worker, 2) == [6, 8]
    worker.take_shard(1, 3, start=1)
    assert next_numbers(worker, 2) == [1, 4]


def test_samples_that_the_driver_reads_for_its_checks_are_trained_too():
    train = opened(Numbers()).train
    assert next_numbers(train, 2) == [1, 2]
    train.take_shard(0, 1, start=0)
    assert next_numbers(train, 2) == [0, 1]


def doubled(samples):
    return torch.stack([2 * x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_the_collate_fn_of_a_dataloader_is_used():
    train = opened(torch_data.DataLoader(Numbers(), collate_fn=doubled)).train
    assert train.fetch(np.arange(2))[0].tolist() == [[2, 2], [4, 2]]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*not available, or .*:UserWarning")
def test_the_processes_of_a_dataloader_share_a_shard_and_restart_it():
    train = opened(torch_data.DataLoader(ShuffledNumbers(64), num_workers=2)).train
    worker = in_workers(train, 2)[1]
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(64).reshape(-1, 4)  # a column per process
        assert sorted(next_numbers(worker, 32)) == sorted(order[:, 1::2].flatten().tolist())
    worker._loader = None  # ends its processes


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*not available, or .*:UserWarning")
def test_an_error_in_a_loading_process_is_reported_in_one_sentence():
    train = opened(torch_data.DataLoader(Numbers(64, fails_at=40), num_workers=1)).train
    (worker,) = in_workers(train, 1)
    with pytest.raises(DataError, match="failed after 40 samples: ConnectionError: no answer") as e:
        next_numbers(worker, 64)
    assert isinstance(e.value.__cause__, ConnectionError)


@pytest.mark.processes  # its import takes seconds
def test_a_hugging_face_stream_is_split_and_shuffled_by_the_library(tmp_path):
    code = "import sys, raydl.data.iterable_style; assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    import datasets

    rows = datasets.Dataset.from_dict({"x": list(range(LENGTH)), "y": [[1.0, 2.0]] * LENGTH})
    stream = rows.to_iterable_dataset(num_shards=4)
    test = list(stream.with_format("torch").take(3))
    for num_workers in (1, 2, 3):
        workers = in_workers(opened(stream, test=test).train, num_workers)
        seen = [next_numbers(worker, LENGTH // num_workers) for worker in workers]
        assert sorted(itertools.chain(*seen)) == list(range(LENGTH))
    train = opened(stream.shuffle(seed=0, buffer_size=8), test=test).train
    assert train.fetch(np.arange(3))["y"].shape == (3, 2)
    (worker,) = in_workers(train, 1)
    first, second = next_numbers(worker, LENGTH), next_numbers(worker, LENGTH)
    assert sorted(first) == sorted(second) == list(range(LENGTH))
    assert first != second


# an epoch


def test_an_epoch_counts_its_samples_once_while_workers_read_their_shards():
    seen = collections.Counter()

    def loss(model, batch):
        seen.update(int(number) for number in batch[0][:, 0])
        return torch.nn.functional.mse_loss(model(batch[0] / LENGTH), batch[1] / LENGTH)

    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(epochs=3, batch_size=2),
        input=InputConfig(samples_per_epoch=LENGTH),
    )
    train = from_iterable({"train": Numbers(), "test": TEST}, config).train
    task = ModelAndLoss(lambda: torch.nn.Linear(2, 1), loss)
    ensemble = Ensemble(config, num_workers=2, images=train, task=task)
    for worker in ensemble.workers:  # each process has its own copy of the set
        worker._feed = type(worker._feed)(
            type(ensemble.batches)(pickle.loads(pickle.dumps(train)), ensemble.batches.prepare),
            ensemble.job.order, device=torch.device("cpu"), time_parts=worker.parts,
        )  # fmt: skip
    ensemble.join().run()
    assert ensemble.newest.progress.num_samples == 3 * LENGTH
    assert seen == dict.fromkeys(range(LENGTH), 3)


def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0] / LENGTH), batch[1] / LENGTH)


def trainer_of(data, folder, *, samples_per_epoch=LENGTH, **training):
    return raydl.Trainer(
        lambda: torch.nn.Linear(2, 1),
        data,
        scaling=ScalingConfig(num_workers=0),
        training=TrainingConfig(batch_size=6, **training),
        optimizer=OptimizerConfig(lr=0.1),
        input=InputConfig(samples_per_epoch=samples_per_epoch),
        run=RunConfig(run_dir=str(folder), progress="plain"),
        loss=mse,
    )


def test_a_run_learns_from_a_stream_and_logs_what_an_epoch_means(tmp_path, capsys):
    trainer = trainer_of({"train": Numbers(), "test": TEST}, tmp_path / "run", epochs=40)
    result = trainer.fit()
    assert trainer.config.data == "Numbers"
    assert result.metrics["samples"] == 40 * LENGTH
    assert result.metrics["center_loss"] < 0.05
    sentence = "Numbers is iterable: an epoch is 24 of its samples; when workers come or go and"
    assert sentence in capsys.readouterr().out


def test_a_stream_with_a_length_needs_no_number_of_samples(tmp_path):
    class Counted(Numbers):
        def __len__(self):
            return self.length

    assert opened(Counted(9), samples_per_epoch=None).train.num_samples == 9
    with pytest.raises(DataError, match="Counted: holds no samples"):
        opened(Counted(0), samples_per_epoch=None)


def test_a_resumed_run_requires_the_same_number_of_samples_per_epoch(tmp_path):
    data = {"train": Numbers(), "test": TEST}
    trainer_of(data, tmp_path / "run", epochs=2).fit()
    more = trainer_of(data, tmp_path / "run", epochs=3)
    run = RunConfig(run_dir=str(tmp_path / "run"), progress="none", resume=True)
    more.config = raydl.TrainConfig(**{**vars(more.config), "run": run})
    assert more.fit().metrics["samples"] == 3 * LENGTH
    other = trainer_of(data, tmp_path / "run", samples_per_epoch=30, epochs=4)
    other.config = raydl.TrainConfig(**{**vars(other.config), "run": run})
    with pytest.raises(ConfigError, match="has 30 training samples, but the run began with 24"):
        other.fit()


# mistakes


class Once(Numbers):
    """A set whose __iter__ continues instead of starting again."""

    def __init__(self):
        super().__init__()
        self.iterator = None

    def __iter__(self):
        self.iterator = self.iterator or super().__iter__()
        return self.iterator


def test_a_stream_that_ends_or_fails_is_refused_in_one_sentence():
    with pytest.raises(DataError, match="Numbers: ended without a sample"):
        opened(Numbers(0))
    with pytest.raises(DataError, match="failed after 0 samples: ConnectionError: no answer for 0"):
        opened(Numbers(fails_at=0))
    (worker,) = in_workers(opened(Numbers(fails_at=5)).train, 1)
    with pytest.raises(DataError, match="after 5 samples: ConnectionError: no answer for 5") as e:
        next_numbers(worker, 9)
    assert isinstance(e.value.__cause__, ConnectionError)
    worker = in_workers(opened(Numbers(2)).train, 3)[2]
    with pytest.raises(DataError, match="Numbers: has fewer samples than the 3 workers"):
        next_numbers(worker, 1)
    once = opened(Once()).train
    with pytest.raises(DataError, match=r"gave no sample when it was started again after 24; each"):
        next_numbers(once, 30)


def test_the_driver_does_not_wait_forever_for_the_first_sample(monkeypatch):
    ends = threading.Event()

    class Hanging(Numbers):
        def __iter__(self):
            ends.wait(60)
            return super().__iter__()

    monkeypatch.setattr(iterable_style, "_FIRST_S", 0.05)
    with pytest.raises(DataError, match="Hanging: did not give 1 samples within 0 s"):
        opened(Hanging())
    ends.set()


def test_the_time_between_two_samples_does_not_count_as_waiting(monkeypatch):
    monkeypatch.setattr(iterable_style, "_FIRST_S", 10.0)
    train, now = opened(Numbers()).train, time.monotonic()
    monkeypatch.setattr(
        time, "monotonic", lambda: now + 3600.0
    )  # as if building the model took an hour
    assert len(next_numbers(train, 2)) == 2


class Words(Numbers):
    def __iter__(self):
        yield "a", "b"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Numbers(), r"Numbers: is iterable, so no test set can be split off; pass \{'train'"),
        ({"train": Numbers(), "eval": TEST}, "must be named train and test, got train, eval"),
        ({"train": Numbers(), "test": Numbers()}, "the test set, which must have a length; pass"),
        ({"train": TEST, "test": Numbers()}, "Numbers: cannot be the test set, which must have"),
        ({"train": Numbers(), "test": iter(TEST)}, "list_iterator: cannot be the test set, which"),
        ({"train": Numbers(), "test": [{"x": 1.0}]}, "trains on .* but tests on rows of x"),
        ({"train": Words(), "test": TEST}, "part 0 is tuple; pass a DataLoader with a collate_fn"),
        (
            {"train": torch_data.DataLoader(Numbers(), batch_size=None), "test": TEST},
            "must give single samples and its DataLoader a batch_size",
        ),
    ],
)
def test_a_mistake_in_the_data_is_reported_in_one_sentence(tmp_path, data, sentence):
    with pytest.raises(DataError, match=sentence) as error:
        trainer_of(data, tmp_path / "run").fit()
    assert "\n" not in str(error.value)


def test_settings_that_do_not_fit_a_stream_are_refused(tmp_path):
    data = {"train": Numbers(), "test": TEST}
    with pytest.raises(ConfigError, match=r"input\.samples_per_epoch must be set for Numbers"):
        trainer_of(data, tmp_path, samples_per_epoch=None).fit()
    with pytest.raises(ConfigError, match=r"training\.deterministic is not possible with Numbers"):
        trainer_of(data, tmp_path, deterministic=True).fit()
    with pytest.raises(ConfigError, match=r"input\.on_bad_sample must be stop with Numbers"):
        opened(Numbers(), on_bad_sample="skip")
    with pytest.raises(ConfigError, match=r"samples_per_epoch is for iterable data sets; unset it"):
        trainer_of({"train": TEST, "test": TEST}, tmp_path).fit()
    with pytest.raises(ConfigError, match=r"input\.samples_per_epoch must be 1 or more, got 0"):
        InputConfig(samples_per_epoch=0)


def test_iterable_data_sets_are_recognized():
    assert is_iterable(Numbers())
    assert is_iterable(torch_data.DataLoader(Numbers()))
    assert not any(map(is_iterable, ["digits", TEST, iter(TEST), {"train": Numbers()}, 5]))
    assert not any(map(is_map_style, [Numbers(), torch_data.DataLoader(Numbers())]))


SCRIPT = """
import itertools
import sys
import typing
import torch
from torch.utils.data import DataLoader, IterableDataset
import raydl

class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class Points(IterableDataset):  # in the script itself, which no worker can import
    def __iter__(self):
        for number in range(60):
            x = torch.tensor([float(number % 7), float(number % 5)])
            yield Point(x, x.sum(0, keepdim=True))

if __name__ == "__main__":
    result = raydl.Trainer(
        lambda: torch.nn.Linear(2, 1),
        {"train": DataLoader(Points(), num_workers=1), "test": list(itertools.islice(Points(), 9))},
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=raydl.OptimizerConfig(lr=0.02),
        method=raydl.MethodConfig(name="sync-easgd", period=2),
        scaling=raydl.ScalingConfig(num_workers=(1, 2)),
        training=raydl.TrainingConfig(epochs=100, batch_size=6),
        input=raydl.InputConfig(samples_per_epoch=60),
        run=raydl.RunConfig(run_dir=sys.argv[1], progress="plain", fault_plan=sys.argv[2]),
    ).fit()
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_after_a_worker_is_killed_the_others_go_on_with_new_shards_of_the_stream(
    four_cpus, tmp_path
):
    script, plan, run = (tmp_path / name for name in ("own.py", "plan.yaml", "run"))
    script.write_text(SCRIPT)
    fault = {"fault": "kill", "target": "rank 1", "at": "round 20"}
    plan.write_text(json.dumps({"faults": [fault]}))
    environment = {**os.environ, **cluster_environment(four_cpus.address)}
    done = run_program([str(script), str(run), str(plan)], environment=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((run / "result.json").read_text())
    assert len(result["faults_fired"]) == 1, done.stdout
    assert result["generations"] >= 2, done.stdout
    assert result["samples"] == 100 * 60
    assert result["center_loss"] < 1.0
