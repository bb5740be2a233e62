"""PyTorch's DistributedDataParallel over gloo, one thread per rank.

torchrun --nproc-per-node 2 --standalone -m benchmarks.peers.ddp --samples 60000 --result FILE

With --powersgd the gradients are compressed by PowerSGD, torch's own communication hook.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import Run, parser_of, read_data, settings_of

_TIMEOUT = timedelta(seconds=120)
"""Time-out of a rank that waits for other ranks."""


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model with gradients summed over the ranks; bucket views save a copy of them."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def compressed(model: nn.Module) -> nn.Module:
    """Return the model as ``wrapped`` does, with gradients of rank 1 from the third step on."""
    # One bucket: gloo would mix up the messages of several, which the hook sends at once.
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1000)
    # By default only after 1,000 steps, which the short runs on a thin link do not take.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def main() -> None:
    """Train as one rank that torchrun has started."""
    parser = parser_of(__doc__)
    parser.add_argument("--powersgd", action="store_true")
    options = parser.parse_args()
    settings = settings_of(parser, options)
    data = read_data(settings)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    Run(settings, data, wrap=compressed if options.powersgd else wrapped).train()
    dist.barrier()
    # The result is written. An ordinary exit sometimes aborts, because threads of torch still run:
    # on thin links one time in four.
    os._exit(0)


if __name__ == "__main__":
    main()
