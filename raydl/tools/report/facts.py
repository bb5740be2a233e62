"""Reads the facts of a run from its folder, for its page."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydl.config import dotted
from raydl.errors import DataError
from raydl.metrics.tags import OF_COMPARISON
from raydl.run.folder import open_run
from raydl.run.status import RunStatus, from_json, to_dict
from raydl.storage import Storage, parent_and_name
from raydl.tools.report.events import Curve, Formed, History, Told, read_history

_EVENTS = "events.out.tfevents"
_GENERATION = re.compile(r"generation (\d+): (.*)", re.DOTALL)
_NAMED = 3
"""So many runs are named to a person who named the folder above them."""


@dataclass(frozen=True)
class Generation:
    """One membership of the run."""

    number: int
    start: int
    seconds: float
    """Of training, when it was decided."""
    samples: int
    num_workers: int | None
    """None: it was over before anything was recorded."""
    reason: str
    worker_ids: tuple[str, ...] = ()
    """By rank; empty: it was not written down."""


@dataclass(frozen=True)
class RunFacts:
    """A run as its folder tells it."""

    name: str
    root: str
    """The folder, a path or URI."""
    config: Mapping[str, Any]
    """All settings by dotted name."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    """The figures of ``result.json``; empty: the run has not written it."""
    status: RunStatus | None = None
    history: History = field(default_factory=History)
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """Their manifests, oldest first."""
    notes: tuple[str, ...] = ()
    """Missing or damaged files, in sentences."""

    def curve(self, tag: str) -> Curve:
        """Return the points of a tag; none if it was not recorded."""
        return self.history.curves.get(tag, Curve())

    def setting(self, name: str) -> str:
        """Return a setting for a person, by its dotted name."""
        return plain(self.config.get(name))

    def figure(self, name: str) -> Any:
        """Return a figure of ``result.json``, or the newest that status and curves have."""
        found = self.result.get(name)
        if found is None and self.status is not None and name in _IN_STATUS:
            found = to_dict(self.status)[_IN_STATUS[name]]
        if found is None and name in _IN_CURVES:
            values = self.curve(_IN_CURVES[name]).values
            found = values[-1] if values else None
        return found

    @property
    def time_parts(self) -> dict[str, float]:
        """Mean seconds per worker by part, as far as recorded."""
        found = self.result.get("time_parts")
        if isinstance(found, dict):
            return {str(part): number(seconds) or 0.0 for part, seconds in found.items()}
        curves = self.history.curves.items()
        return {tag.removeprefix("time/"): c.values[-1] for tag, c in curves if tag[:5] == "time/"}

    @property
    def ending(self) -> str:
        """How the run ended or, if it has not, how it stood when it last told."""
        if self.status is None:
            return "finished" if self.result else "unknown: it has told nothing"
        if self.status.is_final:
            return self.status.state
        return f"not ended: {self.status.state}, as told at {moment(self.status.told_at)}"

    @property
    def generations(self) -> list[Generation]:
        """The memberships in the order in which they were told."""
        found = []
        for told in self.history.told:
            match = _GENERATION.match(told.sentence)
            if match:
                found.append(self._generation(int(match[1]), told, match[2]))
        return found

    def _generation(self, number: int, told: Told, reason: str) -> Generation:
        formed = self.history.formed.get((told.start, number), Formed(told.samples, ()))
        who = formed.worker_ids
        num_workers = formed.num_workers or self._workers_of(number, told)
        return Generation(
            number, told.start, told.seconds, formed.samples, num_workers, reason, who
        )

    def _workers_of(self, generation: int, told: Told) -> int | None:
        """Return how many trained in a generation, by the first point recorded in it."""
        numbers, counts = self.curve("workers/generation"), self.curve("workers/count")
        for at, samples in enumerate(numbers.samples):
            if numbers.values[at] == generation and samples >= told.samples:
                return round(counts.values[at]) if at < len(counts) else None
        return None

    @property
    def faults(self) -> list[str]:
        """The faults that fired, each in a sentence."""
        fired = self.result.get("faults_fired")
        if isinstance(fired, list) and self.history.num_starts <= 1:
            return [str(sentence) for sentence in fired]
        return [t.sentence for t in self.history.told if re.match(r"fault \d+: ", t.sentence)]


_IN_STATUS = {
    "center_accuracy": "center_accuracy",
    "samples": "num_samples",
    "seconds": "seconds",
    "rounds": "round",
}
_IN_CURVES = {
    "center_accuracy": "center/accuracy",
    "center_loss": "center/loss",
    "communication_share": "exchange/communication_share",
    "exchange_bytes": "exchange/bytes",
    "rounds": "exchange/count",
    "period": "exchange/period",
}


def read_run(run: str) -> RunFacts:
    """Return the facts of a run.

    Args:
        run: its folder, a path or URI.

    Raises:
        DataError: no run is there, or its folder can not be read.
    """
    storage = open_run(run).storage
    config = _read_config(storage)
    notes: list[str] = []
    status = _read_status(storage, notes)
    result = _read_result(storage, status, notes)
    history = _read_events(storage, notes)
    if not history.curves and isinstance(result.get("evaluations"), list):
        history = History({"center/accuracy": _scores(result["evaluations"])})
    commit = config.get("commit")
    return RunFacts(
        name=_name_of(storage.root),
        root=storage.root,
        config=dotted(config["config"]),
        versions=config["versions"] if isinstance(config.get("versions"), dict) else {},
        commit=commit if isinstance(commit, str) else "",
        result=result,
        status=status,
        history=history,
        checkpoints=_read_checkpoints(storage, notes),
        notes=tuple(notes),
    )


def _name_of(root: str) -> str:
    return parent_and_name(root if "://" in root else os.path.abspath(root))[1] or root


def _read_config(storage: Storage) -> dict[str, Any]:
    try:
        if not storage.exists("config.json"):
            raise DataError(storage.root, f"no run is there: it has no config.json{_near(storage)}")
        values = json.loads(storage.read_bytes("config.json"))
    except OSError as error:
        raise DataError(storage.root, f"it can not be read: {error}") from error
    except ValueError as error:
        raise DataError(storage.root, f"its config.json is damaged: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise DataError(storage.root, "its config.json is damaged: it holds no settings")
    return values


def _near(storage: Storage) -> str:
    """Return the runs that lie below a folder, for a person who meant one of them."""
    try:
        below = [n for n in storage.list_dir("") if storage.exists(f"{n}/config.json")]
    except OSError:
        return ""
    if not below:
        return ""
    more = f" and {len(below) - _NAMED} more" if len(below) > _NAMED else ""
    return f"; below it are {', '.join(below[:_NAMED])}{more}: name one or several of them"


def _read_json(storage: Storage, name: str, notes: list[str]) -> dict[str, Any]:
    try:
        values = json.loads(storage.read_bytes(name)) if storage.exists(name) else {}
    except (OSError, ValueError) as error:
        notes.append(f"Its {name} can not be read: {error}.")
        return {}
    return values if isinstance(values, dict) else {}


def _read_result(storage: Storage, status: RunStatus | None, notes: list[str]) -> dict[str, Any]:
    """Return the newest start's results; empty if it wrote none."""
    result = _read_json(storage, "result.json", notes)
    if status is not None and result and _is_of_an_earlier_start(result, status):
        result = {}
    if not result:
        notes.append("It has written no result yet: the figures are the newest it has recorded.")
    return result


