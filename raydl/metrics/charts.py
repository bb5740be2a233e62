"""All charts, drawn by matplotlib.

One function per kind of chart (lines, areas, bars) returns a ``Picture``, whose methods give the
output formats: pixels for TensorBoard, a file, SVG for an HTML page. In a page, the style sheet
sets colors and fonts.

matplotlib is imported with the first chart: the import takes 0.3 s, and neither workers nor the
command line need it. pyplot is not used: it would share its state with the user's code.
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
from raydl.text.redaction import redact

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3478f", "#8a6d00", "#3aa0d8", "#7b4fb5", "#59636d")
"""Colors of numbered lines; further lines repeat them, dashed."""
PALETTE = {
    **{"paper": "#ffffff", "ink": "#1c2024", "soft": "#5c6670", "rule": "#e3e6e9"},
    **{f"c{number}": color for number, color in enumerate(_COLORS)},
}
"""Colors by name, all different; in a page, variables of the style sheet with the same names."""

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
"""Colors of custom rules, in the order of the methods."""
_STRATEGIES: dict[str, Any] = {
    "sync": "-",
    "async": (0, (5, 1.5)),
    "hogwild": (0, (1.2, 1.2)),
    "round_robin": (0, (6, 1.5, 1.2, 1.5)),
}

SUFFIXES = (".png", ".svg", ".pdf")
"""Suffixes of chart files."""

_FONT = 10
_FILE_DPI = 150
_FILE_WIDTH = 684
_PAGE_SIZE = (460, 260)
"""Sizes are in points; one point is one pixel in SVG and in images."""
_PAGE_EDGES = {"left": 52 / 460, "right": 446 / 460, "bottom": 42 / 260, "top": 248 / 260}
_AREAS_SIZE = (440, 348)
"""TensorBoard shows an image 350 pixels wide; its letters must stay legible."""
_AREAS_EDGES = {"left": 44 / 440, "right": 428 / 440, "bottom": 126 / 348, "top": 320 / 348}

_MOST_POINTS = 400
"""Lines with more points are thinned, since a chart has fewer pixels."""
_MOST_DOTS = 60
"""Most points of a line in a page with a value as tooltip."""
_FEW = 15
"""Lines with at most this many points show a dot for each."""
_LOG_OFFSET = 0.002
"""Offset of an axis that is logarithmic towards 100%, so that 100% lies on it."""
_ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
_LOG_RATIO = 20
"""Least ratio of the largest value to the smallest for a logarithmic axis."""

_SAMPLES = "samples of all workers together"
_X_LABELS = {
    "samples": _SAMPLES,
    "bytes": "bytes sent in exchanges",
    "messages": "messages of all workers together",
    "workers": "workers",
}
_GROUP = "line-"
_SVG = "{http://www.w3.org/2000/svg}"


# styles


@dataclass(frozen=True)
class LineStyle:
    """Color and dashes of a line."""

    color: str
    """Color as ``#rrggbb``."""
    dashes: Any = "-"
    """Line style of matplotlib."""

    @property
    def variable(self) -> str:
        """The color in a page: a variable of the style sheet."""
        return _with_variables(self.color)


def numbered(number: int) -> LineStyle:
    """Return the style of the line with a number, from 0; after 8 lines, colors repeat, dashed."""
    dashes = (0, (5, 2.5)) if number >= len(_COLORS) else "-"
    return LineStyle(_COLORS[number % len(_COLORS)], dashes)


def family(method: str) -> str:
    """Return the family of a method: ``easgd`` for ``sync-easgd``."""
    for prefix in ("sync-", "async-", "hogwild-", "original-"):
        method = method.removeprefix(prefix)
    return method


def styles_of_methods(strategies: Mapping[str, str]) -> dict[str, LineStyle]:
    """Return the styles of methods: one color per family, one dash pattern per strategy.

    Args:
        strategies: strategy by name of the method.
    """
    own = dict.fromkeys(f for f in map(family, strategies) if f not in _FAMILIES)
    colors = {f: _OWN_FAMILIES[i % len(_OWN_FAMILIES)] for i, f in enumerate(own)} | _FAMILIES
    return {m: LineStyle(colors[family(m)], _STRATEGIES[s]) for m, s in strategies.items()}


