"""Reads the curves and logged events of a run from its TensorBoard event files.

Each start of a run writes its own file, and further files if the first can no longer be written.
Only the first file of a start begins with a purge mark. A purge mark holds a number of samples:
earlier points from there on are invalid, because the run resumed from a checkpoint or the center
went back to an older copy. Seconds are seconds of training: each start counts from its first
generation and continues from the time of its checkpoint, so the time between two starts does not
count.

The step of a logged event may be a few samples too high: TensorBoard shows one text per step, so a
run writes simultaneous events one sample apart. This module restores their number of samples.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_HEADER = struct.Struct("<QI")
"""Length of a record and a checksum of the length; a 4-byte checksum follows the record."""
_MOST_BYTES = 512 << 20
"""Most bytes that are read from all event files of a run: those of a year of training."""
_MOST_RECORD_BYTES = 64 << 20
"""Longest record: a picture has less than one MB."""
_LATEST_S = 1e12
"""Latest Unix time of a record."""


@dataclass(frozen=True)
class Curve:
    """The points of one tag, in the order of samples; the three tuples have one length."""

    samples: tuple[int, ...] = ()
    """Training samples of all workers together."""
    seconds: tuple[float, ...] = ()
    """Seconds of training."""
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class LoggedEvent:
    """An event that the run logged, as a sentence."""

    sentence: str
    start: int
    """The start of the run that logged it, from 1."""
    samples: int
    seconds: float


@dataclass(frozen=True)
class History:
    """The content of a run's event files."""

    curves: dict[str, Curve] = field(default_factory=dict)
    events: tuple[LoggedEvent, ...] = ()
    num_starts: int = 0
    damage: str = ""
    """A sentence about damaged files, or empty if all files were read to their end."""


@dataclass(frozen=True)
class _Point:
    tag: str
    samples: int
    wall_s: float
    value: float


@dataclass
class _Segment:
    """The points that a start wrote between two purge marks."""

    purge_from: int | None = None
    """Earlier points from this sample on are invalid; None: all are valid."""
    points: list[_Point] = field(default_factory=list)


@dataclass
class _Start:
    segments: list[_Segment] = field(default_factory=lambda: [_Segment()])
    texts: list[tuple[str, int, float]] = field(default_factory=list)
    formed_at: list[float] = field(default_factory=list)
    """When the table of memberships was written, by the wall clock."""
    num_files: int = 1
    num_damaged: int = 0
    is_first_file: bool = False
    """Whether a purge mark precedes all values: only the first file of a start has one there."""

    @property
    def events(self) -> Iterator[tuple[str, int, float]]:
        """The logged events: (sentence, samples when it was logged, wall clock in seconds)."""
        first = self.segments[0].purge_from
        last_step, samples = (first - 1, first - 1) if first else (-1, 0)
        for text, step, wall_s in self.texts:
            if step != last_step + 1:  # else the two events were simultaneous
                samples = step
            last_step = step
            yield text, samples, wall_s

    def extend(self, later: _Start) -> None:
        """Append the content of a later file of this start."""
        self.segments += later.segments
        self.texts += later.texts
        self.formed_at += later.formed_at
        self.num_files += later.num_files
        self.num_damaged += later.num_damaged

    def mark(self, purge_from: int) -> None:
        """Begin a new segment, unless the current one has no points yet."""
        if self.segments[-1].points:
            self.segments.append(_Segment())
        before = self.segments[-1].purge_from
        self.segments[-1].purge_from = purge_from if before is None else min(before, purge_from)


def read_history(files: Iterable[bytes | Iterable[bytes]]) -> History:
    """Return the content of a run's event files.

    Args:
        files: their contents, whole or in pieces, oldest first. An incomplete last record is
            ignored: a run that still trains is about to complete it.
    """
    valid = _ValidPoints()
    events: list[LoggedEvent] = []
    budget = _Budget()
    starts = _joined([_read_file(budget.pieces(file)) for file in files])
    for number, start in enumerate(starts, 1):
        valid.drop_from(start.segments[0].purge_from)
        clock = _Clock(start, valid.seconds)
        for segment in start.segments:
            valid.drop_from(segment.purge_from)
            valid.add(segment.points, clock)
        events += [LoggedEvent(text, number, n, clock.at(wall)) for text, n, wall in start.events]
    return History(
        curves={tag: _curve(points) for tag, points in sorted(valid.curves.items()) if points},
        events=tuple(dict.fromkeys(events)),
        num_starts=len(starts),
        damage=_damage(starts) or budget.problem,
    )


