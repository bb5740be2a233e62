"""A ``ray.data.Dataset`` as the data set of a run: its blocks are the row groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import ray

from raydl.config import InputConfig
from raydl.data import Dataset
from raydl.data.datasets import numbered, split_groups, streamed
from raydl.data.parquet import check_labels, chosen_columns, has_pictures
from raydl.errors import DataError

_Result = TypeVar("_Result")
_SOURCE = "ray.data.Dataset"
_READ_S = 600.0
"""The longest wait for a block, in seconds: Ray may have to read it from disk or recompute it."""


@dataclass(frozen=True)
class RayBlocks:
    """Blocks of a dataset in Ray's object store, which spills to disk."""

    refs: tuple[Any, ...]
    sizes: tuple[int, ...]
    columns: tuple[str, ...]

    def read(self, number: int) -> pa.Table:
        """Return the columns of a block.

        Raises:
            DataError: if Ray has lost it and could not recompute it.
        """
        try:
            table: pa.Table = ray.get(self.refs[number], timeout=_READ_S)
        except ray.exceptions.RayError as error:
            raise DataError(self.name(number), f"cannot be read: {error}") from error
        return table.select(list(self.columns))

    def name(self, number: int) -> str:
        """Return the name of a block, for messages."""
        return f"{_SOURCE}, block {number}"

    def select(self, numbers: Sequence[int]) -> RayBlocks:
        """Return some of the blocks."""
        refs = tuple(self.refs[n] for n in numbers)
        return replace(self, refs=refs, sizes=tuple(self.sizes[n] for n in numbers))


def from_ray(data: Any, *, seed: int, input: InputConfig) -> Dataset:
    """Return Ray datasets as a streamed data set.

    Args:
        data: a ``ray.data.Dataset``, a tenth of whose blocks becomes the test set, or
            ``{"train": ..., "test": ...}``.
        seed: seed of that split.
        input: how samples are read.

    Raises:
        DataError: if it holds no rows, or too few blocks to split.
    """
    if isinstance(data, Mapping):
        if set(data) != {"train", "test"}:
            raise DataError(_SOURCE, f"must be named train and test, got {', '.join(data)}")
        train, test = (_blocks_of(data[part], input) for part in ("train", "test"))
    else:
        train, test = split_groups(_blocks_of(data, input), seed=seed, source=_SOURCE)
    names: tuple[str, ...] = ()
    if has_pictures(train.columns):
        names = numbered(max(_largest_labels((train, test))), _SOURCE)
    return streamed(train, test, names=names, source=_SOURCE, input=input)


def _blocks_of(data: Any, input: InputConfig) -> RayBlocks:
    refs = data.materialize().to_arrow_refs()
    shapes = _call_on_blocks(lambda table: (table.num_rows, table.schema), [(ref,) for ref in refs])
    full = [(ref, *shape) for ref, shape in zip(refs, shapes, strict=True) if shape[0]]
    if not full:
        raise DataError(_SOURCE, "holds no rows")
    columns = chosen_columns(full[0][2], input.columns_named, _SOURCE)
    if has_pictures(columns):
        check_labels(full[0][2], columns, _SOURCE)
    return RayBlocks(tuple(ref for ref, *_ in full), tuple(size for _, size, _ in full), columns)


def _largest_labels(parts: Sequence[RayBlocks]) -> list[int]:
    """Return the largest label of each block of some parts, or -1 for a block that has none."""

    def largest(table: pa.Table, label: str) -> int:
        import pyarrow.compute as pc

        found = pc.max(table[label]).as_py()
        return -1 if found is None else int(found)

    return _call_on_blocks(largest, [(ref, part.columns[1]) for part in parts for ref in part.refs])


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
