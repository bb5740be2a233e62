"""The strategy: which exchanges happen when, as the runner of a worker's rounds sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback, parse_codec, relaid
from raydl.core.exchange import Exchange, Header
from raydl.core.flat import FlatModel
from raydl.core.membership import Membership
from raydl.core.methods import Method
from raydl.core.reports import Outcome
from raydl.data.ledger import Claim, Cuts, Span
from raydl.data.loader import Step, positions_of
from raydl.metrics import TimeParts


@dataclass(frozen=True)
class Round:
    """Work of one worker until its next complete exchange."""

    claims: list[Claim]
    """One for each epoch that it has a part in, in their order."""
    delay: int
    """Local steps from the start of an exchange to its effect."""
    ahead: list[tuple[int, Span]] = field(default_factory=list)
    """Next claims of this worker, as far as they are known: (epoch, positions)."""

    @property
    def num_steps(self) -> int:
        """Local steps of the round; 0: the center has no work for this worker."""
        return sum(claim.num_steps for claim in self.claims)

    def steps(self) -> list[Step]:
        """Return (epoch, positions) of each local step, the positions as even as they go."""
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
    """Keep the state under this number."""
    publishes: bool
    """Whether this worker hands a snapshot of the center on."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in a generation, with all that its strategy needs."""

    config: TrainConfig
    method: Method
    membership: Membership
    worker_id: str
    flat: FlatModel
    time_parts: TimeParts
    cuts: Cuts
    """Ends of the blocks of an epoch."""
    feedback: dict[Span, ErrorFeedback]
    """Error feedback of this worker's compressed messages, by span; it stays with the worker."""

    def feedback_of(self, span: Span, compression: str) -> ErrorFeedback:
        """Return the codec of a span, with what it left out so far."""
        codec = parse_codec(compression)
        if span not in self.feedback or self.feedback[span].codec.name != codec.name:
            self.feedback[span] = ErrorFeedback(codec)
        return self.feedback[span]

    def lay_feedback(self, spans: Sequence[Span]) -> None:
        """Lay what was left out into other spans of the same parameters, where they are others."""
        if self.feedback and set(self.feedback) != set(spans):
            laid = relaid(self.feedback, spans)
            self.feedback.clear()
            self.feedback.update(laid)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.membership.worker_ids.index(self.worker_id)

    def center_device(self) -> torch.device:
        """Return where a rank's own copy of the center lies."""
        device = self.flat.weights.device
        return device if device.type == self.config.exchange_device else torch.device("cpu")


class Strategy(Protocol):
    """Which exchanges happen when, for one worker in one generation.

    What only workers that exchange as a group have (votes, the undoing of a round, a choice in
    common) is not here: see ``raydl.collective.sync_strategy.SyncStrategy``.
    """

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """One exchange for each fragment, in the order in which they come."""
        ...

    @property
    def version(self) -> int:
        """Rounds completed, or exchanges that the center has settled."""
        ...

    @property
    def ledger_round(self) -> int:
        """The round, or the exchanges settled, up to which this worker knows the ledger."""
        ...

    @property
    def num_cuts(self) -> int:
        """How often the learning rate was cut, for the schedule ``plateau``."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """This worker's (rank, number of workers), as far as it knows."""
        ...

    def next_round(self, local_step: int) -> Round:
        """Return the next work; waits where it is not this worker's turn."""
        ...

    def share_done(self, step: int, local_step: int) -> float:
        """Return 0..1 of the run before a step of this round, counted from 0."""
        ...

    def begin_step(self, step: int, lr: float) -> None:
        """Take note that a local step begins, before anything of it is sent.

        Args:
            step: of this round, counted from 0.
            lr: its learning rate, for the center, too, if that steps by it.
        """
        ...

    def settle(self, sums: Header, local_step: int) -> Decision:
        """Enter a committed round; return what follows."""
        ...

    def snapshot(self, *, is_kept: bool, local_step: int) -> Snapshot:
        """Return a copy of the center."""
        ...


def plan_round(num_steps: int, *, fragments: int, delay: int) -> list[tuple[list[int], list[int]]]:
    """Return, for each local step of a round, the fragments that (begin, join) there.

    Fragments take effect at even distances, the last one in the last step; each begins
    ``delay`` steps earlier. So nothing is under way between two rounds. A round without steps
    has no exchange.
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
        parts: (samples, local steps) of each epoch that the round has a part in.
    """
    counts: list[float] = []
    done = 0
    for num_samples, num_steps in parts:
        counts += [done + num_samples * step / num_steps for step in range(num_steps)]
        done += num_samples
    return counts
