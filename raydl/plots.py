"""What a comparison shows: the table, ``comparison.md`` and its pictures.

One colour per family of methods (``easgd`` of ``sync-easgd`` and ``hogwild-easgd``), one line
style per schedule. matplotlib is imported when the first picture is drawn, and only then.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from raydl.metrics import TIME_PARTS

if TYPE_CHECKING:
    from raydl.comparison import Comparison, Row, Run, Spread

PICTURES = {
    "accuracy_over_seconds.png": "Accuracy over seconds of training",
    "accuracy_over_samples.png": "Accuracy over samples of all workers together",
    "time_parts.png": "The eight time parts of SC17, seconds per worker",
}
"""Files beside ``comparison.md``, with their captions."""

COLUMNS = {
    "seconds_to_target": ("seconds to target", "{:.2f}"),
    "samples_to_target": ("samples to target", "{:,.0f}"),
    "center_accuracy": ("final accuracy", "{:.2%}"),
    "communication_share": ("communication", "{:.0%}"),
    "rounds": ("exchanges", "{:,.0f}"),
    "staleness": ("staleness", "{:.2f}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "seconds": ("seconds", "{:.1f}"),
}
"""The figures of a row, by their names in ``comparison.json``, with heading and format."""
_HEAD = ["method", "schedule", "runs", "at target", *(name for name, _ in COLUMNS.values())]
_NOTES = """\
Medians over seeds, with the least and the greatest in brackets. *At target*: how many runs
reached it; time and samples are those of the first evaluation that did, in training time, and a
run that never does counts as later than all others. *Communication*: share of the workers' time
since initialization. *Exchanges*: one of a synchronous method takes all workers, one of the others
a single worker. *Staleness*: exchanges of others between two of the same worker, mean."""
_END_WORDS = {
    "samples": "{:,} samples each",
    "seconds": "{:g} seconds of training each",
    "epochs": "{} epochs each",
    "steps": "{:,} local steps of each worker",
}

_COLORS = {
    "sgd": "#4d4d4d",
    "msgd": "#a6761d",
    "easgd": "#0072b2",
    "measgd": "#d55e00",
    "eamsgd": "#cc3399",
    "local-sgd": "#009e73",
    "diloco": "#7b4fb5",
}
_OWN_COLORS = ("#e6ab02", "#56b4e9", "#e7298a", "#66a61e")
_STYLES: dict[str, Any] = {
    "sync": "-",
    "async": (0, (5, 1.5)),
    "hogwild": (0, (1.2, 1.2)),
    "round_robin": (0, (6, 1.5, 1.2, 1.5)),
}
_PART_COLORS = {
    "forward_backward": "#2166ac",
    "replica_update": "#67a9cf",
    "center_update": "#b3d3e8",
    "device_device_parameters": "#d6604d",
    "host_device_parameters": "#f4a582",
    "host_device_data": "#fddbc7",
    "data_io": "#7fbf7b",
    "initialization": "#e3e3e3",
}
"""Work in blue, communication in red; in the order they are stacked."""


def describe(comparison: Comparison) -> str:
    """Return in one line what all runs have in common."""
    base, training = comparison.base, comparison.base.training
    ends = [text.format(v) for e, text in _END_WORDS.items() if (v := getattr(training, e))]
    first, last = training.seed, training.seed + comparison.seeds - 1
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    workers = base.scaling.wanted()
    place = "in one process" if workers == "0" else f"{workers} workers"
    return (
        f"{base.model} on {base.data}, {place}, {', '.join(ends)}, "
        f"batches of {training.batch_size}, {seeds}, target {comparison.target:.2%}"
    )


def sentence(run: Run, target: float) -> str:
    """Return what is printed when a run ended."""
    who = f"{run.method}, seed {run.seed}: "
    if run.figures is None:
        return f"{who}failed: {run.reason}"
    seconds, samples = run.to_target(target)
    reached = f"after {seconds:.1f} s, {samples:,} samples"
    return (
        f"{who}{run.figures['center_accuracy']:.2%} in {run.figures['seconds']:.1f} s; "
        f"{target:.2%} {reached if math.isfinite(seconds) else 'not reached'}"
    )


def machine() -> dict[str, str]:
    """Return what the driver runs on: system, CPUs, versions."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "ray", "raydl")},
    }


def _spread(spread: Spread, pattern: str) -> str:
    """Return ``median (low to high)``; the brackets only where they say more."""
    median, low, high = (
        pattern.format(value) if math.isfinite(value) else "never"
        for value in (spread.median, spread.low, spread.high)
    )
    return median if low == high else f"{median} ({low} to {high})"


