"""Train a Lightning module in two actors.

Command:   python jobs/lightning_module.py
Expected:  center test accuracy above 95% on the bundled digits
Time:      about 50 s, most of it to start Ray and its processes
Hardware:  two shared CPU cores
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

import lightning
import ray
import torch
from torch import Tensor, nn

import raydl
from raydl.data import load


def loader(part: str, *, shuffle: bool) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """Return batches of 32 digits."""
    digits = getattr(load("digits"), part)
    pictures = torch.tensor(digits.images).flatten(1).float() / 255
    data = torch.utils.data.TensorDataset(pictures, torch.tensor(digits.labels))
    return torch.utils.data.DataLoader(data, batch_size=32, shuffle=shuffle)


class Perceptron(lightning.LightningModule):  # type: ignore[misc]
    """A stock module: nothing in it is raydl's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        """Log the accuracy."""
        self.log("accuracy", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(num_workers: int) -> float:
    """Train one worker and return the accuracy of the center."""
    elastic = raydl.LightningCallback(method="sync-easgd", name="digits", num_workers=num_workers)
    quiet = {"logger": False, "enable_checkpointing": False}  # no files
    trainer = lightning.Trainer(max_epochs=20, accelerator="cpu", callbacks=[elastic], **quiet)
    trainer.fit(Perceptron(), loader("train", shuffle=True), loader("test", shuffle=False))
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    Worker = ray.remote(num_cpus=0.5)(type("Worker", (), {"train": staticmethod(train)}))
    workers = [Worker.remote() for _ in range(2)]
    calls = [worker.train.remote(num_workers=2) for worker in workers]
    print(f"center test accuracy {ray.get(calls)[0]:.1%}")
