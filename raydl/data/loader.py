"""Loads the samples that a worker has claimed, as batches in the order of the epoch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydl.config import TrainConfig
from raydl.data.augment import Augment
from raydl.data.in_memory import ImageSet, channel_statistics
from raydl.data.ledger import Span
from raydl.data.order import Order
from raydl.data.part import Streamed
from raydl.data.samples import (
    Batch,
    Dataset,
    Prepare,
    ReadByProcesses,
    Samples,
    Sharded,
    SkipsUnreadable,
    as_they_are,
    to_device,
)
from raydl.data.scaling import TableScaler, statistics_of_table
from raydl.errors import ConfigError, DataError
from raydl.metrics import TimeParts

Statistics = Mapping[str, Any]
"""Mean and standard deviation, ``mean`` and ``std``: of images by channel, of a table by column."""


class Normalizer:
    """Maps uint8 images to float32 with mean 0 and standard deviation 1 per channel.

    Args:
        mean: mean per channel on the scale 0..1, shape [C].
        std: standard deviation per channel on the scale 0..1, shape [C].
    """

    def __init__(self, mean: np.ndarray, std: np.ndarray) -> None:
        self.statistics = {"mean": mean.tolist(), "std": std.tolist()}
        """Both, by name, for a file."""
        # (v/255 - mean)/std as one multiply and one add.
        self._scale = torch.tensor(1.0 / (255.0 * std), dtype=torch.float32).view(-1, 1, 1)
        self._shift = torch.tensor(-mean / std, dtype=torch.float32).view(-1, 1, 1)

    @classmethod
    def of(cls, images: ImageSet) -> Normalizer:
        """Return the normalizer with the statistics of a training set."""
        return cls(*channel_statistics(images.images))

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Sequence[float]]) -> Normalizer:
        """Return the normalizer with these ``statistics``."""
        return cls(*(np.array(statistics[name], np.float32) for name in ("mean", "std")))

    def normalized(self, images: Tensor) -> Tensor:
        """Return normalized float32 images, shape [B, C, H, W], from uint8 images."""
        device = images.device
        if self._scale.device != device:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        return images.to(torch.float32).mul_(self._scale).add_(self._shift)

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the batch with its images, its first tensor, normalized."""
        images, *others = batch
        return self.normalized(images), *others


def statistics_of(prepare: Prepare) -> Statistics | None:
    """Return mean and standard deviation by which a transform normalizes; None: it does not."""
    normalizer = prepare.prepare if isinstance(prepare, Augment) else prepare
    return normalizer.statistics if isinstance(normalizer, Normalizer | TableScaler) else None


def preparation_for(
    dataset: Dataset,
    config: TrainConfig,
    *,
    scales_tables: bool = False,
    kept: Statistics | None = None,
) -> Prepare:
    """Return the transform from the samples of a dataset to the input of a model.

    It normalizes images and, for training, augments them by ``input.augment``.

    Args:
        dataset: the dataset.
        config: settings of the run.
        scales_tables: whether to make (inputs, target) of a table with a target.
        kept: statistics by which the run has normalized so far; None: those of the training set.

    Raises:
        ConfigError: if ``input.augment`` is set and the data are not images.
        DataError: if a table lacks a column that the run has, or its numbers have no mean.
    """
    names, train = config.input.augmentations, dataset.train
    if scales_tables and train.shape.target and not names:
        return _scaler(dataset, kept)
    normalizer = None
    if kept:
        normalizer = Normalizer.from_statistics(kept)
    elif isinstance(train, ImageSet):
        normalizer = Normalizer.of(train)
    elif isinstance(train, Streamed) and train.part.has_images:
        images, _ = train.fetch_readable(train.statistics_rows())[0]
        normalizer = Normalizer(*channel_statistics(images.numpy()))
    if not names:
        return normalizer or as_they_are
    if normalizer is None:
        raise ConfigError(
            "input.augment",
            f"must be none for {train.shape}, got {config.input.augment}: it changes images only",
        )
    return Augment(normalizer, names, seed=config.training.seed)


def _scaler(dataset: Dataset, kept: Statistics | None) -> TableScaler:
    shape = dataset.train.shape
    statistics = kept or statistics_of_table(dataset.train)
    sizes = {name: len(mean) for name, mean in statistics["mean"].items()}
    for name, size in sizes.items():
        if size != math.prod(shape.columns.get(name, (0,))):
            problem = f"must have a column {name!r} of {size} numbers, as the run began with"
            raise DataError(dataset.source, problem)
    return TableScaler(shape.target, statistics)


