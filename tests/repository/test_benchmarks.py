import argparse
import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import bits, only_from_here, page, watching
from benchmarks.allreduces import MOST_SUMS, Measured, Plan, compare
from benchmarks.efficiency import speed, total_speed
from benchmarks.limits import LIMITS, limit_of
from benchmarks.measure import Figure, Report, Spread, interleaved, ratios, version
from benchmarks.mixed_speed import mean_speed
from benchmarks.peers import loop
from benchmarks.peers.loop import Run, Settings, positions_of_step, unwrapped
from benchmarks.programs import RunError, TimeOutError
from benchmarks.quotas import may_throttle, throttled
from benchmarks.runs import Trained, workplace
from benchmarks.time_to_accuracy import (
    DDP,
    RATES,
    RAY_TRAIN,
    SAME_WITH_MOMENTUM,
    Reached,
    add_results,
    failed,
    rates_of,
    reached_by_peer,
    reached_by_raydl,
)
from raydl import models
from raydl.collective.allreduce import ALGORITHMS, LIBRARY, AllreduceProfiler
from raydl.data import Normalizer, load
from raydl.methods import METHODS
from raydl.ray_backend.liveness import times_of


def figure(value: float, **settings) -> Figure:
    return Figure(name="bench.case.what", value=Spread.of([value]), **settings)


def test_a_spread_is_the_median_and_both_extremes():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]).median == 1.5
    assert Spread.of([3.0, 1.0, 2.0]).text(".1f") == "2.0 (1.0 to 3.0)"


