"""Reads the facts for the page of a run from its folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydl.checkpoint.figures import Score, readable_figures
from raydl.checkpoint.manifest import Manifest, parse_manifest
from raydl.config import dotted
from raydl.errors import DataError
from raydl.metrics.tags import OF_COMPARISON
from raydl.run.folder import ConfigFile, open_run, read_config_file
from raydl.run.history import Line, read_lines
from raydl.run.status import RunStatus, read_file, to_dict
from raydl.storage import JSON_BYTES, Storage, parent_and_name
from raydl.tools.report.events import Curve, History, read_history

_NAMED = 3
"""Runs that an error message names if the user gave their parent folder."""


@dataclass(frozen=True)
class Generation:
    """One membership of the run."""

    number: int
    start: int
    seconds: float
    """Seconds of training when the membership was decided."""
    samples: int
    reason: str
    worker_ids: tuple[str, ...] = ()
    """By rank."""

    @property
    def num_workers(self) -> int:
        """Workers that train."""
        return len(self.worker_ids)


@dataclass(frozen=True)
class RunFacts:
    """The content of a run's folder."""

    name: str
    root: str
    """The folder, a path or URI."""
    config: Mapping[str, Any]
    """All settings by dotted name."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``result.json``; empty: the run has not written it."""
    status: RunStatus | None = None
    history: History = field(default_factory=History)
    """The content of its event files."""
    lines: tuple[Line, ...] = ()
    """What happened and what was decided, oldest first."""
    checkpoints: tuple[tuple[str, Manifest], ...] = ()
    """Names and manifests, oldest first."""
    notes: tuple[str, ...] = ()
    """Sentences about missing or damaged files."""

    def curve(self, tag: str) -> Curve:
        """Return the points of a tag; an empty curve if it was not recorded."""
        return self.history.curves.get(tag, Curve())

    def setting(self, name: str) -> str:
        """Return the text of a setting, by its dotted name."""
        return plain(self.config.get(name))

    def figure(self, name: str) -> Any:
        """Return a figure of ``result.json``; without it the newest of the status or the curves.

        A center that was not scored has no figure in ``result.json``: the newest score is that of
        an earlier one.
        """
        if name in self.result:
            return self.result[name]
        figure = None
        if self.status is not None and name in _IN_STATUS:
            figure = to_dict(self.status)[_IN_STATUS[name]]
        if figure is None and name in _IN_CURVES:
            values = self.curve(_IN_CURVES[name]).values
            figure = values[-1] if values else None
        return figure

    @property
    def time_parts(self) -> dict[str, float]:
        """Mean seconds per worker, by recorded part."""
        if "time_parts" in self.result:
            return {**self.result["time_parts"]}
        curves = self.history.curves.items()
        return {tag.removeprefix("time/"): c.values[-1] for tag, c in curves if tag[:5] == "time/"}

    @property
    def ending(self) -> str:
        """How the run ended, else its last reported state."""
        if self.status is None:
            return "finished" if self.result else "unknown: the run has reported no status"
        if self.status.is_final:
            return self.status.state
        return f"not ended: {self.status.state}, last reported at {moment(self.status.told_at)}"

    @property
    def generations(self) -> list[Generation]:
        """The memberships, oldest first."""
        lines = (line for line in self.lines if line.kind in ("Form", "Change"))
        return [found for line in lines if (found := _generation(line)) is not None]

    @property
    def faults(self) -> list[str]:
        """The faults that fired, one sentence each."""
        fired = self.result.get("faults_fired")
        if fired is not None and self.history.num_starts <= 1:
            return [*fired]
        fires = (line.values.get("sentence") for line in self.lines if line.kind == "FaultFired")
        return [str(sentence) for sentence in fires]


