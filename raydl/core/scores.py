"""The score that compares centers: for the best center, early stopping and the plateau schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raydl.config import EvaluationConfig
from raydl.config.run import LOWER_IS_BETTER

_BY_DEFAULT = EvaluationConfig()


def metric_of(metrics: Mapping[str, float], evaluation: EvaluationConfig = _BY_DEFAULT) -> str:
    """Return the name of the metric that compares centers.

    Args:
        metrics: metrics of a center.
        evaluation: settings; without ``metric`` it is the accuracy, or the loss if there is none.
    """
    return evaluation.metric or ("accuracy" if "accuracy" in metrics else "loss")


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
