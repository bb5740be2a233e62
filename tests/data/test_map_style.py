"""A torch Dataset as training data: its samples are read by number, each once in an epoch."""

import collections
import errno
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from clusters import cluster_environment
from processes import command_of
from programs import run_program
from torch.utils import data as torch_data

import raydl
from raydl.config import (
    InputConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.data import DataShape
from raydl.data.ledger import Ledger
from raydl.data.loader import Batches, Feed, positions_of
from raydl.data.map_style import from_map_style, is_map_style
from raydl.errors import DataError, ShapeError, failure_of_machine
from raydl.metrics import TimeParts
from raydl.tasks import task_for

LENGTH = 50


class Points(torch_data.Dataset):
    """Points of a line; records the numbers of the points that were read."""

    def __init__(self, length=LENGTH, bad=()):
        self.length, self.bad, self.read = length, bad, []

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if number in self.bad:
            raise OSError(f"no file {number}")
        self.read.append(number)
        x = torch.tensor([float(number % 7), float(number % 5)])
        return x, x.sum()


class Pictures(torch_data.Dataset):
    """Light and dark pictures, like a data set of torchvision."""

    classes = ("dark", "light")

    def __len__(self):
        return LENGTH

    def __getitem__(self, number):
        label = number % 2
        noise = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(number))
        return noise + label - 1, label


