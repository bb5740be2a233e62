"""Rules: what an exchange sends, and how its result changes replica and center.

A rule uses no transport, no clock and no random numbers, so that one object serves every strategy.
All right-hand sides use the values before the step. The named methods, with their equations, are in
``raydl.methods``.

A message is one or more named vectors, its *lanes*, and named numbers, of which one is its weight.
The framework carries the messages (whole or in spans: fragments, shards), encodes them, sums them,
keeps what the rule names beside the center, and counts the samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from raydl.errors import ConfigError

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


def mix_buffers_(buffers: Tensor, total: Tensor, *, num_messages: int, num_workers: int) -> Tensor:
    """Do b <- b + (total - n*b) / p in place; ``total``, sum of n buffers, is overwritten.

    The buffers move towards the mean of the messages by the share of workers that sent one. If all
    workers exchange at once they become the mean.
    """
    total.sub_(buffers, alpha=num_messages)
    return buffers.add_(total, alpha=1 / num_workers)


@dataclass(frozen=True)
class Travelled:
    """What a replica has done, since its start or since a message."""

    samples: float = 0.0
    """What its samples count: their number, or what the loss is a mean over, such as labelled
    tokens (``raydl.tasks.Counter``)."""
    steps: int = 0
    """Local steps with samples."""
    rates: float = 0.0
    """Sum of the learning rates of these steps."""

    def __sub__(self, before: Travelled) -> Travelled:
        return Travelled(
            self.samples - before.samples, self.steps - before.steps, self.rates - before.rates
        )


@dataclass(frozen=True)
class Message:
    """What a replica sends of one span, as ``Rule.compose`` returns it."""

    lanes: Mapping[str, Tensor]
    """A vector, shape [n], for each lane that travels (``Rule.lanes_at``); not changed by anyone
    until the exchange has ended."""
    weight: float = 1.0
    """What the message counts in the sum, at least 0."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """A number for each of ``Rule.numbers``; they are summed as the lanes are."""


@dataclass(frozen=True)
class Now:
    """What both sides of an exchange know of it."""

    num_workers: int
    """Workers that train now (p)."""
    share_of_round: float = 1.0
    """Local steps of this round / those of a whole round, in [0, 1]: below 1 where samples run out,
    as in the last round of a run. Progress is in proportion to it; momentum would not be."""
    staleness: int = 0
    """Messages of others that moved the center since this worker received it; 0 if all workers
    exchange at once."""


@dataclass(frozen=True)
class Letter:
    """One message as the center decoded it."""

    lanes: Mapping[str, Tensor]
    """By lane, its vector, shape [n]; may be overwritten."""
    weight: float


@dataclass
class Mail:
    """The messages that meet in one update of the center, as weighted sums."""

    sums: Mapping[str, Tensor]
    """By lane that travelled, the sum of the messages, each times its weight, shape [n]; may be
    overwritten."""
    count: int
    """Messages in the sums: p if all workers exchange at once, else 1."""
    weight: float
    """The sum of their weights; not 0."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By name, the sum of the numbers, each times the weight of its message."""
    letters: Sequence[Letter] | None = None
    """Each message, in the order of the ranks, for a rule without ``sums``."""

    def each(self) -> Sequence[Letter]:
        """Return the messages one by one, in the order of the ranks.

        Raises:
            ConfigError: if the rule has not asked for them.
        """
        if self.letters is None:
            problem = "asks for each message, so it must set sums = False (docs/algorithms.md)"
            raise ConfigError("method.name", problem)
        return self.letters

    def total(self, lane: str) -> Tensor:
        """Return the weighted sum of a lane, shape [n]; it may be overwritten."""
        return self.sums[lane]

    def mean(self, lane: str) -> Tensor:
        """Return the weighted mean of a lane, shape [n], in the memory of its sum: ask once."""
        return self.sums[lane].div_(self.weight)

    def mean_number(self, name: str) -> float:
        """Return the weighted mean of a number."""
        return self.numbers[name] / self.weight


@dataclass(frozen=True)
class Moment:
    """What the length of a round may depend on: the same for all workers."""

    period: int
    """``method.period``."""
    lr: float
    """Learning rate at the start of the round."""
    peak_lr: float
    """``optimizer.lr``."""
    is_warming_up: bool = False
    """Whether the rate is still in its warm-up."""
    num_workers: int = 1
    """Workers that train now (p)."""


