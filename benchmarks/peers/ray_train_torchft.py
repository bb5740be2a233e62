"""Ray Train with torchft: its controller replaces the replica that is lost, and no other.

python -m benchmarks.peers.ray_train_torchft --workers 2 --samples 60000 --max-failures 3
    [--method diloco --period 10 --events FILE]

Each worker is a replica group of one, with ``ray.train.v2.torch.torchft_config.TorchftConfig``. The
steps are those of ``torchft_replicas.py``, and so are the time-outs of the lighthouse. The run
connects to the cluster of ``RAY_ADDRESS``, or starts one on this machine.
"""

from __future__ import annotations

from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig

from benchmarks.peers.loop import Settings, parser_of, read_data, settings_of
from benchmarks.peers.ray_train import on_ray
from benchmarks.peers.supervisor import Replica
from benchmarks.peers.torchft_replicas import LIGHTHOUSE, METHODS, train


def work(config: dict[str, Any]) -> None:
    """Train one replica.

    Args:
        config: the settings, the method and its period, and a reference to the data in a list.
    """
    settings: Settings = config["settings"]
    number = ray.train.get_context().get_world_rank()
    own = Replica(settings, number, data=ray.get(config["data"][0]))
    train(own, method=config["method"], period=config["period"], replica=number)


def main() -> None:
    """Train from the driver."""
    parser = parser_of(__doc__)
    parser.add_argument("--method", choices=METHODS, default="diloco")
    parser.add_argument("--period", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=0)
    options = parser.parse_args()
    settings = settings_of(parser, options)
    with on_ray() as storage:
        TorchTrainer(
            work,
            train_loop_config={
                "settings": settings, "method": options.method, "period": options.period,
                "data": [ray.put(read_data(settings))],
            },
            torch_config=TorchftConfig(lighthouse_kwargs=LIGHTHOUSE, backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=options.workers, resources_per_worker={"CPU": 1}
            ),
            run_config=RunConfig(
                name="peer",
                storage_path=storage,
                failure_config=FailureConfig(max_failures=options.max_failures),
            ),
        ).fit()  # fmt: skip


if __name__ == "__main__":
    main()