def _is_of_an_earlier_start(result: Mapping[str, Any], status: RunStatus) -> bool:
    """Whether a run that had written its result went on from there."""
    if not status.is_final or status.state.startswith("failed"):
        return True
    samples = number(result.get("samples"))
    return samples is not None and samples != status.progress.num_samples


def _read_status(storage: Storage, notes: list[str]) -> RunStatus | None:
    try:
        return from_json(storage.read_bytes("status.json"))
    except FileNotFoundError:
        notes.append("It has no status.json: how it ended is not known.")
    except (OSError, ValueError, TypeError, KeyError) as error:
        notes.append(f"Its status.json can not be read: {error}.")
    return None


def _read_events(storage: Storage, notes: list[str]) -> History:
    try:
        names = [name for name in storage.list_dir("") if name.startswith(_EVENTS)]
        # A comparison adds files of its own, which are no starts of the run.
        names = [name for name in names if not name.endswith(OF_COMPARISON)]
        history = read_history([storage.read_bytes(name) for name in names])
    except OSError as error:
        notes.append(f"Its event files can not be read: {error}.")
        return History()
    if not names:
        notes.append("It has no event files, so there are no curves and no memberships to show.")
    if history.damage:
        notes.append(f"Of its curves a part is missing: {history.damage}.")
    return history


def _scores(evaluations: list[Any]) -> Curve:
    """Return the scores of the center as ``result.json`` has them, for want of events."""
    points = [
        (int(e["samples"]), float(e["seconds"]), float(e["accuracy"]))
        for e in evaluations
        if isinstance(e, dict) and all(number(e.get(k)) is not None for k in _SCORE)
    ]
    return Curve(*zip(*points, strict=True)) if points else Curve()


_SCORE = ("samples", "seconds", "accuracy")


def _read_checkpoints(storage: Storage, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    found = []
    try:
        for name in storage.list_dir("checkpoints"):
            path = f"checkpoints/{name}/manifest.json"
            if storage.exists(path):
                found.append({"name": name, **_read_json(storage, path, notes)})
    except OSError as error:
        notes.append(f"Its checkpoints can not be listed: {error}.")
    return tuple(sorted(found, key=lambda manifest: number(manifest.get("round")) or 0))


def number(value: object) -> float | None:
    """Return a finite number, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def plain(value: object) -> str:
    """Return a setting as a person reads it: ``none``, ``yes``, ``2, 4``, ``0.25``."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return str(value)


def moment(unix_s: float) -> str:
    """Return a moment as date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
