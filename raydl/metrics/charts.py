"""Charts, all drawn by matplotlib: their look, their kinds and their forms.

A kind is a function: lines on a page or in a file, areas, bars. It returns a ``Picture``, whose
forms are pixels for TensorBoard, a file, and SVG inside a page, where the style sheet has the
colours.

matplotlib is imported when the first chart is drawn: it takes a third of a second that neither a
worker nor the start of a command should pay. No pyplot: figures are not shared with user code.
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

PALETTE = {
    "paper": "#ffffff",
    "ink": "#1c2024",
    "soft": "#5c6670",
    "rule": "#e3e6e9",
    "c0": "#0072b2",
    "c1": "#d55e00",
    "c2": "#009e73",
    "c3": "#b3478f",
    "c4": "#8a6d00",
    "c5": "#3aa0d8",
    "c6": "#7b4fb5",
    "c7": "#59636d",
}
"""Colours by name, no two the same: in a page, each is the style sheet's variable of that name."""
NUM_COLORS = 8
"""Of numbered lines; past the last, colours repeat, dashed."""

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
"""Families that raydl does not know, in the order in which they come."""
_STRATEGIES: dict[str, Any] = {
    "sync": "-",
    "async": (0, (5, 1.5)),
    "hogwild": (0, (1.2, 1.2)),
    "round_robin": (0, (6, 1.5, 1.2, 1.5)),
}

SUFFIXES = (".png", ".svg", ".pdf")
"""Files that a chart can be saved to."""

_FONT = 10
_FILE_DPI = 150
_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 446, 12, 218
"""A chart in a page, and the edges of its plot, in points; pixels where nothing is scaled."""
_FILE_WIDTH = 684
_AREAS_WIDTH, _AREAS_HEIGHT = 440, 348
"""TensorBoard shows a picture 350 pixels wide: letters must stand being made smaller."""

_MOST_POINTS = 400
"""A line of more points is thinned: there are fewer pixels than that."""
_MOST_DOTS = 60
"""So many points of a line in a page tell their value when the pointer is over them."""
_FEW = 15
"""A line of so few points shows where they are."""
_ROOM = 0.002
"""Where 100% lies on an axis stretched towards it; a logarithm alone never gets there."""
_ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1)
_LONG_LOG = 20
"""Values whose greatest is so many times their least are drawn on a logarithmic axis."""

_SVG = "{http://www.w3.org/2000/svg}"


# looks


@dataclass(frozen=True)
class Look:
    """How a line is drawn."""

    color: str
    """``#rrggbb``."""
    dashes: Any = "-"
    """A line style of matplotlib."""


def numbered(number: int) -> Look:
    """Return the look of the line with a number, from 0; past 8 the colours repeat, dashed."""
    dashes = (0, (5, 2.5)) if number >= NUM_COLORS else "-"
    return Look(PALETTE[color_name(number)], dashes)


def color_name(number: int) -> str:
    """Return the name of the colour of the line with a number."""
    return f"c{number % NUM_COLORS}"


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
    """One line: points from left to right."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    look: Look
    is_step: bool = False
    """A value holds until the next one."""
    is_faint: bool = False
    """Behind the others, and not in the legend."""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over each other; at least one has a point."""

    lines: Sequence[Line]
    x: Literal["linear", "seconds", "doublings"] = "linear"
    """From 0 to the greatest value; the same in seconds, minutes or hours; or by powers of 2."""
    y: Literal["linear", "zero", "count", "log", "accuracy", "share"] = "linear"
    """Around all values; from 0 on; and whole numbers; logarithmic for positive values that differ
    much; shares, stretched towards 100% once one passes 90%; shares from 0 to 100%."""
    title: str = ""
    x_label: str = ""
    """Not of seconds, which have their own."""
    target: float | None = None
    """A line across at this value."""