@dataclass
class State:
    """What a rule keeps beside one span of the center; checkpoints hold it."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    """By the names in ``Rule.shared``, shape [n], at first zeros."""
    numbers: dict[str, float] = field(default_factory=dict)
    """By the names in ``Rule.shared_numbers``, at first 0."""
    step_along_: Callable[[Tensor], None] | None = None
    """Steps the user's optimizer along a gradient, shape [n], at the center of a rule whose
    replicas take no steps."""

    def __getitem__(self, name: str) -> Tensor:
        return _named(self.vectors, name, "shared")


@dataclass
class ReplicaSpan:
    """One span of a replica, as a rule sees it."""

    x: Tensor
    """Its weights, shape [n]."""
    gradient: Tensor
    """Sum of the gradients of all batches since the last message, each times what it counts, of a
    rule whose replicas take no steps; shape [n]."""
    since: Travelled = Travelled()
    """What it has done since the last message."""
    lr: float = 0.0
    """Learning rate of its newest step."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """What it keeps between messages, by the names in ``Rule.keeps``, shape [n]; at first zeros."""
    x_sent: Tensor | None = None
    """Its weights when the message was composed, shape [n]; None: no step was taken since."""
    inner: Mapping[str, Tensor] = field(default_factory=dict)
    """The vectors of its optimizer's state by the names in ``Rule.inner``, shape [n]; zeros before
    its first step. What ``land_`` changes there is the optimizer's state from then on."""
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    """The lanes of its newest message as the receivers decoded them, when it lands, for a rule
    with ``keeps`` or ``inner``."""

    def __getitem__(self, name: str) -> Tensor:
        return _named(self.vectors, name, "keeps")


