"""A map-style ``torch.utils.data.Dataset`` as the data set of a run: it has ``len`` and ``[i]``.

The ledger assigns samples by number, so that each counts once in an epoch, also if workers are
lost. A ``datasets.Dataset`` is such a set. Of a ``DataLoader`` only the data set, ``collate_fn``,
``num_workers`` and ``worker_init_fn`` matter: raydl has its own order and batch size.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from multiprocessing.util import get_temp_dir
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data._utils import worker as torch_worker

from raydl.config import TrainConfig
from raydl.data.datasets import check_parts, split_numbers
from raydl.data.order import Shuffled
from raydl.data.samples import Batch, Dataset, DataShape, check_readable, part_of
from raydl.data.schema import Feature, as_classes, compare
from raydl.errors import DataError, in_one_line

Collate = Callable[[list[Any]], Any]
Init = Callable[[int], None]
_TRIES = 3
"""Times in a row that loading processes may be killed."""
_BATCHES_IN_BLOCK = 4
"""Batches that a worker reserves at once, to read them while earlier ones are trained."""
_MOST_UNREADABLE = 100
"""Samples to try as the first one, if unreadable ones are skipped."""
_LONGEST_TEMPDIR = 70
"""The longest folder in which multiprocessing can make its sockets, in bytes."""
_PRELOADED = ("torch", "ray", "datasets")
"""Libraries that loading processes share, of those that this process has imported. Not raydl: the
server does not know the folders that Ray has added to the path."""
_held: Any = None
"""In a loading process: the data set."""
_init_problem = ""
"""In a loading process: why ``worker_init_fn`` failed."""


class Unreadable:
    """Stands for a sample that cannot be read, or for the rest of a stream.

    Args:
        problem: what the message says.
        error: the exception that was raised.
    """

    def __init__(self, problem: str, error: Exception) -> None:
        self.problem = problem
        self._error: Exception | None = error

    def as_data_error(self, source: str, before: str = "") -> DataError:
        """Return the error to raise, with its cause.

        Args:
            source: name of the data set.
            before: text before the problem.
        """
        raised = DataError(source, before + self.problem)
        raised.__cause__ = self._error
        return raised

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which may not know the type of the exception."""
        is_known = type(self._error).__module__ == "builtins"
        return {"problem": self.problem, "_error": self._error if is_known else None}


@dataclass(frozen=True)
class Loaded:
    """A data set of torch, and how its loader reads it."""

    dataset: Any
    collate: Collate = torch_data.default_collate
    """Makes a batch from a list of samples."""
    num_workers: int = 0
    """Processes that read samples; 0: the worker reads them in a thread."""
    init: Init | None = None
    """Called with its number in each such process before it reads; None: nothing is."""

    @classmethod
    def of(cls, data: Any) -> Loaded:
        """Return the data set of a loader with its settings, or one itself with torch's."""
        if isinstance(data, torch_data.DataLoader):
            return cls(data.dataset, data.collate_fn, data.num_workers, data.worker_init_fn)
        return cls(data)

    @property
    def name(self) -> str:
        """Name of the class of the data set, for messages."""
        return type(self.dataset).__name__