def _generation(line: Line) -> Generation | None:
    """Return the membership that a line of the history forms, or None if it is damaged."""
    members = line.values.get("membership")
    if not isinstance(members, dict) or not isinstance(members.get("worker_ids"), list):
        return None
    return Generation(
        number=int(number(members.get("generation")) or 0),
        start=line.start,
        seconds=line.seconds,
        samples=line.samples,
        reason=str(line.values.get("why", "")),
        worker_ids=tuple(map(str, members["worker_ids"])),
    )


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
        DataError: if the folder contains no run or cannot be read.
    """
    storage = open_run(run).storage
    root, config = storage.root, _read_config(storage)
    notes: list[str] = []
    status = _read_status(storage, notes)
    result = _read_result(storage, status, notes)
    history = _read_events(storage, notes)
    if not history.curves and "evaluations" in result:
        history = History({"center/accuracy": _scores(result["evaluations"])})
    return RunFacts(
        name=parent_and_name(root if "://" in root else os.path.abspath(root))[1] or root,
        root=root,
        config=dotted(config["config"]),
        versions=config["versions"],
        commit=config.get("commit") or "",
        result=result,
        status=status,
        history=history,
        lines=_read_lines(storage, notes),
        checkpoints=_read_checkpoints(storage, notes),
        notes=tuple(notes),
    )


def _read_config(storage: Storage) -> ConfigFile:
    try:
        if not storage.exists("config.json"):
            problem = f"contains no run, config.json is missing{_runs_below(storage)}"
            raise DataError(storage.root, problem)
        return read_config_file(storage)
    except OSError as error:
        raise DataError(storage.root, f"cannot be read: {error}") from error
    except ValueError as error:
        raise DataError(storage.root, f"config.json is damaged: {error}") from error


def _runs_below(storage: Storage) -> str:
    """Return the end of a sentence that names runs in the subfolders, or nothing."""
    try:
        below = [n for n in storage.list_dir("") if storage.exists(f"{n}/config.json")]
    except OSError:
        return ""
    if not below:
        return ""
    more = f" and {len(below) - _NAMED} more" if len(below) > _NAMED else ""
    return f"; name one or several of the runs in it: {', '.join(below[:_NAMED])}{more}"


def _read_result(storage: Storage, status: RunStatus | None, notes: list[str]) -> dict[str, Any]:
    """Return the result of the newest start; empty if that start has written none."""
    result: dict[str, Any] = {}
    try:
        result, problems = readable_figures(storage)
        notes += [f"result.json: {problem}." for problem in problems]
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"result.json cannot be read: {error}.")
    if status is not None and result and _is_of_an_earlier_start(result, status):
        result = {}
    if not result:
        notes.append("The run has written no result yet: the figures are the newest recorded ones.")
    return result


def _is_of_an_earlier_start(result: Mapping[str, Any], status: RunStatus) -> bool:
    """Whether the run was resumed after it had written this result."""
    if not status.is_final or status.state.startswith("failed"):
        return True
    samples = number(result.get("samples"))
    return samples is not None and samples != status.progress.num_samples


def _read_status(storage: Storage, notes: list[str]) -> RunStatus | None:
    try:
        return read_file(storage)
    except FileNotFoundError:
        notes.append("status.json is missing: the end of the run is unknown.")
    except (OSError, ValueError) as error:
        notes.append(f"status.json cannot be read: {error}.")
    return None


def _read_events(storage: Storage, notes: list[str]) -> History:
    try:
        names = [name for name in storage.list_dir("") if name.startswith("events.out.tfevents")]
        # A comparison adds its own files to the folder; they are not starts of the run.
        names = [name for name in names if not name.endswith(OF_COMPARISON)]
        history = read_history(storage.read_pieces(name) for name in names)
    except OSError as error:
        notes.append(f"The event files cannot be read: {error}.")
        return History()
    if not names:
        notes.append("Event files are missing: there are no curves to show.")
    if history.damage:
        notes.append(f"The curves are incomplete: {history.damage}.")
    return history


def _read_lines(storage: Storage, notes: list[str]) -> tuple[Line, ...]:
    try:
        lines = read_lines(storage)
    except (OSError, ValueError) as error:
        notes.append(f"The history cannot be read: {error}.")
        return ()
    if not lines:
        notes.append("The folder has no history: there are no memberships to show.")
    return tuple(lines)


def _scores(evaluations: list[Score]) -> Curve:
    """Return the accuracies of the center in ``result.json``, used if there are no event files."""
    keys = ("samples", "seconds", "accuracy")
    points = [
        (int(e["samples"]), float(e["seconds"]), float(e["accuracy"]))
        for e in evaluations
        if all(number(e.get(key)) is not None for key in keys)
    ]
    return Curve(*zip(*points, strict=True)) if points else Curve()


def _read_checkpoints(storage: Storage, notes: list[str]) -> tuple[tuple[str, Manifest], ...]:
    found: list[tuple[str, Manifest]] = []
    try:
        names = storage.list_dir("checkpoints")
    except OSError as error:
        notes.append(f"The checkpoints cannot be listed: {error}.")
        return ()
    for name in names:
        path = f"checkpoints/{name}/manifest.json"
        try:
            if storage.exists(path):
                found.append((name, parse_manifest(storage.read_bytes(path, most=JSON_BYTES))))
        except (OSError, ValueError) as error:
            notes.append(f"{path} cannot be read: {error}.")
    return tuple(sorted(found, key=lambda item: item[1]["round"]))


def number(value: object) -> float | None:
    """Return the value as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def plain(value: object) -> str:
    """Return the text of a setting: ``none``, ``yes``, ``2, 4``, ``0.25``."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return str(value)


def moment(unix_s: float) -> str:
    """Return the date and time of a Unix time, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
