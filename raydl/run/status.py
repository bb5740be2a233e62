"""The status of a run at one moment, and its file ``status.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from raydl.config.typed import Count, Seconds, typed
from raydl.core.progress import Progress
from raydl.storage import Storage
from raydl.text.redaction import redact_values

_FINAL = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker."""

    worker_id: str
    state: str
    """starting, ready, training, left out, leaving."""
    node: str
    """The last digits of its Ray node's id; empty if it has no node yet."""
    local_step: Count
    round: Count
    step_s: Seconds
    """Seconds per local step."""
    waited_s: Seconds
    """Total seconds of waiting for others."""
    since_s: Seconds
    """Seconds in this state."""


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. ``ControlChannel`` and ``read_status`` fill in the last three fields."""

    state: str
    """State of the run; at its end finished, stopped or failed, with the reason."""
    progress: Progress
    """Progress at the newest record; its seconds are those of the run, including the waits for
    workers."""
    num_workers: Count
    """Number of workers that train."""
    wanted: str
    """The number of workers in the settings: N, or MIN:MAX."""
    center_accuracy: float | None
    workers: tuple[WorkerStatus, ...]
    events: tuple[str, ...]
    """The newest lines of the log, oldest first."""
    checkpoint_at: Seconds | None = None
    """Unix time of the newest checkpoint of this driver, or None if it has written none."""
    center_loss: float | None = None
    """Shown if the task measures no accuracy."""
    told_at: Seconds = 0.0
    """Unix time of the status, by the clock of the driver's machine."""
    driver: str = ""
    """The driver's process."""
    silent_s: Seconds = 0.0
    """0 while the driver writes its status; else seconds since the last one."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.state.startswith(_FINAL)

    @property
    def is_stale(self) -> bool:
        """Whether the driver may be lost: it no longer writes its status."""
        return self.silent_s > 0

    def stale_sentence(self) -> str:
        """Return a sentence for a driver that no longer writes its status, with the remedy."""
        return (
            f"the driver, {self.driver.rpartition(', ')[0]}, has not reported for "
            f"{self.silent_s:.0f} s: it may be lost; the same command with --resume resumes the run"
        )


def to_json(status: RunStatus) -> bytes:
    """Return the contents of ``status.json``."""
    return json.dumps(redact_values(to_dict(status)), indent=2, allow_nan=False).encode()


def to_dict(status: RunStatus) -> dict[str, Any]:
    """Return a status as nested dicts, with the fields of its progress beside the others."""
    values = asdict(status)
    return {**values.pop("progress"), **values}


def read_file(storage: Storage) -> RunStatus:
    """Return the status in ``status.json``; ignores fields of newer versions.

    Args:
        storage: the run's folder.

    Raises:
        OSError: the file is absent or cannot be read.
        ValueError: it is damaged.
    """
    contents: dict[str, Any] = storage.read_json("status.json", dict[str, Any])
    return typed(RunStatus, {**contents, "progress": contents})
