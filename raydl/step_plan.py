"""What a local step has to do with exchanges: the words that replica and transport share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raydl.center import Center, Mirror
from raydl.rules import Tally


@dataclass(frozen=True)
class Header:
    """A few numbers that travel with a message and are summed with it.

    In a synchronous round every rank sees the same sums, so all take the same decision with
    no message of its own. All fields describe the time since the last message.
    """

    stop: float = 0.0
    """Votes to end the run after this round."""
    regroup: float = 0.0
    """Votes to leave this generation after this round."""
    checkpoint: float = 0.0
    """Votes to keep the state as it is after this round."""
    lr_cut: float = 0.0
    """Votes to cut the learning rate once more after this round."""
    num_samples: float = 0.0
    """Samples whose gradients are in this message, since the last one of the same span."""
    loss_sum: float = 0.0
    """Sum of the losses of ``loss_samples`` samples."""
    loss_samples: float = 0.0
    """Samples behind ``loss_sum``: all up to the step before this one."""
    distance: float = 0.0
    """Squared distance to the center at the exchange before."""
    step_s: float = 0.0
    """Seconds per local step in the round before, waiting not counted."""
    waited_s: float = 0.0
    """Seconds waited for exchanges in the round before."""
    elapsed_s: float = 0.0
    """Seconds of training so far, by this worker's clock."""

    def __add__(self, other: Header) -> Header:
        return Header(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def numbers(self) -> list[float]:
        """Return the fields in their order; ``astuple`` takes forty times as long."""
        return list(vars(self).values())


class Exchange(Protocol):
    """What a replica needs of a transport: transactions with one span of the center."""

    @property
    def span(self) -> slice:
        """Which of the flat parameters travel."""
        ...

    @property
    def center(self) -> Center | Mirror:
        """The center's span as it was before this exchange, until :meth:`commit`."""
        ...

    def begin(self, weights: Tensor, buffers: Tensor, header: Header) -> None:
        """Send copies and return at once.

        Args:
            weights: what the rule sends, the span of it.
            buffers: float buffers, shape [num_buffers].
            header: the numbers that ride along.
        """
        ...

    def own_pull(self) -> tuple[Tensor, float] | None:
        """Return what the replica subtracts, and its squared distance to the center before.

        None: the replica finds both by the center as it was. Who writes the center's memory
        knows them from the moment at which the exchange began.
        """
        ...

    def as_seen(self, weights: Tensor) -> Tensor:
        """Return the weights that were sent as the center sees them: a codec may change them."""
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


class Partners(Protocol):
    """Workers that share one replica; see :class:`raydl.exchange.inner.GradientGroup`."""

    def mean_(
        self, gradients: Tensor, num_samples: int, is_reached: bytearray
    ) -> tuple[int, bytearray]:
        """Replace mean gradients by that of the joined batch; return its samples.

        Args:
            gradients: shape [num_parameters].
            num_samples: behind them.
            is_reached: by parameter, whether it has a gradient.

        Returns:
            The samples of all, and which parameters have a gradient of anyone.
        """
        ...

    def copy_first_(self, tensors: list[Tensor], *, is_first: bool) -> list[bool]:
        """Replace tensors by the first worker's; return which were others."""
        ...

    def bytes_of_first(self, data: bytes, *, is_first: bool) -> bytes:
        """Return the first worker's bytes."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """What a local step has to do with exchanges."""

    begin: tuple[Exchange, ...] = ()
    """Those that begin around this step."""
    join: tuple[Exchange, ...] = ()
    """Those that are waited for and take effect in this step."""
    header: Header = Header()
    """What travels with the last of those that begin."""
    overlap: bool = True
    """Weights travel while the gradient is computed, rather than before."""

    @classmethod
    def around(
        cls,
        exchanges: Sequence[Exchange],
        begin: Sequence[int],
        join: Sequence[int],
        *,
        make_header: Callable[[], Header],
        overlap: bool = True,
    ) -> StepPlan:
        """Return what a step has to do with some of a round's exchanges, by their numbers.

        Args:
            exchanges: of the round; its header travels with the last one.
            begin: those that begin around the step.
            join: those that take effect in it.
            make_header: asked only if the header travels.
            overlap: weights travel while the gradient is computed.
        """
        is_last = len(exchanges) - 1 in begin
        return cls(
            begin=tuple(exchanges[f] for f in begin),
            join=tuple(exchanges[f] for f in join),
            header=make_header() if is_last else Header(),
            overlap=overlap,
        )
