"""``raydl list``, ``logs`` and ``stop`` with runs in this process."""

import json
import re
import threading
import time

import pytest

import raydl
from raydl import cli

BOUND_S = 60


def trainer(folder, *, epochs, model="mlp"):
    return raydl.Trainer(
        model,
        "synthetic:64",
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(epochs=epochs, batch_size=8),
        run=raydl.RunConfig(run_dir=str(folder), progress="none"),
    )


@pytest.fixture
def endless_run(tmp_path):
    """A run that trains in a thread until it is stopped."""
    folder, results = tmp_path / "runs/endless", []
    run = trainer(folder, epochs=10**6, model="origins:model")
    thread = threading.Thread(target=lambda: results.append(run.fit()), daemon=True)
    thread.start()
    deadline = time.monotonic() + BOUND_S
    while not is_training(folder):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield folder, thread, results
    cli.main(["stop", str(folder)])
    thread.join(BOUND_S)


def is_training(folder):
    try:
        return json.loads((folder / "status.json").read_text())["state"] == "training"
    except (OSError, ValueError):
        return False


def test_a_run_is_listed_and_stop_ends_it_with_a_checkpoint(endless_run, tmp_path, capsys):
    folder, thread, results = endless_run
    trainer(tmp_path / "runs/done", epochs=2).fit()
    (tmp_path / "runs/other").mkdir()
    assert cli.main(["list", str(tmp_path / "runs")]) == 0
    _, done, running = capsys.readouterr().out.splitlines()
    assert re.match(r"done +finished +2\.0 +128 ", done)
    assert re.match(r"endless +training +1 ", running)
    assert cli.main(["stop", str(folder)]) == 0
    assert "the run stops after this round, with a checkpoint" in capsys.readouterr().out
    thread.join(BOUND_S)
    assert results[0].stopped_by == "raydl stop"
    assert list(folder.glob("checkpoints/*/manifest.json"))
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped by raydl stop"
    assert cli.main(["stop", str(folder)]) == 2
    assert "has ended (stopped by raydl stop): there is nothing to stop" in capsys.readouterr().err


def test_logs_follows_the_events_of_a_run_to_its_end(endless_run, capsys):
    folder, _, _ = endless_run
    following = threading.Thread(target=cli.main, args=(["logs", str(folder), "--follow"],))
    following.start()
    assert cli.main(["stop", str(folder)]) == 0
    following.join(BOUND_S)
    assert not following.is_alive()
    output = capsys.readouterr().out
    lines = [
        line
        for line in output.splitlines()
        if re.match(r"\[\d+:\d\d:\d\d\] [\d,]+ samples: ", line)
    ]
    assert any("generation 1" in line for line in lines)
    assert any("raydl stop: stopping after this round" in line for line in lines)
    assert len(lines) == len(set(lines))


def test_list_reports_a_folder_without_runs(tmp_path, capsys):
    assert cli.main(["list", str(tmp_path)]) == 0
    assert f"no run is in {tmp_path}" in capsys.readouterr().out
    assert cli.main(["list", str(tmp_path / "none")]) == 0
