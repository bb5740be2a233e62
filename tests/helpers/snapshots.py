"""Snapshots of a center."""

import dataclasses

from ensembles import SHAPE, linear

from raydl.core.center import (
    first_snapshot,
)
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress


def center_snapshot(round, *, is_kept=False):
    first = first_snapshot(FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes)), 10)
    return dataclasses.replace(first, progress=Progress(round=round), is_kept=is_kept)


def with_progress(thing, **changes):
    """The same record, snapshot, checkpoint or status with another progress."""
    return dataclasses.replace(thing, progress=dataclasses.replace(thing.progress, **changes))
