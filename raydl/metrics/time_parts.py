"""The time of a worker in the eight parts of SC17."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

TIME_PARTS: dict[str, str] = {
    "data_io": "reading, shuffling and assembling batches",
    "initialization": "starting the worker, building the model, joining a generation",
    "device_device_parameters": "waiting for the exchange of parameters between workers",
    "host_device_data": "copying batches from host memory to the device",
    "host_device_parameters": "copying parameters between device and host memory",
    "forward_backward": "computing loss and gradient",
    "replica_update": "the optimizer step and the pull towards the center",
    "center_update": "moving the center",
}
"""The eight parts of SC17 (Table 3), with the work that raydl counts into each."""

COMPUTING_PART = "forward_backward"
"""The part in which a worker trains; in all others it prepares for that, or waits."""

COMMUNICATION_PARTS = ("device_device_parameters", "host_device_data", "host_device_parameters")


class Mark(Protocol):
    """An event in the queue of a device, like ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> object:
        """Place the mark at the end of the queue."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds to a later mark; the device must have passed both."""
        ...


class _StreamMark:
    """A mark in the queue of a CUDA device, which need not be the current one."""

    def __init__(self, device_index: int) -> None:
        from torch import cuda  # the import takes a second, and readers of runs do not need it

        make_event: Any = cuda.Event
        self._event = make_event(enable_timing=True)
        # By index: two thirds of the time of a call with a device are for looking up its index.
        self._stream = functools.partial(cuda.current_stream, device_index)

    def record(self) -> None:
        self._event.record(self._stream())

    def query(self) -> bool:
        is_past: bool = self._event.query()
        return is_past

    def elapsed_time(self, later: _StreamMark) -> float:
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds


class TimeParts:
    """Seconds by part of one worker.

    On a GPU the host only queues the computation. There a part is the time between two marks in the
    device's queue: the work of the device, and its waiting in between. So queued computation counts
    as computation, not as waiting for it, and work of the host that the device does not wait for
    does not count. No thread waits for a mark: its time is added once the device has passed it.

    Args:
        make_mark: makes marks in the device's queue; None: the host computes.
    """

    def __init__(self, make_mark: Callable[[], Mark] | None = None) -> None:
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._now: tuple[str, float] | None = None
        self._computed_at = time.perf_counter()
        self._make_mark = make_mark
        self._marked: deque[tuple[str, Mark, Mark]] = deque()
        self._free: list[Mark] = []
        # The training loop adds marks, and another thread reads them for the driver's polls.
        self._lock = threading.Lock()

    @classmethod
    def on(cls, device: torch.device) -> TimeParts:
        """Return the time parts of a worker that computes on a device."""
        if device.type != "cuda":
            return cls()
        from torch import cuda

        index = cuda.current_device() if device.index is None else device.index
        return cls(lambda: _StreamMark(index))

    def measure(self, part: str) -> _Measure:
        """Return a context manager that adds the time inside it to ``part``."""
        return _Measure(self, part)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        self._seconds[part] += seconds

    def mark(self) -> Mark | None:
        """Return a mark at the end of the device's queue, or None if the host computes."""
        if self._make_mark is None:
            return None
        with self._lock:
            mark = self._free.pop() if self._free else self._make_mark()
        mark.record()
        return mark

    def since(self, part: str) -> float:
        """Return the seconds since the worker entered a part, or 0 if it is in another."""
        now = self._now
        return time.perf_counter() - now[1] if now is not None and now[0] == part else 0.0

    def idle_s(self) -> float:
        """Return the seconds since the worker last computed a gradient, or 0 while it does.

        On a GPU the time counts from when the host had queued the computation.
        """
        now = self._now
        is_computing = now is not None and now[0] == COMPUTING_PART
        return 0.0 if is_computing else time.perf_counter() - self._computed_at

    def as_dict(self) -> dict[str, float]:
        """Return the seconds of all eight parts, on a GPU up to the last mark that it passed."""
        with self._lock:
            while self._marked and self._marked[0][2].query():
                part, start, stop = self._marked.popleft()
                self._seconds[part] += start.elapsed_time(stop) / 1000
                self._free += [start, stop]
            return dict(self._seconds)


class _Measure:
    """Adds the time between enter and exit to a part."""

    __slots__ = ("_mark", "_part", "_parts", "_start")

    def __init__(self, parts: TimeParts, part: str) -> None:
        self._parts = parts
        self._part = part

    def __enter__(self) -> None:
        self._mark = self._parts.mark()
        self._start = time.perf_counter()
        self._parts._now = (self._part, self._start)

    def __exit__(self, *error: object) -> None:
        self._parts._now = None
        if self._part == COMPUTING_PART:
            self._parts._computed_at = time.perf_counter()
        if self._mark is None:
            self._parts.add(self._part, time.perf_counter() - self._start)
            return
        stop = self._parts.mark()
        assert stop is not None, "either all parts have marks or none"
        with self._parts._lock:
            self._parts._marked.append((self._part, self._mark, stop))


def communication_share(parts: Mapping[str, float]) -> float:
    """Return the share of communication in the time without initialization, 0..1. (SC17)"""
    total = sum(s for part, s in parts.items() if part != "initialization")
    return sum(parts[part] for part in COMMUNICATION_PARTS) / total if total else 0.0


_REMEMBERED = 4
"""Workers whose newest seconds are kept, for each one that trains: those that left may return."""


class PartsPerWorker:
    """Seconds per worker by part since the start of a run, whichever workers come and go.

    Each report adds what its worker has spent since its report before, divided by the number of
    workers. So the sums never fall: a worker that leaves takes nothing with it, and a newcomer
    brings only its own time.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(TIME_PARTS, 0.0)
        """By part; a new dictionary after each ``add``."""
        self._newest: dict[str, Mapping[str, float]] = {}

    def add(self, by_worker: Mapping[str, Mapping[str, float]], *, num_workers: int) -> None:
        """Add the newest reports.

        Args:
            by_worker: the seconds of a worker so far by part, by its id.
            num_workers: workers that train, also those that have not reported yet.
        """
        sums, num_workers = dict(self.seconds), max(1, num_workers)  # all may have left
        for worker_id, parts in by_worker.items():
            before = self._newest.pop(worker_id, {})
            self._newest[worker_id] = parts
            for part in TIME_PARTS:
                sums[part] += max(0.0, parts[part] - before.get(part, 0.0)) / num_workers
        while len(self._newest) > _REMEMBERED * num_workers:
            del self._newest[next(iter(self._newest))]
        self.seconds = sums
