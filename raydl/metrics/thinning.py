"""Writes fewer points the older a run is, so that event files of a run of weeks stay small.

A point is written when 1/5000 of the run's age has passed since the previous point: all records in
the first 1000 seconds, about 27,000 points in a day of training, 37,000 in a week. A point stands
for all records since the previous point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from raydl.metrics.tags import Thinning, tag_of
from raydl.metrics.writer import MetricsWriter

_SHARE = 1 / 5000
"""Gap between two points as a share of the run's age, far less than a pixel of a curve."""
_MIN_GAP_S = 0.2
"""Shorter gaps are ignored: records are this far apart, or several come at one moment."""
_MOST_POINTS = 512

Point = tuple[int, Mapping[str, float]]
"""(Samples, seconds by time part)."""


def is_due(now: float, written: float, *, age_s: float) -> bool:
    """Whether to write a point.

    Args:
        now: time of the record, in seconds.
        written: time of the previous point, in seconds of the same clock.
        age_s: seconds of training in all starts of the run.
    """
    gap_s = age_s * _SHARE
    return gap_s <= _MIN_GAP_S or now - written >= gap_s


class Gathered:
    """Records since the previous point."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of a record; records may have different tags."""
        for name, value in values.items():
            if tag_of(name).thinning is Thinning.MEAN:
                count = self._counts[name] = self._counts.get(name, 0) + 1
                mean = self._values.get(name, 0.0)
                value = mean + (value - mean) / count
            self._values[name] = value

    def pop_point(self) -> dict[str, float]:
        """Return the values of the point and forget its records."""
        values, self._values, self._counts = self._values, {}, {}
        return values


class Thinned:
    """Passes texts, images and scores to a writer, and records as fewer and fewer points.

    Args:
        writer: writer of event files.
        seconds_before: seconds of training in earlier starts.
        clock: monotonic clock, in seconds.
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
        """Write scalars that are never thinned, and a point of the others if it is due."""
        whole = {n: v for n, v in values.items() if tag_of(n).thinning is Thinning.NEVER}
        if whole:
            self._writer.scalars(whole, num_samples=num_samples, unix_s=unix_s)
        record = {name: value for name, value in values.items() if name not in whole}
        if not record:
            return
        self._gathered.add(record)
        self._num_samples, self._unix_s = num_samples, unix_s
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
        """Hide the points from a sample on, and drop the records that are not yet written."""
        self._gathered.pop_point()
        self._writer.go_back(num_samples=num_samples)

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown."""
        self._writer.text(name, markdown, num_samples=num_samples, unix_s=unix_s)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        self._writer.image(name, pixels, num_samples=num_samples)

    def flush(self) -> None:
        """Make written points visible to readers; the thread that writes checkpoints calls this."""
        self._writer.flush()

    def close(self) -> None:
        """Write the remaining records as the last point, and close the writer."""
        try:
            self._write()
        finally:
            self._writer.close()


class StackHistory:
    """The time parts of a run over samples, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._newest: Point | None = None
        self._count = 0
        self._stride = 1

    def add(self, num_samples: int, parts: Mapping[str, float]) -> None:
        """Add a point; beyond 512 points, drop every other one and halve the rate of new ones."""
        self._newest = (num_samples, dict(parts))
        if self._count % self._stride == 0:
            self._points.append(self._newest)
        self._count += 1
        if len(self._points) > _MOST_POINTS:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def go_back(self, *, num_samples: int) -> None:
        """Drop the points from a sample on."""
        self._points = [point for point in self._points if point[0] < num_samples]
        if self._newest is not None and self._newest[0] >= num_samples:
            self._newest = self._points[-1] if self._points else None
        self._count = 0  # the next point is kept

    @property
    def points(self) -> tuple[Point, ...]:
        """Points in the order of their addition, the newest included."""
        newest = self._newest
        if newest is None or (self._points and newest is self._points[-1]):
            return tuple(self._points)
        return (*self._points, newest)
