"""Comparisons with fake runs, and one with real runs in this process."""

import dataclasses
import json
import math

import pytest
from comparisons import FakeFit
from comparisons import figures_of as figures
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from raydl import cli
from raydl.cli.comparing import parse_own
from raydl.config import ScalingConfig, TrainConfig, TrainingConfig
from raydl.errors import ConfigError, DataError, NonFiniteLossError
from raydl.methods import METHODS
from raydl.metrics import COMPARED, TIME_PARTS
from raydl.run.lock import held
from raydl.storage import Storage
from raydl.tools.comparison import Comparison, compare, runner
from raydl.tools.comparison import report as reports
from raydl.tools.comparison.figures import Spread, as_dict, at_target, make_rows
from raydl.tools.comparison.settings import plan

BASE = TrainConfig(
    training=TrainingConfig(samples=100, batch_size=10), scaling=ScalingConfig(num_workers=2)
)


def make_comparison(tmp_path, methods="sync-easgd,async-easgd", *, seeds=2, base=BASE, target=0.9):
    return Comparison(
        methods=methods, seeds=seeds, base=base, target=target, out=str(tmp_path / "out")
    )


def read_report(tmp_path):
    return (tmp_path / "out/comparison.md").read_text()


@pytest.fixture
def no_pictures(monkeypatch):
    """Draw no pictures: they take longer than the rest of these comparisons."""
    monkeypatch.setattr(runner, "draw", lambda runs, rows, target, out: None)
    monkeypatch.setattr(runner, "comparison_page", lambda shared, runs, rows, target: "")


def test_runs_are_interleaved_by_seed_and_share_all_other_settings(tmp_path):
    runs = plan(make_comparison(tmp_path), tmp_path)
    assert [(run.method, run.seed) for run in runs] == [
        ("sync-easgd", 0), ("async-easgd", 0), ("sync-easgd", 1), ("async-easgd", 1),
    ]  # fmt: skip
    assert runs[1].strategy == "async"
    assert runs[3].folder == tmp_path / "async-easgd/seed-1"
    assert {run.config.training.samples for run in runs} == {100}
    assert {run.config.scaling.num_workers for run in runs} == {2}


def test_all_means_every_method_and_seeds_count_up_from_the_first(tmp_path):
    training = dataclasses.replace(BASE.training, seed=5)
    base = dataclasses.replace(BASE, training=training)
    runs = plan(make_comparison(tmp_path, "all", base=base), tmp_path)
    assert [run.method for run in runs if run.seed == 5] == list(METHODS)
    assert {run.seed for run in runs} == {5, 6}


@pytest.mark.parametrize(
    ("methods", "changes", "sentence"),
    [
        ("sync-easgd,sync-egsd", {}, "has no 'sync-egsd'; did you mean sync-easgd"),
        (
            "local-sgd,sync-easgd",
            {"method": dataclasses.replace(BASE.method, outer_lr=0.7)},
            "method.outer_lr has no meaning for sync-easgd",
        ),
        (
            "async-easgd,sync-easgd",
            {"method": dataclasses.replace(BASE.method, beta=1.8)},
            r"method.beta must be in \(0, 1\] for sync-easgd, got 1.8",
        ),
        (
            "sync-easgd",
            {"training": TrainingConfig()},
            "training.samples or seconds, bytes, epochs or steps must be set",
        ),
        (" , ", {}, "methods is empty"),
    ],
)
def test_wrong_settings_are_reported_before_the_first_run(tmp_path, methods, changes, sentence):
    fit = FakeFit()
    base = dataclasses.replace(BASE, **changes)
    with pytest.raises(ConfigError, match=sentence):
        compare(make_comparison(tmp_path, methods, base=base), fit=fit)
    assert fit.done == []
    assert not (tmp_path / "out").exists()


