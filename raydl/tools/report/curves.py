"""The curves of the page, of one run or of several over each other."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise

from raydl.metrics.charts import Chart, Line, Mark, lines_in_page, numbered
from raydl.tools.report.events import Curve
from raydl.tools.report.facts import Generation, RunFacts
from raydl.tools.report.html import Html, element, swatch

_MOST_WORKERS = 16
"""More lines than that in one picture tell nothing."""
_MOST_MARKS = 500
"""Of more generations every other one has a mark, every third, and so on."""
_STRETCHED = "The axis is stretched towards 100% where scores pass 90%."
_SAMPLES, _SECONDS = "samples", "seconds"
_OVER = {_SAMPLES: "samples", _SECONDS: "time"}
_WINDOWS = 50
"""Two records that come at once make no speed; so it is taken over so many parts of the run."""


def charts_of(runs: Sequence[RunFacts]) -> list[Html]:
    """Return the charts that all runs share, those without a point left out."""
    wanted = [
        _center(runs, _SAMPLES),
        _center(runs, _SECONDS),
        _overlay(runs, "train/loss", "Training loss", _SAMPLES, "log"),
        _overlay(runs, "train/loss", "Training loss", _SECONDS, "log"),
        _chart("Samples per second, over time", _each(runs, _speed), y="zero",
               note=f"Means over equal parts of the run, {_WINDOWS} at most."),
        _chart("Workers that train, over time", _each(runs, _workers), y="count",
               note="A ring is a new generation of the membership: point at it for its reason."),
        _overlay(runs, "exchange/seconds", "Seconds an exchange made a worker wait", _SECONDS,
                 "zero"),
        _overlay(runs, "center/distance", "Distance from the replicas to the center", _SECONDS,
                 "zero"),
    ]  # fmt: skip
    return [figure for figure in wanted if figure is not None]


def _center(runs: Sequence[RunFacts], over: str) -> Html | None:
    """Return the accuracy of the center, or its loss where no task has accuracy."""
    if any(run.curve("center/accuracy") for run in runs):
        return _overlay(runs, "center/accuracy", "Test accuracy of the center", over, "accuracy")
    return _overlay(runs, "center/loss", "Test loss of the center", over, "log")


def _each(runs: Sequence[RunFacts], line: Callable[[RunFacts, int], Line]) -> list[Line]:
    return [line(run, at) for at, run in enumerate(runs)]


def _overlay(runs: Sequence[RunFacts], tag: str, title: str, over: str, kind: str) -> Html | None:
    lines = _each(runs, lambda run, at: _line(run.name, at, run.curve(tag), over))
    note = _STRETCHED if kind == "accuracy" and _passes(lines, 0.9) else ""
    return _chart(f"{title}, over {_OVER[over]}", lines, over=over, y=kind, note=note)


def _chart(
    title: str, lines: Sequence[Line], *, y: str, over: str = _SECONDS, note: str = ""
) -> Html | None:
    """Return lines with their title and a note; None if no line has a point."""
    if not any(line.ys for line in lines):
        return None
    drawn = lines_in_page(Chart(lines=lines, x=over, y=y)).svg(title)
    below = element("p", note, class_="note") if note else None
    return element("figure", element("figcaption", title), Html(drawn), below)


def line_swatch(number: int) -> Html:
    """Return a square in the colour of the line with a number."""
    look = numbered(number)
    return swatch(look.variable, is_dashed=look.dashes != "-")


def legend(names: Sequence[str]) -> Html:
    """Return which colour is which line."""
    keys = [
        element("span", line_swatch(at), " ", name, class_="key") for at, name in enumerate(names)
    ]
    return element("p", *keys, class_="legend")


def _passes(lines: Sequence[Line], share: float) -> bool:
    return any(y > share for line in lines for y in line.ys)


def _line(name: str, number: int, curve: Curve, over: str) -> Line:
    xs = curve.samples if over == _SAMPLES else curve.seconds
    return Line(name, xs, curve.values, numbered(number))


def _speed(run: RunFacts, number: int) -> Line:
    """Return samples per second over equal windows of time, from the samples themselves."""
    curve = run.curve("train/epoch")
    if not curve or curve.seconds[-1] <= 0:
        return Line(run.name, (), (), numbered(number))
    num_windows = max(1, min(_WINDOWS, len(curve) // 2))
    width = curve.seconds[-1] / num_windows
    samples = [samples_at(curve, width * i) for i in range(num_windows + 1)]
    rates = [(after - before) / width for before, after in pairwise(samples)]
    xs = [width * (i + 0.5) for i in range(num_windows)]
    return Line(run.name, xs, rates, numbered(number))


def samples_at(curve: Curve, seconds: float) -> float:
    """Return the samples at a moment, between two points of the curve by a line; 0 at 0 s."""
    at = bisect.bisect_left(curve.seconds, seconds)
    if at == len(curve):
        return curve.samples[-1]
    before_s, before = (curve.seconds[at - 1], curve.samples[at - 1]) if at else (0.0, 0)
    span = curve.seconds[at] - before_s
    share = (seconds - before_s) / span if span > 0 else 1.0
    return before + share * (curve.samples[at] - before)


def _workers(run: RunFacts, number: int) -> Line:
    """Return the workers that trained: a step where each generation was decided."""
    curve = run.curve("workers/count")
    known = _that_counts([g for g in run.generations if g.num_workers is not None])
    if not known or not curve:
        return Line(run.name, curve.seconds, curve.values, numbered(number), is_step=True)
    xs, ys = [g.seconds for g in known], [float(g.num_workers or 0) for g in known]
    marks = tuple(
        Mark(g.seconds, float(g.num_workers or 0), f"generation {g.number}: {g.reason}")
        for g in known[:: -(-len(known) // _MOST_MARKS)]
    )
    end = max(curve.seconds[-1], xs[-1])
    look = numbered(number)
    return Line(run.name, [*xs, end], [*ys, ys[-1]], look, is_step=True, marks=marks)


def _that_counts(generations: Sequence[Generation]) -> list[Generation]:
    """Return those that no resumed start took back: time never runs backwards over them."""
    kept: list[Generation] = []
    for generation in reversed(generations):
        if not kept or generation.seconds <= kept[-1].seconds:
            kept.append(generation)
    return kept[::-1]


def worker_ids(run: RunFacts) -> list[str]:
    """Return the workers that have curves of their own, in the order of their numbers."""
    ids = [t.partition("/")[2] for t in run.history.curves if t.startswith("worker_step_s/")]
    return sorted(ids, key=lambda name: (len(name), name))


def _spreads(run: RunFacts) -> list[Html]:
    """Return the least, the median and the most over all workers."""
    drawn = []
    for name, title in (("step_s", "Seconds of a local step"), ("waited_s", "Seconds waited")):
        tags = {which: f"workers/{name}_{which}" for which in ("least", "median", "most")}
        lines = [
            _line(which, at, run.curve(tag), _SECONDS)
            for at, (which, tag) in enumerate(tags.items())
        ]
        of_all = f"{title}: least, median and most of all workers, over time"
        drawn.append(_chart(of_all, lines, y="zero"))
    return [figure for figure in drawn if figure is not None]


def charts_of_workers(run: RunFacts) -> list[Html]:
    """Return the curves of each worker of one run, with their legend before them."""
    by_length = sorted(worker_ids(run), key=lambda w: -len(run.curve(f"worker_step_s/{w}")))
    shown = [w for w in worker_ids(run) if w in by_length[:_MOST_WORKERS]]
    drawn = []
    for tag, title in (
        ("worker_step_s", "Seconds of a local step, over time"),
        ("worker_waited_s", "Seconds waited in a round, over time"),
    ):
        curves = [(w, run.curve(f"{tag}/{w}")) for w in shown]
        lines = [_line(w, at, curve, _SECONDS) for at, (w, curve) in enumerate(curves)]
        drawn.append(_chart(title, lines, y="zero"))
    figures = [figure for figure in drawn if figure is not None]
    if not figures:
        return []
    left_out = len(by_length) - len(shown)
    figures += _spreads(run) if left_out else []
    more = f"The {len(shown)} that trained longest are drawn; {left_out} more are in the table."
    return [
        legend(shown),
        element("p", more, class_="note") if left_out else Html(""),
        element("div", *figures, class_="charts"),
    ]
