"""A set of samples, as the rest of raydl sees it: rows, batches of them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from raydl.data.ledger import split_evenly
from raydl.data.order import Order, Shuffled

Batch = Any
"""Tensors with one first dimension, that of the samples: a tuple, or a mapping by column.

(inputs, labels) of labelled pictures, (tokens, next tokens) of a text, ``{column: tensor}`` of a
table. A task knows which.
"""


@dataclass(frozen=True)
class DataShape:
    """The shape of the data, from which a task builds a model."""

    input_shape: tuple[int, ...]
    """Of one sample: channels, height, width of a picture; the tokens of a text; () of a table."""
    num_classes: int
    """Classes of a label, or tokens of a vocabulary; 0 where the data have neither."""
    class_names: tuple[str, ...] = ()
    """One name per class, where the data tell them."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of a table: the shape of one sample of each column, () for a number."""

    def __str__(self) -> str:
        if self.columns:
            return f"rows of {', '.join(self.columns)}"
        size = "x".join(map(str, self.input_shape))
        if len(self.input_shape) == 1:
            return f"texts of {size} tokens out of {self.num_classes}"
        return f"{size} pictures of {self.num_classes} classes"


class Samples(Protocol):
    """A set of samples. It travels to every worker, so large arrays lie in shared memory."""

    @property
    def num_samples(self) -> int:
        """Samples in the set, 1 or more."""
        ...

    @property
    def shape(self) -> DataShape:
        """The shape that a model is built for."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether samples are read when they are needed, which takes a while."""
        ...

    def order(self, seed: int) -> Order:
        """Return the order of the samples in each epoch, the same on all workers."""
        ...

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return samples as they lie in the set, on the CPU.

        Args:
            rows: int64, shape [B]; B may be 0.

        Raises:
            DataError: a sample can not be read; a streamed set alone.
        """
        ...

    def expect(self, rows: np.ndarray) -> None:
        """Get ready what will be fetched soon, and forget what will not."""
        ...


class InMemory:
    """Base of sets that are in memory as a whole."""

    @property
    def is_streamed(self) -> bool:
        """No."""
        return False

    def order(self: Samples, seed: int) -> Shuffled:
        """Return the order of the samples in each epoch."""
        return Shuffled(self.num_samples, seed)

    def expect(self, rows: np.ndarray) -> None:
        """Do nothing: all samples are here."""


@runtime_checkable
class MayLack(Protocol):
    """A set some of whose samples may turn out unreadable, and may be left out."""

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and a sentence for each that is left out.

        Raises:
            DataError: a sample can not be read, and none may be left out.
        """
        ...


class Prepare(Protocol):
    """Makes what a model takes from samples as they lie in the set."""

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return a batch to train on, on the device it is on.

        Args:
            batch: of ``Samples.fetch``.
            rows: its samples, int64, shape [B].
            epoch: the pass over the data, or None where the samples are scored.
        """
        ...


def as_they_are(batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
    """Return the batch."""
    return batch


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set of the same kind."""

    train: Samples
    test: Samples
    source: str
    """The source that the user named."""


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Return the tensors of a batch."""
    return iter(batch.values() if isinstance(batch, Mapping) else batch)


def num_samples_of(batch: Batch) -> int:
    """Return the samples in a batch."""
    return len(next(tensors_of(batch)))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device, which may still compute what was asked of it before."""
    if isinstance(batch, Mapping):
        return {name: _on(device, tensor) for name, tensor in batch.items()}
    return tuple(_on(device, tensor) for tensor in batch)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    # From pinned memory the device copies by itself; torch keeps that until it has.
    is_pinned = device.type == "cuda"
    return (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=is_pinned)


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples start..stop-1 of a batch."""
    if isinstance(batch, Mapping):
        return {name: tensor[start:stop] for name, tensor in batch.items()}
    return tuple(tensor[start:stop] for tensor in batch)


def parts_of(batch: Batch, num_parts: int, *, full: int) -> Iterator[tuple[Batch, float]]:
    """Return a batch in parts of nearly equal size, each with its share of the samples.

    Args:
        batch: of 1 sample or more.
        num_parts: of a full batch, 1 or more; a smaller one, at the tail of an epoch, has as many
            as it needs to be no larger. Parts of a sample or two would spoil batch norm.
        full: samples of a full batch.
    """
    num_samples, start = num_samples_of(batch), 0
    largest = math.ceil(full / num_parts)
    num_parts = min(num_parts, math.ceil(num_samples / largest))
    if num_parts == 1:
        yield batch, 1.0
        return
    for count in split_evenly(num_samples, num_parts):
        yield part_of(batch, start, start + count), count / num_samples
        start += count
