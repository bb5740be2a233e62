"""Conditions that end a run, and its best center, with all parts in Ray actors.

Either end is a vote of the driver's; one is shown in rounds, the other by messages.
"""

import json

import pytest

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.config import CheckpointConfig, EvaluationConfig, OptimizerConfig, TrainingConfig
from raydl.run.evaluate import score_run
from raydl.storage import Storage

pytestmark = pytest.mark.cluster


@pytest.fixture
def fit(cluster, tmp_path):
    """Train a small network on synthetic pictures with two workers; return its folder's result."""

    def train(method, **settings):
        raydl.Trainer(
            "mlp",
            "synthetic:960",
            method=method,
            scaling=raydl.ScalingConfig(num_workers=2),
            evaluation=EvaluationConfig(every_samples=480),
            run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
            **settings,
        ).fit()
        return json.loads((tmp_path / "run/result.json").read_text())

    return train


def test_a_run_ends_at_its_accuracy_and_its_best_center_is_kept(fit, tmp_path):
    result = fit(
        "sync-easgd",
        # Far more epochs than needed: a busy machine scores seldom.
        training=TrainingConfig(epochs=5000, stop_at_accuracy=0.9),
        checkpoint=CheckpointConfig(keep_best=True),
    )
    assert result["ended_because"].startswith("reached accuracy ")
    assert result["samples"] < 5000 * 960
    assert score_run(str(tmp_path / "run"), best=True)["accuracy"] == result["best"]["accuracy"]
    assert result["best"]["accuracy"] >= 0.9


def test_a_center_that_does_not_improve_cuts_the_rate_and_finally_ends_the_run(fit, tmp_path):
    result = fit(
        "async-easgd",
        training=TrainingConfig(epochs=5000, patience=4),
        optimizer=OptimizerConfig(lr=1e-12, lr_schedule="plateau", patience=1, warmup=0.0),
    )
    assert result["ended_because"].startswith("no better accuracy than")
    checkpoint, _ = CheckpointStore(Storage(str(tmp_path / "run")), keep=9).read()
    assert checkpoint.state["num_cuts"] >= 1
