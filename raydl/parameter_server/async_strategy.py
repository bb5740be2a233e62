"""The strategy of parameter-server methods: each worker alone exchanges with the center.

Async, Hogwild and round robin share it; they differ in the lock of a shard (``shard.py``,
``shared_memory.py``) and in the turns that the coordinator gives.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from raydl.core.center import Mirror, Snapshot
from raydl.core.compression import LostResidual
from raydl.core.exchange import Exchange, Header, cells, shard_spans
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
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

_UNKNOWN = (
    "the center was lost with the answer to its last message, so the next message may repeat a "
    "part of that one"
)


class AsyncStrategy:
    """One worker exchanges with the center, and follows the coordinator's assignments.

    Args:
        context: the worker's place in the generation.
        client: reaches the center.
        snapshot: the center as this worker becomes a member.
        local_step: local steps of this worker so far.
    """

    def __init__(
        self,
        context: WorkerContext,
        client: CenterClient,
        snapshot: Snapshot,
        *,
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
            context.flat.non_trainable,
            ledger=snapshot.ledger,
            ledger_round=snapshot.progress.round,
        )
        self._confirm_messages()
        self.exchanges: tuple[Exchange, ...] = tuple(self._make_exchanges(snapshot.weights))
        self._session.set_assignment(client.enter(self._session.next_message_id(), local_step))
        self._in_turn = context.method.strategy == "round_robin"
        self._overlaps = context.method.overlap
        self._samples_before: list[float] = []
        self._trained = [0]
        """Positions trained since this worker entered: before each step of the round, and after
        the last one."""

    def _confirm_messages(self) -> None:
        """Find out which messages were applied although their answers did not arrive.

        An applied message has moved the center, so its residual counts; otherwise that before it.
        """
        open_ = {s: f.message for s, f in self._context.feedback.items() if f.message is not None}
        applied = {
            generation: self._client.applied(self._session.next_message_id(), generation)
            for generation in sorted({generation for generation, _ in open_.values()})
        }
        squares = 0.0
        for span, (generation, number) in open_.items():
            feedback, newest = self._context.feedback[span], applied[generation].get(span)
            if newest is None:
                squares += feedback.open_norm() ** 2
                feedback.discard()
            elif newest >= number:
                feedback.commit()
            else:
                feedback.discard()
        if squares:
            self._context.lost_residuals.append(LostResidual(squares**0.5, _UNKNOWN))

    def _make_exchanges(self, weights: np.ndarray) -> list[Exchange]:
        size, method = weights.size, self._context.method
        fragments, compression = method.fragments, method.compression
        by_shard = cells(size, num_shards=self._client.num_shards, num_fragments=fragments)
        self._context.redistribute_residuals(sorted(part for parts in by_shard for part in parts))
        mapped = self._open_cells()
        exchanges: list[Exchange] = []
        for start, stop in shard_spans(size, fragments):
            span, is_last = slice(start, stop), stop == size
            buffers = self._buffers if is_last else self._buffers[:0]
            if (start, stop) in mapped:
                exchanges.append(self._by_memory(*mapped[start, stop], span, buffers, is_last))
                continue
            shards = [
                (shard, part)
                for shard, parts in enumerate(by_shard)
                for part in parts
                if start <= part[0] < stop
            ]
            mirror = Mirror(torch.tensor(weights[span], device=self._buffers.device), buffers)
            exchanges.append(
                MessageExchange(
                    self._client,
                    mirror,
                    span=span,
                    shards=shards,
                    method=self._context.method,
                    is_last=is_last,
                    session=self._session,
                    feedback=lambda part: self._context.feedback_of(part, compression),
                )
            )
        return exchanges

    def _open_cells(self) -> dict[Span, tuple[MappedCell, int]]:
        """Return the fragments of the center that this worker may write directly."""
        if not can_be_shared(self._config, self._context.method):
            return {}
        return open_cells(
            self._client,
            self._session.next_message_id(),
            is_locked=self._context.method.strategy != "hogwild",
            timeout_s=self._config.exchange.timeout_s,
        )

    def _by_memory(
        self, cell: MappedCell, slot: int, span: slice, buffers: torch.Tensor, is_last: bool
    ) -> MappedExchange:
        return MappedExchange(
            cell,
            slot,
            span=span,
            buffers=buffers,
            rule=self._context.method.rule,
            client=self._client,
            is_last=is_last,
            session=self._session,
        )

    @property
    def _assignment(self) -> Any:
        assert self._session.assignment is not None
        return self._session.assignment

    @property
    def version(self) -> int:
        """Exchanges that the center had completed at this worker's last one."""
        return self._session.version

    @property
    def ledger_round(self) -> int:
        """Exchanges that the center had completed in this worker's copy of the ledger."""
        return self._session.ledger_round

    @property
    def num_cuts(self) -> int:
        """How often the learning rate was cut, by the newest assignment."""
        return int(self._assignment.num_cuts)

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers), by the newest assignment."""
        return self._assignment.rank, self._assignment.num_workers

    @property
    def generation(self) -> int:
        """The newest generation, by the newest assignment."""
        return int(self._assignment.generation)

    def next_round(self, local_step: int) -> Round:
        """Return the assigned round; in rank order, wait for this worker's turn first."""
        assignment = self._assignment
        round = Round(assignment.claims, self._context.method.delay, assignment.ahead)
        if self._in_turn and round.num_steps:
            # A round of one step begins with its exchange, which waits for the turn itself: a
            # user's loop then waits in its next step, not at the end of this one.
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
        """Return the completed share of the run, 0..1, as of the newest assignment."""
        by_all = self._samples_before[step] * self._assignment.num_workers
        return self._stop_condition.share_done(
            num_samples=self._assignment.num_done + by_all,
            num_steps=local_step,
            seconds=self._assignment.seconds,
            num_bytes=self._assignment.num_bytes,
        )

    def begin_step(self, step: int, lr: float) -> None:
        """Record the learning rate, and the positions that a message from now on contains.

        A message that is composed ahead has the weights before the step; any other, those after it.
        """
        self._session.lr = lr
        is_after = not self._context.method.rule.ahead
        self._session.num_trained = self._trained[step + is_after]

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Return the decision in the newest assignment."""
        if self._in_turn:
            self._client.end_turn(self._session.next_message_id())
        if self._assignment.outcome is not Outcome.GO_ON:
            self._client.leave_generation(self._session.next_message_id())
        return Decision(self._assignment.outcome, keep=self._assignment.keep, publishes=False)

    def snapshot(self, *, is_kept: bool, local_step: int) -> Snapshot:
        """Return the center as this worker last received it, to restore a lost center.

        Otherwise the center makes its own snapshots. If this worker maps the center's memory, the
        copy is complete, even after the center's process has ended. If not, the copy may lack: this
        worker's newest message, if it was composed ahead, since its answer is the center before
        it; messages of others since then; residuals of a codec; and the state of an optimizer at
        the center, which only the center has. The ledger may be older than the weights: some
        samples are then trained again, and none is skipped.
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
                num_bytes=assignment.num_bytes,
                num_messages=assignment.num_messages,
            ),
            is_kept=is_kept,
            weights=torch.cat([e.center.weights for e in self.exchanges]).cpu().numpy(),
            buffers=self._buffers.cpu().numpy().copy(),
            optimizer={},
            ledger=ledger,
            num_cuts=assignment.num_cuts,
            non_trainable=self._context.flat.non_trainable.changed_buffers(),
        )
