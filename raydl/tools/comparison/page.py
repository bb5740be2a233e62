"""Makes ``comparison.html``: the charts of a comparison, with the methods to choose.

The page needs no script and no network: a box of the legend hides and shows the lines of its method
by the style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raydl.metrics.charts import LineStyle, line_group, lines_in_page, styles_of_methods
from raydl.tools.comparison.figures import COLUMNS, OVER, Row
from raydl.tools.comparison.report import (
    MOST_LINES,
    PICTURES,
    accuracy_chart,
    cells,
    scored_runs,
)
from raydl.tools.report.html import Html, element, table
from raydl.tools.report.page import whole_page
from raydl.tools.runs import Run

_HEAD = ["method", "period", "lr", "momentum", "strategy", "runs", "at target"]


def comparison_page(shared: str, runs: Sequence[Run], rows: Sequence[Row], target: float) -> str:
    """Return the page.

    Args:
        shared: what is equal for all runs, one line.
        runs: the runs to show.
        rows: one row per method, in the order of the legend.
        target: the accuracy at which a line is drawn.
    """
    head = [*_HEAD, *(name for name, _ in COLUMNS.values())]
    groups, title = scored_runs(runs, rows), f"{len(rows)} methods compared"
    return whole_page(
        title,
        element("h1", title),
        element("p", f"All else equal: {shared}.", class_="sub"),
        _charts(groups, target) if groups else None,
        element("h2", "Results"),
        table(head, [_padded(row, len(head)) for row in rows], numbers=tuple(head[5:])),
        css="\n".join(_rule(number) for number in range(len(groups))),
        written_by="raydl compare",
    )


def _padded(row: Row, count: int) -> list[object]:
    name, *texts = cells(row)
    return [element("span", name, class_="key"), *texts, *[""] * (count - 1 - len(texts))]


def _rule(number: int) -> str:
    """Return the rule that hides a line whose box is not checked."""
    off = f".choice:has(#show-{number}:not(:checked))"
    return f"{off} .{line_group(number)} {{ display: none; }}"


def _sample(style: LineStyle) -> Html:
    """Return a short line in a style."""
    dashes = "" if style.dashes == "-" else " ".join(f"{2 * part:g}" for part in style.dashes[1])
    line = element(
        "line", x1=1, y1=6, x2=27, y2=6, stroke=style.color, stroke_width=2.5,
        stroke_dasharray=dashes or None,
    )  # fmt: skip
    return element("svg", line, viewBox="0 0 28 12", class_="sample", aria_hidden="true")


def _charts(groups: Mapping[str, Sequence[Run]], target: float) -> Html:
    """Return the legend with a box for each method, and a chart for each x-axis."""
    styles = styles_of_methods({name: group[0].strategy for name, group in groups.items()})
    boxes: list[Html] = []
    for number, name in enumerate(groups):
        box, is_shown = f"show-{number}", "checked" if number < MOST_LINES else None
        tick = element("input", type="checkbox", id=box, checked=is_shown)
        boxes.append(element("label", tick, " ", _sample(styles[name]), " ", name))
    figures = []
    for x in OVER:
        drawn = lines_in_page(accuracy_chart(groups, x, target)).svg(f"accuracy over {x}")
        caption = element("figcaption", PICTURES[f"accuracy_over_{x}.png"])
        figures.append(element("figure", caption, Html(drawn)))
    left = len(groups) - MOST_LINES
    note = f"; {left} more are hidden at first" if left > 0 else ""
    return element(
        "div",
        element("p", f"Methods to show, the first at the target first{note}:", class_="note"),
        *boxes,
        element("div", *figures, class_="charts"),
        class_="choice",
    )
