"""Interfaces of data sets: samples, batches and the order of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from raydl.data.ledger import split_evenly
from raydl.data.order import Order
from raydl.data.schema import Schema, size_text
from raydl.errors import DataError, failure_of_machine

Batch = Any
"""Tensors whose first dimension is the samples: a tuple, or a mapping by column.

(inputs, labels) for labelled images, (tokens, next tokens) for a text, ``{column: tensor}`` for
a table. The task knows the kind.
"""


@dataclass(frozen=True)
class DataShape:
    """The shape of the data, from which a task builds a model."""

    input_shape: tuple[int, ...]
    """Shape of one sample: [C, H, W] of an image; [tokens] of a text; [] of a table."""
    num_classes: int
    """Classes of a label or tokens of a vocabulary; 0 if the data have neither."""
    class_names: tuple[str, ...] = ()
    """One name per class, if the data have names."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one sample by column of a table, () for a number."""
    labels: str | int | None = None
    """Name or place in a batch of labels that ``raydl.data.target`` has found in the first samples;
    None: they have a usual name or place, or there are none."""
    is_numeric: bool = False
    """Whether a sample of one dimension holds numbers, not tokens."""
    target: str = ""
    """Column of a table to predict; "" if only the task knows what to do with the columns."""
    spread: float = 1.0
    """Standard deviation of a number to predict, over the training set."""

    @property
    def kind(self) -> str:
        """What a sample is: images, texts or tables."""
        if self.columns or self.is_numeric:
            return "tables"
        return "texts" if len(self.input_shape) == 1 else "images"

    @property
    def num_inputs(self) -> int:
        """Numbers in the columns of a table from which its target is predicted."""
        return sum(math.prod(s) for name, s in self.columns.items() if name != self.target)

    @property
    def has_labelled_images(self) -> bool:
        """Whether a sample is an image with a class."""
        return len(self.input_shape) == 3 and self.num_classes > 0

    def __str__(self) -> str:
        if self.columns:
            return f"rows of {', '.join(self.columns)}"
        size = size_text(self.input_shape)
        if self.is_numeric:
            return f"vectors of {size} numbers"
        if len(self.input_shape) == 1:
            return f"texts of {size} tokens out of {self.num_classes}"
        return f"{size} images of {self.num_classes} classes"


class Samples(Protocol):
    """A set of samples. Every worker receives it, so large arrays lie in shared memory."""

    @property
    def num_samples(self) -> int:
        """Samples in the set, 1 or more."""
        ...

    @property
    def shape(self) -> DataShape:
        """The shape to build a model for."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether samples are read from storage when they are needed."""
        ...

    def order(self, seed: int) -> Order:
        """Return the order of the samples in each epoch, the same on all workers."""
        ...

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return samples as they are stored, on the CPU.

        Args:
            rows: row numbers, int64, shape [B]; B may be 0.

        Raises:
            DataError: if a sample of a streamed set cannot be read.
        """
        ...

    def prefetch(self, rows: np.ndarray) -> None:
        """Start to read the rows that will be fetched soon, and drop others from the cache."""
        ...


@runtime_checkable
class SkipsUnreadable(Protocol):
    """A set that may skip samples that cannot be read."""

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and one sentence per skipped sample.

        Raises:
            DataError: see ``check_readable``.
        """
        ...


@runtime_checkable
class ReadByProcesses(Protocol):
    """A set that may be read by processes of its own."""

    @property
    def is_starting(self) -> bool:
        """Whether processes that read the samples have started and sent none yet."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A stream of samples, of which each worker reads a shard."""

    def take_shard(self, index: int, num_shards: int, *, start: int) -> None:
        """Read another shard from now on; do nothing if it is the present one.

        Args:
            index: number of the shard, 0..num_shards-1.
            num_shards: shards into which the stream is split.
            start: number of this start of the stream, for streams with an order per epoch.
        """
        ...


class Prepare(Protocol):
    """Turns samples as they are stored into the input of a model."""

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the prepared batch, on the same device.

        Args:
            batch: result of ``Samples.fetch``.
            rows: row numbers of the samples, int64, shape [B].
            epoch: pass over the data, or None for an evaluation.
        """
        ...


def check_readable(errors: Sequence[DataError], *, num_samples: int, skips: bool) -> None:
    """Raise the first error in the samples of a batch, unless samples are skipped.

    It is raised nevertheless if the machine failed at every sample: a worker whose disk fails would
    skip an epoch in no time.

    Args:
        errors: one per sample that cannot be read, with its cause.
        num_samples: samples in the batch.
        skips: whether samples that cannot be read are left out.
    """
    has_failed = len(errors) == num_samples and all(map(failure_of_machine, errors))
    if errors and (has_failed or not skips):
        raise errors[0]


def as_they_are(batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
    """Return the batch unchanged."""
    return batch


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set of the same kind."""

    train: Samples
    test: Samples
    source: str
    """Path, URI or name that the user gave."""
    schema: Schema = field(default_factory=dict)
    """What a sample holds; a run keeps it, and compares it at its resume. Empty: not known."""
    notes: tuple[str, ...] = ()
    """Sentences for the log, as about files that were not read."""


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Return the tensors of a batch."""
    return iter(batch.values() if isinstance(batch, Mapping) else batch)


def num_samples_of(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(tensors_of(batch)))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to a device, behind the work that is queued on the device."""
    if isinstance(batch, Mapping):
        return {name: _on(device, tensor) for name, tensor in batch.items()}
    return tuple(_on(device, tensor) for tensor in batch)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    # The device copies from pinned memory by itself; torch keeps that memory until then.
    is_pinned = device.type == "cuda"
    return (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=is_pinned)


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples start..stop-1 of a batch."""
    if isinstance(batch, Mapping):
        return {name: tensor[start:stop] for name, tensor in batch.items()}
    return tuple(tensor[start:stop] for tensor in batch)


def parts_of(batch: Batch, num_parts: int, *, full: int) -> list[Batch]:
    """Return parts of a batch of nearly equal size.

    Args:
        batch: a batch of 1 sample or more.
        num_parts: parts of a full batch, 1 or more. A smaller batch, at the end of an epoch, has
            fewer parts, since parts of one or two samples would spoil batch norm.
        full: samples in a full batch.
    """
    num_samples, start = num_samples_of(batch), 0
    largest = math.ceil(full / num_parts)
    num_parts = min(num_parts, math.ceil(num_samples / largest))
    if num_parts == 1:
        return [batch]
    parts = []
    for count in split_evenly(num_samples, num_parts):
        parts.append(part_of(batch, start, start + count))
        start += count
    return parts
