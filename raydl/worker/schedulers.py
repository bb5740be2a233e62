"""Brings a learning-rate scheduler of torch to the step of the other workers.

Most schedulers count their own ``step()`` calls, and many compute a rate from the one before. So a
scheduler is brought to a step by the calls that it has missed.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)


def needs_scores(scheduler: Any) -> bool:
    """Return whether a scheduler's ``step()`` needs a score, as that of ``ReduceLROnPlateau``.

    Its rate depends on all scores before, so that it cannot be brought to a step.
    """
    parameters = inspect.signature(_inner(scheduler).step).parameters.values()
    required = (p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return any(required)


def count_of(scheduler: Any) -> int:
    """Return how many steps a scheduler has taken, besides that of its constructor."""
    scheduler = _inner(scheduler)
    if not hasattr(scheduler, "last_epoch") and hasattr(scheduler, "_schedulers"):
        return min(count_of(each) for each in scheduler._schedulers)  # a ChainedScheduler
    return int(getattr(scheduler, "last_epoch", 0))


def restart(scheduler: Any) -> None:
    """Give the optimizer the learning rates that a scheduler has computed last."""
    scheduler = _inner(scheduler)
    groups = scheduler.optimizer.param_groups
    for group, lr in zip(groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(torch.as_tensor(lr))
        else:
            group["lr"] = lr


def advance(scheduler: Any, count: int) -> None:
    """Take some steps of a scheduler at once.

    Args:
        scheduler: a scheduler of torch, or Accelerate's wrapper of one.
        count: number of steps.
    """
    scheduler = _inner(scheduler)
    with warnings.catch_warnings():
        # The optimizer has taken no step here: those of the others count.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(count):
            scheduler.step()


def follow(scheduler: Any, count: int) -> None:
    """Take some steps of a library's scheduler, or log that this one cannot be brought to a step.

    Args:
        scheduler: a scheduler of torch, or Accelerate's wrapper of one.
        count: number of steps.
    """
    if not needs_scores(scheduler):
        advance(scheduler, count)
        return
    _logger.warning(
        "%s depends on all scores before, so that the learning rate of this worker, which came "
        "late, may differ from that of the others",
        type(_inner(scheduler)).__name__,
    )


def _inner(scheduler: Any) -> Any:
    """Return the scheduler in Accelerate's wrapper, whose ``step()`` follows its optimizer."""
    return getattr(scheduler, "scheduler", scheduler)
