"""A task and two rules that count: each sample adds one to a weight of its own at the center.

So no figure of a run needs to be trusted to know how often each sample was trained.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raydl.core.rules import Outer, Tally

NUM_SAMPLES = 600
BATCH_SIZE = 10
MOST_OUT = 4 * 2 * BATCH_SIZE
"""Samples that one loss may count twice, or not at all, by messages: what four workers at most have
under way, a period of two batches each."""
OPTIONS = (
    "--task", "benchmarks.counting:Count", "--batch-size", str(BATCH_SIZE), "--period", "2",
    "--optimizer", "sgd", "--lr", "1", "--momentum", "0", "--optimizer.warmup", "0",
    "--optimizer.clip-grad-norm", "None", "--lr-schedule", "constant",
    "--optimizer.weight-decay", "0",
)  # fmt: skip
"""A step of rate 1 along a gradient of -1 adds one."""


def write_table(path: Path) -> str:
    """Write a table of samples that have a number each, beside one for the test."""
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
    """A step of rate 1 adds one to the weight of each sample of the batch."""

    name = "count"

    def build_model(self, shape: object) -> Counts:
        """Return a model of which nothing is counted yet."""
        return Counts()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return what has a gradient of -1 in the weight of each sample of the batch."""
        time.sleep(0.02)  # a run lasts as long as what is done to it
        total: torch.Tensor = -model.counts[batch["id"]].sum()
        return total

    def metrics(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        """Return how often the samples of the batch were counted."""
        return {"loss": model.counts[batch["id"]].sum()}


class AllProgress(Outer):
    """c <- c + sum of (x_i - c): all that the workers did, and no mean of it."""

    period = 2

    def make_center_optimizer(self, tensors: list[torch.Tensor]) -> None:
        """Return none."""

    def update_center_(
        self, center: torch.Tensor, total: torch.Tensor, tally: Tally, optimizer: object
    ) -> None:
        """Add what all workers did."""
        center.sub_(total)


class AllProgressByMessages(AllProgress):
    """The same, as it comes."""

    strategy = "async"