class TorchSamples:
    """What the samples of a map-style and of an iterable-style data set share.

    Args:
        loaded: the data set.

    Raises:
        DataError: if the first sample cannot be read, or its batch has no tensors.
    """

    is_streamed = True
    _not_sent: tuple[str, ...] = ()
    """Attributes that ``_open`` makes anew in another process."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self.source = loaded, loaded.name
        self._to_read = copy_to_read(loaded.dataset)
        # The driver reads few samples, itself. The set of a worker was unpickled.
        self._num_workers = 0
        self._open()
        self._first = self._batch_of(self._first_samples())
        self.shape = shape_of_batch(self._first, loaded.dataset)
        """The shape of the first sample, to build a model for."""

    def _open(self) -> None:
        self.is_starting = False
        """Whether processes that read the samples have started and sent none yet."""

    @abstractmethod
    def _first_samples(self) -> list[Any]:
        """Return one sample."""

    def prefetch(self, rows: np.ndarray) -> None:
        """Do nothing: the loader fetches the next batches ahead."""

    def _batch_of(self, samples: list[Any]) -> Batch:
        return checked_batch(self._loaded.collate(samples), len(samples), source=self.source)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a worker's set, which starts processes of its own."""
        state = {n: v for n, v in self.__dict__.items() if n not in ("_to_read", *self._not_sent)}
        return {**state, "_num_workers": self._loaded.num_workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._to_read = self._loaded.dataset
        self._open()


class MapStyle(TorchSamples):
    """Samples of a map-style data set.

    Args:
        loaded: the data set.
        rows: numbers of the samples that belong to this part, int64.
        batch_size: samples in a batch.
        skips: leave out samples that cannot be read, instead of ending the run.

    Raises:
        DataError: if the first sample cannot be read, or its batch has no tensors.
    """

    _not_sent = ("_pool",)

    def __init__(self, loaded: Loaded, rows: np.ndarray, *, batch_size: int, skips: bool) -> None:
        self._rows, self._length = rows, len(loaded.dataset)
        self._batch_size, self._skips = batch_size, skips
        self._usual: list[tuple[int, ...]] | None = None
        super().__init__(loaded)
        self.schema = schema_of_batch(self._first, self.shape.class_names)
        """What a sample holds; of any size, since a collate_fn may pad samples."""

    def _open(self) -> None:
        super()._open()
        self._pool: ProcessPoolExecutor | None = None

    @property
    def num_samples(self) -> int:
        """Samples in this part."""
        return len(self._rows)

    def order(self, seed: int) -> Shuffled:
        """Return the order of the samples in each epoch."""
        block_samples = _BATCHES_IN_BLOCK * self._batch_size
        return Shuffled(self.num_samples, seed, block_samples=block_samples)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the batch of these rows.

        Raises:
            DataError: if a sample cannot be read.
        """
        return self.fetch_readable(rows)[0]

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and one sentence per skipped sample.

        Raises:
            DataError: see ``check_readable``.
        """
        if len(self._loaded.dataset) != self._length:
            raise DataError(
                self.source,
                f"had {self._length:,} samples at the start and has "
                f"{len(self._loaded.dataset):,} now; it must not change during a run",
            )
        found = self._read(self._rows[rows])
        errors = [s.as_data_error(self.source) for s in found if isinstance(s, Unreadable)]
        check_readable(errors, num_samples=len(rows), skips=self._skips)
        is_readable = np.array([not isinstance(sample, Unreadable) for sample in found], bool)
        samples = [sample for sample in found if not isinstance(sample, Unreadable)]
        batch = self._batch_of(samples) if samples else part_of(self._first, 0, 0)
        return batch, rows[is_readable], [error.problem for error in errors]

    def _first_samples(self) -> list[Any]:
        """Return the first sample that can be read; without skipping, the first."""
        first: Unreadable | None = None
        for number in self._rows[: _MOST_UNREADABLE if self._skips else 1]:
            (sample,) = self._read(np.array([number]))
            if not isinstance(sample, Unreadable):
                return [sample]
            first = first or sample
        assert first is not None, "no part is empty"
        raise first.as_data_error(self.source)

    def _read(self, numbers: np.ndarray) -> list[Any]:
        """Return samples, with a stand-in for each that cannot be used."""
        if self._num_workers:
            found = self._read_in_processes(numbers)
        else:
            found = _read(self._to_read, numbers)
        return [self._checked(s, n) for s, n in zip(found, numbers.tolist(), strict=True)]

    def _checked(self, sample: Any, number: int) -> Any:
        """Return a sample, or a stand-in if torch's ``default_collate`` could not batch it."""
        if sample is None:
            return Unreadable(f"sample {number} is None", ValueError("None"))
        is_default = self._loaded.collate is torch_data.default_collate
        if isinstance(sample, Unreadable) or not is_default:
            return sample
        shapes = _shapes_of(sample)
        self._usual = shapes if self._usual is None else self._usual
        if shapes == self._usual:
            return sample
        sizes = [" and ".join(str(list(s)) for s in some) for some in (shapes, self._usual)]
        problem = f"sample {number} is of shape {sizes[0]}, but the first one of {sizes[1]}"
        return Unreadable(problem, ValueError(problem))

    def _read_in_processes(self, numbers: np.ndarray) -> list[Any]:
        parts = np.array_split(numbers, min(self._num_workers, max(1, len(numbers))))
        for _ in range(_TRIES):
            try:
                pieces = list(self._started_pool().map(_read_held, parts))
            except BrokenProcessPool:
                self._pool = None
            else:
                self.is_starting = False
                return [sample for piece in pieces for sample in pickle.loads(piece)]
        raise DataError(
            self.source,
            f"its loading processes were killed {_TRIES} times in a row; is there too little "
            f"memory for num_workers {self._num_workers}?",
        )

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self.is_starting = True
            context = loading_context()
            users = pickled((self._loaded.dataset, self._loaded.init))
            begin = users, self._num_workers, context.Value("i", 0)
            self._pool = ProcessPoolExecutor(self._num_workers, context, _hold, begin)
        return self._pool


def loading_context() -> BaseContext:
    """Return how loading processes start: as forks of a server that has imported the libraries.

    A process of its own would import them anew, which takes it two seconds of CPU time. None is a
    fork of this process, which has threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    _make_folder_of_sockets()  # before the processes, so that they know it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    return context


def _make_folder_of_sockets() -> None:
    """Make the folder for the sockets of multiprocessing, by a short path.

    The kernel limits the path of a socket to 107 bytes, and TMPDIR may be longer.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > _LONGEST_TEMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


def copy_to_read(dataset: Any) -> Any:
    """Return a copy of a data set to read from, which shares what it holds.

    Many data sets open their file at the first sample. The workers receive the data set itself,
    which must not hold an open file.
    """
    try:
        copied = copy.copy(dataset)
    except TypeError:  # no copy is possible, nor will it be sent to a worker
        return dataset
    if isinstance(dataset, torch_data.Subset):
        copied.dataset = copy_to_read(dataset.dataset)
    if isinstance(dataset, torch_data.ConcatDataset):
        copied.datasets = list(map(copy_to_read, dataset.datasets))
    return copied


def pickled(data: Any) -> bytes:
    """Return a data set or samples as bytes.

    Their classes may be of the user's script: in a process of Ray, and in a loading process, which
    has unpickled such a data set.
    """
    pickler = sys.modules.get("ray.cloudpickle", pickle)
    return cast(bytes, pickler.dumps(data))


def _hold(dataset_and_init: bytes, num_workers: int, next_number: Any) -> None:
    """Begin a loading process.

    Args:
        dataset_and_init: the data set and ``worker_init_fn`` of its loader, pickled.
        num_workers: number of processes.
        next_number: the number of the next process, shared by all of them.
    """
    global _held, _init_problem
    torch.set_num_threads(1)
    # Forks of one server have the same generators: all would draw the same random transforms.
    torch.seed()
    np.random.seed()
    # A process of a pool waits for its next call forever, also if its parent was killed.
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    with next_number.get_lock():
        number, next_number.value = next_number.value, next_number.value + 1
    _held, init = pickle.loads(dataset_and_init)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=torch.initial_seed(), dataset=_held
    )
    if init is not None:
        try:
            init(number)
        except Exception as error:  # of the user's code; an error here would break the pool
            _init_problem = f"worker_init_fn of its DataLoader raised {in_one_line(error)}"


