"""The protocol of metrics writers, and several such writers at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

_AGAIN_S = 10.0
"""Seconds after which a writer that failed is made anew."""
_SOON_S = 60.0
"""A writer that fails within this time is made anew later than the one before it."""
_FAILURES = (OSError, RuntimeError, ValueError)


class MetricsWriter(Protocol):
    """Where measurements go. The x-axis is always samples seen by all workers."""

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag.

        Args:
            values: by tag.
            num_samples: where the point lies.
            unix_s: when it happened; None: now.
        """
        ...

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        ...

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        ...

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on: the center went back, and its curves go on there."""
        ...

    def flush(self) -> None:
        """Make what was written visible to readers."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


class Tee:
    """Hands all on to several writers.

    Args:
        writers: they take everything in this order.
    """

    def __init__(self, *writers: MetricsWriter) -> None:
        self._writers = writers

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        for writer in self._writers:
            writer.scalars(values, num_samples=num_samples, unix_s=unix_s)

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        for writer in self._writers:
            writer.text(name, markdown, num_samples=num_samples)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        for writer in self._writers:
            writer.image(name, pixels, num_samples=num_samples)

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on."""
        for writer in self._writers:
            writer.go_back(num_samples=num_samples)

    def flush(self) -> None:
        """Make what was written visible to readers."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flush and end."""
        for writer in self._writers:
            writer.close()


class Forgiving:
    """Hands all on to a writer; one that fails is made anew, and training goes on meanwhile.

    Points between the failure and the new writer are lost.

    Args:
        make: makes the writer, to disk, say, which may be full; told whether it is the first one.
        name: what fails with it: the beginning of a sentence.
        tell: takes the sentence.
        clock: seconds, rising.
    """

    def __init__(
        self,
        make: Callable[[bool], MetricsWriter],
        name: str,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._name = name
        self._tell = tell
        self._clock = clock
        self._writer: MetricsWriter | None = None
        self._is_first, self._is_failing = True, False
        self._made_at = self._next_at = -math.inf
        self._wait_s = _AGAIN_S
        self._back_to: int | None = None

    def _write(self, act: Callable[[MetricsWriter], None]) -> None:
        """Hand something on; make the writer first, if there is none and it is time to try."""
        if self._writer is None and self._clock() >= self._next_at:
            try:
                self._writer = self._made()
            except _FAILURES as error:
                self._fail(None, error)
                return
        self._try(act)

    def _made(self) -> MetricsWriter:
        writer = self._make(self._is_first)
        if self._back_to is not None:  # the center went back meanwhile
            writer.go_back(num_samples=self._back_to)
        if self._is_failing:
            self._made_at = self._clock()
            self._tell(f"{self._name} are written again")
        self._is_first, self._is_failing, self._back_to = False, False, None
        return writer

    def _try(self, act: Callable[[MetricsWriter], None]) -> None:
        writer = self._writer  # a checkpoint's thread flushes while the controller writes
        if writer is None:
            return
        try:
            act(writer)
        except _FAILURES as error:
            self._fail(writer, error)

    def _fail(self, writer: MetricsWriter | None, error: Exception) -> None:
        """Do without a writer for a while; None: one could not be made."""
        if writer is not self._writer:  # another one was made meanwhile
            return
        now = self._clock()
        if writer is not None:  # one that fails again soon is tried more rarely
            is_soon = now - self._made_at < _SOON_S
            self._wait_s = 2 * self._wait_s if is_soon else _AGAIN_S
        self._writer, self._next_at = None, now + self._wait_s
        if not self._is_failing:
            self._is_failing = True
            self._tell(
                f"{self._name} can not be written ({error}); training goes on, and they are tried "
                f"again every {self._wait_s:.0f} s"
            )

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        self._write(lambda writer: writer.scalars(values, num_samples=num_samples, unix_s=unix_s))

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        self._write(lambda writer: writer.text(name, markdown, num_samples=num_samples))

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        self._write(lambda writer: writer.image(name, pixels, num_samples=num_samples))

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on."""
        self._try(lambda writer: writer.go_back(num_samples=num_samples))
        if self._writer is None:  # the next one has to hide it
            before = self._back_to
            self._back_to = num_samples if before is None else min(before, num_samples)

    def flush(self) -> None:
        """Make what was written visible to readers."""
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and end."""
        self._try(lambda writer: writer.close())
