"""All charts, drawn by matplotlib.

A function for each kind of chart (lines, areas, bars) returns a ``Picture``, whose methods are the
forms: pixels for TensorBoard, a file, SVG inside an HTML page. In a page, colours and fonts are
those of the style sheet.

matplotlib is imported with the first chart: the import takes 0.3 s, which neither workers nor the
command line should pay. pyplot is not used: it would share its state with the user's own code.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from raydl.metrics.tags import STACK
from raydl.redaction import redact

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3478f", "#8a6d00", "#3aa0d8", "#7b4fb5", "#59636d")
"""Of numbered lines; the colours of further lines repeat, dashed."""
PALETTE = {
    **{"paper": "#ffffff", "ink": "#1c2024", "soft": "#5c6670", "rule": "#e3e6e9"},
    **{f"c{number}": color for number, color in enumerate(_COLORS)},
}
"""Colours by name, no two the same. In a page, each is the style sheet's variable of that name."""

_FAMILIES = {
    "sgd": "#4d4d4d",
    "msgd": "#a6761d",
    "easgd": "#0072b2",
    "measgd": "#d55e00",
    "eamsgd": "#cc3399",
    "local-sgd": "#009e73",
    "diloco": "#7b4fb5",
}
_OWN_FAMILIES = ("#e6ab02", "#56b4e9", "#e7298a", "#66a61e")
"""Colours of the families that raydl does not know, in the order of the methods."""
_STRATEGIES: dict[str, Any] = {
    "sync": "-",
    "async": (0, (5, 1.5)),
    "hogwild": (0, (1.2, 1.2)),
    "round_robin": (0, (6, 1.5, 1.2, 1.5)),
}

SUFFIXES = (".png", ".svg", ".pdf")
"""Files that a chart can be saved as."""

_FONT = 10
_FILE_DPI = 150
_FILE_WIDTH = 684
_PAGE_SIZE = (460, 260)
"""Sizes are in points: in SVG and in pixels, one is one pixel."""
_PAGE_EDGES = {"left": 52 / 460, "right": 446 / 460, "bottom": 42 / 260, "top": 248 / 260}
_AREAS_SIZE = (440, 348)
"""TensorBoard shows an image 350 pixels wide: its letters must stay legible."""
_AREAS_EDGES = {"left": 44 / 440, "right": 428 / 440, "bottom": 126 / 348, "top": 320 / 348}

_MOST_POINTS = 400
"""A line of more points is thinned: there are fewer pixels than that."""
_MOST_DOTS = 60
"""Points of a line in a page that show their value under the pointer, at most."""
_FEW = 15
"""A line of at most so many points shows each of them."""
_ROOM = 0.002
"""Where 100% lies on an axis stretched towards it; a logarithm alone never gets there."""
_ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
_LONG_LOG = 20
"""Values whose greatest is so many times their least are drawn on a logarithmic axis."""

_SAMPLES = "samples of all workers together"
_SVG = "{http://www.w3.org/2000/svg}"


# looks


@dataclass(frozen=True)
class Look:
    """How a line is drawn."""

    color: str
    """``#rrggbb``."""
    dashes: Any = "-"
    """A line style of matplotlib."""

    @property
    def variable(self) -> str:
        """The colour in a page: a variable of the style sheet."""
        return _with_variables(self.color)


def numbered(number: int) -> Look:
    """Return the look of the line with a number, from 0; past 8 the colours repeat, dashed."""
    dashes = (0, (5, 2.5)) if number >= len(_COLORS) else "-"
    return Look(_COLORS[number % len(_COLORS)], dashes)


def family(method: str) -> str:
    """Return the family of a method: ``easgd`` for ``sync-easgd``."""
    for prefix in ("sync-", "async-", "hogwild-", "original-"):
        method = method.removeprefix(prefix)
    return method