def end_with_the_parent() -> None:
    """End this loading process when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is no loading process"
    parent.join()
    # A killed parent has left the folder with the socket of its server.
    shutil.rmtree(get_temp_dir(), ignore_errors=True)
    os._exit(1)


def _read_held(numbers: np.ndarray) -> bytes:
    """Return pickled samples: as they are, each tensor would take a file descriptor.

    Raises:
        DataError: this process could not be initialized.
    """
    if _init_problem:
        raise DataError(type(_held).__name__, _init_problem)
    return pickled(_read(_held, numbers))


def _read(dataset: Any, numbers: np.ndarray) -> list[Any]:
    """Return samples, with a stand-in for each that cannot be read."""
    found = []
    for number in numbers.tolist():
        try:
            found.append(dataset[number])
        except Exception as error:  # of the user's code, or of a file
            problem = f"sample {number} cannot be read: {in_one_line(error)}"
            found.append(Unreadable(problem, error))
    return found


def _shapes_of(sample: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors, arrays and numbers of a sample, in order."""
    if isinstance(sample, Mapping):
        return [shape for value in sample.values() for shape in _shapes_of(value)]
    if isinstance(sample, (list, tuple)):
        return [shape for value in sample for shape in _shapes_of(value)]
    return [tuple(getattr(sample, "shape", ()))]