class Rows(torch_data.Dataset):
    """Rows of columns, with tokens of different lengths."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, number):
        return {"tokens": torch.arange(1 + number % 4), "label": number % 2}


def padded(rows):
    tokens = torch.nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True)
    return {"tokens": tokens, "label": torch.tensor([row["label"] for row in rows])}


def opened(data, *, batch_size=64, **settings):
    training, input = TrainingConfig(batch_size=batch_size), InputConfig(**settings)
    return from_map_style(data, TrainConfig(training=training, input=input))


def test_a_tenth_is_the_test_set_and_every_sample_is_in_one_part():
    points = Points()
    data = opened(points)
    points.read.clear()
    assert (data.train.num_samples, data.test.num_samples) == (45, 5)
    for part in (data.train, data.test):
        part.fetch(np.arange(part.num_samples))
    assert sorted(points.read) == list(range(LENGTH))
    assert data.train.shape.input_shape == (2,)


def test_the_test_set_may_be_given():
    data = opened({"train": Points(30), "test": Points(20)})
    assert (data.train.num_samples, data.test.num_samples) == (30, 20)
    inputs, targets = data.train.fetch(np.array([3, 29, 0]))
    assert inputs.tolist() == [[3, 3], [1, 4], [0, 0]]
    assert targets.tolist() == [6, 5, 0]
    assert [len(part) for part in data.train.fetch(np.array([], np.int64))] == [0, 0]


def feed_of(train):
    return Feed(
        Batches(train, lambda batch, rows, epoch: batch),
        train.order(0),
        device=torch.device("cpu"),
        time_parts=TimeParts(),
    )


def test_a_worker_reads_the_batches_of_its_next_rounds_while_a_step_computes():
    points = Points(64)
    train = opened({"train": points, "test": Points()}, batch_size=4).train
    order, feed = train.order(0), feed_of(train)
    ledger = Ledger(order.num_samples, cuts=order.cuts)
    points.read.clear()
    positions = positions_of(ledger.claim("w0", 4)[1])
    feed.prefetch([(0, positions)], ledger.reserved_by("w0"))
    batch = feed.batch(0, positions)
    assert torch.equal(batch[1], train.fetch(order.rows(0, positions))[1])
    deadline = time.monotonic() + 60
    while len(points.read) < 4 + 4 * 5:  # this batch, the same read by the test, and four more
        assert time.monotonic() < deadline, "the next batches are not read"
        time.sleep(0.01)


class RecordsThreads(Points):
    """Records which thread reads each sample."""

    def __init__(self, length):
        super().__init__(length)
        self.threads = collections.defaultdict(set)

    def __getitem__(self, number):
        self.threads[threading.get_ident()].add(number)
        return super().__getitem__(number)


def test_one_thread_reads_all_samples_of_a_worker_across_epochs():
    sets = [RecordsThreads(22) for _ in range(3)]
    trains = [opened({"train": each, "test": Points()}, batch_size=2).train for each in sets]
    feeds, order = list(map(feed_of, trains)), trains[0].order(0)
    ledger = Ledger(order.num_samples, cuts=order.cuts)
    for each in sets:
        each.threads.clear()
    trained = collections.Counter()
    while ledger.epoch < 3:
        for number, feed in enumerate(feeds):  # in turn, one step each
            epoch, spans = ledger.claim(f"w{number}", 2)
            positions = positions_of(spans)
            feed.prefetch([(epoch, positions)], ledger.reserved_by(f"w{number}"))
            feed.batch(epoch, positions)
            trained.update(order.rows(epoch, positions).tolist())
        for number in range(3):
            ledger.complete(f"w{number}")
    for feed, each in zip(feeds, sets, strict=True):
        feed.stop_fetching()
        assert len(each.threads) == 1
        assert threading.get_ident() not in each.threads
    assert set(trained) == set(range(22))


def test_a_stopped_feed_reads_no_batch():
    points = Points(64)
    train = opened({"train": points, "test": Points()}, batch_size=4).train
    feed = feed_of(train)
    feed.prefetch([(0, np.arange(4))], [(0, (4, 36))])
    feed.stop_fetching()
    num_read = len(points.read)
    time.sleep(0.05)
    assert len(points.read) == num_read
    feed.prefetch([(0, np.arange(4))], [(0, (4, 36))])
    assert len(feed.batch(0, np.arange(4))[1]) == 4


def test_the_classes_of_a_set_are_also_those_of_its_subset():
    shape = opened(Pictures()).train.shape
    assert (shape.input_shape, shape.class_names) == ((1, 4, 4), ("dark", "light"))
    assert opened(torch_data.Subset(Pictures(), range(9))).train.shape.num_classes == 2
    points = Points()
    points.targets = [0, 2, 1]
    assert opened(points).train.shape.num_classes == 3


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.filterwarnings("ignore:.*not available, or .*:UserWarning")
def test_the_collate_fn_and_the_number_of_processes_of_a_dataloader_are_used(num_workers):
    loader = torch_data.DataLoader(Rows(), collate_fn=padded, num_workers=num_workers, shuffle=True)
    train = pickle.loads(pickle.dumps(opened(loader).train))  # as in another process
    batch = train.fetch(np.array([0, 1, 2, 3]))
    assert batch["tokens"].shape == (4, 4)
    assert train.shape.columns.keys() == {"tokens", "label"}
    if num_workers:
        assert {process.pid for process in train._pool._processes.values()} - {os.getpid()}
        train._pool.shutdown()


class Drawn(Points):
    """A set whose samples are the file of the loading process and two random numbers."""

    file = 0.0

    def __getitem__(self, number):
        time.sleep(0.05)  # the other process reads in the meantime
        return torch.tensor(self.file), torch.rand(1)[0], np.random.rand()


def open_file(number):
    torch_data.get_worker_info().dataset.file = 10.0 + number


@pytest.mark.processes
def test_each_loading_process_is_initialized_and_has_its_own_random_numbers():
    loader = torch_data.DataLoader(Drawn(), num_workers=2, worker_init_fn=open_file)
    train = pickle.loads(pickle.dumps(opened({"train": loader, "test": Drawn()}).train))
    files, numbers, deadline = set(), [], time.monotonic() + 60
    while len(files) < 2:  # the first process may read all samples before the second starts
        assert time.monotonic() < deadline, files
        batch = train.fetch(np.arange(4))
        files.update(batch[0].tolist())
        numbers += batch[1].tolist() + batch[2].tolist()
    train._pool.shutdown()
    assert files == {10.0, 11.0}
    assert len(set(numbers)) == len(numbers)


LOADS = """
import tempfile
from raydl.data.map_style import loading_context
started = loading_context().Process(target=print, args=("loads",))
started.start()
started.join()
print(tempfile.gettempdir())
"""


@pytest.mark.processes
@pytest.mark.parametrize("length", [10, 71, 100, 200])
def test_loading_processes_start_whatever_the_length_of_tmpdir(tmp_path, length):
    """The path of their server's socket may have 107 bytes."""
    folder = tmp_path / ("a" * length)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOADS], env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["loads", str(folder)], done.stderr