def looks_of_methods(strategies: Mapping[str, str]) -> dict[str, Look]:
    """Return the looks of methods: a colour for each family, dashes for each strategy.

    Args:
        strategies: the strategy of each method, by its name.
    """
    own = dict.fromkeys(f for f in map(family, strategies) if f not in _FAMILIES)
    colors = {f: _OWN_FAMILIES[i % len(_OWN_FAMILIES)] for i, f in enumerate(own)} | _FAMILIES
    return {m: Look(colors[family(m)], _STRATEGIES[s]) for m, s in strategies.items()}


def short(value: float) -> str:
    """Return a number as an axis shows it: ``0.05``, ``250``, ``12k``, ``1.5M``."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{sign}"
    return f"{value:.4g}"


def words(part: str) -> str:
    """Return a time part's name for a person."""
    return part.replace("_", " ")


def percent(share: float) -> str:
    """Return a share as an axis shows it: ``97.5%``."""
    return f"{100 * share:.4g}%"


# what is drawn


@dataclass(frozen=True)
class Mark:
    """A point of a line at which something happened."""

    x: float
    y: float
    sentence: str


@dataclass(frozen=True)
class Line:
    """A line through points from left to right."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    look: Look
    is_step: bool = False
    """Each value holds until the next point."""
    is_faint: bool = False
    """Behind the others, and not in the legend."""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over each other; at least one has a point."""

    lines: Sequence[Line]
    x: str = "samples"
    """``samples``, ``seconds`` (or minutes, or hours, if many), ``workers`` (logarithmic)."""
    y: str = "linear"
    """``linear``: around all values; ``zero``: from 0 on; ``count``: from 0 on, whole numbers;
    ``log``: logarithmic if the greatest value is at least 20 times the least; ``accuracy``: shares,
    stretched towards 100% if one is above 90%; ``share``: from 0% to 100%."""
    title: str = ""
    target: float | None = None
    """Value of a line across the chart."""