def test_a_ratio_is_taken_within_each_repeat():
    # A machine that is four times as slow in the second repeat does not change the ratio.
    assert ratios([8.0, 2.0], [4.0, 1.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        ratios([8.0, 2.0], [4.0])


@pytest.mark.parametrize(
    ("value", "settings", "is_met"),
    [
        (0.97, {"target": 0.97}, True),
        (0.96, {"target": 0.97}, False),
        (0.97, {"target": 0.97, "is_better": "less"}, True),
        (0.98, {"target": 0.97, "is_better": "less"}, False),
        (0.5, {}, None),
    ],
)
def test_a_figure_is_met_at_its_target_or_on_the_better_side(value, settings, is_met):
    assert figure(value, **settings).is_met is is_met


def test_a_figure_is_a_line_of_json():
    assert json.loads(figure(1.23456789, target=1.0).line()) == {
        "name": "bench.case.what",
        "value": 1.2346,
        "target": 1.0,
        "is_better": "greater",
        "is_met": True,
        "least": 1.2346,
        "greatest": 1.2346,
    }


def test_each_repeat_runs_every_case_and_begins_with_another_one(capsys):
    order = []

    def case(name):
        return lambda: order.append(name) or len(order)

    results = interleaved({name: case(name) for name in "abc"}, repeats=4)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert results == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}
    assert "4/4 c" in capsys.readouterr().out


def test_a_report_has_its_tables_and_says_which_figures_are_met(tmp_path, capsys):
    report = Report("bench", "python -m benchmarks.bench", is_quick=True)
    report.add_table(("case", "seconds"), [("one", 2)])
    report.add_text("A sentence.")
    printed = capsys.readouterr().out
    assert printed == "| case | seconds |\n| --- | --- |\n| one | 2 |\n\nA sentence.\n\n"
    report.add_figures(figure(2.0, target=1.0), figure(0.5, target=1.0), figure(3.0))
    report.close(tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert text.startswith("# bench (quick)\n\n    python -m benchmarks.bench\n\n")
    assert printed in text
    assert "| bench.case.what | 2 (2 to 2) | at least 1 | met |" in text
    assert "| bench.case.what | 0.5 (0.5 to 0.5) | at least 1 | missed |" in text
    assert "| bench.case.what | 3 (3 to 3) |  |  |" in text
    lines = (tmp_path / "bench.json").read_text().splitlines()
    assert [json.loads(line)["is_met"] for line in lines] == [True, False, None]
    printed = capsys.readouterr().out
    assert "| bench.case.what | 2 (2 to 2) | at least 1 | met |" in printed
    assert printed.endswith("".join(f"{line}\n" for line in lines))


def test_the_page_of_all_benchmarks_has_each_target_and_each_whole_report(tmp_path, monkeypatch):
    results, out = tmp_path / "results", tmp_path / "docs/benchmarks.md"
    for name, is_quick, value in (
        ("ladder", False, 2.0),
        ("exchange", False, 0.5),
        ("hosts", True, 1),
    ):
        report = Report(name, f"python -m benchmarks.{name}", is_quick=is_quick)
        report.add_table(("case", "seconds"), [(name, 2)])
        report.add_figures(
            Figure(name=f"{name}.a.speed", value=Spread.of([value]), target=1.0),
            Figure(name=f"{name}.b.speed", value=Spread.of([value])),
        )
        report.close(results)
    readme = tmp_path / "README.md"
    readme.write_text(page._HEAD)
    monkeypatch.setattr(
        "sys.argv",
        ["page", "--results", str(results), "--out", str(out), "--readme", str(readme)],
    )
    page.main()
    text = out.read_text()
    assert "| [ladder](#ladder) | a.speed | 2 (2 to 2) | at least 1 | 🟢 |" in text
    assert "| [exchange](#exchange) | a.speed | 0.5 (0.5 to 0.5) | at least 1 | 🔴 |" in text
    assert "| `exchange.a.speed` | Not known. |" in text
    assert "`ladder.a.speed` |" not in text
    assert "| case | seconds |\n| --- | --- |\n| exchange | 2 |" in text
    assert "    python -m benchmarks.ladder" in text
    assert "hosts" not in text, "a short run"
    assert sorted(p.name for p in (tmp_path / "docs/benchmarks").iterdir()) == [
        "exchange.svg", "ladder.svg"
    ]  # fmt: skip
    assert all(f"(benchmarks/{name}.svg)" in text for name in ("exchange", "ladder"))
    chart = tmp_path / "docs/benchmarks/ladder.svg"
    before = chart.read_bytes()
    page.main()
    assert chart.read_bytes() == before, "a page made again changes nothing"


@pytest.mark.parametrize(
    ("is_better", "ours", "others", "row"),
    [
        ("greater", 0.96, (0.6, 0.8), "**0.96** `--spares 1` | B 0.8, A 0.6 | 1.2 | 🟢 |"),
        ("less", 3.0, (2.0, 9.0), "**3** `--spares 1` | A 2, B 9 | 0.667 | 🔴 |"),
        ("less", 3.0, (None, 1200.0), "**3** `--spares 1` | B 1,200, A not measured |  |  |"),
        ("less", 3.0, (None, None), None),
        ("less", None, (2.0, 9.0), None),
    ],
)
def test_the_page_shows_raydl_beside_the_best_other_library(
    is_better, ours, others, row, tmp_path, monkeypatch
):
    values = {"bench.ours": ours, "bench.a": others[0], "bench.b": others[1]}
    report = Report("bench", "python -m benchmarks.bench", is_quick=False)
    report.add_figures(
        *(
            Figure(name=name, value=Spread.of([value]), is_better=is_better)
            for name, value in values.items()
            if value is not None
        )
    )
    report.close(tmp_path)
    peers = {"A": "bench.a", "B": "bench.b"}
    compared = page.Comparison("what is measured", "`--spares 1`", "bench.ours", peers)
    monkeypatch.setattr(page, "COMPARISONS", [compared])
    text = page.page_of(page.read_results(tmp_path), "charts")
    if row is None:
        assert "what is measured" not in text
    else:
        assert f"| [what is measured](#bench) | {row}" in text


def test_the_readme_shows_some_rows_of_the_page(tmp_path, monkeypatch):
    report = Report("bench", "python -m benchmarks.bench", is_quick=False)
    report.add_figures(*(Figure(name=f"bench.{n}", value=Spread.of([2.0])) for n in "abc"))
    report.close(tmp_path)
    results = page.read_results(tmp_path)
    compared = [
        page.Comparison(f"speed of {ours}", "`raydl`", f"bench.{ours}", {"X": "bench.c"}, shown)
        for ours, shown in (("a", True), ("b", False))
    ]
    monkeypatch.setattr(page, "COMPARISONS", compared)
    text = page.readme_of(f"One.\n\n{page._HEAD}| old | row |\n\nTwo.\n", results, "docs/page.md")
    row = "| [speed of a](docs/page.md#bench) | **2** `raydl` | X 2 | 1 | 🟢 |"
    assert text == f"One.\n\n{page._HEAD}{row}\n\nTwo.\n"
    assert page.readme_of(text, results, "docs/page.md") == text
    with pytest.raises(SystemExit, match="has no table that begins with"):
        page.readme_of("Nothing.", results, "docs/page.md")


def test_a_report_of_a_part_does_not_replace_that_of_the_whole(tmp_path, monkeypatch):
    for arguments, value in (([], 2.0), (["--only", "hosts"], 1.0)):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        only = arguments[-1] if arguments else None
        report = Report.of_command("bench", argparse.Namespace(quick=False, only=only))
        report.add_figures(figure(value))
        report.close(tmp_path)
    [(figures, _)] = page.read_results(tmp_path).values()
    assert figures[0].value.median == 2.0
    assert (tmp_path / "bench-part.md").read_text().startswith("# bench (part)\n")


def test_a_report_without_figures_replaces_none(tmp_path):
    for figures in ([figure(2.0)], []):
        report = Report("bench", "python -m benchmarks.bench", is_quick=False)
        report.add_figures(*figures)
        report.close(tmp_path)
    [(figures, _)] = page.read_results(tmp_path).values()
    assert len(figures) == 1


def test_a_case_that_crashes_has_no_figures_and_one_that_is_too_slow_counts_with_its_time(capsys):
    reached = Reached(seconds=20.0, training_s=20.0, samples=9, best=0.99, is_reached=True)
    cases = {
        "sync-easgd": [reached],
        "async-easgd": [failed("async-easgd", RunError("port in use"))],
        RAY_TRAIN: [failed(RAY_TRAIN, TimeOutError("took over 300 s"))],
        DDP: [dataclasses.replace(reached, seconds=30.0)],
    }
    report = Report("time_to_accuracy", "", is_quick=False)
    add_results(report, cases)
    assert [figure.name.partition(".")[2] for figure in report.figures] == [
        "sync-easgd.seconds", "ray-train.seconds", "ray-train_over_sync-easgd",
        "torchrun-ddp.seconds", "torchrun-ddp_over_sync-easgd",
    ]  # fmt: skip
    assert report.figures[2].value.median == 300.0 / 20.0
    assert report.figures[4].value.median == 30.0 / 20.0
    assert "without figures: async-easgd." in capsys.readouterr().out


def test_a_method_outside_the_easgd_and_diloco_families_that_is_first_misses_the_target():
    reached = Reached(seconds=20.0, training_s=20.0, samples=9, best=0.99, is_reached=True)
    cases = {
        "sync-easgd": [reached],
        "sync-measgd": [dataclasses.replace(reached, seconds=16.0)],
        "eamsgd": [dataclasses.replace(reached, seconds=1.0, is_reached=False)],
        "local-sgd tuned": [dataclasses.replace(reached, seconds=12.0)],
        DDP: [dataclasses.replace(reached, seconds=4.0)],
    }
    report = Report("time_to_accuracy", "", is_quick=False)
    add_results(report, cases)
    [figure] = [f for f in report.figures if f.name.endswith("others_over_families")]
    assert (figure.value.median, figure.is_met) == (12.0 / 16.0, False)


def test_all_methods_get_the_same_rates_but_a_momentum_form_only_those_with_momentum():
    with_momentum = tuple(rate for rate in RATES if rate.momentum)
    for name, kind in METHODS.items():
        assert rates_of(name) == (with_momentum if kind.local_step.momentum else RATES)


def test_a_method_that_is_not_tuned_is_a_tuned_one_with_momentum():
    def rule_and_strategy(name: str) -> tuple[object, ...]:
        kind = METHODS[name]
        family = next(c for c in kind.__mro__ if not c.name)
        is_nesterov = kind.local_step.nesterov
        return family, kind.strategy, kind.period, is_nesterov, kind.has_momentum_at_center

    tuned = {rule_and_strategy(name) for name in METHODS if name not in SAME_WITH_MOMENTUM}
    assert {rule_and_strategy(name) for name in SAME_WITH_MOMENTUM} <= tuned


def test_a_tuned_method_has_no_target_and_a_peer_one_over_the_tuned_sync_easgd():
    reached = Reached(seconds=20.0, training_s=20.0, samples=9, best=0.99, is_reached=True)
    cases = {
        "sync-easgd": [reached],
        "sync-easgd tuned": [dataclasses.replace(reached, seconds=10.0)],
        DDP: [dataclasses.replace(reached, seconds=16.0)],
    }
    report = Report("time_to_accuracy", "", is_quick=False)
    add_results(report, cases)
    targets = {figure.name.partition(".")[2]: figure.target for figure in report.figures}
    assert targets["sync-easgd-tuned_over_sync-easgd"] is None
    [figure] = [f for f in report.figures if f.name.endswith("ddp_over_sync-easgd-tuned")]
    assert (figure.value.median, figure.target, figure.is_met) == (1.6, 1.3, True)


def test_auto_has_chosen_an_all_reduce_before_its_measured_time():
    profiler = AllreduceProfiler([LIBRARY, *ALGORITHMS])
    num_sums = 0
    while not profiler.chosen:
        profiler.add(profiler.next_algorithm(), 1.0)
        profiler.agree(SimpleNamespace(rank=0, num_workers=1))
        num_sums += 1
    assert num_sums == MOST_SUMS


def test_a_comparison_of_all_reduces_that_fails_leaves_the_others(capsys):
    def measure(model: str, allreduce: str) -> Measured:
        if model == "resnet20":
            return Measured.of(1.0, allreduce, {"allreduce": None, "generations": 2})
        chosen = None if allreduce == "library" else {"algorithm": "ring"}
        speed = 8.0 if allreduce == "library" else 10.0
        return Measured.of(speed, allreduce, {"allreduce": chosen, "generations": 1})

    report = Report("allreduces", "", is_quick=False)
    plan = Plan(["resnet20", "lenet"], ["library", "auto"], repeats=2)
    compare(measure, report, "one node", plan)
    [figure] = report.figures
    assert figure.name == "allreduces.one-node.lenet.auto"
    assert (figure.value.median, figure.is_met) == (1.25, True)
    printed = capsys.readouterr().out
    assert "resnet20 on one node was not measured: a run had 2 generations" in printed
    assert "`auto` chose: ring, ring" in printed


def test_every_figure_beside_other_libraries_is_one_that_its_benchmark_writes(root):
    results = page.read_results(root / "benchmarks/results")
    written = {figure.name for figures, _ in results.values() for figure in figures}
    for compared in page.COMPARISONS:
        names = {compared.ours, *compared.peers.values()}
        benchmarks = {name.partition(".")[0] for name in names}
        assert len(benchmarks) == 1, "figures of different runs cannot be compared"
        if benchmarks <= results.keys():
            assert names <= written


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--out /a/b --quick", "python -m benchmarks.bench --quick"),
        ("--repeats 2 --out=results", "python -m benchmarks.bench --repeats 2"),
        ("--out results", "python -m benchmarks.bench"),
    ],
)
def test_the_command_of_a_report_has_no_path_of_the_machine(arguments, command, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", *arguments.split()])
    assert Report.of_command("bench", argparse.Namespace(quick=False)).command == command


def test_a_report_names_the_commit_that_was_measured(tmp_path, monkeypatch):
    assert re.fullmatch(r"commit [0-9a-f]{9}( with changes)?|raydl [0-9.]+", version())
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without git
    assert version() == f"raydl {metadata.version('elastic-raydl')}"


def test_the_page_and_the_readme_are_made_from_the_results_under_version_control(root):
    results = page.read_results(root / "benchmarks/results")
    assert (root / "docs/benchmarks.md").read_text() == page.page_of(results, "benchmarks")
    readme = (root / "README.md").read_text()
    assert readme == page.readme_of(readme, results, "docs/benchmarks.md")
    assert sum(line.endswith(("🟢 |", "🔴 |")) for line in readme.splitlines()) == 5


def test_the_page_says_of_each_missed_target_what_limits_it_and_where_it_was_measured(root):
    results = page.read_results(root / "benchmarks/results")
    figures = [figure for figures, _ in results.values() for figure in figures]
    missed = [f.name for f in figures if f.target is not None and not f.is_met]
    assert missed
    assert [name for name in missed if limit_of(name) is None] == []
    titles = re.findall(r"^##+ (.*)$", (root / "docs/journal.md").read_text(), flags=re.M)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert {limit.section for limit in LIMITS} <= anchors
    text = page.page_of(results, "benchmarks")
    _, _, section = text.partition("## Missed targets, and what limits them")
    rows = section.partition("\n## ")[0]
    assert all(f"`{name}`" in rows for name in missed)
    assert "Not known." not in rows


def test_a_page_without_results_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="has no results of whole benchmarks; run make bench"):
        page.read_results(tmp_path)


