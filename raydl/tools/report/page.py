"""Puts the page together, for one run or for several."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raydl.tools.report import sections
from raydl.tools.report.curves import charts_of, legend, line_swatch
from raydl.tools.report.facts import RunFacts, moment
from raydl.tools.report.html import Html, element, table
from raydl.tools.report.sections import duration, speed, written
from raydl.tools.report.style import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of the page: a browser fetches nothing."""


def make_page(runs: Sequence[RunFacts], *, now: float | None = None) -> str:
    """Return the page.

    Args:
        runs: one run, or several to compare.
        now: Unix time at which the page is written; None: the current time.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = _one_run(runs[0]) if len(runs) == 1 else _several_runs(list(runs))
    return whole_page(title, *body, now=now)


def whole_page(
    title: str,
    *body: Html | None,
    css: str = "",
    written_by: str = "raydl report",
    now: float | None = None,
) -> str:
    """Return a page of elements, with the style sheet, that fetches nothing.

    Args:
        title: title of the window.
        body: the elements.
        css: further rules of the style sheet.
        written_by: the command that writes it.
        now: Unix time at which it is written; None: the current time.
    """
    written_at = moment(time.time() if now is None else now)
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", title),
            element("style", Html(CSS + css)),
        ),
        element("body", *body, element("footer", f"Written by {written_by}, {written_at}.")),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _one_run(run: RunFacts) -> list[Html | None]:
    return [
        element("h1", run.name),
        element("p", sections.subtitle(run), class_="sub"),
        sections.headline(run),
        sections.notes(run),
        *_curves([run]),
        *_titled("Where the time went", sections.time_parts([run])),
        *_details(run),
    ]


def _several_runs(runs: list[RunFacts]) -> list[Html | None]:
    return [
        element("h1", f"{len(runs)} runs compared"),
        _comparison(runs),
        *_titled("Settings that differ", _differences(runs)),
        *_curves(runs, legend([run.name for run in runs])),
        *_titled("Where the time went", sections.time_parts(runs)),
        *(_section(run, number) for number, run in enumerate(runs)),
    ]


def _section(run: RunFacts, number: int) -> Html:
    return element(
        "section",
        element("h2", line_swatch(number), " ", run.name),
        element("p", sections.subtitle(run), class_="sub"),
        sections.headline(run),
        sections.notes(run),
        *_details(run, level="h3"),
        class_="run",
    )


def _curves(runs: Sequence[RunFacts], keys: Html | None = None) -> list[Html | None]:
    figures = charts_of(runs)
    if not figures:
        return []
    return [element("h2", "Curves"), keys, element("div", *figures, class_="charts")]


def _details(run: RunFacts, level: str = "h2") -> list[Html]:
    return [
        *_titled("Exchange", sections.exchange(run), level),
        *_titled("Workers", sections.workers(run), level),
        *_titled("Membership", sections.timeline(run), level),
        *_titled("Faults that fired", sections.faults(run), level),
        *_titled("Checkpoints", sections.checkpoints(run), level),
        *_titled("Configuration", sections.configuration(run), level),
    ]


def _titled(title: str, content: Html | None, level: str = "h2") -> list[Html]:
    return [] if content is None else [element(level, title), content]


def _comparison(runs: Sequence[RunFacts]) -> Html:
    """Return a table with the headline figures of each run."""
    head = ["run", "method", "center", "samples", "time", "samples/s", "workers",
            "communication", "ended"]  # fmt: skip
    rows: list[list[object]] = []
    for number, run in enumerate(runs):
        rows.append([
            element("span", line_swatch(number), " ", run.name, class_="key"),
            run.setting("method.name"),
            sections.score_text(run),
            written(run.figure("samples"), "{:,.0f}"),
            duration(run.figure("seconds")),
            written(speed(run), "{:,.0f}"),
            sections.worker_range(run),
            written(run.figure("communication_share"), "{:.1%}"),
            run.ending,
        ])  # fmt: skip
    return table(head, rows, numbers=tuple(head[2:8]))


def _differences(runs: Sequence[RunFacts]) -> Html | None:
    """Return a table of the settings in which the runs differ, or None if they do not."""
    own = ("run.name", "run.run_dir")
    names = dict.fromkeys(name for run in runs for name in run.config if name not in own)
    rows: list[list[object]] = []
    for name in names:
        values = [run.setting(name) if name in run.config else "" for run in runs]
        if len(set(values)) > 1:
            rows.append([element("code", name), *values])
    return table(["setting", *(run.name for run in runs)], rows) if rows else None
