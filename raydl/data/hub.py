"""A ``datasets.Dataset`` of images: its own Arrow rows, by the road of its saved folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydl.config import InputConfig
from raydl.data.datasets import describe
from raydl.data.map_style import check_parts
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.samples import Dataset
from raydl.data.schema import schema_of
from raydl.data.sources import Source

_SOURCE = "datasets.Dataset"


class HubRows(Piece):
    """Rows of a ``datasets.Dataset``.

    Args:
        data: one without a format.
    """

    def __init__(self, data: Any) -> None:
        self.name, self.num_rows = _SOURCE, len(data)
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


def holds_images(data: Any) -> bool:
    """Whether something is a ``datasets.Dataset`` with a column of images and no format.

    One with a format or a transform gives other samples than it stores.
    """
    kind = getattr(sys.modules.get("datasets"), "Dataset", ())
    if not isinstance(data, kind) or data.format["type"] is not None:
        return False
    return any(f.kind == "image" for f in schema_of(data.features.arrow_schema).values())


def from_hub(data: Any, *, seed: int, input: InputConfig) -> Dataset:
    """Return a dataset of raydl.

    Args:
        data: a ``datasets.Dataset``, a tenth of which becomes the test set, or ``{"train": ...,
            "test": ...}`` of two.
        seed: seed of that split.
        input: how samples are read.

    Raises:
        DataError: if it is not clear which columns hold images and classes, or the parts differ.
    """
    parts = data if isinstance(data, Mapping) else {"train": data}
    if isinstance(data, Mapping):
        check_parts(data)
    pieces = {name: [HubRows(part)] for name, part in parts.items()}
    return describe(Source(_SOURCE, "hub", pieces), input=input).dataset(seed=seed, input=input)