@pytest.mark.processes
def test_loading_processes_and_their_server_end_with_a_killed_worker_and_leave_no_file(tmp_path):
    code = """
import multiprocessing.forkserver, os, pickle, signal, sys
import numpy as np
from torch.utils.data import DataLoader
from raydl.config import TrainConfig
from raydl.data.map_style import from_map_style
from test_map_style import Points

if __name__ == "__main__":
    data = from_map_style(DataLoader(Points(), num_workers=2), TrainConfig())
    train = pickle.loads(pickle.dumps(data.train))  # as in a worker
    train.fetch(np.arange(8))
    server = multiprocessing.forkserver._forkserver
    print(server._forkserver_pid, *train._pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=100, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if command_of(pid) != [""]]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == [script]


def test_samples_that_cannot_be_read_are_an_error_or_skipped():
    data = {"train": Points(10, bad=(4, 6)), "test": Points(10)}
    with pytest.raises(DataError, match="Points: sample 4 cannot be read: OSError: no file 4"):
        opened(data).train.fetch(np.arange(10))
    batch, rows, problems = opened(data, on_bad_sample="skip").train.fetch_readable(np.arange(3, 7))
    assert batch[1].tolist() == [6.0, 5.0]
    assert rows.tolist() == [3, 5]
    assert len(problems) == 2


class Odd(Pictures):
    """Images of which one is something else."""

    def __init__(self, odd):
        self.odd = odd

    def __getitem__(self, number):
        return self.odd if number == 37 else super().__getitem__(number)


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        ((torch.zeros(1, 4, 5), 1), "sample 37 is of shape [1, 4, 5] and [], but the first one of"),
        (None, "sample 37 is None"),
    ],
)
def test_a_sample_of_another_shape_or_none_is_named_or_skipped(odd, sentence):
    with pytest.raises(DataError, match=re.escape(sentence)):
        opened({"train": Odd(odd), "test": Pictures()}).train.fetch(np.arange(30, 40))
    train = opened({"train": Odd(odd), "test": Pictures()}, on_bad_sample="skip").train
    batch, rows, problems = train.fetch_readable(np.arange(30, 40))
    assert (len(batch[0]), 37 in rows, len(problems)) == (9, False, 1)


def test_four_measurements_of_a_sample_are_no_text(tmp_path):
    data = torch_data.TensorDataset(torch.rand(150, 4), torch.randint(0, 3, (150,)))
    trainer = raydl.Trainer("mlp", data, run=RunConfig(run_dir=str(tmp_path / "run")))
    with pytest.raises(ShapeError, match="of classes, but the data are vectors of 4 numbers:"):
        trainer.fit()
    data.classes = ["a", "b", "c"]
    with pytest.raises(ShapeError, match="takes images, but the data are vectors of 4 numbers;"):
        raydl.Trainer("lenet", data).fit()
    shape = DataShape((4,), 3, is_numeric=True)
    assert task_for("mlp", shape).build_model(shape)(torch.zeros(2, 4)).shape == (2, 3)


class OpenedOnce(Points):
    """A set that opens its file at the first sample and cannot be pickled afterwards."""

    file = None

    def __getitem__(self, number):
        self.file = threading.Lock()  # no handle can be pickled
        return super().__getitem__(number)


@pytest.mark.parametrize(
    "data",
    [
        OpenedOnce(),
        torch_data.Subset(OpenedOnce(), range(9)),
        torch_data.ConcatDataset([OpenedOnce(), Points()]),
    ],
)
def test_a_set_that_opens_its_file_at_the_first_sample_can_be_sent_to_workers(data):
    train = opened(data).train
    train.fetch(np.arange(2))
    sent = pickle.loads(pickle.dumps(train))
    assert len(sent.fetch(np.arange(3))[0]) == 3


class OnABadDisk(Points):
    """A set with some samples on a failing disk."""

    def __getitem__(self, number):
        if number in self.bad:
            raise OSError(errno.EIO, "Input/output error")
        return super().__getitem__(number)


def test_a_failure_of_the_machine_is_recognized():
    data = {"train": OnABadDisk(10, bad=(4, 6)), "test": Points(10)}
    with pytest.raises(DataError) as error:
        opened(data).train.fetch(np.arange(10))
    assert failure_of_machine(error.value)
    with pytest.raises(DataError) as error:
        opened({**data, "train": Points(10, bad=(4,))}).train.fetch(np.arange(10))
    assert not failure_of_machine(error.value)


def test_a_worker_whose_machine_fails_at_every_sample_skips_none():
    data = {"train": OnABadDisk(10, bad=(4, 5, 6)), "test": Points(10)}
    train = opened(data, on_bad_sample="skip").train
    assert len(train.fetch_readable(np.arange(3, 7))[2]) == 3
    with pytest.raises(DataError, match="sample 4 cannot be read"):
        train.fetch_readable(np.arange(4, 7))
    data["train"] = Points(10, bad=(4, 5, 6))  # no other machine can read these
    train = opened(data, on_bad_sample="skip").train
    assert len(train.fetch_readable(np.arange(4, 7))[2]) == 3


def test_a_set_whose_length_changes_is_refused():
    points = Points()
    train = opened({"train": points, "test": Points()}).train
    points.length = 40
    with pytest.raises(DataError, match="had 50 samples at the start and has 40 now"):
        train.fetch(np.arange(3))


class Texts(Points):
    def __getitem__(self, number):
        return {"text": f"text {number}", "label": 0}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Points(0), "only 0 samples: too few to split off a test set"),
        (Points(5, bad=range(5)), "cannot be read: OSError: no file"),
        (Texts(), "part 'text' is list; pass a DataLoader with a collate_fn, or remove the column"),
        ({"train": Points(), "eval": Points()}, "must be named train and test, got train, eval"),
        ({"train": Points(), "test": Points(0)}, "Points: holds no samples"),
        (
            {"train": Points(), "test": Pictures()},
            "column .0. holds float32 tensors of 3 dimensions, but elsewhere lists of float32",
        ),
        (
            torch_data.DataLoader(
                Points(), sampler=torch_data.WeightedRandomSampler([1.0] * LENGTH, LENGTH)
            ),
            "without a sampler of its own, got WeightedRandomSampler",
        ),
    ],
)
def test_a_mistake_in_the_data_is_reported_in_one_sentence(data, sentence):
    with pytest.raises(DataError, match=sentence) as error:
        opened(data)
    assert "\n" not in str(error.value)


def test_map_style_data_sets_are_recognized():
    class Stream(torch_data.IterableDataset):
        def __iter__(self):
            return iter(())

    assert is_map_style(Points())
    assert is_map_style(torch_data.DataLoader(Points()))
    assert is_map_style([(torch.zeros(1), 0)])
    assert not any(map(is_map_style, ["digits", {"train": Points()}, Stream(), 5]))


def linear(shape):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(torch.Size(shape.input_shape).numel(), 2)
    )


def cross_entropy(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trainer_of(data, folder, *, epochs=4):
    return raydl.Trainer(
        linear,
        data,
        scaling=ScalingConfig(num_workers=0),
        training=TrainingConfig(epochs=epochs, batch_size=6),
        optimizer=OptimizerConfig(lr=0.1),
        run=RunConfig(run_dir=str(folder), progress="none"),
        loss=cross_entropy,
    )


def test_a_run_learns_from_pictures_and_trains_on_each_once_an_epoch(tmp_path):
    class Counted(Pictures):
        read = collections.Counter()  # noqa: RUF012

        def __getitem__(self, number):
            self.read[number] += 1
            return super().__getitem__(number)

    data = {"train": Counted(), "test": Pictures()}
    result = trainer_of(data, tmp_path / "run", epochs=20).fit()
    assert result.metrics["samples"] == 20 * LENGTH
    assert min(Counted.read.values()) >= 20
    # Batches at the end of an epoch differ in size: four that were read ahead may be discarded.
    trials, in_vain = 12, 20 * 4 * 6
    assert sum(Counted.read.values()) <= 20 * LENGTH + trials + in_vain
    assert result.metrics["center_loss"] < 0.3


def test_a_named_model_trains_on_the_classes_of_a_set(tmp_path):
    trainer = raydl.Trainer(
        "mlp",
        Pictures(),
        scaling=ScalingConfig(num_workers=0),
        training=TrainingConfig(epochs=10, batch_size=5),
        optimizer=OptimizerConfig(lr=0.1),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    assert trainer.fit().metrics["center_accuracy"] == 1.0


def test_the_error_for_other_objects_lists_the_supported_kinds(tmp_path):
    with pytest.raises(DataError, match="a torch Dataset, a DataLoader of one") as error:
        trainer_of(5, tmp_path).fit()
    assert "got a int" in str(error.value)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import raydl

class Points(Dataset):  # in the script itself, which no worker can import
    def __len__(self):
        return 60

    def __getitem__(self, number):
        x = torch.tensor([float(number % 7), float(number % 5)])
        return x, x.sum(0, keepdim=True)

if __name__ == "__main__":
    result = raydl.Trainer(
        lambda: torch.nn.Linear(2, 1),
        {"train": DataLoader(Points(), num_workers=1), "test": Points()},
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=raydl.OptimizerConfig(lr=0.02),
        scaling=raydl.ScalingConfig(num_workers=2),
        training=raydl.TrainingConfig(epochs=40, batch_size=6),
        run=raydl.RunConfig(run_dir=sys.argv[1], progress="none"),
    ).fit()
    with open(sys.argv[2], "w") as file:  # Ray also writes to the standard output
        print(result.metrics["samples"], result.metrics["center_loss"], file=file)
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_workers_on_ray_read_a_set_of_the_users_script_with_processes_of_their_own(
    four_cpus, tmp_path
):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **cluster_environment(four_cpus.address)}
    words = [str(script), str(tmp_path / "run"), str(tmp_path / "metrics.txt")]
    done = run_program(words, environment=environment, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    samples, loss = (tmp_path / "metrics.txt").read_text().split()
    assert int(samples) == 40 * 60
    assert float(loss) < 1.0