@dataclass
class Picture:
    """A chart as a figure of matplotlib, with the sentences that SVG shows under the pointer."""

    figure: Any
    dots: list[_Dots] = field(default_factory=list)
    sentences: dict[str, str] = field(default_factory=dict)
    """Of shapes, by the ``gid`` of the artist."""

    def __post_init__(self) -> None:
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):  # a user may have set LaTeX for charts of their own
            text.set_usetex(False)

    def pixels(self) -> np.ndarray:
        """Return uint8, shape [H, W, 3]."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        return np.array(np.asarray(canvas.buffer_rgba())[..., :3])

    def save(self, path: Path) -> None:
        """Write a file: PNG, SVG or PDF, by its suffix."""
        self.figure.savefig(path, dpi=_FILE_DPI, facecolor=PALETTE["paper"])

    def svg(self, label: str, *, is_stretched: bool = False) -> str:
        """Return an ``svg`` element for an HTML page.

        Colours are variables of the page's style sheet, named as in ``PALETTE`` and ``STACK``;
        fonts are the page's. There are no ids, which could collide with those of another chart,
        and no references. Text is escaped, and credentials are removed from it.

        Args:
            label: for screen readers.
            is_stretched: the page sets width and height independently.
        """
        from matplotlib import rc_context

        text = io.StringIO()
        self.figure.patch.set_visible(False)
        # matplotlib reads these two from its global settings alone.
        with rc_context({"svg.fonttype": "none", "savefig.bbox": "standard"}):
            self.figure.savefig(text, format="svg")
        source = ElementTree.fromstring(text.getvalue())
        svg = ElementTree.Element("svg", {"viewBox": source.attrib["viewBox"], "role": "img"})
        svg.set("aria-label", redact(label))
        if is_stretched:
            svg.set("preserveAspectRatio", "none")
        for group, item in _drawn_in(source):
            made = ElementTree.SubElement(svg, item.tag.removeprefix(_SVG), _attributes(item))
            made.text = item.text
            _say(made, self.sentences.get(group, ""))
        for dots in self.dots:
            dots.add_to(svg)
        return ElementTree.tostring(svg, encoding="unicode")


@dataclass(frozen=True)
class _Dots:
    """Circles with sentences along a line; the style sheet hides those of ``dot`` until hovered."""

    axes: Any
    kind: Literal["dot", "dot few", "mark"]
    color: str
    marks: Sequence[Mark]

    def add_to(self, svg: Any) -> None:
        """Add a group of circles to an SVG element."""
        style = {"class": self.kind, "style": _with_variables(f"color:{self.color}")}
        group = ElementTree.SubElement(svg, "g", style)
        height = self.axes.figure.bbox.height
        radius = {"dot": "4", "dot few": "2.5", "mark": "3.5"}[self.kind]
        for mark in self.marks:
            x, y = self.axes.transData.transform((mark.x, mark.y))
            place = {"cx": _digits(x), "cy": _digits(height - y), "r": radius}
            _say(ElementTree.SubElement(group, "circle", place), mark.sentence)


# kinds


def lines_in_page(chart: Chart) -> Picture:
    """Return a chart of lines for a page, which has its title and legend."""
    figure = _figure(*_PAGE_SIZE)
    figure.subplots_adjust(**_PAGE_EDGES)
    return Picture(figure, _draw_lines(figure.add_subplot(), chart))


def lines_in_file(charts: Sequence[Chart], *, title: str = "", legend: str = "") -> Picture:
    """Return charts side by side, with one legend.

    Args:
        charts: all with the same lines.
        title: above all of them.
        legend: title of the legend.
    """
    count = sum(not line.is_faint for line in charts[0].lines)
    figure = _figure(_FILE_WIDTH, max(320, 60 + 24 * count), layout="constrained")
    panels = figure.subplots(1, len(charts), squeeze=False)[0]
    for axes, chart in zip(panels, charts, strict=True):
        _draw_lines(axes, chart)
    figure.suptitle(title, fontsize=_FONT, color=PALETTE["ink"])
    beside = {"loc": "outside right upper"}
    below = {"loc": "outside lower center", "ncols": min(4, count)}
    place = beside if len(charts) == 1 else below
    handles, names = panels[0].get_legend_handles_labels()
    _legend(figure, handles, names, title=legend, handlelength=3.2, **place)
    return Picture(figure)


def bars_in_file(rows: Mapping[str, Mapping[str, float]], *, x_label: str) -> Picture:
    """Return horizontal bars, stacked of the eight time parts, with a legend.

    Args:
        rows: seconds by part, by the name of the bar; from top to bottom.
        x_label: what is shown.
    """
    figure = _figure(_FILE_WIDTH, 115 + 27 * len(rows), layout="constrained")
    axes = figure.add_subplot()
    _prepare(axes)
    _draw_bars(axes, list(rows.values()), height=0.7)
    longest = max(sum(row.values()) for row in rows.values()) or 1.0
    _set_axis(axes.xaxis, (0, 1.02 * longest), _round_ticks(0, longest), short)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color=PALETTE["rule"], clip_on=False)
    axes.set_xlabel(x_label)
    _legend(figure, *axes.get_legend_handles_labels(), loc="outside right upper")
    return Picture(figure)


def bar_in_page(seconds: Mapping[str, float], *, longest: float) -> Picture:
    """Return one stacked bar without words, to be stretched to the width of a page.

    Args:
        seconds: by time part.
        longest: seconds of a bar of the full width.
    """
    figure = _figure(1000, 10)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, longest), ylim=(-0.5, 0.5))
    _draw_bars(axes, [seconds], height=1.0)
    said = {part: f"{words(part)}: {seconds.get(part, 0.0):,.2f} s" for part in STACK}
    return Picture(figure, sentences=said)


def areas(points: Sequence[tuple[int, Mapping[str, float]]]) -> Picture:
    """Return the eight time parts over samples, stacked; the legend has the newest seconds.

    Args:
        points: samples, and the seconds of each part; at least two, in the order of samples.
    """
    figure = _figure(*_AREAS_SIZE)
    figure.subplots_adjust(**_AREAS_EDGES)
    axes = figure.add_subplot()
    _prepare(axes)
    samples = [float(count) for count, _ in points]
    seconds = np.array([[parts[part] for part in STACK] for _, parts in points]).T
    bands = axes.stackplot(samples, seconds, colors=list(STACK.values()), linewidth=0)
    ticks = _round_ticks(0.0, float(seconds.sum(axis=0).max()))
    _set_axis(axes.yaxis, (0, ticks[-1]), ticks, short)
    across = (samples[0], max(samples[-1], samples[0] + 1))
    _set_axis(axes.xaxis, across, _round_ticks(*across), short)
    axes.grid(axis="y", color=PALETTE["rule"], clip_on=False)
    axes.set_title("seconds per worker, by part", loc="left", fontsize=11, color=PALETTE["ink"])
    axes.set_xlabel(_SAMPLES)
    names = [f"{words(part)} {_figures(points[-1][1][part])} s" for part in STACK]
    _legend(figure, bands, names, loc="lower left", ncols=2, columnspacing=1.2)
    return Picture(figure)


# how they are drawn


def _figure(width: float, height: float, **settings: Any) -> Any:
    """Return an empty figure of a size in points."""
    from matplotlib.figure import Figure

    return Figure((width / 72, height / 72), dpi=72, facecolor=PALETTE["paper"], **settings)


def _prepare(axes: Any) -> None:
    """Remove the frame, and set fonts and colours: the user's own settings must not matter."""
    axes.spines[:].set_visible(False)
    axes.patch.set_visible(False)
    axes.grid(False)
    axes.set_axisbelow(True)
    soft = PALETTE["soft"]
    axes.tick_params(
        which="both", bottom=False, left=False, labelsize=_FONT, labelcolor=soft, pad=6
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=soft, fontsize=_FONT)
        axis.labelpad = 6


