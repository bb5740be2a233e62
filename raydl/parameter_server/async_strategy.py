"""One by one with the center, by the coordinator's assignments."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from raydl.core.center import Mirror, Snapshot
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Exchange, Header, cells, shard_spans
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.rules import Sends
from raydl.core.stop_condition import StopCondition
from raydl.core.strategy import Decision, Round, WorkerContext, samples_before
from raydl.data.ledger import Span, num_done_by
from raydl.parameter_server.client import ClientSession, MessageExchange
from raydl.parameter_server.protocol import CenterClient
from raydl.parameter_server.shared_memory import (
    MappedCell,
    MappedExchange,
    can_be_shared,
    open_cells,
)


class AsyncStrategy:
    """One by one with the center, by the coordinator's assignments.

    Args:
        context: where the worker stands.
        client: reaches the center.
        snapshot: the center as it is when this worker becomes a member.
        incarnation: which life of this worker.
        local_step: local steps of this worker before.
    """

    def __init__(
        self,
        context: WorkerContext,
        client: CenterClient,
        snapshot: Snapshot,
        *,
        incarnation: int,
        local_step: int,
    ) -> None:
        self._context = context
        self._config = context.config
        self._client = client
        self._stop_condition = StopCondition.of(
            context.config.training, epoch_samples=snapshot.ledger["num_samples"]
        )
        self._buffers = torch.tensor(snapshot.buffers, device=context.flat.weights.device)
        self._session = ClientSession(
            context.worker_id,
            context.membership.generation,
            incarnation,
            context.flat.non_trainable,
            ledger=snapshot.ledger,
            ledger_round=snapshot.progress.round,
        )
        self.exchanges: tuple[Exchange, ...] = tuple(self._make_exchanges(snapshot.weights))
        self._session.set_assignment(client.enter(self._session.next_message_id(), local_step))
        self._in_turn = context.method.strategy == "round_robin"
        self._overlaps = context.method.overlap
        self._samples_before: list[float] = []
        self._trained = [0]
        """Positions trained since this worker entered: before each step of the round, and after
        the last one."""

    def _make_exchanges(self, weights: np.ndarray) -> list[Exchange]:
        size, fragments = weights.size, self._config.exchange.fragments
        by_shard = cells(size, num_shards=self._client.num_shards, num_fragments=fragments)
        mapped = self._open_cells()
        exchanges: list[Exchange] = []
        for start, stop in shard_spans(size, fragments):
            is_last = stop == size
            buffers = self._buffers if is_last else self._buffers[:0]
            if (start, stop) in mapped:
                exchanges.append(self._by_memory(*mapped[start, stop], (start, stop), buffers))
                continue
            shards = [
                (shard, span)
                for shard, spans in enumerate(by_shard)
                for span in spans
                if start <= span[0] < stop
            ]
            known = torch.tensor(weights[start:stop], device=self._buffers.device)
            exchanges.append(self._by_message(Mirror(known, buffers), start, shards, is_last))
        return exchanges

    def _open_cells(self) -> dict[Span, tuple[MappedCell, int]]:
        """Return the fragments of the center that this worker may write by itself."""
        if not can_be_shared(self._config, self._context.method):
            return {}
        return open_cells(
            self._client,
            self._session.next_message_id(),
            is_locked=self._context.method.strategy != "hogwild",
            timeout_s=self._config.exchange.timeout_s,
        )

    def _by_memory(
        self, cell: MappedCell, slot: int, span: Span, buffers: torch.Tensor
    ) -> MappedExchange:
        return MappedExchange(
            cell,
            slot,
            span=slice(*span),
            buffers=buffers,
            rule=self._context.method.rule,
            client=self._client,
            is_last=span[1] == self._context.flat.num_parameters,
            session=self._session,
        )

    def _by_message(
        self, mirror: Mirror, start: int, shards: list[tuple[int, Span]], is_last: bool
    ) -> MessageExchange:
        return MessageExchange(
            self._client,
            mirror,
            span=slice(start, start + mirror.weights.numel()),
            shards=shards,
            sends=self._context.method.rule.sends,
            is_last=is_last,
            session=self._session,
            feedback=self._feedback_of,
        )

    def _feedback_of(self, span: Span) -> ErrorFeedback:
        return self._context.feedback_of(span, self._config.exchange.compression)

    @property
    def _assignment(self) -> Any:
        assert self._session.assignment is not None
        return self._session.assignment

    @property
    def version(self) -> int:
        """Exchanges that the center had settled at the last one of this worker."""
        return self._session.version

    @property
    def ledger_round(self) -> int:
        """Exchanges that the center had settled when this worker was last told the ledger."""
        return self._session.ledger_round

    @property
    def num_cuts(self) -> int:
        """How often the learning rate was cut, by the newest orders."""
        return int(self._assignment.num_cuts)

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers), by the newest orders."""
        return self._assignment.rank, self._assignment.num_workers

    def next_round(self, local_step: int) -> Round:
        """Return the coordinator's assignment, once it is this worker's turn."""
        assignment = self._assignment
        round = Round(assignment.claims, self._config.exchange.delay, assignment.ahead)
        if self._in_turn and round.num_steps:
            # A round of one step begins with its exchange, which takes the turn itself: a loop of
            # the user's own then waits for it in its next step, not at the end of this one.
            self._session.takes_turn = round.num_steps == 1 and not self._overlaps
            if not self._session.takes_turn:
                with self._context.time_parts.measure("device_device_parameters"):
                    self._client.take_turn(self._session.next_message_id())
        self._session.local_step = local_step + round.num_steps
        self._samples_before = samples_before([(c.num_samples, c.num_steps) for c in round.claims])
        sizes = [len(positions) for _, positions in round.steps()]
        self._trained = [self._trained[-1] + n for n in accumulate(sizes, initial=0)]
        return round

    def share_done(self, step: int, local_step: int) -> float:
        """Return 0..1 of the run, by what was done at the last orders."""
        by_all = self._samples_before[step] * self._assignment.num_workers
        return self._stop_condition.share_done(
            num_samples=self._assignment.num_done + by_all,
            num_steps=local_step,
            seconds=self._assignment.seconds,
        )

    def begin_step(self, step: int, lr: float) -> None:
        """Take note of the learning rate, and of the samples that a message has in it from now on.

        Weights travel as they are before the step, all else as it is after the step.
        """
        self._session.lr = lr
        is_after = self._context.method.rule.sends is not Sends.WEIGHTS
        self._session.num_trained = self._trained[step + is_after]

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Return the decision in the newest assignment."""
        if self._in_turn:
            self._client.end_turn(self._session.next_message_id())
        if self._assignment.outcome is not Outcome.GO_ON:
            self._client.leave_generation(self._session.next_message_id())
        return Decision(self._assignment.outcome, keep=self._assignment.keep, publishes=False)

    def snapshot(self, *, is_kept: bool, local_step: int) -> Snapshot:
        """Return the center as this worker last saw it, to make a lost one again from.

        The center itself makes the snapshots of a run that goes well. Of a center whose memory
        this worker maps nothing is missing, though its process is gone. Else there may be: this
        worker's own newest message, where the rule sends weights and is answered with the center
        before them; what others sent since; what a codec still owes; and the state of an
        optimizer at the center, which only the center has. The ledger may be older than the
        weights: some samples are trained again then, and none is skipped.
        """
        assignment, ledger = self._assignment, self._session.ledger
        num_done = num_done_by(ledger)
        return Snapshot(
            progress=Progress(
                round=assignment.version,
                generation=self._session.generation,
                epoch=num_done / ledger["num_samples"],
                num_samples=num_done,
                local_step=local_step,
                seconds=assignment.seconds,
            ),
            is_kept=is_kept,
            weights=torch.cat([e.center.weights for e in self.exchanges]).cpu().numpy(),
            buffers=self._buffers.cpu().numpy().copy(),
            optimizer={},
            ledger=ledger,
            num_cuts=assignment.num_cuts,
            non_trainable=self._context.flat.non_trainable.changed_buffers(),
        )
