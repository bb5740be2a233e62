"""Rows of a table as the input of a model: its numbers in one row each, scaled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raydl.data.samples import Batch, Samples
from raydl.errors import DataError

_CHUNK = 8192
"""Rows to read at once for mean and deviation."""

TableStatistics = Mapping[str, Mapping[str, list[float]]]
"""``mean`` and ``std`` of the numbers in each column, by name; those of a target if it is a
number."""


class TableScaler:
    """Maps rows of a table to (inputs, float32 [B, num_inputs]; target [B]).

    Inputs have mean 0 and standard deviation 1 over the training set, and so has a target that is a
    number. Classes stay as they are.

    Args:
        target: name of the target's column.
        statistics: mean and standard deviation of each other column, in the order of the inputs.
    """

    def __init__(self, target: str, statistics: TableStatistics) -> None:
        self.statistics = statistics
        """Both, by name, for a file."""
        self.target = target
        self._inputs = {name: len(m) for name, m in statistics["mean"].items() if name != target}
        self._mean, self._std = (
            torch.tensor([v for name in self._inputs for v in values[name]], dtype=torch.float64)
            for values in (statistics["mean"], statistics["std"])
        )

    @property
    def spread(self) -> float:
        """Standard deviation of a target that is a number; 1 for classes."""
        return self.statistics["std"].get(self.target, [1.0])[0]

    def __call__(self, batch: Batch, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return (inputs, target) of rows by column."""
        target = batch[self.target]
        if self._mean.device != target.device:
            self._mean, self._std = self._mean.to(target.device), self._std.to(target.device)
        # Times and ids have more digits than float32 before their mean is subtracted.
        columns = [batch[name].reshape(len(target), n).double() for name, n in self._inputs.items()]
        inputs = ((torch.cat(columns, 1) - self._mean) / self._std).float()
        if self.target in self.statistics["mean"]:
            target = (
                (target.double() - self.statistics["mean"][self.target][0]) / self.spread
            ).float()
        return inputs, target


def statistics_of_table(samples: Samples) -> TableStatistics:
    """Return mean and standard deviation of the columns of a table; 1 for a constant.

    Raises:
        DataError: if a number is NaN or infinite, or a row cannot be read.
    """
    shape = samples.shape
    names = [name for name in shape.columns if name != shape.target or not shape.num_classes]
    moments = {name: _Moments() for name in names}
    for start in range(0, samples.num_samples, _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, samples.num_samples))
        samples.prefetch(rows)
        batch = samples.fetch(rows)
        for name, seen in moments.items():
            seen.add(batch[name].reshape(len(batch[name]), -1).double())
            if not torch.isfinite(seen.mean).all():
                problem = f"column {name!r} holds NaN or infinite numbers, which have no mean"
                raise DataError("the training set", problem)
    return {
        "mean": {name: seen.mean.tolist() for name, seen in moments.items()},
        "std": {name: seen.std.tolist() for name, seen in moments.items()},
    }


class _Moments:
    """Mean and variance of rows that come in parts (Chan et al. 1983)."""

    def __init__(self) -> None:
        self.mean: Tensor = torch.zeros(1, dtype=torch.float64)
        self._squares: Tensor = torch.zeros(1, dtype=torch.float64)
        self._count = 0

    def add(self, values: Tensor) -> None:
        """Add rows, float64, shape [B, n]."""
        count = len(values)
        if not count:
            return
        mean, total = values.mean(0), self._count + count
        delta = mean - self.mean
        self._squares = (
            self._squares + ((values - mean) ** 2).sum(0) + delta**2 * self._count * count / total
        )
        self.mean, self._count = self.mean + delta * count / total, total

    @property
    def std(self) -> Tensor:
        """Standard deviation, or 1 where all values are equal."""
        std = (self._squares / max(1, self._count)).sqrt()
        return torch.where(std > 0, std, 1.0)
