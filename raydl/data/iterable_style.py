"""An iterable-style data set as the training set of a run: a stream without numbers.

The ledger counts the positions of an epoch, as many as ``input.samples_per_epoch``, each once. It
cannot know which sample is at a position: a worker draws the next samples of its shard, and starts
the shard again at its end. When workers come or go, the stream is split anew, and each shard starts
at its beginning. So samples of the stream are trained at least once, not exactly once.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another type in Python 3.10
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data._utils import worker as torch_worker

from raydl.config import TrainConfig
from raydl.data.datasets import check_parts
from raydl.data.map_style import (
    Loaded,
    TorchSamples,
    Unreadable,
    end_with_the_parent,
    is_map_style,
    loading_context,
    open_part,
    pickled,
)
from raydl.data.order import InStream
from raydl.data.samples import Batch, Dataset, part_of
from raydl.errors import ConfigError, DataError, in_one_line

_FIRST_S = 600.0
"""Longest wait of the driver for samples, in seconds; a stream may have to fill a buffer first."""
_PER_MESSAGE = 16
"""Samples that a loading process sends at once."""
_END = object()


@dataclass(frozen=True)
class _Shard:
    """One part of a stream that is split evenly."""

    index: int
    num_shards: int
    is_sieved: bool = field(default=False, compare=False)
    """Whether the worker reads the whole stream and keeps each ``num_shards``-th sample, also of a
    stream that could split itself: it has too few parts for all workers."""

    def part(self, index: int, num_parts: int) -> _Shard:
        """Return a part of this shard.

        The parts of all shards are taken in turns. A stream of few files, of which each part has
        each n-th, then has files in every shard.
        """
        return replace(
            self,
            index=self.index + index * self.num_shards,
            num_shards=self.num_shards * num_parts,
        )


class IterableStyle(TorchSamples):
    """Samples of an iterable-style data set.

    Args:
        loaded: the data set.
        num_samples: samples of an epoch.

    Raises:
        DataError: if there is no first sample, or its batch has no tensors.
    """

    _not_sent = ("_lock", "_samples", "_loader")

    def __init__(self, loaded: Loaded, *, num_samples: int) -> None:
        self.num_samples = num_samples
        """Samples of an epoch."""
        self._wanted: tuple[_Shard, int] | None = None
        """The shard of this worker and the number of its start; None in the driver."""
        self._wait_s = _FIRST_S
        super().__init__(loaded)

    def _open(self) -> None:
        super()._open()
        self._lock = threading.Lock()
        self._samples: Iterator[Any] | None = None
        self._loader: Any = None
        self._shard: _Shard | None = None
        self._num_starts = self._num_drawn = 0

    def _first_samples(self) -> list[Any]:
        return self._draw(1)

    @property
    def note(self) -> str:
        """A sentence about the order of these samples, for the log."""
        return (
            f"{self.source} is iterable: an epoch is {self.num_samples:,} of its samples; when "
            f"workers come or go and after a resume, each worker starts a new shard at its "
            f"beginning, so samples may be trained again before others"
        )

    def order(self, seed: int) -> InStream:
        """Return positions without rows."""
        return InStream(self.num_samples)

    def take_shard(self, index: int, num_shards: int, *, start: int) -> None:
        """Read another shard from the next fetch on; do nothing if it is the present one.

        Args:
            index: number of the shard, 0..num_shards-1.
            num_shards: shards into which the stream is split.
            start: number of this start of the stream, passed to ``set_epoch`` if the data set has
                it.
        """
        shard = _Shard(index, num_shards)
        if self._wanted is None or self._wanted[0] != shard:
            # Without the lock: a fetch may hold it for long.
            self._wanted = shard, start

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return a batch of the next samples of the shard, as many as there are rows.

        Raises:
            DataError: if the stream is empty or fails.
        """
        if not len(rows):
            return part_of(self._first, 0, 0)
        return self._batch_of(self._draw(len(rows)))

    def _draw(self, count: int) -> list[Any]:
        """Return the next samples; in the driver from a thread, which is abandoned after a time."""
        if self._wanted is not None:
            return self._draw_now(count)
        future: Future[list[Any]] = Future()

        def work() -> None:
            try:
                future.set_result(self._draw_now(count))
            except BaseException as error:
                future.set_exception(error)

        began_at = time.monotonic()
        threading.Thread(target=work, name="first samples", daemon=True).start()
        try:
            return future.result(max(0.0, self._wait_s))
        except FutureTimeoutError:
            problem = f"did not give {count} samples within {_FIRST_S:.0f} s"
            raise DataError(self.source, problem) from None
        finally:
            self._wait_s -= time.monotonic() - began_at

    def _draw_now(self, count: int) -> list[Any]:
        with self._lock:
            if self._wanted is not None and self._shard != self._wanted[0]:
                self._shard, self._num_starts = self._wanted
                self._samples, self._loader, self._num_drawn = None, None, 0
            self._samples = self._samples or self._endless()
            try:
                return list(itertools.islice(self._samples, count))
            except DataError:
                self._samples = self._loader = None
                raise

    def _endless(self) -> Iterator[Any]:
        """Yield the samples of the shard; at its end start it again."""
        while True:
            num_before = self._num_drawn
            for sample in self._start():
                self.is_starting = False
                if isinstance(sample, Unreadable):
                    before = f"failed after {self._num_drawn:,} samples: "
                    raise sample.as_data_error(self.source, before)
                self._num_drawn += 1
                yield sample
            shard = self._shard
            if shard and shard.num_shards > 1 and not (shard.is_sieved or self._num_drawn):
                self._shard, self._loader = replace(shard, is_sieved=True), None
            elif self._num_drawn == num_before:
                raise DataError(self.source, self._why_empty())

    def _start(self) -> Iterator[Any]:
        shard, start = self._shard or _Shard(0, 1), self._num_starts
        self._num_starts += 1
        if not self._num_workers:
            return _read(self._to_read, shard, start)
        if self._loader is None:
            self.is_starting = True
            self._loader = _loader_of(self._loaded, shard, start)
        return _read_messages(self._loader)

    def _why_empty(self) -> str:
        if self._num_drawn:
            return (
                f"gave no sample when it was started again after {self._num_drawn:,}; each call of "
                f"__iter__ must begin anew"
            )
        if self._shard is None or self._shard.num_shards == 1:
            return "ended without a sample"
        return f"has fewer samples than the {self._shard.num_shards} workers"


