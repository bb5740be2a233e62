"""The pictures of ``raydl plan``: bars in the terminal, and a file by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydl.errors import ConfigError
from raydl.tools.plan import Prediction

_BAR = 50
_SUFFIXES = (".png", ".svg", ".pdf")


def bars(predictions: Sequence[Prediction]) -> str:
    """Return one bar per number of workers: computing ``#``, waiting ``.``"""
    width = max(len(f"{p.num_workers:,}") for p in predictions)
    lines = []
    for p in predictions:
        computing = round(_BAR * p.efficiency)
        bar = "#" * computing + "." * (_BAR - computing)
        lines.append(f"{p.num_workers:>{width},} {bar} {p.efficiency:6.1%}")
    return "\n".join(lines)


def check_out(out: str) -> Path:
    """Return where the picture goes.

    Raises:
        ConfigError: matplotlib is missing, or a picture can not be written there.
    """
    path = Path(out)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("out", "needs matplotlib, which is not installed; pip install matplotlib")
    if path.suffix not in _SUFFIXES:
        raise ConfigError("out", f"must end in {', '.join(_SUFFIXES)}, got {out}")
    if not path.parent.is_dir():
        raise ConfigError("out", f"is in a folder that does not exist: {path.parent}")
    return path


def draw(predictions: Mapping[str, Sequence[Prediction]], title: str, path: Path) -> None:
    """Draw weak scaling and the share of communication over workers, a line per method.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for method, rows in predictions.items():
        workers = [p.num_workers for p in rows]
        left.plot(workers, [p.efficiency for p in rows], marker="o", markersize=3, label=method)
        right.plot(workers, [p.communication_share for p in rows], marker="o", markersize=3)
    _label(left, "weak-scaling efficiency")
    _label(right, "communication, share of a worker's time")
    figure.suptitle(title, fontsize=10)
    if len(predictions) > 1:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, facecolor="white")


def _label(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("workers")
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