def short(value: float) -> str:
    """Return a number for an axis: ``0.05``, ``250``, ``12k``, ``1.5M``, ``2e+13``."""
    if abs(value) >= 1e12:
        return f"{value:.4g}"
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{sign}"
    return f"{value:.4g}"


def words(part: str) -> str:
    """Return the name of a time part with blanks."""
    return part.replace("_", " ")


def percent(share: float) -> str:
    """Return a share for an axis: ``97.5%``."""
    return f"{100 * share:.4g}%"


# contents


@dataclass(frozen=True)
class Mark:
    """An event on a line, with a tooltip."""

    x: float
    y: float
    sentence: str


@dataclass(frozen=True)
class Line:
    """A line through points, from left to right."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: LineStyle
    is_step: bool = False
    """Whether each value holds until the next point."""
    is_faint: bool = False
    """Whether the line is drawn faintly and left out of the legend."""
    marks: tuple[Mark, ...] = ()
    group: str = ""
    """Class of its shapes in a page, one of ``line_group``, by which a style sheet can hide it."""


def line_group(number: int) -> str:
    """Return the class of the shapes of a numbered line."""
    return f"{_GROUP}{number}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines with common axes; at least one line has a point."""

    lines: Sequence[Line]
    x: str = "samples"
    """``samples``, ``bytes``, ``messages``, ``seconds`` (long runs in minutes or hours) or
    ``workers`` (logarithmic)."""
    y: str = "linear"
    """``linear``: around all values; ``zero``: from 0; ``count``: from 0, integers; ``log``:
    logarithmic if the largest value is at least 20 times the smallest; ``accuracy``: shares,
    stretched towards 100% if one is above 90%; ``share``: from 0% to 100%."""
    title: str = ""
    target: float | None = None
    """Value of a horizontal line across the chart."""


