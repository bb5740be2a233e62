"""Scores snapshots of the center on the test set."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from raydl.config import TrainConfig
from raydl.core.callbacks import score_of
from raydl.core.center import Snapshot
from raydl.core.job import Job, first_model
from raydl.core.non_trainable import NonTrainable
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
    note: Callable[[int], None] = lambda num_samples: None,
) -> dict[str, float]:
    """Return the metrics of a model on a test set, in the precision and batches of a run.

    Args:
        task: knows the metrics.
        model: to score.
        test: the test set.
        config: of the run.
        note: is told before each batch how many samples are scored.
    """

    def batch(start: int, stop: int) -> Batch:
        note(start)
        return test.batch(np.arange(start, stop))

    with in_precision(config.training.precision, next(model.parameters()).device):
        return evaluate(
            task,
            model,
            batch,
            num_samples=test.num_samples,
            batch_size=config.evaluation.batch_size,
        )


class Evaluator:
    """A model to put snapshots into, and what to try them on.

    Args:
        job: says the model, and the size of the batches.
        test: the test set.
        non_trainable: the non-trainable state of the run's first model; None: as the model is
            built.
    """

    def __init__(self, job: Job, test: Batches, non_trainable: NonTrainable | None = None) -> None:
        self._job = job
        self._test = test
        self._flat = first_model(job, non_trainable)
        self._first = self._flat.non_trainable.arrays() if non_trainable is None else non_trainable
        self._best = -math.inf
        self.num_scored = 0
        """Samples of the test set that are scored, of the center under way."""

    def _note(self, num_samples: int) -> None:
        self.num_scored = num_samples

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot, and what it says of the examples."""
        self._put(snapshot)
        config = self._job.config
        metrics = score(self._job.task, self._flat.model, self._test, config, note=self._note)
        with in_precision(config.training.precision, self._flat.weights.device):
            predicted = self._predicted()
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
        """Let the model be a center; what a center or a score has changed is as it began."""
        self._flat.rebind()
        self._flat.weights.copy_(torch.tensor(snapshot.weights))
        self._flat.buffers.copy_(torch.tensor(snapshot.buffers))
        self._flat.non_trainable.load({**self._first, **snapshot.non_trainable})

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Whether the best center is kept and none that was scored here was better.

        Only then it is sent: the driver, which knows those of earlier starts, decides.
        """
        score = score_of(metrics)
        if not self._job.config.checkpoint.keep_best or score <= self._best:
            return False
        self._best = score
        return True

    def _predicted(self) -> tuple[int, ...]:
        """Return the class of each example, if the task has classes."""
        if not isinstance(self._job.task, Predicts):
            return ()
        pictures, _ = self._test.batch(example_rows(self._test.num_samples))
        return predict(self._job.task, self._flat.model, pictures)