def test_missing_data_are_reported_before_the_first_run(tmp_path):
    base = dataclasses.replace(BASE, data="no/such/place")
    with pytest.raises(DataError, match="no such file"):
        compare(make_comparison(tmp_path, base=base))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_method_does_not_affect_the_others(tmp_path, capsys):
    fit = FakeFit({("async-easgd", 0): NonFiniteLossError("w1", 7, math.nan)})
    fit.results["async-easgd", 1] = ValueError("first line\nTypeError: the | reason")
    assert compare(make_comparison(tmp_path), fit=fit) == 1
    assert len(fit.done) == 4
    text = read_report(tmp_path)
    sentence = "the loss became nan at local step 7 of worker w1"
    assert f"| async-easgd | 10 | 0.25 | 0 | async | 0 of 2 | failed: {sentence}" in text
    assert "- async-easgd, seed 1: TypeError: the | reason" in text
    row = "| sync-easgd | 10 | 0.25 | 0 | sync | 2 of 2 | 2 of 2 | 20.00 | 200 | 2 kB | 95.00% |"
    assert row in text
    assert f"async-easgd, seed 0: failed: {sentence}" in capsys.readouterr().out
    assert "Traceback" in (tmp_path / "out/async-easgd/seed-0/error.txt").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_comparison_started_again_runs_only_incomplete_runs(tmp_path, capsys):
    first = FakeFit({("async-easgd", 1): RuntimeError("a bad day")})
    assert compare(make_comparison(tmp_path), fit=first) == 1
    again = FakeFit()
    assert compare(make_comparison(tmp_path), fit=again) == 0
    assert again.done == [("async-easgd", 1)]
    assert capsys.readouterr().out.count("already complete, not repeated") == 3
    assert "failed" not in read_report(tmp_path)
    more = FakeFit()
    assert compare(make_comparison(tmp_path, "sync-easgd,diloco", seeds=3), fit=more) == 0
    assert more.done == [("diloco", 0), ("diloco", 1), ("sync-easgd", 2), ("diloco", 2)]


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_another_comparison_still_trains_is_not_removed(tmp_path):
    assert (
        compare(
            make_comparison(tmp_path), fit=FakeFit({("async-easgd", 1): RuntimeError("a bad day")})
        )
        == 1
    )
    folder = tmp_path / "out/async-easgd/seed-1"
    with (
        held(Storage(str(folder)), "run.run_dir"),
        pytest.raises(ConfigError, match="is in use by"),
    ):
        compare(make_comparison(tmp_path), fit=FakeFit())
    assert (folder / "error.txt").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_another_comparison_has_completed_meanwhile_is_kept(tmp_path):
    class Slow(FakeFit):
        def __call__(self, config):
            figures = super().__call__(config)
            if len(self.done) == 1:
                compare(make_comparison(tmp_path), fit=FakeFit())
            return figures

    slow = Slow()
    assert compare(make_comparison(tmp_path), fit=slow) == 0
    assert len(slow.done) == 1


@pytest.mark.usefixtures("no_pictures")
def test_complete_runs_with_other_settings_are_refused(tmp_path):
    compare(make_comparison(tmp_path), fit=FakeFit())
    training = dataclasses.replace(BASE.training, samples=200)
    fit = FakeFit()
    sentence = "has training.samples 100 instead of 200; name another folder"
    with pytest.raises(ConfigError, match=sentence):
        compare(
            make_comparison(tmp_path, base=dataclasses.replace(BASE, training=training)), fit=fit
        )
    assert fit.done == []


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (KeyboardInterrupt(), 130),
        ({**figures(), "stopped_by": "SIGINT"}, 130),
        ({**figures(), "stopped_by": "SIGTERM"}, 143),
    ],
)
def test_a_signal_keeps_complete_runs_and_the_others_can_be_run_later(
    tmp_path, capsys, answer, status
):
    assert compare(make_comparison(tmp_path), fit=FakeFit({("sync-easgd", 1): answer})) == status
    assert "runs the other 2" in capsys.readouterr().out
    assert "2 of 4 runs are complete" in read_report(tmp_path)
    again = FakeFit()
    assert compare(make_comparison(tmp_path), fit=again) == 0
    assert again.done == [("sync-easgd", 1), ("async-easgd", 1)]


def test_the_target_is_reached_at_the_first_evaluation_above_it(tmp_path):
    run = plan(make_comparison(tmp_path), tmp_path)[0]
    run = dataclasses.replace(run, figures=figures(accuracies=(0.5, 0.9, 0.8, 0.95)))
    assert at_target(run, 0.9)["seconds"] == 20
    assert at_target(run, 0.91)["samples"] == 400
    assert at_target(run, 0.96) == {}
    assert as_dict(run, 0.91)["bytes_to_target"] == 4000
    assert as_dict(run, 0.96)["seconds_to_target"] is None


