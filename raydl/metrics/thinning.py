"""Fewer points the older a run is, so that event files of a run of weeks stay small.

A point is written when the run's age has grown by a share of 1/5000 since the last one: all
records of the first 1000 seconds, about 27,000 points up to a day of training, 37,000 up to a
week. Each stands for all records since the point before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from raydl.metrics.tags import Thinning, tag_of
from raydl.metrics.writer import MetricsWriter

_SHARE = 1 / 5000
"""A gap between two points, as a share of the run's age: far less than a pixel of a curve."""
_FINEST_S = 0.2
"""Gaps are no finer: records come so far apart, or several of them at one moment."""
_MOST_POINTS = 512

Point = tuple[int, Mapping[str, float]]
"""Samples, and the seconds of each time part."""


def is_due(now: float, written: float, *, age_s: float) -> bool:
    """Whether a record is to be written as a point.

    Args:
        now, written: when it came, and when the point before it was written, in seconds of
            one clock.
        age_s: seconds of training in all starts of the run.
    """
    gap_s = age_s * _SHARE
    return gap_s <= _FINEST_S or now - written >= gap_s


class Gathered:
    """Records that wait to become one point."""

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._newest)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of a record; a tag may be missing in some."""
        for name, value in values.items():
            if tag_of(name).thinning is Thinning.MEAN:
                self._add_to_mean(name, value)
            else:
                self._newest[name] = value

    def _add_to_mean(self, name: str, value: float) -> None:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        mean = self._newest.get(name, 0.0)
        self._newest[name] = mean + (value - mean) / count

    def pop_point(self) -> dict[str, float]:
        """Return the point that stands for all of them, and begin anew."""
        taken, self._newest, self._counts = self._newest, {}, {}
        return taken


class Thinned:
    """Hands records on to a writer as ever fewer points; texts, pictures and scores all of them.

    Args:
        writer: of event files.
        seconds_before: seconds of training in earlier starts.
        clock: seconds, rising.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        *,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._seconds_before = seconds_before
        self._clock = clock
        self._began: float | None = None
        self._written = 0.0
        self._gathered = Gathered()
        self._num_samples = 0
        self._unix_s: float | None = None

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write what is never thinned, and a point if one is due; keep the rest for the next."""
        kept = {n: v for n, v in values.items() if tag_of(n).thinning is Thinning.NEVER}
        if kept:
            self._writer.scalars(kept, num_samples=num_samples, unix_s=unix_s)
        record = {name: value for name, value in values.items() if name not in kept}
        if record:
            self._gathered.add(record)
            self._num_samples, self._unix_s = num_samples, unix_s
            self._write_if_due()

    def _write_if_due(self) -> None:
        now = self._clock()
        if self._began is None:
            self._began = self._written = now
        if is_due(now, self._written, age_s=self._seconds_before + now - self._began):
            self._written = now
            self._write()

    def _write(self) -> None:
        if self._gathered:
            values = self._gathered.pop_point()
            self._writer.scalars(values, num_samples=self._num_samples, unix_s=self._unix_s)

    def go_back(self, *, num_samples: int) -> None:
        """Hide the points from a sample on, those too that are yet to be written."""
        self._gathered.pop_point()
        self._writer.go_back(num_samples=num_samples)

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        self._writer.text(name, markdown, num_samples=num_samples)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        self._writer.image(name, pixels, num_samples=num_samples)

    def flush(self) -> None:
        """Make what was written visible to readers; a checkpoint's thread calls this."""
        self._writer.flush()

    def close(self) -> None:
        """Write what has gathered as the last point, and end."""
        try:
            self._write()
        finally:
            self._writer.close()


class StackHistory:
    """The time parts of a run so far, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._newest: Point | None = None
        self._count = 0
        self._stride = 1

    def add(self, num_samples: int, parts: Mapping[str, float]) -> None:
        """Add a point; of too many, every other one is forgotten, and of those to come."""
        self._newest = (num_samples, dict(parts))
        if self._count % self._stride == 0:
            self._points.append(self._newest)
        self._count += 1
        if len(self._points) > _MOST_POINTS:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def go_back(self, *, num_samples: int) -> None:
        """Forget the points from a sample on."""
        self._points = [point for point in self._points if point[0] < num_samples]
        if self._newest is not None and self._newest[0] >= num_samples:
            self._newest = self._points[-1] if self._points else None
        self._count = 0  # so that the next point is kept

    @property
    def points(self) -> tuple[Point, ...]:
        """The points in the order in which they came, the newest among them."""
        newest = self._newest
        if newest is None or (self._points and newest is self._points[-1]):
            return tuple(self._points)
        return (*self._points, newest)
