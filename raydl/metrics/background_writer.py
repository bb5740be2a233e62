"""A metrics writer in a separate thread, so that the training does not wait for a disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from raydl.metrics.writer import MetricsWriter
from raydl.storage import GIVE_UP_S, LOG_AFTER_S, give_up

MAX_WAITING = 20_000
"""Most queued calls; further ones are dropped and counted."""
MAX_IMAGES = 20
"""Most images among the queued calls."""
_FLUSH_S = 10.0
"""Longest wait of a flush, in seconds."""
_POLL_S = 0.05
_Call = Callable[[MetricsWriter], None]


class BackgroundWriter:
    """Passes all calls to a writer in a separate thread, which is abandoned if it hangs.

    Args:
        make: makes the writer, from a function that logs its messages.
        name: the curves, as the subject of messages.
        log: logs messages, in the threads that call this writer.
        place: where they are written, as the subject of messages.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        make: Callable[[Callable[[str], None]], MetricsWriter],
        name: str,
        log: Callable[[str], None],
        *,
        place: str = "their disk",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._log = log
        self._place = place
        self._clock = clock
        self._messages: deque[str] = deque(maxlen=100)
        self._writer = make(self._messages.append)
        self._queue: deque[tuple[_Call, bool]] = deque()
        self._num_images = self._num_dropped = 0
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._reported_since: float | None = None
        self._is_closed = False
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="curves", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the writer began its current call; 0 without one."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                call, is_image = self._queue.popleft()
                self._num_images -= is_image
                self._busy_since = self._clock()
            try:
                call(self._writer)
            except Exception as error:  # a mistake in the code: the next caller raises it
                self._problem = self._problem or error
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
                if self._is_closed and not self._queue:
                    return

    def _put(self, call: _Call, *, is_image: bool = False) -> None:
        """Queue a call, or drop it if the queue is full."""
        with self._changed:
            is_full = len(self._queue) >= MAX_WAITING
            if is_full or (is_image and self._num_images >= MAX_IMAGES):
                self._num_dropped += 1
            else:
                self._queue.append((call, is_image))
                self._num_images += is_image
                self._changed.notify_all()
        self._report()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _report(self) -> None:
        """Log the messages of the writer, and whether it hangs."""
        while self._messages:
            self._log(self._messages.popleft())
        silent_s = self.silent_s
        if self._reported_since is None and silent_s >= LOG_AFTER_S:
            self._reported_since = self._clock() - silent_s
            self._log(
                f"{self._name} have not been written for {silent_s:.0f} s: {self._place} does not "
                f"answer; training continues, and at most {MAX_WAITING:,} points are queued"
            )
        elif self._reported_since is not None and silent_s < LOG_AFTER_S:
            for_s, self._reported_since = self._clock() - self._reported_since, None
            dropped = f"; {self._num_dropped:,} points were dropped" if self._num_dropped else ""
            self._num_dropped = 0
            self._log(f"{self._name} are written again, after {for_s:.0f} s{dropped}")

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        copy, at = dict(values), time.time() if unix_s is None else unix_s
        self._put(lambda writer: writer.scalars(copy, num_samples=num_samples, unix_s=at))

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown."""
        at = time.time() if unix_s is None else unix_s
        self._put(lambda writer: writer.text(name, markdown, num_samples=num_samples, unix_s=at))

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        self._put(lambda writer: writer.image(name, pixels, num_samples=num_samples), is_image=True)

    def go_back(self, *, num_samples: int) -> None:
        """Hide all points from a sample on."""
        self._put(lambda writer: writer.go_back(num_samples=num_samples))

    def flush(self) -> None:
        """Make written points visible to readers; wait at most ten seconds."""
        is_flushed = threading.Event()

        def flush(writer: MetricsWriter) -> None:
            try:
                writer.flush()
            finally:
                is_flushed.set()

        self._put(flush)
        is_flushed.wait(_FLUSH_S)

    def close(self) -> None:
        """Write the queue and close the writer; abandon the thread after 45 s.

        The workers of the run wait meanwhile, and their resources with them.
        """
        with self._changed:
            self._is_closed = True
            self._queue.append((lambda writer: writer.close(), False))
            self._changed.notify_all()
        until = time.monotonic() + GIVE_UP_S
        while self._thread.is_alive() and time.monotonic() <= until:
            self._thread.join(_POLL_S)
            self._report()
        if self._thread.is_alive():
            give_up(self._name)
            # The last in the queue is no point; it has left the queue if the writer is closing.
            num_lost = max(0, len(self._queue) - 1) + self._num_dropped
            self._log(
                f"{self._name} could not be written to their end: {self._place} did not take them "
                f"within {GIVE_UP_S:.0f} s; {num_lost:,} points are lost"
            )
        elif self._problem is not None:
            raise self._problem