@dataclass
class Picture:
    """A chart that is drawn, to be had in several forms."""

    figure: Any
    dots: list[_Dots] = field(default_factory=list)
    """Points that say something, in SVG alone."""
    sentences: dict[str, str] = field(default_factory=dict)
    """What a shape says, by the ``gid`` of its artist; in SVG alone."""

    def __post_init__(self) -> None:
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):  # whatever the user's own settings say
            text.set(usetex=False, parse_math=False)

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
        """Return an SVG element to stand in an HTML page.

        Its colours are the page's variables, and its fonts are the page's. It has no ids, which
        those of another picture could equal, and names nothing outside of itself. Texts are
        escaped, and credentials in them left out.

        Args:
            label: read to a person who does not see it.
            is_stretched: as wide and as high as the page makes it.
        """
        from matplotlib import rc_context

        text = io.StringIO()
        self.figure.patch.set_visible(False)
        # The one way to have texts as texts. The second is for the place of dots.
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
        return _with_variables(ElementTree.tostring(svg, encoding="unicode"))


@dataclass(frozen=True)
class _Dots:
    """The points of a line that say something; the style sheet knows when they are to be seen."""

    axes: Any
    kind: Literal["dot", "dot few", "mark"]
    color: str
    marks: Sequence[Mark]

    def add_to(self, svg: Any) -> None:
        """Add circles to an SVG element, in a group of their own."""
        style = {"class": self.kind, "style": f"color:{self.color}"}
        group = ElementTree.SubElement(svg, "g", style)
        height = self.axes.figure.bbox.height
        radius = {"dot": "4", "dot few": "2.5", "mark": "3.5"}[self.kind]
        for mark in self.marks:
            x, y = self.axes.transData.transform((mark.x, mark.y))
            place = {"cx": _digits(x), "cy": _digits(height - y), "r": radius}
            _say(ElementTree.SubElement(group, "circle", place), mark.sentence)


# kinds


def lines_in_page(chart: Chart) -> Picture:
    """Return lines as large as the page has them; title and legend are the page's."""
    figure = _figure(_WIDTH, _HEIGHT)
    axes = figure.add_axes(_place(_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM))
    return Picture(figure, _draw_lines(axes, chart))


def lines_in_file(charts: Sequence[Chart], *, title: str = "", legend: str = "") -> Picture:
    """Return charts side by side on one sheet.

    Args:
        charts: all with the same lines.
        title: of the sheet.
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
    """Return stacked bars with a legend.

    Args:
        rows: seconds of the eight time parts by name, from top to bottom.
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
    """Return one stacked bar without words, to be stretched to the width of the page.

    Args:
        seconds: by time part.
        longest: the seconds that the whole width stands for.
    """
    figure = _figure(1000, 10)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, longest), ylim=(-0.5, 0.5))
    _draw_bars(axes, [seconds], height=1.0)
    said = {part: f"{words(part)}: {seconds.get(part, 0.0):,.2f} s" for part in STACK}
    return Picture(figure, sentences=said)


def areas(points: Sequence[tuple[int, Mapping[str, float]]]) -> Picture:
    """Return the eight time parts over the samples, stacked; the legend has their seconds now.

    Args:
        points: samples, and the seconds of each part, at least two, in the order of samples.
    """
    figure = _figure(_AREAS_WIDTH, _AREAS_HEIGHT)
    axes = figure.add_axes(_place(_AREAS_WIDTH, _AREAS_HEIGHT, 44, _AREAS_WIDTH - 12, 28, 222))
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
    axes.set_xlabel("samples of all workers together")
    names = [f"{words(part)} {_figures(points[-1][1][part])} s" for part in STACK]
    _legend(figure, bands, names, loc="lower left", ncols=2, columnspacing=1.2)
    return Picture(figure)


# how they are drawn


def _figure(width: float, height: float, **settings: Any) -> Any:
    """Return an empty sheet of so many points."""
    from matplotlib.figure import Figure

    return Figure((width / 72, height / 72), dpi=72, facecolor=PALETTE["paper"], **settings)