def checked_batch(batch: Any, num_samples: int, *, source: str) -> Batch:
    """Return a batch as a tuple or mapping of tensors.

    Raises:
        DataError: if it is neither.
    """
    if isinstance(batch, Mapping):
        checked: Batch = dict(batch)
    elif isinstance(batch, Sequence):
        checked = tuple(batch)
    else:
        checked = (batch,)
    named = checked.items() if isinstance(checked, dict) else enumerate(checked)
    for name, value in named:
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != num_samples:
            what = (
                f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise DataError(
                source,
                f"must give batches of tensors with the samples as first dimension, but for "
                f"{num_samples} samples part {name!r} is {what}; pass a DataLoader with a "
                f"collate_fn, or remove the column",
            )
    return checked


def shape_of_batch(batch: Batch, dataset: Any) -> DataShape:
    """Return the shape of one sample, by the batch of the first."""
    if isinstance(batch, dict):
        columns = {name: tuple(value.shape[1:]) for name, value in batch.items()}
        return DataShape((), 0, columns=columns)
    names = _class_names(dataset)
    is_numeric = batch[0].ndim == 2 and batch[0].is_floating_point()
    return DataShape(tuple(batch[0].shape[1:]), len(names), names, is_numeric=is_numeric)


def schema_of_batch(batch: Batch, class_names: Sequence[str]) -> dict[str, Feature]:
    """Return what samples hold, by the batch of the first; their sizes may differ."""
    named = batch.items() if isinstance(batch, dict) else enumerate(batch)
    schema = {
        str(name): Feature(
            "vector" if value.ndim > 1 else "number",
            str(value.dtype).removeprefix("torch."),
            (None,) * (value.ndim - 1),
        )
        for name, value in named
    }
    if class_names and not isinstance(batch, dict):
        label = str(len(batch) - 1)
        schema[label] = as_classes(schema[label], class_names)
    return schema


def _class_names(dataset: Any) -> tuple[str, ...]:
    """Return the class names that a data set tells, as those of torchvision do; () without."""
    while isinstance(dataset, torch_data.Subset):
        dataset = dataset.dataset
    if (classes := getattr(dataset, "classes", None)) is not None:
        return tuple(map(str, classes))
    targets = getattr(dataset, "targets", None)
    if targets is None or not len(targets):
        return ()
    first = np.asarray(targets[0])  # those of other tasks than classes may be paths
    are_classes = first.ndim == 0 and first.dtype.kind in "iu"
    return tuple(map(str, range(int(max(targets)) + 1))) if are_classes else ()


def is_map_style(data: Any) -> bool:
    """Whether something is a map-style data set, or a loader of one."""
    data = Loaded.of(data).dataset
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(
        data, (str, bytes, Mapping, Tensor, np.ndarray, torch_data.IterableDataset)
    )  # fmt: skip


def from_map_style(data: Any, config: TrainConfig) -> Dataset:
    """Return a dataset of raydl.

    Args:
        data: a map-style data set or a ``DataLoader`` of one, a tenth of which becomes the test
            set, by the seed, or ``{"train": ..., "test": ...}`` of these.
        config: settings of the run.

    Raises:
        DataError: if a part is missing, empty or cannot be read, or the parts differ in shape.
    """
    if isinstance(data, Mapping):
        check_parts(data)
        train, test = (open_part(data[name], None, config) for name in ("train", "test"))
    else:
        count = len(Loaded.of(data).dataset)
        if count < 2:
            raise DataError("data", f"has only {count} samples: too few to split off a test set")
        split = split_numbers(count, "samples", config.training.seed, "data")
        train, test = (open_part(data, rows, config) for rows in split)
    of_each = (train.schema, test.schema)
    for difference in (*compare(*of_each), *compare(*reversed(of_each))):
        raise DataError(test.source, difference.problem)
    return Dataset(train, test, train.source, train.schema)


def open_part(data: Any, rows: np.ndarray | None, config: TrainConfig) -> MapStyle:
    """Return some rows of a map-style data set or of its loader; None: all.

    Raises:
        DataError: if it is empty, its first sample cannot be read, or the loader has a sampler.
    """
    if isinstance(data, torch_data.DataLoader):
        _check_sampler(data)
    loaded = Loaded.of(data)
    dataset = loaded.dataset
    if hasattr(dataset, "with_format") and getattr(dataset, "format", {}).get("type") is None:
        # A datasets.Dataset, whose samples are lists otherwise.
        loaded = replace(loaded, dataset=dataset.with_format("torch"))
    if not len(dataset):
        raise DataError(loaded.name, "holds no samples")
    rows = np.arange(len(dataset)) if rows is None else rows
    skips = config.input.on_bad_sample == "skip"
    return MapStyle(loaded, rows, batch_size=config.training.batch_size, skips=skips)


def _check_sampler(loader: torch_data.DataLoader[Any]) -> None:
    """Raise DataError if a loader has a sampler of its own, which would be ignored."""
    usual = (torch_data.SequentialSampler, torch_data.RandomSampler)
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        sampler = loader.batch_sampler
    if not isinstance(sampler, usual) or getattr(sampler, "replacement", False):
        raise DataError(
            "data",
            f"must be a DataLoader without a sampler of its own, got {type(sampler).__name__}: the "
            f"ledger assigns the samples, each once in an epoch",
        )
