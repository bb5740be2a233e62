"""The method of a run, with all its settings resolved.

A method is a *rule* (what an exchange computes) under a *strategy* (which exchanges happen when),
with a period and an inner optimizer. The named methods are in ``raydl.methods``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raydl.config import OptimizerConfig, TrainConfig
from raydl.core.codecs import Codec, parse_codec, side_by_side
from raydl.core.optimizers import OwnOptimizer, ignores_zero_gradients
from raydl.core.rules import Rule
from raydl.errors import ConfigError, ShapeError


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with all its settings resolved."""

    name: str
    rule: Rule
    strategy: str
    period: int
    """Local steps between exchanges; the initial value if the workers choose it."""
    finds_tuning: bool
    """Whether the workers choose period, delay and compression from measured times."""
    overlap: bool
    steps_by_speed: bool
    """Whether slower workers take fewer local steps; the fastest takes ``period``."""
    optimizer: OptimizerConfig
    """The user's optimizer settings, completed with the defaults of the method."""
    inner: OptimizerConfig
    """Optimizer of the workers; its momentum is 0 if the momentum is at the center."""
    compression: str = "none"
    """The codec of its messages; see ``raydl.core.codecs``."""
    fragments: int = 1
    """Parts of the parameters, each exchanged at another step of the period."""
    delay: int = 0
    """Local steps from the start of an exchange to its effect."""
    own_optimizer: OwnOptimizer | None = None
    """The user's optimizer function, which replaces the named optimizer."""
    has_custom_rule: bool = False
    """Whether the rule is a custom one, which is tried with the model first."""

    @property
    def is_sync(self) -> bool:
        """Whether all workers exchange at once."""
        return self.strategy == "sync"

    @property
    def has_local_steps(self) -> bool:
        """Whether replicas move between two exchanges, rather than collect gradients to send."""
        return self.rule.takes_steps

    def codec(self, compression: str) -> Codec:
        """Return a codec for its messages; see ``raydl.core.codecs.parse_codec``."""
        return side_by_side(parse_codec(compression), len(self.rule.lanes))

    @property
    def leaves_out(self) -> bool:
        """Whether a codec leaves out parts of messages for later ones; see ``ErrorFeedback``."""
        return not self.rule.ahead

    @property
    def may_leave_out(self) -> bool:
        """Whether its messages may leave out something for later ones, now or once it is tuned."""
        return self.leaves_out and (self.compression != "none" or self.finds_tuning)

    @property
    def needs_all_gradients(self) -> bool:
        """Whether an optimizer at the center would update a parameter without a gradient."""
        ignores_zeros = self.rule.steps_along_gradient and ignores_zero_gradients(
            self.inner, self.own_optimizer
        )
        return not self.rule.takes_steps and not ignores_zeros


def check_weights(
    model: str, parameters: Sequence[Tensor], config: TrainConfig, method: Method
) -> None:
    """Check that a method can exchange the parameters of a model.

    Args:
        model: name of the model.
        parameters: trained parameters, all of one dtype.
        config: settings of the run.
        method: method of the run.

    Raises:
        ShapeError: if their dtype or values do not permit it.
        ConfigError: if a fragment would have no parameter.
    """
    size, fragments = sum(p.numel() for p in parameters), method.fragments
    if method.rule.whole_tensors:  # a model with fewer tensors has fewer fragments by default
        fragments = config.exchange.fragments or 1
    if fragments > size:
        problem = f"must be at most the {size} parameters of model {model}, got {fragments}"
        raise ConfigError("exchange.fragments", problem)
    dtype = parameters[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ShapeError(model, f"must have float32 or float64 parameters, got {dtype}")
    compression = method.compression
    if dtype is torch.float64 and not (method.is_sync and compression == "none"):
        raise ShapeError(
            model,
            f"must have float32 parameters for method {config.method.name} with compression "
            f"{compression}, got {dtype}",
        )
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise ShapeError(model, "must begin with finite parameters, but some are NaN or infinite")
