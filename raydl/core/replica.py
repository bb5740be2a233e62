"""A replica: a model on one flat buffer, its inner optimizer, and one local step.

The step of every synchronous and asynchronous method is the same; only the transport
behind ``raydl.core.exchange.Exchange`` differs.

A worker that comes back after a failure is far from where the others went. With dynamic
weights it is pulled hard and pulls the center little:

    u       log of the distance between replica and center at an exchange
    a       u minus the median of the newest u before
    f       0 for a <= log 2, 1 for a >= log 8, a straight line between
    x <- x - (alpha*(1 - f) + f) * (x - c) ; c <- c + alpha*(1 - f)*(x - c)

With f = 0 this is elastic averaging, with f = 1 the replica starts again at the center. Our
reading of Xu and Carr, arXiv 2409.09242, of which we know the idea (weights by the trend of
the log distance), not the formulas: the score and its limits are ours.
"""

from __future__ import annotations

import io
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.config import TrainingConfig
from raydl.core.center import copied_to_cpu, load_state, set_lr
from raydl.core.exchange import Arrival, Exchange, Header, Partners, StepPlan
from raydl.core.flat import FlatModel, is_finite
from raydl.core.non_trainable import as_tensors
from raydl.core.optimizers import is_by_parameter, no_gradient_text, split_by_parameter
from raydl.core.rules import Rule, Sends, squared_distance
from raydl.core.tensor_files import view_of
from raydl.data.samples import Batch, num_samples_of, parts_of
from raydl.errors import ExchangeError, NonFiniteError, StepError
from raydl.metrics import TimeParts
from raydl.tasks import Task, in_precision


class Distances:
    """Squared distances of one replica, by the start of each span of the center.

    Fragments may change from one round to the next: what was known of a span goes once another
    one that covers its start is noted.
    """

    def __init__(self) -> None:
        self._squares: dict[int, float] = {}

    def note(self, span: slice, squares: float) -> None:
        """Take in the squared distance of a span."""
        within = range(span.start, span.stop)
        kept = {start: before for start, before in self._squares.items() if start not in within}
        self._squares = {**kept, span.start: squares}

    def total(self) -> float:
        """Return the squared distance of all spans together."""
        return sum(self._squares.values())

    def state(self) -> dict[int, float]:
        """Return what is kept in a checkpoint."""
        return dict(self._squares)

    def load(self, state: Mapping[int, float]) -> None:
        """Take over what ``state`` returned."""
        self._squares = dict(state)


_GRACE, _LIMIT = math.log(2), math.log(8)
_REMEMBERED, _NEEDED = 8, 4


class DistanceTrend:
    """Follows one replica's distance to one span of the center."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=_REMEMBERED)

    def distrust(self, distance: float) -> float:
        """Take in the distance at an exchange; return f, 0 (trusted) to 1.

        The first exchanges are trusted: distances grow from zero in every run.
        """
        if distance <= 0:
            return 0.0
        log = math.log(distance)
        if len(self._logs) < _NEEDED:
            self._logs.append(log)
            return 0.0
        usual = statistics.median(self._logs)
        # A jump counts as a small one, or the next one would look small beside it.
        self._logs.append(min(log, usual + _GRACE))
        return min(1.0, max(0.0, (log - usual - _GRACE) / (_LIMIT - _GRACE)))

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen."""
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._logs = deque(state["logs"], maxlen=_REMEMBERED)


class DynamicWeights:
    """How far one replica is trusted at each span of the center, by the span's start.

    Args:
        is_on: without dynamic weights it is always trusted.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._dynamic_weights: dict[int, DistanceTrend] = {}
        self._distrust: dict[int, float] = {}

    def note_distance(self, start: int, distance: float) -> None:
        """Take in the distance to a span at an exchange."""
        self._distrust[start] = self._dynamic_weights.setdefault(start, DistanceTrend()).distrust(
            distance
        )

    def distrust_at(self, start: int) -> float:
        """Return f at a span's newest exchange, 0 (trusted) to 1."""
        return self._distrust.get(start, 0.0)

    def state(self) -> list[list[Any]]:
        """Return what was seen at each span."""
        return [[start, trust.state_dict()] for start, trust in self._dynamic_weights.items()]

    def load(self, state: list[list[Any]]) -> None:
        """Take over what ``state`` returned, where that matters."""
        for start, seen in state if self.is_on else ():
            self._dynamic_weights[start] = DistanceTrend()
            self._dynamic_weights[start].load_state_dict(seen)


