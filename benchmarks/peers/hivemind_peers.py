"""hivemind: peers that update their own replicas and average them in the background.

python -m benchmarks.peers.hivemind_peers --workers 2 --samples 60000 --events FILE

``hivemind.Optimizer`` with local updates: each peer takes ordinary steps, and the peers average
their weights in the background whenever all together have trained ``--target`` samples. The
time-outs are shorter than hivemind's defaults, which are for peers across the internet.

The first process is the bootstrap peer of the hash table and runs the others, which it starts again
if they are killed; a new peer downloads the state of another one. The count of samples is
hivemind's own, of all peers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from benchmarks.peers.loop import Settings, parser_of, settings_of
from benchmarks.peers.supervisor import Replica, supervise

MODULE = "benchmarks.peers.hivemind_peers"
_PEERS = "RAYDL_BENCHMARK_PEERS"
"""Environment variable with the addresses of the bootstrap peer, separated by commas."""
_HOST = "/ip4/127.0.0.1/tcp/0"
_MATCHMAKING_S, _AVERAGING_S = 1.0, 5.0


def launch(settings: Settings, arguments: list[str], *, num_replicas: int) -> None:
    """Run the bootstrap peer and the others, until these have ended by themselves."""
    import hivemind

    dht = hivemind.DHT(host_maddrs=[_HOST], start=True)
    addresses = ",".join(str(address) for address in dht.get_visible_maddrs())
    own = {_PEERS: addresses}
    supervise(MODULE, arguments, settings=settings, environment=own, num_replicas=num_replicas)
    dht.shutdown()


def train(settings: Settings, *, target: int, replica: int) -> None:
    """Train one peer to the end."""
    import hivemind

    own = Replica(settings, replica)
    model = own.model
    dht = hivemind.DHT(host_maddrs=[_HOST], initial_peers=os.environ[_PEERS].split(","), start=True)
    optimizer: Any = hivemind.Optimizer(
        dht=dht,
        run_id="benchmark",
        batch_size_per_step=settings.batch_size,
        target_batch_size=target,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum
        ),
        use_local_updates=True,
        matchmaking_time=_MATCHMAKING_S,
        averaging_timeout=_AVERAGING_S,
        load_state_timeout=_AVERAGING_S,
    )
    optimizer.load_state_from_peers()
    num_samples = 0
    while not own.is_over(num_samples):
        own.step(model, optimizer)
        known = optimizer.tracker.global_progress
        num_samples = known.epoch * target + known.samples_accumulated
        own.note(num_samples)
    optimizer.shutdown()
    dht.shutdown()


def main() -> None:
    """Launch the peers, or train as one of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=int, default=25_600, help="samples between averages")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replica", type=int, help="set by the launcher")
    options = parser.parse_args()
    settings = settings_of(parser, options)
    if options.replica is None:
        launch(settings, sys.argv[1:], num_replicas=options.workers)
    else:
        train(settings, target=options.target, replica=options.replica)


if __name__ == "__main__":
    main()
