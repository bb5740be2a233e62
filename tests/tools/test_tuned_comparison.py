"""A comparison gives each method the same trials, and its files have every curve."""

import csv
import dataclasses
import re

import pytest
from comparisons import FakeFit, figures_of

from raydl.config import RunConfig, ScalingConfig, TrainConfig, TrainingConfig
from raydl.errors import ConfigError, NonFiniteLossError
from raydl.tools.comparison import Comparison, compare, runner
from raydl.tools.comparison.figures import make_rows
from raydl.tools.comparison.page import comparison_page
from raydl.tools.comparison.report import MOST_LINES
from raydl.tools.comparison.settings import plan, trials_of

BASE = TrainConfig(
    training=TrainingConfig(samples=100, batch_size=10), scaling=ScalingConfig(num_workers=2)
)


def comparison_of(tmp_path, methods="sync-easgd,async-easgd", **settings):
    out = str(tmp_path / "out")
    return Comparison(methods=methods, base=BASE, target=0.9, out=out, **settings)


def rate_and_seed(config):
    return config.method.name, config.optimizer.lr, config.training.seed


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(runner, "draw", lambda runs, rows, target, out: None)
    monkeypatch.setattr(runner, "comparison_page", lambda shared, runs, rows, target: "")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_without_trials_every_combination_of_the_settings_is_one(tmp_path):
    comparison = comparison_of(tmp_path, tune="lr=0.1:0.2, period=4:auto")
    assert trials_of(comparison) == [
        {"optimizer.lr": 0.1, "method.period": 4},
        {"optimizer.lr": 0.1, "method.period": "auto"},
        {"optimizer.lr": 0.2, "method.period": 4},
        {"optimizer.lr": 0.2, "method.period": "auto"},
    ]


def test_all_methods_have_the_same_trials_and_the_seed_decides_which(tmp_path):
    tune = "optimizer.lr=0.1:0.2:0.3:0.4,period=1:2:4:8"
    comparison = comparison_of(tmp_path, tune=tune, trials=3)
    of_method = {}
    for run in plan(comparison, tmp_path):
        of_method.setdefault(run.method, []).append(run.trial)
    assert len(of_method["sync-easgd"]) == 3
    assert of_method["sync-easgd"] == of_method["async-easgd"]
    training = dataclasses.replace(BASE.training, seed=1)
    other = dataclasses.replace(comparison, base=dataclasses.replace(BASE, training=training))
    assert trials_of(other) != trials_of(comparison)
    assert len(trials_of(dataclasses.replace(comparison, trials=99))) == 16


@pytest.mark.usefixtures("no_pictures")
def test_the_best_trial_of_the_first_seed_runs_with_the_other_seeds(tmp_path):
    good = figures_of(accuracies=(0.5, 0.99))
    fit = FakeFit({("sync-easgd", 0.2, 0): good, ("async-easgd", 0.1, 0): good}, key=rate_and_seed)
    comparison = comparison_of(tmp_path, tune="lr=0.1:0.2", seeds=3)
    assert compare(comparison, fit=fit) == 0
    assert fit.done == [
        ("sync-easgd", 0.1, 0), ("async-easgd", 0.1, 0),
        ("sync-easgd", 0.2, 0), ("async-easgd", 0.2, 0),
        ("sync-easgd", 0.2, 1), ("async-easgd", 0.1, 1),
        ("sync-easgd", 0.2, 2), ("async-easgd", 0.1, 2),
    ]  # fmt: skip
    text = (tmp_path / "out/comparison.md").read_text()
    assert "| sync-easgd | 10 | 0.2 | 0 | sync | 3 of 3 |" in text
    assert "| async-easgd | 10 | 0.1 | 0 | async | 3 of 3 |" in text
    assert "| async-easgd | 0.1 | 99.00% | yes |" in text
    assert "| async-easgd | 0.2 | 95.00% |  |" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_trial_is_not_chosen_and_an_interrupted_comparison_goes_on(tmp_path):
    comparison = comparison_of(tmp_path, "sync-easgd", tune="lr=9.0:0.2", seeds=2)
    broken = {("sync-easgd", 9.0, 0): NonFiniteLossError("w1", 7, float("nan"))}
    stops = {("sync-easgd", 0.2, 1): KeyboardInterrupt()}
    assert compare(comparison, fit=FakeFit(broken | stops, key=rate_and_seed)) == 130
    again = FakeFit(broken, key=rate_and_seed)
    assert compare(comparison, fit=again) == 1  # a trial failed, and the comparison says so
    assert again.done == [("sync-easgd", 9.0, 0), ("sync-easgd", 0.2, 1)]
    text = (tmp_path / "out/comparison.md").read_text()
    assert "| sync-easgd | 10 | 0.2 | 0 | sync | 2 of 2 |" in text
    assert "- sync-easgd, lr 9.0, seed 0: the loss became nan" in text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tune": "lr"}, "tune must be NAME=VALUE:VALUE,..., as in lr=0.05:0.1:0.2,period=4:16"),
        ({"tune": "rate=0.1"}, "tune has no 'rate'"),
        ({"tune": "samples=1:2"}, "tune has no 'samples'"),
        ({"tune": "lr=fast"}, "optimizer.lr must be a number"),
        ({"tune": "lr=-1"}, "optimizer.lr must be a positive number, got -1"),
        ({"tune": "lr=0.1", "trials": 0}, "trials must be 1 or more, got 0"),
        ({"trials": 4}, "trials needs --tune"),
    ],
)
def test_wrong_trials_are_one_sentence_before_the_first_run(tmp_path, settings, sentence):
    fit = FakeFit()
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        compare(comparison_of(tmp_path, **settings), fit=fit)
    assert fit.done == []


