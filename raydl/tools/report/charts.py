"""The pictures of the page, drawn as inline SVG from the numbers themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raydl.tools.report import scales
from raydl.tools.report.html import Html, element
from raydl.tools.report.scales import Scale, short

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 446, 12, 218
"""The edges of the plot inside its picture, in pixels."""
NUM_COLORS = 8
_MOST_POINTS = 400
"""A line of more points is thinned: there are fewer pixels than that."""
_MOST_DOTS = 60
"""So many places of a line tell their value when the pointer is over them."""
_FEW = 15
"""A line of so few points shows where they are."""


@dataclass(frozen=True)
class Mark:
    """A point of a line at which something happened."""

    x: float
    y: float
    sentence: str


@dataclass(frozen=True)
class Line:
    """One line of a chart: points from left to right."""

    name: str
    color: int
    """Its number in the style sheet's colours; past the last, they repeat dashed."""
    xs: Sequence[float]
    ys: Sequence[float]
    is_step: bool = False
    """A value holds until the next one."""
    marks: tuple[Mark, ...] = ()


def chart(
    title: str, lines: Sequence[Line], *, x_label: str, kind: str = "linear", note: str = ""
) -> Html | None:
    """Return a chart of lines, or None if none has a point.

    Args:
        title: above it.
        lines: one on top of the other.
        x_label: what x counts; ``seconds`` are shown in minutes or hours if there are many.
        kind: of the y-axis: ``linear``, ``zero`` (from 0 on), ``count`` (and whole numbers),
            ``log`` or ``accuracy``.
        note: a sentence below the picture.
    """
    drawn = [line for line in lines if line.ys]
    if not drawn:
        return None
    x, y, x_label = _axes(drawn, x_label, kind)
    svg = element(
        "svg",
        _grid(x, y),
        *(_line(line, x, y, several=len(lines) > 1) for line in drawn),
        element("text", x_label, x=(LEFT + RIGHT) / 2, y=HEIGHT - 6, class_="axis mid"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
        class_="many" if len(drawn) > 2 else None,
    )
    below = element("p", note, class_="note") if note else None
    return element("figure", element("figcaption", title), svg, below)


def _axes(lines: Sequence[Line], x_label: str, kind: str) -> tuple[Scale, Scale, str]:
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys]
    x = scales.linear(xs, LEFT, RIGHT, from_zero=True, tight=True)
    if x_label == "seconds":
        size, x_label = scales.unit_of_time(x.high)
        in_units = scales.linear([v / size for v in xs], LEFT, RIGHT, from_zero=True, tight=True)
        x = Scale(
            low=in_units.low * size, high=in_units.high * size, first_px=LEFT, last_px=RIGHT,
            ticks=tuple(t * size for t in in_units.ticks), label=lambda s: short(s / size),
        )  # fmt: skip
        x_label = f"{x_label} of training"
    if kind == "accuracy":
        return x, scales.accuracies(ys, BOTTOM, TOP), x_label
    if kind == "log":
        return x, scales.logarithmic(ys, BOTTOM, TOP), x_label
    y = scales.linear(ys, BOTTOM, TOP, from_zero=kind in ("zero", "count"))
    whole = tuple(tick for tick in y.ticks if kind != "count" or tick.is_integer())
    return x, replace(y, ticks=whole), x_label


def _grid(x: Scale, y: Scale) -> Html:
    """Return the lines across, and the words at both axes."""
    across = [
        element("line", x1=LEFT, x2=RIGHT, y1=y.at(tick), y2=y.at(tick), class_="grid")
        for tick in y.ticks
    ]
    beside = [
        element("text", y.label(tick), x=LEFT - 7, y=y.at(tick) + 4, class_="axis end")
        for tick in y.ticks
    ]
    below = [
        element("text", x.label(tick), x=x.at(tick), y=BOTTOM + 18, class_="axis mid")
        for tick in x.ticks
    ]
    return element("g", *across, *beside, *below)


