"""Makes the table on the terminal, the text of ``comparison.md`` and its charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from raydl.config import TrainConfig
from raydl.faults.plan import num_bad_workers
from raydl.metrics import TIME_PARTS
from raydl.metrics.charts import (
    Chart,
    Line,
    bars_in_file,
    line_group,
    lines_in_file,
    styles_of_methods,
)
from raydl.text.formatting import markdown_table
from raydl.text.redaction import redact
from raydl.tools.comparison.figures import (
    BYTES,
    COLUMNS,
    OVER,
    Row,
    Spread,
    at_target,
    chosen,
    last_score,
)
from raydl.tools.comparison.settings import Comparison
from raydl.tools.report.sections import byte_size
from raydl.tools.runs import Run, machine

PICTURES = {
    "accuracy_over_seconds.png": "Accuracy over seconds of training",
    "accuracy_over_samples.png": "Accuracy over samples of all workers together",
    "accuracy_over_bytes.png": "Accuracy over bytes that the exchanges have sent",
    "accuracy_over_messages.png": "Accuracy over messages of all workers together",
    "time_parts.png": "The eight time parts of SC17, seconds per worker",
}
"""Captions of the charts, by file name."""
MOST_LINES = 7
"""Methods with a line at first: more cannot be told apart."""
_SETTINGS = ("method", "period", "lr", "momentum", "strategy")
_HEAD = [*_SETTINGS, "runs", "at target", *(name for name, _ in COLUMNS.values())]
_NOTES = """\
Medians over seeds, with the least and the greatest value in brackets. *Period*: local steps between
two exchanges; *lr*: peak learning rate. *At target*: runs that reached the target. Time, which is
training time, samples and bytes are those of the first evaluation at the target; a run that never
reaches it counts as slower than all others. *Bytes*: sent in exchanges by all workers and the
center; *messages*: of the workers. *Communication*: share of
the workers' time since initialization. *Exchanges*: an exchange of a synchronous method involves
all workers, one of any other method a single worker. *Local steps each*: mean local steps of a
worker per exchange; fewer than the period if a round was shortened. *Staleness*: mean number of
exchanges of other workers between two exchanges of a worker."""
_END_WORDS = {
    "samples": "{:,} samples each",
    "seconds": "{:g} seconds of training each",
    "bytes": "{} sent in the exchanges of each",
    "epochs": "{} epochs each",
    "steps": "{:,} local steps of each worker",
}


def describe(comparison: Comparison) -> str:
    """Return a line with the settings that all runs share."""
    base, training = comparison.base, comparison.base.training
    ends = [text.format(v) for e, text in _END_WORDS.items() if (v := getattr(training, e))]
    first, last = training.seed, training.seed + comparison.seeds - 1
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    workers = base.scaling.wanted()
    place = "in one process" if workers == "0" else f"{workers} workers"
    if base.run.bad_share is not None:
        place += f", of which {bad_workers(base)}"
    if base.input.skew is not None:
        place += f", data that differ between them by {base.input.skew:g}"
    return (
        f"{base.model} on {redact(base.data)}, {place}, {', '.join(ends)}, "
        f"batches of {training.batch_size}, {seeds}, target {comparison.target:.2%}"
    )


def bad_workers(config: TrainConfig) -> str:
    """Return the number of bad workers and what they send, "" without any."""
    if config.run.bad_share is None:
        return ""
    share, kind = config.run.bad_share
    count = num_bad_workers(share, config.scaling.min_workers)
    sent = {"nan": "NaN", "zeros": "zeros", "reversed": "reversed messages"}[kind]
    return f"{count} send{'s' if count == 1 else ''} {sent}"


def sentence(run: Run, target: float) -> str:
    """Return what is printed at the end of a complete run."""
    assert run.figures is not None
    score, reached = at_target(run, target), "not reached"
    if score:
        reached = f"after {score['seconds']:.1f} s, {score['samples']:,} samples"
    accuracy = run.figures["center_accuracy"]
    shown = _written(-math.inf if accuracy is None else accuracy, "{:.2%}")
    return f"{shown} in {run.figures['seconds']:.1f} s; {target:.2%} {reached}"


def _spread(spread: Spread, pattern: str) -> str:
    """Return ``median (low to high)``, without brackets if low and high are equal."""
    values = (spread.median, spread.low, spread.high)
    median, low, high = (_written(value, pattern) for value in values)
    return median if low == high else f"{median} ({low} to {high})"


def settings_cells(row: Row) -> list[str]:
    """Return method, period, learning rate and momentum of a row."""
    return [row.method, str(row.period), f"{row.lr:g}", f"{row.momentum:g}"]


def cells(row: Row) -> list[str]:
    """Return the cells of a row of the table of results; fewer if no run is complete."""
    names = [*settings_cells(row), row.strategy, f"{row.num_runs} of {row.num_planned}"]
    if not row.num_runs:
        return [*names, f"failed: {row.reason}" if row.reason else "not run"]
    spreads = [_spread(row.figures[name], pattern) for name, (_, pattern) in COLUMNS.items()]
    return [*names, f"{row.num_reached} of {row.num_runs}", *spreads]


def print_table(rows: Sequence[Row], target: float) -> None:
    """Print the medians of the complete runs, and why other runs are not complete."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    names = ("seconds", "samples", "bytes", "accuracy", "comm.")
    for name in ("period", "lr", "at target", *names):
        table.add_column(name, justify="right")
    for row in rows:
        if row.num_runs:
            shown = list(COLUMNS.items())[: len(names)]
            texts = [_written(row.figures[name].median, pattern) for name, (_, pattern) in shown]
            reached = f"{row.num_reached} of {row.num_runs}"
            table.add_row(*settings_cells(row)[:3], reached, *texts)
    if table.row_count:
        Console().print(
            f"\nmedians over seeds; seconds, samples and bytes to {target:.2%}", highlight=False
        )
        Console().print(table)
    for row in rows:
        if row.num_runs < row.num_planned:
            reason = f"failed: {row.reason}" if row.reason else "the others were not run"
            print(f"{row.method}: {row.num_runs} of {row.num_planned} runs complete; {reason}")


