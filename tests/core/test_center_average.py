"""The mean of the newest centers is scored beside the center, and kept."""

import dataclasses
import json

import numpy as np
import pytest
from ensembles import Ensemble

from raydl import cli
from raydl.config import CheckpointConfig, EvaluationConfig, TrainConfig
from raydl.core.center import Snapshot
from raydl.core.center_average import CenterAverage
from raydl.core.progress import Progress
from raydl.core.scores import metric_of
from raydl.errors import ConfigError
from raydl.worker.evaluator import Evaluator


def center(round, value, buffer=0.0):
    return Snapshot(
        Progress(round=round),
        False,
        np.full(2, value, np.float32),
        np.full(1, buffer, np.float32),
        {},
        {},
    )


def means(setting, *centers):
    average = CenterAverage(setting)
    return [float(average.add(c).weights[0]) for c in centers], average


def test_lawa_is_the_mean_of_the_newest_centers_by_hand():
    found, average = means("lawa:3", *(center(i, v) for i, v in enumerate((1, 3, 5, 7), 1)))
    assert found == [1, 2, 3, 5]
    assert average.num_centers == 3


def test_ema_moves_a_part_of_the_way_to_each_center_by_hand():
    found, average = means("ema:0.75", *(center(i, v) for i, v in enumerate((4, 8, 9), 1)))
    assert found == [4, 5, 6]
    assert average.num_centers == 3


@pytest.mark.parametrize("setting", ["lawa:3", "ema:0.75"])
def test_a_run_that_goes_back_forgets_what_came_after(setting):
    found, average = means(setting, center(1, 1), center(5, 9), center(3, 2), center(4, 2))
    assert found[2:] == [2, 2]
    assert average.num_centers == 2


@pytest.mark.parametrize("setting", ["lawa:2", "ema:0.5"])
def test_running_statistics_are_averaged_and_the_centers_do_not_change(setting):
    first, second = center(1, 1, buffer=2.0), center(2, 3, buffer=4.0)
    average = CenterAverage(setting)
    average.add(first)
    mean = average.add(second)
    assert (mean.weights.tolist(), mean.buffers.tolist()) == ([2, 2], [3])
    assert mean.weights.dtype == np.float32
    assert mean.progress == second.progress
    assert (first.weights.tolist(), second.weights.tolist()) == ([1, 1], [3, 3])


@pytest.mark.parametrize(
    "setting", ["lawa:1", "lawa:x", "lawa", "ema:1", "ema:0", "mean:3", "", "ema:nan"]
)
def test_a_mean_that_is_none_is_refused_in_one_sentence(setting):
    with pytest.raises(ConfigError, match=r"^evaluation.average must be lawa:K with K of 2 or"):
        EvaluationConfig(average=setting)


def test_the_workers_do_not_score_a_mean():
    with pytest.raises(ConfigError, match=r"^evaluation.by must be evaluator with evaluation.av"):
        EvaluationConfig(average="lawa:3", by="workers")


def evaluator_of(**evaluation):
    config = TrainConfig(
        evaluation=EvaluationConfig(**evaluation), checkpoint=CheckpointConfig(keep_best=True)
    )
    ensemble = Ensemble(config, num_workers=1)
    return Evaluator(ensemble.job, ensemble.batches), ensemble.first


def moved(snapshot, round, scale):
    progress = dataclasses.replace(snapshot.progress, round=round)
    return dataclasses.replace(snapshot, progress=progress, weights=snapshot.weights * scale)


def test_the_score_of_the_mean_is_that_of_a_center_with_its_weights():
    evaluator, first = evaluator_of(average="lawa:2")
    plain, _ = evaluator_of()
    alone = evaluator.evaluate(moved(first, 1, 1.0))
    assert alone.metrics["averaged_loss"] == alone.metrics["loss"]
    both = evaluator.evaluate(moved(first, 2, 2.0))
    assert both.metrics["loss"] == plain.evaluate(moved(first, 2, 2.0)).metrics["loss"]
    assert both.metrics["averaged_loss"] == plain.evaluate(moved(first, 2, 1.5)).metrics["loss"]
    assert both.metrics["averaged_centers"] == 2


def test_the_best_center_is_a_mean_unless_another_metric_is_named():
    for metric, scale in (("", 1.5), ("averaged_loss", 1.5), ("loss", 2.0)):
        evaluator, first = evaluator_of(average="lawa:2", metric=metric)
        evaluator.evaluate(moved(first, 1, 1.0))
        evaluator._best = -np.inf
        kept = evaluator.evaluate(moved(first, 2, 2.0))
        assert np.allclose(kept.weights, first.weights * scale), metric


def test_runs_are_compared_by_the_mean_if_it_is_scored():
    metrics = {"loss": 1.0, "accuracy": 0.5, "averaged_accuracy": 0.6}
    assert metric_of(metrics, EvaluationConfig(average="ema:0.9")) == "averaged_accuracy"
    assert metric_of(metrics, EvaluationConfig()) == "accuracy"
    assert metric_of({"loss": 1.0}, EvaluationConfig(average="ema:0.9")) == "averaged_loss"


def test_a_run_scores_means_and_keeps_the_best_of_them(tmp_path, capsys):
    words = ["--epochs", "4", "--workers", "0", "--evaluation.average", "lawa:3"]
    words += ["--checkpoint.keep-best", "--run-dir", str(tmp_path)]
    assert cli.main(["train", *words]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["averaged_centers"] for row in result["evaluations"]] == [1, 2, 3, 3]
    best = max(row["averaged_accuracy"] for row in result["evaluations"])
    assert result["best"]["averaged_accuracy"] == best
    assert f"; the mean of 3 centers has accuracy {best:.2%}" in capsys.readouterr().out
    assert cli.main(["evaluate", str(tmp_path), "--best", "--data", "digits"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == best
    assert cli.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Best mean of centers: accuracy" in page


def test_a_metric_of_a_mean_needs_the_mean(tmp_path, capsys):
    words = ["--workers", "0", "--evaluation.metric", "averaged_accuracy"]
    assert cli.main(["train", *words, "--run-dir", str(tmp_path)]) == 2
    assert "evaluation.metric has no 'averaged_accuracy'" in capsys.readouterr().err
