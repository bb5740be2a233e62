"""Cuts the learning rate when the center stops improving, by torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raydl.config import EvaluationConfig, OptimizerConfig
from raydl.core.scores import metric_of, score_of
from raydl.core.torch_import import without_compiler


class Plateau:
    """Counts the cuts of the learning rate since the run began.

    Workers receive the count of cuts, not an order to cut. So the count can be sent again when a
    generation ends before it arrives.

    Args:
        config: the optimizer's settings. Only the schedule ``plateau`` cuts.
        num_cuts: cuts of earlier starts of the run. Their best score is not kept.
        evaluation: settings, which name the metric that compares centers.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        *,
        num_cuts: int = 0,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        self.num_cuts = num_cuts
        self._config = config
        self._evaluation = evaluation or EvaluationConfig()
        self._scheduler: ReduceLROnPlateau | None = None
        if config.lr_schedule == "plateau":
            self._scheduler = ReduceLROnPlateau(
                without_compiler(SGD)([torch.zeros(1)], lr=1.0),
                mode="max",
                factor=config.gamma,
                patience=config.patience,
                # Torch's default threshold is a share of the best score: wrong for a loss below 0.
                threshold_mode="abs",
                threshold=0.0,
            )

    def note_score(self, metrics: Mapping[str, float]) -> str:
        """Record the metrics of the center; return a sentence if they cause a cut.

        Any better score is an improvement.
        """
        if self._scheduler is None:
            return ""
        rate = self._scheduler.optimizer.param_groups[0]
        rate["lr"] = 1.0  # torch stops cutting at a very small rate
        self._scheduler.step(score_of(metrics, self._evaluation))
        if rate["lr"] == 1.0:
            return ""
        self.num_cuts += 1
        name = metric_of(metrics, self._evaluation)
        return (
            f"the center stopped improving at {name} {metrics.get(name, math.nan):.4f}: from the "
            f"next round on the learning rate is multiplied by {self._config.gamma:g}, cut number "
            f"{self.num_cuts}"
        )
