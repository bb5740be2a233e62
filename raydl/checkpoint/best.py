"""The center with the best score of a run, kept in the run's folder as ``best.safetensors``.

It is one file, so it is whole or absent: the weights under the model's own names, and in the
metadata of safetensors the center's progress and score. Plain PyTorch loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from raydl.config import EvaluationConfig
from raydl.config.typed import Positive, typed
from raydl.core import tensor_files
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress
from raydl.core.scores import Evaluated, score_of
from raydl.core.tensor_files import view_of
from raydl.errors import CheckpointError, reading_error
from raydl.storage import Storage, below

FILE = "best.safetensors"
_OPTIONAL = {"generation", "local_step", "driver_epoch", "num_bytes", "num_messages"}
"""Names that are absent in files of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """Progress and score of a center."""

    progress: Progress
    metrics: dict[str, float]
    driver_epoch: Positive = 1
    """The number of the start that wrote the file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values that the file holds besides the weights."""
        return {**vars(self.progress), "metrics": self.metrics, "driver_epoch": self.driver_epoch}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Best:
        """Return the values that ``to_dict`` returned.

        Raises:
            ValueError: a name is unknown or missing: the file is damaged.
        """
        known = {f.name for f in fields(Progress)} | {"metrics", "driver_epoch"}
        if unknown := values.keys() - known:
            raise ValueError(f"it has an unknown {min(unknown)}")
        if lacking := known - _OPTIONAL - values.keys():
            raise ValueError(f"{min(lacking)} is missing in it")
        return typed(cls, {**values, "progress": values})

    def figures(self) -> dict[str, Any]:
        """Return the entry of ``result.json``, with the keys of an evaluation."""
        return {**self.progress.of_score(), **self.metrics}


class BestCenter:
    """Keeps the best center: the driver's thread notes it, another thread writes it.

    At most one center waits to be written, the best.

    Args:
        storage: the run's folder.
        flat: names the weights.
        driver_epoch: the number of this start of the run.
        evaluation: settings, which name the metric that compares centers.
    """

    def __init__(
        self,
        storage: Storage,
        flat: FlatModel,
        *,
        driver_epoch: int = 1,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        self.kept: Best | None = None
        """The center in the file, or None if there is no file."""
        self._storage = storage
        self.flat = flat
        """Names the weights."""
        self._epoch = driver_epoch
        self._evaluation = evaluation or EvaluationConfig()
        self._waiting: Evaluated | None = None
        self._lock = threading.Lock()

    def load_earlier(self) -> list[str]:
        """Load the best center of earlier starts, if any; return a sentence if it is damaged.

        Raises:
            CheckpointError: the machine or the storage failed, or the file may not be read; the
                center may be whole, and the next one must not replace it.
        """
        if self._storage.exists(FILE):
            try:
                _, self.kept = read_best(self._storage)
            except CheckpointError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                return [f"{error}; the next scored center counts as the best"]
        return []

    def note_center(self, evaluated: Evaluated) -> bool:
        """Note a center if its weights came along and it is the best; return whether one waits."""
        with self._lock:
            rival = self._waiting or self.kept
            is_best = rival is None or self._score(evaluated) > self._score(rival)
            if evaluated.weights is not None and is_best:
                self._waiting = evaluated
            return self._waiting is not None

    def _score(self, center: Evaluated | Best) -> float:
        return score_of(center.metrics, self._evaluation)

    def write(self) -> None:
        """Write the center that waits, if any. If this fails, it goes on waiting.

        Raises:
            CheckpointError: the storage failed; the file is unchanged.
        """
        waiting = self._waiting
        if waiting is None:
            return
        best = Best(progress=waiting.progress, metrics=waiting.metrics, driver_epoch=self._epoch)
        assert waiting.weights is not None, "note_center requires them"
        assert waiting.buffers is not None, "they come with the weights"
        center = self.flat.state_dict_of(
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
    """Return the best center of a run under the model's own names, with its progress and score.

    Raises:
        UnreadableCheckpointError: the machine or the storage failed.
        CheckpointError: none was kept, or it is damaged.
    """
    path = below(storage.root, FILE)
    if not storage.exists(FILE):
        raise CheckpointError(path, "no best center was kept; train with --checkpoint.keep-best")
    try:
        center, values = tensor_files.load(storage, FILE)
        best = Best.from_dict(values)
    except (OSError, ValueError) as error:
        raise reading_error(path, f"cannot be read: {error}", error) from error
    return center, best