class _Budget:
    """Bounds the bytes that are read from all files of a run."""

    def __init__(self) -> None:
        self._left = _MOST_BYTES
        self.problem = ""
        """A sentence, once more than that is there."""

    def pieces(self, file: bytes | Iterable[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a file as long as the budget lasts."""
        for piece in [file] if isinstance(file, bytes) else file:
            self._left -= len(piece)
            if self._left < 0:
                self.problem = f"only the first {_MOST_BYTES >> 20} MiB of event files are read"
                return
            yield piece


def _joined(files: Sequence[_Start]) -> list[_Start]:
    """Return the starts, each with the content of all its files."""
    starts: list[_Start] = []
    for file in files:
        if starts and not file.is_first_file:
            starts[-1].extend(file)
        else:
            starts.append(file)
    return starts


def _damage(starts: Sequence[_Start]) -> str:
    count, num_files = sum(s.num_damaged for s in starts), sum(s.num_files for s in starts)
    return f"{count} of {num_files} event files are damaged and read in part" if count else ""


def _curve(points: list[tuple[int, float, float]]) -> Curve:
    samples, seconds, values = zip(*sorted(points, key=lambda p: p[:2]), strict=True)
    return Curve(samples, seconds, values)


class _Clock:
    """Converts the wall clock of one start to seconds of training.

    Args:
        start: its points and events.
        before_s: seconds of training of earlier starts.
    """

    def __init__(self, start: _Start, before_s: float) -> None:
        walls = start.formed_at[:1]
        walls += [point.wall_s for segment in start.segments for point in segment.points]
        self._began_at = walls[0] if walls else 0.0
        self._before_s = before_s

    def at(self, wall_s: float) -> float:
        """Return the seconds of training; those of earlier starts before the first generation."""
        return self._before_s + max(0.0, wall_s - self._began_at)


class _ValidPoints:
    """The points read so far that no purge mark has invalidated."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float, float]]] = {}
        """(samples, seconds, value) by tag, in the order of writing."""
        self._reached: dict[int, float] = {}
        """Seconds of training at which each number of samples was reached."""

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return max(self._reached.values(), default=0.0)

    def drop_from(self, samples: int | None) -> None:
        """Drop the points from a sample on; None: keep all."""
        if samples is not None:
            self.curves = {t: [p for p in c if p[0] < samples] for t, c in self.curves.items()}
            self._reached = {n: s for n, s in self._reached.items() if n < samples}

    def add(self, points: Sequence[_Point], clock: _Clock) -> None:
        """Add points of one start."""
        self._reached |= {p.samples: clock.at(p.wall_s) for p in points if not _is_late(p)}
        reached = sorted(self._reached.items())
        for p in points:
            is_between = _is_late(p) and reached
            seconds = _seconds_at(p.samples, reached) if is_between else clock.at(p.wall_s)
            self.curves.setdefault(p.tag, []).append((p.samples, seconds, p.value))


def _seconds_at(samples: int, reached: Sequence[tuple[int, float]]) -> float:
    """Return the seconds of training at a number of samples, interpolated between known ones.

    A score belongs to that moment; it is written later, after the evaluation.
    """
    right = bisect.bisect_left(reached, (samples, -math.inf))
    if right == len(reached):
        return reached[-1][1]
    to_samples, to_s = reached[right]
    from_samples, from_s = reached[right - 1] if right else (0, 0.0)
    share = (samples - from_samples) / max(1, to_samples - from_samples)
    return from_s + share * (to_s - from_s)


def _is_late(point: _Point) -> bool:
    return point.tag.startswith("center/") and point.tag != "center/distance"


def _read_file(pieces: Iterator[bytes]) -> _Start:
    # Imported here: the import takes half a second.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto import event_pb2

    start, has_values = _Start(), False
    for record in _records(pieces):
        try:
            event = event_pb2.Event.FromString(record)
        except DecodeError:
            event = None
        # TensorBoard writes no empty record; a file with a hole has millions of them.
        if event is None or not (event.wall_time and 0 <= event.wall_time <= _LATEST_S):
            start.num_damaged = 1
            break
        if event.step < 0:
            continue
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            start.is_first_file |= not has_values
            start.mark(int(event.step))
        has_values |= bool(event.summary.value)
        for value in event.summary.value:
            _add_value(start, event, value)
    return start


def _records(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the records of a file; each is framed by its length and two checksums.

    A record of an impossible length is yielded as an empty one, the last.
    """
    data, at = b"", 0
    for piece in pieces:
        data, at = data[at:] + piece, 0
        while at + _HEADER.size <= len(data):
            length, _ = _HEADER.unpack_from(data, at)
            if length > _MOST_RECORD_BYTES:
                yield b""
                return
            end = at + _HEADER.size + length + 4
            if end > len(data):
                break
            yield data[at + _HEADER.size : end - 4]
            at = end


def _add_value(start: _Start, event: Any, value: Any) -> None:
    """Add a scalar, a logged event or the time of a membership; ignore any other value."""
    tag = value.tag.removesuffix("/text_summary")
    if value.HasField("tensor") and value.tensor.string_val:
        text = b" ".join(value.tensor.string_val).decode(errors="replace").strip()
        if tag == "events":
            start.texts.append((text, int(event.step), event.wall_time))
        elif tag.partition("/")[0] == "membership":
            start.formed_at.append(event.wall_time)
        return
    if value.HasField("simple_value"):
        number = value.simple_value
    elif value.HasField("tensor") and value.tensor.float_val:
        number = value.tensor.float_val[0]
    else:
        return
    if math.isfinite(number):
        point = _Point(tag, int(event.step), event.wall_time, float(number))
        start.segments[-1].points.append(point)
