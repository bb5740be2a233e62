"""The update equations, over flat tensors.

    symbol  name here       meaning
    x_i     replica         parameters of worker i
    c       center          the center variable
    g_i     gradient        mini-batch gradient at x_i
    eta     lr              learning rate of the local step (it lives in the optimizer)
    alpha   moving_rate     share of the gap that one exchange closes
    beta    beta            p * alpha
    p       num_workers     workers that train now

A *rule* defines which values are sent, and how the receipt changes replica and center. It uses no
transport, no clock and no random numbers, so that one object serves every strategy. All right-hand
sides use the values before the step.

Sources: SC17 = You, Buluc, Demmel, arXiv 1708.02983; EASGD = Zhang, Choromanska, LeCun,
arXiv 1412.6651.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from raydl.config import MethodConfig
from raydl.core.torch_import import without_compiler

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


def moving_rate(beta: float, num_workers: int) -> float:
    """Return alpha = beta / p; compute it again whenever p changes.

    Losses may leave fewer workers than the minimum for which beta was checked: alpha stays within
    ``moving_rate_limit_in_turn`` at zero curvature, beyond which the distances grow.
    """
    return min(beta / num_workers, 1.0)


def moving_rate_limit_in_turn(*, lr_curvature: float = 0.0) -> float:
    """Return the largest stable alpha if workers exchange one by one, for any p.

    alpha <= (4 - 2*eta*h) / (4 - eta*h), with ``lr_curvature`` = eta*h in [0, 2).
    """
    return (4 - 2 * lr_curvature) / (4 - lr_curvature)


def elastic_difference(
    replica: Tensor, center: Tensor, *, moving_rate: float, out: Tensor | None = None
) -> Tensor:
    """Return alpha * (x - c), shape [num_parameters], in ``out`` if given.

    The replica subtracts it and the center adds it, so that their sum stays the same. (SC17, eq. 1
    and 2.)
    """
    return torch.sub(replica, center, out=out).mul_(moving_rate)


def elastic_center_(
    center: Tensor, total: Tensor, *, num_messages: int, moving_rate: float
) -> Tensor:
    """Do c <- c + alpha * (total - n*c) in place; ``total``, sum of n replicas, is overwritten.

    n = p if all workers exchange at once (SC17, eq. 2), n = 1 if one worker exchanges.
    """
    for block in blocks_of(center):
        gaps = total[block].sub_(center[block], alpha=num_messages)
        center[block].add_(gaps, alpha=moving_rate)
    return center


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
    """

    sends: Sends = Sends.WEIGHTS
    steps_replica: bool = True
    strategy: str = "sync"
    period: int = 10

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


