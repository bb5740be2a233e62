"""Scores snapshots of the center on the test set."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.job import Job, first_model
from raydl.core.non_trainable import NonTrainable
from raydl.core.scores import score_of
from raydl.core.worker_group import Evaluated
from raydl.data import Batch, Batches
from raydl.tasks import Predicts, Task, evaluate, in_precision, predict
from raydl.worker.examples import example_rows


def score(
    task: Task,
    model: nn.Module,
    test: Batches,
    config: TrainConfig,
    *,
    rows: np.ndarray | None = None,
    note: Callable[[int], None] = lambda num_samples: None,
) -> dict[str, float]:
    """Return the metrics of a model on a test set, in the precision and batches of a run.

    Args:
        task: computes the metrics.
        model: the model.
        test: the test set.
        config: of the run.
        rows: the samples to score, int64, shape [num_samples]; None: all.
        note: called before each batch with the number of samples scored so far.
    """
    scored = np.arange(test.num_samples) if rows is None else rows

    def batch(start: int, stop: int) -> Batch:
        note(start)
        return test.batch(scored[start:stop])

    with in_precision(config.training.precision, next(model.parameters()).device):
        return evaluate(
            task,
            model,
            batch,
            num_samples=len(scored),
            batch_size=config.evaluation.batch_size,
        )


def rows_to_score(num_samples: int, config: TrainConfig) -> np.ndarray | None:
    """Return the rows that each score of a run takes, int64, ascending; None: all.

    Args:
        num_samples: samples in the test set.
        config: of the run.
    """
    wanted = config.evaluation.num_samples
    if wanted is None:
        return None
    drawn = np.random.default_rng(config.training.seed).permutation(num_samples)
    return np.sort(drawn[:wanted])  # a streamed set is read in order


class Evaluator:
    """Scores snapshots of the center, one after another, in one model.

    Args:
        job: the run's job.
        test: the test set.
        non_trainable: the non-trainable state of the run's first model; None: as the model is
            built.
    """

    def __init__(self, job: Job, test: Batches, non_trainable: NonTrainable | None = None) -> None:
        self._job = job
        self._test = test
        self._rows = rows_to_score(test.num_samples, job.config)
        self._flat = first_model(job, non_trainable)
        self._first = self._flat.non_trainable.arrays() if non_trainable is None else non_trainable
        self._best = -math.inf
        self.num_scored = 0
        """Test samples scored so far, of the snapshot in progress."""

    def _note(self, num_samples: int) -> None:
        self.num_scored = num_samples

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot, and its predictions for the examples."""
        self._put(snapshot)
        config = self._job.config
        metrics = score(
            self._job.task, self._flat.model, self._test, config, rows=self._rows, note=self._note
        )
        predicted: tuple[int, ...] = ()
        if isinstance(self._job.task, Predicts) and self._test.samples.shape.has_labelled_pictures:
            with in_precision(config.training.precision, self._flat.weights.device):
                pictures, _ = self._test.batch(example_rows(self._test.num_samples))
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