@dataclass
class Picture:
    """A chart as a matplotlib figure, with tooltips for SVG."""

    figure: Any
    dots: list[_Dots] = field(default_factory=list)
    sentences: dict[str, str] = field(default_factory=dict)
    """Tooltips of shapes, by the ``gid`` of the artist."""

    def __post_init__(self) -> None:
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):  # the user may have enabled LaTeX globally
            text.set_usetex(False)

    def pixels(self) -> np.ndarray:
        """Return the chart as pixels, uint8, shape [H, W, 3]."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        return np.array(np.asarray(canvas.buffer_rgba())[..., :3])

    def save(self, path: Path) -> None:
        """Write a file: PNG, SVG or PDF, by its suffix."""
        self.figure.savefig(path, dpi=_FILE_DPI, facecolor=PALETTE["paper"])

    def svg(self, label: str, *, is_stretched: bool = False) -> str:
        """Return an ``svg`` element for an HTML page.

        Colors are variables of the page's style sheet, named as in ``PALETTE`` and ``STACK``; fonts
        are the page's. There are no ids, which could collide with other charts, and no references.
        Text is escaped, and credentials are removed.

        Args:
            label: description for screen readers.
            is_stretched: whether the page sets width and height independently.
        """
        from matplotlib import rc_context

        text = io.StringIO()
        self.figure.patch.set_visible(False)
        # matplotlib reads these two only from its global settings.
        with rc_context({"svg.fonttype": "none", "savefig.bbox": "standard"}):
            self.figure.savefig(text, format="svg")
        source = ElementTree.fromstring(text.getvalue())
        svg = ElementTree.Element("svg", {"viewBox": source.attrib["viewBox"], "role": "img"})
        svg.set("aria-label", redact(label))
        if is_stretched:
            svg.set("preserveAspectRatio", "none")
        for group, item in _shapes_in(source):
            element = ElementTree.SubElement(svg, item.tag.removeprefix(_SVG), _attributes(item))
            element.text = item.text
            if group.startswith(_GROUP):
                element.set("class", group)
            _add_tooltip(element, self.sentences.get(group, ""))
        for dots in self.dots:
            dots.add_to(svg)
        return ElementTree.tostring(svg, encoding="unicode")


@dataclass(frozen=True)
class _Dots:
    """Circles with tooltips along a line; the style sheet shows those of ``dot`` only on hover."""

    axes: Any
    kind: Literal["dot", "dot few", "mark"]
    color: str
    marks: Sequence[Mark]
    group: str = ""

    def add_to(self, svg: Any) -> None:
        """Add a group of circles to an SVG element."""
        kinds = f"{self.kind} {self.group}".strip()
        style = {"class": kinds, "style": _with_variables(f"color:{self.color}")}
        group = ElementTree.SubElement(svg, "g", style)
        height = self.axes.figure.bbox.height
        radius = {"dot": "4", "dot few": "2.5", "mark": "3.5"}[self.kind]
        for mark in self.marks:
            x, y = self.axes.transData.transform((mark.x, mark.y))
            place = {"cx": _digits(x), "cy": _digits(height - y), "r": radius}
            _add_tooltip(ElementTree.SubElement(group, "circle", place), mark.sentence)


# kinds of charts


def lines_in_page(chart: Chart) -> Picture:
    """Return a chart of lines for an HTML page, which adds title and legend itself."""
    figure = _figure(*_PAGE_SIZE)
    figure.subplots_adjust(**_PAGE_EDGES)
    return Picture(figure, _draw_lines(figure.add_subplot(), chart))


def lines_in_file(charts: Sequence[Chart], *, title: str = "", legend: str = "") -> Picture:
    """Return charts side by side, with one legend.

    Args:
        charts: charts with the same lines.
        title: title above all charts.
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
    """Return horizontal bars, stacked from the eight time parts, with a legend.

    Args:
        rows: seconds by part, by name of the bar, from top to bottom.
        x_label: label of the x-axis.
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
    """Return one stacked bar without text, to be stretched to the width of a page.

    Args:
        seconds: seconds by time part.
        longest: seconds of a bar of full width.
    """
    figure = _figure(1000, 10)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, longest), ylim=(-0.5, 0.5))
    _draw_bars(axes, [seconds], height=1.0)
    tooltips = {part: f"{words(part)}: {seconds.get(part, 0.0):,.2f} s" for part in STACK}
    return Picture(figure, sentences=tooltips)


def areas(points: Sequence[tuple[int, Mapping[str, float]]]) -> Picture:
    """Return the eight time parts over samples, stacked; the legend shows the newest seconds.

    Args:
        points: (samples, seconds by part), at least two, in the order of samples.
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
    names = [f"{words(part)} {_short_seconds(points[-1][1][part])} s" for part in STACK]
    _legend(figure, bands, names, loc="lower left", ncols=2, columnspacing=1.2)
    return Picture(figure)


# drawing


def _figure(width: float, height: float, **settings: Any) -> Any:
    """Return an empty figure of a size in points."""
    from matplotlib.figure import Figure

    return Figure((width / 72, height / 72), dpi=72, facecolor=PALETTE["paper"], **settings)


def _prepare(axes: Any) -> None:
    """Remove the frame, and set fonts and colors, so that the user's settings have no effect."""
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
    defaults = {"frameon": False, "fontsize": 9, "title_fontsize": 8, "alignment": "left"}
    legend = figure.legend(handles, names, labelcolor=PALETTE["ink"], **defaults | settings)
    legend.get_title().set_color(PALETTE["soft"])
    for handle in legend.get_lines():
        handle.set_marker("")