def _written(value: float, pattern: str) -> str:
    """Return a figure in its format, ``never`` for infinity, or a dash for minus infinity."""
    if math.isfinite(value):
        return byte_size(value) if pattern == BYTES else pattern.format(value)
    return "never" if value > 0 else "-"


def markdown(
    comparison: Comparison,
    runs: Sequence[Run],
    rows: Sequence[Row],
    out: Path,
    command: str,
) -> str:
    """Return the text of ``comparison.md``, with the charts that exist in the folder ``out``."""
    num_done = sum(run.figures is not None for run in runs)
    driver = machine()
    versions = ", ".join(f"{name} {driver[name]}" for name in ("python", "torch", "ray", "raydl"))
    part_rows = [
        [row.method, *(f"{row.parts[part]:.2f}" for part in TIME_PARTS)]
        for row in rows
        if row.num_runs
    ]
    parts = [
        f"# {len(rows)} methods compared",
        f"All else equal: {describe(comparison)}.",
        f"```bash\n{command}\n```" if command else "",
        f"{num_done} of {len(runs)} runs are complete. "
        f"The driver's machine: {driver['system']}, {driver['cpus']} CPUs; {versions}.",
        "## Results",
        markdown_table(_HEAD, [cells(row) for row in rows]),
        _NOTES + _evaluations(runs),
        _failures(runs),
        "## Time parts",
        "Seconds per worker, mean over seeds; training starts after initialization.",
        markdown_table(["method", *TIME_PARTS], part_rows),
        _survivors(comparison, rows),
        _trials(runs),
        _pictures(out, num_left_out=max(0, len(part_rows) - MOST_LINES)),
        "## Files",
        "`comparison.html`: the charts, with the methods to choose. `comparison.csv`: the table; "
        "`curves.csv`: every score of every run; `comparison.json`: all figures of every run.",
        "Each run's `config.json` holds all of its settings. "
        f"Curves: `tensorboard --logdir {out}`, where *HParams* has a row for every run.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _failures(runs: Sequence[Run]) -> str:
    lines = [f"- {run.label}: {run.reason}" for run in runs if run.reason]
    note = "Failed runs; `error.txt` in a run's folder has the traceback:"
    return "\n".join([note, "", *lines]) if lines else ""


def _evaluations(runs: Sequence[Run]) -> str:
    """Return a sentence about the number of evaluations, which limits the precision."""
    counts = [len(run.figures["evaluations"]) for run in runs if run.figures is not None]
    if not counts:
        return ""
    return (
        f"\nThe center was evaluated {min(counts)} to {max(counts)} times per run; the time and "
        f"samples to the target are no more precise."
    )


def _survivors(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Return the section of the methods that bad workers did not defeat; empty without any."""
    if not (bad := bad_workers(comparison.base)):
        return ""
    survive = [r.method for r in rows if r.num_runs and r.num_reached == r.num_planned]
    others = [
        f"- {row.method}: {row.num_runs} of {row.num_planned} runs complete, {row.num_reached} at "
        f"the target{f'; {row.reason}' if row.reason else ''}"
        for row in rows
        if row.method not in survive
    ]
    lines = [
        "## Bad workers",
        f"Of the workers {bad}. A method survives if every run is complete and at the target: "
        f"{', '.join(survive) or 'none does'}.",
        "\n".join(["The others:", "", *others]) if others else "",
    ]
    return "\n\n".join(filter(None, lines))


def _trials(runs: Sequence[Run]) -> str:
    """Return the section of the trials, empty if each method has one."""
    first = [run for run in runs if run.seed == min(run.seed for run in runs)]
    names = list(dict.fromkeys(name for run in first for name in run.trial))
    if not names:
        return ""
    best = {run.folder for run in chosen(runs)}
    rows = []
    for run in sorted(first, key=lambda run: (run.method, -last_score(run))):
        figures = run.figures or {}
        score = _written(_or_unknown(figures.get("center_accuracy")), "{:.2%}")
        if figures.get("center_accuracy") is None:
            score = _written(_or_unknown(figures.get("center_loss")), "loss {:.4g}")
        is_best = "yes" if run.folder in best else ""
        rows.append([run.method, *(str(run.trial[n]) for n in names), score, is_best])
    note = (
        "Each method had the same trials with the first seed. The trial with the best last score "
        "on the test set was chosen; its run is one of those above, which is a little in favor of "
        "methods whose results depend on the seed."
    )
    return "\n\n".join(
        ["## Trials", note, markdown_table(["method", *names, "score", "chosen"], rows)]
    )


def _or_unknown(value: float | None) -> float:
    return -math.inf if value is None else value


def _pictures(out: Path, *, num_left_out: int) -> str:
    """Return the section of the charts that exist, empty before they are drawn."""
    shown = [f"![{text}]({name})" for name, text in PICTURES.items() if (out / name).exists()]
    if shown and num_left_out:
        shown.insert(0, f"The curves of {num_left_out} more methods: `comparison.html`.")
    return "\n\n".join(["## Pictures", *shown]) if shown else ""


def draw(runs: Sequence[Run], rows: Sequence[Row], target: float, out: Path) -> None:
    """Draw the charts of the complete runs, with a curve for the first few methods.

    Args:
        runs: all runs.
        rows: one row per method, in the order of the legend.
        target: the accuracy at which a line is drawn.
        out: the folder of the charts.
    """
    parts = {row.method: row.parts for row in rows if row.num_runs}
    first = dict(list(scored_runs(runs, rows).items())[:MOST_LINES])
    for x in OVER if first else ():
        picture = lines_in_file([accuracy_chart(first, x, target)], legend="first at target on top")
        picture.save(out / f"accuracy_over_{x}.png")
    if parts:
        picture = bars_in_file(parts, x_label="seconds per worker, mean over seeds")
        picture.save(out / "time_parts.png")


def scored_runs(runs: Sequence[Run], rows: Sequence[Row]) -> dict[str, list[Run]]:
    """Return the runs with accuracies by method, in the order of the rows."""
    scored = {row.method: [r for r in runs if r.method == row.method] for row in rows}
    scored = {name: [run for run in group if _has_accuracy(run)] for name, group in scored.items()}
    return {name: group for name, group in scored.items() if group}


def _has_accuracy(run: Run) -> bool:
    """Whether the run has evaluations with an accuracy; some tasks measure none."""
    scores = (run.figures or {}).get("evaluations", ())
    return bool(scores) and all("accuracy" in score for score in scores)


def accuracy_chart(groups: Mapping[str, Sequence[Run]], x: str, target: float) -> Chart:
    """Return a chart of accuracy over one of ``OVER``: faint seeds, a strong median."""
    styles = styles_of_methods({name: runs[0].strategy for name, runs in groups.items()})
    lines = []
    for number, (name, runs) in enumerate(groups.items()):
        curves, group = [_curve(run, x) for run in runs], line_group(number)
        seeds = curves if len(curves) > 1 else []
        lines += [Line(name, xs, ys, styles[name], is_faint=True, group=group) for xs, ys in seeds]
        lines.append(Line(name, *_median_curve(curves), styles[name], group=group))
    return Chart(lines=lines, x=x, y="accuracy", target=target, title="test accuracy of the center")


def _curve(run: Run, x: str) -> tuple[list[float], list[float]]:
    scores = (run.figures or {})["evaluations"]
    known = [score for score in scores if x in score]
    return [score[x] for score in known], [score["accuracy"] for score in known]


def _median_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[Any, Any]:
    """Return the median over seeds, interpolated between evaluations, where all seeds overlap."""
    if len(curves) == 1:
        return curves[0]
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    grid = every[(every >= first) & (every <= last)]
    if not len(grid):  # the seeds do not overlap: take their last points
        return [np.median([x[-1] for x, _ in curves])], [np.median([y[-1] for _, y in curves])]
    return grid, np.median([np.interp(grid, x, y) for x, y in curves], axis=0)
