"""Axes, lines, areas and bars of charts, read back from their SVG, pixels and figures."""

import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from raydl.metrics import STACK, TIME_PARTS
from raydl.metrics.charts import (
    PALETTE,
    SUFFIXES,
    Chart,
    Line,
    Mark,
    areas,
    bar_in_page,
    bars_in_file,
    family,
    lines_in_file,
    lines_in_page,
    numbered,
    short,
    styles_of_methods,
    thinned,
)


def chart(*ys, xs=None, **settings):
    """Return a chart with a line for each list of ys."""
    lines = [Line(f"line-{n}", xs or range(len(y)), y, numbered(n)) for n, y in enumerate(ys)]
    return Chart(lines=lines, **settings)


def drawn(*ys, label="t", **settings):
    return ElementTree.fromstring(lines_in_page(chart(*ys, **settings)).svg(label))


def texts(svg):
    return [text.text for text in svg.iter("text")]


def beside(svg):
    """Return the labels of the y-axis with their heights above the lowest, in pixels."""
    found = {t.text: float(t.get("y")) for t in svg.iter("text") if "end" in t.get("style")}
    return {text: max(found.values()) - y for text, y in found.items()}


def paths(svg, color):
    """Return the corners of each line of a color."""
    found = [p.get("d") for p in svg.iter("path") if f"stroke:var(--{color})" in p.get("style")]
    return [[tuple(map(float, c.split())) for c in re.split("[ML]", d)[1:]] for d in found]


# axes


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 1], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.13, 0.31], ["0.1", "0.15", "0.2", "0.25", "0.3", "0.35"]),
        ([-50, 50], ["-60", "-40", "-20", "0", "20", "40", "60"]),
        ([3000, 97_000], ["0", "20k", "40k", "60k", "80k", "100k"]),
    ],
)
def test_ticks_are_round_and_lie_around_all_values(values, labels):
    assert list(beside(drawn(values))) == labels


def test_an_axis_from_zero_shows_how_large_a_change_is():
    assert next(iter(beside(drawn([90, 100], y="zero")))) == "0"
    assert next(iter(beside(drawn([90, 100])))) == "90"
    assert next(iter(beside(drawn([-3, 100], y="zero")))) == "-50"


@pytest.mark.parametrize("kind", ["linear", "zero", "count", "log", "accuracy"])
@pytest.mark.parametrize("value", [0, -3, 4, 1e-12, 1e12])
def test_a_single_value_has_an_axis_around_it(value, kind):
    svg = drawn([value], y=kind)
    assert len(beside(svg)) >= 2
    [circle] = svg.iter("circle")
    assert 12 <= float(circle.get("cy")) <= 218


def test_a_logarithmic_axis_gives_each_decade_the_same_length():
    heights = beside(drawn([0.01, 1], y="log"))
    assert list(heights) == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]
    assert heights["0.1"] == pytest.approx(heights["1"] / 2, abs=0.2)


def test_values_within_a_decade_or_with_zeros_have_a_linear_axis():
    assert "1.2" in beside(drawn([1, 2], y="log")), "too short for a logarithm"
    assert "0" in beside(drawn([0, 200], y="log")), "0 has no logarithm"


def test_an_axis_of_accuracies_is_stretched_towards_100_percent():
    heights = beside(drawn([0.1, 0.99], y="accuracy"))
    assert list(heights) == ["50%", "80%", "90%", "95%", "98%", "99%"]
    near, far = heights["99%"] - heights["98%"], heights["90%"] - heights["80%"]
    assert near == pytest.approx(far, rel=0.2)


@pytest.mark.parametrize("values", [[0.1, 0.99], [0.985, 0.987], [1, 1], [0, 0], [0.3, 0.5]])
def test_an_axis_of_accuracies_holds_them_all_and_ends_at_100_percent(values):
    svg = drawn(values, y="accuracy")
    heights = beside(svg)
    assert len(heights) >= 2
    assert list(heights.values()) == sorted(heights.values())
    assert all(0 <= float(label.removesuffix("%")) <= 100 for label in heights)
    assert all(11.9 <= y <= 218.1 for line in paths(svg, "c0") for _, y in line)


def test_a_score_outside_of_0_to_1_has_an_axis():
    assert list(beside(drawn([-3, 70], y="accuracy"))) == ["-20", "0", "20", "40", "60", "80"]


def test_workers_are_counted_in_whole_numbers():
    assert list(beside(drawn([1, 2], y="count"))) == ["0", "1", "2"]
    assert list(beside(drawn([0, 0], y="count"))) == ["0", "1"]


def test_long_runs_have_minutes_or_hours_on_their_axis():
    for end, text, label in (
        (300, "seconds", "200"),
        (3000, "minutes", "40"),
        (9e4, "hours", "20"),
    ):
        svg = drawn([1, 2], xs=[0, end], x="seconds")
        assert f"{text} of training" in texts(svg)
        assert label in texts(svg)