def _draw_lines(axes: Any, chart: Chart) -> list[_Dots]:
    """Draw a chart; return the dots of its lines."""
    _prepare(axes)
    nonempty = [line for line in chart.lines if len(line.ys)]
    unit, x_label = _x_unit(chart.x, max(max(line.xs) for line in nonempty))
    lines = [_thinned_line(line, unit) for line in nonempty]
    _set_x(axes, chart.x, [x for line in lines for x in line.xs])
    targets = [] if chart.target is None else [chart.target]
    y_text = _set_y(axes, chart.y, [*targets, *(y for line in lines for y in line.ys)])
    axes.grid(axis="y", color=PALETTE["rule"], clip_on=False)
    axes.set_title(chart.title, loc="left", fontsize=_FONT, color=PALETTE["ink"])
    axes.set_xlabel(x_label)
    for target in targets:
        soft, place = PALETTE["soft"], axes.get_yaxis_transform()
        axes.axhline(target, color=soft, linewidth=0.8, zorder=1)
        axes.text(0, target, f"target {percent(target)}", color=soft, fontsize=8, transform=place,
                  ha="left", va="bottom")  # fmt: skip
    width = 1.8 if sum(not line.is_faint for line in lines) <= 2 else 1.3
    for line in lines:
        _draw_line(axes, line, width=width)
    is_named = len(chart.lines) > 1
    return [_dots(axes, line, y_text, is_named=is_named) for line in lines]


def _thinned_line(line: Line, unit: float) -> Line:
    """Return a line with fewer points, and its xs in units of the axis."""
    xs, ys = zip(
        *thinned([(x / unit, y) for x, y in zip(line.xs, line.ys, strict=True)]), strict=True
    )
    marks = tuple(replace(mark, x=mark.x / unit) for mark in line.marks)
    return replace(line, xs=xs, ys=ys, marks=marks)


def _draw_line(axes: Any, line: Line, *, width: float) -> None:
    shows_points = len(line.xs) <= _FEW and not line.marks and not line.is_faint
    axes.plot(
        line.xs, line.ys, color=line.style.color, linestyle=line.style.dashes, clip_on=False,
        linewidth=0.6 if line.is_faint else width, alpha=0.3 if line.is_faint else 1.0,
        drawstyle="steps-post" if line.is_step else "default", solid_capstyle="butt",
        marker="o" if shows_points else "", markersize=4,
        label="_" if line.is_faint else line.name, gid=line.group or None,
    )  # fmt: skip
    if line.marks:
        axes.plot(
            [mark.x for mark in line.marks], [mark.y for mark in line.marks], "o", markersize=6,
            color=line.style.color, markerfacecolor=PALETTE["paper"], clip_on=False,
        )  # fmt: skip


def _dots(axes: Any, line: Line, text: Callable[[float], str], *, is_named: bool) -> _Dots:
    """Return the dots of a line: its marks, or points along it if it has none."""
    points = list(zip(line.xs, line.ys, strict=True))[:: -(-len(line.xs) // _MOST_DOTS)]
    marks = line.marks or [Mark(x, y, f"{text(y)} at {short(x)}") for x, y in points]
    if is_named:
        marks = [replace(mark, sentence=f"{line.name}: {mark.sentence}") for mark in marks]
    shows_all = len(line.xs) <= _FEW and not line.is_faint
    kind: Any = "mark" if line.marks else "dot few" if shows_all else "dot"
    return _Dots(axes, kind, line.style.color, marks, line.group)


def _draw_bars(axes: Any, rows: Sequence[Mapping[str, float]], *, height: float) -> None:
    left = np.zeros(len(rows))
    for part, color in STACK.items():
        seconds = np.array([row.get(part, 0.0) for row in rows])
        axes.barh(range(len(rows)), seconds, left=left, color=color, height=height,
                  label=words(part), gid=part)  # fmt: skip
        left += seconds


def _short_seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def thinned(
    points: Sequence[tuple[float, float]], most: int = _MOST_POINTS
) -> list[tuple[float, float]]:
    """Return about ``most`` points at most: the lowest and the highest of each interval.

    Spikes are kept, and so are the first and the last point.
    """
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept = [points[0]]
    for start in range(1, len(points) - 1, size):
        interval = points[start : min(start + size, len(points) - 1)]
        extremes = {min(interval, key=lambda p: p[1]), max(interval, key=lambda p: p[1])}
        kept += sorted(extremes)
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
    """Set up the y-axis; return the formatter of its values."""
    low, high = min(values), max(values)
    is_share = kind in ("accuracy", "share") and low >= 0 and high <= 1
    text = percent if is_share else short
    if is_share and kind == "share":
        limits, ticks = (0.0, 1.0), _round_ticks(0, 1)
    elif is_share and high > 0.9:
        axes.set_yscale("function", functions=(_stretch, _unstretch))
        limits = max(0.0, low - 0.01), min(1.0, high + 0.002)
        inside = [tick for tick in _ACCURACIES if limits[0] <= tick <= limits[1]]
        ticks = inside if len(inside) > 2 else _round_ticks(*limits)
    elif kind == "log" and 0 < low <= high / _LOG_RATIO:
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        locator = LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,))
        limits, ticks = (low, high), [float(tick) for tick in locator.tick_values(low, high)]
    else:
        ticks = _round_ticks(low, high, from_zero=kind in ("zero", "count"), whole=kind == "count")
        limits = (max(0.0, ticks[0]), min(1.0, ticks[-1])) if is_share else (ticks[0], ticks[-1])
    _set_axis(axes.yaxis, limits, ticks, text)
    axes.minorticks_off()
    return text


