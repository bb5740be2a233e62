"""A run is one run in trackers, with increasing steps, even if it is killed or a tracker fails."""

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time

import disks
import numpy as np
import pytest

from raydl import cli
from raydl.config import RunConfig, TrainConfig
from raydl.errors import ConfigError, UnknownNameError
from raydl.metrics import trackers
from raydl.metrics.trackers import JsonLines, State, TrackerWriter

BOUND_S = 120
LOSS = "train/loss"


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def writer_of(folder):
    return TrackerWriter(JsonLines(folder), State(folder, "jsonl"))


def write(writer, *steps):
    for step in steps:
        writer.scalars({LOSS: step / 8}, num_samples=step)


def test_points_are_lines_by_tag(tmp_path):
    writer = writer_of(tmp_path)
    writer.scalars({LOSS: 0.5, "center/accuracy": float("nan")}, num_samples=8, unix_s=3.25)
    writer.close()
    line = {"samples": 8, "unix_s": 3.25, LOSS: 0.5, "center/accuracy": None}
    assert lines_of(tmp_path) == [line]


def test_a_start_continues_after_the_last_point_of_the_previous_one(tmp_path):
    write(writer_of(tmp_path), 8, 16, 24, 24)  # not closed, as if it was killed
    write(writer_of(tmp_path), 16, 24, 32, 40)
    assert [line["samples"] for line in lines_of(tmp_path)] == [8, 16, 24, 24, 32, 40]


def test_points_are_left_out_while_the_center_is_behind(tmp_path):
    writer = writer_of(tmp_path)
    write(writer, 8, 16, 24)
    writer.go_back(num_samples=12)
    write(writer, 12, 20, 28)
    assert [line["samples"] for line in lines_of(tmp_path)] == [8, 16, 24, 28]


def test_a_late_score_is_written_at_its_own_step(tmp_path):
    """It is the score of an earlier center than that of the newest record."""
    writer = writer_of(tmp_path)
    write(writer, 8, 16, 24)
    writer.scalars({"center/accuracy": 0.5}, num_samples=12)
    write(writer, 32)
    lines = lines_of(tmp_path)
    assert [line["samples"] for line in lines] == [8, 16, 24, 12, 32]
    assert lines[3]["center/accuracy"] == 0.5


def test_a_step_that_was_recorded_in_the_state_but_not_written_is_skipped(tmp_path):
    class Broken(JsonLines):
        def write(self, values, *, step, unix_s):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write(TrackerWriter(Broken(tmp_path), State(tmp_path, "jsonl")), 8)
    write(writer_of(tmp_path), 8, 16)
    assert [line["samples"] for line in lines_of(tmp_path)] == [16]


def test_a_damaged_state_is_replaced_by_a_new_one(tmp_path):
    (tmp_path / "tracker-jsonl.json").write_text('{"last_')
    assert State(tmp_path, "jsonl").last_step == -1


def test_a_state_that_a_full_disk_refuses_leaves_no_file(tmp_path):
    with disks.mounted(tmp_path / "disk", kib=64) as disk:
        state = State(disk, "jsonl")
        disks.fill(disk)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left on device"):
                state.save()
        assert [path.name for path in disk.iterdir()] == ["filled"]


def test_texts_are_written_once_they_are_flushed_and_events_are_collected(tmp_path):
    class Texts(JsonLines):
        written = []  # noqa: RUF012

        def write_text(self, name, markdown):
            self.written.append((name, markdown))

    writer = TrackerWriter(Texts(tmp_path), State(tmp_path, "jsonl"))
    writer.text("events", "it begins", num_samples=0)
    writer.text("events", "s3://KEY:SECRET@bucket is full", num_samples=8)
    writer.text("settings", "| a |", num_samples=0)
    writer.flush()
    writer.flush()
    events = "- it begins\n- s3://bucket is full\n"
    assert Texts.written == [("events", events), ("settings", "| a |")]


@pytest.mark.parametrize(
    ("names", "error", "sentence"),
    [
        ("tensorbord", UnknownNameError, "run.tracker"),
        ("tensorboard", ConfigError, "beside TensorBoard, which every run writes; leave it out"),
        ("jsonl,jsonl", ConfigError, "must name each tracker once, got jsonl,jsonl"),
        (
            "jsonl,wandb",
            ConfigError,
            r"needs wandb, .*; in a checkout .* pip install -e '\.\[wandb\]'",
        ),
    ],
)
def test_a_wrong_tracker_is_refused_in_one_sentence_before_the_run(
    names, error, sentence, monkeypatch
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=sentence):
        trackers.names_of(names)


