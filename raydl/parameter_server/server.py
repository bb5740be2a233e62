"""The center of methods with messages: home shard and coordinator behind one interface.

Plain objects: the center's actor holds a server, and so does a run in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raydl.core.center import Snapshot, joined_states, split_states
from raydl.core.codecs import parse_codec
from raydl.core.exchange import cells
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.optimizers import make_optimizer
from raydl.data.ledger import Ledger, Span
from raydl.errors import NonFiniteCenterError
from raydl.parameter_server.coordinator import Coordinator, Due
from raydl.parameter_server.protocol import (
    HOME,
    Assignment,
    CellAddress,
    MessageId,
    Request,
    Response,
)
from raydl.parameter_server.shard import Shard, ShardState
from raydl.parameter_server.shared_memory import can_be_shared

OptimizerStates = dict[Span, dict[str, Any]]
"""States of the center's optimizers, by span."""


def make_shard(
    job: Job,
    snapshot: Snapshot,
    index: int,
    coordinator: Coordinator | None,
    *,
    node: str | None = None,
) -> Shard:
    """Return one shard of the center, with the values of a snapshot.

    Args:
        job: the workers' job.
        snapshot: of the whole center.
        index: of the shard; the home shard, 0, has the float buffers.
        coordinator: for the home shard; None for any other.
        node: this process's node, whose worker processes may map the shard's memory; None if the
            workers are threads of this process.
    """
    exchange, method = job.config.exchange, job.method
    weights = torch.tensor(snapshot.weights)
    by_shard = cells(
        weights.numel(), num_shards=exchange.center_shards, num_fragments=method.fragments
    )
    buffers = torch.tensor(snapshot.buffers if index == HOME else snapshot.buffers[:0])
    shard = Shard(
        by_shard[index],
        weights,
        buffers,
        rule=method.rule,
        make_optimizer=make_optimizer(method.inner, method.own_optimizer),
        is_locked=method.strategy != "hogwild",
        codec=parse_codec(method.compression),
        coordinator=coordinator,
        node=node if can_be_shared(job.config, method) else None,
        lock_timeout_s=exchange.timeout_s,
    )
    spans = sorted(span for spans in by_shard for span in spans)
    states = split_states(snapshot.optimizer, [stop - start for start, stop in spans])
    shard.load_optimizers(dict(zip(spans, states, strict=True)))
    return shard


class CenterServer:
    """The home shard and its coordinator, for workers and controllers.

    Args:
        job: the workers' job.
        snapshot: the initial center.
        node: see ``make_shard``.
    """

    def __init__(self, job: Job, snapshot: Snapshot, *, node: str | None = None) -> None:
        self.coordinator = Coordinator(
            job.config,
            job.method,
            Ledger.from_state_dict(snapshot.ledger, cuts=job.order.cuts),
            version=snapshot.progress.round,
            seconds=snapshot.progress.seconds,
            local_step=snapshot.progress.local_step,
            num_bytes=snapshot.progress.num_bytes,
            num_messages=snapshot.progress.num_messages,
            non_trainable=snapshot.non_trainable,
        )
        self.coordinator.num_cuts = snapshot.num_cuts
        self.home = make_shard(job, snapshot, HOME, self.coordinator, node=node)
        self._num_parameters = snapshot.weights.size

    @property
    def num_refused(self) -> int:
        """Late messages and calls that the home shard and its coordinator have refused."""
        return self.home.num_refused + self.coordinator.num_refused

    def begin_generation(self, membership: Membership) -> None:
        """Begin a generation."""
        self.coordinator.begin_generation(membership)
        self.home.begin_generation(membership)

    def change(self, membership: Membership, others: list[ShardState]) -> Snapshot:
        """Let workers join and leave while the others continue.

        Call ``change`` of the other shards first, so that every shard knows a newcomer before it
        sends.

        Args:
            membership: the members from now on.
            others: what ``change`` of the other shards returned.

        Returns:
            The center that newcomers start from: each shard's part as newcomers' mirrors have it.
        """
        home = self.home.change(membership)
        self.coordinator.change(membership)
        due = Due(self.coordinator.version, is_kept=False)
        return self._assembled(due, self.coordinator.state(), [home, *others])

    # for workers

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the home shard's spans that a worker on a node may map."""
        return self.home.shared_cells(worker_id, node)

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return a worker's first assignment; see ``Coordinator.enter``."""
        return self.coordinator.enter(message_id, local_step)

    def exchange(self, request: Request) -> Response:
        """Apply a message to the home shard, and answer it; see ``Shard.exchange``."""
        return self.home.exchange(request)

    def applied(self, worker_id: str, generation: int) -> dict[Span, int]:
        """Return which messages of a worker the home shard has applied; see ``Shard.applied``."""
        return self.home.applied(worker_id, generation)

    def take_turn(self, message_id: MessageId) -> None:
        """Wait for a worker's turn; see ``Coordinator.take_turn``."""
        self.coordinator.take_turn(message_id)

    def end_turn(self, message_id: MessageId) -> None:
        """End a worker's turn."""
        self.coordinator.end_turn(message_id)

    def leave_generation(self, message_id: MessageId) -> None:
        """Record that a worker has left its generation."""
        self.coordinator.leave_generation(message_id)

    # copies

    def snapshot(
        self, others: Callable[[], list[ShardState]] = list, due: Due | None = None
    ) -> Snapshot:
        """Return a copy of the whole center.

        Spans are copied one after another while messages arrive, so they may be some exchanges
        apart, unless all workers have left. The counters are read first: a run that continues from
        the snapshot trains some samples again, and skips none.

        Args:
            others: returns the current states of the other shards.
            due: the snapshot to make; None: one under the number of completed exchanges.

        Raises:
            NonFiniteCenterError: if it has values that are not finite; it must not be kept.
        """
        due = due or Due(self.coordinator.version, is_kept=False)
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
        """Return a copy of the state of the whole center's optimizer.

        Args:
            others: what ``Shard.optimizer_states`` of the other shards returned.
        """
        states = self.home.optimizer_states()
        for other in others:
            states |= other
        return _joined(states)


def _joined(states: OptimizerStates) -> dict[str, Any]:
    spans = sorted(states)
    return joined_states([states[s] for s in spans], [b - a for a, b in spans])
