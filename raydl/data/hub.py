"""A ``datasets.Dataset``: its own Arrow rows, by the road of its saved folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import schema_of


class HubRows(Piece):
    """Rows of a ``datasets.Dataset``.

    Args:
        data: one without a format.
    """

    def __init__(self, data: Any) -> None:
        self.name, self.num_rows = "datasets.Dataset", len(data)
        self.schema = schema_of(data.features.arrow_schema)
        self._rows = data.with_format("arrow")

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some columns of some rows, as they are stored."""
        with reading(self.name, "cannot be read"):
            table = self._rows.select_columns(list(names))[rows]
        return {name: table[name] for name in names}

    def where(self, row: int) -> str:
        """Return the row, for messages."""
        return f"{self.name}, row {row}"


def is_stored(data: Any) -> bool:
    """Whether something is a ``datasets.Dataset`` without a format.

    One with a format or a transform gives other samples than it stores.
    """
    kind = getattr(sys.modules.get("datasets"), "Dataset", ())
    return isinstance(data, kind) and data.format["type"] is None
