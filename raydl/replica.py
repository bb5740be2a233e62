"""A replica: a model on one flat buffer, its inner optimizer, and one local step.

The step of every synchronous and asynchronous method is the same; only the transport
behind :class:`Exchange` differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from raydl.center import Center, copied_to_cpu, set_lr
from raydl.config import OptimizerConfig
from raydl.errors import ExchangeError
from raydl.flat import FlatModel
from raydl.metrics import TimeParts
from raydl.rules import Rule, Sends, Tally
from raydl.task import Batch, Task


@dataclass(frozen=True)
class Header:
    """A few numbers that travel with every message and are summed with it.

    Every rank sees the same sums after the same round, so all take the same decision with
    no message of its own. All fields describe the time since the last message.
    """

    stop: float = 0.0
    """Votes to end the run after this round."""
    regroup: float = 0.0
    """Votes to leave this generation after this round."""
    checkpoint: float = 0.0
    """Votes to keep the state as it is after this round."""
    num_samples: float = 0.0
    """Samples of this round, the step under way included."""
    loss_sum: float = 0.0
    """Sum of the losses of ``loss_samples`` samples."""
    loss_samples: float = 0.0
    """Samples behind ``loss_sum``: all up to the step before this one."""
    distance: float = 0.0
    """Squared distance to the center at the exchange before."""
    seconds: float = 0.0
    """Seconds of the round before."""


class Exchange(Protocol):
    """What a replica needs of a transport: one transaction with the center."""

    @property
    def center(self) -> Center:
        """The center as it was before this exchange, until :meth:`commit`."""
        ...

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Send copies and return at once.

        Args:
            weights: what the rule sends, shape [num_parameters].
            buffers: float buffers, shape [num_buffers].
            header: the numbers that ride along.
        """
        ...

    def wait(self) -> tuple[Tally, Header]:
        """Wait until the exchange has arrived; return what it is made of and the header sums.

        Raises:
            ExchangeError: it failed or took too long; no tensor was changed.
        """
        ...

    def commit(self) -> None:
        """Move the center. Cannot fail."""
        ...


class ClippedSGD(SGD):
    """Torch's SGD that shortens a gradient beyond ``max_grad_norm`` first.

    One exploding batch would else throw a replica out, and the center after it.
    """

    def __init__(self, tensors: list[Tensor], *, max_grad_norm: float | None, **settings: Any):
        super().__init__(tensors, **settings)
        self._max_grad_norm = max_grad_norm

    def step(self, closure: Any = None) -> Any:
        """Shorten the gradient if it is too long, then step."""
        if self._max_grad_norm is not None:
            for group in self.param_groups:
                nn.utils.clip_grad_norm_(group["params"], self._max_grad_norm)
        return super().step(closure)


def make_optimizer(config: OptimizerConfig) -> Callable[[list[Tensor]], Optimizer]:
    """Return a function that builds the configured optimizer over flat tensors."""

    def build(tensors: list[Tensor]) -> Optimizer:
        return ClippedSGD(
            tensors,
            max_grad_norm=config.max_grad_norm,
            lr=config.lr or 0.0,
            momentum=config.momentum or 0.0,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )

    return build


