"""Scores snapshots of the center on the test set: in an evaluator, or in parts in the workers."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from raydl.config import TrainConfig
from raydl.core.center import Snapshot, as_arrays, as_tensors
from raydl.core.center_average import CenterAverage
from raydl.core.job import Job, first_model
from raydl.core.non_trainable import NonTrainable
from raydl.core.scores import AVERAGED, Evaluated, metric_of, score_of
from raydl.data import Batch, Batches
from raydl.data.samples import to_device
from raydl.tasks import (
    MetricSums,
    Predicts,
    Task,
    in_precision,
    metric_sums,
    metrics_of,
    predict,
)
from raydl.worker.examples import example_rows
from raydl.worker.not_finite import NotFinite, find_not_finite, joined

_LEAST_SHARE = 0.02
"""Smallest share of a worker, as a part of the largest."""


def score(
    task: Task,
    model: nn.Module,
    test: Batches,
    config: TrainConfig,
    *,
    note: Callable[[str], None] = lambda sentence: None,
) -> dict[str, float]:
    """Return the metrics of a model on a whole test set, in the precision and batches of a run.

    Args:
        task: computes the metrics.
        model: the model.
        test: the test set.
        config: of the run.
        note: called with a sentence if a metric is NaN or infinite.
    """
    rows = np.arange(test.num_samples)
    sums = _sums(task, model, test, config, rows)
    metrics = metrics_of(task, [sums])
    found = _not_finite(task, model, test, config, rows, sums)
    if sentence := _problem(metrics, [sums], found, config):
        note(sentence)
    return metrics


def _not_finite(
    task: Task,
    model: nn.Module,
    test: Batches,
    config: TrainConfig,
    rows: np.ndarray,
    sums: MetricSums,
) -> NotFinite | None:
    """Return a metric that is not finite over some rows, or None."""
    device = next(model.parameters()).device
    with in_precision(config.training.precision, device):
        return find_not_finite(
            task,
            model,
            lambda start, stop: _batch_on(device, test, rows[start:stop]),
            sums,
            rows=rows,
            batch_size=config.evaluation.batch_size,
        )


def _problem(
    metrics: Mapping[str, float],
    parts: Sequence[MetricSums],
    found: NotFinite | None,
    config: TrainConfig,
) -> str:
    """Return a sentence about a metric that is NaN or infinite, or an empty text."""
    if found is not None:
        return found.sentence(_num_batches(parts, config))
    undefined = [name for name, value in metrics.items() if math.isnan(value)]
    if not undefined or any(part.not_finite for part in parts):
        return ""
    return (
        f"the {undefined[0]} of the center on the test set is NaN, although it is finite in each "
        f"batch: check whether any sample counts in this metric, and how the task derives it"
    )


def _num_batches(parts: Sequence[MetricSums], config: TrainConfig) -> int:
    """Return the number of batches in which the parts of a test set were scored."""
    sizes = (part.num_samples + part.num_skipped for part in parts)
    return sum(math.ceil(size / config.evaluation.batch_size) for size in sizes)


def _sums(
    task: Task,
    model: nn.Module,
    test: Batches,
    config: TrainConfig,
    rows: np.ndarray,
    note: Callable[[int], None] = lambda num_samples: None,
) -> MetricSums:
    """Return the sums of the metrics over some rows; ``note`` gets the number scored so far."""
    device = next(model.parameters()).device

    def batch(start: int, stop: int) -> Batch:
        note(start)
        return _batch_on(device, test, rows[start:stop])

    with in_precision(config.training.precision, device):
        return metric_sums(
            task, model, batch, num_samples=len(rows), batch_size=config.evaluation.batch_size
        )


def _batch_on(device: torch.device, test: Batches, rows: np.ndarray) -> Batch:
    batch = test.batch(rows)
    return batch if device.type == "cpu" else to_device(batch, device)


def rows_to_score(num_samples: int, config: TrainConfig) -> np.ndarray:
    """Return the rows that each score of a run takes, int64, ascending.

    Args:
        num_samples: samples in the test set.
        config: of the run.
    """
    wanted = config.evaluation.num_samples
    if wanted is None:
        return np.arange(num_samples)
    drawn = np.random.default_rng(config.training.seed).permutation(num_samples)
    return np.sort(drawn[:wanted])  # a streamed set is read in order


def share_of(rank: int, speeds: Sequence[float]) -> tuple[float, float]:
    """Return the share of the test set that a worker scores: its begin and end, 0..1.

    Args:
        rank: of the worker.
        speeds: positive numbers by rank; the shares are in proportion.
    """
    total = sum(speeds)
    return sum(speeds[:rank]) / total, sum(speeds[: rank + 1]) / total


class Evaluator:
    """Scores snapshots of the center, one after another, in one model.

    Args:
        job: the run's job.
        test: the test set.
        non_trainable: the non-trainable state of the run's first model; None: as the model is
            built.
        device: device of the model.
    """

    def __init__(
        self,
        job: Job,
        test: Batches,
        non_trainable: NonTrainable | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        self._job = job
        self._test = test
        self._rows = rows_to_score(test.num_samples, job.config)
        self._flat = first_model(job, non_trainable, device=device)
        self._first = self._flat.non_trainable.arrays() if non_trainable is None else non_trainable
        average = job.config.evaluation.average
        self._average = CenterAverage(average) if average else None
        self._best = -math.inf
        self._has_searched = False
        self.num_scored = 0
        """Test samples scored so far, of the snapshot in progress."""

    @property
    def has_non_trainable(self) -> bool:
        """Whether the model has state that is not averaged."""
        return bool(self._flat.non_trainable.names)

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot, and its predictions for the examples.

        With ``evaluation.average`` those of the mean are among them, and the mean may be the center
        to keep.
        """
        mean, more = None, dict[str, float]()
        if self._average is not None:  # first: the model holds the snapshot from then on
            mean = self._average.add(snapshot)
            of_mean = metrics_of(self._job.task, [self.sums(mean)])
            more = {AVERAGED + name: value for name, value in of_mean.items()}
            more[f"{AVERAGED}centers"] = float(self._average.num_centers)
        sums = self.sums(snapshot)
        return self.evaluated(snapshot, [sums], [self.not_finite(sums)], mean=mean, more=more)

    def sums(
        self,
        snapshot: Snapshot,
        share: tuple[float, float] = (0.0, 1.0),
        *,
        before_batch: Callable[[], None] = lambda: None,
    ) -> MetricSums:
        """Return the sums of the metrics of a snapshot over a share of the rows to score.

        Args:
            snapshot: the snapshot.
            share: begin and end of the share, 0..1.
            before_batch: called before each batch.
        """

        def note(num_samples: int) -> None:
            self.num_scored = num_samples
            before_batch()

        self._put(snapshot)
        task, config, rows = self._job.task, self._job.config, self._rows_of(share)
        return _sums(task, self._flat.model, self._test, config, rows, note)

    def _rows_of(self, share: tuple[float, float]) -> np.ndarray:
        begin, end = (round(bound * len(self._rows)) for bound in share)
        return self._rows[begin:end]

    def not_finite(
        self, sums: MetricSums, share: tuple[float, float] = (0.0, 1.0)
    ) -> NotFinite | None:
        """Return a metric that is not finite, with its rows, the first time that there is one.

        Args:
            sums: what ``sums`` has returned last.
            share: its share of the rows.
        """
        if self._has_searched or not sums.not_finite:
            return None
        self._has_searched = True
        task, config, rows = self._job.task, self._job.config, self._rows_of(share)
        return _not_finite(task, self._flat.model, self._test, config, rows, sums)

    def evaluated(
        self,
        snapshot: Snapshot,
        parts: Sequence[MetricSums],
        found: Sequence[NotFinite | None] = (),
        *,
        mean: Snapshot | None = None,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> Evaluated:
        """Return the metrics of the snapshot that ``sums`` was called with last, and predictions.

        Args:
            snapshot: the snapshot.
            parts: its sums over all rows to score.
            found: what ``not_finite`` has returned for each part.
            mean: the mean of several centers, if that is scored.
            more: its metrics.

        Raises:
            DataError: if no sample could be read.
        """
        of_snapshot = metrics_of(self._job.task, parts)
        metrics = {**of_snapshot, **more}
        predicted: tuple[int, ...] = ()
        if isinstance(self._job.task, Predicts) and self._test.samples.shape.has_labelled_images:
            device = self._flat.weights.device
            with in_precision(self._job.config.training.precision, device):
                rows = example_rows(self._test.num_samples)
                images, _ = _batch_on(device, self._test, rows)
                predicted = predict(self._job.task, self._flat.model, images)
        is_best = self._is_best(metrics)
        is_of_mean = metric_of(metrics, self._job.config.evaluation).startswith(AVERAGED)
        kept = mean if mean is not None and is_of_mean else snapshot
        return Evaluated(
            snapshot.progress,
            metrics,
            predicted,
            _problem(of_snapshot, parts, joined(found), self._job.config),
            kept.weights if is_best else None,
            kept.buffers if is_best else None,
            kept.non_trainable if is_best else {},
        )

    def _put(self, snapshot: Snapshot) -> None:
        """Load a snapshot into the model; reset the state that earlier evaluations changed."""
        self._flat.rebind()
        self._flat.weights.copy_(torch.tensor(snapshot.weights))
        self._flat.buffers.copy_(torch.tensor(snapshot.buffers))
        self._flat.non_trainable.load({**self._first, **snapshot.non_trainable})

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Return whether the best center is kept and this score exceeds all earlier ones here.

        Only then the center is sent. The driver, which knows the scores of earlier starts, decides.
        """
        score = score_of(metrics, self._job.config.evaluation)
        if not self._job.config.checkpoint.keep_best or score <= self._best:
            return False
        self._best = score
        return True


class ScoringGroup(Protocol):
    """The workers that score together, as one of them sees them."""

    @property
    def place(self) -> tuple[int, int]:
        """(Rank, number of workers)."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds of this worker's newest local step; 0: not known."""
        ...

    def begin_score(self) -> None:
        """Begin a pause in which all workers score the center."""
        ...

    def raise_if_abandoned(self) -> None:
        """Raise an ExchangeError if this worker is to leave the others at once."""
        ...

    def gather(self, own: bytes) -> list[bytes]:
        """Return some bytes of each rank, by rank; raise an ExchangeError if one is lost."""
        ...


class Scorer:
    """One of the workers that score the center together, each a share of the test set.

    The shares are in proportion to the speeds at which the workers scored before, or trained
    before their first score, so that no worker waits long for the others. In a deterministic run
    they are equal.

    Args:
        job: the run's job.
        test: the test set.
        non_trainable: as for ``Evaluator``.
        clock: seconds, rising.
    """

    def __init__(
        self,
        job: Job,
        test: Batches,
        non_trainable: NonTrainable | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        device = job.config.scaling.device
        self._evaluator = Evaluator(job, test, non_trainable, device=device)
        self._has_equal_shares = job.config.training.deterministic
        self._is_scoring = False
        self._clock = clock
        self._speed = 0.0
        """Test samples per second, a mean in which the newest score counts half; 0: no score."""

    @property
    def num_scored(self) -> int | None:
        """Samples scored so far in the present pause; None: there is none."""
        return self._evaluator.num_scored if self._is_scoring else None

    def score(self, snapshot: Snapshot, group: ScoringGroup) -> Evaluated | None:
        """Score a share of the test set; return the score of all shares on rank 0, else None.

        Args:
            snapshot: the center, with the same weights on all ranks.
            group: the workers that score together.

        Raises:
            ExchangeError: if a worker was lost, or this one is to leave.
            DataError: if no sample of the test set could be read.
        """
        rank, _ = group.place
        self._evaluator.num_scored, self._is_scoring = 0, True
        try:
            group.begin_score()
            share = share_of(rank, self._speeds(group))
            snapshot = self._with_buffers_of_first(snapshot, group)
            start = self._clock()
            own = self._evaluator.sums(snapshot, share, before_batch=group.raise_if_abandoned)
            self._note_speed(own, self._clock() - start)
            found = self._evaluator.not_finite(own, share)
            message = {"sums": vars(own), "found": vars(found) if found else None}
            scored = [json.loads(part) for part in group.gather(_encoded(message))]
            parts = [MetricSums(**part["sums"]) for part in scored]
            of_parts = [NotFinite(**part["found"]) if part["found"] else None for part in scored]
            return self._evaluator.evaluated(snapshot, parts, of_parts) if rank == 0 else None
        finally:
            self._is_scoring = False

    def _with_buffers_of_first(self, snapshot: Snapshot, group: ScoringGroup) -> Snapshot:
        """Return a snapshot with the non-trainable state of rank 0, which the center has."""
        if not self._evaluator.has_non_trainable:
            return snapshot
        own = io.BytesIO()
        if group.place[0] == 0:
            torch.save(as_tensors(snapshot.non_trainable), own)
        first = torch.load(io.BytesIO(group.gather(own.getvalue())[0]), weights_only=True)
        return dataclasses.replace(snapshot, non_trainable=as_arrays(first))

    def _speeds(self, group: ScoringGroup) -> list[float]:
        """Return a speed of each worker; all have the same unit."""
        step_s = group.step_s
        own = {"scored": self._speed, "trained": 1.0 / step_s if step_s > 0.0 else 0.0}
        all_speeds = [json.loads(speeds) for speeds in group.gather(_encoded(own))]
        for unit in own if not self._has_equal_shares else ():
            speeds = [speeds[unit] for speeds in all_speeds]
            if min(speeds) > 0.0:  # a share is never so small that no speed can be measured
                return [max(speed, _LEAST_SHARE * max(speeds)) for speed in speeds]
        return [1.0] * len(all_speeds)

    def _note_speed(self, own: MetricSums, seconds: float) -> None:
        if own.num_samples and seconds > 0.0:
            speed = own.num_samples / seconds
            self._speed = (self._speed + speed) / 2 if self._speed else speed


def _encoded(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode()
