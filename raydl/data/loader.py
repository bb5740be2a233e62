"""Loads what a worker trains on: the samples that it claimed, in the epoch's order, as batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from raydl.config import TrainConfig
from raydl.data.augment import Augment
from raydl.data.images import ImageSet, channel_statistics
from raydl.data.ledger import Span
from raydl.data.order import Order
from raydl.data.samples import Batch, Dataset, MayLack, Prepare, Samples, as_they_are, to_device
from raydl.data.streaming import StreamedPictures
from raydl.errors import ConfigError
from raydl.metrics import TimeParts


class Normalizer:
    """Maps uint8 pictures to float32 with mean 0 and deviation 1 per channel.

    Args:
        mean: on the scale 0..1, shape [C].
        std: on the scale 0..1, shape [C].
    """

    def __init__(self, mean: np.ndarray, std: np.ndarray) -> None:
        # (v/255 - mean)/std as one multiply and one add.
        self._scale = torch.tensor(1.0 / (255.0 * std), dtype=torch.float32).view(-1, 1, 1)
        self._shift = torch.tensor(-mean / std, dtype=torch.float32).view(-1, 1, 1)

    @classmethod
    def of(cls, images: ImageSet) -> Normalizer:
        """Return the normalizer with the statistics of this (training) set."""
        return cls(*channel_statistics(images.images))

    def normalized(self, pictures: Tensor) -> Tensor:
        """Return float32 pictures, shape [B, C, H, W], from uint8 ones."""
        device = pictures.device
        if self._scale.device != device:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        return pictures.to(torch.float32).mul_(self._scale).add_(self._shift)

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the batch with its pictures, which come first, normalised."""
        pictures, *others = batch
        return self.normalized(pictures), *others


def preparation_for(dataset: Dataset, config: TrainConfig) -> Prepare:
    """Return the transform that readies a dataset's samples for a model.

    Pictures are normalised, and for training changed as ``input.augment`` says.

    Raises:
        ConfigError: ``input.augment`` is set for what are no pictures.
    """
    names, normalizer = config.input.augmentations, _normalizer_for(dataset.train)
    if not names:
        return normalizer or as_they_are
    if normalizer is None:
        raise ConfigError(
            "input.augment",
            f"changes pictures, got {config.input.augment} for {dataset.train.shape}; "
            f"set it to none",
        )
    return Augment(normalizer, names, seed=config.training.seed)


def _normalizer_for(samples: Samples) -> Normalizer | None:
    """Return the normalizer with the statistics of a set; None if it holds no pictures."""
    if isinstance(samples, ImageSet):
        return Normalizer.of(samples)
    if isinstance(samples, StreamedPictures):
        pictures, _ = samples.fetch_readable(samples.rows_across())[0]
        return Normalizer(*channel_statistics(pictures.numpy()))
    return None


class Batches:
    """Any rows of a set as a batch.

    Args:
        samples: the set; its arrays may be read-only and shared.
        prepare: makes a batch ready for a model.
    """

    def __init__(self, samples: Samples, prepare: Prepare) -> None:
        self.samples = samples
        self.prepare = prepare

    @property
    def num_samples(self) -> int:
        """Samples in the set."""
        return self.samples.num_samples

    def batch(self, rows: np.ndarray) -> Batch:
        """Return these rows as they are scored, on the CPU.

        Args:
            rows: int64, shape [B]; B may be 0.
        """
        return self.prepare(self.samples.fetch(rows), rows, None)


Fetched = tuple[Batch, np.ndarray, list[str]]
"""A batch, its rows, and what is wrong with those that are left out."""
Step = tuple[int, np.ndarray]
"""Samples of a local step: the epoch, and its positions in it."""
_NUM_AHEAD = 4
"""Batches of a streamed set that are fetched while a step computes."""


@dataclass(frozen=True)
class _Rows:
    """The samples of a local step."""

    rows: np.ndarray
    blocks: np.ndarray
    """Of each row: which block it is in, a number that no block of another epoch has."""


@dataclass(frozen=True)
class LeftOut:
    """Samples that could not be read, and were skipped."""

    num_samples: int = 0
    """How many, since the worker started."""
    last: str = ""
    """The problem of the last one."""