def _read(dataset: Any, shard: _Shard, start: int) -> Iterator[Any]:
    """Yield the samples of a shard, and a stand-in for the rest if the stream fails."""
    try:
        yield from _samples_of(dataset, shard, start)
    except Exception as error:  # of the user's code, of a file or of a network
        yield Unreadable(in_one_line(error), error)


def _samples_of(dataset: Any, shard: _Shard, start: int) -> Iterator[Any]:
    """Yield the samples of a shard."""
    if _is_hugging_face(dataset):
        from datasets.distributed import split_dataset_by_node

        dataset = split_dataset_by_node(dataset, rank=shard.index, world_size=shard.num_shards)
        shard = _Shard(0, 1)
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(start)
    if shard.num_shards == 1:
        yield from dataset
        return
    info = None if shard.is_sieved else _ShardInfo(dataset, shard)
    with _shown(info):
        samples = iter(dataset)
    for number in itertools.count():
        with _shown(info):
            sample = next(samples, _END)
        if sample is _END:
            return
        if (info is not None and info.is_read) or number % shard.num_shards == shard.index:
            yield sample


class _ShardInfo:
    """What ``torch.utils.data.get_worker_info()`` returns to a stream that is split among workers.

    It notes whether the stream reads it, and so splits itself. Of any other stream, each worker
    reads all samples and keeps its part.
    """

    def __init__(self, dataset: Any, shard: _Shard) -> None:
        self.dataset, self.seed = dataset, torch.initial_seed()
        self._shard = shard
        self.is_read = False

    @property
    def id(self) -> int:
        """Number of the shard."""
        self.is_read = True
        return self._shard.index

    @property
    def num_workers(self) -> int:
        """Number of shards."""
        self.is_read = True
        return self._shard.num_shards