def test_numbers_on_axes_are_short():
    assert [short(v) for v in (0, 0.05, 250, 12000, 1.5e6, 2e9, 2e22)] == [
        "0", "0.05", "250", "12k", "1.5M", "2G", "2e+22"
    ]  # fmt: skip


# lines


def test_a_line_is_straight_and_a_step_holds_its_value():
    svg = drawn([0, 10], xs=[0, 5])
    assert paths(svg, "c0") == [[(52, 218), (446, 12)]]
    step = Line("a", [0, 5], [0, 10], numbered(0), is_step=True)
    svg = ElementTree.fromstring(lines_in_page(Chart(lines=[step])).svg("t"))
    assert paths(svg, "c0") == [[(52, 218), (446, 218), (446, 12)]]


def test_a_thinned_line_keeps_its_ends_and_its_spikes():
    points = [(float(i), 100.0 if i == 777 else float(i % 2)) for i in range(5000)]
    kept = thinned(points, most=100)
    assert len(kept) <= 102
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (777.0, 100.0) in kept
    assert kept == sorted(kept)


def test_a_long_run_is_drawn_in_few_points_and_no_spike_is_lost():
    [line] = paths(drawn([100.0 if i == 777 else float(i % 2) for i in range(50_000)]), "c0")
    assert len(line) <= 402
    assert min(y for _, y in line) == 12


def test_the_colours_of_lines_repeat_dashed():
    svg = drawn(*([n, n] for n in range(10)))
    lines = [p.get("style") for p in svg.iter("path") if "--rule" not in p.get("style")]
    assert [re.search(r"--(c\d)", style)[1] for style in lines] == [
        *(f"c{n}" for n in range(8)), "c0", "c1"
    ]  # fmt: skip
    assert ["stroke-dasharray" in style for style in lines] == [False] * 8 + [True] * 2


def test_points_of_a_line_have_tooltips_and_few_of_them_are_visible():
    few = drawn([1, 2, 4], xs=[0, 600, 1200], x="seconds")
    [group] = few.iter("g")
    assert group.get("class") == "dot few"
    assert [title.text for title in few.iter("title")] == ["1 at 0", "2 at 10", "4 at 20"]
    many = drawn(range(1000))
    [group] = many.iter("g")
    assert group.get("class") == "dot"
    assert len(group) <= 60


def test_tooltips_name_the_line_if_there_are_several():
    assert [title.text for title in drawn([1], [2]).iter("title")] == [
        "line-0: 1 at 0", "line-1: 2 at 0"
    ]  # fmt: skip


def test_a_mark_has_its_event_as_tooltip():
    marks = (Mark(30.0, 2.0, "generation 2: w1 joins"),)
    line = Line("a", [0, 30, 60], [1, 2, 2], numbered(0), is_step=True, marks=marks)
    svg = ElementTree.fromstring(lines_in_page(Chart(lines=[line], x="seconds")).svg("t"))
    [group] = svg.iter("g")
    assert group.get("class") == "mark"
    [circle] = group
    assert (float(circle.get("cx")), float(circle.get("cy"))) == ((52 + 446) / 2, 12)
    assert circle[0].text == "generation 2: w1 joins"


def test_methods_of_one_family_share_a_colour_and_those_of_a_strategy_their_dashes():
    assert family("hogwild-measgd") == family("sync-measgd") == "measgd"
    assert family("original-easgd") == "easgd"
    assert family("eamsgd") == "eamsgd"
    styles = styles_of_methods(
        {"sync-easgd": "sync", "async-easgd": "async", "async-sgd": "async", "my:Rule": "sync"}
    )
    assert styles["sync-easgd"].color == styles["async-easgd"].color
    assert styles["async-sgd"].dashes == styles["async-easgd"].dashes != styles["sync-easgd"].dashes
    assert len({style.color for style in styles.values()}) == 3


# stacks and bars


def test_the_bands_of_the_stack_are_as_high_as_their_seconds():
    parts = {**dict.fromkeys(TIME_PARTS, 0.0), "forward_backward": 3.0, "data_io": 1.0}
    pixels = areas([(0, parts), (1000, parts)]).pixels()
    assert (pixels.dtype, pixels.shape) == (np.uint8, (348, 440, 3))

    def height(part):
        color = [int(STACK[part][i : i + 2], 16) for i in (1, 3, 5)]
        return int((pixels[:230, 240] == color).all(axis=1).sum())

    assert height("forward_backward") == pytest.approx(3 * height("data_io"), rel=0.05)
    assert height("forward_backward") > 100


def test_the_legend_of_the_stack_has_the_newest_seconds_from_bottom_to_top():
    before, now = ({part: n * f for n, part in enumerate(STACK)} for f in (1.0, 100.0))
    [legend] = areas([(0, before), (9, now)]).figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["forward backward 0 s", "replica update 100 s"]
    assert [s.rsplit(" ", 2)[0] for s in labels] == [part.replace("_", " ") for part in STACK]


def test_a_stack_without_duration_and_with_zero_seconds_is_drawn():
    assert areas([(5, dict.fromkeys(TIME_PARTS, 0.0))] * 2).pixels().shape == (348, 440, 3)


