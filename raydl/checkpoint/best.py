"""The center with the best score of a run, kept in its folder as ``best.safetensors``.

It is one file, so it is whole or absent: the weights under the model's own names, and in the
metadata of safetensors what was scored, and how well. Plain PyTorch loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from raydl.core import tensor_files
from raydl.core.callbacks import score_of
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress
from raydl.core.tensor_files import view_of
from raydl.core.worker_group import Evaluated
from raydl.errors import CheckpointError
from raydl.storage import Storage, below

FILE = "best.safetensors"


_NEW = {"generation", "local_step", "driver_epoch"}
"""Names that files of earlier versions do not have."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """A center and its score."""

    progress: Progress
    metrics: dict[str, float]
    driver_epoch: int = 1
    """The number of the start that wrote it, among all of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the file says of the center."""
        return {
            **vars(self.progress),
            "metrics": self.metrics,
            "driver_epoch": self.driver_epoch,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Best:
        """Return what ``to_dict`` returned.

        Raises:
            ValueError: a name is another, which is how damage shows.
        """
        known = {f.name for f in fields(Progress)} | {"metrics", "driver_epoch"}
        if unknown := values.keys() - known:
            raise ValueError(f"there is no {min(unknown)} in it")
        if lacking := known - _NEW - values.keys():
            raise ValueError(f"{min(lacking)} is missing in it")
        return cls(
            progress=Progress.from_dict(values),
            metrics=values["metrics"],
            driver_epoch=values.get("driver_epoch", 1),
        )

    def figures(self) -> dict[str, Any]:
        """Return its part of ``result.json``, with the keys of an evaluation there."""
        return {
            "round": self.progress.round,
            "samples": self.progress.num_samples,
            "seconds": self.progress.seconds,
            **self.metrics,
        }


class BestCenter:
    """Keeps the best center: noted in the driver's thread, written in another.

    Of the centers that wait to be written there is one at most, the best.

    Args:
        storage: the run's folder.
        flat: names the weights.
        driver_epoch: the number of this start among all of the run.
    """

    def __init__(self, storage: Storage, flat: FlatModel, *, driver_epoch: int = 1) -> None:
        self.kept: Best | None = None
        """What the file holds."""
        self._storage = storage
        self._flat = flat
        self._epoch = driver_epoch
        self._waiting: Evaluated | None = None
        self._lock = threading.Lock()

    def load_earlier(self) -> list[str]:
        """Go on from what an earlier start kept, if anything; return a sentence if it is damaged.

        Then the next center that is scored counts as the best.
        """
        if self._storage.exists(FILE):
            try:
                _, self.kept = read_best(self._storage)
            except CheckpointError as error:
                return [f"{error}; the best center is looked for anew"]
        return []

    def note_center(self, evaluated: Evaluated) -> bool:
        """Note a center if it came along and is the best; return whether one waits."""
        with self._lock:
            rival = self._waiting or self.kept
            is_best = rival is None or score_of(evaluated.metrics) > score_of(rival.metrics)
            if evaluated.weights is not None and is_best:
                self._waiting = evaluated
            return self._waiting is not None

    def write(self) -> None:
        """Write the center that waits, if one does. If that fails it waits on.

        Raises:
            CheckpointError: the storage refused; what was kept before is as it was.
        """
        waiting = self._waiting
        if waiting is None:
            return
        best = Best(
            progress=waiting.progress,
            metrics=waiting.metrics,
            driver_epoch=self._epoch,
        )
        assert waiting.weights is not None, "take saw to it"
        assert waiting.buffers is not None, "which comes with the weights"
        center = self._flat.state_dict_of(
            view_of(waiting.weights), view_of(waiting.buffers), waiting.non_trainable, copies=False
        )
        try:
            file = tensor_files.seal(center, best.to_dict())
            self._storage.write_pieces(FILE, file.pieces())
        except OSError as error:
            path = below(self._storage.root, FILE)
            raise CheckpointError(path, f"could not be written: {error}") from error
        with self._lock:
            self.kept = best
            if self._waiting is waiting:
                self._waiting = None


def read_best(storage: Storage) -> tuple[dict[str, Tensor], Best]:
    """Return the best center of a run under the model's own names, and its score.

    Raises:
        CheckpointError: none was kept, or it is damaged.
    """
    path = below(storage.root, FILE)
    if not storage.exists(FILE):
        raise CheckpointError(path, "no best center was kept; train with --checkpoint.keep-best")
    try:
        center, values = tensor_files.load(storage.read_whole(FILE))
        best = Best.from_dict(values)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(path, f"can not be read: {error}") from error
    return center, best