def _legend(figure: Any, handles: Any, names: Sequence[str], **settings: Any) -> None:
    given = {"frameon": False, "fontsize": 9, "title_fontsize": 8, "alignment": "left"}
    legend = figure.legend(handles, names, labelcolor=PALETTE["ink"], **given | settings)
    legend.get_title().set_color(PALETTE["soft"])
    for handle in legend.get_lines():
        handle.set_marker("")


def _draw_lines(axes: Any, chart: Chart) -> list[_Dots]:
    """Draw a chart; return the dots of its lines."""
    _prepare(axes)
    drawn = [line for line in chart.lines if len(line.ys)]
    unit, x_label = _x_unit(chart.x, max(max(line.xs) for line in drawn))
    lines = [_thinned_line(line, unit) for line in drawn]
    _set_x(axes, chart.x, [x for line in lines for x in line.xs])
    across = [] if chart.target is None else [chart.target]
    y_text = _set_y(axes, chart.y, [*across, *(y for line in lines for y in line.ys)])
    axes.grid(axis="y", color=PALETTE["rule"], clip_on=False)
    axes.set_title(chart.title, loc="left", fontsize=_FONT, color=PALETTE["ink"])
    axes.set_xlabel(x_label)
    for target in across:
        _draw_target(axes, target)
    width = 1.8 if sum(not line.is_faint for line in lines) <= 2 else 1.3
    for line in lines:
        _draw_line(axes, line, width=width)
    is_named = len(chart.lines) > 1
    return [_dots(axes, line, y_text, is_named=is_named) for line in lines]


def _thinned_line(line: Line, unit: float) -> Line:
    """Return a line as drawn, with its xs in units of the axis."""
    xs, ys = zip(
        *thinned([(x / unit, y) for x, y in zip(line.xs, line.ys, strict=True)]), strict=True
    )
    marks = tuple(replace(mark, x=mark.x / unit) for mark in line.marks)
    return replace(line, xs=xs, ys=ys, marks=marks)


