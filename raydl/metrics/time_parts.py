"""Where a worker's time goes: the eight parts of SC17."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

TIME_PARTS: dict[str, str] = {
    "data_io": "reading, shuffling and assembling batches",
    "initialization": "starting the worker, building the model, joining a generation",
    "device_device_parameters": "waiting for the exchange of parameters between workers",
    "host_device_data": "copying batches from host memory to the device",
    "host_device_parameters": "copying parameters between device and host memory",
    "forward_backward": "computing loss and gradient",
    "replica_update": "the local step and the pull towards the center",
    "center_update": "moving the center",
}
"""The eight parts of SC17 (Table 3), each with what raydl counts into it."""

COMMUNICATION_PARTS = ("device_device_parameters", "host_device_data", "host_device_parameters")


def no_drain() -> None:
    """Wait for nothing."""


class TimeParts:
    """Seconds by part, counted by one worker."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._now: tuple[str, float] | None = None
        self.drain: Callable[[], object] = no_drain
        """Called before each part: where a device's work is only queued, this may wait for it, so
        that it does not count to the next part that waits for the device."""

    def measure(self, part: str) -> _Measure:
        """Return a context manager that adds the time inside it to ``part``."""
        return _Measure(self, part)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        self._seconds[part] += seconds
        self._now = None

    def enter(self, part: str, at_s: float) -> None:
        """Note what the worker is at from now on, until time is added to some part."""
        self._now = (part, at_s)

    def since(self, part: str) -> float:
        """Return for how many seconds the worker has been at a part; 0: it is at another."""
        now = self._now
        return time.perf_counter() - now[1] if now is not None and now[0] == part else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return seconds by part, all eight."""
        return dict(self._seconds)


class _Measure:
    """Adds the time between enter and exit to a part."""

    __slots__ = ("_part", "_parts", "_start")

    def __init__(self, parts: TimeParts, part: str) -> None:
        self._parts = parts
        self._part = part

    def __enter__(self) -> None:
        self._parts.drain()
        self._start = time.perf_counter()
        self._parts.enter(self._part, self._start)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parts.add(self._part, time.perf_counter() - self._start)


def communication_share(parts: Mapping[str, float]) -> float:
    """Return the share of communication in the time since initialization, 0..1. (SC17)"""
    total = sum(s for part, s in parts.items() if part != "initialization")
    return sum(parts[part] for part in COMMUNICATION_PARTS) / total if total else 0.0


def mean_parts(per_worker: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over workers of each part, in seconds."""
    count = max(1, len(per_worker))
    return {part: sum(p[part] for p in per_worker) / count for part in TIME_PARTS}
