"""The status of a run at one moment, and its file ``status.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from raydl.core.progress import Progress
from raydl.redaction import redact_values

_FINAL = ("finished", "stopped", "failed")
_T = TypeVar("_T")


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker."""

    worker_id: str
    state: str
    """starting, ready, training, left out, leaving."""
    node: str
    """The last digits of its Ray node's id; empty if it has no node yet."""
    local_step: int
    round: int
    step_s: float
    """Seconds per local step."""
    waited_s: float
    """Total seconds of waiting for others."""
    since_s: float
    """Seconds in this state."""


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. ``ControlChannel`` and ``read_status`` fill in the last three fields."""

    state: str
    """State of the run; at its end finished, stopped or failed, with the reason."""
    progress: Progress
    """Progress at the newest record; its seconds are those of the run, including the waits for
    workers."""
    num_workers: int
    """Number of workers that train."""
    wanted: str
    """The number of workers in the settings: N, or MIN:MAX."""
    center_accuracy: float | None
    workers: tuple[WorkerStatus, ...]
    events: tuple[str, ...]
    """The newest lines of the log, oldest first."""
    checkpoint_at: float | None = None
    """Unix time of the newest checkpoint of this driver, or None if it has written none."""
    told_at: float = 0.0
    """Unix time of the status, by the clock of the driver's machine."""
    driver: str = ""
    """The driver's process."""
    silent_s: float = 0.0
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


def from_values(contents: Any) -> RunStatus:
    """Return the status in the contents of ``status.json``; ignores fields of newer versions.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    values = dict(contents)
    values["workers"] = tuple(_known(WorkerStatus, w) for w in values["workers"])
    values["events"] = tuple(values["events"])
    values["progress"] = Progress.from_dict(values)
    return _known(RunStatus, values)


def _known(cls: type[_T], values: dict[str, Any]) -> _T:
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})
