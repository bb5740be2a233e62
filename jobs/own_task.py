r"""Train your own model on your own Parquet table.

Command:   python jobs/own_task.py
Expected:  center test loss 0.011: the noise in the data has a variance of 0.01
Time:      about 40 s, most of it to start Ray and its processes
Hardware:  two shared CPU cores

This script generates the table; yours may have any columns. A batch is ``{column: tensor}``: a
column of numbers has shape [B], a column of lists of n numbers [B, n].
"""

import os
import sys
import tempfile
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor, nn

import raydl

Batch = dict[str, Tensor]


class Regression:
    """Predicts a number from eight features, by least squares."""

    name = "regression"

    def build_model(self, shape: raydl.DataShape) -> nn.Module:
        """Return a network for the number of features in the table."""
        (num_features,) = shape.columns["features"]
        return nn.Sequential(nn.Linear(num_features, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(model(batch["features"])[:, 0], batch["target"])

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the batch."""
        error = (model(batch["features"])[:, 0] - batch["target"]).abs()
        return {"loss": (error**2).sum(), "absolute_error": error.sum()}


def write_table(path: str, num_rows: int) -> None:
    """Write a table with ``features`` (eight numbers) and ``target``."""
    features = np.random.default_rng(0).normal(size=(num_rows, 8)).astype(np.float32)
    noise = np.random.default_rng(1).normal(scale=0.1, size=num_rows)
    target = np.abs(features[:, 0]) + features[:, 1:4].sum(1) + noise
    table = pa.table({"features": list(features), "target": target.astype(np.float32)})
    pq.write_table(table, path, row_group_size=1000)


def main() -> None:
    """Train and print the loss of the center."""
    with tempfile.TemporaryDirectory() as folder:
        write_table(f"{folder}/table.parquet", 20_000)
        result = raydl.Trainer(
            Regression(),
            f"{folder}/table.parquet",
            method="sync-easgd",
            training=raydl.TrainingConfig(epochs=20),
            optimizer=raydl.OptimizerConfig(lr=0.15),
            scaling=raydl.ScalingConfig(num_workers=2),
        ).fit()
    print(f"center test loss {result.metrics['center_loss']:.4f}, run {result.path}")


if __name__ == "__main__":
    main()
