"""The labels of a batch: which of its tensors they are, and how many of them count.

A loss that is a mean over labels, as torch's cross entropy is, leaves out the entries of -100. How
much a batch counts is then the number of its other entries, not of its samples.

Which tensor has the labels is decided by name, place and type, and for other names once by the
driver, from the first samples. So it is the same for all batches, on all ranks, after a resume:
the counts of a run have one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydl.data.loader import Batches
from raydl.data.samples import Batch, DataShape

IGNORED = -100
"""The label of an entry that the losses of torch and transformers leave out."""

Key = str | int
"""Name of a tensor in a batch that is a mapping, or its place in a tuple."""

_NAMES = ("labels", "label", "targets", "target", "y")
_FIRST_SAMPLES = 256
"""Samples in which the driver looks for labels of other names."""
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def labels_of(batch: Batch, found: Key | None = None) -> tuple[Key, Tensor] | None:
    """Return the labels of a batch, and which of its tensors they are.

    These are the tensor that the driver has found; else of a tuple the last one, and of a mapping
    the first of ``labels``, ``label``, ``targets``, ``target`` and ``y`` that is there. None: there
    is no such tensor, or it has no signed integers.

    Args:
        batch: the batch.
        found: ``DataShape.labels``, if the driver has found them.
    """
    key = _usual_key(batch) if found is None else found
    labels = None if key is None else batch[key]
    return None if key is None or labels is None or not _is_signed(labels) else (key, labels)


def shape_with_labels(batches: Batches, first: Batch) -> tuple[DataShape, str]:
    """Return the shape of the samples, with the labels if they have an unusual name or place.

    These are the only tensor of signed integers in which some of the first samples have -100.

    Args:
        batches: the training set.
        first: a batch of its first samples; more are read only if there are such tensors.

    Returns:
        The shape; and a sentence if several tensors may have the labels, else an empty text.
    """
    shape, usual = batches.samples.shape, _usual_key(first)
    if isinstance(first, Mapping) and usual is not None:  # a name is certain, a place is not
        return shape, ""
    if all(key == usual for key, _ in _signed(first)):
        return shape, ""
    rows = batches.batch(np.arange(min(_FIRST_SAMPLES, batches.num_samples)))
    found = [key for key, tensor in _signed(rows) if bool((tensor == IGNORED).any())]
    if not found or usual in found:
        return shape, ""
    if len(found) == 1:
        return replace(shape, labels=found[0]), ""
    names = " and ".join(map(repr, found))
    return shape, (
        f"{names} both hold entries of {IGNORED}, so it is not known over what the loss is a mean: "
        f"a batch counts by its samples; define count(batch) of the task to change it"
    )


def _usual_key(batch: Batch) -> Key | None:
    if isinstance(batch, Mapping):
        return next((name for name in _NAMES if name in batch), None)
    return len(batch) - 1


def _signed(batch: Batch) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors of signed integers, each with its key."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return ((key, tensor) for key, tensor in named if _is_signed(tensor))


def _is_signed(tensor: Tensor) -> bool:
    return tensor.dtype in _SIGNED
