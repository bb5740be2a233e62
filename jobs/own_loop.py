r"""Keep your own training loop: three actors train on the digits and exchange periodically.

Command:   python jobs/own_loop.py
Expected:  center test accuracy above 95%
Time:      about 50 s, most of it to start Ray and its processes
Hardware:  two shared CPU cores

Model, optimizer, data and loop are plain PyTorch. Four lines are raydl's: ``attach``, ``epochs`` in
place of ``range``, ``step`` in place of the optimizer's step, and ``center`` for the evaluation.
docs/attach.md says what happens when workers join or leave.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

import ray
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import raydl
from raydl.data import load

NUM_WORKERS = 3


def digits(part: str) -> tuple[Tensor, Tensor]:
    """Return (pictures [n, 64] in 0..1, labels [n])."""
    samples = getattr(load("digits"), part)
    pictures = torch.tensor(samples.images).flatten(1).float() / 255
    return pictures, torch.tensor(samples.labels)


class Worker:
    """Runs your own training loop in an actor."""

    def train(self, num_epochs: int) -> float:
        """Train on this worker's part of the digits and return the accuracy of the center."""
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pictures, labels = digits("train")
        with raydl.attach(
            model, optimizer, method="sync-easgd", name="digits", num_workers=NUM_WORKERS
        ) as elastic:
            own = slice(elastic.rank, None, NUM_WORKERS)
            samples = TensorDataset(pictures[own], labels[own])
            loader = DataLoader(samples, batch_size=32, shuffle=True)
            for _, batches in elastic.epochs(loader, num_epochs):  # in place of range
                for batch, targets in batches:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    elastic.step()  # in place of optimizer.step()
            with elastic.center(), torch.no_grad():
                pictures, labels = digits("test")
                return float((model(pictures).argmax(1) == labels).float().mean())


def main() -> None:
    """Start the actors and print the accuracy of the center."""
    if not ray.is_initialized():
        ray.init()
    Actor = ray.remote(num_cpus=0.5)(Worker)
    actors = [Actor.remote() for _ in range(NUM_WORKERS)]
    accuracies = ray.get([actor.train.remote(40) for actor in actors])
    print(f"center test accuracy {accuracies[0]:.2%}")


if __name__ == "__main__":
    main()
