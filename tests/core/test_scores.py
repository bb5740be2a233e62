"""The metric that compares centers is the task's accuracy or loss, or the one of the settings."""

import math

import pytest
from accuracies import accuracy_of
from ensembles import SHAPE, linear

from raydl.checkpoint.best import BestCenter, read_best
from raydl.config import EvaluationConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.callbacks import callbacks_of
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress
from raydl.core.scores import Evaluated, metric_of, score_of
from raydl.elastic.plateau import Plateau
from raydl.errors import ConfigError
from raydl.storage import Storage

BY_F1 = EvaluationConfig(metric="f1", mode="max")
BY_LOSS = EvaluationConfig(metric="loss")


def test_without_a_setting_accuracy_compares_centers_and_else_the_loss():
    assert metric_of({"loss": 1.0, "accuracy": 0.5, "f1": 0.4}) == "accuracy"
    assert metric_of({"loss": 1.0, "f1": 0.4}) == "loss"


@pytest.mark.parametrize(
    ("metric", "mode", "worse", "better"),
    [
        ("f1", "max", 0.4, 0.5),
        ("accuracy", "auto", 0.4, 0.5),
        ("loss", "auto", 0.5, 0.4),
        ("perplexity", "auto", 9.0, 8.0),
        ("error_rate", "min", 0.2, 0.1),
        ("loss", "max", 0.1, 0.2),
    ],
)
def test_the_mode_says_which_direction_is_better(metric, mode, worse, better):
    evaluation = EvaluationConfig(metric=metric, mode=mode)
    others = {"accuracy": 0.9} if metric != "accuracy" else {}
    low, high = ({metric: value, **others} for value in (worse, better))
    assert score_of(low, evaluation) < score_of(high, evaluation)
    for missing in ({}, {metric: math.nan}, others):
        assert score_of(missing, evaluation) == -math.inf


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"evaluation.mode has no 'maximum'; .*max"):
        EvaluationConfig(mode="maximum")


def test_a_direction_without_a_metric_is_refused():
    rule = "evaluation.mode must be auto without evaluation.metric, got min"
    with pytest.raises(ConfigError, match=rule):
        EvaluationConfig(mode="min")


def test_a_metric_of_a_users_task_needs_its_better_direction():
    rule = "evaluation.mode must be max or min, the better direction of f1, got auto"
    with pytest.raises(ConfigError, match=rule):
        EvaluationConfig(metric="f1")


def center(round, **metrics):
    return Evaluated(Progress(round=round, num_samples=10 * round), metrics)


def test_patience_follows_the_metric_of_the_settings():
    config = TrainConfig(training=TrainingConfig(patience=1), evaluation=BY_F1)
    (patience,) = callbacks_of(config)
    assert patience.evaluated(center(1, accuracy=0.5, loss=1.0, f1=0.3)) is None
    assert patience.evaluated(center(2, accuracy=0.4, loss=1.1, f1=0.4)) is None
    sentence = patience.evaluated(center(3, accuracy=0.9, loss=0.1, f1=0.4))
    assert sentence == "no better f1 than 0.4000 in the last 1 evaluation"


def test_the_plateau_schedule_follows_the_metric_of_the_settings():
    config = OptimizerConfig(lr_schedule="plateau", patience=0)
    plateau = Plateau(config, evaluation=BY_LOSS)
    assert plateau.note_score({"accuracy": 0.5, "loss": 1.0}) == ""
    assert plateau.note_score({"accuracy": 0.4, "loss": 0.9}) == ""
    sentence = plateau.note_score({"accuracy": 0.9, "loss": 0.9})
    assert sentence.startswith("the center stopped improving at loss 0.9000")


def test_the_best_center_is_that_of_the_metric_of_the_settings(tmp_path):
    storage, flat = Storage(str(tmp_path)), FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes))
    best = BestCenter(storage, flat, evaluation=BY_F1)
    for round, (accuracy, f1) in enumerate([(0.9, 0.2), (0.5, 0.6), (0.95, 0.4)], 1):
        scored = accuracy_of(
            accuracy, round, weights=flat.weights.numpy(), buffers=flat.buffers.numpy()
        )
        scored.metrics["f1"] = f1
        if best.note_center(scored):
            best.write()
    assert read_best(storage)[1].progress.round == 2