def _named(vectors: Mapping[str, Tensor], name: str, attribute: str) -> Tensor:
    """Return a vector that a rule names in an attribute.

    Raises:
        ConfigError: if it does not name it.
    """
    if name not in vectors:
        problem = f"asks for {name!r}, which it does not name in {attribute}: {[*vectors]}"
        raise ConfigError("method.name", problem)
    return vectors[name]


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

    The defaults are those of a rule that sends progress: the replica takes local steps, sends
    D = c - x, and then follows the center. It needs ``merge_`` alone.

    Attributes:
        lanes: names of the vectors of a message.
        numbers: names of the numbers of a message, beside its weight.
        lane_rounds: by lane, in every how many rounds it travels, if not in each; with uncompressed
            messages of a synchronous method.
        sums: False: the center sees each message (``Mail.each``). They are gathered then, which
            costs p - 1 messages and the memory of p.
        keeps: names of vectors that each replica keeps between messages.
        inner: names of vectors in the state of the optimizer of the local steps, such as
            ``exp_avg`` of Adam, which the rule reads or changes.
        shared: names of vectors beside the center.
        shared_numbers: names of numbers beside the center.
        ahead: see ``AheadRule``; its replicas subtract ``pull`` and keep their own weights.
        takes_steps: False: see ``GradientRule``; the user's optimizer is then at the center
            (``State.step_along_``).
        compression: default codec of the messages; see ``raydl.core.codecs``.
        may_compress: whether the messages bear another codec.
        feedback_decay: share of what a codec has left out that the next message takes along, in
            [0, 1]; at 1 nothing is lost.
        fragments: default number of fragments; see ``exchange.fragments``.
        delay: default number of local steps from the start of an exchange to its effect.
        whole_tensors: whether fragments end where a parameter tensor ends.
        needs_plain_sgd: whether plain SGD, without momentum, has to take the local steps.
        strategy: default strategy: ``sync``, ``async``, ``hogwild`` or ``round_robin``.
        period: default number of local steps between exchanges.
        name: name of a method of ``raydl.methods``.
        source: where its equations are from.
        local_step: defaults of the local step.
        has_momentum_at_center: whether the user's momentum is at the center (the master), not at
            the replicas.
        steps_along_gradient: False: what the optimizer at the center steps along is no gradient. It
            is not clipped, and may move a parameter that has no gradient.
        overlap: whether a message that is composed ahead travels while the gradient is computed.
        steps_by_speed: whether slower workers always take fewer local steps.
    """

    lanes: tuple[str, ...] = ("progress",)
    numbers: tuple[str, ...] = ()
    lane_rounds: Mapping[str, int] = MappingProxyType({})
    sums: bool = True
    keeps: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    shared_numbers: tuple[str, ...] = ()
    ahead: bool = False
    takes_steps: bool = True
    compression: str = "none"
    may_compress: bool = True
    feedback_decay: float = 1.0
    fragments: int = 1
    delay: int = 0
    whole_tensors: bool = False
    needs_plain_sgd: bool = False
    strategy: str = "sync"
    period: int = 10
    name: str = ""
    source: str = ""
    local_step: LocalStep = LocalStep()
    has_momentum_at_center: bool = False
    steps_along_gradient: bool = True
    overlap: bool = True
    steps_by_speed: bool = False

    @classmethod
    def sentence(cls) -> str:
        """Return the first sentence of its docstring."""
        return (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return the message of a replica. Changes nothing but ``out``: the exchange may fail.

        Args:
            replica: its span.
            center: as this worker last received it, shape [n].
            state: what is beside that center; empty in methods in which the center is elsewhere
                (those with messages).
            out: by lane that travels now, memory for a vector, shape [n].
        """
        return Message({"progress": torch.sub(center, replica.x, out=out["progress"])})

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Update the center, shape [n], in place with the messages."""
        raise NotImplementedError

    def land_(self, replica: ReplicaSpan, center: Tensor, state: State, now: Now) -> None:
        """Update the replica in place, after the center has moved.

        The default follows the center, and keeps the steps since the message was composed.
        """
        if replica.x_sent is None:
            replica.x.copy_(center)
        else:
            replica.x.sub_(replica.x_sent).add_(center)

    def tilt_(self, gradient: Tensor, replica: ReplicaSpan, state: State) -> None:
        """Change the mean gradient of a batch, shape [n], in place before a local step."""

    def pull(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> Tensor:
        """Return what the replica subtracts after its local step, shape [n], if sent ``ahead``.

        Args:
            replica: its weights as sent, shape [n].
            center: before it moves, shape [n].
            now: of the exchange.
            out: memory for the result, shape [n].
        """
        raise NotImplementedError

    def measured_pull(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> float:
        """Write the result of ``pull`` into ``out``; return the squared distance of the two.

        All tensors have shape [n]; see ``pull``.
        """
        squares = squared_distance(replica, center, scratch=out)
        pull = self.pull(replica, center, now, out=out)
        if pull is not out:  # a rule need not use out
            out.copy_(pull)
        return squares

    def exchange_(self, replica: Tensor, center: Tensor, now: Now, *, out: Tensor) -> float:
        """Update the center in place with one replica, if one process can access both.

        For rules that send their weights ahead, and nothing else.

        Args:
            replica: weights to send, shape [n]; not changed.
            center: shape [n].
            now: of the exchange.
            out: receives the update that the replica subtracts after its local step, shape [n].

        Returns:
            The squared distance of the two before the update.
        """
        squares = self.measured_pull(replica, center, now, out=out)
        mail = Mail({self.lanes[0]: replica.clone()}, count=1, weight=1.0)
        self.merge_(center, mail, State(), now)
        return squares

    @property
    def sends_weights_alone(self) -> bool:
        """Whether a message is the replica's weights, and nothing is kept beside the center."""
        return self.ahead and not self.numbers and not self.has_state

    @property
    def has_state(self) -> bool:
        """Whether anything is kept beside the center."""
        return bool(self.shared or self.shared_numbers) or not self.takes_steps

    def period_at(self, moment: Moment) -> int:
        """Return the local steps of the next round of a synchronous method, at least 1."""
        return moment.period

    def checked_period(self, moment: Moment) -> int:
        """Return ``period_at`` of a moment.

        Raises:
            ConfigError: if it is no whole number of at least 1.
        """
        period: Any = self.period_at(moment)
        is_number = isinstance(period, Integral) and period is not True  # True equals 1
        if not is_number or period < 1:
            raise ConfigError(
                "method.name",
                f"{type(self).__name__}.period_at() must return a whole number of at least 1, got "
                f"{period!r} for {moment}",
            )
        return int(period)

    @property
    def varies_period(self) -> bool:
        """Whether the length of a round depends on the learning rate or the workers."""
        return type(self).period_at is not Rule.period_at

    @property
    def tilts(self) -> bool:
        """Whether it changes the gradients of local steps."""
        return type(self).tilt_ is not Rule.tilt_

    def lanes_at(self, round: int) -> tuple[str, ...]:
        """Return the lanes that travel in a round, counted from 0."""
        return tuple(
            lane for lane in self.lanes if (round + 1) % self.lane_rounds.get(lane, 1) == 0
        )

    def lanes_in(self, message: Message) -> tuple[str, ...]:
        """Return the lanes that a message has, in the order of ``lanes``."""
        return tuple(lane for lane in self.lanes if lane in message.lanes)

    def lanes_of(self, values: Tensor, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return the lanes of a message whose lanes follow each other in one vector.

        Args:
            values: shape [num_lanes * n].
            names: lanes of the message; empty: all.
        """
        names = names or self.lanes
        return dict(zip(names, values.view(len(names), -1), strict=True))

    def joined(self, message: Message) -> Tensor:
        """Return the lanes of a message one after the other, shape [num_lanes * n].

        One lane is returned as it is.
        """
        lanes = [message.lanes[name] for name in self.lanes_in(message)]
        return lanes[0] if len(lanes) == 1 else torch.cat(lanes)


class AheadRule(Rule):
    """A rule that sends the weights before a local step; it needs ``pull`` and ``merge_``.

    The messages travel while the gradient is computed. A codec encodes their difference to the
    center, and what it leaves out is part of the next difference.
    """

    lanes = ("weights",)
    ahead = True

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return x."""
        return Message({"weights": replica.x})


class GradientRule(Rule):
    """A rule whose replicas take no steps, but send the sum of their gradients.

    The sum of n * g over the batches since the last message weighs the sum of n, what the batches
    count; the mean of a lane is thus the gradient of the mean loss.
    """

    lanes = ("gradient",)
    takes_steps = False

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return the sum of n * g, which weighs n."""
        gradient = out["gradient"].copy_(replica.gradient)
        return Message({"gradient": gradient}, weight=replica.since.samples)

    def land_(self, replica: ReplicaSpan, center: Tensor, state: State, now: Now) -> None:
        """Do x <- c."""
        replica.x.copy_(center)


def with_equal_arrivals(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return states of ``async-diloco`` at parts of one span as if equally many steps were in s.

    The span has one count, that of the part with the fewest. The sums of the others are scaled to
    it, so that every average s/n stays as it was; where a part has no steps, the momentum goes
    without what the others have in s. States of other rules do not change.
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
