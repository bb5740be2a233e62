"""torchft: replicas that continue without a lost one, and let its replacement catch up.

python -m benchmarks.peers.torchft_replicas --method ddp --workers 2 --samples 60000 --events FILE

The first process runs torchft's lighthouse and one process per replica, which it starts again at
once if it ends by a signal. torchft's time-outs are shorter than its defaults, to its advantage: a
lost replica is noticed after one second instead of five. The data is decoded once, before the
replicas start.

ddp         torchft.DistributedDataParallel and torchft.Optimizer: gradients, every step
local-sgd   torchft.local_sgd.LocalSGD: weights, every ``--period`` steps
diloco      torchft.local_sgd.DiLoCo: progress, every ``--period`` steps, with Nesterov's momentum

A sample counts when torchft has committed its step, in all replicas.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.loop import Settings, parser_of, settings_of
from benchmarks.peers.supervisor import Replica, supervise

METHODS = ("ddp", "local-sgd", "diloco")
LIGHTHOUSE = {
    "min_replicas": 1, "join_timeout_ms": 100, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1000
}  # fmt: skip
"""Settings of the lighthouse; after the last one it takes a silent replica for lost."""
_TIMEOUT = timedelta(seconds=10)
_HOST = "127.0.0.1"
MODULE = "benchmarks.peers.torchft_replicas"


def launch(settings: Settings, arguments: list[str], *, num_replicas: int) -> None:
    """Run a lighthouse and the replicas, until all have ended by themselves."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"{_HOST}:0", **LIGHTHOUSE)
    port = lighthouse.address().rpartition(":")[2].rstrip("/")
    own = {"TORCHFT_LIGHTHOUSE": f"http://{_HOST}:{port}"}
    supervise(MODULE, arguments, settings=settings, environment=own, num_replicas=num_replicas)
    lighthouse.shutdown()


def train(own: Replica, *, method: str, period: int, replica: int) -> None:
    """Train one replica to the end.

    Args:
        own: its model and data.
        method: one of ``METHODS``.
        period: local steps between two exchanges.
        replica: its number.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    settings, module = own.settings, own.model
    inner = torch.optim.SGD(module.parameters(), lr=settings.lr, momentum=settings.momentum)

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=method == "ddp",
        timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=_HOST,
        store_port=store.port,
        replica_id=f"replica-{replica}",
        hostname=_HOST,
    )
    model: torch.nn.Module = module
    optimizer: Any = inner
    scope: Any = contextlib.nullcontext()
    if method == "ddp":
        model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    elif method == "local-sgd":
        scope = LocalSGD(manager, module, inner, sync_every=period)
    else:
        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        scope = DiLoCo(manager, [module], inner, outer, sync_every=period)
    per_commit = settings.batch_size * (1 if method == "ddp" else period)
    num_samples = 0
    with scope:
        while not own.is_over(num_samples):
            own.step(model, optimizer)
            num_samples = manager.batches_committed() * per_commit
            own.note(num_samples)


def main() -> None:
    """Launch the replicas, or train as one of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--method", choices=METHODS, default="ddp")
    parser.add_argument("--period", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replica", type=int, help="set by the launcher")
    options = parser.parse_args()
    settings = settings_of(parser, options)
    if options.replica is None:
        launch(settings, sys.argv[1:], num_replicas=options.workers)
    else:
        own = Replica(settings, options.replica)
        train(own, method=options.method, period=options.period, replica=options.replica)
        os._exit(0)  # the threads of torchft may still wait for others


if __name__ == "__main__":
    main()