def test_rows_have_medians_and_are_sorted_by_the_time_to_the_target(tmp_path):
    runs = plan(
        make_comparison(tmp_path, "sync-sgd,sync-easgd,diloco,local-sgd", seeds=3), tmp_path
    )
    never = figures(accuracies=(0.5, 0.6))
    of_method = {
        "sync-sgd": [never, never, never],
        "sync-easgd": [figures(), figures(speed=0.5), never],
        "diloco": [figures(), figures(speed=2), figures(speed=4)],
        "local-sgd": [None, None, None],
    }
    runs = [dataclasses.replace(r, figures=of_method[r.method][r.seed]) for r in runs]
    rows = make_rows(runs, 0.9)
    assert [row.method for row in rows] == ["diloco", "sync-easgd", "sync-sgd", "local-sgd"]
    assert rows[0].figures["seconds_to_target"] == Spread(10, 5, 20)
    assert rows[0].figures["center_accuracy"] == Spread(0.95, 0.95, 0.95)
    assert rows[0].parts["data_io"] == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)
    assert rows[1].figures["seconds_to_target"] == Spread(40, 20, math.inf)
    assert [row.num_reached for row in rows] == [3, 2, 0, 0]
    text = reports.markdown(make_comparison(tmp_path), runs, rows, tmp_path, "")
    assert "| sync | 3 of 3 | 2 of 3 | 40.00 (20.00 to never) | 200 " in text
    assert "| sync | 3 of 3 | 0 of 3 | never | never | never | 60.00% |" in text
    assert "| sync | 0 of 3 | not run |" in text


def test_a_comparison_without_a_complete_run_shows_no_pictures(tmp_path):
    assert (
        compare(make_comparison(tmp_path), fit=FakeFit(dict.fromkeys(METHODS, ValueError("no"))))
        == 1
    )
    assert "## Pictures" not in read_report(tmp_path)
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_task_without_accuracy_has_only_the_picture_of_its_time_parts(tmp_path):
    scored = figures()
    scored["evaluations"] = [{"round": 1, "samples": 1, "seconds": 1, "loss": 1.0}]
    assert compare(make_comparison(tmp_path), fit=FakeFit(dict.fromkeys(METHODS, scored))) == 0
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["time_parts.png"]


def test_the_charts_have_the_methods_in_the_order_of_the_table(tmp_path, monkeypatch):
    legends, saved = [], []

    def save(picture, path):
        legends.append([t.get_text() for t in picture.figure.legends[0].get_texts()])
        saved.append(path.name)

    monkeypatch.setattr("raydl.metrics.charts.Picture.save", save)
    methods = "sync-sgd,async-easgd,diloco"
    fit = FakeFit({"diloco": figures(speed=4), "async-easgd": figures(speed=2)})
    assert compare(make_comparison(tmp_path, methods), fit=fit) == 0
    assert saved == list(reports.PICTURES)
    assert all(legend == ["diloco", "async-easgd", "sync-sgd"] for legend in legends[:4])
    assert len(legends[4]) == len(TIME_PARTS)


def rows_of_hparams(folder):
    """Return (settings, figures, columns) of the only HParams row in a run's folder."""
    (path,) = folder.glob("*.compare")
    accumulator = EventAccumulator(str(path)).Reload()
    plugin = accumulator.summary_metadata
    content = {
        tag.rpartition("/")[2]: HParamsPluginData.FromString(plugin[tag].plugin_data.content)
        for tag in plugin
        if tag.startswith("_hparams_")
    }
    settings = content["session_start_info"].session_start_info.hparams
    columns = [info.name for info in content["experiment"].experiment.hparam_infos]
    figures = {name: accumulator.Scalars(name)[0].value for name in accumulator.Tags()["scalars"]}
    values = {k: v.string_value or v.number_value for k, v in settings.items()}
    return values, figures, columns


