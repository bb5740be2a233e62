"""The status of a run at one moment, and the file ``status.json`` that has it."""

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
    """One worker, as its run's driver sees it."""

    worker_id: str
    state: str
    """starting, ready, training, left out, leaving."""
    node: str
    """The last digits of its Ray node's id; empty: it has none yet."""
    local_step: int
    round: int
    step_s: float
    """Seconds per local step."""
    waited_s: float
    """Seconds spent waiting for others, in all."""
    since_s: float
    """Seconds in this state."""


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. The driver leaves the last three fields to the desk."""

    state: str
    """State of the run; of an ended run: finished, stopped, or failed: and why."""
    progress: Progress
    """Of the newest record; its seconds are those of the run, with the waits for workers."""
    num_workers: int
    wanted: str
    """The workers asked for: N, or MIN:MAX."""
    center_accuracy: float | None
    workers: tuple[WorkerStatus, ...]
    events: tuple[str, ...]
    """The newest few lines, oldest first."""
    checkpoint_at: float | None = None
    """When the driver wrote its newest checkpoint, Unix time; None: it wrote none yet."""
    told_at: float = 0.0
    """Unix time, by the clock of the driver's machine."""
    driver: str = ""
    """The process that told it."""
    silent_s: float = 0.0
    """0 while the driver goes on telling; else for how long it has not."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.state.startswith(_FINAL)

    @property
    def is_stale(self) -> bool:
        """Whether the driver may be gone without having said so."""
        return self.silent_s > 0

    def stale_sentence(self) -> str:
        """Return the state of a run that has gone silent, and the remedy."""
        return (
            f"the driver, {self.driver.rpartition(', ')[0]}, has told nothing for "
            f"{self.silent_s:.0f} s: it may be gone; the same command with --resume goes on"
        )


def to_json(status: RunStatus) -> bytes:
    """Return the contents of ``status.json``."""
    return json.dumps(redact_values(to_dict(status)), indent=2, allow_nan=False).encode()


def to_dict(status: RunStatus) -> dict[str, Any]:
    """Return a status as nested dicts, with its progress among the other fields."""
    values = asdict(status)
    return {**values.pop("progress"), **values}


def from_json(data: bytes) -> RunStatus:
    """Return the status; what a newer raydl has added to it is passed over.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    values = json.loads(data)
    values["workers"] = tuple(_known(WorkerStatus, w) for w in values["workers"])
    values["events"] = tuple(values["events"])
    values["progress"] = Progress.from_dict(values)
    return _known(RunStatus, values)


def _known(cls: type[_T], values: dict[str, Any]) -> _T:
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})