@pytest.mark.parametrize(
    ("is_better", "value", "relative"),
    [("greater", 2.0, 2.0), ("greater", 0.5, 0.5), ("less", 0.5, 2.0), ("less", 0.0, 2.0)],
)
def test_a_chart_shows_how_good_a_figure_is(is_better, value, relative):
    assert page._relative(figure(value, target=1.0, is_better=is_better), value) == relative


def test_ranks_share_each_step_of_an_epoch_without_repeating_a_sample():
    done, seen, sizes = 0, [], []
    while done < 10:
        parts = [
            positions_of_step(done, num_samples=11, batch_size=2, rank=rank, num_ranks=2)
            for rank in range(2)
        ]
        assert {epoch for epoch, _, _ in parts} == {0}
        seen += [position for _, positions, _ in parts for position in positions]
        sizes.append(parts[0][2])
        done += parts[0][2]
    assert sizes == [4, 4, 2]  # 11 samples do not divide by two ranks
    assert seen == list(range(10))
    epoch, positions, _ = positions_of_step(10, num_samples=11, batch_size=2, rank=1, num_ranks=2)
    assert (epoch, positions.tolist()) == (1, [2, 3])


class MemoryStore:
    """A store that keeps states in memory."""

    def __init__(self) -> None:
        self.states = []

    def load(self):
        return self.states[-1] if self.states else None

    def save(self, state):
        self.states.append(copy.deepcopy(state))


def test_a_peer_in_one_process_is_torchs_sgd_on_the_batches_of_raydl():
    data, store = load("synthetic:128x1x8x8", seed=3), MemoryStore()
    settings = Settings(samples=256, lr=0.1, warmup=0.0, seed=3, checkpoint_every=256)
    result = Run(settings, data, wrap=unwrapped, store=store).train()
    assert (result["steps"], result["samples"], result["ranks"]) == (4, 256, 1)
    assert (result["accuracy"], result["evaluations"]) == (None, [])

    torch.manual_seed(3)
    model = models.find("lenet")((1, 8, 8), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order, normalize = data.train.order(3), Normalizer.of(data.train)
    for step in range(4):
        epoch, first = divmod(64 * step, 128)
        rows = order.rows(epoch, np.arange(first, first + 64))
        images, labels = normalize(data.train.fetch(rows), rows, epoch)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 4))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(store.states[0]["model"][name], weights)


def test_a_peer_learns_evaluates_periodically_and_stops_at_an_accuracy(tmp_path):
    settings = Settings(
        samples=12_800, lr=0.05, evaluate_every=256, stop_at_accuracy=0.9,
        events=str(tmp_path / "events"), result=str(tmp_path / "result"),
    )  # fmt: skip
    result = Run(settings, load("synthetic:256x1x8x8", seed=0), wrap=unwrapped).train()
    assert result["accuracy"] >= 0.9
    assert result["samples"] < 12_800
    assert [samples for _, samples, _ in result["evaluations"]] == list(
        range(256, result["samples"] + 1, 256)
    )
    written = json.loads((tmp_path / "result").read_text())
    assert written["accuracy"] == result["accuracy"]
    assert written["scored_s"][-1] - written["evaluation_seconds"] == pytest.approx(
        written["evaluations"][-1][0], abs=1e-3
    )
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert (events[0]["event"], events[0]["samples"]) == ("first_step", 0)
    assert (events[-1]["event"], events[-1]["samples"]) == ("last_step", result["samples"])


def test_the_speed_of_a_peer_leaves_out_its_untimed_steps(monkeypatch):
    """The first two of four steps take 10 s each, the others 1 s."""
    now, steps = 0.0, iter([10.0, 10.0, 1.0, 1.0])

    def take_step(*_):
        nonlocal now
        now += next(steps)

    def slow_at_first(model):
        model.register_forward_hook(take_step)
        return model

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now, time=time.time))
    data = load("synthetic:256x1x8x8", seed=0)
    result = Run(Settings(samples=256, untimed_steps=2), data, wrap=slow_at_first).train()
    assert (result["seconds"], result["samples_per_s"]) == (22.0, 128 / 2.0)


def test_a_peer_resumed_from_its_checkpoint_trains_the_same_bits():
    data = load("synthetic:256x1x8x8", seed=0)
    settings = Settings(samples=1024, lr=0.05, momentum=0.9, checkpoint_every=512)
    store = MemoryStore()
    whole = Run(settings, data, wrap=unwrapped, store=store)
    whole.train()
    last = store.states.pop()
    again = Run(settings, data, wrap=unwrapped, store=store)
    assert store.load()["num_done"] == 512
    again.train()
    end = store.states[-1]
    assert end["num_done"] == last["num_done"] == 1024
    for name, weights in last["model"].items():
        assert torch.equal(weights, end["model"][name])


def test_a_speed_is_the_slope_of_the_points_in_an_interval():
    points = [(0.0, 0), (1.0, 5), (2.0, 105), (3.0, 205), (4.0, 305), (9.0, 306)]
    assert speed(points, start=1.0, stop=4.0) == pytest.approx(100.0)
    with pytest.raises(AssertionError, match="too few"):
        speed(points, start=5.0, stop=8.0)


def test_speeds_are_added_while_all_runs_train():
    early = [(at, 10 * at) for at in range(0, 11)]
    late = [(at, 30 * (at - 4)) for at in range(4, 15)]
    assert total_speed([early, late], skipped=1.0) == pytest.approx(40.0)
    assert total_speed([late], skipped=1.0) == pytest.approx(30.0)


def test_a_mean_speed_counts_slow_and_fast_seconds_alike():
    points = [(0.0, 0), (10.0, 1000), (20.0, 1300), (30.0, 2300), (31.0, 2400)]
    assert mean_speed(points, start=0.0, stop=30.5) == pytest.approx(2300 / 30)


def test_the_time_of_a_peer_includes_its_earlier_evaluations():
    result = {
        "evaluations": [[10.0, 100, 0.5], [20.0, 200, 0.8], [30.0, 300, 0.9]],
        "scored_s": [11.0, 23.0, 34.0],  # each evaluation took longer than the previous one
    }
    run = Trained(result=result, points=())
    found = reached_by_peer(run, accuracy=0.9)
    assert (found.seconds, found.training_s, found.samples) == (33.0, 30.0, 300)
    assert reached_by_peer(run, accuracy=0.5).seconds == 10.0
    missed = reached_by_peer(run, accuracy=0.95)
    assert (missed.seconds, missed.is_reached, missed.best) == (33.0, False, 0.9)


def test_the_time_of_raydl_is_that_of_the_evaluated_center():
    scores = [
        {"seconds": 10.0, "samples": 100, "accuracy": 0.5},
        {"seconds": 20.0, "samples": 200, "accuracy": 0.9},
    ]
    run = Trained(result={"evaluations": scores, "seconds": 25.0, "samples": 250}, points=())
    assert reached_by_raydl(run, accuracy=0.9).seconds == 20.0
    missed = reached_by_raydl(run, accuracy=0.95)
    assert (missed.seconds, missed.is_reached) == (25.0, False)


@pytest.mark.processes
def test_a_failed_program_is_named_with_its_log_and_its_folder_is_deleted():
    with workplace() as place:
        with pytest.raises(RunError, match=r"(?s)peers\.plain.* failed:.*give one of --samples"):
            place.plain("--seed", "1")
        folder = place.folder
    assert not folder.exists()


@pytest.mark.processes
def test_plain_pytorch_trains_on_the_arrays_of_a_data_set():
    with workplace() as place:
        data = place.arrays("digits", num_test=50)
        (run,) = place.plain("--data", data, "--samples", "640", "--evaluate-every", "320")
        assert len(load(data).test.images) == 50
    assert run.result["samples"] == 640
    assert run.points[0][1] == 0
    assert run.points[-1][1] == 640
    assert np.all(np.diff([at for at, _ in run.points]) >= 0)


def test_a_comparison_says_of_each_run_at_once_whether_two_versions_agree(capsys):
    chosen = [bits.Case("one", ()), bits.Case("two", ()), bits.Case("three", ())]
    outcomes = bits.compare(
        chosen,
        before=lambda case: "640 samples",
        now=lambda case: f"64{len(case.name) - 3} samples",
    )
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["same", "one"],
        ["same", "two"],
        ["DIFFERS", "three"],
    ]
    assert outcomes["three"] == ("640 samples", "642 samples")


def test_a_comparison_tells_intended_changes_from_others():
    outcomes = {"same": ("a" * 64,) * 2, "moved": ("a" * 64, "b" * 64), "still": ("c" * 64,) * 2}
    text = bits.report(outcomes, names=("commit 1", "now"), intended=["moved", "still"])
    assert (
        text
        == """2 of 3 runs are the same

| run | commit 1 | now | intended |
|---|---|---|---|
| moved | aaaaaaaaaaaa | bbbbbbbbbbbb | yes |

meant to differ, and the same: still"""
    )
    assert not bits.has_unintended(outcomes, ["moved"])
    assert bits.has_unintended(outcomes, ["still"])
    assert "| moved | aaaaaaaaaaaa | bbbbbbbbbbbb | no |" in bits.report(outcomes, names=("1", "2"))


def test_a_run_that_cannot_be_made_never_counts_as_the_same():
    outcomes = {"new option": (bits.FAILED, "a" * 64), "broken": (bits.FAILED, bits.FAILED)}
    assert "0 of 2 runs are the same" in bits.report(outcomes, names=("1", "2"))
    assert bits.has_unintended(outcomes, list(outcomes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "HEAD", "--only", "diloko"], "there is no run 'diloko'"),
        (["--against", "HEAD", "--intended", "diloko"], "there is no run 'diloko'"),
        ([], "one of the arguments --against --list is required"),
    ],
)
def test_a_comparison_refuses_unknown_runs_before_it_makes_any(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bits.main(arguments)
    assert message in capsys.readouterr().err


def test_a_comparison_refuses_what_is_no_commit():
    with pytest.raises(SystemExit, match=r"must name a commit .* got --output=x"):
        bits.resolved("--output=x")


def test_a_comparison_lists_its_runs(capsys):
    assert bits.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert {"diloco", "killed by messages", "center in shards"} <= set(names)
    assert len(names) == len(set(names)) == len(list(bits.cases()))


@pytest.mark.processes
def test_the_programs_of_a_version_import_no_other_raydl(tmp_path, root):
    def imported_in(folder):
        return subprocess.run(
            [sys.executable, "-c", "import raydl; print(raydl.__file__)"], cwd=tmp_path, text=True,
            capture_output=True, env={"PYTHONPATH": f"{folder}:{root}"}, check=False,
        )  # fmt: skip

    with workplace() as place:
        now = bits.place_now(place)
        assert imported_in(now.root).stdout == f"{now.root}/raydl/__init__.py\n"
        assert len((now.root / only_from_here.NOTES).read_text().split()) == 1
        (now.root / "raydl").rename(now.root / "elsewhere")
        done = imported_in(now.root)  # raydl of the other folder of the path would be found
    assert done.returncode == 1
    assert f"would import raydl from {root}/raydl/__init__.py" in done.stderr
    assert not now.root.exists()


@pytest.mark.processes
def test_the_version_before_is_that_of_its_commit(root):
    git = ["git", "-C", str(root)]
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("no checkout")
    with workplace() as place:
        before = bits.place_before(place, bits.resolved("HEAD"))
        shown = subprocess.run(
            [*git, "show", "HEAD:raydl/core/rules.py"], capture_output=True, check=True
        )
        assert (before.root / "raydl/core/rules.py").read_bytes() == shown.stdout


def until_all_are_in_groups(*pids):
    """Wait until processes are in control groups of their own."""
    deadline = time.monotonic() + 60
    while not all("raydl-" in Path(f"/proc/{pid}/cgroup").read_text() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.skipif(not may_throttle(), reason="needs root and control groups for CPU time")
def test_processes_get_the_quotas_in_the_order_in_which_they_appear():
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(busy) as first, subprocess.Popen(busy) as second:
        try:
            with throttled(lambda: [second.pid, first.pid], [0.4, 0.15]) as uses:
                until_all_are_in_groups(first.pid, second.pid)
                before = [times_of(process.pid) for process in (first, second)]
                time.sleep(3.0)
                after = [times_of(process.pid) for process in (first, second)]
        finally:
            first.kill()
            second.kill()
    used = [(b.cpu_s - a.cpu_s) / (b.at_s - a.at_s) for a, b in zip(before, after, strict=True)]
    assert used[0] < 0.15 + 0.05
    assert used[1] < 0.4 + 0.05
    cores = [use.cores(0.0, 3.0) for use in uses]
    assert cores == pytest.approx([used[1], used[0]], abs=0.05)


@pytest.mark.processes
@pytest.mark.skipif(not may_throttle(), reason="needs root and control groups for CPU time")
def test_a_process_whose_quota_changes_uses_the_mean_of_both():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            with throttled(lambda: [process.pid], [0.3], slow_share=0.1, every_s=0.5) as uses:
                until_all_are_in_groups(process.pid)
                time.sleep(3.0)
        finally:
            process.kill()
    [use] = uses
    assert 0.13 < use.cores(0.0, 3.0) < 0.2 + 0.05


def test_a_forward_pass_without_a_gradient_records_no_step(tmp_path, monkeypatch):
    monkeypatch.setenv(watching.FOLDER, str(tmp_path))
    model, pictures = watching.lenet((1, 28, 28), 10), torch.zeros(4, 1, 28, 28)
    loss = model(pictures).sum()
    assert not list(tmp_path.glob("*.steps"))
    loss.backward()
    (notes,) = tmp_path.glob("*.steps")
    assert len(notes.read_bytes()) == 16
