"""Metrics of a center on the test set, and the score that compares centers.

The score is for the best center, early stopping and the plateau schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raydl.config import EvaluationConfig
from raydl.config.run import LOWER_IS_BETTER
from raydl.core.progress import Progress

_BY_DEFAULT = EvaluationConfig()
AVERAGED = "averaged_"
"""Begins the names of the metrics of a mean of centers; see ``raydl.core.center_average``."""


@dataclass(frozen=True)
class Evaluated:
    """The center of a round was scored on the test set."""

    progress: Progress
    """Progress of the run when the snapshot was taken."""
    metrics: dict[str, float]
    predicted: tuple[int, ...] = ()
    """Predicted class of each example; empty if the task has no classes."""
    problem: str = ""
    """A sentence about a metric that is NaN or infinite, at the first such score."""
    weights: np.ndarray | None = None
    """Weights of the center, shape [num_parameters], if it may be the best one to keep."""
    buffers: np.ndarray | None = None
    """Float buffers, shape [num_buffers], together with the weights."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """Non-trainable state of the snapshot, together with the weights."""

    def without_center(self) -> Evaluated:
        """Return the score without the center, which takes little memory."""
        return dataclasses.replace(self, weights=None, buffers=None, non_trainable={})


def metric_of(metrics: Mapping[str, float], evaluation: EvaluationConfig = _BY_DEFAULT) -> str:
    """Return the name of the metric that compares centers.

    Args:
        metrics: metrics of a center.
        evaluation: settings; without ``metric`` it is the accuracy, or the loss if there is none,
            of the mean of several centers if that is scored.
    """
    kind = "accuracy" if "accuracy" in metrics else "loss"
    return evaluation.metric or (AVERAGED + kind if evaluation.average else kind)


def score_of(metrics: Mapping[str, float], evaluation: EvaluationConfig = _BY_DEFAULT) -> float:
    """Return the score of a center, higher is better: its metric, or minus one to be minimized.

    A missing value or NaN is worse than any number.

    Args:
        metrics: metrics of the center.
        evaluation: settings, which name the metric and its better direction.
    """
    name = metric_of(metrics, evaluation)
    is_min = evaluation.mode == "min" or (evaluation.mode == "auto" and name in LOWER_IS_BETTER)
    value = metrics.get(name, math.nan)
    score = -value if is_min else value
    return -math.inf if math.isnan(score) else score
