"""Weak scaling with runs that are not trained."""

import json

import pytest
from comparisons import FakeFit, figures_of

from raydl.cli import comparing
from raydl.config import TrainConfig
from raydl.errors import NonFiniteLossError
from raydl.tools.weak_scaling import WeakScaling, measure


def speeds(workers, speed):
    return {("sync-easgd", workers): figures_of(speed=speed)}


def workers_of(config):
    return config.method.name, config.scaling.num_workers


def test_the_efficiency_is_the_speed_per_worker_compared_with_the_first_row(tmp_path):
    fit = FakeFit(speeds(2, 1) | speeds(4, 1.5) | speeds(8, 2), key=workers_of)
    status, rows = measure(WeakScaling(workers="2,4,8", out=str(tmp_path)), fit=fit)
    assert status == 0
    assert [row["efficiency"] for row in rows] == [1, 0.75, 0.5]
    assert json.loads((tmp_path / "weak_scaling.json").read_text())["rows"] == rows


def test_every_run_has_the_same_steps_and_only_the_workers_differ(tmp_path):
    fit = FakeFit(key=lambda config: (config.training.steps, config.scaling.num_workers))
    measure(WeakScaling(workers="1,2", out=str(tmp_path)), fit=fit)
    assert fit.done == [(300, 1), (300, 2)]


def test_a_number_of_workers_that_fails_does_not_end_the_measurement_and_is_repeated(
    tmp_path, capsys
):
    scaling = WeakScaling(workers="1,2,4", out=str(tmp_path))
    first = FakeFit({("sync-easgd", 2): NonFiniteLossError("w1", 7, float("nan"))}, key=workers_of)
    status, rows = measure(scaling, fit=first)
    assert (status, [row["workers"] for row in rows]) == (1, [1, 4])
    assert "2 worker(s): failed: the loss became nan at local step 7" in capsys.readouterr().out
    again = FakeFit(key=workers_of)
    status, rows = measure(scaling, fit=again)
    assert (status, again.done, len(rows)) == (0, [("sync-easgd", 2)], 3)


def test_the_command_prints_a_table_of_the_complete_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("raydl.tools.runs.train", FakeFit(speeds(2, 1.5), key=workers_of))
    monkeypatch.setattr("raydl.tools.runs._check_inputs", lambda config: None)
    assert comparing.weak_scaling(["--workers", "1,2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "75%" in printed
    assert f"{tmp_path}/weak_scaling.json" in printed


@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_worker_is_one_row_in_this_process_or_in_another(tmp_path, workers):
    scaling = WeakScaling(workers=workers, out=str(tmp_path), base=TrainConfig())
    _, [row] = measure(scaling, fit=FakeFit())
    assert (row["workers"], row["efficiency"]) == (1, 1)
