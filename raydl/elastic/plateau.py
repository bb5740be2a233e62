"""Cuts the learning rate when the center stands still, by torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raydl.config import OptimizerConfig
from raydl.core.callbacks import score_of


class Plateau:
    """Counts how often the learning rate was to be cut since the run began.

    The workers are told the count, not to cut: so it may be told again, after a generation that
    did not hear of it.

    Args:
        config: says the schedule; under any but ``plateau`` there are no cuts.
        num_cuts: those of earlier starts, whose best center is not known any more.
    """

    def __init__(self, config: OptimizerConfig, *, num_cuts: int = 0) -> None:
        self.num_cuts = num_cuts
        self._config = config
        self._decider = _decider(config) if config.lr_schedule == "plateau" else None

    def note_score(self, metrics: Mapping[str, float]) -> str:
        """Take in the scores of the center; return a sentence if they ask for a cut.

        The score is the accuracy, or the loss where there is none; any better score counts.
        """
        if self._decider is None:
            return ""
        rate = self._decider.optimizer.param_groups[0]
        rate["lr"] = 1.0  # torch would cut no further at some point
        self._decider.step(score_of(metrics))
        if rate["lr"] == 1.0:
            return ""
        self.num_cuts += 1
        name = "accuracy" if "accuracy" in metrics else "loss"
        return (
            f"the center stands still at {name} {metrics.get(name, math.nan):.4f}: from the next "
            f"round on the learning rate is multiplied by {self._config.gamma:g}, the cut number "
            f"{self.num_cuts}"
        )


def _decider(config: OptimizerConfig) -> ReduceLROnPlateau:
    # For a plateau alone: torch's first optimizer in a process imports its compiler, 0.8 s.
    return ReduceLROnPlateau(
        SGD([torch.zeros(1)], lr=1.0),
        mode="max",
        factor=config.gamma,
        patience=config.patience,
        # Torch's own threshold is a share of the best score, and wrong for a loss below 0.
        threshold_mode="abs",
        threshold=0.0,
    )