class Batches:
    """Prepared batches of any rows of a set.

    Args:
        samples: the set; its arrays may be read-only and shared.
        prepare: turns samples into the input of a model.
    """

    def __init__(self, samples: Samples, prepare: Prepare) -> None:
        self.samples = samples
        self.prepare = prepare

    @property
    def num_samples(self) -> int:
        """Samples in the set."""
        return self.samples.num_samples

    def batch(self, rows: np.ndarray) -> Batch:
        """Return rows prepared for evaluation, on the CPU.

        Args:
            rows: row numbers, int64, shape [B]; B may be 0.
        """
        return self.prepare(self.samples.fetch(rows), rows, None)


Fetched = tuple[Batch, np.ndarray, list[str]]
"""A batch, its rows, and one sentence per skipped sample."""
Step = tuple[int, np.ndarray]
"""Samples of a local step: the epoch, and the positions in it."""
_NUM_AHEAD = 4
"""Batches of a streamed set to fetch while a step computes."""


@dataclass(frozen=True)
class _Rows:
    """The samples of a local step."""

    rows: np.ndarray
    blocks: np.ndarray
    """Block of each row, by a number that is unique over all epochs."""


@dataclass(frozen=True)
class LeftOut:
    """Samples that were skipped because they could not be read."""

    num_samples: int = 0
    """Number of them since the worker started."""
    last: str = ""
    """The problem with the last one."""


