"""Finds the rows of a test set that make a metric of the center NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raydl.data import Batch
from raydl.data.samples import num_samples_of
from raydl.tasks import MetricSums, Task, sum_and_count

_ONE_BY_ONE = 32
"""Most rows that are scored one by one; a larger batch is halved before."""
_SHOWN = 5
"""Most rows in a sentence."""


@dataclass(frozen=True)
class NotFinite:
    """A metric that is NaN or infinite, and the first rows of the test set that make it so."""

    metric: str
    is_nan: bool
    """Otherwise it is infinite."""
    num_batches: int
    """Batches whose sum is not finite."""
    rows: Sequence[int]
    """First rows that have such a value by themselves, counted from 0."""
    within: Sequence[int]
    """First and last row of the smallest part found that has such a value."""
    holding: Sequence[str]
    """Columns that are NaN or infinite in the first of these rows or in this part."""
    has_finite: bool
    """Whether any row or batch has a finite value."""

    def sentence(self, num_batches: int) -> str:
        """Return what was found, with what to change.

        Args:
            num_batches: batches of the test set.
        """
        value = "NaN" if self.is_nan else "infinite"
        found = (
            f"the {self.metric} of the center on the test set is {value}, as it is in "
            f"{self.num_batches} of its {num_batches} batches"
        )
        if not self.has_finite and not self.holding:
            return f"{found} and in each row tried: the center has diverged; lower optimizer.lr"
        held = (
            f", with values in {' and '.join(self.holding)} that are not finite"
            if self.holding
            else ""
        )
        if not self.rows:
            first, last = self.within
            return (
                f"{found}, the first with rows {first} to {last} (counted from 0){held}; no row "
                f"has this value when it is scored alone: check that the task's metrics are "
                f"defined for such a batch"
            )
        rows = ", ".join(map(str, self.rows[:_SHOWN]))
        more = " and others" if len(self.rows) > _SHOWN else ""
        return (
            f"{found}, first in row{'s' if len(self.rows) > 1 else ''} {rows}{more} (counted from "
            f"0){held}; mend or remove such rows, or leave them out in the task's metrics"
        )


def find_not_finite(
    task: Task,
    model: nn.Module,
    get_batch: Callable[[int, int], Batch],
    sums: MetricSums,
    *,
    rows: np.ndarray,
    batch_size: int,
) -> NotFinite | None:
    """Return the first metric that is not finite, the loss before others, or None.

    The first batch with such a value is scored again, in halves and then row by row.

    Args:
        task: computes the metrics.
        model: the center.
        get_batch: returns the samples start..stop-1 of ``rows``.
        sums: of all ``rows``.
        rows: rows of the test set.
        batch_size: most samples of one batch.
    """
    if not sums.not_finite:
        return None
    metric = "loss" if "loss" in sums.not_finite else next(iter(sums.not_finite))
    bad = sums.not_finite[metric]
    num_batches = math.ceil(len(rows) / batch_size)
    search = _Search(task, model, get_batch, metric, has_finite=len(bad) < num_batches)
    first, last = bad[0], min(bad[0] + batch_size, len(rows))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            first, last = search.narrowed(first, last)
            found = search.one_by_one(first, last) if last - first <= _ONE_BY_ONE else []
    except Exception:  # a user's task may need more than one sample
        found = []
    finally:
        model.train(was_training)
    shown = get_batch(found[0], found[0] + 1) if found else get_batch(first, last)
    return NotFinite(
        metric,
        is_nan=math.isnan(sums.sums[metric]),
        num_batches=len(bad),
        rows=[int(rows[index]) for index in found],
        within=[int(rows[first]), int(rows[last - 1])],
        holding=_columns_not_finite(shown),
        has_finite=search.has_finite,
    )


class _Search:
    """Scores parts of a batch in which a metric is not finite."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        get_batch: Callable[[int, int], Batch],
        metric: str,
        *,
        has_finite: bool,
    ) -> None:
        self._task, self._model, self._get_batch = task, model, get_batch
        self._metric = metric
        self.has_finite = has_finite

    def narrowed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first part of at most 32 rows that is not finite, or a larger one."""
        while stop - start > _ONE_BY_ONE:
            middle = (start + stop) // 2
            if self._is_bad(start, middle):
                stop = middle
            elif self._is_bad(middle, stop):
                start = middle
            else:  # only together
                break
        return start, stop

    def one_by_one(self, start: int, stop: int) -> list[int]:
        """Return the rows that are not finite by themselves."""
        return [index for index in range(start, stop) if self._is_bad(index, index + 1)]

    def _is_bad(self, start: int, stop: int) -> bool:
        batch = self._get_batch(start, stop)
        if not num_samples_of(batch):  # all of them were skipped
            return False
        value = self._task.metrics(self._model, batch)[self._metric]
        total, _ = sum_and_count(self._task.name, self._metric, value)
        is_finite = math.isfinite(total)
        self.has_finite |= is_finite
        return not is_finite


def _columns_not_finite(batch: Batch) -> list[str]:
    """Return the names of the tensors of a batch that have a value that is NaN or infinite."""
    if isinstance(batch, Mapping):
        named = dict(batch)
    else:
        names = ("inputs", "targets") if len(batch) == 2 else map(str, range(len(batch)))
        named = dict(zip((f"the {name}" for name in names), batch, strict=True))
    return [
        name
        for name, values in named.items()
        if isinstance(values, torch.Tensor)
        and values.is_floating_point()
        and not bool(torch.isfinite(values).all())
    ]


def joined(parts: Sequence[NotFinite | None]) -> NotFinite | None:
    """Return what was found in all parts of a test set together, or None."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    first = min(found, key=lambda part: part.metric != "loss")
    same = [part for part in found if part.metric == first.metric]
    return NotFinite(
        first.metric,
        is_nan=any(part.is_nan for part in same),
        num_batches=sum(part.num_batches for part in same),
        rows=first.rows,
        within=first.within,
        holding=first.holding,
        has_finite=len(same) < len(parts) or any(part.has_finite for part in same),
    )
