"""The history of a run: what happened to it, and what was decided, one fact a line.

Each start of a driver has a file of its own, ``history-EPOCH.jsonl``, beside the curves. A line has
its number, the seconds of training and the samples when the fact was noted, and the fact by its
name:

    {"n": 4, "seconds": 63.25, "samples": 9600, "Form": {"membership": {...}, "why": "..."}}

Reports, scores in progress and the answers of the center are telemetry, and no history. Values that
are large or cannot be read by others (weights, states, a user's exception) are left out, or are a
text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydl.core import worker_group as group
from raydl.core.scores import Evaluated
from raydl.elastic import facts
from raydl.errors import in_one_line
from raydl.run.folder import HISTORY
from raydl.storage import Storage
from raydl.text.redaction import redact_values

_NAME = re.compile(rf"{HISTORY}(\d+)\.jsonl")
_TELEMETRY = (
    group.Reported,
    group.Published,
    group.Scoring,
    facts.Tick,
    facts.Trained,
    facts.EpochsDone,
    facts.Writing,
)
_MOST_BYTES = 64 << 20
"""Most bytes that are read of a start: some 300,000 lines."""


class HistoryWriter:
    """Writes the history of one start.

    Args:
        folder: the run's local folder.
        epoch: number of the driver's epoch.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._path = folder / f"{HISTORY}{epoch:08d}.jsonl"
        self._num_lines = 0

    def write(self, fact: Any, *, seconds: float, samples: int) -> None:
        """Add a fact, unless it is telemetry.

        Args:
            fact: an event or an action.
            seconds: seconds of training, of all starts.
            samples: samples that are trained.

        Raises:
            OSError: the file cannot be written.
        """
        if isinstance(fact, _TELEMETRY):
            return
        head = {"n": self._num_lines, "seconds": round(seconds, 3), "samples": samples}
        line = redact_values({**head, type(fact).__name__: _plain(fact)})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._num_lines += 1


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    match value:
        case group.Collected(snapshot, workers):
            return {"round": snapshot.progress.round, "workers": [*workers]}
        case group.HandedIn(worker_id):
            return {"worker_id": worker_id}
        case Evaluated(progress, metrics):
            return {"round": progress.round, "metrics": _plain(metrics)}
        case enum.Enum():
            return value.value
        case BaseException():
            return in_one_line(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case None | bool() | int() | str():
            return value
        case float():
            return value if abs(value) < float("inf") else None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    return str(value)


@dataclass(frozen=True)
class Line:
    """A fact of the history."""

    start: int
    """The start of the run that noted it, from 1."""
    seconds: float
    """Seconds of training then."""
    samples: int
    """Samples trained then."""
    kind: str
    """Name of the fact's class."""
    values: Mapping[str, Any]


def read_lines(storage: Storage) -> list[Line]:
    """Return the history of a run, oldest first; empty if an earlier version recorded the run.

    A last line that a crash has cut is left out, and so is what is damaged.

    Raises:
        OSError: it cannot be read.
    """
    names = sorted(name for name in storage.list_dir("") if _NAME.fullmatch(name))
    lines: list[Line] = []
    for start, name in enumerate(names, 1):
        text = storage.read_bytes(name, most=_MOST_BYTES).decode(errors="replace")
        found = (_line(start, row) for row in text.splitlines())
        lines += [line for line in found if line is not None]
    return lines


def _line(start: int, row: str) -> Line | None:
    try:
        values = json.loads(row)
        seconds, samples = float(values.pop("seconds")), int(values.pop("samples"))
        values.pop("n")
        [(kind, fact)] = values.items()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Line(start, seconds, samples, kind, fact) if isinstance(fact, dict) else None