class Feed:
    """The training set as batches, in the order of each epoch.

    A separate thread fetches all batches of a streamed set, and the next ones while steps compute.
    It alone does, since a set of the user's may keep a file open that two threads must not read.

    Args:
        batches: the training set.
        order: order of its samples; the same on all workers.
        device: device of the returned batches.
        time_parts: counts the time spent here.
    """

    def __init__(
        self, batches: Batches, order: Order, *, device: torch.device, time_parts: TimeParts
    ) -> None:
        self._batches = batches
        # Checked once: a check of a protocol takes as long as fetching a small batch.
        self._skipping = batches.samples if isinstance(batches.samples, SkipsUnreadable) else None
        self._sharded = batches.samples if isinstance(batches.samples, Sharded) else None
        self._by_processes = (
            batches.samples if isinstance(batches.samples, ReadByProcesses) else None
        )
        self._order = order
        self._device = device
        self._parts = time_parts
        self._is_streamed = batches.samples.is_streamed
        self._prefetched: dict[bytes, Future[Fetched]] = {}
        self.left_out = LeftOut()
        self._upcoming: list[np.ndarray] = []
        self._steps: deque[_Rows] = deque()
        self._reserved = np.empty(0, np.int64)
        self._blocks_ahead: frozenset[int] = frozenset()
        # The pool starts its thread at the first fetch.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def batch(self, epoch: int, positions: np.ndarray) -> Batch:
        """Return the samples at some positions of an epoch, prepared for the model."""
        with self._parts.measure("data_io"):
            rows = self._order.rows(epoch, positions)
            key = rows.tobytes()
            self._upcoming = [other for other in self._upcoming if other.tobytes() != key]
            future = self._prefetched.pop(key, None)
            if future is None and self._is_streamed:
                future = self._pool.submit(self._fetch, rows)
            batch, rows, problems = self._fetch(rows) if future is None else future.result()
            if problems:
                self.left_out = LeftOut(self.left_out.num_samples + len(problems), problems[-1])
        if self._device.type != "cpu":
            with self._parts.measure("host_device_data"):
                batch = to_device(batch, self._device)
        with self._parts.measure("data_io"):
            prepared = self._batches.prepare(batch, rows, epoch)
            # Only now: the decoding thread holds Python's lock, and this thread would wait for it.
            if self._steps:
                self._steps.popleft()
                self._prefetch_blocks()
            self._fetch_ahead()
        return prepared

    def _fetch(self, rows: np.ndarray) -> Fetched:
        if self._skipping is not None:
            return self._skipping.fetch_readable(rows)
        return self._batches.samples.fetch(rows), rows, []

    def take_shard(self, place: tuple[int, int], *, start: int) -> None:
        """Read the shard of a worker's place from now on, if the training set is a stream.

        Args:
            place: (rank, number of workers).
            start: number of this start of the stream, if the place has changed.
        """
        if self._sharded is not None:
            self._sharded.take_shard(*place, start=start)

    @property
    def is_starting(self) -> bool:
        """Whether processes that read the samples have started and sent none yet."""
        return self._by_processes is not None and self._by_processes.is_starting

    def prefetch(self, steps: Sequence[Step], ahead: Sequence[tuple[int, Span]]) -> None:
        """Start to fetch the local steps of a round, and the samples reserved for later rounds.

        Args:
            steps: local steps of the round.
            ahead: reserved positions, (epoch, span).
        """
        if not self._is_streamed or not len(steps):
            return
        with self._parts.measure("data_io"):
            self._steps = deque(
                _Rows(self._order.rows(epoch, part), self._blocks_of(epoch, part))
                for epoch, part in steps
            )
            near = [self._order.near(e, start) for e, (start, _) in ahead]
            self._reserved = np.concatenate([np.empty(0, np.int64), *near])
            self._blocks_ahead = frozenset()
            size = max(len(part) for _, part in steps)  # the last batch of an epoch may be smaller
            later = [self._order.rows(e, p) for e, p in self._first_of(ahead, size)]
            self._upcoming = [step.rows for step in self._steps] + later
            # Other workers have claimed the remaining batches. Cancel these fetches before their
            # row groups leave the cache.
            upcoming = {rows.tobytes() for rows in self._upcoming}
            for key in [key for key in self._prefetched if key not in upcoming]:
                self._prefetched.pop(key).cancel()
            self._cancel_later()
            self._prefetch_blocks()
            self._fetch_ahead()

    def _blocks_of(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        cuts = self._order.cuts(epoch) or [self._order.num_samples]
        in_epoch = np.searchsorted(cuts, positions, side="right")
        return epoch * self._order.num_samples + in_epoch  # an epoch has fewer blocks than samples

    def _prefetch_blocks(self) -> None:
        """Have the set read ahead when the next few steps enter a new block.

        It reads the rows of the round in the blocks of these steps, and the reserved rows. Later
        blocks wait, so that memory does not grow with the period.
        """
        next_steps = list(islice(self._steps, _NUM_AHEAD + 1))
        blocks = frozenset(block for step in next_steps for block in step.blocks.tolist())
        if blocks and blocks != self._blocks_ahead:
            self._blocks_ahead = blocks
            rows = [step.rows[np.isin(step.blocks, list(blocks))] for step in self._steps]
            self._batches.samples.prefetch(np.concatenate([*rows, self._reserved]))

    def _first_of(
        self, spans: Sequence[tuple[int, Span]], size: int
    ) -> list[tuple[int, np.ndarray]]:
        """Return the first few batches of ``size`` positions, all of the first epoch, with it."""
        if not spans or size == 0:
            return []
        epoch = spans[0][0]
        positions = positions_of([span for e, span in spans if e == epoch])[: _NUM_AHEAD * size]
        if positions[-1] + 1 < self._order.num_samples:  # only the last batch may be smaller
            positions = positions[: len(positions) // size * size]
        starts = range(0, len(positions), size)
        return [(epoch, positions[start : start + size]) for start in starts]

    def stop_fetching(self) -> None:
        """Cancel the fetches that have not begun, and wait for the one that has, if any.

        The next round fetches again. For a score in the same process, and for the end of a run.
        """
        self._cancel(list(self._prefetched))
        wait(self._prefetched.values())

    def _cancel(self, keys: list[bytes]) -> None:
        """Cancel fetches that have not begun."""
        for key in keys:
            if self._prefetched[key].cancel():
                del self._prefetched[key]

    def _keys_of_round(self) -> set[bytes]:
        return {step.rows.tobytes() for step in self._steps}

    def _cancel_later(self) -> None:
        """Cancel fetches for later rounds that would delay a batch of this one."""
        of_round = self._keys_of_round()
        if not of_round <= self._prefetched.keys():
            self._cancel([key for key in self._prefetched if key not in of_round])

    def _fetch_ahead(self) -> None:
        """Fetch the next batches, up to a number in this round, and in all of them.

        Batches of later rounds do not keep those of this round from being fetched. They may wait
        for long: near the end of an epoch this worker takes over samples that others reserved.
        """
        of_round = self._keys_of_round()
        while self._upcoming:
            key = self._upcoming[0].tobytes()
            if key not in self._prefetched:
                ahead = self._prefetched.keys()
                if len(ahead & of_round if key in of_round else ahead) >= _NUM_AHEAD:
                    return
                self._prefetched[key] = self._pool.submit(self._fetch, self._upcoming[0])
            self._upcoming.pop(0)


def positions_of(spans: list[Span]) -> np.ndarray:
    """Return the positions of spans in order, int64, shape [num_positions]."""
    parts = [np.arange(start, stop) for start, stop in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
