"""Measurements that wait for their writer in a queue, so that nobody waits for a disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from raydl.metrics.writer import MetricsWriter
from raydl.storage import GIVE_UP_S, TELL_S, give_up

MAX_WAITING = 20_000
"""Calls that wait at most; later ones are dropped, and counted."""
MAX_IMAGES = 20
"""Pictures among them at most."""
_FLUSH_S = 10.0
"""The longest wait of a flush, in seconds."""
_LOOK_EVERY_S = 0.05
_Act = Callable[[MetricsWriter], None]


class BackgroundWriter:
    """Hands all on to a writer in a thread of its own, which is left behind if it hangs.

    Args:
        make: makes the writer; told where its sentences go.
        name: what it writes: the beginning of a sentence.
        tell: takes sentences, in the threads that call this writer.
        clock: seconds, rising.
    """

    def __init__(
        self,
        make: Callable[[Callable[[str], None]], MetricsWriter],
        name: str,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._tell = tell
        self._clock = clock
        self._said: deque[str] = deque(maxlen=100)
        self._writer = make(self._said.append)
        self._waiting: deque[tuple[_Act, bool]] = deque()
        self._num_images = self._num_dropped = 0
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._told_since: float | None = None
        self._is_closed = False
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="curves", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """For how long the writer has been at one call, in seconds."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                act, is_image = self._waiting.popleft()
                self._num_images -= is_image
                self._busy_since = self._clock()
            try:
                act(self._writer)
            except Exception as error:  # a mistake: it is raised where the next call comes from
                self._problem = self._problem or error
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
                if self._is_closed and not self._waiting:
                    return

    def _put(self, act: _Act, *, is_image: bool = False) -> None:
        """Let something be written; drop it if too much waits."""
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING
            if is_full or (is_image and self._num_images >= MAX_IMAGES):
                self._num_dropped += 1
            else:
                self._waiting.append((act, is_image))
                self._num_images += is_image
                self._changed.notify_all()
        self._say()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _say(self) -> None:
        """Hand on what the writer says, and that it does not get on."""
        while self._said:
            self._tell(self._said.popleft())
        silent_s = self.silent_s
        if self._told_since is None and silent_s >= TELL_S:
            self._told_since = self._clock() - silent_s
            self._tell(
                f"{self._name} have not been written for {silent_s:.0f} s: their disk does not "
                f"answer; training goes on, and {MAX_WAITING:,} points wait for it at most"
            )
        elif self._told_since is not None and silent_s < TELL_S:
            for_s, self._told_since = self._clock() - self._told_since, None
            dropped = f"; {self._num_dropped:,} points were dropped" if self._num_dropped else ""
            self._num_dropped = 0
            self._tell(f"{self._name} are written again, after {for_s:.0f} s{dropped}")

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        kept, at = dict(values), time.time() if unix_s is None else unix_s
        self._put(lambda writer: writer.scalars(kept, num_samples=num_samples, unix_s=at))

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        self._put(lambda writer: writer.text(name, markdown, num_samples=num_samples))

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        self._put(lambda writer: writer.image(name, pixels, num_samples=num_samples), is_image=True)

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on."""
        self._put(lambda writer: writer.go_back(num_samples=num_samples))

    def flush(self) -> None:
        """Make what was written visible to readers; wait for that ten seconds at most."""
        is_flushed = threading.Event()

        def flush(writer: MetricsWriter) -> None:
            try:
                writer.flush()
            finally:
                is_flushed.set()

        self._put(flush)
        is_flushed.wait(_FLUSH_S)

    def close(self) -> None:
        """Write all that waits, and end; a disk that does not answer is left to itself."""
        with self._changed:
            self._is_closed = True
            self._waiting.append((lambda writer: writer.close(), False))
            self._changed.notify_all()
        while self._thread.is_alive() and self.silent_s <= GIVE_UP_S:
            self._thread.join(_LOOK_EVERY_S)
            self._say()
        if self._thread.is_alive():
            give_up(self._name)
            num_lost = len(self._waiting) - 1 + self._num_dropped
            self._tell(
                f"{self._name} could not be written to their end: their disk has not answered for "
                f"{self.silent_s:.0f} s; {num_lost:,} points are lost"
            )
        elif self._problem is not None:
            raise self._problem
