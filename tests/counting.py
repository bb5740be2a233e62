"""A task and two rules that count: each sample adds one to a weight of its own at the center."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raydl.rules import Outer

NUM_SAMPLES = 600
BATCH_SIZE = 10
MOST_OUT = 4 * 2 * BATCH_SIZE
"""Samples that one loss may count twice, or not at all, by messages: what four workers at most have
under way, a period of two batches each."""
OPTIONS = (
    "--task", "counting:Count", "--batch-size", str(BATCH_SIZE), "--period", "2",
    "--optimizer", "sgd", "--lr", "1", "--momentum", "0", "--optimizer.warmup", "0",
    "--optimizer.max-grad-norm", "None", "--schedule", "constant",
    "--optimizer.weight-decay", "0",
)  # fmt: skip
"""A step of rate 1 along a gradient of -1 adds one."""


def write_table(path):
    """Write a table of samples that have a number each, beside one for the test."""
    path.mkdir()
    for name, count in (("train", NUM_SAMPLES), ("test", BATCH_SIZE)):
        pq.write_table(pa.table({"id": list(range(count))}), path / f"{name}.parquet")
    return str(path)


class Counts(torch.nn.Module):
    """One weight for each sample."""

    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(NUM_SAMPLES))


class Count:
    """A step of rate 1 adds one to the weight of each sample of the batch."""

    name = "count"

    def build_model(self, shape):
        return Counts()

    def loss(self, model, batch):
        time.sleep(0.02)  # a run lasts as long as what is done to it
        return -model.counts[batch["id"]].sum()

    def metrics(self, model, batch):
        return {"loss": model.counts[batch["id"]].sum()}


class AllProgress(Outer):
    """c <- c + sum of (x_i - c): all that the workers did, and no mean of it."""

    period = 2

    def make_center_optimizer(self, tensors):
        return None

    def update_center_(self, center, total, tally, optimizer):
        center.sub_(total)


class AllProgressByMessages(AllProgress):
    """The same, as it comes."""

    schedule = "async"