@pytest.mark.parametrize("uri", [None, "", "sqlite:///runs.db"])
def test_mlflow_without_a_server_and_a_store_of_its_own_is_refused(uri, monkeypatch):
    """mlflow-skinny has no SQLAlchemy: it would record nothing and only log that."""
    installed = {"mlflow"}
    monkeypatch.setattr(
        trackers.importlib.util, "find_spec", lambda name: True if name in installed else None
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=r"server in MLFLOW_TRACKING_URI, or, .* mlflow$"):
        trackers.names_of("jsonl,mlflow")
    installed.add("sqlalchemy")
    assert trackers.names_of("jsonl,mlflow") == ("jsonl", "mlflow")
    installed.remove("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert trackers.names_of("jsonl,mlflow") == ("jsonl", "mlflow")


def test_the_option_names_any_number_of_trackers():
    assert trackers.names_of("none") == ()
    assert trackers.names_of("jsonl") == ("jsonl",)
    assert TrainConfig(run=RunConfig()).run.tracker == "none"


def train_command(folder, *options):
    return [
        "train", "--data", "synthetic:400", "--model", "mlp", "--workers", "0", "--run-dir",
        str(folder), "--run.progress", "plain", *options,
    ]  # fmt: skip


def test_a_run_writes_the_curves_of_tensorboard(tmp_path, capsys):
    assert cli.main(train_command(tmp_path / "run", "--epochs", "2", "--tracker", "jsonl")) == 0
    lines = lines_of(tmp_path / "run")
    steps = [line["samples"] for line in lines]
    assert steps == sorted(steps)
    assert steps[-1] == 800
    tags = set().union(*lines)
    assert {LOSS, "center/accuracy", "throughput/samples_per_s", "time/data_io"} <= tags


# the real libraries


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The environment of both libraries: they write files in a folder and need no server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")


def mlflow_runs():
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("raydl")
    return client, client.search_runs([experiment.experiment_id])


def steps_in_wandb(folder):
    """Return (run ids, steps of each start in order) of the offline files of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, starts = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        records = [Record.FromString(data) for data in records_of(path.read_bytes())]
        starts.append([r.history.step.num for r in records if r.HasField("history")])
        ids |= {r.run.run_id for r in records if r.HasField("run")}
    return ids, starts


def records_of(data, block=32_768, header=7):
    """Yield the records of a log of W&B, which has LevelDB's format after seven bytes."""
    at, record = header, b""
    while at + header <= len(data):
        left = block - at % block
        if left < header:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + header])
        if kind not in (
            1,
            2,
            3,
            4,
        ):  # whole, first, middle, last; else the program was killed there
            return
        record += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
def test_a_killed_run_that_is_resumed_is_the_same_run_in_trackers(tmp_path, offline):
    folder = tmp_path / "run"
    options = ["--tracker", "mlflow,wandb,jsonl", "--checkpoint.every-epochs", "20"]
    command = [sys.executable, "-m", "raydl", *train_command(folder, *options)]
    with subprocess.Popen([*command, "--epochs", "99999"], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + BOUND_S
        state = folder / "tracker-wandb.json"
        while not (list(folder.glob("checkpoints/*/manifest.json")) and state.exists()
                   and json.loads(state.read_text())["last_step"] > 12_000):  # fmt: skip
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    epochs = lines_of(folder)[-1]["samples"] // 400 + 100
    done = subprocess.run(
        [*command, "--epochs", str(epochs), "--resume"],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line["samples"] for line in lines_of(folder)]
    assert lines == sorted(lines)
    client, (run,) = mlflow_runs()
    steps = [point.step for point in client.get_metric_history(run.info.run_id, LOSS)]
    assert steps == sorted(set(steps))
    assert steps[-1] == epochs * 400
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["method.name"] == "sync-easgd"
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"settings-2.md", "events-2.md"} <= artifacts, "those of the second start"
    ids, starts = steps_in_wandb(folder)
    assert len(ids) == 1
    assert len(starts) == 2
    steps = list(itertools.chain(*starts))
    assert steps == sorted(steps)
    assert steps[-1] == epochs * 400


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
def test_a_tracker_that_is_down_does_not_affect_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    environment = {**os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "raydl", *train_command(tmp_path / "run", "--tracker", "mlflow")],
        capture_output=True, text=True, timeout=BOUND_S, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "the curves in mlflow cannot be written (MLflow: " in output
    assert "training continues, with a retry every" in output
    assert "Traceback" not in output


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
def test_pictures_reach_the_trackers(tmp_path, offline):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("mlflow", "wandb"):
        writer = trackers.maker_of(name, folder, {"method.name": "sync-easgd"})(True)
        writer.image("center/predictions", np.zeros((4, 4, 3), np.uint8), num_samples=8)
        writer.close()
    client, (run,) = mlflow_runs()
    assert client.list_artifacts(run.info.run_id, "images")
    assert list(folder.glob("wandb/offline-run-*/files/media/images/center/predictions*.png"))
