"""Rules: what an exchange sends, and how its result changes replica and center.

A rule uses no transport, no clock and no random numbers, so that one object serves every strategy.
All right-hand sides use the values before the step. The named methods, with their equations, are in
``raydl.methods``.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.config import MethodConfig

BLOCK = 1 << 19
"""Floats per block, 2 MiB: several vectors of it fit in the shared cache, and a pass over it takes
much longer than the call that starts it."""


def blocks_of(vector: Tensor) -> Iterator[slice]:
    """Yield the blocks of a vector, shape [n], in order; on a GPU the vector is one block."""
    length = BLOCK if vector.device.type == "cpu" else max(1, vector.numel())
    for start in range(0, vector.numel(), length):
        yield slice(start, start + length)


def squared_distance(a: Tensor, b: Tensor, *, scratch: Tensor) -> float:
    """Return |a - b|^2 of two vectors, shape [n]; ``scratch``, shape [n], is overwritten.

    For long vectors ``torch.dist`` takes five times as long, and allocates another vector.
    """
    squares = 0.0
    for block in blocks_of(a):
        gap = torch.sub(a[block], b[block], out=scratch[block])
        squares += float(torch.dot(gap, gap))
    return squares


def mix_buffers_(buffers: Tensor, total: Tensor, tally: Tally) -> Tensor:
    """Do b <- b + (total - n*b) / p in place; ``total``, sum of n buffers, is overwritten.

    The buffers move towards the mean of the messages by the share of workers that sent one. If all
    workers exchange at once they become the mean.
    """
    total.sub_(buffers, alpha=tally.num_messages)
    return buffers.add_(total, alpha=1 / tally.num_workers)


def lr_factor(
    schedule: str,
    share_done: float,
    *,
    warmup: float = 0.0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    decay: float = 0.2,
) -> float:
    """Return the factor of the learning rate, 0..1.

    It rises linearly from 0 to 1 during the warm-up, then follows the schedule.

    Args:
        schedule: ``cosine`` (1 to 0 along half a wave), ``linear`` (1 to 0), ``constant``, ``step``
            (times gamma at each milestone), ``wsd`` (warm-up, stable, decay: 1, then 1 to 0 in the
            last part; Hu et al., arXiv 2404.06395), or ``plateau`` (constant; its cuts depend on
            scores, not on the share of the run).
        share_done: share of the run that is done by all workers, 0..1; the schedule is therefore
            the same for any number of workers.
        warmup: share of the run for the warm-up, in [0, 1).
        milestones: shares of the whole run, after the warm-up.
        gamma: factor of each milestone.
        decay: share of the run for the decay of ``wsd``, its last part.
    """
    if share_done < warmup:
        return share_done / warmup
    share = (share_done - warmup) / (1 - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * share))
    if schedule == "step":
        return gamma ** sum(share_done >= milestone for milestone in milestones)
    if schedule == "wsd":
        return min(1.0, (1 - share_done) / decay)
    return 1 - share if schedule == "linear" else 1.0


class Sends(enum.Enum):
    """Content of a worker's message."""

    WEIGHTS = "weights"
    """Weights at the start of the step, sent while the gradient is computed."""
    GRADIENT = "gradient"
    """Sum of the gradients of all batches since the last exchange, each times what it counts."""
    PROGRESS = "progress"
    """c - x after the step: the distance from the center that the replica last copied."""


@dataclass(frozen=True)
class Tally:
    """Numbers behind a sum of messages."""

    num_workers: int
    """Workers that train now (p)."""
    num_messages: int
    """Messages in the sum: p if all workers exchange at once, else 1."""
    num_samples: float
    """What the samples behind these messages count, since the previous exchange: their number, or
    what the loss is a mean over, such as labelled tokens (``raydl.tasks.Counter``). A sum of
    gradients divided by it is the gradient of the mean loss."""
    share_of_round: float = 1.0
    """Local steps of this round / those of a whole round, in [0, 1]: below 1 where samples run out,
    as in the last round of a run. Progress is in proportion to it; momentum would not be."""


