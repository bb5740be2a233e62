"""Makes the charts of the page, with one line per run or per worker."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise

from raydl.metrics.charts import Chart, Line, Mark, lines_in_page, numbered
from raydl.tools.report.events import Curve
from raydl.tools.report.facts import Generation, RunFacts
from raydl.tools.report.html import Html, element, swatch

_MOST_WORKERS = 16
"""Lines in one chart; more are unreadable."""
_MOST_MARKS = 500
"""Marks in one chart: of more generations only every second has a mark, or every third, ..."""
_SAMPLES, _SECONDS = "samples", "seconds"
_OVER = {_SAMPLES: "samples", _SECONDS: "time"}
_WINDOWS = 50
"""Parts of a run in which the speed is averaged: two simultaneous records have no speed."""


def charts_of(runs: Sequence[RunFacts]) -> list[Html]:
    """Return the charts that overlay the runs, without empty charts."""
    charts = [
        _center(runs, _SAMPLES),
        _center(runs, _SECONDS),
        _overlay(runs, "train/loss", "Training loss", _SAMPLES, "log"),
        _overlay(runs, "train/loss", "Training loss", _SECONDS, "log"),
        _chart("Samples per second, over time", _each(runs, _speed), y="zero",
               note=f"Means over at most {_WINDOWS} equal parts of the run."),
        _chart("Workers that train, over time", _each(runs, _workers), y="count",
               note="A ring marks a new generation: point at it to see the reason."),
        _overlay(runs, "exchange/seconds", "Seconds a worker waits in an exchange", _SECONDS,
                 "zero"),
        _overlay(runs, "center/distance", "Distance from the replicas to the center", _SECONDS,
                 "zero"),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _center(runs: Sequence[RunFacts], over: str) -> Html | None:
    """Return a chart of the center's accuracy, or of its loss if no run has accuracy."""
    if any(run.curve("center/accuracy") for run in runs):
        return _overlay(runs, "center/accuracy", "Test accuracy of the center", over, "accuracy")
    return _overlay(runs, "center/loss", "Test loss of the center", over, "log")


def _each(runs: Sequence[RunFacts], line: Callable[[RunFacts, int], Line]) -> list[Line]:
    return [line(run, number) for number, run in enumerate(runs)]


def _overlay(runs: Sequence[RunFacts], tag: str, title: str, over: str, kind: str) -> Html | None:
    lines = _each(runs, lambda run, number: _line(run.name, number, run.curve(tag), over))
    is_stretched = kind == "accuracy" and any(y > 0.9 for line in lines for y in line.ys)
    note = "The axis is stretched towards 100% if a score exceeds 90%." if is_stretched else ""
    return _chart(f"{title}, over {_OVER[over]}", lines, over=over, y=kind, note=note)


def _chart(
    title: str, lines: Sequence[Line], *, y: str, over: str = _SECONDS, note: str = ""
) -> Html | None:
    """Return a chart with its title and a note, or None if no line has a point."""
    if not any(line.ys for line in lines):
        return None
    drawn = lines_in_page(Chart(lines=lines, x=over, y=y)).svg(title)
    below = element("p", note, class_="note") if note else None
    return element("figure", element("figcaption", title), Html(drawn), below)


def line_swatch(number: int) -> Html:
    """Return a square in the color of a numbered line."""
    look = numbered(number)
    return swatch(look.variable, is_dashed=look.dashes != "-")


def legend(names: Sequence[str]) -> Html:
    """Return the legend of numbered lines."""
    keys = [
        element("span", line_swatch(number), " ", name, class_="key")
        for number, name in enumerate(names)
    ]
    return element("p", *keys, class_="legend")


def _line(name: str, number: int, curve: Curve, over: str) -> Line:
    xs = curve.samples if over == _SAMPLES else curve.seconds
    return Line(name, xs, curve.values, numbered(number))


