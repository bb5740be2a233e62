"""Ray Train's TorchTrainer: DistributedDataParallel in Ray actors, one CPU each.

python -m benchmarks.peers.ray_train --workers 2 --samples 60000 --result FILE
    [--checkpoint-every SAMPLES --max-failures N]

The driver reads the data once, and the workers get it from Ray's shared memory, as in raydl. With
checkpoints, a group restarts from the newest checkpoint after one of its workers was killed. The
run connects to the cluster of ``RAY_ADDRESS``, or starts one on this machine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from benchmarks.peers.loop import NullStore, Run, Settings, parser_of, read_data, settings_of

_FILE = "state.pt"


class RayStore:
    """Stores the state of a run as a checkpoint of Ray Train; rank 0 writes it."""

    def load(self) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint, or None."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            state: dict[str, Any] = torch.load(Path(folder) / _FILE)
            return state

    def save(self, state: dict[str, Any]) -> None:
        """Report the state as a checkpoint."""
        metrics = {"samples": state["num_done"]}
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / _FILE)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model prepared by Ray Train, with the same setting as in ``ddp.py``."""
    prepared: nn.Module = prepare_model(
        model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
    )
    return prepared


def work(config: dict[str, Any]) -> None:
    """Train as one rank.

    Args:
        config: the settings, and a reference to the data in a list.
    """
    settings: Settings = config["settings"]
    store = RayStore() if settings.checkpoint_every else NullStore()
    Run(settings, ray.get(config["data"][0]), wrap=wrapped, store=store).train()


def fit(settings: Settings, *, num_workers: int, max_failures: int, storage: str) -> None:
    """Train with Ray Train.

    Args:
        settings: settings of the run.
        num_workers: number of workers, with one CPU each.
        max_failures: most restarts of the group.
        storage: folder of the checkpoints, shared by all nodes.
    """
    data = ray.put(read_data(settings))
    trainer = TorchTrainer(
        work,
        train_loop_config={"settings": settings, "data": [data]},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="peer",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


@contextmanager
def on_ray() -> Iterator[str]:
    """Connect to the cluster of ``RAY_ADDRESS``, or start one; yield a folder for Ray Train."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    # Without a dashboard, as raydl starts Ray: a dashboard uses CPU time.
    is_own = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, **is_own)
    try:
        with tempfile.TemporaryDirectory() as storage:
            yield storage
    finally:
        ray.shutdown()


def main() -> None:
    """Train from the driver."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=0)
    options = parser.parse_args()
    settings = settings_of(parser, options)
    with on_ray() as storage:
        fit(
            settings,
            num_workers=options.workers,
            max_failures=options.max_failures,
            storage=storage,
        )


if __name__ == "__main__":
    main()
