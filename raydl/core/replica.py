"""A replica: a model on one flat buffer, its inner optimizer, and its local step.

The local step is the same for all methods; only the transport behind
``raydl.core.exchange.Exchange`` differs.

A worker that rejoins after a failure is far from the other replicas. With dynamic weights the
center pulls it strongly, and it moves the center little:

    u       log of the distance between replica and center at an exchange; by messages, to the
            center that the worker received last
    a       u minus the median of the preceding u
    f       0 for a <= log 2, 1 for a >= log 8, linear between
    x <- x - (alpha*(1 - f) + f) * (x - c) ; c <- c + alpha*(1 - f)*(x - c)

f = 0 is elastic averaging; with f = 1 the replica restarts at the center, which does not move. c is
the center that the message meets, to which the worker's copy may be old. This is our reading of
Xu and Carr, arXiv 2409.09242. We know their idea (weights from the trend of the log distance), not
their formulas: the score f and its limits are ours.
"""

from __future__ import annotations

import io
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.config import TrainingConfig
from raydl.core.center import as_tensors, copied_to_cpu, load_state, set_lr
from raydl.core.exchange import Arrival, Exchange, Header, Partners, StepPlan, toward_center
from raydl.core.flat import FlatModel, is_finite
from raydl.core.inner_state import read_state, write_state
from raydl.core.optimizers import is_by_parameter, no_gradient_text, split_by_parameter
from raydl.core.rules import Message, ReplicaSpan, Rule, Travelled, squared_distance
from raydl.core.tensor_files import view_of
from raydl.data.samples import Batch, num_samples_of, parts_of
from raydl.data.target import Key
from raydl.errors import ExchangeError, NonFiniteError, StepError
from raydl.metrics import TimeParts
from raydl.tasks import Counter, Task, in_precision


class Distances:
    """Squared distances of one replica to the center, by the start of each span.

    Fragments may change from one round to the next. A new span replaces all spans that start
    within it.
    """

    def __init__(self) -> None:
        self._squares: dict[int, float] = {}

    def note(self, span: slice, squares: float) -> None:
        """Store the squared distance of a span."""
        within = range(span.start, span.stop)
        others = {start: value for start, value in self._squares.items() if start not in within}
        self._squares = {**others, span.start: squares}

    def total(self) -> float:
        """Return the squared distance of all spans together."""
        return sum(self._squares.values())

    def state(self) -> dict[int, float]:
        """Return the state for a checkpoint."""
        return dict(self._squares)

    def load(self, state: Mapping[int, float]) -> None:
        """Load a state that ``state`` returned."""
        self._squares = dict(state)


_LOW, _HIGH = math.log(2), math.log(8)
_MAX_DISTANCES, _MIN_DISTANCES = 8, 4


class DistanceTrend:
    """Follows one replica's distance to one span of the center."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=_MAX_DISTANCES)

    def distrust(self, distance: float) -> float:
        """Store the distance at an exchange; return f, 0 (trusted) to 1.

        The first exchanges are trusted, since distances grow from zero in every run.
        """
        if distance <= 0:
            return 0.0
        log = math.log(distance)
        if len(self._logs) < _MIN_DISTANCES:
            self._logs.append(log)
            return 0.0
        usual = statistics.median(self._logs)
        # Store a jump as a small one, or the next jump would seem small in comparison.
        self._logs.append(min(log, usual + _LOW))
        return min(1.0, max(0.0, (log - usual - _LOW) / (_HIGH - _LOW)))

    def state_dict(self) -> dict[str, Any]:
        """Return the stored distances."""
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self._logs = deque(state["logs"], maxlen=_MAX_DISTANCES)


class DynamicWeights:
    """The trust in one replica at each span of the center, by the start of the span.

    Args:
        is_on: without dynamic weights the replica is always trusted.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._trends: dict[int, DistanceTrend] = {}
        self._distrust: dict[int, float] = {}

    def note_distance(self, start: int, distance: float) -> None:
        """Store the distance to a span at an exchange."""
        trend = self._trends.setdefault(start, DistanceTrend())
        self._distrust[start] = trend.distrust(distance)

    def distrust_at(self, start: int) -> float:
        """Return f at the newest exchange of a span, 0 (trusted) to 1."""
        return self._distrust.get(start, 0.0)

    def state(self) -> list[list[Any]]:
        """Return the stored distances of each span."""
        return [[start, trend.state_dict()] for start, trend in self._trends.items()]

    def load(self, state: list[list[Any]]) -> None:
        """Load a state that ``state`` returned, if dynamic weights are on."""
        for start, trend_state in state if self.is_on else ():
            self._trends[start] = DistanceTrend()
            self._trends[start].load_state_dict(trend_state)