def test_a_bar_is_as_wide_as_its_seconds_and_shows_them():
    svg = bar_in_page({"forward_backward": 1.0, "data_io": 3.0}, longest=8.0).svg("t")
    widths = {}
    for path in ElementTree.fromstring(svg).iter("path"):
        xs = [float(x) for x in re.findall(r"[ML]([\d.]+)", path.get("d"))]
        widths[re.search(r"fill:var\(--(\w+)\)", path.get("style"))[1]] = (min(xs), max(xs))
    assert widths["forward_backward"] == (0, 125)
    assert widths["data_io"] == (125, 500)
    assert "data io: 3.00 s" in svg
    assert list(widths) == list(STACK)


def test_bars_keep_their_order():
    figure = bars_in_file({"b": {"data_io": 2.0}, "a": {"data_io": 1.0}}, x_label="x").figure
    [axes] = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    low, high = axes.get_ylim()
    assert names == ["b", "a"]
    assert low > high, "the first is on top"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        part.replace("_", " ") for part in STACK
    ]


# output formats


def test_an_svg_has_no_ids_that_could_collide():
    for svg in (
        lines_in_page(chart(range(50), [1, 2])).svg("t"),
        bar_in_page({"data_io": 1.0}, longest=1.0).svg("t"),
    ):
        assert not re.search(r"\bid=|href|url\(|<style|<defs|xmlns|#", svg)
        assert ElementTree.fromstring(svg).get("role") == "img"


def test_the_same_chart_gives_the_same_svg():
    first, second = (lines_in_page(chart(range(50), [1, 2])).svg("t") for _ in range(2))
    assert first == second


def test_all_colors_of_a_page_are_variables():
    svg = lines_in_page(chart(range(50), [1, 2], target=3.0)).svg("t")
    assert set(re.findall(r"(?:fill|stroke|color):([^;\"]+)", svg)) == {
        "none", "var(--c0)", "var(--c1)", "var(--soft)", "var(--rule)"
    }  # fmt: skip


def test_all_colors_are_different():
    colors = [*PALETTE.values(), *STACK.values()]
    assert len(set(colors)) == len(colors)


def test_text_in_an_svg_is_escaped_and_credentials_are_removed():
    hostile = '<script>"&'
    mark = Mark(0.0, 1.0, f"{hostile} s3://KEY:SECRET@bucket/a")
    line = Line(hostile, [0, 1], [1, 2], numbered(0), marks=(mark,))
    svg = lines_in_page(Chart(lines=[line])).svg(f"{hostile} s3://KEY:SECRET@bucket/b")
    assert "<script" not in svg
    assert "SECRET" not in svg
    tree = ElementTree.fromstring(svg)
    assert tree.get("aria-label") == f"{hostile} s3://bucket/b"
    assert [title.text for title in tree.iter("title")] == [f"{hostile} s3://bucket/a"]


def test_global_settings_of_matplotlib_are_neither_used_nor_changed():
    plain = lines_in_page(chart(range(50))).svg("t")
    parts = dict.fromkeys(TIME_PARTS, 1.0)
    pixels = areas([(0, parts), (9, parts)]).pixels()
    own = {"text.usetex": True, "svg.fonttype": "path", "savefig.bbox": "tight", "axes.grid": True}
    own |= {"axes.facecolor": "black", "text.color": "red", "axes.spines.left": True}
    with matplotlib.rc_context(own):
        assert lines_in_page(chart(range(50))).svg("t") == plain
        assert (areas([(0, parts), (9, parts)]).pixels() == pixels).all()
        assert {name: matplotlib.rcParams[name] for name in own} == own | {"savefig.bbox": "tight"}


@pytest.mark.parametrize(
    ("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_of_a_chart_file_determines_its_format(tmp_path, suffix, head):
    lines_in_file([chart([1, 2])]).save(tmp_path / f"a{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes().startswith(head)
    assert suffix in SUFFIXES


def test_the_legend_of_a_file_has_the_lines_in_order_without_faint_ones():
    lines = [
        Line(name, [1, 2], [1, 2], numbered(0), is_faint=is_faint)
        for name, is_faint in (("b", True), ("b", False), ("a", True), ("a", False))
    ]
    figure = lines_in_file([Chart(lines=lines, target=1.5)], legend="best first").figure
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["b", "a"]
    assert legend.get_title().get_text() == "best first"
    assert "target 150%" in [text.get_text() for text in figure.axes[0].texts]


def test_the_ticks_of_charts_over_workers_double():
    counts = [4 << n for n in range(6)]
    pair = [chart([1.0] * 6, xs=counts, x="workers", y="share") for _ in range(2)]
    picture = lines_in_file(pair)
    picture.pixels()
    for axes in picture.figure.axes:
        assert axes.get_xscale() == "log"
        assert {"4", "16", "64"} <= {label.get_text() for label in axes.get_xticklabels()}
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == "100%"
