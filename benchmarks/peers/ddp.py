"""PyTorch's DistributedDataParallel over gloo, one thread per rank.

torchrun --nproc-per-node 2 --standalone -m benchmarks.peers.ddp --samples 60000 --result FILE
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import Run, parser_of, read_data, settings_of

_TIMEOUT = timedelta(seconds=120)
"""Time-out of a rank that waits for other ranks."""


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model with gradients summed over the ranks; bucket views save a copy of them."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def main() -> None:
    """Train as one rank that torchrun has started."""
    parser = parser_of(__doc__)
    settings = settings_of(parser, parser.parse_args())
    data = read_data(settings)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    Run(settings, data, wrap=wrapped).train()
    dist.barrier()
    # The result is written. An ordinary exit sometimes aborts, because threads of torch still run:
    # on thin links one time in four.
    os._exit(0)


if __name__ == "__main__":
    main()
