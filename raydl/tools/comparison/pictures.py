"""The pictures of a comparison, by matplotlib.

One colour per family of methods (``easgd`` of ``sync-easgd`` and ``hogwild-easgd``), one line
style per schedule. matplotlib is imported when the first picture is drawn, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raydl.metrics import STACK

PICTURES = {
    "accuracy_over_seconds.png": "Accuracy over seconds of training",
    "accuracy_over_samples.png": "Accuracy over samples of all workers together",
    "time_parts.png": "The eight time parts of SC17, seconds per worker",
}
"""Files beside ``comparison.md``, with their captions."""

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
    judged = {n: [run for run in group if _has_accuracy(run)] for n, group in groups.items()}
    judged = {name: group for name, group in judged.items() if group}
    for axis in ("seconds", "samples") if judged else ():
        _save(_accuracy(judged, axis, target), out / f"accuracy_over_{axis}.png")
    _save(_time_parts(groups), out / "time_parts.png")


def _has_accuracy(run: Mapping[str, Any]) -> bool:
    """Whether the run's task measures accuracy: it may not."""
    return all("accuracy" in score for score in run["evaluations"])


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
        style = {"color": colors[name], "linestyle": _STYLES[runs[0]["strategy"]]}
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
    for part, color in STACK.items():
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