def _draw_line(axes: Any, line: Line, *, width: float) -> None:
    shows_points = len(line.xs) <= _FEW and not line.marks and not line.is_faint
    axes.plot(
        line.xs, line.ys, color=line.look.color, linestyle=line.look.dashes, clip_on=False,
        linewidth=0.6 if line.is_faint else width, alpha=0.3 if line.is_faint else 1.0,
        drawstyle="steps-post" if line.is_step else "default", solid_capstyle="butt",
        marker="o" if shows_points else "", markersize=4,
        label="_" if line.is_faint else line.name,
    )  # fmt: skip
    if line.marks:
        axes.plot(
            [mark.x for mark in line.marks], [mark.y for mark in line.marks], "o", markersize=6,
            color=line.look.color, markerfacecolor=PALETTE["paper"], clip_on=False,
        )  # fmt: skip


def _dots(axes: Any, line: Line, text: Callable[[float], str], *, is_named: bool) -> _Dots:
    """Return the dots of a line: its marks or, if it has none, points all along it."""
    points = list(zip(line.xs, line.ys, strict=True))[:: -(-len(line.xs) // _MOST_DOTS)]
    marks = line.marks or [Mark(x, y, f"{text(y)} at {short(x)}") for x, y in points]
    if is_named:
        marks = [replace(mark, sentence=f"{line.name}: {mark.sentence}") for mark in marks]
    kind: Any = "mark" if line.marks else "dot few" if len(line.xs) <= _FEW else "dot"
    return _Dots(axes, kind, line.look.color, marks)


def _draw_target(axes: Any, target: float) -> None:
    soft = PALETTE["soft"]
    axes.axhline(target, color=soft, linewidth=0.8, zorder=1)
    place = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "bottom"}
    axes.text(0, target, f"target {percent(target)}", color=soft, fontsize=8, **place)


def _draw_bars(axes: Any, rows: Sequence[Mapping[str, float]], *, height: float) -> None:
    left = np.zeros(len(rows))
    for part, color in STACK.items():
        seconds = np.array([row.get(part, 0.0) for row in rows])
        axes.barh(range(len(rows)), seconds, left=left, color=color, height=height,
                  label=words(part), gid=part)  # fmt: skip
        left += seconds


def _figures(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def thinned(
    points: Sequence[tuple[float, float]], most: int = _MOST_POINTS
) -> list[tuple[float, float]]:
    """Return at most about ``most`` points: of each stretch the lowest and the highest.

    So no spike is lost, and the first and the last point stay.
    """
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept = [points[0]]
    for at in range(1, len(points) - 1, size):
        stretch = points[at : min(at + size, len(points) - 1)]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


# axes


def _set_x(axes: Any, kind: str, values: Sequence[float]) -> None:
    if kind == "workers":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.minorticks_off()
        return
    low, high = min(0.0, *values), max(values)
    ticks = _round_ticks(low, high)
    _set_axis(axes.xaxis, (low, high if high > low else ticks[-1]), ticks, short)


def _set_y(axes: Any, kind: str, values: Sequence[float]) -> Callable[[float], str]:
    """Set up the y-axis; return the format of its values."""
    low, high = min(values), max(values)
    is_share = kind in ("accuracy", "share") and low >= 0 and high <= 1
    text = percent if is_share else short
    if is_share and kind == "share":
        limits, ticks = (0.0, 1.0), _round_ticks(0, 1)
    elif is_share and high > 0.9:
        axes.set_yscale("function", functions=(_towards_one, _back_from_one))
        limits = max(0.0, low - 0.01), min(1.0, high + 0.002)
        inside = [tick for tick in _ACCURACIES if limits[0] <= tick <= limits[1]]
        ticks = inside if len(inside) > 2 else _round_ticks(*limits)
    elif kind == "log" and 0 < low <= high / _LONG_LOG:
        axes.set_yscale("log")
        limits, ticks = (low, high), _log_ticks(low, high)
    else:
        ticks = _round_ticks(low, high, from_zero=kind in ("zero", "count"), whole=kind == "count")
        limits = (max(0.0, ticks[0]), min(1.0, ticks[-1])) if is_share else (ticks[0], ticks[-1])
    _set_axis(axes.yaxis, limits, ticks, text)
    axes.minorticks_off()
    return text


def _set_axis(
    axis: Any, limits: tuple[float, float], ticks: Sequence[float], text: Callable[[float], str]
) -> None:
    """Show the ticks that lie within the limits."""
    room = 1e-9 * (limits[1] - limits[0])
    inside = [tick for tick in ticks if limits[0] - room <= tick <= limits[1] + room]
    axis.set_ticks(inside, labels=[text(tick) for tick in inside])
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def _round_ticks(
    low: float, high: float, *, from_zero: bool = False, whole: bool = False
) -> list[float]:
    """Return evenly spaced round numbers, from at most ``low`` to at least ``high``."""
    from matplotlib.ticker import MaxNLocator

    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a single value: room around it
        room = 0.5 * abs(high) or 0.5
        low, high = (low if low == 0 else low - room), high + room
    locator = MaxNLocator(5, steps=(1, 2, 5, 10), integer=whole)
    return [float(tick) for tick in locator.tick_values(low, max(high, 1.0) if whole else high)]


def _log_ticks(low: float, high: float) -> list[float]:
    from matplotlib.ticker import LogLocator

    subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    return [float(tick) for tick in LogLocator(subs=subs).tick_values(low, high)]


def _towards_one(shares: Any) -> Any:
    """Take 98% to 99% as far apart as 80% to 90%."""
    return -np.log10(np.maximum(1 + _ROOM - np.asarray(shares), 1e-9))


def _back_from_one(heights: Any) -> Any:
    return 1 + _ROOM - 10.0 ** -np.asarray(heights)


def _x_unit(kind: str, longest: float) -> tuple[float, str]:
    """Return (the value of one unit, the label) of an x-axis that ends at ``longest``."""
    if kind != "seconds":
        return 1.0, {"samples": _SAMPLES, "workers": "workers"}[kind]
    for limit, size, name in ((600.0, 1.0, "seconds"), (36000.0, 60.0, "minutes")):
        if longest < limit:
            return size, f"{name} of training"
    return 3600.0, "hours of training"


# SVG


def _drawn_in(element: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (id of its group, element) for each path and text, from the bottom to the top.

    Markers, which matplotlib refers to by id, are left out: ``_Dots`` stand in for them.
    """
    for child in element:
        if child.tag == f"{_SVG}g":
            yield from _drawn_in(child, child.get("id", group))
        elif child.tag in (f"{_SVG}path", f"{_SVG}text"):
            yield group, child


def _attributes(item: Any) -> dict[str, str]:
    """Return the attributes that a page needs; fonts are its own."""
    style = re.sub(r"font-[^;]*;\s*", "", item.get("style", ""))
    style = _with_variables(style.replace(": ", ":").replace("; ", ";"))
    kept = {name: _in_short(item.get(name)) for name in ("x", "y", "d") if item.get(name)}
    return {"style": style, **kept}


def _in_short(numbers: str) -> str:
    """Return coordinates with at most one decimal, without superfluous spaces."""
    text = re.sub(r"-?\d+\.\d+", lambda found: _digits(float(found[0])), numbers)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", text).strip()


def _digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _say(element: Any, sentence: str) -> None:
    """Show a sentence when the pointer is over an element."""
    if sentence:
        ElementTree.SubElement(element, "title").text = redact(sentence)


def _with_variables(style: str) -> str:
    """Return a style whose colours are variables of the style sheet."""
    for name, color in (PALETTE | STACK).items():
        style = style.replace(color, f"var(--{name})")
    return style