def _cells(row: Row) -> list[str]:
    names = [row.method, row.schedule, f"{row.num_runs} of {row.num_planned}"]
    if not row.num_runs:
        return [*names, f"failed: {row.reason}" if row.reason else "not run"]
    spreads = [_spread(row.figures[name], pattern) for name, (_, pattern) in COLUMNS.items()]
    return [*names, f"{row.num_reached} of {row.num_runs}", *spreads]


def print_table(rows: Sequence[Row], target: float) -> None:
    """Print medians and the target's spread to the terminal; the report holds the rest."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("at target", "s to target", "samples to", "accuracy", "comm.", "exch.", "stale"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.num_runs:
            shown = list(COLUMNS.items())[:6]
            texts = [_median(row.figures[name], pattern) for name, (_, pattern) in shown]
            table.add_row(row.method, f"{row.num_reached} of {row.num_runs}", *texts)
    if table.row_count:
        Console().print(f"\nmedians over seeds, target {target:.2%}", highlight=False)
        Console().print(table)
    for row in rows:
        if row.num_runs < row.num_planned:
            why = f"failed: {row.reason}" if row.reason else "not all were run"
            print(f"{row.method}: {row.num_runs} of {row.num_planned} runs; {why}")


def _median(spread: Spread, pattern: str) -> str:
    return pattern.format(spread.median) if math.isfinite(spread.median) else "never"


def markdown(
    comparison: Comparison,
    runs: Sequence[Run],
    rows: Sequence[Row],
    out: Path,
    command: str,
) -> str:
    """Return the text of ``comparison.md``; pictures that lie in ``out`` are shown."""
    num_done = sum(run.figures is not None for run in runs)
    parts = [
        f"# {len(rows)} methods compared",
        f"All else equal: {describe(comparison)}.",
        f"```bash\n{command}\n```" if command else "",
        f"{num_done} of {len(runs)} runs are complete. " + _machine_sentence(machine()),
        "## Results",
        _table(_HEAD, [_cells(row) for row in rows]),
        _NOTES + _evaluations(runs),
        _failures(runs),
        "## Time parts",
        "Seconds per worker, mean over seeds; training starts after initialization.",
        _table(["method", *TIME_PARTS], [_part_cells(row) for row in rows if row.num_runs]),
        "## Pictures",
        _pictures(out),
        "## Settings of the methods",
        _table(["method", "period", "lr", "momentum"], _settings(runs)),
        "Each run's `config.json` holds all of its settings. "
        f"Curves: `tensorboard --logdir {out}`; figures of every run: `comparison.json`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine_sentence(found: Mapping[str, str]) -> str:
    versions = ", ".join(f"{k} {found[k]}" for k in ("python", "torch", "ray", "raydl"))
    return f"The driver's machine: {found['system']}, {found['cpus']} CPUs; {versions}."


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; short rows are filled up."""
    lines = [list(head), ["---"] * len(head)]
    lines += [[*row, *[""] * (len(head) - len(row))] for row in body]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)


def _part_cells(row: Row) -> list[str]:
    return [row.method, *(f"{row.parts[part]:.2f}" for part in TIME_PARTS)]


def _failures(runs: Sequence[Run]) -> str:
    lines = [f"- {run.method}, seed {run.seed}: {run.reason}" for run in runs if run.reason]
    note = "Failed runs; `error.txt` in a run's folder has the traceback:"
    return "\n".join([note, "", *lines]) if lines else ""


def _evaluations(runs: Sequence[Run]) -> str:
    """Return how fine the way to the target was looked at."""
    counts = [len(run.figures["evaluations"]) for run in runs if run.figures is not None]
    if not counts:
        return ""
    return (
        f"\nThe center was scored {min(counts)} to {max(counts)} times a run: no figure is finer."
    )


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    rows = {}
    for run in runs:
        lr, momentum = run.config.optimizer.lr, run.config.optimizer.momentum
        rows[run.method] = [run.method, str(run.config.method.period), f"{lr:g}", f"{momentum:g}"]
    return list(rows.values())


def _pictures(out: Path) -> str:
    shown = [f"![{text}]({name})" for name, text in PICTURES.items() if (out / name).exists()]
    return "\n\n".join(shown) or "None were drawn: `pip install 'raydl[report]'` brings matplotlib."


