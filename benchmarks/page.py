"""Writes the page of all benchmarks from their results.

Command:   python -m benchmarks.page [--results FOLDER] [--out docs/benchmarks.md]
                                     [--readme README.md]

Each benchmark with ``--out FOLDER`` leaves NAME.md and NAME.json there (``measure.py``). The page
has a table of raydl beside the other libraries, one of all figures that have a target, one of what
limits those that miss it (``limits.py``), then a section per benchmark: a chart of these figures
relative to their targets, and the benchmark's own report. Short runs (``--quick``) are left out.
The README shows some rows of the first table.

``make bench`` writes the page at its end. The results are kept under version control, so that
``make bench BENCHMARKS="NAME NAME"`` renews some sections of the page and keeps the others; each
section says when, where and of which commit it was measured.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.limits import limit_of
from benchmarks.measure import Figure, target_text
from benchmarks.programs import ROOT

_MOST = 2.0
"""Right end of a chart: twice as good as the target."""
_MET, _MISSED = "#009e73", "#d55e00"
_INTRODUCTION = """# Benchmarks

`make bench` runs the benchmarks and writes this page from their results; with
`BENCHMARKS="exchange recovery"` it runs these alone and keeps the other sections. Each figure is a
median, with the least and the greatest value of the repeats, and is compared only with figures of
the same run. The [journal](journal.md) says what the figures mean. The page lacks the
benchmarks that have not been run in full since results are kept in the repository.

The benchmarks of several machines (`ladder`, `thin_link`, `partitions`, `chaos`, and parts of
`allreduces`, `exchange` and `growth`) need Linux, root, iproute2 and util-linux; `mixed_speed`
needs Linux and root. All of them take some hours; with `BENCH_OPTIONS=--quick` each has a short
form, a quarter of an hour in all.
"""
_BESIDE_OTHERS = """Medians of the same run on the same machine. 🟢: raydl is ahead of the best
other library. The others ran without a hot spare; each row with `--spares 1` is followed by raydl
without one. The sections below say what each library had to do.
"""
_HEAD = """| | raydl | others, the best first | times as good as the best other | |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Comparison:
    """The same quantity for raydl and for other libraries, from one benchmark."""

    what: str
    """The quantity, with its unit."""
    settings: str
    """How raydl was run."""
    ours: str
    """Name of raydl's figure."""
    peers: Mapping[str, str]
    """Names of the others' figures, by library."""
    is_in_readme: bool = False
    """Whether the README shows it, too."""


