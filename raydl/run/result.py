"""The result of a run, with the names of Ray Train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raydl.checkpoint.figures import read_figures
from raydl.checkpoint.store import CheckpointStore
from raydl.errors import DataError
from raydl.run.folder import NO_RUN, open_run, read_config_file
from raydl.storage import Storage, below, in_words
from raydl.text.redaction import redact


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint in the folder of a run."""

    run: str
    """Path of the run's folder; a URI has its credentials, so that it can be opened."""
    name: str
    """Name of the checkpoint's folder: ``round-120``, for example."""

    @property
    def path(self) -> str:
        """Path of the checkpoint's folder, like ``run``."""
        return below(self.run, f"checkpoints/{self.name}")

    def to_state_dict(self) -> dict[str, Tensor]:
        """Return the center under the model's own names, on the CPU.

        Raises:
            CheckpointError: if the checkpoint was deleted, or is damaged.
        """
        return CheckpointStore(Storage(self.run)).read_center(self.name)[0]

    def __repr__(self) -> str:
        """Return the path, without credentials of URIs."""
        return redact(f"{type(self).__name__}({self.path!r})")


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    metrics: dict[str, Any]
    """The figures of ``result.json``."""
    path: str
    """Path of the run's folder; a URI has its credentials, so that it can be opened."""
    checkpoint: RunCheckpoint | None
    """The newest checkpoint; None: there is none."""
    stopped_by: str
    """Reason for an early end; empty if the run finished."""

    @classmethod
    def from_path(cls, path: str) -> Result:
        """Return the result of a run that has ended.

        Args:
            path: the run's folder, a path or URI.

        Raises:
            DataError: if no run is there, it has not ended, or its result cannot be read.
        """
        storage = open_run(path).storage
        try:
            metrics = read_figures(storage)
            start = read_config_file(storage).get("driver_epoch")
        except FileNotFoundError as error:
            not_ended = "the run has no result.json: it has not ended"
            raise DataError(path, not_ended if storage.exists("config.json") else NO_RUN) from error
        except (OSError, ValueError) as error:
            raise DataError(path, f"its result.json cannot be read: {in_words(error)}") from error
        if start is not None and metrics.get("driver_epoch") != start:
            problem = "the run was resumed after result.json was written: it has not ended"
            raise DataError(path, problem)
        return cls.of(metrics, storage.root, CheckpointStore(storage))

    @classmethod
    def of(cls, metrics: dict[str, Any], path: str, store: CheckpointStore) -> Result:
        """Return the result with the newest checkpoint of a store."""
        names = store.names()
        newest = RunCheckpoint(path, names[-1]) if names else None
        return cls(metrics, path, newest, metrics.get("stopped_by", ""))

    def __repr__(self) -> str:
        """Return all fields, without credentials of URIs."""
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return redact(f"{type(self).__name__}({values})")
