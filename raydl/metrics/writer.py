"""The protocol of metrics writers, several writers at once, and retries after failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

_RETRY_S = 10.0
"""Seconds from a failure to a new writer."""
_SOON_S = 60.0
"""A new writer that fails within this many seconds doubles the wait for the next one."""
_FAILURES = (OSError, RuntimeError, ValueError)


class MetricsWriter(Protocol):
    """Writes measurements. The x-axis is always samples of all workers."""

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag.

        Args:
            values: values by tag.
            num_samples: position of the point on the x-axis.
            unix_s: time of the point; None: now.
        """
        ...

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown; ``unix_s`` is its time, by default now."""
        ...

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        ...

    def go_back(self, *, num_samples: int) -> None:
        """Hide all points from a sample on; the center went back, and curves continue there."""
        ...

    def flush(self) -> None:
        """Make written points visible to readers."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Tee:
    """Passes all calls to several writers.

    Args:
        writers: the writers, in the order of the calls.
    """

    def __init__(self, *writers: MetricsWriter) -> None:
        self._writers = writers

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        for writer in self._writers:
            writer.scalars(values, num_samples=num_samples, unix_s=unix_s)

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown."""
        for writer in self._writers:
            writer.text(name, markdown, num_samples=num_samples, unix_s=unix_s)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        for writer in self._writers:
            writer.image(name, pixels, num_samples=num_samples)

    def go_back(self, *, num_samples: int) -> None:
        """Hide all points from a sample on."""
        for writer in self._writers:
            writer.go_back(num_samples=num_samples)

    def flush(self) -> None:
        """Make written points visible to readers."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flush and close."""
        for writer in self._writers:
            writer.close()


class RetryingWriter:
    """Passes all calls to a writer, and replaces a writer that fails while training continues.

    Points between the failure and the new writer are lost.

    Args:
        make: makes a writer, which may fail, on a full disk for example; its argument is whether
            it is the first writer.
        name: the curves, as the subject of messages.
        log: logs messages.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        make: Callable[[bool], MetricsWriter],
        name: str,
        log: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._name = name
        self._log = log
        self._clock = clock
        self._writer: MetricsWriter | None = None
        self._is_first, self._is_failing = True, False
        self._made_at = self._next_at = -math.inf
        self._wait_s = _RETRY_S
        self._back_to: int | None = None

    def _write(self, call: Callable[[MetricsWriter], None]) -> None:
        """Call the writer; make one first if there is none and a retry is due."""
        if self._writer is None and self._clock() >= self._next_at:
            try:
                writer = self._make(self._is_first)
                if self._back_to is not None:  # the center went back while there was no writer
                    writer.go_back(num_samples=self._back_to)
            except _FAILURES as error:
                self._fail(None, error)
                return
            if self._is_failing:
                self._made_at = self._clock()
                self._log(f"{self._name} are written again")
            self._is_first, self._is_failing, self._back_to = False, False, None
            self._writer = writer
        self._try(call)

    def _try(self, call: Callable[[MetricsWriter], None]) -> None:
        writer = self._writer  # race: a checkpoint's thread flushes while the controller writes
        if writer is None:
            return
        try:
            call(writer)
        except _FAILURES as error:
            self._fail(writer, error)

    def _fail(self, writer: MetricsWriter | None, error: Exception) -> None:
        """Drop a writer until the next retry; None: no writer could be made."""
        if writer is not self._writer:  # another thread has replaced it
            return
        now = self._clock()
        if writer is not None:  # retry less often if writers fail soon after they were made
            is_soon = now - self._made_at < _SOON_S
            self._wait_s = 2 * self._wait_s if is_soon else _RETRY_S
        self._writer, self._next_at = None, now + self._wait_s
        if not self._is_failing:
            self._is_failing = True
            self._log(
                f"{self._name} cannot be written ({error}); training continues, with a retry every "
                f"{self._wait_s:.0f} s"
            )

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        self._write(lambda writer: writer.scalars(values, num_samples=num_samples, unix_s=unix_s))

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown."""
        self._write(
            lambda writer: writer.text(name, markdown, num_samples=num_samples, unix_s=unix_s)
        )

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        self._write(lambda writer: writer.image(name, pixels, num_samples=num_samples))

    def go_back(self, *, num_samples: int) -> None:
        """Hide all points from a sample on."""
        self._try(lambda writer: writer.go_back(num_samples=num_samples))
        if self._writer is None:  # the next writer hides them
            before = self._back_to
            self._back_to = num_samples if before is None else min(before, num_samples)

    def flush(self) -> None:
        """Make written points visible to readers."""
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and close."""
        self._try(lambda writer: writer.close())
