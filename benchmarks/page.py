"""Writes the page of all benchmarks from their results.

Command:   python -m benchmarks.page [--results FOLDER] [--out docs/benchmarks.md]

Each benchmark with ``--out FOLDER`` leaves NAME.md and NAME.json there (``measure.py``). The page
has one table of all figures that have a target, then a section per benchmark: a chart of these
figures relative to their targets, and the benchmark's own report. Short runs (``--quick``) are left
out. ``make bench`` writes the page at its end. The results are kept under version control, so that
``make bench BENCHMARKS="NAME NAME"`` renews some sections of the page and keeps the others; each
section says when, where and of which commit it was measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Figure, target_text
from benchmarks.programs import ROOT

_MOST = 2.0
"""Right end of a chart: twice as good as the target."""
_MET, _MISSED = "#009e73", "#d55e00"
_INTRODUCTION = """# Benchmarks

`make bench` runs the benchmarks and writes this page from their results; with
`BENCHMARKS="exchange recovery"` it runs these alone and keeps the other sections. Each figure is a
median, with the least and the greatest value of the repeats, and is compared only with figures of
the same run. The [measurements](measurements.md) say what the figures mean; the
[journal](journal.md) says why targets were missed. The page lacks the benchmarks that have not been
run in full since results are kept in the repository. Nothing was measured on a GPU.
"""


def read_results(folder: Path) -> dict[str, tuple[list[Figure], str]]:
    """Return (figures, report as Markdown) by benchmark, without short runs, by name.

    Raises:
        SystemExit: if the folder has no results.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        text = path.with_suffix(".md").read_text()
        if "(quick)" not in text.partition("\n")[0]:
            figures = [Figure.of_line(line) for line in path.read_text().splitlines()]
            results[path.stem] = figures, text
    if not results:
        raise SystemExit(f"{folder} has no results of whole benchmarks; run make bench first")
    return results


def page_of(results: dict[str, tuple[list[Figure], str]], charts: str) -> str:
    """Return the page.

    Args:
        results: figures and report by benchmark.
        charts: folder of the charts, relative to the page.
    """
    lines = ["| benchmark | figure | measured | target | |", "|---|---|---|---|---|"]
    for name, (figures, _) in results.items():
        lines += [
            f"| [{name}](#{name}) | {_short(figure)} | {figure.value.text()} | "
            f"{target_text(figure)} | {'🟢' if figure.is_met else '🔴'} |"
            for figure in figures
            if figure.target is not None
        ]
    parts = [_INTRODUCTION, "\n".join(lines)]
    for name, (figures, report) in results.items():
        parts.append(f"## {name}")
        if any(figure.target is not None for figure in figures):
            caption = f"The figures of {name}, relative to their targets"
            parts.append(f"![{caption}]({charts}/{name}.svg)")
        parts.append(_body(report))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _short(figure: Figure) -> str:
    """Return the name of a figure without its benchmark's."""
    return figure.name.partition(".")[2]


def _body(report: str) -> str:
    """Return a report without its title, which the page has."""
    return re.sub(r"\A# .*\n", "", report).strip("\n")


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw the figures relative to their targets: right of the line is better."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    figures = [figure for figure in figures if figure.target is not None]
    drawing = Drawing((8, 0.7 + 0.32 * len(figures)), layout="constrained")
    axes = drawing.add_subplot()
    for row, figure in enumerate(figures):
        least, middle, greatest = sorted(
            min(_MOST, _relative(figure, value))
            for value in (figure.value.least, figure.value.median, figure.value.greatest)
        )
        axes.barh(row, middle, height=0.6, color=_MET if figure.is_met else _MISSED)
        axes.plot([least, greatest], [row, row], color="#1c2024", linewidth=1)
    axes.axvline(1, color="#1c2024", linewidth=1)
    axes.set_yticks(range(len(figures)), [_short(figure) for figure in figures])
    axes.set_ylim(len(figures) - 0.4, -0.6)
    axes.set_xlim(0, _MOST)
    axes.set_xlabel("measured relative to the target; right of 1 is better")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    # Without a date and with fixed ids the same figures give the same file.
    with rc_context({"svg.hashsalt": "raydl"}):
        drawing.savefig(path, metadata={"Date": None})


def _relative(figure: Figure, value: float) -> float:
    """Return how good a value is, relative to the figure's target: 1 meets it."""
    target = figure.target or 0.0
    above, below = (value, target) if figure.is_better == "greater" else (target, value)
    return above / below if below > 0 else _MOST


def main() -> None:
    """Write the page and its charts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    options = parser.parse_args()
    results = read_results(options.results)
    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (figures, _) in results.items():
        if any(figure.target is not None for figure in figures):
            draw(figures, folder / f"{name}.svg")
    options.out.write_text(page_of(results, folder.name))
    print(f"{options.out}: {len(results)} benchmarks")


if __name__ == "__main__":
    main()