@pytest.mark.usefixtures("no_pictures")
def test_tensorboard_gets_a_row_for_every_complete_run(tmp_path):
    fit = FakeFit({("async-easgd", 0): RuntimeError("a bad day")})
    fit.results["sync-easgd", 1] = figures(accuracies=(0.5, 0.6))
    assert compare(make_comparison(tmp_path), fit=fit) == 1
    assert compare(make_comparison(tmp_path), fit=fit) == 1  # again: no second row
    out = tmp_path / "out"
    settings, values, columns = rows_of_hparams(out / "sync-easgd/seed-0")
    assert (settings["method"], settings["seed"], settings["workers"]) == ("sync-easgd", 0, 2)
    assert set(columns) == {"method", "strategy", "seed", "workers", "period", "lr"}
    assert values["compare/seconds_to_target"] == 20
    assert set(values) == set(COMPARED)
    assert not list((out / "async-easgd/seed-0").glob("*.compare"))
    _, never, _ = rows_of_hparams(out / "sync-easgd/seed-1")
    assert "compare/seconds_to_target" not in never
    assert never["compare/accuracy"] == pytest.approx(0.6)


def test_options_of_train_apply_to_all_runs():
    options = ["--methods", "diloco", "--seeds", "4", "--samples", "9", "--exchange.timeout-s", "7"]
    arguments = [*options, "--workers", "4", "--target", "0.9"]
    found = parse_own(Comparison, arguments, prog="raydl compare")
    assert (found.methods, found.seeds, found.target) == ("diloco", 4, 0.9)
    assert found.base.training.samples == 9
    assert found.base.scaling.num_workers == 4
    assert found.base.exchange.timeout_s == 7


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--method sync-sgd", "method.name cannot be set in a comparison; use --methods"),
        (
            "--run-dir there",
            "run.name, run.run_dir, run.storage_path and run.resume cannot be set in a comparison",
        ),
        ("--seeds 0", "seeds must be 1 or more, got 0"),
        ("--samples 9 --out s3://b/x", "out must be a folder of this machine, got s3://b/x"),
        ("--target 98.5", "target must be in (0, 1], for example 0.985, got 98.5"),
        ("--samples 9 --seconds 9", "training.samples and training.seconds exclude each other"),
        ("--methods sync-egsd --samples 9", "method.name has no 'sync-egsd'; did you mean"),
        (
            "--methods diloco",
            "training.samples or seconds, bytes, epochs or steps must be set",
        ),
        (
            "--model lnet --samples 9",
            "model has no 'lnet'; did you mean lenet or lenet5 or alexnet?",
        ),
    ],
)
def test_wrong_options_give_one_sentence(capsys, options, sentence):
    assert cli.main(["compare", *options.split()]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {sentence}")
    assert text.count("\n") == 1


def test_a_real_comparison_writes_all_files_and_its_figures_agree(tmp_path, capsys):
    out = tmp_path / "out"
    options = "--methods sync-easgd,sync-sgd --workers 0 --data synthetic:96 --model mlp"
    options += f" --samples 960 --batch-size 16 --seeds 2 --target 0.9 --out {out}"
    assert cli.main(["compare", *options.split()]) == 0
    printed = capsys.readouterr().out
    assert f"tensorboard --logdir {out}" in printed
    texts = {"comparison.md", "comparison.html", "comparison.json", "comparison.csv", "curves.csv"}
    files = {*texts, *reports.PICTURES}
    assert files <= {path.name for path in out.iterdir()}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in reports.PICTURES)
    text, runs = read_report(tmp_path), json.loads((out / "comparison.json").read_text())["runs"]
    assert len(runs) == 4
    for run in runs:
        folder = out / run["method"] / f"seed-{run['seed']}"
        result = json.loads((folder / "result.json").read_text())
        assert result.items() <= run.items()
        assert run["status"] == "done"
        assert run["samples"] == 960
        assert list(folder.glob("events.out.tfevents*"))
    for method in ("sync-easgd", "sync-sgd"):
        accuracies = [run["center_accuracy"] for run in runs if run["method"] == method]
        line = next(line for line in text.splitlines() if line.startswith(f"| {method} | "))
        assert f"| {sum(accuracies) / 2:.2%}" in line
    assert all(f"]({name})" in text for name in reports.PICTURES)
    assert all(part in text for part in TIME_PARTS)