def _place(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[float, float, float, float]:
    """Return edges, from the top left corner, as matplotlib has them."""
    return left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height


def _prepare(axes: Any) -> None:
    """Take away the frame, and give words and lines their colours."""
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
    """Draw a chart; return what its points say."""
    _prepare(axes)
    drawn = [line for line in chart.lines if len(line.ys)]
    unit, x_label = 1.0, chart.x_label
    if chart.x == "seconds":
        unit, x_label = _unit_of_time(max(max(line.xs) for line in drawn))
    lines = [_thinned_line(line, unit) for line in drawn]
    x_text = _set_x(axes, chart.x, [x for line in lines for x in line.xs])
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
    return [_dots(axes, line, x_text, y_text, is_named=is_named) for line in lines]


def _thinned_line(line: Line, unit: float) -> Line:
    """Return a line as it is drawn, its xs in units of the axis."""
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


def _dots(
    axes: Any,
    line: Line,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    *,
    is_named: bool,
) -> _Dots:
    """Return what a line says: at its marks or, if it has none, at points all along it."""
    points = list(zip(line.xs, line.ys, strict=True))[:: -(-len(line.xs) // _MOST_DOTS)]
    said = line.marks or [Mark(x, y, f"{y_text(y)} at {x_text(x)}") for x, y in points]
    if is_named:
        said = [replace(mark, sentence=f"{line.name}: {mark.sentence}") for mark in said]
    kind: Any = "mark" if line.marks else "dot few" if len(line.xs) <= _FEW else "dot"
    return _Dots(axes, kind, line.look.color, said)


def _draw_target(axes: Any, target: float) -> None:
    soft = PALETTE["soft"]
    axes.axhline(target, color=soft, linewidth=0.8, zorder=1)
    axes.text(1, target, f"target {percent(target)}", transform=axes.get_yaxis_transform(),
              ha="right", va="bottom", color=soft, fontsize=8)  # fmt: skip


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


def _set_x(axes: Any, kind: str, values: Sequence[float]) -> Callable[[float], str]:
    """Lay out the x-axis; return how it writes a value."""
    if kind == "doublings":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.minorticks_off()
        return short
    low, high = min(0.0, *values), max(values)
    ticks = _round_ticks(low, high)
    _set_axis(axes.xaxis, (low, high if high > low else ticks[-1]), ticks, short)
    return short


def _set_y(axes: Any, kind: str, values: Sequence[float]) -> Callable[[float], str]:
    """Lay out the y-axis; return how it writes a value."""
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
    """Return round numbers around two values, the first and the last not between them."""
    from matplotlib.ticker import MaxNLocator

    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: some room around it
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


def _unit_of_time(longest_s: float) -> tuple[float, str]:
    """Return (seconds per unit, the label) of an axis of time that ends at ``longest_s``."""
    for limit, size, name in ((600.0, 1.0, "seconds"), (36000.0, 60.0, "minutes")):
        if longest_s < limit:
            return size, f"{name} of training"
    return 3600.0, "hours of training"


# SVG


def _drawn_in(element: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (id of its group, element) for paths and texts, in the order in which they lie.

    Points, which matplotlib names by reference, are circles of their own.
    """
    for child in element:
        if child.tag == f"{_SVG}g":
            yield from _drawn_in(child, child.get("id", group))
        elif child.tag in (f"{_SVG}path", f"{_SVG}text"):
            yield group, child


def _attributes(item: Any) -> dict[str, str]:
    """Return the attributes that a page needs: fonts are its own."""
    style = (
        re.sub(r"font-[^;]*;\s*", "", item.get("style", "")).replace(": ", ":").replace("; ", ";")
    )
    kept = {name: item.get(name) for name in ("x", "y", "d") if item.get(name)}
    return {"style": style, **{name: _in_short(value) for name, value in kept.items()}}


def _in_short(numbers: str) -> str:
    """Return coordinates with one digit behind the point, and no spaces that nothing needs."""
    text = re.sub(r"-?\d+\.\d+", lambda found: _digits(float(found[0])), numbers)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", text).strip()


def _digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _say(element: Any, sentence: str) -> None:
    """Have a pointer over an element show a sentence."""
    if sentence:
        ElementTree.SubElement(element, "title").text = redact(sentence)


def _with_variables(svg: str) -> str:
    """Return a picture whose colours are the variables of a style sheet."""
    for name, color in (PALETTE | STACK).items():
        svg = svg.replace(f":{color}", f":var(--{name})")
    return svg