def _line(line: Line, x: Scale, y: Scale, *, several: bool) -> Html:
    points = thinned(list(zip(line.xs, line.ys, strict=True)))
    name = f"{line.name}: " if several else ""
    path = element("path", d=path_of(points, x, y, is_step=line.is_step), class_="line")
    marks = [_circle(f"{name}{m.sentence}", x.at(m.x), y.at(m.y), 3.5, "mark") for m in line.marks]
    dots = [] if line.marks else _dots(name, points, x, y)
    return element("g", path, *dots, *marks, class_=color_class(line.color))


def _dots(name: str, points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> list[Html]:
    """Return places that tell their value; of a line of few points, all, and to be seen."""
    size, kind = (2.5, "dot few") if len(points) <= _FEW else (4, "dot")
    return [
        _circle(f"{name}{y.label(py)} at {x.label(px)}", x.at(px), y.at(py), size, kind)
        for px, py in points[:: -(-len(points) // _MOST_DOTS)]
    ]


def _circle(sentence: str, x: float, y: float, size: float, kind: str) -> Html:
    return element("circle", element("title", sentence), cx=x, cy=y, r=size, class_=kind)


def color_class(number: int) -> str:
    """Return the classes of a line's colour, and of its dashes where colours repeat."""
    dashes = " dashed" if number >= NUM_COLORS else ""
    return f"c{number % NUM_COLORS}{dashes}"


def path_of(
    points: Sequence[tuple[float, float]], x: Scale, y: Scale, *, is_step: bool = False
) -> str:
    """Return the path through points: straight, or level until the next point."""
    parts: list[str] = []
    for value_x, value_y in points:
        px, py = f"{x.at(value_x):.1f}", f"{y.at(value_y):.1f}"
        if not parts:
            parts.append(f"M{px},{py}")
        else:
            parts.append(f"H{px}V{py}" if is_step else f"L{px},{py}")
    return "".join(parts)


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


def legend(names: Sequence[tuple[str, int]]) -> Html:
    """Return which colour is which line."""
    items = [
        element("span", swatch(color_class(color)), " ", name, class_="key")
        for name, color in names
    ]
    return element("p", *items, class_="legend")


def swatch(kind: str) -> Html:
    """Return a small square in the colour of a class."""
    square = element("rect", x=0, y=1, width=12, height=12, rx=2)
    return element("svg", square, viewBox="0 0 12 14", class_=f"swatch {kind}", aria_hidden="true")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], parts: Mapping[str, str]) -> Html | None:
    """Return stacked bars, one per row, the longest as wide as the page.

    Args:
        rows: a name, and seconds by part.
        parts: in the order in which they are stacked, each with its name for a person.
    """
    longest = max((sum(seconds.values()) for _, seconds in rows), default=0.0)
    if longest <= 0:
        return None
    drawn = []
    for name, seconds in rows:
        before = element("b", name, " ") if len(rows) > 1 else None
        total = f"{sum(seconds.values()):,.1f} s per worker"
        drawn += [element("p", before, total, class_="over"), _bar(seconds, parts, longest)]
    return element("div", *drawn, class_="bars")


def _bar(seconds: Mapping[str, float], parts: Mapping[str, str], longest: float) -> Html:
    """Return one bar: 1000 wide, whatever the page makes of that."""
    drawn, at = [], 0.0
    for part, words in parts.items():
        lasts = seconds.get(part, 0.0)
        title = element("title", f"{words}: {lasts:,.2f} s")
        if lasts > 0:
            x, width = 1000 * at / longest, 1000 * lasts / longest
            drawn.append(element("rect", title, x=x, y=0, width=width, height=10,
                                 class_=part_class(part)))  # fmt: skip
        at += lasts
    return element("svg", *drawn, viewBox="0 0 1000 10", preserveAspectRatio="none",
                   role="img", aria_label="time parts", class_="bar")  # fmt: skip


def part_class(part: str) -> str:
    """Return the class of a time part's colour."""
    return f"part-{part}"
