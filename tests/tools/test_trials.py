"""Trials of Ray Tune are elastic runs: workers are replaced, a scheduler ends weak trials."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from checkpoints import make_checkpoint
from clusters import actor_pids
from s3_server import s3_server, use_test_credentials

import raydl
from raydl.checkpoint.store import CheckpointStore
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
from raydl.run.progress_reporter import Silent
from raydl.run.view import EventLog
from raydl.storage import Storage, open_filesystem
from raydl.tools.report.facts import read_run
from raydl.tools.runs import with_settings

QUIET = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:ray")
NUM_TRIALS = 4
MOST_EPOCHS = 40
"""Scores take some epochs on a busy machine: the first must arrive before the last epoch."""


@pytest.mark.cluster
@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.slow
def test_a_scheduler_ends_weak_trials_whose_workers_are_lost_and_replaced(
    cluster, four_cpus, tmp_path
):
    from ray import tune

    plan = tmp_path / "plan.yaml"
    fault = {"fault": "kill", "target": "rank 0", "at": "round 12"}
    plan.write_text(yaml.safe_dump({"faults": [fault]}))
    config = TrainConfig(
        data="digits",
        model="origins:model",  # its steps sleep, so that a trial lasts long enough to be ended
        scaling=ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        training=TrainingConfig(epochs=10**6, batch_size=32),  # the scheduler ends it
        optimizer=OptimizerConfig(lr_schedule="constant", warmup=0.0),
        evaluation=EvaluationConfig(every_epochs=1),
        checkpoint=CheckpointConfig(every_epochs=1, every_s=None),
        run=RunConfig(fault_plan=str(plan)),
    )
    rates = [0.1, 3e-2, 1e-4, 1e-6]  # later rates are worse, and their trials are ended
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
    # In the generation without w0, or, if w2 was not ready yet, in the next one.
    joined = re.compile(r"generation \d+: .*w2 joins")
    assert any(joined.match(line) for lines in logged for line in lines), logged
    assert best.checkpoint is not None
    assert not list(tmp_path.rglob("config.json")), "Tune copied a run that was being written"
    deadline = time.monotonic() + 60
    while left := actor_pids(four_cpus, "WorkerActor"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.processes  # the import of Ray Tune takes seconds
@pytest.mark.filterwarnings(*QUIET)
def test_a_trial_reserves_no_part_of_a_cpu():
    trial = raydl.tune.trainable(TrainConfig())
    assert trial._resources.required_resources == {"memory": 1.0}
    assert trial._resources.head_cpus == 0.0


def test_a_trial_prints_what_its_run_waits_for(capsys):
    log = EventLog(Silent())
    with raydl.tune.events_printed():
        log.event("0 of 2 workers are ready")
    log.event("not in a trial")
    assert capsys.readouterr().out == "0 of 2 workers are ready\n"


def test_parameters_are_settings_by_their_dotted_names():
    config = with_settings(TrainConfig(), {"optimizer.lr": 0.5, "method.name": "diloco"})
    assert (config.optimizer.lr, config.method.name) == (0.5, "diloco")
    with pytest.raises(ConfigError, match="has 'lr', which is no setting; give dotted names"):
        with_settings(TrainConfig(), {"lr": 0.5})


def test_a_run_name_shared_by_all_trials_is_refused():
    config = TrainConfig(run=RunConfig(name="first"))
    with pytest.raises(
        ConfigError, match=r"run\.name cannot be set for trials, .*, got first; name"
    ):
        raydl.tune.trainable(config)


@pytest.mark.parametrize(
    ("storage_path", "expected"),
    [
        (None, "/session/trial_3"),
        ("/shared/runs", "/shared/runs/trial_3"),
        ("s3://b/runs", "s3://b/runs/trial_3"),
        ("s3://b/runs?endpoint_override=h:9", "s3://b/runs/trial_3?endpoint_override=h:9"),
    ],
)
def test_a_trial_keeps_its_run_below_the_storage_path(storage_path, expected):
    config = TrainConfig(run=RunConfig(storage_path=storage_path))
    assert raydl.tune._root_of(config, "/session/trial_3") == expected


@pytest.mark.processes  # the import of Ray Tune takes seconds
@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("form", ["{}", "file://{}", "file://{}?token=secret"])
def test_a_new_checkpoint_is_reported_once_from_a_folder_or_a_uri(form, tmp_path):
    from raydl.ray_backend.ray_tune import TrialReports

    root = form.format(tmp_path / "run")
    reports = TrialReports(root)
    assert reports.new_checkpoint() is None
    CheckpointStore(Storage(root)).write(make_checkpoint(8))
    checkpoint = reports.new_checkpoint()
    with checkpoint.as_directory() as folder:
        assert (Path(folder) / "center.safetensors").is_file()
    assert reports.new_checkpoint() is None


@pytest.mark.processes
@pytest.mark.filterwarnings(*QUIET)
def test_a_checkpoint_in_an_object_store_is_reported(monkeypatch, tmp_path):
    """Tune copies it to the storage of the search, and needs its file system to do so."""
    from raydl.ray_backend.ray_tune import TrialReports

    use_test_credentials(monkeypatch, tmp_path)
    with s3_server() as url:
        address = url.removeprefix("http://")
        query = f"?scheme=http&endpoint_override={address}&allow_bucket_creation=true"
        uri = f"s3://runs/trial_3{query}"
        open_filesystem(uri)[0].create_dir("runs")
        CheckpointStore(Storage(uri)).write(make_checkpoint(8))
        checkpoint = TrialReports(uri).new_checkpoint()
        copy = Path(checkpoint.to_directory(tmp_path / "copy"))
    assert (copy / "center.safetensors").is_file()


@pytest.mark.processes
@pytest.mark.filterwarnings(*QUIET)
def test_a_trial_that_is_started_again_after_its_run_is_complete_reports_the_last_score_again(
    monkeypatch, tmp_path
):
    from ray import tune

    reports = []
    monkeypatch.chdir(tmp_path)
    context = SimpleNamespace(get_trial_id=lambda: "trial_1")
    monkeypatch.setattr(tune, "get_context", lambda: context)
    monkeypatch.setattr(
        tune, "report", lambda values, checkpoint: reports.append((values, checkpoint))
    )
    config = TrainConfig(
        data="digits",
        model="mlp",
        scaling=ScalingConfig(num_workers=0),
        training=TrainingConfig(epochs=2),
    )
    for _ in range(2):
        raydl.tune.trainable(config)({})
    *_, (last, _), (again, checkpoint) = reports
    assert again == pytest.approx(last)
    assert again["epoch"] == 2
    assert checkpoint is not None