class Feed:
    """The training set in the order of each epoch.

    Batches of a streamed set are fetched in a thread of their own while steps compute.

    Args:
        batches: the training set.
        order: of its samples; the same on all workers.
        device: where batches go.
        time_parts: where the time is counted.
    """

    def __init__(
        self, batches: Batches, order: Order, *, device: torch.device, time_parts: TimeParts
    ) -> None:
        self._batches = batches
        # Asked once: to ask for a protocol takes as long as to fetch a small batch.
        self._may_lack = batches.samples if isinstance(batches.samples, MayLack) else None
        self._order = order
        self._device = device
        self._parts = time_parts
        self._ahead: dict[bytes, Future[Fetched]] = {}
        self.left_out = LeftOut()
        self._to_come: list[np.ndarray] = []
        self._steps: deque[_Rows] = deque()
        self._reserved = np.empty(0, np.int64)
        self._blocks_expected: frozenset[int] = frozenset()
        self.num_in_batch = 0
        """Samples in the last batch, but for those that were left out."""
        # No thread runs before there is something to fetch.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def batch(self, epoch: int, positions: np.ndarray) -> Batch:
        """Return the samples at some positions of an epoch, ready for the model."""
        with self._parts.measure("data_io"):
            rows = self._order.rows(epoch, positions)
            batch, rows, lacking = self._take(rows)
            self.num_in_batch = len(rows)
            if lacking:
                self.left_out = LeftOut(self.left_out.num_samples + len(lacking), lacking[-1])
        if self._device.type != "cpu":
            with self._parts.measure("host_device_data"):
                batch = to_device(batch, self._device)
        with self._parts.measure("data_io"):
            prepared = self._batches.prepare(batch, rows, epoch)
            # Not before: who decodes holds Python's lock, and this thread would wait for it.
            if self._steps:
                self._steps.popleft()
                self._expect_soon()
            self._fetch_ahead()
        return prepared

    def _take(self, rows: np.ndarray) -> Fetched:
        """Return the batch that was fetched ahead, or fetch it now."""
        key = rows.tobytes()
        self._to_come = [other for other in self._to_come if other.tobytes() != key]
        future = self._ahead.pop(key, None)
        return self._fetch(rows) if future is None else future.result()

    def _fetch(self, rows: np.ndarray) -> Fetched:
        if self._may_lack is not None:
            return self._may_lack.fetch_readable(rows)
        return self._batches.samples.fetch(rows), rows, []

    def expect(self, steps: Sequence[Step], ahead: Sequence[tuple[int, Span]]) -> None:
        """Get ready what comes next: a round's local steps, and what is reserved for later ones.

        Args:
            steps: of the round.
            ahead: what will be claimed next, (epoch, positions).
        """
        if not self._batches.samples.is_streamed or not len(steps):
            return
        with self._parts.measure("data_io"):
            self._note(steps, ahead)
            size = len(steps[0][1])
            later = [self._order.rows(e, part) for e, part in self._first_of(ahead, size)]
            self._to_come = [step.rows for step in self._steps] + later
            wanted = {rows.tobytes() for rows in self._to_come}
            self._drop(self._ahead.keys() - wanted)  # before their row groups are forgotten
            self._expect_soon()
            self._fetch_ahead()

    def _drop(self, keys: Set[bytes]) -> None:
        """Fetch these batches no more: others took them, and nobody expects their row groups."""
        for key in keys:
            self._ahead.pop(key).cancel()

    def _note(self, steps: Sequence[Step], ahead: Sequence[tuple[int, Span]]) -> None:
        """Note what a round will train on, and the row groups of what is reserved."""
        self._steps = deque(
            _Rows(self._order.rows(epoch, part), self._blocks_of(epoch, part))
            for epoch, part in steps
        )
        near = [self._order.near(e, start) for e, (start, _) in ahead]
        self._reserved = np.concatenate([np.empty(0, np.int64), *near])
        self._blocks_expected = frozenset()

    def _blocks_of(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        cuts = self._order.cuts(epoch) or [self._order.num_samples]
        in_epoch = np.searchsorted(cuts, positions, side="right")
        return epoch * self._order.num_samples + in_epoch  # an epoch has fewer blocks than samples

    def _expect_soon(self) -> None:
        """Tell the set which rows come soon, when a block is new among them.

        These are the round's in the blocks of the next few steps, and what is reserved. What lies
        further off waits, so that memory does not grow with the period.
        """
        soon = list(islice(self._steps, _NUM_AHEAD + 1))
        blocks = frozenset(block for step in soon for block in step.blocks.tolist())
        if blocks and blocks != self._blocks_expected:
            self._blocks_expected = blocks
            rows = [step.rows[np.isin(step.blocks, list(blocks))] for step in self._steps]
            self._batches.samples.expect(np.concatenate([*rows, self._reserved]))

    def _first_of(
        self, spans: Sequence[tuple[int, Span]], size: int
    ) -> list[tuple[int, np.ndarray]]:
        """Return the first few batches of ``size`` positions of the first epoch, with the epoch."""
        if not spans or size == 0:
            return []
        epoch = spans[0][0]
        positions = positions_of([span for e, span in spans if e == epoch])[: _NUM_AHEAD * size]
        if positions[-1] + 1 < self._order.num_samples:  # a smaller batch ends the epoch alone
            positions = positions[: len(positions) // size * size]
        starts = range(0, len(positions), size)
        return [(epoch, positions[start : start + size]) for start in starts]

    def _fetch_ahead(self) -> None:
        while self._to_come and len(self._ahead) < _NUM_AHEAD:
            rows = self._to_come.pop(0)
            if rows.tobytes() not in self._ahead:
                self._ahead[rows.tobytes()] = self._pool.submit(self._fetch, rows)


def positions_of(spans: list[Span]) -> np.ndarray:
    """Return the positions of spans in order, int64."""
    parts = [np.arange(start, stop) for start, stop in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
