"""Tables in memory: columns of numbers, for custom tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data.samples import Batch, DataShape, InMemory


@dataclass(frozen=True)
class TableSet(InMemory):
    """A table in memory.

    Attributes:
        columns: arrays by name, float32, int64 or bool, shape [N, ...].
        target: column to predict, or "".
        class_names: names of its classes, or () if it is a number.
    """

    columns: Mapping[str, np.ndarray]
    target: str = ""
    class_names: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    @property
    def shape(self) -> DataShape:
        """The shape of each column, to build a model for."""
        columns = {name: array.shape[1:] for name, array in self.columns.items()}
        return DataShape(
            (), len(self.class_names), self.class_names, columns=columns, target=self.target
        )

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return ``{column: tensor}`` of these rows."""
        return {name: torch.from_numpy(array[rows]) for name, array in self.columns.items()}