COMPARISONS = (
    Comparison(
        "share of the quiet speed while one of two workers is killed every 15 s",
        "`sync-easgd --spares 1`",
        "goodput.sync-easgd-2-spare-worker",
        {
            "torchft DiLoCo": "goodput.torchft-diloco-worker",
            "hivemind": "goodput.hivemind-worker",
            "Ray Train": "goodput.ray-train-worker",
        },
    ),
    Comparison(
        "share of the quiet speed while one of two workers is killed every 15 s, without a spare",
        "`sync-easgd --workers 1:2`",
        "goodput.sync-easgd-1:2-worker",
        {
            "torchft DiLoCo": "goodput.torchft-diloco-worker",
            "hivemind": "goodput.hivemind-worker",
            "Ray Train": "goodput.ray-train-worker",
        },
        is_in_readme=True,
    ),
    Comparison(
        "seconds until three workers train again after one was killed",
        "`sync-easgd --spares 1`",
        "recovery.sync-easgd-3-spare.full_strength_s",
        {
            "Ray Train": "recovery.ray-train.full_strength_s",
            "Ray Train with torchft": "recovery.ray-train-with-torchft-diloco.full_strength_s",
        },
    ),
    Comparison(
        "seconds until three workers train again after one was killed, without a spare",
        "`sync-easgd --workers 2:3`",
        "recovery.sync-easgd-2:3.full_strength_s",
        {
            "Ray Train": "recovery.ray-train.full_strength_s",
            "Ray Train with torchft": "recovery.ray-train-with-torchft-diloco.full_strength_s",
        },
        is_in_readme=True,
    ),
    Comparison(
        "seconds of progress lost when one of three workers is killed",
        "`sync-easgd --workers 2:3`",
        "recovery.sync-easgd-2:3.lost_s",
        {
            "Ray Train": "recovery.ray-train.lost_s",
            "Ray Train with torchft": "recovery.ray-train-with-torchft-diloco.lost_s",
        },
    ),
    Comparison(
        "share of the speed of two workers, one of which has a third of the other's",
        "`async-easgd`",
        "mixed_speed.slow.async-easgd",
        {
            "torchrun DDP": "mixed_speed.slow.torchrun-ddp",
            "Ray Train": "mixed_speed.slow.ray-train",
        },
        is_in_readme=True,
    ),
    Comparison(
        "samples/s on a link of 100 Mbit/s",
        "`sync-easgd`, 30 steps, int8",
        "thin_link.ours.100.samples_per_s",
        {
            "torchrun DDP": "thin_link.ddp.100.samples_per_s",
            "torchrun DDP with PowerSGD": "thin_link.ddp-powersgd.100.samples_per_s",
        },
        is_in_readme=True,
    ),
    Comparison(
        "share of the speed of two plain processes, LeNet",
        "`sync-easgd`",
        "efficiency.lenet.sync-easgd-p10",
        {
            "torchrun DDP": "efficiency.lenet.torchrun-ddp",
            "Ray Train": "efficiency.lenet.ray-train",
        },
    ),
    Comparison(
        "seconds to 99.0% on MNIST with two equal workers, each library tuned",
        "`sync-easgd`",
        "time_to_accuracy.sync-easgd-tuned.seconds",
        {
            "torchrun DDP": "time_to_accuracy.torchrun-ddp.seconds",
            "Ray Train": "time_to_accuracy.ray-train.seconds",
        },
        is_in_readme=True,
    ),
    Comparison(
        "seconds from the command to the first step",
        "`sync-easgd`",
        "startup.own.raydl_s",
        {
            "torchrun DDP": "startup.own.torchrun_s",
            "torchft DDP": "startup.own.torchft_s",
            "Ray Train": "startup.own.ray-train_s",
        },
    ),
)