class Elastic(Rule):
    """Elastic averaging: x <- x - eta*g - alpha*(x - c) ; c <- c + alpha*sum(x - c).

    The term eta*g stands for the whole step of the inner optimizer: with momentum this is MEASGD,
    with Nesterov momentum EAMSGD. (SC17, eq. 1, 2, 5 and 6.)

    Args:
        beta: p * alpha, in (0, 1].
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta

    @classmethod
    def from_config(cls, config: MethodConfig) -> Elastic:
        """Return the rule with the user's beta."""
        return cls(config.beta)

    def pull(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> Tensor:
        """Return alpha * (x - c)."""
        alpha = moving_rate(self.beta, tally.num_workers)
        return elastic_difference(replica, center, moving_rate=alpha, out=out)

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Do c <- c + alpha * (sum(x) - n*c)."""
        alpha = moving_rate(self.beta, tally.num_workers)
        elastic_center_(center, total, num_messages=tally.num_messages, moving_rate=alpha)

    def measured_pull(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> float:
        """Return |x - c|^2, computed from the pull itself, block by block."""
        if type(self) is not Elastic:  # a subclass may override pull
            return super().measured_pull(replica, center, tally, out=out)
        alpha, squares = moving_rate(self.beta, tally.num_workers), 0.0
        for block in blocks_of(replica):
            x, c = replica[block], center[block]
            pull = elastic_difference(x, c, moving_rate=alpha, out=out[block])
            squares += float(torch.dot(pull, pull))
        return squares / alpha**2

    def exchange_(self, replica: Tensor, center: Tensor, tally: Tally, *, out: Tensor) -> float:
        """Do c <- c + alpha * (x - c), with the same difference for both sides."""
        if type(self) is not Elastic:  # a subclass may override either side
            return super().exchange_(replica, center, tally, out=out)
        squares = 0.0
        for block in blocks_of(replica):
            squares += self.measured_pull(replica[block], center[block], tally, out=out[block])
            center[block].add_(out[block])
        return squares


class MeanGradient(Rule):
    """The optimizer at the center steps along the mean gradient; replicas copy the center.

    g <- sum_i n_i*g_i / sum_i n_i ; c <- optimizer(c, g) ; x_i <- c, where n_i is the number of
    samples of worker i, or what they count. With plain SGD this is data-parallel SGD on the joined
    batch. (SC17, eq. 3 and 4, at the master.)
    """

    sends = Sends.GRADIENT
    steps_replica = False
    period = 1

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step the optimizer along total / num_samples, or do nothing if they count nothing."""
        if tally.num_samples == 0:  # no sample could be read, or none has a label
            return
        step_along_(center, total.div_(tally.num_samples), optimizer)


class Outer(Rule):
    """An outer optimizer steps along the mean progress D_i = c - x_i; replicas copy the center.

    If all workers exchange at once, rate 1 without momentum is local SGD, c <- mean(x_i); Nesterov
    momentum is DiLoCo (arXiv 2311.08105): m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m).
    If workers exchange one by one, rate 1 with one local step is SGD at the master, D = eta*g
    (SC17; with more local steps Downpour), and with momentum MSGD at the master.

    In a round of which only the share s was trained, s*m takes part in the step and (1 - s)*m does
    not change. So a round in several parts moves the center about as far as a whole one.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.
        nesterov: whether the outer momentum is Nesterov's.
    """

    sends = Sends.PROGRESS

    def __init__(self, lr: float = 1.0, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov

    @classmethod
    def from_config(cls, config: MethodConfig) -> Outer:
        """Return the rule with the user's outer rate and momentum, if any."""
        lr = 1.0 if config.outer_lr is None else config.outer_lr
        return cls(lr, momentum=config.outer_momentum or 0.0)

    def make_center_optimizer(self, tensors: list[Tensor]) -> Optimizer | None:
        """Return torch's SGD with the outer rate and momentum."""
        nesterov = self.nesterov and self.momentum > 0  # torch refuses it without momentum
        make = without_compiler(SGD)
        return make(tensors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step the outer optimizer along total / n, with the share of its momentum."""
        assert optimizer is not None
        direction, share = total.div_(tally.num_messages), tally.share_of_round
        momentum = optimizer.state[center].get("momentum_buffer") if share < 1 else None
        if momentum is None:
            step_along_(center, direction, optimizer)
            return
        at_rest = momentum * (1 - share)
        momentum.mul_(share)
        step_along_(center, direction, optimizer)
        momentum.add_(at_rest)


class DelayedOuter(Outer):
    """Outer Nesterov optimizer for progress that arrives one by one: ``DelayedNesterov``.

    The momentum is updated after every p-th message. A message of a part of a round counts as that
    part of a message.
    """

    def make_center_optimizer(self, tensors: list[Tensor]) -> Optimizer | None:
        """Return the delayed Nesterov optimizer."""
        return without_compiler(DelayedNesterov)(tensors, lr=self.lr, momentum=self.momentum)

    def update_center_(
        self, center: Tensor, total: Tensor, tally: Tally, optimizer: Optimizer | None
    ) -> None:
        """Step along D; every p-th message updates the momentum."""
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["every"], group["share"] = tally.num_workers, tally.share_of_round
        step_along_(center, total.div_(tally.num_messages), optimizer)


_ROUNDING = 1e-6
"""Ten tenths of a message are less than one, by rounding."""


class DelayedNesterov(Optimizer):
    """Nesterov optimizer that updates its momentum every N steps (arXiv 2401.09135, algorithm 3).

    s <- s + D ; every N-th step: m <- mu*m + s/n ; c <- c - lr*(D/N + mu*m) ; s <- 0 ;
    else: c <- c - lr*D/N. Momentum at every step would count stale progress N times. n is the
    number of steps in s: N, or more at the first update after N has decreased. A step along the
    progress of a part of a round counts as that part of a step, ``share`` of its group.

    Args:
        tensors: one flat tensor.
        lr: outer learning rate.
        momentum: mu.
    """

    def __init__(self, tensors: list[Tensor], *, lr: float, momentum: float) -> None:
        super().__init__(tensors, {"lr": lr, "momentum": momentum, "every": 1, "share": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply the progress in ``grad``."""
        for group in self.param_groups:
            for tensor in group["params"]:
                self._step(tensor, group, self.state[tensor])

    def _step(self, tensor: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["arrivals"] = 0
            state["sum"] = torch.zeros_like(tensor)
            state["momentum_buffer"] = torch.zeros_like(tensor)
        progress, every = tensor.grad, group["every"]
        assert progress is not None
        state["arrivals"] += group["share"]
        state["sum"].add_(progress)
        tensor.sub_(progress, alpha=group["lr"] / every)
        if state["arrivals"] > every - _ROUNDING:
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(state["sum"], alpha=1 / state["arrivals"])
            tensor.sub_(momentum, alpha=group["lr"] * group["momentum"])
            state["sum"].zero_()
            state["arrivals"] = 0


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
