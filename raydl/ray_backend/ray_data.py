"""A ``ray.data.Dataset`` as the data set of a run: its blocks are the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import ray

from raydl.data.pieces import Columns, Piece
from raydl.data.schema import schema_of
from raydl.errors import DataError

_Result = TypeVar("_Result")
_SOURCE = "ray.data.Dataset"
_READ_S = 600.0
"""The longest wait for a block, in seconds: Ray may have to read it from disk or recompute it."""


class RayBlocks(Piece):
    """Blocks of a dataset in Ray's object store, which spills to disk.

    Args:
        data: a ``ray.data.Dataset``.

    Raises:
        DataError: if it holds no rows.
    """

    def __init__(self, data: Any) -> None:
        refs = data.materialize().to_arrow_refs()
        shapes = _call_on_blocks(
            lambda table: (table.num_rows, table.schema), [(ref,) for ref in refs]
        )
        full = [(ref, *shape) for ref, shape in zip(refs, shapes, strict=True) if shape[0]]
        if not full:
            raise DataError(_SOURCE, "holds no rows")
        self.name = _SOURCE
        self.groups = tuple(size for _, size, _ in full)
        self.num_rows = sum(self.groups)
        self.schema = schema_of(full[0][2])
        self._refs = [ref for ref, *_ in full]

    def read_group(self, number: int, names: Sequence[str]) -> Columns:
        """Return some columns of a block.

        Raises:
            DataError: if Ray has lost it and could not recompute it.
        """
        try:
            table: pa.Table = ray.get(self._refs[number], timeout=_READ_S)
        except ray.exceptions.RayError as error:
            problem = f"cannot be read: {error}"
            raise DataError(f"{_SOURCE}, block {number}", problem) from error
        return {name: table[name] for name in names}

    def where(self, row: int) -> str:
        """Return the block and the row in it, for messages."""
        ends = np.cumsum(self.groups)
        number = int(np.searchsorted(ends, row, side="right"))
        return f"{_SOURCE}, block {number}, row {row - (ends[number] - self.groups[number])}"

    def distinct(self, name: str) -> set[Any]:
        """Return the different values of a column, found where the blocks lie."""

        def distinct(table: pa.Table, name: str) -> list[Any]:
            import pyarrow.compute as pc

            found: list[Any] = pc.unique(table[name]).to_pylist()
            return found

        return set().union(*_call_on_blocks(distinct, [(ref, name) for ref in self._refs]))


def _call_on_blocks(
    function: Callable[..., _Result], calls: Sequence[tuple[Any, ...]]
) -> list[_Result]:
    """Return the results of calls of a function, which Ray makes on the nodes of their blocks.

    Args:
        function: is defined within another function, so that Ray sends its code: with its name,
            each process would import raydl and torch, which takes it two seconds.
        calls: the arguments of each call, with a reference to a block.
    """
    task = ray.remote(num_cpus=0)(function)
    results: list[_Result] = ray.get([task.remote(*call) for call in calls], timeout=_READ_S)
    return results
