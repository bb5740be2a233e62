"""The center as a service, for the methods that exchange by messages: home shard and coordinator.

Plain objects: the center's actor wraps one of these, and so does a run in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raydl.core.center import Snapshot, joined_states, split_states
from raydl.core.compression import parse_codec
from raydl.core.exchange import cells
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.optimizers import make_optimizer
from raydl.data.ledger import Ledger, Span
from raydl.errors import NonFiniteCenterError
from raydl.parameter_server.coordinator import Coordinator, Due
from raydl.parameter_server.protocol import HOME, CellAddress, Request, Response
from raydl.parameter_server.shard import Shard, ShardState
from raydl.parameter_server.shared_memory import can_be_shared

OptimizerStates = dict[Span, dict[str, Any]]
"""States of the optimizers of some spans of the center."""


def make_shard(
    job: Job,
    snapshot: Snapshot,
    index: int,
    settles: Coordinator | None,
    *,
    has_neighbours: bool = False,
) -> Shard:
    """Return one shard of the center, as it is in a snapshot.

    Args:
        index: which; the home shard, 0, has the coordinator and the float buffers.
        has_neighbours: workers may be other processes of this node, and map its memory.
    """
    exchange, method = job.config.exchange, job.method
    is_shared = has_neighbours and can_be_shared(job.config, method)
    weights = torch.tensor(snapshot.weights)
    by_shard = cells(
        weights.numel(), num_shards=exchange.center_shards, num_fragments=exchange.fragments
    )
    buffers = torch.tensor(snapshot.buffers if index == HOME else snapshot.buffers[:0])
    shard = Shard(
        by_shard[index],
        weights,
        buffers,
        rule=method.rule,
        make_optimizer=make_optimizer(method.inner, method.own_optimizer),
        is_locked=method.strategy != "hogwild",
        codec=parse_codec(exchange.compression),
        settles=settles,
        shared_s=exchange.timeout_s if is_shared else None,
    )
    spans = sorted(span for spans in by_shard for span in spans)
    states = split_states(snapshot.optimizer, [stop - start for start, stop in spans])
    shard.load_optimizers(dict(zip(spans, states, strict=True)))
    return shard


class CenterServer:
    """The home shard with its coordinator.

    Args:
        job: what the workers do.
        snapshot: what the center starts from.
        has_neighbours: workers may be other processes of this node, and map its memory.
    """

    def __init__(self, job: Job, snapshot: Snapshot, *, has_neighbours: bool = False) -> None:
        self.coordinator = Coordinator(
            job.config,
            job.method,
            Ledger.from_state_dict(snapshot.ledger, cuts=job.order.cuts),
            version=snapshot.progress.round,
            seconds=snapshot.progress.seconds,
            local_step=snapshot.progress.local_step,
            untrained=snapshot.untrained,
        )
        self.coordinator.num_cuts = snapshot.num_cuts
        self.home = make_shard(job, snapshot, HOME, self.coordinator, has_neighbours=has_neighbours)
        self._num_parameters = snapshot.weights.size

    @property
    def num_refused(self) -> int:
        """Messages and calls to the home shard and its coordinator that came too late."""
        return self.home.num_refused + self.coordinator.num_refused

    def begin_generation(self, membership: Membership) -> None:
        """Begin a generation."""
        self.coordinator.begin_generation(membership)
        self.home.begin_generation(membership)

    def change(self, membership: Membership, others: list[ShardState]) -> Snapshot:
        """Let workers join and leave while the others go on.

        The other shards come first, so that a newcomer is known to all before it sends.

        Args:
            membership: who trains from now on.
            others: what the other shards' own ``change`` returned.

        Returns:
            What newcomers start from: the center as each shard knows that they know it.
        """
        home = self.home.change(membership)
        self.coordinator.change(membership)
        due = Due(self.coordinator.version, is_kept=False)
        return self._assembled(due, self.coordinator.state(), [home, *others])

    def shared_cells(self, worker_id: str) -> dict[Span, CellAddress]:
        """Return the home shard's spans that a worker of this node may map."""
        return self.home.shared_cells(worker_id)

    def exchange(self, push: Request) -> Response:
        """Take a message to the home shard."""
        return self.home.exchange(push)

    def snapshot(self, due: Due, others: Callable[[], list[ShardState]]) -> Snapshot:
        """Return a copy of the whole center.

        Spans are copied one after another while messages come in, so they may be some
        exchanges apart; once all workers have left, they are not. It counts the samples that were
        in the center before: a run that goes on from it trains some again, and skips none.

        Args:
            due: under which number.
            others: returns the other shards, as they are then.

        Raises:
            NonFiniteCenterError: it has values that are not finite, and is not kept.
        """
        counters = self.coordinator.state(is_kept=due.is_kept)
        snapshot = self._assembled(due, counters, [self.home.state(), *others()])
        if not snapshot.is_finite():
            raise NonFiniteCenterError(snapshot.progress.round)
        return snapshot

    def _assembled(self, due: Due, counters: dict[str, Any], shards: list[ShardState]) -> Snapshot:
        """Return the whole center from its shards, the home shard first."""
        weights = np.empty(self._num_parameters, np.float32)
        states = {}
        for shard in shards:
            for span, values, optimizer in zip(
                shard.spans, shard.weights, shard.optimizers, strict=True
            ):
                weights[slice(*span)] = values
                states[span] = optimizer
        progress = replace(counters.pop("progress"), round=due.round)
        return Snapshot(
            progress=progress,
            is_kept=due.is_kept,
            weights=weights,
            buffers=shards[HOME].buffers,
            optimizer=_joined(states),
            **counters,
        )

    def optimizer_state(self, others: list[OptimizerStates]) -> dict[str, Any]:
        """Return a copy of what the optimizer of the whole center remembers.

        Args:
            others: what the other shards' own ``Shard.optimizer_states`` returned.
        """
        states = self.home.optimizer_states()
        for other in others:
            states |= other
        return _joined(states)


def _joined(states: OptimizerStates) -> dict[str, Any]:
    spans = sorted(states)
    return joined_states([states[s] for s in spans], [b - a for a, b in spans])
