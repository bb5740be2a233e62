r"""Train a module whose forward returns its loss, like the models of Hugging Face's transformers.

Command:   python jobs/hugging_face_style.py
Expected:  center test accuracy above 99%; the task: is the mean of six tokens above 4.5?
Time:      about 40 s, most of it to start Ray and its processes
Hardware:  two shared CPU cores

Replace ``TinyClassifier`` by ``AutoModelForSequenceClassification.from_config(...)``, and the table
of ``write_table`` by one with ``input_ids``, ``attention_mask`` and ``labels``.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import raydl


@dataclass
class Output:
    """The output of a forward pass."""

    loss: torch.Tensor
    logits: torch.Tensor


class TinyClassifier(nn.Module):
    """Classifies short sequences of tokens into two classes, and computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """Return loss and logits, shape [B, 2]."""
        logits = self.head(self.tokens(input_ids).mean(1))
        return Output(nn.functional.cross_entropy(logits, labels), logits)


def num_correct(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the number of correct predictions in a batch."""
    return {"accuracy": (model(**batch).logits.argmax(1) == batch["labels"]).sum()}


def write_table(path: str, num_rows: int) -> None:
    """Write a table with ``input_ids``, six tokens, and ``labels``, 1 if their mean is large."""
    tokens = np.random.default_rng(0).integers(0, 10, (num_rows, 6))
    labels = (tokens.mean(1) > 4.5).astype(np.int64)
    pq.write_table(pa.table({"input_ids": list(tokens), "labels": labels}), path,
                   row_group_size=1000)  # fmt: skip


def main() -> None:
    """Train and print the scores of the center."""
    with tempfile.TemporaryDirectory() as folder:
        write_table(f"{folder}/table.parquet", 20_000)
        result = raydl.Trainer(
            raydl.LossFromForward(TinyClassifier, metrics=num_correct),
            f"{folder}/table.parquet",
            training=raydl.TrainingConfig(epochs=5),
            optimizer=raydl.OptimizerConfig(lr=0.2),
            scaling=raydl.ScalingConfig(num_workers=2),
        ).fit()
    accuracy, loss = (result.metrics[f"center_{name}"] for name in ("accuracy", "loss"))
    print(f"center test accuracy {accuracy:.2%}, loss {loss:.3f}, run {result.path}")


if __name__ == "__main__":
    main()
