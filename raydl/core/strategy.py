"""The protocol of a strategy, which decides when a worker exchanges, and the plan of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback, LostResidual, redistribute_residuals
from raydl.core.exchange import Exchange, Header
from raydl.core.flat import FlatModel
from raydl.core.membership import Membership
from raydl.core.method import Method
from raydl.core.reports import Outcome
from raydl.data.ledger import Claim, Cuts, Span
from raydl.data.loader import Step, positions_of
from raydl.metrics import TimeParts


@dataclass(frozen=True)
class Round:
    """Work of one worker until its next complete exchange."""

    claims: list[Claim]
    """One claim per epoch, in order."""
    delay: int
    """Local steps from the start of an exchange to its effect."""
    ahead: list[tuple[int, Span]] = field(default_factory=list)
    """Next claims of this worker that are known already: (epoch, positions)."""

    @property
    def num_steps(self) -> int:
        """Local steps of the round; 0 if the center has no work for this worker."""
        return sum(claim.num_steps for claim in self.claims)

    def steps(self) -> list[Step]:
        """Return (epoch, positions) of each local step, with the positions split evenly."""
        return [
            (claim.epoch, positions)
            for claim in self.claims
            for positions in np.array_split(positions_of(claim.spans), claim.num_steps)
        ]


@dataclass(frozen=True)
class Decision:
    """Decision at the end of a round."""

    outcome: Outcome
    keep: int | None
    """Number under which to keep the state for a checkpoint, or None."""
    publishes: bool
    """Whether this worker publishes a snapshot of the center."""
    is_score_due: bool = False
    """Whether all workers score the center together now."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker in a generation, with everything that its strategy needs."""

    config: TrainConfig
    method: Method
    membership: Membership
    worker_id: str
    flat: FlatModel
    time_parts: TimeParts
    cuts: Cuts
    """Ends of the blocks of an epoch."""
    feedback: dict[Span, ErrorFeedback]
    """Error feedback of this worker's messages, by span; kept across generations."""
    lost_residuals: list[LostResidual] = field(default_factory=list)
    """Residuals that this worker has lost, for its next report."""

    def feedback_of(self, span: Span, compression: str) -> ErrorFeedback:
        """Return the codec of a span, with its residual, also if the codec was another before."""
        codec, before = self.method.codec(compression), self.feedback.get(span)
        if before is None or before.codec.name != codec.name:
            self.feedback[span] = ErrorFeedback(codec, decay=self.method.rule.feedback_decay)
            if before is not None:
                self.feedback[span].load_state_dict(before.state_dict())
        return self.feedback[span]

    def redistribute_residuals(self, spans: Sequence[Span]) -> None:
        """Move the residuals to other spans of the same parameters, if the spans have changed."""
        if self.feedback and set(self.feedback) != set(spans):
            num_lanes = len(self.method.rule.lanes)
            redistributed = redistribute_residuals(self.feedback, spans, num_lanes=num_lanes)
            self.feedback.clear()
            self.feedback.update(redistributed)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.membership.worker_ids.index(self.worker_id)

    def center_device(self) -> torch.device:
        """Return the device of a rank's own copy of the center."""
        device = self.flat.weights.device
        return device if device.type == self.config.exchange_device else torch.device("cpu")


class Strategy(Protocol):
    """Decides which exchanges happen when, for one worker in one generation.

    Operations of synchronous methods alone (votes, undoing a round, a common choice) are in
    ``raydl.collective.sync_strategy.SyncStrategy``.
    """

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """One exchange per fragment, in order."""
        ...

    @property
    def version(self) -> int:
        """Rounds completed; with messages, exchanges that the center has settled."""
        ...

    @property
    def ledger_round(self) -> int:
        """Round, or number of settled exchanges, of this worker's copy of the ledger."""
        ...

    @property
    def num_cuts(self) -> int:
        """Cuts of the learning rate so far, for the schedule ``plateau``."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """(Rank, number of workers), as this worker knows them."""
        ...

    @property
    def generation(self) -> int:
        """The generation that ``place`` belongs to."""
        ...

    def next_round(self, local_step: int) -> Round:
        """Return the next round; wait for this worker's turn, if workers take turns."""
        ...

    def share_done(self, step: int, local_step: int) -> float:
        """Return the share of the run, 0..1, that is done before a step of this round.

        Args:
            step: step of the round, counted from 0.
            local_step: local steps of this worker before this one, also those of the round.
        """
        ...

    def begin_step(self, step: int, lr: float) -> None:
        """Prepare for a local step, before any message of it is sent.

        Args:
            step: step of the round, counted from 0.
            lr: learning rate of the step, also for an optimizer at the center.
        """
        ...

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Record a committed round and return the decision at its end."""
        ...

    def snapshot(self, *, is_kept: bool, local_step: int) -> Snapshot:
        """Return a copy of the center."""
        ...


def steps_at_speed(period: int, *, step_s: float, least_step_s: float) -> int:
    """Return the local steps that a worker completes while the fastest one takes a period.

    Args:
        period: steps of the fastest worker.
        step_s: seconds per local step of the worker, more than 0.
        least_step_s: seconds per local step of the fastest worker.
    """
    return max(1, round(period * least_step_s / step_s))


def plan_round(num_steps: int, *, fragments: int, delay: int) -> list[tuple[list[int], list[int]]]:
    """Return, for each local step of a round, the fragments that begin and that join in it.

    Fragments take effect at even distances, the last one in the last step; each begins ``delay``
    steps earlier. So no exchange is in progress between two rounds. A round without steps has an
    empty plan.
    """
    if not num_steps:
        return []
    plan: list[tuple[list[int], list[int]]] = [([], []) for _ in range(num_steps)]
    for fragment in range(fragments):
        join = -(-(fragment + 1) * num_steps // fragments) - 1
        plan[max(0, join - delay)][0].append(fragment)
        plan[join][1].append(fragment)
    return plan


def samples_before(parts: Sequence[tuple[int, int]]) -> list[float]:
    """Return the samples of a round before each of its local steps.

    Args:
        parts: (samples, local steps) of the round in each epoch.
    """
    counts: list[float] = []
    done = 0
    for num_samples, num_steps in parts:
        counts += [done + num_samples * step / num_steps for step in range(num_steps)]
        done += num_samples
    return counts
