"""A run's curves and sentences, read back from its TensorBoard event files.

Every start of a run writes a file of its own, and another one wherever that can not be written
any more: only the first has a mark at its top. It says from how many samples on the
points of earlier starts no longer count, and again wherever the center went back: what lies
beyond is of a center that is gone. The seconds are those of training: they begin
with the first generation of each start and go on where the checkpoint lay, so that the time
between two starts does not count.

A sentence's step may be some samples too high: a run writes sentences of one moment a sample
apart, since TensorBoard shows one for each step. Here they get their own number back.
"""

from __future__ import annotations

import bisect
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_HEADER = struct.Struct("<QI")
"""Length of a record and its checksum; behind the record lies another checksum, of 4 bytes."""
_TEXT_SUFFIX = "/text_summary"
_SENTENCES = "events"
_MEMBERSHIP = "membership"
_ROW = re.compile(r"^\| (\d+) \| ([\d,]+) \| (\d+): ([^|]*) \|", re.MULTILINE)
"""A row of the table of memberships: the generation, from which sample on, how many train, who."""
_CENTER = "center/"


@dataclass(frozen=True)
class Curve:
    """The points of one tag, in the order of samples; all three of one length."""

    samples: tuple[int, ...] = ()
    """Training samples of all workers together."""
    seconds: tuple[float, ...] = ()
    """Seconds of training."""
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Told:
    """A sentence that the run said of itself."""

    sentence: str
    start: int
    """Which start of the run said it, counted from 1."""
    samples: int
    seconds: float


@dataclass(frozen=True)
class Formed:
    """A membership as the run's own table has it."""

    samples: int
    """From which on it trained."""
    worker_ids: tuple[str, ...]
    """By rank; of many workers in short, ``w0 to w99``."""
    num_workers: int = 0


@dataclass(frozen=True)
class History:
    """All that the event files hold."""

    curves: dict[str, Curve] = field(default_factory=dict)
    told: tuple[Told, ...] = ()
    formed: dict[tuple[int, int], Formed] = field(default_factory=dict)
    """The memberships, by start and generation, as far as the run wrote it down."""
    num_starts: int = 0
    damage: str = ""
    """A sentence about files that could not be read to their end; empty: all could."""


@dataclass(frozen=True)
class _Point:
    tag: str
    samples: int
    wall_s: float
    value: float


@dataclass
class _Stretch:
    """Events of a start from one mark to the next."""

    purge_from: int | None = None
    """From so many samples on, no point of before counts; None: all do."""
    points: list[_Point] = field(default_factory=list)


@dataclass
class _Start:
    stretches: list[_Stretch] = field(default_factory=lambda: [_Stretch()])
    texts: list[tuple[str, int, float]] = field(default_factory=list)
    formed: dict[int, Formed] = field(default_factory=dict)
    num_files: int = 1
    num_damaged: int = 0
    begins: bool = False
    """Whether a mark stands before all else: another start's first file."""

    @property
    def sentences(self) -> Iterator[tuple[str, int, float]]:
        """All that was said: (sentence, samples when it was said, wall clock in seconds)."""
        first = self.stretches[0].purge_from
        step, samples = (first - 1, first - 1) if first else (-1, 0)
        for text, at, wall_s in self.texts:
            if at != step + 1:  # else it was said with the one before it
                samples = at
            step = at
            yield text, samples, wall_s

    def add(self, other: _Start) -> None:
        """Take over what this start wrote later, into another file."""
        self.stretches += other.stretches
        self.texts += other.texts
        self.formed |= other.formed
        self.num_files += other.num_files
        self.num_damaged += other.num_damaged

    def mark(self, purge_from: int) -> None:
        """Begin a new stretch; a mark at the top belongs to the first."""
        if self.stretches[-1].points:
            self.stretches.append(_Stretch())
        before = self.stretches[-1].purge_from
        self.stretches[-1].purge_from = purge_from if before is None else min(before, purge_from)


def read_history(files: Sequence[bytes]) -> History:
    """Return the content of a run's event files.

    Args:
        files: their contents, oldest first. A last record that is cut off is left out: a run
            that goes on is about to write the rest.
    """
    past = _Past()
    told: list[Told] = []
    starts = _joined([_read_file(data) for data in files])
    for number, start in enumerate(starts, 1):
        past.drop_from(start.stretches[0].purge_from)
        clock = _Clock(start, past.seconds)
        for stretch in start.stretches:
            past.drop_from(stretch.purge_from)
            past.add(stretch.points, clock)
        told += [Told(text, number, n, clock.at(wall_s)) for text, n, wall_s in start.sentences]
    return History(
        curves={tag: _curve(points) for tag, points in sorted(past.curves.items()) if points},
        told=tuple(dict.fromkeys(told)),
        formed={(i, g): row for i, s in enumerate(starts, 1) for g, row in s.formed.items()},
        num_starts=len(starts),
        damage=_damage(starts),
    )


