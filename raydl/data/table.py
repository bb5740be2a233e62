"""Tables in memory: columns of numbers, for custom tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data.samples import Batch, DataShape, InMemory

Columns = Mapping[str, np.ndarray]
"""Arrays by column, shape [N, ...], with the rows as first dimension."""


@dataclass(frozen=True)
class TableSet(InMemory):
    """A table in memory.

    Attributes:
        columns: float32, int64 or bool, shape [N, ...].
    """

    columns: Columns

    @property
    def num_samples(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    @property
    def shape(self) -> DataShape:
        """The shape of each column, to build a model for."""
        return DataShape((), 0, columns={name: a.shape[1:] for name, a in self.columns.items()})

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return ``{column: tensor}`` of these rows."""
        return {name: torch.from_numpy(array[rows]) for name, array in self.columns.items()}
