"""The learning rate over a run: a function of the share of it that all workers have done."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from raydl.config import OptimizerConfig
from raydl.config.custom_code import load_own
from raydl.errors import ConfigError


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


def lr_at(config: OptimizerConfig, share_done: float, *, num_cuts: int = 0) -> float:
    """Return the learning rate at a share of the run.

    Args:
        config: resolved settings.
        share_done: share of the run that is done by all workers, 0..1.
        num_cuts: cuts of the rate so far, for the schedule ``plateau``.
    """
    assert config.lr is not None
    if ":" in config.lr_schedule:
        return config.lr * float(_own_schedule(config.lr_schedule)(share_done))
    factor = lr_factor(
        config.lr_schedule,
        share_done,
        warmup=config.warmup,
        milestones=config.milestone_shares,
        gamma=config.gamma,
        decay=config.decay,
    )
    return float(config.lr * factor * config.gamma**num_cuts)


@functools.cache
def _own_schedule(name: str) -> Callable[[float], float]:
    """Return the user's function of the share of the run, 0..1."""
    schedule: Callable[[float], float] = load_own("optimizer.lr_schedule", name)
    return schedule


def check_lr_schedule(config: OptimizerConfig) -> None:
    """Raise a ConfigError unless a user's own schedule gives factors of 0 or more."""
    if ":" not in config.lr_schedule:
        return
    own = _own_schedule(config.lr_schedule)
    for share in (0.0, 0.5, 1.0):
        try:
            factor = float(own(share))
        except Exception as error:
            raise ConfigError(
                "optimizer.lr_schedule",
                f"{config.lr_schedule} must return the factor of the learning rate at a share of "
                f"the run, but for {share} it raised {type(error).__name__}: {error}",
            ) from error
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(
                "optimizer.lr_schedule",
                f"{config.lr_schedule} must return 0 or more, but for {share} it gave {factor}",
            )