def _joined(files: Sequence[_Start]) -> list[_Start]:
    """Return the starts that wrote some files."""
    starts: list[_Start] = []
    for file in files:
        if starts and not file.begins:
            starts[-1].add(file)
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
    """Seconds of training for the wall clock of one start.

    Args:
        start: its points and sentences.
        before_s: seconds of training of earlier starts.
    """

    def __init__(self, start: _Start, before_s: float) -> None:
        walls = [wall_s for text, _, wall_s in start.texts if text.startswith("generation")]
        walls += [point.wall_s for stretch in start.stretches for point in stretch.points]
        self._began_at = walls[0] if walls else 0.0
        self._before_s = before_s

    def at(self, wall_s: float) -> float:
        """Return the seconds of training at a moment; before the first generation: none yet."""
        return self._before_s + max(0.0, wall_s - self._began_at)


class _Past:
    """The valid events among those read so far."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float, float]]] = {}
        """Of each tag (samples, seconds, value), as they came."""
        self._reached: dict[int, float] = {}
        """When each number of samples was reached, in seconds of training."""

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return max(self._reached.values(), default=0.0)

    def drop_from(self, samples: int | None) -> None:
        """Forget what lies from a sample on; None: nothing."""
        if samples is not None:
            self.curves = {t: [p for p in c if p[0] < samples] for t, c in self.curves.items()}
            self._reached = {n: s for n, s in self._reached.items() if n < samples}

    def add(self, points: Sequence[_Point], clock: _Clock) -> None:
        """Add what one start wrote."""
        self._reached |= {p.samples: clock.at(p.wall_s) for p in points if not _is_late(p)}
        reached = sorted(self._reached.items())
        for p in points:
            is_between = _is_late(p) and reached
            seconds = _seconds_at(p.samples, reached) if is_between else clock.at(p.wall_s)
            self.curves.setdefault(p.tag, []).append((p.samples, seconds, p.value))


def _seconds_at(samples: int, reached: Sequence[tuple[int, float]]) -> float:
    """Return when so many samples were reached, between two of which it is known.

    A score counts then, not when it was written: it comes later.
    """
    right = bisect.bisect_left(reached, (samples, -math.inf))
    if right == len(reached):
        return reached[-1][1]
    to_samples, to_s = reached[right]
    from_samples, from_s = reached[right - 1] if right else (0, 0.0)
    share = (samples - from_samples) / max(1, to_samples - from_samples)
    return from_s + share * (to_s - from_s)


def _is_late(point: _Point) -> bool:
    return point.tag.startswith(_CENTER) and point.tag != "center/distance"


def _read_file(data: bytes) -> _Start:
    # Imported here: it costs half a second that only who reads events should pay.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto import event_pb2

    start, has_values = _Start(), False
    for record in _records(data):
        try:
            event = event_pb2.Event.FromString(record)
        except DecodeError:
            start.num_damaged = 1
            break
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            start.begins |= not has_values
            start.mark(int(event.step))
        has_values |= bool(event.summary.value)
        for value in event.summary.value:
            _take(start, event, value)
    return start


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file, each framed by its length and two checksums."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, _ = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length + 4


def _take(start: _Start, event: Any, value: Any) -> None:
    """Add a scalar or a sentence; whatever else an event holds is passed over."""
    tag = value.tag.removesuffix(_TEXT_SUFFIX)
    if value.HasField("tensor") and value.tensor.string_val:
        text = b" ".join(value.tensor.string_val).decode(errors="replace").strip()
        if tag == _SENTENCES:
            start.texts.append((text, int(event.step), event.wall_time))
        elif tag.partition("/")[0] == _MEMBERSHIP:
            start.formed |= dict(_rows(text))
        return
    if value.HasField("simple_value"):
        number = value.simple_value
    elif value.HasField("tensor") and value.tensor.float_val:
        number = value.tensor.float_val[0]
    else:
        return
    if math.isfinite(number):
        point = _Point(tag, int(event.step), event.wall_time, float(number))
        start.stretches[-1].points.append(point)


def _rows(table: str) -> Iterator[tuple[int, Formed]]:
    for number, samples, count, who in _ROW.findall(table):
        names = tuple(who.strip().split(", "))
        yield int(number), Formed(int(samples.replace(",", "")), names, int(count))
