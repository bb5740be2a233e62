"""Scores snapshots of the center on the test set: in an evaluator, or in parts in the workers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.job import Job, first_model
from raydl.core.non_trainable import NonTrainable
from raydl.core.scores import Evaluated, score_of
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


def score(task: Task, model: nn.Module, test: Batches, config: TrainConfig) -> dict[str, float]:
    """Return the metrics of a model on a whole test set, in the precision and batches of a run.

    Args:
        task: computes the metrics.
        model: the model.
        test: the test set.
        config: of the run.
    """
    rows = np.arange(test.num_samples)
    return metrics_of(task, [_sums(task, model, test, config, rows)])


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
        found = test.batch(rows[start:stop])
        return found if device.type == "cpu" else to_device(found, device)

    with in_precision(config.training.precision, device):
        return metric_sums(
            task, model, batch, num_samples=len(rows), batch_size=config.evaluation.batch_size
        )


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
        self._best = -math.inf
        self.num_scored = 0
        """Test samples scored so far, of the snapshot in progress."""

    def _note(self, num_samples: int) -> None:
        self.num_scored = num_samples

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot, and its predictions for the examples."""
        return self.evaluated(snapshot, [self.sums(snapshot)])

    def sums(self, snapshot: Snapshot, share: tuple[float, float] = (0.0, 1.0)) -> MetricSums:
        """Return the sums of the metrics of a snapshot over a share of the rows to score.

        Args:
            snapshot: the snapshot.
            share: begin and end of the share, 0..1.
        """
        self._put(snapshot)
        begin, end = (round(bound * len(self._rows)) for bound in share)
        rows = self._rows[begin:end]
        return _sums(
            self._job.task, self._flat.model, self._test, self._job.config, rows, self._note
        )

    def evaluated(self, snapshot: Snapshot, parts: Sequence[MetricSums]) -> Evaluated:
        """Return the metrics of the snapshot that ``sums`` was called with last, and predictions.

        Args:
            snapshot: the snapshot.
            parts: its sums over all rows to score.

        Raises:
            DataError: if no sample could be read.
        """
        metrics = metrics_of(self._job.task, parts)
        predicted: tuple[int, ...] = ()
        if isinstance(self._job.task, Predicts) and self._test.samples.shape.has_labelled_pictures:
            device = self._flat.weights.device
            with in_precision(self._job.config.training.precision, device):
                examples = self._test.batch(example_rows(self._test.num_samples))
                pictures, _ = examples if device.type == "cpu" else to_device(examples, device)
                predicted = predict(self._job.task, self._flat.model, pictures)
        is_best = self._is_best(metrics)
        return Evaluated(
            snapshot.progress,
            metrics,
            predicted,
            snapshot.weights if is_best else None,
            snapshot.buffers if is_best else None,
            snapshot.non_trainable if is_best else {},
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


class Scorer:
    """One of the workers that score the center together, each a share of the test set.

    The shares are in proportion to the speeds at which the workers scored before, or trained
    before their first score, so that no worker waits long for the others.

    Args:
        job: the run's job.
        test: the test set.
        non_trainable: as for ``Evaluator``.
    """

    def __init__(self, job: Job, test: Batches, non_trainable: NonTrainable | None = None) -> None:
        device = job.config.scaling.device
        self._evaluator = Evaluator(job, test, non_trainable, device=device)
        self._speed = 0.0
        """Test samples per second, a mean in which the newest score counts half; 0: no score."""

    def score(
        self,
        snapshot: Snapshot,
        rank: int,
        gather: Callable[[bytes], list[bytes]],
        *,
        step_s: float,
    ) -> Evaluated | None:
        """Score a share of the test set; return the score of all shares on rank 0, else None.

        Args:
            snapshot: the center, the same on all ranks.
            rank: of this worker.
            gather: exchanges bytes with the other ranks.
            step_s: seconds of this worker's newest local step; 0: not known.

        Raises:
            ExchangeError: if a worker was lost.
            DataError: if no sample of the test set could be read.
        """
        share = share_of(rank, self._speeds(gather, step_s))
        start = time.perf_counter()
        own = self._evaluator.sums(snapshot, share)
        self._note_speed(own, time.perf_counter() - start)
        parts = [MetricSums(**json.loads(part)) for part in gather(_encoded(vars(own)))]
        return self._evaluator.evaluated(snapshot, parts) if rank == 0 else None

    def _speeds(self, gather: Callable[[bytes], list[bytes]], step_s: float) -> list[float]:
        """Return a speed of each worker; all have the same unit."""
        own = {"scored": self._speed, "trained": 1.0 / step_s if step_s > 0.0 else 0.0}
        all_speeds = [json.loads(speeds) for speeds in gather(_encoded(own))]
        for unit in own:
            speeds = [speeds[unit] for speeds in all_speeds]
            if min(speeds) > 0.0:
                return speeds
        return [1.0] * len(all_speeds)

    def _note_speed(self, own: MetricSums, seconds: float) -> None:
        if own.num_samples and seconds > 0.0:
            speed = own.num_samples / seconds
            self._speed = (self._speed + speed) / 2 if self._speed else speed


def _encoded(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode()
