"""A run's curves as Ray's own metrics, which its dashboard, Prometheus and Grafana read.

Ray puts ``ray_`` before every name, and ``_total`` behind that of a counter.
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
"""The one number that is no curve but the x-axis of all; a counter."""

_NOT_EXPORTED = {tag.name for tag in TAGS.values() if tag.group == STACK_GROUP} | {OWN_METRIC}
EXPORTED = (*(tag for tag in TAGS.values() if tag.name not in _NOT_EXPORTED), SAMPLES)
"""Metrics that Ray exports: no edges of the stack, since Grafana stacks by itself, and no metric
whose name only the task knows."""
_FORGET_AFTER_S = 60.0
"""A worker without news for so long has left, or hangs: its gauges end."""


def metric_name(tag: Tag) -> str:
    """Return the name that Ray is given: ``raydl_train_loss`` for ``train/loss``."""
    return f"raydl_{tag.name.removesuffix('/ID').replace('/', '_')}"


def exported_name(tag: Tag) -> str:
    """Return the name that Prometheus sees: ``ray_raydl_train_loss`` for ``train/loss``."""
    return f"ray_{metric_name(tag)}{'_total' if tag is SAMPLES else ''}"


class RayMetrics:
    """Keeps a gauge for each curve, from the driver; see ``raydl.metrics.MetricsWriter``.

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
        """Show these values from now on."""
        for name, value in values.items():
            if tag_of(name) in EXPORTED:
                self._set(name, value)
        self._count(num_samples)
        self._forget_silent()

    def _set(self, name: str, value: float) -> None:
        tag, labels = tag_of(name), self._labels
        if tag.is_per_worker:
            labels = {**labels, "worker": name.partition("/")[2]}
            self._heard[name] = self._clock()
        self._gauge(tag).set(value, labels)

    def _forget_silent(self) -> None:
        now = self._clock()
        for name in [n for n, at in self._heard.items() if now - at > _FORGET_AFTER_S]:
            self._set(name, math.nan)  # Ray exports no such value
            del self._heard[name]

    def _gauge(self, tag: Tag) -> Gauge:
        if tag.name not in self._gauges:
            keys = ("run", "worker") if tag.is_per_worker else ("run",)
            self._gauges[tag.name] = Gauge(metric_name(tag), tag.sentence, tag_keys=keys)
        return self._gauges[tag.name]

    def _count(self, num_samples: int) -> None:
        # A score comes later than the samples it belongs to: a counter never goes back.
        if num_samples > self._num_samples:
            self._samples.inc(num_samples - self._num_samples, self._labels)
            self._num_samples = num_samples

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Do nothing: Ray's metrics are numbers."""

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Do nothing: Ray's metrics are numbers."""

    def go_back(self, *, num_samples: int) -> None:
        """Do nothing: a gauge has its newest value alone, and a counter never goes back."""

    def flush(self) -> None:
        """Do nothing: Ray fetches the numbers by itself."""

    def close(self) -> None:
        """Do nothing: the numbers end with the driver."""
