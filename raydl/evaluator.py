"""Scores snapshots of the center on the test set."""

from __future__ import annotations

import numpy as np
import torch

from raydl.center import Snapshot
from raydl.crew import Evaluated
from raydl.data import Batches
from raydl.examples import example_rows
from raydl.flat import FlatModel
from raydl.job import Job
from raydl.task import evaluate, predict


class Evaluator:
    """A model to put snapshots into, and what to try them on.

    Args:
        job: says the model, and the size of the batches.
        test: the test set.
    """

    def __init__(self, job: Job, test: Batches) -> None:
        self._job = job
        self._test = test
        self._flat = FlatModel(job.task.build_model(job.shape), name=job.task.name)

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot, and what it says of the examples."""
        self._flat.weights.copy_(torch.tensor(snapshot.weights))
        self._flat.buffers.copy_(torch.tensor(snapshot.buffers))
        metrics = evaluate(
            self._job.task,
            self._flat.model,
            lambda start, stop: self._test.batch(np.arange(start, stop)),
            num_samples=self._test.num_samples,
            batch_size=self._job.config.evaluation.batch_size,
        )
        pictures, _ = self._test.batch(example_rows(self._test.num_samples))
        return Evaluated(
            snapshot.round,
            snapshot.epoch,
            snapshot.num_samples,
            snapshot.seconds,
            metrics,
            predict(self._job.task, self._flat.model, pictures),
        )
