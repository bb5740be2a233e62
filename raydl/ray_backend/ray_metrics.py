"""A run's curves as Ray metrics, for its dashboard, Prometheus and Grafana.

Ray adds the prefix ``ray_`` to every name, and the suffix ``_total`` to that of a counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
from ray.util.metrics import Counter, Gauge

from raydl.metrics import TAGS, Tag, tag_of
from raydl.metrics.tags import OWN_METRIC, STACK_GROUP

SAMPLES = Tag("samples", "Training samples that all workers together have seen in this start.")
"""A counter: the x-axis of all curves."""

_NOT_EXPORTED = {tag.name for tag in TAGS.values() if tag.group == STACK_GROUP} | {OWN_METRIC}
EXPORTED = (*(tag for tag in TAGS.values() if tag.name not in _NOT_EXPORTED), SAMPLES)
"""Exported metrics: all but the edges of the stack, since Grafana stacks curves itself, and metrics
whose names only the task knows."""
_FORGET_AFTER_S = 60.0
"""Seconds without values after which a worker's gauges end: it has left, or hangs."""


def metric_name(tag: Tag) -> str:
    """Return the name for Ray: ``raydl_train_loss`` for ``train/loss``."""
    return f"raydl_{tag.name.removesuffix('/ID').replace('/', '_')}"


def exported_name(tag: Tag) -> str:
    """Return the name in Prometheus: ``ray_raydl_train_loss`` for ``train/loss``."""
    return f"ray_{metric_name(tag)}{'_total' if tag is SAMPLES else ''}"


class RayMetrics:
    """A gauge for each curve, set by the driver; see ``raydl.metrics.MetricsWriter``.

    Args:
        run: the value of the label ``run``.
        first_sample: samples of all workers before this start.
        clock: seconds, rising.
    """

    def __init__(
        self, run: str, *, first_sample: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._labels = {"run": run}
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._gauges: dict[str, Gauge] = {}
        self._samples = Counter(metric_name(SAMPLES), SAMPLES.sentence, tag_keys=("run",))
        self._num_samples = first_sample

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Set the gauges to these values, and count the samples."""
        for name, value in values.items():
            if tag_of(name) in EXPORTED:
                self._set(name, value)
        # A score arrives later than its samples, and a counter never decreases.
        if num_samples > self._num_samples:
            self._samples.inc(num_samples - self._num_samples, self._labels)
            self._num_samples = num_samples
        now = self._clock()
        for name in [n for n, at in self._heard.items() if now - at > _FORGET_AFTER_S]:
            self._set(name, math.nan)  # Ray does not export NaN
            del self._heard[name]

    def _set(self, name: str, value: float) -> None:
        tag, labels = tag_of(name), self._labels
        if tag.is_per_worker:
            labels = {**labels, "worker": name.partition("/")[2]}
            self._heard[name] = self._clock()
        if tag.name not in self._gauges:
            self._gauges[tag.name] = Gauge(metric_name(tag), tag.sentence, tag_keys=tuple(labels))
        self._gauges[tag.name].set(value, labels)

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Do nothing: Ray's metrics are numbers."""

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Do nothing: Ray's metrics are numbers."""

    def go_back(self, *, num_samples: int) -> None:
        """Do nothing: a gauge has only its newest value, and a counter never decreases."""

    def flush(self) -> None:
        """Do nothing: Ray collects the numbers itself."""

    def close(self) -> None:
        """Do nothing: the numbers end with the driver."""
