"""What was found in a large file, kept beside the run until the file changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from raydl.data.files import Place

Arrays = dict[str, np.ndarray]
_STAMP = "size and time"
"""Name of the array with the size of the file and the time of its last change."""


def kept(place: Place, what: str, find: Callable[[], Arrays], *, folder: str) -> Arrays:
    """Return what ``find`` finds in a file, or has found before in the same file.

    Args:
        place: the file. Of one in a store nothing is kept.
        what: what it finds, and how.
        find: returns arrays of numbers or texts.
        folder: where it is kept, in a folder that need not exist; "": nowhere. If it cannot be
            written, the next run searches the file again.
    """
    if not folder or not place.is_local:
        return find()
    name = f"{os.path.abspath(place.path)}, {what}"
    path = Path(folder) / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"
    stamp = np.array([place.info().size, place.info().mtime_ns])
    with suppress(Exception), path.open("rb") as stream:  # it is absent, or damaged
        arrays: Arrays = dict(np.load(stream, allow_pickle=False))
        if np.array_equal(arrays.pop(_STAMP), stamp):
            return arrays
    arrays = find()
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, **{**arrays, _STAMP: stamp})  # type: ignore[arg-type]  # no flag of it
        unfinished.replace(path)
    return arrays