_NO_EXCHANGE = StepPlan()
_DEFAULTS = TrainingConfig()
MakeGradient = Callable[[], tuple[Tensor, float]]
"""Adds to the gradients of the optimizer; returns the mean loss and how much the batch counts."""
Stepped = tuple[Tensor, Header | None]
"""The mean loss of the batch, and the header sums of the last exchange that the step joined."""


class Replica:
    """The parameters x_i of one worker, with the local step and its exchanges.

    Args:
        flat: the model on its device.
        task: computes the loss of a batch.
        rule: update rule of an exchange.
        make_optimizer: builds the inner optimizer over the flat weights.
        time_parts: measures the time parts.
        training: precision, and number of parts of a batch.
        has_dynamic_weights: whether a replica that is suddenly far from the center counts little;
            for rules that send weights ahead.
        needs_all_gradients: whether to refuse a gradient if the loss did not reach all parameters;
            for optimizers at the center that would update the others anyway.
        who: returns (worker id, local step), for error messages.
        labels: ``DataShape.labels`` of the data.
    """

    def __init__(
        self,
        flat: FlatModel,
        task: Task,
        *,
        rule: Rule,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        time_parts: TimeParts,
        training: TrainingConfig = _DEFAULTS,
        has_dynamic_weights: bool = False,
        needs_all_gradients: bool = False,
        who: Callable[[], tuple[str, int]] = lambda: ("", 0),
        labels: Key | None = None,
    ) -> None:
        self.flat = flat
        flat.watch_gradients()
        self._task = task
        self._rule = rule
        self._make_optimizer = make_optimizer
        self._optimizer = make_optimizer([self.flat.weights]) if rule.takes_steps else None
        self._parts = time_parts
        self._training = training
        self._needs_all_gradients = needs_all_gradients
        self._who = who
        self._dynamic_weights = DynamicWeights(is_on=has_dynamic_weights)
        self._pull = torch.empty_like(self.flat.weights)
        self._sent = torch.empty(0)
        self.counter = Counter(task, labels)
        """Says how much a batch counts."""
        self.batch_count = 0.0
        """How much the last batch counted, without those of partners."""
        self._travelled = Travelled()
        """Since the start; the values of the dicts are those when the message of a span began."""
        self._begun: dict[int, Travelled] = {}
        self._arrived: dict[int, Travelled] = {}
        self._kept_arrived: dict[int, Travelled] = {}
        self._dropped = Travelled()
        """When unsent gradients were last discarded."""
        self._vectors = {name: torch.zeros_like(flat.weights) for name in rule.keeps}
        """What the rule keeps, each of shape [num_parameters]."""
        self._lanes = self._lane_memory()
        self.exchanges: Sequence[Exchange] = ()
        """All exchanges of the present round, for a rule that changes gradients."""
        self._reached_before: tuple[int, ...] = tuple(flat.num_reached)
        self._reached_sent: dict[int, tuple[int, ...]] = {}
        self._moves: list[tuple[Tensor, Tensor]] | None = None
        """Since ``keep``: parts of weights and kept vectors, and what was subtracted from each."""
        self.num_steps = 0
        """Local steps taken, whether or not their exchanges succeeded."""
        self.partners: Partners | None = None
        """Workers that share this replica, or None."""
        self.alter: Callable[[Tensor], Tensor] = lambda message: message
        """Returns what is sent instead of a lane of a message; a planned fault may set it."""
        self._distances = Distances()

    def _lane_memory(self) -> dict[str, Tensor]:
        """Return memory for each lane of a message, shape [num_parameters]."""
        if len(self._rule.lanes) == 1 and not (self._rule.keeps or self._rule.inner):
            return {self._rule.lanes[0]: self._pull}  # free until the message has landed
        return {lane: torch.empty_like(self.flat.weights) for lane in self._rule.lanes}

    def step(self, batch: Batch, step_plan: StepPlan = _NO_EXCHANGE) -> Stepped:
        """Take one local step, with the exchanges that begin and complete in it.

        Returns:
            The mean loss of the batch (a detached scalar), and the header sums of the last
            exchange that completed, or None if there was none.

        Raises:
            ExchangeError: if an exchange failed. It changed neither replica nor center. The local
                step was taken without it; a gradient that was to be sent is discarded.
            StepError: if a message must not reach the center; it was not sent.
        """
        return self._step(lambda: self._gradient(batch), step_plan)

    def step_with_given_gradients(self, step_plan: StepPlan = _NO_EXCHANGE) -> Header | None:
        """Take one local step along the gradients that the parameters already have.

        The step counts as one sample. Returns the header sums and raises as ``step``.
        """

        def gradient() -> tuple[Tensor, float]:
            self._count(1.0)
            return self.flat.weights.new_zeros(()), 1.0

        return self._step(gradient, step_plan)[1]

    def _step(self, gradient: MakeGradient, step_plan: StepPlan) -> Stepped:
        if self._rule.ahead:
            loss, arrivals = self._send_then_step(gradient, step_plan)
        else:
            loss, arrivals = self._step_then_send(gradient, step_plan)
        for exchange in step_plan.join:
            self._arrived[exchange.span.start] = self._begun[exchange.span.start]
        return loss, arrivals[-1].sums if arrivals else None

    def _send_then_step(
        self, gradient: MakeGradient, step_plan: StepPlan
    ) -> tuple[Tensor, list[Arrival]]:
        """Step while the message of the start of the step is sent."""
        arrivals: list[Arrival] = []
        failure: ExchangeError | None = None
        try:
            # No code below changes the weights before the exchanges are joined.
            self.begin(step_plan)
            if not step_plan.overlap:
                arrivals = self._wait(step_plan)
        except ExchangeError as error:
            failure = error
        loss, count = gradient()
        if step_plan.overlap and failure is None:
            try:
                arrivals = self._wait(step_plan)
            except ExchangeError as error:
                failure = error
        if failure is not None:
            self._local_step(count)
            raise failure
        self._join(step_plan, arrivals, count=count)
        return loss, arrivals

    def _step_then_send(
        self, gradient: MakeGradient, step_plan: StepPlan
    ) -> tuple[Tensor, list[Arrival]]:
        """Step, then send, and land: follow the center."""
        loss, count = gradient()
        if self._rule.takes_steps:
            self._local_step(count)
        else:
            self._count_step(count)
        try:
            self.begin(step_plan)
            arrivals = self._wait(step_plan)
        except ExchangeError:
            if not self._rule.takes_steps:
                self._drop_gradients()
            raise
        self._land(step_plan, arrivals)
        return loss, arrivals

    def begin(self, step_plan: StepPlan) -> None:
        """Begin the exchanges of a plan; a later step may join them.

        Raises:
            ExchangeError: if an exchange cannot begin; no tensor has changed.
        """
        if not step_plan.begin:  # on a GPU a measurement takes time, also that of nothing
            return
        with self._parts.measure("device_device_parameters"):
            for exchange in step_plan.begin:
                self._send(exchange, step_plan)

    def _send(self, exchange: Exchange, step_plan: StepPlan) -> None:
        span = exchange.span
        header = step_plan.header if exchange is step_plan.begin[-1] else Header()
        if self._rule.takes_steps and exchange not in step_plan.join:
            # Keep the weights for the later step in which the exchange takes effect.
            if not self._sent.numel():
                self._sent = torch.empty_like(self.flat.weights)
            self._sent[span] = self.flat.weights[span]
        message = self._message(exchange, step_plan)
        lanes = {name: self.alter(lane) for name, lane in message.lanes.items()}
        message = replace(message, lanes=lanes)
        f = self._dynamic_weights.distrust_at(span.start)
        self._check_message(message, exchange, f)
        exchange.begin(message, self.flat.buffers, header, f)
        if not self._rule.takes_steps:
            # Gradients that were sent are no longer needed; later ones are for the next exchange.
            self.flat.gradients[span].zero_()
            self._reached_sent[span.start] = tuple(self.flat.num_reached)
        self._begun[span.start] = self._travelled

    def _message(self, exchange: Exchange, step_plan: StepPlan) -> Message:
        """Return the rule's message for a span; it is not changed until the exchange is joined."""
        span, center = exchange.span, exchange.center
        if self._dynamic_weights.is_on:
            weights = self._weights_sent(exchange, step_plan)
            self._dynamic_weights.note_distance(
                span.start, self._distance_squared(exchange, weights) ** 0.5
            )
        replica = self._view(span)
        replica.x = self._weights_sent(exchange, step_plan)
        out = {lane: self._lanes[lane][span] for lane in self._rule.lanes_at(step_plan.round)}
        return self._rule.compose(replica, center.weights, center.state, out)

    def _view(self, span: slice) -> ReplicaSpan:
        """Return a span of this replica as the rule sees it."""
        before = self._arrived.get(span.start, self._dropped)
        return ReplicaSpan(
            x=self.flat.weights[span],
            gradient=self.flat.gradients[span],
            since=self._travelled - before,
            lr=self._lr,
            vectors={name: vector[span] for name, vector in self._vectors.items()},
            inner=read_state(self._optimizer, self._rule.inner, self.flat.weights, span)
            if self._optimizer
            else {},
        )

    @property
    def _lr(self) -> float:
        """The learning rate of the inner optimizer, 0 without one."""
        return float(self._optimizer.param_groups[0].get("lr", 0.0)) if self._optimizer else 0.0

    def _count(self, samples: float) -> None:
        before = self._travelled
        self._travelled = replace(before, samples=before.samples + samples)

    def _count_step(self, count: float) -> None:
        self.num_steps += 1
        if not count:
            return
        before = self._travelled
        self._travelled = replace(before, steps=before.steps + 1, rates=before.rates + self._lr)

    def _check_message(self, message: Message, exchange: Exchange, distrust: float) -> None:
        """Raise a StepError if a message or the float buffers must not reach the center."""
        center, sent = exchange.center, {}
        for lane, values in message.lanes.items():  # only weights, one lane, are distrusted
            sent[lane] = toward_center(values, center.weights, distrust)
        if center.buffers.numel():
            sent["float buffers"] = self.flat.buffers
        for name, values in sent.items():
            if not is_finite(values):
                raise NonFiniteError(
                    *self._who(),
                    f"values in its {name} are NaN, infinite or beyond 1e19, so nothing was sent; "
                    f"lower optimizer.lr, or check the data of that step",
                )
        if self._needs_all_gradients and message.weight:
            before = self._reached_sent.get(exchange.span.start, self._reached_before)
            unreached = self.flat.unreached(before, exchange.span)
            if unreached:
                raise StepError(*self._who(), no_gradient_text(unreached))

    def _weights_sent(self, exchange: Exchange, step_plan: StepPlan) -> Tensor:
        """Return the weights at the beginning of an exchange."""
        is_within_step = exchange in step_plan.begin and exchange in step_plan.join
        return (self.flat.weights if is_within_step else self._sent)[exchange.span]

    def _wait(self, step_plan: StepPlan) -> list[Arrival]:
        """Wait for the exchanges that complete in this step."""
        if not step_plan.join:
            return []
        with self._parts.measure("device_device_parameters"):
            return [exchange.wait() for exchange in step_plan.join]

    def _gradient(self, batch: Batch) -> tuple[Tensor, float]:
        """Add the gradient at the present weights to the flat gradients.

        Returns:
            The mean loss, and how much the batch counts, including those of partners.
        """
        loss = self._own_gradient(batch)
        count = self.batch_count
        if self.partners is None:
            return loss, count
        try:
            with self._parts.measure("device_device_parameters"):
                own = self.flat.is_reached(self._reached_before)
                count, is_reached = self.partners.mean_(self.flat.gradients, count, own)
                self.flat.note_reached(is_reached)
        except ExchangeError:
            self._drop_gradients()
            raise
        return loss, count

    def _own_gradient(self, batch: Batch) -> Tensor:
        """Add the gradient of a batch; return its mean loss, and store how much it counts.

        A part of it without labels is left out: its mean loss would be 0/0.
        """
        self.batch_count = 0.0
        if num_samples_of(batch) == 0:  # the end of an epoch may leave no samples for a worker
            return self.flat.weights.new_zeros(())
        with self._parts.measure("forward_backward"):
            parts = parts_of(batch, self._training.microbatches, full=self._training.batch_size)
            counts = [self.counter.of(part) for part in parts]
            count = self.batch_count = sum(counts)
            if count == 0.0:
                return self.flat.weights.new_zeros(())
            # A gradient to send is a sum, so that ranks whose batches count less weigh less in
            # the mean.
            scale = 1.0 if self._rule.takes_steps else count
            losses = [
                self._backward(part, part_count / count, scale)
                for part, part_count in zip(parts, counts, strict=True)
                if part_count
            ]
            self.flat.rebind()
        self._count(count)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, part: Batch, share: float, scale: float) -> Tensor:
        """Add the gradient of a part of a batch; return the part's share of the mean loss."""
        with in_precision(self._training.precision, self.flat.weights.device):
            loss = self._task.loss(self.flat.model, part)
        mean = loss if share == 1.0 else loss * share
        (mean if scale == 1.0 else mean * scale).backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    def _local_step(self, count: float) -> None:
        """Step the inner optimizer, if the batch counts; without one, gradients accumulate."""
        self._count_step(count)
        if self._optimizer is None:
            return
        with self._parts.measure("replica_update"):
            if count and self._rule.tilts:
                for exchange in self.exchanges:
                    span = exchange.span
                    gradient = self.flat.gradients[span]
                    self._rule.tilt_(gradient, self._view(span), exchange.center.state)
            if count:
                self._optimizer_step(self._optimizer)
            self.flat.gradients.zero_()
            self._reached_before = tuple(self.flat.num_reached)

    def _optimizer_step(self, optimizer: Optimizer) -> None:
        """Step an optimizer; it skips parameters without a gradient, as in torch."""
        flat = self.flat
        if flat.gradients.numel():  # else the user's loop manages them
            flat.weights.grad = flat.gradients
        unreached = flat.unreached(self._reached_before)
        if not unreached:
            optimizer.step()
            return
        self._optimizer = split_by_parameter(optimizer, self._make_optimizer, flat.parameters)
        with flat.without_gradients_of(unreached):
            self._optimizer.step()

    def _join(self, step_plan: StepPlan, arrivals: list[Arrival], *, count: float) -> None:
        """Update replica and center, both from the weights that were sent."""
        if not step_plan.join:
            return self._local_step(count)
        with self._parts.measure("replica_update"):
            pulls = [
                (exchange, self._pull_of(exchange, arrival, step_plan))
                for exchange, arrival in zip(step_plan.join, arrivals, strict=True)
            ]
        self._local_step(count)
        with self._parts.measure("replica_update"):
            for exchange, pull in pulls:
                weights = self.flat.weights[exchange.span]
                weights.sub_(pull)
                if self._moves is not None:
                    self._moves.append((weights, pull.clone()))
        self._commit(step_plan)

    def _pull_of(self, exchange: Exchange, arrival: Arrival, step_plan: StepPlan) -> Tensor:
        """Return the update that the replica subtracts, larger the less it is trusted."""
        if arrival.pull is not None:
            self._distances.note(exchange.span, arrival.distance_squared)
            return arrival.pull
        weights, center = self._weights_sent(exchange, step_plan), exchange.center.weights
        f = self._dynamic_weights.distrust_at(exchange.span.start)
        sent, pull = arrival.seen, self._pull[exchange.span]
        if sent is None:
            sent = toward_center(weights, center, f)
        # The distance is that of the weights themselves, whatever was sent of them.
        true_squares = None if sent is weights else self._distance_squared(exchange, weights)
        squares = self._rule.measured_pull(sent, center, arrival.now, out=pull)
        self._distances.note(exchange.span, squares if true_squares is None else true_squares)
        return pull.add_(weights - center, alpha=f) if f else pull

    def _land(self, step_plan: StepPlan, arrivals: list[Arrival]) -> None:
        """Update the center, then the replica by it."""
        if not step_plan.join:
            return
        if self._rule.takes_steps:
            for exchange in step_plan.join:
                weights = self.flat.weights[exchange.span]
                self._distances.note(exchange.span, self._distance_squared(exchange, weights))
        self._commit(step_plan)
        with self._parts.measure("replica_update"):
            for exchange, arrival in zip(step_plan.join, arrivals, strict=True):
                self._land_span(exchange, arrival, step_plan)

    def _land_span(self, exchange: Exchange, arrival: Arrival, step_plan: StepPlan) -> None:
        span, center = exchange.span, exchange.center
        replica = self._view(span)
        replica.since = self._begun[span.start] - self._arrived.get(span.start, self._dropped)
        if self._rule.keeps or self._rule.inner:
            travelled = self._rule.lanes_at(step_plan.round)
            replica.sent = arrival.sent or {lane: self._lanes[lane][span] for lane in travelled}
        if self._rule.takes_steps and exchange not in step_plan.begin:
            replica.x_sent = self._weights_sent(exchange, step_plan)
        changed = [replica.x, *replica.vectors.values()]
        before = [tensor.clone() for tensor in changed] if self._moves is not None else []
        self._rule.land_(replica, center.weights, center.state, arrival.now)
        if self._optimizer and self._rule.inner:
            # Not undone with a failed round: local steps have changed it since, and what was
            # averaged does no harm when the round is repeated.
            write_state(self._optimizer, replica.inner, self.flat.weights, span)
        if center.buffers.numel():
            self.flat.buffers.copy_(center.buffers)
        if self._moves is not None:
            moves = zip(changed, before, strict=True)
            self._moves.extend((now, then.sub_(now)) for now, then in moves)

    def unsent_progress(self, exchanges: Sequence[Exchange], last_step: StepPlan) -> Tensor:
        """Return the progress since the messages of a round, shape [num_parameters].

        Args:
            exchanges: all exchanges of the round; their messages were sent.
            last_step: plan of the step whose exchanges failed; all others have completed.
        """
        progress = torch.zeros_like(self.flat.weights)
        for exchange in exchanges:
            has_failed = exchange in last_step.join
            sent = (
                self._weights_sent(exchange, last_step) if has_failed else exchange.center.weights
            )
            progress[exchange.span] = self.flat.weights[exchange.span] - sent
        return progress

    def keep(self) -> None:
        """Record the changes by exchanges from now on, for ``undo_``."""
        self._moves, self._kept_arrived = [], dict(self._arrived)

    def undo_(self) -> None:
        """Undo the changes by exchanges since ``keep``; local steps are kept."""
        if self._moves is None:
            return
        for tensor, move in self._moves:
            tensor.add_(move)
        self._moves, self._arrived = None, self._kept_arrived

    def _commit(self, step_plan: StepPlan) -> None:
        with self._parts.measure("center_update"):
            for exchange in step_plan.join:
                exchange.commit()

    def _distance_squared(self, exchange: Exchange, weights: Tensor) -> float:
        scratch = self._pull[exchange.span]
        return squared_distance(weights, exchange.center.weights, scratch=scratch)

    @property
    def distance_squared(self) -> float:
        """Squared distance to the center, at the last exchange of each span."""
        return self._distances.total()

    @property
    def has_rate(self) -> bool:
        """Whether its inner optimizer has a learning rate other than zero."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return any(float(group.get("lr", 1.0)) != 0 for group in groups)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the inner optimizer, if there is one."""
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)

    def become(self, weights: Tensor, buffers: Tensor) -> None:
        """Copy the center and discard unsent gradients."""
        with self._parts.measure("replica_update"):
            self.flat.weights.copy_(weights)
            self.flat.buffers.copy_(buffers)
            self._drop_gradients()

    def start_over(self, weights: Tensor, buffers: Tensor) -> None:
        """Copy the center and reset all other state, as in a new replica.

        Args:
            weights: weights of the center, shape [num_parameters].
            buffers: float buffers of the center, shape [num_buffers].
        """
        self.undo_()
        self.become(weights, buffers)
        if self._optimizer is not None:
            self._optimizer = self._make_optimizer([self.flat.weights])
        for vector in self._vectors.values():
            vector.zero_()
        self._distances = Distances()
        self._dynamic_weights = DynamicWeights(is_on=self._dynamic_weights.is_on)

    def _drop_gradients(self) -> None:
        """Discard unsent gradients, and what their samples count."""
        self.flat.gradients.zero_()
        self._arrived, self._dropped = {}, self._travelled
        self._reached_sent, self._reached_before = {}, tuple(self.flat.num_reached)

    def copy_first_(self, partners: Partners, *, is_first: bool) -> bool:
        """Copy the replica of the first partner; return whether the weights differed.

        Buffers are not compared: each partner has the statistics of its own batches.

        Raises:
            ExchangeError: if a partner was lost or timed out; nothing has changed.
        """
        own = io.BytesIO()
        if is_first:
            non_trainable = as_tensors(self.flat.non_trainable.own())
            optimizer = copied_to_cpu(self._optimizer_state())
            torch.save({**optimizer, "untrained": non_trainable}, own)
        content = partners.bytes_of_first(own.getvalue(), is_first=is_first)
        tensors = [self.flat.weights, self.flat.buffers, *self._vectors.values()]
        differed = partners.copy_first_(tensors, is_first=is_first)
        if not is_first:
            first = torch.load(io.BytesIO(content), weights_only=True)
            self.flat.non_trainable.load(first["untrained"])
            self._load_optimizer(first)
        return differed[0]

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, not copied, and which tensors it holds."""
        if self._optimizer is None:
            return {"optimizer": {}}
        return {
            "optimizer": self._optimizer.state_dict(),
            "is_by_parameter": is_by_parameter(self._optimizer, self.flat.parameters),
        }

    def _load_optimizer(
        self, state: Mapping[str, Any], *, num_elements: int | None = None, copies: bool = True
    ) -> None:
        """Load a state that ``_optimizer_state`` returned.

        Args:
            state: the state.
            num_elements: number of elements of the weights that it is of; None: all.
            copies: whether to copy its tensors.
        """
        if self._optimizer is None or not state["optimizer"]:
            return
        if num_elements is not None and num_elements < self.flat.num_parameters:
            self._optimizer = self._extended_optimizer(state, num_elements, copies=copies)
            return
        # The optimizer of a user's loop (without num_reached) is never replaced.
        if self.flat.num_reached and "is_by_parameter" in state:
            tensors = self.flat.parameters if state["is_by_parameter"] else [self.flat.weights]
            self._optimizer = self._make_optimizer(tensors)
        load_state(self._optimizer, state["optimizer"], copies=copies)

    def _extended_optimizer(
        self, state: Mapping[str, Any], num_elements: int, *, copies: bool
    ) -> Optimizer:
        """Return an optimizer with the state of one over the first elements of the weights.

        The other parameters have no state, as in torch before their first gradient.
        """
        first = self.flat.first_parameters(num_elements)
        is_split = state.get("is_by_parameter", False)
        earlier = self._make_optimizer(first if is_split else [self.flat.weights[:num_elements]])
        load_state(earlier, state["optimizer"], copies=copies)
        earlier = split_by_parameter(earlier, self._make_optimizer, first)
        optimizer = self._make_optimizer(self.flat.parameters)
        for parameter in first:
            if parameter in earlier.state:
                optimizer.state[parameter] = earlier.state[parameter]
        return optimizer

    def tensors(self) -> dict[str, Any]:
        """Return the large tensors of the state, not copied: the next step changes them."""
        return {
            "weights": self.flat.weights.detach(),
            "buffers": self.flat.buffers.detach(),
            "gradients": self.flat.gradients.detach(),
            "vectors": dict(self._vectors),
            **self._optimizer_state(),
        }

    def state_dict(self, copied: Callable[[Any], Any] = copied_to_cpu) -> dict[str, Any]:
        """Return the state from which this replica can be resumed.

        Args:
            copied: returns nested dicts, lists and tuples with copies of all tensors.
        """
        return {
            **copied(self.tensors()),
            "untrained": {name: view_of(a) for name, a in self.flat.non_trainable.own().items()},
            "distances": self._distances.state(),
            "trust": self._dynamic_weights.state(),
            "travelled": astuple(self._travelled),
            "arrived": {start: astuple(then) for start, then in self._arrived.items()},
        }

    def load_state_dict(self, state: dict[str, Any], *, copies: bool = True) -> None:
        """Load a state of ``state_dict``; without ``copies`` the optimizer keeps its tensors.

        Parameters that are trained only since the state was saved keep their present values.
        """
        flat, num_elements = self.flat, state["weights"].numel()
        flat.first_parameters(num_elements)  # raises an error if it is of another model
        flat.weights[:num_elements].copy_(state["weights"])
        untrained = state.get("untrained", {})  # not in older checkpoints
        buffers, others = flat.split_buffers(state["buffers"], untrained)
        flat.buffers.copy_(buffers)
        if flat.gradients.numel():  # else the user's loop has them
            flat.gradients.zero_()[:num_elements].copy_(state["gradients"])
        values = {**untrained, **others}
        flat.non_trainable.load({k: v for k, v in values.items() if k not in flat.unfrozen})
        self._load_optimizer(state, num_elements=num_elements, copies=copies)
        self._distances.load(state["distances"])
        self._dynamic_weights.load(state["trust"])
        for name, vector in self._vectors.items():
            if name in state.get("vectors", {}):  # else zeros: the method was another one
                vector.zero_()[:num_elements].copy_(state["vectors"][name])
        self._load_travelled(state)

    def _load_travelled(self, state: Mapping[str, Any]) -> None:
        if "travelled" in state:
            self._travelled = Travelled(*state["travelled"])
            arrived = state["arrived"].items()
            self._arrived = {start: Travelled(*then) for start, then in arrived}
        else:  # of an earlier version, which counted samples alone
            self._travelled = Travelled(state["num_seen"])
            self._arrived = {start: Travelled(n) for start, n in state["num_sent"].items()}
        self._dropped = self._travelled