def _speed(run: RunFacts, number: int) -> Line:
    """Return the line of samples per second, averaged over equal windows of time."""
    curve = run.curve("train/epoch")
    if not curve or curve.seconds[-1] <= 0:
        return Line(run.name, (), (), numbered(number))
    num_windows = max(2, min(_WINDOWS, len(curve) // 2))  # one has no line
    width = curve.seconds[-1] / num_windows
    samples = [samples_at(curve, width * i) for i in range(num_windows + 1)]
    rates = [(after - before) / width for before, after in pairwise(samples)]
    xs = [width * (i + 0.5) for i in range(num_windows)]
    return Line(run.name, xs, rates, numbered(number))


def samples_at(curve: Curve, seconds: float) -> float:
    """Return the number of samples at a time, interpolated linearly from 0 samples at 0 s."""
    right = bisect.bisect_left(curve.seconds, seconds)
    if right == len(curve):
        return curve.samples[-1]
    before_s, before = (curve.seconds[right - 1], curve.samples[right - 1]) if right else (0.0, 0)
    span = curve.seconds[right] - before_s
    share = (seconds - before_s) / span if span > 0 else 1.0
    return before + share * (curve.samples[right] - before)


def _workers(run: RunFacts, number: int) -> Line:
    """Return the number of workers as a step function, with a mark per generation."""
    curve = run.curve("workers/count")
    known = _valid(run.generations)
    if not known or not curve:
        return Line(run.name, curve.seconds, curve.values, numbered(number), is_step=True)
    xs, ys = [g.seconds for g in known], [float(g.num_workers) for g in known]
    marks = tuple(
        Mark(g.seconds, float(g.num_workers), f"generation {g.number}: {g.reason}")
        for g in known[:: -(-len(known) // _MOST_MARKS)]
    )
    end = max(curve.seconds[-1], xs[-1])
    look = numbered(number)
    return Line(run.name, [*xs, end], [*ys, ys[-1]], look, is_step=True, marks=marks)


def _valid(generations: Sequence[Generation]) -> list[Generation]:
    """Return the generations that no resumed start invalidated; their seconds never decrease."""
    kept: list[Generation] = []
    for generation in reversed(generations):
        if not kept or generation.seconds <= kept[-1].seconds:
            kept.append(generation)
    return kept[::-1]


def worker_ids(run: RunFacts) -> list[str]:
    """Return the ids of the workers that have their own curves, in the order of their numbers."""
    ids = [t.partition("/")[2] for t in run.history.curves if t.startswith("worker_step_s/")]
    return sorted(ids, key=lambda name: (len(name), name))


def _chart_of_tags(run: RunFacts, title: str, tags: dict[str, str]) -> Html | None:
    """Return a chart over time of one run's tags, by line name."""
    lines = [
        _line(name, number, run.curve(tag), _SECONDS)
        for number, (name, tag) in enumerate(tags.items())
    ]
    return _chart(f"{title}, over time", lines, y="zero")


def charts_of_workers(run: RunFacts) -> list[Html]:
    """Return a legend and charts with a line for each worker of one run."""
    by_length = sorted(worker_ids(run), key=lambda w: -len(run.curve(f"worker_step_s/{w}")))
    shown = [w for w in worker_ids(run) if w in by_length[:_MOST_WORKERS]]
    omitted = len(by_length) - len(shown)
    titles = {"step": "Seconds of a local step", "waited": "Seconds waited in a round"}
    charts = [
        _chart_of_tags(run, title, {w: f"worker_{name}_s/{w}" for w in shown})
        for name, title in titles.items()
    ]
    if not any(charts):
        return []
    for name, title in titles.items() if omitted else ():
        tags = {which: f"workers/{name}_s_{which}" for which in ("least", "median", "most")}
        charts.append(_chart_of_tags(run, f"{title}: least, median and most of all workers", tags))
    note = (
        f"The {len(shown)} workers that trained longest have a line; the table has {omitted} more."
    )
    return [
        legend(shown),
        element("p", note, class_="note") if omitted else Html(""),
        element("div", *charts, class_="charts"),
    ]