class Replica:
    """The parameters x_i of one worker and the arithmetic around them.

    Args:
        model: already on its device; changed in place to flat storage.
        task: knows the loss of a batch.
        rule: what an exchange does.
        make_optimizer: builds the inner optimizer over the flat weights.
        time_parts: where the time is counted.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        *,
        rule: Rule,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        time_parts: TimeParts,
    ) -> None:
        self.flat = FlatModel(model, name=task.name)
        self._task = task
        self._rule = rule
        self._optimizer = make_optimizer([self.flat.weights]) if rule.steps_replica else None
        self._parts = time_parts
        self._pull = torch.empty_like(self.flat.weights)
        self.distance_squared = 0.0
        """Squared distance to the center, seen at the last exchange."""

    def step(
        self, batch: Batch, *, exchange: Exchange | None = None, header: Header | None = None
    ) -> tuple[Tensor, Header | None]:
        """Take one local step, with an exchange around it if one is given.

        Returns:
            The mean loss of the batch (a detached scalar), and the header sums of the
            exchange (None without one).

        Raises:
            ExchangeError: the exchange failed. Weights, optimizer and center are as before
                the step; gradients since the last exchange are forgotten.
        """
        if exchange is None:
            loss = self._gradient(batch)
            self._local_step(len(batch[1]))
            return loss, None
        sends_weights = self._rule.sends is Sends.WEIGHTS
        if sends_weights:
            # The weights of the start of the step travel while the gradient is computed.
            # Nothing below changes them before the join.
            exchange.begin(self.flat.weights, self.flat.buffers, header or Header())
        loss = self._gradient(batch)
        if not sends_weights:
            exchange.begin(self.flat.gradients, self.flat.buffers, header or Header())
        try:
            with self._parts.measure("device_device_parameters"):
                tally, sums = exchange.wait()
        except ExchangeError:
            self.flat.gradients.zero_()
            raise
        self._join(exchange, tally, num_samples=len(batch[1]))
        return loss, sums

    def _gradient(self, batch: Batch) -> Tensor:
        """Add the gradient at the current weights into the flat buffer; return the mean loss."""
        num_samples = len(batch[1])
        if num_samples == 0:  # the tail of an epoch may leave a worker without samples
            return self.flat.weights.new_zeros(())
        with self._parts.measure("forward_backward"):
            loss = self._task.loss(self.flat.model, batch)
            # A gradient that is sent is a sum over samples, so that ranks with fewer
            # samples weigh less in the mean.
            scaled = loss if self._rule.steps_replica else loss * num_samples
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _local_step(self, num_samples: int) -> None:
        """Let the inner optimizer step; without one, gradients go on adding up."""
        if self._optimizer is None:
            return
        with self._parts.measure("replica_update"):
            if num_samples:
                self.flat.weights.grad = self.flat.gradients
                self._optimizer.step()
            self.flat.gradients.zero_()

    def _join(self, exchange: Exchange, tally: Tally, *, num_samples: int) -> None:
        """Update replica and center, both from the values before the step."""
        if self._rule.steps_replica:
            with self._parts.measure("replica_update"):
                weights, center = self.flat.weights, exchange.center.weights
                self.distance_squared = float(torch.dist(weights, center)) ** 2
                pull = self._rule.pull(weights, center, tally, out=self._pull)
            self._local_step(num_samples)
            with self._parts.measure("replica_update"):
                self.flat.weights.sub_(pull)
        with self._parts.measure("center_update"):
            exchange.commit()
        if not self._rule.steps_replica:
            self.follow(exchange.center)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the inner optimizer, if there is one."""
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)

    def follow(self, center: Center) -> None:
        """Become a copy of the center, and forget gradients that were under way."""
        with self._parts.measure("replica_update"):
            self.flat.weights.copy_(center.weights)
            self.flat.buffers.copy_(center.buffers)
            self.flat.gradients.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that this replica needs to go on, on the CPU."""
        return {
            "weights": self.flat.weights.detach().cpu().clone(),
            "buffers": self.flat.buffers.detach().cpu().clone(),
            "gradients": self.flat.gradients.detach().cpu().clone(),
            "optimizer": copied_to_cpu(self._optimizer.state_dict()) if self._optimizer else {},
            "distance_squared": self.distance_squared,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.flat.weights.copy_(state["weights"])
        self.flat.buffers.copy_(state["buffers"])
        self.flat.gradients.copy_(state["gradients"])
        if self._optimizer and state["optimizer"]:
            self._optimizer.load_state_dict(copied_to_cpu(state["optimizer"]))
        self.distance_squared = state["distance_squared"]