def read_results(folder: Path) -> dict[str, tuple[list[Figure], str]]:
    """Return (figures, report as Markdown) by benchmark, without short or partial runs, by name.

    Raises:
        SystemExit: if the folder has no results.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        text = path.with_suffix(".md").read_text()
        if "(" not in text.partition("\n")[0]:
            figures = [Figure.of_line(line) for line in path.read_text().split("\n") if line]
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
    parts = [_INTRODUCTION, *_beside_others(results), "## Targets", _targets(results)]
    parts += _missed(results)
    for name, (figures, report) in results.items():
        parts += [f"## {name}", _first_line(name)]
        if any(figure.target is not None for figure in figures):
            caption = f"The figures of {name}, relative to their targets"
            parts.append(f"![{caption}]({charts}/{name}.svg)")
        parts.append(_body(report))
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _beside_others(results: dict[str, tuple[list[Figure], str]]) -> list[str]:
    """Return a section with a table of raydl and the other libraries, as far as it was measured."""
    rows = _rows(COMPARISONS, results)
    return ["## Beside other libraries", _BESIDE_OTHERS, _HEAD + rows] if rows else []


def readme_of(readme: str, results: dict[str, tuple[list[Figure], str]], page: str) -> str:
    """Return a README with its rows of the page.

    Args:
        readme: the README, in which these rows may be older.
        results: figures and report by benchmark.
        page: path of the page, relative to the README.

    Raises:
        SystemExit: if the README has no such table.
    """
    before, head, rest = readme.partition(_HEAD)
    if not head:
        raise SystemExit(f"the README has no table that begins with {_HEAD.splitlines()[0]}")
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    shown = [comparison for comparison in COMPARISONS if comparison.is_in_readme]
    return f"{before}{head}{_rows(shown, results, page)}\n{after}"


def _rows(
    comparisons: Sequence[Comparison],
    results: dict[str, tuple[list[Figure], str]],
    page: str = "",
) -> str:
    """Return the rows of those that were measured; they link to the sections of a page."""
    measured = {figure.name: figure for figures, _ in results.values() for figure in figures}
    rows = [_row(comparison, measured, page) for comparison in comparisons]
    return "\n".join(row for row in rows if row)


def _row(comparison: Comparison, measured: Mapping[str, Figure], page: str) -> str | None:
    """Return a row: the quantity, its value for raydl and for each other, and the ratio.

    None: it was not measured for raydl or for any other. Without the figure of one of the others,
    which may have failed, nothing is said about the best one.
    """
    peers = {
        peer: measured[name].value.median
        for peer, name in comparison.peers.items()
        if name in measured
    }
    if comparison.ours not in measured or not peers:
        return None
    ours = measured[comparison.ours]
    is_more = ours.is_better == "greater"
    ordered = sorted(peers.items(), key=lambda item: item[1], reverse=is_more)
    best = ordered[0][1]
    value = ours.value.median
    ratio = value / best if is_more else best / value
    benchmark = comparison.ours.partition(".")[0]
    others = [f"{peer} {_number(of_peer)}" for peer, of_peer in ordered]
    others += [f"{peer} not measured" for peer in comparison.peers if peer not in peers]
    is_whole = len(peers) == len(comparison.peers)
    verdict = f"{ratio:.3g} | {'🟢' if ratio >= 1 else '🔴'}" if is_whole else " | "
    return (
        f"| [{comparison.what}]({page}#{benchmark}) | **{_number(value)}** {comparison.settings} | "
        f"{', '.join(others)} | {verdict} |"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _targets(results: dict[str, tuple[list[Figure], str]]) -> str:
    """Return a table of all figures that have a target."""
    lines = ["| benchmark | figure | measured | target | |", "|---|---|---|---|---|"]
    for name, (figures, _) in results.items():
        lines += [
            f"| [{name}](#{name}) | {_short(figure)} | {figure.value.text()} | "
            f"{target_text(figure)} | {'🟢' if figure.is_met else '🔴'} |"
            for figure in figures
            if figure.target is not None
        ]
    return "\n".join(lines)


def _missed(results: dict[str, tuple[list[Figure], str]]) -> list[str]:
    """Return a section that says what limits the figures that miss their targets."""
    figures = [figure for figures, _ in results.values() for figure in figures]
    of_text: dict[str, list[str]] = {}
    for figure in figures:
        if figure.is_met is False:
            limit = limit_of(figure.name)
            text = limit.markdown() if limit else "Not known."
            of_text.setdefault(text, []).append(f"`{figure.name}`")
    if not of_text:
        return []
    rows = [f"| {', '.join(names)} | {text} |" for text, names in of_text.items()]
    return [
        "## Missed targets, and what limits them",
        "\n".join(["| figure | limit |", "|---|---|", *rows]),
    ]


def _short(figure: Figure) -> str:
    """Return the name of a figure without its benchmark's."""
    return figure.name.partition(".")[2]


def _first_line(benchmark: str) -> str:
    """Return the first line of the docstring of a benchmark, without importing it."""
    path = Path(__file__).with_name(f"{benchmark}.py")
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    return (text or "").partition("\n")[0].replace("``", "`")


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
    """Write the page, its charts, and the README's rows of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    results = read_results(options.results)
    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (figures, _) in results.items():
        if any(figure.target is not None for figure in figures):
            draw(figures, folder / f"{name}.svg")
    options.out.write_text(page_of(results, folder.name))
    page = os.path.relpath(options.out, options.readme.parent)
    options.readme.write_text(readme_of(options.readme.read_text(), results, page))
    print(f"{options.out}: {len(results)} benchmarks")


if __name__ == "__main__":
    main()