_SILENT = StepPlan()
_PLAIN = TrainingConfig()
MakeGradient = Callable[[], tuple[Tensor, int]]
"""Adds a gradient to what the optimizer sees; returns (the mean loss, the samples behind it)."""
Stepped = tuple[Tensor, Header | None]
"""The mean loss of a step's batch, and the header sums of its last exchange, if it joined one."""


class Replica:
    """The parameters x_i of one worker and the arithmetic around them.

    Args:
        flat: the model, on its device.
        task: knows the loss of a batch.
        rule: what an exchange does.
        make_optimizer: builds the inner optimizer over the flat weights.
        time_parts: where the time is counted.
        training: says the precision, and in how many parts a batch goes through the model.
        has_dynamic_weights: a replica that is suddenly far away counts little; for rules
            that send weights.
        needs_all_gradients: refuse to send the gradient of a loss that does not reach all
            parameters; for an optimizer at the center, which would move the others all the same.
        who: returns (worker, its local step), for errors.
    """

    def __init__(
        self,
        flat: FlatModel,
        task: Task,
        *,
        rule: Rule,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        time_parts: TimeParts,
        training: TrainingConfig = _PLAIN,
        has_dynamic_weights: bool = False,
        needs_all_gradients: bool = False,
        who: Callable[[], tuple[str, int]] = lambda: ("", 0),
    ) -> None:
        self.flat = flat
        flat.watch_gradients()
        self._task = task
        self._rule = rule
        self._make_optimizer = make_optimizer
        self._optimizer = make_optimizer([self.flat.weights]) if rule.steps_replica else None
        self._parts = time_parts
        self._training = training
        self._needs_all_gradients = needs_all_gradients
        self._who = who
        self._dynamic_weights = DynamicWeights(is_on=has_dynamic_weights)
        self._pull = torch.empty_like(self.flat.weights)
        self._sent = torch.empty(0)
        self._num_seen = 0
        self._num_begun: dict[int, int] = {}
        self._num_sent: dict[int, int] = {}
        self._num_dropped = 0
        self._reached_before: tuple[int, ...] = tuple(flat.num_reached)
        self._reached_sent: dict[int, tuple[int, ...]] = {}
        self._moves: list[tuple[slice, Tensor]] | None = None
        self.num_steps = 0
        """Local steps taken, with what their exchanges did or without."""
        self.partners: Partners | None = None
        """Workers that share this replica."""
        self._distances = Distances()

    def step(self, batch: Batch, step_plan: StepPlan = _SILENT) -> Stepped:
        """Take one local step, with exchanges that begin and take effect around it.

        Returns:
            The mean loss of the batch (a detached scalar), and the header sums of the last
            exchange joined (None without one).

        Raises:
            ExchangeError: an exchange failed. It changed neither replica nor center. The local
                step was taken without it; a gradient that was to be sent is forgotten.
            StepError: what was to be sent must not reach the center; it was not sent.
        """
        return self._step(lambda: self._gradient(batch), step_plan)

    def step_as_it_is(self, step_plan: StepPlan = _SILENT) -> Header | None:
        """Take one local step along gradients that the optimizer's parameters have already.

        Each step counts as one sample. Returns and raises as ``step``.
        """

        def gradient() -> tuple[Tensor, int]:
            self._num_seen += 1
            return self.flat.weights.new_zeros(()), 1

        return self._step(gradient, step_plan)[1]

    def _step(self, gradient: MakeGradient, step_plan: StepPlan) -> Stepped:
        if self._rule.sends is Sends.WEIGHTS:
            loss, arrivals = self._step_with_weights(gradient, step_plan)
        else:
            loss, arrivals = self._step_then_send(gradient, step_plan)
        for exchange in step_plan.join:
            self._num_sent[exchange.span.start] = self._num_begun[exchange.span.start]
        return loss, arrivals[-1].sums if arrivals else None

    def _step_with_weights(
        self, gradient: MakeGradient, step_plan: StepPlan
    ) -> tuple[Tensor, list[Arrival]]:
        """Step while the weights of the start of the step are under way."""
        arrivals: list[Arrival] = []
        failure: ExchangeError | None = None
        try:
            # Nothing below changes the weights before the join.
            self.begin(step_plan)
            if not step_plan.overlap:
                arrivals = self._wait(step_plan)
        except ExchangeError as error:
            failure = error
        loss, num_samples = gradient()
        if step_plan.overlap and failure is None:
            try:
                arrivals = self._wait(step_plan)
            except ExchangeError as error:
                failure = error
        if failure is not None:
            self._local_step(num_samples)
            raise failure
        self._join(step_plan, arrivals, num_samples=num_samples)
        return loss, arrivals

    def _step_then_send(
        self, gradient: MakeGradient, step_plan: StepPlan
    ) -> tuple[Tensor, list[Arrival]]:
        """Step, then send what came of it; the replica follows the center."""
        loss, num_samples = gradient()
        if self._rule.sends is Sends.PROGRESS:
            self._local_step(num_samples)
        else:
            self.num_steps += 1
        try:
            self.begin(step_plan)
            arrivals = self._wait(step_plan)
        except ExchangeError:
            if self._rule.sends is Sends.GRADIENT:
                self._drop_gradients()
            raise
        self._follow(step_plan)
        return loss, arrivals

    def begin(self, step_plan: StepPlan) -> None:
        """Send what the rule sends of each span that begins; a later step may join them.

        Raises:
            ExchangeError: one can not begin; nothing was changed.
        """
        with self._parts.measure("device_device_parameters"):
            for exchange in step_plan.begin:
                self._send(exchange, step_plan)

    def _send(self, exchange: Exchange, step_plan: StepPlan) -> None:
        span = exchange.span
        header = step_plan.header if exchange is step_plan.begin[-1] else Header()
        num_samples = self._num_seen - self._num_sent.get(span.start, self._num_dropped)
        header = replace(header, num_samples=float(num_samples))
        if self._rule.sends is not Sends.GRADIENT and exchange not in step_plan.join:
            self._keep_sent(span)
        message = self._message(exchange, step_plan)
        self._check_message(message, exchange, num_samples)
        exchange.begin(message, self.flat.buffers, header)
        if self._rule.sends is Sends.GRADIENT:
            # What is sent is done with; later gradients are for the next exchange.
            self.flat.gradients[span].zero_()
            self._reached_sent[span.start] = tuple(self.flat.num_reached)
        self._num_begun[span.start] = self._num_seen

    def _message(self, exchange: Exchange, step_plan: StepPlan) -> Tensor:
        """Return what the rule sends of a span; it stays as it is until the exchange is joined."""
        span = exchange.span
        if self._rule.sends is Sends.GRADIENT:
            return self.flat.gradients[span].clone()
        weights = self._weights_sent(exchange, step_plan)
        if self._rule.sends is Sends.PROGRESS:
            return torch.sub(exchange.center.weights, weights, out=self._pull[span])
        if self._dynamic_weights.is_on:
            self._dynamic_weights.note_distance(
                span.start, self._distance_squared(exchange, weights) ** 0.5
            )
        return self._trusted(weights, exchange)

    def _check_message(self, message: Tensor, exchange: Exchange, num_samples: int) -> None:
        """Raise a StepError if a message, or what goes with it, must not reach the center."""
        is_gradient = self._rule.sends is Sends.GRADIENT
        if not is_finite(message):
            self._refuse("gradient" if is_gradient else "weights")
        if exchange.center.buffers.numel() and not is_finite(self.flat.buffers):
            self._refuse("float buffers")
        if is_gradient and num_samples and self._needs_all_gradients:
            before = self._reached_sent.get(exchange.span.start, self._reached_before)
            unreached = self.flat.unreached(before, exchange.span)
            if unreached:
                raise StepError(*self._who(), no_gradient_text(unreached))

    def _refuse(self, what: str) -> NoReturn:
        raise NonFiniteError(
            *self._who(),
            f"there are values in its {what} that are not finite, or beyond 1e19, so it sent "
            f"nothing; lower optimizer.lr, or look at the data of that step",
        )

    def _trusted(self, weights: Tensor, exchange: Exchange) -> Tensor:
        """Return weights as they are sent: closer to the center the less they are trusted."""
        f = self._dynamic_weights.distrust_at(exchange.span.start)
        return torch.lerp(weights, exchange.center.weights, f) if f else weights

    def _keep_sent(self, span: slice) -> None:
        """Remember what was sent, for an exchange that takes effect in a later step."""
        if not self._sent.numel():
            self._sent = torch.empty_like(self.flat.weights)
        self._sent[span] = self.flat.weights[span]

    def _weights_sent(self, exchange: Exchange, step_plan: StepPlan) -> Tensor:
        """Return the weights at the beginning of an exchange."""
        is_at_once = exchange in step_plan.begin and exchange in step_plan.join
        return (self.flat.weights if is_at_once else self._sent)[exchange.span]

    def _wait(self, step_plan: StepPlan) -> list[Arrival]:
        """Wait for all that take effect in this step."""
        with self._parts.measure("device_device_parameters"):
            return [exchange.wait() for exchange in step_plan.join]

    def _gradient(self, batch: Batch) -> tuple[Tensor, int]:
        """Add the gradient at the current weights into the flat buffer.

        Returns:
            The mean loss, and the samples behind the gradient: those of partners count.
        """
        loss = self._own_gradient(batch)
        try:
            return loss, self._joined(num_samples_of(batch))
        except ExchangeError:
            self._drop_gradients()
            raise

    def _own_gradient(self, batch: Batch) -> Tensor:
        num_samples = num_samples_of(batch)
        if num_samples == 0:  # the tail of an epoch may leave a worker without samples
            return self.flat.weights.new_zeros(())
        with self._parts.measure("forward_backward"):
            # A gradient that is sent is a sum over samples, so that ranks with fewer
            # samples weigh less in the mean.
            scale = 1.0 if self._rule.steps_replica else float(num_samples)
            parts = parts_of(batch, self._training.microbatches, full=self._training.batch_size)
            losses = [self._backward(part, share, scale) for part, share in parts]
            self.flat.rebind()
        self._num_seen += num_samples
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, part: Batch, share: float, scale: float) -> Tensor:
        """Add the gradient of a part of a batch; return what it adds to the batch's mean loss."""
        with in_precision(self._training.precision, self.flat.weights.device):
            loss = self._task.loss(self.flat.model, part)
        mean = loss if share == 1.0 else loss * share
        (mean if scale == 1.0 else mean * scale).backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    def _joined(self, num_samples: int) -> int:
        """Join the gradient with those of workers that share this replica, if any do."""
        if self.partners is None:
            return num_samples
        with self._parts.measure("device_device_parameters"):
            own = self.flat.is_reached(self._reached_before)
            total, is_reached = self.partners.mean_(self.flat.gradients, num_samples, own)
            self.flat.note_reached(is_reached)
            return total

    def _local_step(self, num_samples: int) -> None:
        """Let the inner optimizer step; without one, gradients go on adding up."""
        self.num_steps += 1
        if self._optimizer is None:
            return
        with self._parts.measure("replica_update"):
            if num_samples:
                self._optimizer_step(self._optimizer)
            self.flat.gradients.zero_()
            self._reached_before = tuple(self.flat.num_reached)

    def _optimizer_step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step; as torch does, it leaves a parameter without gradient alone."""
        flat = self.flat
        if flat.gradients.numel():  # else they are where the user's loop has them
            flat.weights.grad = flat.gradients
        unreached = flat.unreached(self._reached_before)
        if not unreached:
            optimizer.step()
            return
        self._optimizer = split_by_parameter(optimizer, self._make_optimizer, flat.parameters)
        with flat.without_gradients_of(unreached):
            self._optimizer.step()

    def _join(self, step_plan: StepPlan, arrivals: list[Arrival], *, num_samples: int) -> None:
        """Update replica and center, both from the values that were sent."""
        with self._parts.measure("replica_update"):
            pulls = [
                (exchange, self._pull_of(exchange, arrival, step_plan))
                for exchange, arrival in zip(step_plan.join, arrivals, strict=True)
            ]
        self._local_step(num_samples)
        with self._parts.measure("replica_update"):
            for exchange, pull in pulls:
                self.flat.weights[exchange.span].sub_(pull)
                if self._moves is not None:
                    self._moves.append((exchange.span, pull.clone()))
        self._commit(step_plan)

    def _pull_of(self, exchange: Exchange, arrival: Arrival, step_plan: StepPlan) -> Tensor:
        """Return what the replica subtracts of a span; the harder the less it is trusted."""
        if arrival.pull is not None:
            self._distances.note(exchange.span, arrival.distance_squared)
            return arrival.pull
        weights, center = self._weights_sent(exchange, step_plan), exchange.center.weights
        seen, pull = arrival.seen, self._pull[exchange.span]
        if seen is None:
            seen = self._trusted(weights, exchange)
        sent = None if seen is weights else self._distance_squared(exchange, weights)
        squares = self._rule.measured_pull(seen, center, arrival.tally, out=pull)
        self._distances.note(exchange.span, squares if sent is None else sent)
        f = self._dynamic_weights.distrust_at(exchange.span.start)
        return pull.add_(weights - center, alpha=f) if f else pull

    def _follow(self, step_plan: StepPlan) -> None:
        """Move the center, and become a copy of it, but for steps since the message."""
        for exchange in step_plan.join:
            if self._rule.sends is Sends.PROGRESS:
                weights = self.flat.weights[exchange.span]
                self._distances.note(exchange.span, self._distance_squared(exchange, weights))
        self._commit(step_plan)
        with self._parts.measure("replica_update"):
            for exchange in step_plan.join:
                weights = self.flat.weights[exchange.span]
                before = weights.clone() if self._moves is not None else None
                if self._rule.sends is Sends.GRADIENT or exchange in step_plan.begin:
                    weights.copy_(exchange.center.weights)
                else:
                    # x <- c + (x - what was sent): steps since the message stay.
                    weights.sub_(self._sent[exchange.span]).add_(exchange.center.weights)
                if exchange.center.buffers.numel():
                    self.flat.buffers.copy_(exchange.center.buffers)
                if self._moves is not None and before is not None:
                    self._moves.append((exchange.span, before.sub_(weights)))

    def keep(self) -> None:
        """Remember what exchanges do to the replica from here on, for ``undo_``."""
        self._moves = []

    def undo_(self) -> None:
        """Undo what exchanges did since ``keep``; local steps since then stay."""
        for span, move in self._moves or ():
            self.flat.weights[span].add_(move)
        self._moves = None

    def _commit(self, step_plan: StepPlan) -> None:
        with self._parts.measure("center_update"):
            for exchange in step_plan.join:
                exchange.commit()

    def _distance_squared(self, exchange: Exchange, weights: Tensor) -> float:
        scratch = self._pull[exchange.span]
        return squared_distance(weights, exchange.center.weights, scratch=scratch)

    @property
    def distance_squared(self) -> float:
        """Squared distance to the center, seen at the last exchange of each span."""
        return self._distances.total()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the inner optimizer, if there is one."""
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)

    def become(self, weights: Tensor, buffers: Tensor) -> None:
        """Become a copy of the center, and forget gradients that were under way."""
        with self._parts.measure("replica_update"):
            self.flat.weights.copy_(weights)
            self.flat.buffers.copy_(buffers)
            self._drop_gradients()

    def start_over(self, weights: Tensor, buffers: Tensor) -> None:
        """Become a copy of the center as a new replica does, without any memory of what was.

        Args:
            weights: of the center, shape [num_parameters].
            buffers: of the center, shape [num_buffers].
        """
        self.undo_()
        self.become(weights, buffers)
        if self._optimizer is not None:
            self._optimizer = self._make_optimizer([self.flat.weights])
        self._distances = Distances()
        self._dynamic_weights = DynamicWeights(is_on=self._dynamic_weights.is_on)

    def _drop_gradients(self) -> None:
        """Forget gradients that were under way, and the samples behind them."""
        self.flat.gradients.zero_()
        self._num_sent, self._num_dropped = {}, self._num_seen
        self._reached_sent, self._reached_before = {}, tuple(self.flat.num_reached)

    def copy_first_(self, partners: Partners, *, is_first: bool) -> bool:
        """Become the replica of the first of those that share one; return whether it was another.

        Only weights tell: each has buffers of its own, the statistics of its own batches.

        Raises:
            ExchangeError: somebody went away or took too long; all is as it was.
        """
        own = io.BytesIO()
        if is_first:
            non_trainable = as_tensors(self.flat.non_trainable.own())
            optimizer = copied_to_cpu(self._optimizer_state())
            torch.save({**optimizer, "untrained": non_trainable}, own)
        content = partners.bytes_of_first(own.getvalue(), is_first=is_first)
        others = partners.copy_first_([self.flat.weights, self.flat.buffers], is_first=is_first)
        if not is_first:
            first = torch.load(io.BytesIO(content), weights_only=True)
            self.flat.non_trainable.load(first["untrained"])
            self._load_optimizer(first)
        return others[0]

    def _optimizer_state(self) -> dict[str, Any]:
        """Return what the inner optimizer remembers, as it is, and whether by parameter."""
        if self._optimizer is None:
            return {"optimizer": {}}
        return {
            "optimizer": self._optimizer.state_dict(),
            "is_by_parameter": is_by_parameter(self._optimizer, self.flat.parameters),
        }

    def _load_optimizer(self, state: Mapping[str, Any], *, copies: bool = True) -> None:
        """Take over what ``_optimizer_state`` returned."""
        if self._optimizer is None or not state["optimizer"]:
            return
        # The user's own, of an attached loop, is the one there is.
        if self.flat.num_reached and "is_by_parameter" in state:
            tensors = self.flat.parameters if state["is_by_parameter"] else [self.flat.weights]
            self._optimizer = self._make_optimizer(tensors)
        load_state(self._optimizer, state["optimizer"], copies=copies)

    def tensors(self) -> dict[str, Any]:
        """Return what is large in the state, as it is: it changes with the next step."""
        return {
            "weights": self.flat.weights.detach(),
            "buffers": self.flat.buffers.detach(),
            "gradients": self.flat.gradients.detach(),
            **self._optimizer_state(),
        }

    def state_dict(self, copied: Callable[[Any], Any] = copied_to_cpu) -> dict[str, Any]:
        """Return all that this replica needs to go on.

        Args:
            copied: returns nested dicts and lists with copies of all tensors.
        """
        return {
            **copied(self.tensors()),
            "untrained": {name: view_of(a) for name, a in self.flat.non_trainable.own().items()},
            "distances": self._distances.state(),
            "trust": self._dynamic_weights.state(),
            "num_seen": self._num_seen,
            "num_sent": dict(self._num_sent),
        }

    def load_state_dict(self, state: dict[str, Any], *, copies: bool = True) -> None:
        """Take over what ``state_dict`` returned; without ``copies`` for good."""
        self.flat.weights.copy_(state["weights"])
        self.flat.buffers.copy_(state["buffers"])
        self.flat.gradients.copy_(state["gradients"])
        self.flat.non_trainable.load(state.get("untrained", {}))  # earlier checkpoints have none
        self._load_optimizer(state, copies=copies)
        self._distances.load(state["distances"])
        self._dynamic_weights.load(state["trust"])
        self._num_seen, self._num_sent = state["num_seen"], dict(state["num_sent"])
        self._num_dropped = self._num_seen