@pytest.mark.usefixtures("no_pictures")
def test_the_csv_files_have_a_row_per_method_and_a_row_per_score(tmp_path):
    never = figures_of(accuracies=(0.5, 0.6))
    fit = FakeFit({("async-easgd", 1): never})
    assert compare(comparison_of(tmp_path, seeds=2), fit=fit) == 0
    table = {row["method"]: row for row in rows_of(tmp_path / "out/comparison.csv")}
    best = table["sync-easgd"]
    assert (best["period"], best["lr"], best["runs"], best["at_target"]) == ("10", "0.25", "2", "2")
    assert float(best["bytes_to_target"]) == 2000
    assert table["async-easgd"]["seconds_to_target_greatest"] == "inf"
    curves = rows_of(tmp_path / "out/curves.csv")
    assert len(curves) == 3 + 3 + 3 + 2
    last = next(row for row in curves if row["method"] == "sync-easgd" and row["round"] == "3")
    assert (last["seed"], last["samples"], last["bytes"], last["messages"], last["accuracy"]) == (
        "0", "300", "3000", "12", "0.95",
    )  # fmt: skip


def page_of(tmp_path, count):
    methods = "sync-easgd,sync-sgd,sync-msgd,local-sgd,diloco,async-easgd,async-sgd,hogwild-easgd"
    some = ",".join(methods.split(",")[:count])
    runs = plan(comparison_of(tmp_path, some, seeds=1), tmp_path)
    runs = [
        dataclasses.replace(run, figures=figures_of(speed=1 / n)) for n, run in enumerate(runs, 1)
    ]
    return comparison_page("digits", runs, make_rows(runs, 0.9), 0.9)


def test_the_page_shows_seven_lines_at_first_and_the_others_on_demand(tmp_path):
    page = page_of(tmp_path, 8)
    boxes = re.findall(r'<input type="checkbox" id="(show-\d)"( checked="checked")?>', page)
    assert [bool(is_checked) for _, is_checked in boxes] == [True] * MOST_LINES + [False]
    for number, (box, _) in enumerate(boxes):
        assert f":has(#{box}:not(:checked)) .line-{number} {{ display: none; }}" in page
        lines = re.findall(rf'<path [^>]*class="line-{number}"', page)
        assert len(lines) == 4, "a line in each chart"
    assert "1 more are hidden at first" in page


def test_the_page_draws_over_seconds_samples_bytes_and_messages_and_fetches_nothing(tmp_path):
    page = page_of(tmp_path, 2)
    assert "hidden at first" not in page
    for label in ("seconds of training", "samples of all", "bytes sent", "messages of all"):
        assert f"{label}" in page
    assert "default-src &#x27;none&#x27;" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|<link|@import", page)


@pytest.mark.usefixtures("no_pictures")
def test_the_report_says_which_methods_survive_bad_workers(tmp_path):
    scaling, run = ScalingConfig(num_workers=4), RunConfig(bad_workers="0.5:reversed")
    base = dataclasses.replace(BASE, scaling=scaling, run=run)
    methods = "sync-easgd,async-easgd,diloco"
    comparison = dataclasses.replace(comparison_of(tmp_path, methods, seeds=1), base=base)
    never = figures_of(accuracies=(0.5, 0.6))
    fit = FakeFit({"diloco": never, "async-easgd": NonFiniteLossError("w3", 7, float("nan"))})
    assert compare(comparison, fit=fit) == 1
    text = (tmp_path / "out/comparison.md").read_text()
    assert "4 workers, of which 2 send reversed messages, 100 samples each" in text
    assert "if every run is complete and at the target: sync-easgd.\n" in text
    assert "- diloco: 1 of 1 runs complete, 0 at the target\n" in text
    assert "- async-easgd: 0 of 1 runs complete, 0 at the target; the loss became nan" in text
    other = dataclasses.replace(base, run=RunConfig(bad_workers="0.5:zeros"))
    with pytest.raises(ConfigError, match=r"has run.bad_workers 0.5:reversed instead of 0.5:zeros"):
        compare(dataclasses.replace(comparison, base=other), fit=fit)
