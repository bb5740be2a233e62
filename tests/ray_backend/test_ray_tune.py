"""Trials of Ray Tune are elastic runs: workers are lost, a scheduler ends the weak ones."""

import time

import pytest
import yaml
from clusters import actors

import raydl
from raydl.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.errors import ConfigError
from raydl.tools.report.facts import read_run

QUIET = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:ray")
NUM_TRIALS = 8
MOST_EPOCHS = 40
"""On a busy machine a score takes some epochs: the first must come before the last one."""


@pytest.mark.cluster
@pytest.mark.filterwarnings(*QUIET)
def test_a_scheduler_ends_weak_trials_whose_workers_are_lost_and_replaced(
    cluster, four_cpus, tmp_path
):
    from ray import tune

    plan = tmp_path / "plan.yaml"
    fault = {"fault": "kill", "target": "rank 0", "at": "round 12"}
    plan.write_text(yaml.safe_dump({"faults": [fault]}))
    config = TrainConfig(
        data="digits",
        model="origins:model",  # whose steps sleep: a trial lasts long enough to be ended
        scaling=ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        training=TrainingConfig(epochs=10**6, batch_size=32),  # the scheduler ends it
        optimizer=OptimizerConfig(lr_schedule="constant", warmup=0.0),
        evaluation=EvaluationConfig(every_epochs=1),
        checkpoint=CheckpointConfig(every_epochs=1, every_s=None),
        run=RunConfig(fault_plan=str(plan)),
    )
    rates = [0.2, 0.1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6]  # a later one is worse, and ended
    results = tune.Tuner(
        raydl.tune.trainable(config),
        param_space={"optimizer.lr": tune.grid_search(rates)},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            max_concurrent_trials=2,
            scheduler=tune.schedulers.ASHAScheduler(
                time_attr="epoch", max_t=MOST_EPOCHS, grace_period=2, reduction_factor=2
            ),
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    assert results.num_errors == 0
    assert len(results) == NUM_TRIALS
    best = results.get_best_result()
    assert best.metrics["accuracy"] > 0.9
    assert best.config["optimizer.lr"] >= 1e-2
    epochs = [result.metrics["epoch"] for result in results]
    assert max(epochs) >= MOST_EPOCHS
    assert min(epochs) < MOST_EPOCHS, "no trial was ended early"
    logged = [[e.sentence for e in read_run(r.metrics["run"]).history.events] for r in results]
    assert any(line.startswith("fault 1: kill") for lines in logged for line in lines)
    assert any(line.startswith("generation 3: ") for lines in logged for line in lines)
    assert best.checkpoint is not None
    deadline = time.monotonic() + 60
    while left := actors(four_cpus, "WorkerActor"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.processes  # the import of Ray Tune takes seconds
@pytest.mark.filterwarnings(*QUIET)
def test_parameters_are_settings_by_their_dotted_names():
    with_parameters = raydl.tune._with_parameters
    config = with_parameters(TrainConfig(), {"optimizer.lr": 0.5, "method.name": "diloco"})
    assert (config.optimizer.lr, config.method.name) == (0.5, "diloco")
    with pytest.raises(ConfigError, match="has 'lr', which is no setting; give dotted names"):
        with_parameters(TrainConfig(), {"lr": 0.5})


@pytest.mark.processes  # the import of Ray Tune takes seconds
@pytest.mark.filterwarnings(*QUIET)
def test_a_name_that_all_trials_would_share_is_refused():
    config = TrainConfig(run=RunConfig(name="first"))
    with pytest.raises(
        ConfigError, match=r"run\.name cannot be set for trials, .*, got first; name"
    ):
        raydl.tune.trainable(config)