def draw(runs: Sequence[Mapping[str, Any]], order: Sequence[str], target: float, out: Path) -> None:
    """Draw the three pictures.

    Args:
        runs: complete runs, as ``comparison.json`` holds them.
        order: the methods, the best first.
        target: a line at this accuracy.
        out: the folder they are written to.

    Raises:
        ImportError: matplotlib is not installed.
    """
    scored = [run for run in runs if run["evaluations"]]
    groups = {name: [run for run in scored if run["method"] == name] for name in order}
    groups = {name: group for name, group in groups.items() if group}
    for axis in ("seconds", "samples"):
        _save(_accuracy(groups, axis, target), out / f"accuracy_over_{axis}.png")
    _save(_time_parts(groups), out / "time_parts.png")


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color="#999999")
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, facecolor="white")


def family(method: str) -> str:
    """Return the family of a method: ``easgd`` for ``sync-easgd``."""
    for prefix in ("sync-", "async-", "hogwild-", "original-"):
        method = method.removeprefix(prefix)
    return method


def _colors(methods: Sequence[str]) -> dict[str, str]:
    own = dict.fromkeys(f for f in map(family, methods) if f not in _COLORS)
    colors = {f: _OWN_COLORS[i % len(_OWN_COLORS)] for i, f in enumerate(own)} | _COLORS
    return {method: colors[family(method)] for method in methods}


def _accuracy(groups: Mapping[str, Sequence[Mapping[str, Any]]], axis: str, target: float) -> Any:
    """Return the figure of accuracy over seconds or samples: seeds thin, their median thick."""
    figure, axes = _figure(5.2 if len(groups) <= 8 else 6.8)
    colors = _colors(list(groups))
    longest = 0.0
    for name, runs in groups.items():
        style = {"color": colors[name], "linestyle": _STYLES[runs[0]["schedule"]]}
        curves = [_curve(run, axis) for run in runs]
        for x, y in curves if len(curves) > 1 else []:
            axes.plot(x, y, linewidth=0.6, alpha=0.3, **style)
        x, y = _median_curve(curves)
        longest = max(longest, x[-1])
        axes.plot(x, y, linewidth=1.8, label=name, marker="o" if len(x) == 1 else "", **style)
    axes.axhline(target, color="#999999", linewidth=0.8, zorder=0)
    axes.text(1, target, f"target {target:.1%}", transform=axes.get_yaxis_transform(),
              ha="right", va="bottom", color="#777777", fontsize=8)  # fmt: skip
    every = [y for runs in groups.values() for run in runs for y in _curve(run, axis)[1]]
    _stretch(axes, [*every, target])
    axes.set_xlim(0, 1.03 * longest)
    axes.set_xlabel("seconds of training" if axis == "seconds" else "samples, all workers together")
    axes.set_ylabel("test accuracy of the center")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    title = "first at the target on top"
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=3.2,
                  title=title, title_fontsize=8, alignment="left")  # fmt: skip
    return figure


def _curve(run: Mapping[str, Any], axis: str) -> tuple[list[float], list[float]]:
    scores = run["evaluations"]
    return [score[axis] for score in scores], [score["accuracy"] for score in scores]


def _median_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[Any, Any]:
    """Return the median over seeds where all have a value, between evaluations by a line."""
    if len(curves) == 1:
        return curves[0]
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    grid = every[(every >= first) & (every <= last)]
    if not len(grid):  # the seeds share no stretch: their ends remain
        return [np.median([x[-1] for x, _ in curves])], [np.median([y[-1] for _, y in curves])]
    return grid, np.median([np.interp(grid, x, y) for x, y in curves], axis=0)


def _stretch(axes: Any, accuracies: Sequence[float]) -> None:
    """Stretch the y-axis towards 100%: the way from 98% to 99% is as far as from 80% to 90%."""
    room = 0.002  # where 100% lies, which no logarithm reaches
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(1 + room - np.asarray(y), 1e-9)),
            lambda z: 1 + room - 10.0 ** -np.asarray(z),
        ),
    )
    ticks = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1]
    axes.set_yticks(ticks, [f"{tick:.4g}%" for tick in (100 * t for t in ticks)])
    axes.set_ylim(max(0.0, min(accuracies) - 0.02), min(1.0, max(accuracies) + 0.002))
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)


def _time_parts(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Return the figure of stacked time parts, a bar per method."""
    figure, axes = _figure(1.6 + 0.38 * len(groups))
    names = list(groups)
    left = np.zeros(len(names))
    for part, color in _PART_COLORS.items():
        seconds = [np.mean([run["time_parts"][part] for run in groups[name]]) for name in names]
        label = part.replace("_", " ")
        axes.barh(names, seconds, left=left, color=color, label=label, height=0.7)
        left += seconds
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds per worker, mean over seeds")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure
