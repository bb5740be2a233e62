"""Axes, lines and bars of the report, worked by hand."""

import re

import pytest

from raydl.metrics import STACK
from raydl.tools.report import scales
from raydl.tools.report.charts import Line, bars, chart, path_of, thinned
from raydl.tools.report.curves import samples_at
from raydl.tools.report.events import Curve
from raydl.tools.report.style import CSS


def test_nice_steps_are_one_two_or_five_times_a_power_of_ten():
    assert scales.nice_step(100, 5) == 20
    assert scales.nice_step(0.7, 5) == pytest.approx(0.2)
    assert scales.nice_step(9, 5) == 2
    assert scales.nice_ticks(0, 1) == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert scales.nice_ticks(0.13, 0.31) == (0.15, 0.2, 0.25, 0.3)
    assert scales.nice_ticks(-50, 50) == (-40, -20, 0, 20, 40)


def test_values_go_to_pixels():
    scale = scales.linear([0, 100], 218, 12)
    assert (scale.at(0), scale.at(100), scale.at(50)) == (218, 12, 115)
    assert scales.linear([3, 97], 0, 100).at(100) == 100, "the axis ends at a tick"
    assert scales.linear([3, 97], 0, 94, tight=True).at(97) == 94


def test_one_value_alone_gets_room_around_it():
    assert scales.linear([4], 0, 100).at(4) == pytest.approx(50)
    for value in (0, -3, 1e-12, 1e12):
        for from_zero in (True, False):
            scale = scales.linear([value], 0, 100, from_zero=from_zero)
            assert 0 <= scale.at(value) <= 100
            assert len(scale.ticks) >= 2


def test_a_logarithmic_axis_gives_each_decade_the_same_room():
    scale = scales.logarithmic([0.01, 1], 0, 100)
    assert scale.at(0.1) == pytest.approx(50)
    assert scale.ticks == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    assert scales.logarithmic([1, 2], 0, 100).at(1.5) == 50, "too short for a logarithm"
    assert scales.logarithmic([0, 2], 0, 100).at(1) == 50, "0 has none"


@pytest.mark.parametrize("values", [[0.1, 0.99], [0.985, 0.987], [1, 1], [0, 0], [0.3, 0.5]])
def test_the_axis_of_accuracies_holds_them_all_and_stays_below_one(values):
    scale = scales.accuracies(values, 200, 0)
    assert all(-1e-9 <= scale.at(v) <= 200 + 1e-9 for v in values)
    assert scale.high <= 1
    assert len(scale.ticks) >= 2
    assert list(map(scale.at, scale.ticks)) == sorted(map(scale.at, scale.ticks), reverse=True)


def test_a_score_that_is_no_share_still_has_an_axis():
    assert scales.accuracies([-3, 70], 0, 100).at(-3) >= 0


def test_numbers_on_axes_are_short():
    assert [scales.short(v) for v in (0, 0.05, 250, 12000, 1.5e6, 2e9)] == [
        "0", "0.05", "250", "12k", "1.5M", "2G"
    ]  # fmt: skip


def test_a_line_is_straight_and_a_step_holds_its_value():
    x, y = scales.linear([0, 10], 0, 100), scales.linear([0, 10], 100, 0)
    points = [(0, 0), (5, 10)]
    assert path_of(points, x, y) == "M0.0,100.0L50.0,0.0"
    assert path_of(points, x, y, is_step=True) == "M0.0,100.0H50.0V0.0"


def test_a_thinned_line_keeps_its_ends_and_its_spikes():
    points = [(float(i), 100.0 if i == 777 else float(i % 2)) for i in range(5000)]
    kept = thinned(points, most=100)
    assert len(kept) <= 102
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (777.0, 100.0) in kept
    assert kept == sorted(kept)


def test_long_runs_have_minutes_or_hours_on_their_axis():
    assert "minutes of training" in chart("t", [Line("a", 0, [0, 3000], [1, 2])], x_label="seconds")
    assert "hours of training" in chart("t", [Line("a", 0, [0, 9e4], [1, 2])], x_label="seconds")
    assert chart("t", [Line("a", 0, [], [])], x_label="seconds") is None


def test_workers_are_counted_in_whole_numbers():
    drawn = chart("t", [Line("a", 0, [0, 1], [1, 2])], x_label="samples", kind="count")
    assert ">0.5<" not in drawn
    assert ">2<" in drawn


def test_stacked_bars_share_one_axis():
    drawn = bars([("a", {"x": 1.0, "y": 3.0}), ("b", {"x": 8.0})], {"x": "ex", "y": "why"})
    rectangles = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', drawn)
    assert rectangles == [("0", "125"), ("125", "375"), ("0", "1000")]
    assert "why: 3.00 s" in drawn
    assert bars([("a", {"x": 0.0})], {"x": "ex"}) is None


def test_samples_at_a_moment_lie_between_two_points():
    curve = Curve((100, 300), (1.0, 3.0), (0, 0))
    assert [samples_at(curve, s) for s in (0, 0.5, 1, 2, 3, 9)] == [0, 50, 100, 200, 300, 300]


def test_a_time_part_has_the_colour_that_it_has_in_all_pictures():
    for part, color in STACK.items():
        assert f"  --{part}: {color};" in CSS
        assert f".part-{part} {{ fill: var(--{part}); }}" in CSS
    assert CSS.index("--initialization") < CSS.index("prefers-color-scheme: dark")