@dataclass(frozen=True)
class LocalStep:
    """Defaults of a method for the local step."""

    optimizer: str = "sgd"
    """Name of the optimizer. The other values are defaults for this optimizer."""
    lr: float = 0.25
    momentum: float = 0.0
    nesterov: bool = False


class Rule:
    """Update of replica and center in an exchange. Subclass it to add a method.

    All operations are elementwise over flat tensors, so a rule works on a slice as on the whole:
    fragments and shards of the center need no further code.

    Attributes:
        sends: content of a message. A rule that sends weights defines ``pull``; after any other
            exchange the replica becomes a copy of the center.
        steps_replica: False moves the user's optimizer to the center, for a rule that sends
            gradients, whose replicas take no steps in any case.
        strategy: default strategy: ``sync``, ``async``, ``hogwild`` or ``round_robin``.
        period: default number of local steps between exchanges.
        name: name of a method of ``raydl.methods``.
        source: where its equations are from.
        local_step: defaults of the local step.
        has_momentum_at_center: whether the user's momentum is at the center (the master), not at
            the replicas.
        outer: default (rate, momentum) of the outer step, or None if there is none to set.
        overlap: whether weights are sent while the gradient is computed.
        steps_by_speed: whether slower workers always take fewer local steps.
    """

    sends: Sends = Sends.WEIGHTS
    steps_replica: bool = True
    strategy: str = "sync"
    period: int = 10
    name: str = ""
    source: str = ""
    local_step: LocalStep = LocalStep()
    has_momentum_at_center: bool = False
    outer: tuple[float, float] | None = None
    overlap: bool = True
    steps_by_speed: bool = False

    @classmethod
    def sentence(cls) -> str:
        """Return the first sentence of its docstring."""
        return (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")

    @classmethod
    def from_config(cls, config: MethodConfig) -> Rule:
        """Return the rule with the user's settings; a rule without settings ignores them."""
        return cls()

    def pull(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> Tensor:
        """Return the update that the replica subtracts after its local step, shape [n]."""
        raise NotImplementedError

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Update the center in place with the sum of the messages, which may be overwritten."""
        raise NotImplementedError

    def measured_pull(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> float:
        """Write the result of ``pull`` into ``out``; return the squared distance of the two.

        All tensors have shape [n]; see ``pull``.
        """
        squares = squared_distance(replica, center, scratch=out)
        pull = self.pull(replica, center, tally, out=out)
        if pull is not out:  # a rule need not use out
            out.copy_(pull)
        return squares

    def exchange_(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> float:
        """Update the center in place with one replica, if one process can access both.

        Args:
            replica: weights to send, shape [n]; not changed.
            center: shape [n].
            tally: numbers of one message.
            out: receives the update that the replica subtracts after its local step, shape [n].

        Returns:
            The squared distance of the two before the update.
        """
        squares = self.measured_pull(replica, center, tally, out=out)
        self.update_center_(center, replica.clone(), tally, None)
        return squares

    def make_center_optimizer(self, tensors: list[Tensor]) -> Optimizer | None:
        """Return the rule's optimizer at the center, over one flat tensor, or None if it has none.

        Checkpoints hold its state. Rules with ``steps_replica = False`` get the user's optimizer
        instead.
        """
        return None


def with_equal_arrivals(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return states of ``DelayedNesterov`` at parts of one span as if equally many steps were in s.

    The span has one count, that of the part with the fewest. The sums of the others are scaled to
    it, so that every average s/n stays as it was; where a part has no steps, the momentum goes
    without what the others have in s. States of other optimizers do not change.
    """
    if not any("arrivals" in state for state in states):
        return states
    least = min(state.get("arrivals", 0) for state in states)
    return [
        {**state, "arrivals": least, "sum": state["sum"] * (least / (state["arrivals"] or 1))}
        if state
        else state
        for state in states
    ]


def step_along_(center: Tensor, direction: Tensor, optimizer: Optimizer | None) -> None:
    """Step the optimizer at the center along a flat gradient, shape [n]."""
    assert optimizer is not None, "this rule needs an optimizer at the center"
    center.grad = direction
    optimizer.step()
    center.grad = None
