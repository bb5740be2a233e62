"""The terminal's panel while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydl.core.progress import Progress
from raydl.text import clock_text

_PLAIN_EVERY_S = 5.0
_DASH = "-"


@dataclass(frozen=True)
class ProgressView:
    """The state of a run at one moment, as shown. None: not known yet."""

    state: str
    elapsed_s: float
    progress: Progress
    num_epochs: int | None
    num_steps: int | None
    share_done: float
    """0..1 of the whole run."""
    samples_per_s: float | None
    train_loss: float | None
    center_accuracy: float | None
    center_loss: float | None
    """Shown of a task that measures no accuracy."""
    workers: Mapping[str, int]
    """How many stand where: ``{"training": 3, "starting": 1}``."""
    wanted_workers: str
    communication_share: float | None

    @property
    def num_workers(self) -> int:
        """Workers that train."""
        return self.workers.get("training", 0)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this pace; None: there is none, or it is not known."""
        if self.samples_per_s is None or self.samples_per_s <= 0 or self.share_done <= 0:
            return None
        left = self.progress.num_samples * (1 - self.share_done) / self.share_done
        return left / self.samples_per_s


class ProgressReporter(Protocol):
    """Shows a run to a person."""

    def update(self, view: ProgressView) -> None:
        """Show the state."""
        ...

    def event(self, sentence: str) -> None:
        """Say that something happened."""
        ...

    def close(self) -> None:
        """Leave the terminal as it should stay."""
        ...


class Silent:
    """Shows nothing."""

    def update(self, view: ProgressView) -> None:
        """Do nothing."""

    def event(self, sentence: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainLines:
    """One line now and then, for logs.

    Args:
        console: where to.
        clock: seconds, rising.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._start = clock()
        self._shown_at = float("-inf")
        self._shown_center = ""

    def update(self, view: ProgressView) -> None:
        """Print a line if the last one is old, or the center's score is new."""
        now, center = self._clock(), _center(view)
        is_news = center != self._shown_center
        if now - self._shown_at < (1.0 if is_news else _PLAIN_EVERY_S):
            return
        self._shown_at, self._shown_center = now, center
        self._print(
            f"{_where(view)}  {view.progress.num_samples:,} samples  {_rate(view)}  "
            f"loss {_number(view.train_loss, '.3f')}  "
            f"center {center}  "
            f"workers {_workers_in_short(view)}  comm {_number(view.communication_share, '.0%')}  "
            f"left {_left(view)}"
        )

    def event(self, sentence: str) -> None:
        """Print the sentence."""
        self._print(sentence)

    def _print(self, line: str) -> None:
        elapsed = clock_text(self._clock() - self._start, is_short=True)
        self._console.print(f"[{elapsed}] {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


class LivePanel:
    """A panel that follows the run; events scroll by above it.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._last_event = ""
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def update(self, view: ProgressView) -> None:
        """Redraw."""
        self._live.update(panel(view, self._last_event))

    def event(self, sentence: str) -> None:
        """Print the sentence above the panel, and keep it in the last line."""
        elapsed = clock_text(time.monotonic() - self._start, is_short=True)
        self._last_event = f"[{elapsed}] {sentence}"
        self._live.console.print(self._last_event, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()


def panel(view: ProgressView, last_event: str) -> Panel:
    """Return the panel for a state."""
    bar = Table.grid(expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", min_width=18)
    bar.add_row(
        ProgressBar(total=1.0, completed=view.share_done),
        Text(f" {view.share_done:.0%}  left {_left(view)}"),
    )
    facts = Table.grid(expand=True, padding=(0, 2))
    for _ in range(3):
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(no_wrap=True)
    facts.add_row(
        "progress", _where(view),
        "center", Text(_center(view), style="bold green"),
        "comm.", _number(view.communication_share, ".1%"),
    )  # fmt: skip
    facts.add_row(
        "speed", _rate(view),
        "loss", _number(view.train_loss, ".4f"),
        "gen.", str(view.progress.generation),
    )  # fmt: skip
    facts.add_row(
        "samples", f"{view.progress.num_samples:,}",
        "elapsed", clock_text(view.elapsed_s, is_short=True),
        "wanted", view.wanted_workers,
    )  # fmt: skip
    lines = Table.grid(expand=True, padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    lines.add_row("workers ", Text(_workers(view)))
    lines.add_row("last", Text(last_event, style="dim"))
    return Panel(Group(bar, facts, lines), title=f"raydl · {view.state}", title_align="left")


class _LastingConsole(Console):
    """Raises where its reader has gone; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Let who shows something decide: the error is being handled."""
        raise BrokenPipeError("nobody reads the output any more")


def make_reporter(kind: str) -> ProgressReporter:
    """Return the progress display: ``auto`` (a panel on a terminal), panel, plain or none."""
    console = _LastingConsole(stderr=False)
    if kind == "none":
        return Silent()
    if kind == "panel" or (kind == "auto" and console.is_terminal):
        return LivePanel(console)
    return PlainLines(console)


def _where(view: ProgressView) -> str:
    if view.num_steps is not None:
        return f"step {view.progress.local_step:,}/{view.num_steps:,}"
    of_all = f"/{view.num_epochs}" if view.num_epochs is not None else ""
    return f"epoch {view.progress.epoch:.1f}{of_all}"


def _workers(view: ProgressView) -> str:
    return ", ".join(f"{number} {word}" for word, number in view.workers.items()) or _DASH


def _workers_in_short(view: ProgressView) -> str:
    """Return how many train, and in brackets where the others are."""
    others = [f"{n} {word}" for word, n in view.workers.items() if word != "training"]
    return f"{view.num_workers} ({', '.join(others)})" if others else str(view.num_workers)


def _rate(view: ProgressView) -> str:
    return f"{_number(view.samples_per_s, ',.0f')}/s"


def _center(view: ProgressView) -> str:
    """Return the center's accuracy, or its loss where the task measures none."""
    if view.center_accuracy is None and view.center_loss is not None:
        return f"loss {view.center_loss:.4f}"
    return _number(view.center_accuracy, ".2%")


def _number(value: float | None, form: str) -> str:
    return _DASH if value is None else format(value, form)


def _left(view: ProgressView) -> str:
    return _DASH if view.eta_s is None else clock_text(view.eta_s, is_short=True)
