"""A task and two rules that count: each sample adds one to its own weight at the center.

The trained weights show how often each sample was trained, without relying on the run's figures.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raydl.core.rules import Mail, Now, State
from raydl.methods.outer import Outer

NUM_SAMPLES = 600
BATCH_SIZE = 10
MOST_OUT = 4 * 2 * BATCH_SIZE
"""Samples that one lost worker may make a method with messages count twice or not at all: those in
flight of at most four workers, a period of two batches each."""
OPTIONS = (
    "--task", "benchmarks.counting:Count", "--batch-size", str(BATCH_SIZE), "--period", "2",
    "--optimizer", "sgd", "--lr", "1", "--momentum", "0", "--optimizer.warmup", "0",
    "--optimizer.clip-grad-norm", "None", "--lr-schedule", "constant",
    "--optimizer.weight-decay", "0",
)  # fmt: skip
"""Plain SGD: a step with rate 1 along a gradient of -1 adds one."""


def write_table(path: Path) -> str:
    """Write a training table and a test table of numbered samples."""
    path.mkdir()
    for name, count in (("train", NUM_SAMPLES), ("test", BATCH_SIZE)):
        pq.write_table(pa.table({"id": list(range(count))}), path / f"{name}.parquet")
    return str(path)


class Counts(torch.nn.Module):
    """One weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(NUM_SAMPLES))


class Count:
    """A task whose steps add one to the weight of each sample in the batch."""

    name = "count"

    def build_model(self, shape: object) -> Counts:
        """Return a model with all counts 0."""
        return Counts()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return a loss whose gradient is -1 for the weight of each sample in the batch."""
        time.sleep(0.02)  # the run must last as long as its faults
        total: torch.Tensor = -model.counts[batch["id"]].sum()
        return total

    def metrics(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        """Return the sum of the counts of the samples in the batch."""
        return {"loss": model.counts[batch["id"]].sum()}


class AllProgress(Outer):
    """c <- c + sum of (x_i - c): adds the progress of all workers instead of averaging it."""

    period = 2

    def merge_(self, center: torch.Tensor, mail: Mail, state: State, now: Now) -> None:
        """Add the progress of all workers."""
        center.sub_(mail.total("progress"))


class AllProgressByMessages(AllProgress):
    """The same with asynchronous messages."""

    strategy = "async"
