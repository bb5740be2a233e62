"""What is measured: SC17's eight time parts, and every TensorBoard tag with its sentence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

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


class TimeParts:
    """Seconds by part, counted by one worker."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._now: tuple[str, float] | None = None

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


@dataclass(frozen=True)
class Tag:
    """One TensorBoard scalar; a name that ends in ``/ID`` stands for one of each worker."""

    name: str
    sentence: str

    @property
    def group(self) -> str:
        """The part of the name before the slash; TensorBoard shows a group's curves together."""
        return self.name.partition("/")[0]

    @property
    def is_per_worker(self) -> bool:
        """Whether the last part of the name is a worker's id."""
        return self.name.endswith("/ID")


_TAGS = (
    Tag("train/loss", "Mean training loss of all workers since the point before."),
    Tag("train/lr", "Learning rate of the local step."),
    Tag("train/epoch", "Passes over the training set so far, by all workers together."),
    Tag("center/accuracy", "Share of the test set that the center classifies rightly, 0 to 1."),
    Tag("center/loss", "Mean loss of the center on the test set."),
    Tag(
        "center/distance",
        "Root mean square distance from the replicas to the center, over workers.",
    ),
    Tag("throughput/samples_per_s", "Training samples per second, all workers together."),
    Tag("workers/count", "Workers that train."),
    Tag("workers/generation", "Number of the membership; it grows when workers join or leave."),
    Tag(
        "worker_step_s/ID",
        "Seconds that a local step took worker ID in its newest round, waiting not counted.",
    ),
    Tag(
        "worker_waited_s/ID",
        "Seconds that worker ID waited for exchanges in its newest round.",
    ),
    Tag("exchange/count", "Exchanges completed since the run began."),
    Tag("exchange/seconds", "Time one exchange made a worker wait, in seconds."),
    Tag(
        "exchange/bytes",
        "Bytes of one worker in one round: its messages, and the center's answers.",
    ),
    Tag(
        "exchange/staleness",
        "Exchanges of other workers that the center settled between two of the same worker, mean.",
    ),
    Tag(
        "exchange/allreduce_predicted_s",
        "Seconds that the chosen all-reduce should take by the measured network.",
    ),
    Tag(
        "exchange/allreduce_s",
        "Seconds that it takes, least of the newest 101: without waiting for late workers.",
    ),
    Tag(
        "exchange/communication_share",
        "Share of the workers' time since initialization that went into communication, 0 to 1.",
    ),
    *(
        Tag(f"time/{part}", f"Seconds per worker since this start spent on {meaning}.")
        for part, meaning in TIME_PARTS.items()
    ),
)

TAGS: dict[str, Tag] = {tag.name: tag for tag in _TAGS}
"""Every scalar raydl writes; ``docs/metrics.md`` says the same."""

_CHARTS = {
    "workers": {tag.group: ["Multiline", [f"{tag.group}/.*"]] for tag in _TAGS if tag.is_per_worker}
}
"""Under *Custom Scalars*, each with the curves of all workers in one picture."""


def tag_of(name: str) -> Tag:
    """Return what explains a written name: for ``worker_step_s/w0``, ``worker_step_s/ID``."""
    tag = TAGS.get(name) or TAGS.get(f"{name.partition('/')[0]}/ID")
    assert tag is not None, f"{name} has no sentence in metrics.TAGS"
    return tag


class MetricsWriter(Protocol):
    """Where measurements go. The x-axis is always samples seen by all workers."""

    def scalars(self, values: Mapping[str, float], *, num_samples: int) -> None:
        """Write one point for each tag."""
        ...

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        ...

    def flush(self) -> None:
        """Make what was written visible to readers."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


class TensorBoardWriter:
    """Event files for TensorBoard.

    Args:
        log_dir: local folder of the event files.
        purge_after: in a resumed run, the samples at its checkpoint; later points of the
            interrupted run are hidden, and the curves go on from there.
    """

    def __init__(self, log_dir: str, *, purge_after: int | None = None) -> None:
        # Imported here: it costs a second that no worker should pay.
        from torch.utils.tensorboard import SummaryWriter

        purge = None if purge_after is None else purge_after + 1
        self._writer = SummaryWriter(log_dir, purge_step=purge)
        self._writer.add_custom_scalars(_CHARTS)

    def scalars(self, values: Mapping[str, float], *, num_samples: int) -> None:
        """Write one point for each tag."""
        for name, value in values.items():
            tag_of(name)  # which has a sentence
            self._writer.add_scalar(name, value, num_samples)

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        self._writer.add_text(name, markdown, num_samples)

    def flush(self) -> None:
        """Make what was written visible to readers."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and end."""
        self._writer.close()


def config_as_markdown(config: Mapping[str, Any]) -> str:
    """Return nested settings as a Markdown table of dotted names and values."""
    rows = [f"| `{name}` | {value} |" for name, value in _dotted("", config)]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _dotted(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += _dotted(f"{name}.", value) if isinstance(value, dict) and value else [(name, value)]
    return rows