@contextmanager
def _shown(info: _ShardInfo | None) -> Iterator[None]:
    """Let torch's ``get_worker_info`` return this information, or that there are no shards."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]  # torch has no other way
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _loader_of(loaded: Loaded, shard: _Shard, start: int) -> Any:
    """Return a loader with processes that send pickled samples, and start the shard again."""
    return torch_data.DataLoader(
        _InProcess(loaded, shard, start),
        batch_size=_PER_MESSAGE,
        collate_fn=pickled,  # as they are, each tensor would take a file descriptor
        num_workers=loaded.num_workers,
        persistent_workers=True,
        multiprocessing_context=loading_context(),
    )


def _read_messages(loader: Any) -> Iterator[Any]:
    """Yield the samples that loading processes send, as ``_read`` does."""
    try:
        for message in loader:
            yield from pickle.loads(message)
    except Exception as error:  # a process was killed, or a sample cannot be pickled
        lines = str(error).strip().splitlines() or [""]
        # The error of a process is at the end of its traceback.
        problem = lines[-1] if lines[0].startswith("Caught ") else in_one_line(error)
        yield Unreadable(problem, error)


class _InProcess(torch_data.IterableDataset[Any]):
    """A shard as torch's loading processes read it, each a part.

    Args:
        loaded: the data set.
        shard: the shard of the worker.
        start: number of the first start of the stream.
    """

    def __init__(self, loaded: Loaded, shard: _Shard, start: int) -> None:
        self._to_begin = pickled((loaded.dataset, loaded.init))
        self._shard, self._start = shard, start
        self._dataset: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this process once more."""
        info, shard = torch_data.get_worker_info(), self._shard
        assert info is not None, "it is no loading process"
        if self._to_begin:
            # A process that waits for a sample would not notice that its parent was killed.
            threading.Thread(target=end_with_the_parent, daemon=True).start()
            self._dataset, init = pickle.loads(self._to_begin)
            self._to_begin = b""
            if init is not None:
                init(info.id)
        if not _is_hugging_face(self._dataset):  # which splits its shard by torch's information
            shard = shard.part(info.id, info.num_workers)
        start, self._start = self._start, self._start + 1
        yield from _read(self._dataset, shard, start)


def _is_hugging_face(dataset: Any) -> bool:
    """Whether this is a ``datasets.IterableDataset``, without importing the library."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", ())
    return isinstance(dataset, kind)


def is_iterable(data: Any) -> bool:
    """Whether something is an iterable-style data set, or a loader of one."""
    data = Loaded.of(data).dataset
    return isinstance(data, torch_data.IterableDataset) or _is_hugging_face(data)


def from_iterable(data: Any, config: TrainConfig) -> Dataset:
    """Return a dataset of raydl that trains on a stream.

    Args:
        data: ``{"train": ..., "test": ...}``, an iterable-style data set or a ``DataLoader`` of
            one, and a map-style one.
        config: settings of the run.

    Raises:
        ConfigError: if the settings give no number of samples, or promise what a stream cannot.
        DataError: if a part is missing, is empty or cannot be read, or the parts differ in shape.
    """
    if not isinstance(data, Mapping):
        raise DataError(
            Loaded.of(data).name,
            "is iterable, so no test set can be split off; pass {'train': ..., 'test': ...}",
        )
    check_parts(data)
    if not is_map_style(data["test"]):
        raise DataError(
            Loaded.of(data["test"]).name,
            "cannot be the test set, which must have a length; pass some samples as a list: "
            "list(itertools.islice(dataset, 1000))",
        )
    _check_settings(data["train"], config)
    train, test = _open(data["train"], config), open_part(data["test"], None, config)
    ours, others = train.shape, test.shape
    if ours.columns.keys() != others.columns.keys() or len(ours.input_shape) != len(
        others.input_shape
    ):
        raise DataError(train.source, f"trains on {ours} but tests on {others}")
    return Dataset(train, test, train.source)


def _check_settings(data: Any, config: TrainConfig) -> None:
    """Raise a ConfigError if a setting promises what a stream cannot."""
    name = Loaded.of(data).name
    if config.training.deterministic:
        raise ConfigError(
            "training.deterministic",
            f"is not possible with {name}, which is iterable: which worker trains which sample "
            f"depends on the workers",
        )
    if config.input.on_bad_sample == "skip":
        raise ConfigError(
            "input.on_bad_sample",
            f"must be stop with {name}, which is iterable: after an error a stream cannot go on; "
            f"skip bad samples in its __iter__",
        )


def _open(data: Any, config: TrainConfig) -> IterableStyle:
    loaded = Loaded.of(data)
    if isinstance(data, torch_data.DataLoader) and data.batch_size is None:
        raise DataError(
            loaded.name,
            "must give single samples and its DataLoader a batch_size: raydl makes the batches",
        )
    lacks_format = (
        _is_hugging_face(loaded.dataset) and getattr(loaded.dataset, "_formatting", None) is None
    )
    if loaded.collate is torch_data.default_collate and lacks_format:
        # Its samples are lists otherwise.
        loaded = replace(loaded, dataset=loaded.dataset.with_format("torch"))
    num_samples = config.input.samples_per_epoch or _length_of(loaded)
    return IterableStyle(loaded, num_samples=num_samples)


def _length_of(loaded: Loaded) -> int:
    """Return the length of a stream, which is an epoch if the settings do not tell."""
    if not hasattr(loaded.dataset, "__len__"):
        raise ConfigError(
            "input.samples_per_epoch",
            f"must be set for {loaded.name}, which is iterable and has no length",
        )
    if not len(loaded.dataset):
        raise DataError(loaded.name, "holds no samples")
    return len(loaded.dataset)