def _set_axis(
    axis: Any, limits: tuple[float, float], ticks: Sequence[float], text: Callable[[float], str]
) -> None:
    """Set the limits of an axis, and the ticks within them."""
    margin = 1e-9 * (limits[1] - limits[0])
    inside = [tick for tick in ticks if limits[0] - margin <= tick <= limits[1] + margin]
    axis.set_ticks(inside, labels=[text(tick) for tick in inside])
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def _round_ticks(
    low: float, high: float, *, from_zero: bool = False, whole: bool = False
) -> list[float]:
    """Return evenly spaced round numbers, from at most ``low`` to at least ``high``."""
    from matplotlib.ticker import MaxNLocator

    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a single value needs a margin
        margin = 0.5 * abs(high) or 0.5
        low, high = (low if low == 0 else low - margin), high + margin
    locator = MaxNLocator(5, steps=(1, 2, 5, 10), integer=whole)
    return [float(tick) for tick in locator.tick_values(low, max(high, 1.0) if whole else high)]


def _stretch(shares: Any) -> Any:
    """Return heights of shares: the distance from 98% to 99% is that from 80% to 90%."""
    return -np.log10(np.maximum(1 + _LOG_OFFSET - np.asarray(shares), 1e-9))


def _unstretch(heights: Any) -> Any:
    return 1 + _LOG_OFFSET - 10.0 ** -np.asarray(heights)


def _x_unit(kind: str, longest: float) -> tuple[float, str]:
    """Return (value of one unit, label) of an x-axis that ends at ``longest``."""
    if kind != "seconds":
        return 1.0, _X_LABELS[kind]
    for limit, size, name in ((600.0, 1.0, "seconds"), (36000.0, 60.0, "minutes")):
        if longest < limit:
            return size, f"{name} of training"
    return 3600.0, "hours of training"


# SVG


def _shapes_in(element: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (id of the group, element) of each path and text, from the bottom to the top.

    Markers, which matplotlib refers to by id, are left out: ``_Dots`` replace them.
    """
    for child in element:
        if child.tag == f"{_SVG}g":
            yield from _shapes_in(child, child.get("id", group))
        elif child.tag in (f"{_SVG}path", f"{_SVG}text"):
            yield group, child


def _attributes(item: Any) -> dict[str, str]:
    """Return the attributes for a page, without fonts."""
    style = re.sub(r"font-[^;]*;\s*", "", item.get("style", ""))
    style = _with_variables(style.replace(": ", ":").replace("; ", ";"))
    kept = {name: _shortened(item.get(name)) for name in ("x", "y", "d") if item.get(name)}
    return {"style": style, **kept}


def _shortened(coordinates: str) -> str:
    """Return coordinates with at most one decimal, without superfluous spaces."""
    text = re.sub(r"-?\d+\.\d+", lambda match: _digits(float(match[0])), coordinates)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", text).strip()


def _digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _add_tooltip(element: Any, sentence: str) -> None:
    if sentence:
        ElementTree.SubElement(element, "title").text = redact(sentence)


def _with_variables(style: str) -> str:
    """Return a style whose colors are variables of the style sheet."""
    for name, color in (PALETTE | STACK).items():
        style = style.replace(color, f"var(--{name})")
    return style
