"""Shows the progress of a run on the terminal: a panel, or lines for a log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydl.core.progress import Progress
from raydl.text.formatting import clock_text, loss_text

LOGGER = "raydl"
"""Name of the logger of Python's ``logging`` that receives every event."""
_PLAIN_EVERY_S = 5.0
_DASH = "-"


@dataclass(frozen=True)
class ProgressView:
    """The progress of a run at one moment; unknown values are None."""

    state: str
    elapsed_s: float
    progress: Progress
    num_epochs: int | None
    num_steps: int | None
    share_done: float
    """Part of the run that is done, from 0 to 1."""
    samples_per_s: float | None
    train_loss: float | None
    center_accuracy: float | None
    center_loss: float | None
    """Shown if the task measures no accuracy."""
    workers: Mapping[str, int]
    """Number of workers in each state: ``{"training": 3, "starting": 1}``."""
    wanted_workers: str
    """The number of workers in the settings: N, or MIN:MAX."""
    communication_share: float | None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this speed, or None if unknown."""
        if self.samples_per_s is None or self.samples_per_s <= 0 or self.share_done <= 0:
            return None
        left = self.progress.num_samples * (1 - self.share_done) / self.share_done
        return left / self.samples_per_s


class ProgressReporter(Protocol):
    """Shows the progress and the events of a run."""

    def update(self, view: ProgressView) -> None:
        """Show the progress."""

    def event(self, sentence: str) -> None:
        """Show an event."""

    def close(self) -> None:
        """Show the last state, and release the terminal."""


class Silent:
    """Shows nothing."""

    def update(self, view: ProgressView) -> None:
        """Do nothing."""

    def event(self, sentence: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Lines:
    """Prints lines, with the time of the last line about the progress.

    Args:
        console: the output.
        clock: the time in seconds, from any origin.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown_at = float("-inf")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: the lines stay."""


class PlainLines(_Lines):
    """Prints a line every few seconds, for logs.

    Args:
        console: the output.
        clock: the time in seconds, from any origin.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._start = clock()
        self._shown_center = ""

    def update(self, view: ProgressView) -> None:
        """Print a line if the last one is old, or the center's score is new."""
        now, center = self._clock(), _center(view)
        is_new = center != self._shown_center
        if now - self._shown_at < (1.0 if is_new else _PLAIN_EVERY_S):
            return
        self._shown_at, self._shown_center = now, center
        states = (f"{n} {state}" for state, n in view.workers.items() if state != "training")
        others = ", ".join(states)
        self._print_timed(
            f"{_position(view)}  {view.progress.num_samples:,} samples  {_rate(view)}  "
            f"loss {_loss(view)}  center {center}  "
            f"workers {view.workers.get('training', 0)}{others and f' ({others})'}  "
            f"comm {_number(view.communication_share, '.0%')}  left {_left(view)}"
        )

    def event(self, sentence: str) -> None:
        """Print the sentence."""
        self._print_timed(sentence)

    def _print_timed(self, line: str) -> None:
        elapsed = clock_text(self._clock() - self._start, is_short=True)
        self._print(f"[{elapsed}] {line}")


class JsonLines(_Lines):
    """Prints a line of JSON for each event, and for the progress every few seconds.

    Args:
        console: the output.
        clock: the time in seconds, from any origin.
    """

    def update(self, view: ProgressView) -> None:
        """Print the progress, if the last one is old."""
        now = self._clock()
        if now - self._shown_at < _PLAIN_EVERY_S:
            return
        self._shown_at = now
        values = asdict(view)
        self._print_json({**values.pop("progress"), **values, "eta_s": view.eta_s})

    def event(self, sentence: str) -> None:
        """Print the sentence."""
        self._print_json({"event": sentence})

    def _print_json(self, values: Mapping[str, Any]) -> None:
        values = {k: None if isinstance(v, float) and v != v else v for k, v in values.items()}
        shown = {"unix_s": round(time.time(), 3), "logger": LOGGER, **values}
        self._print(json.dumps(shown, default=float))


class LivePanel:
    """A panel that shows the progress, with the events above it.

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
        """Draw the panel again."""
        self._live.update(panel(view, self._last_event))

    def event(self, sentence: str) -> None:
        """Print the sentence above the panel, and in its last line."""
        elapsed = clock_text(time.monotonic() - self._start, is_short=True)
        self._last_event = f"[{elapsed}] {sentence}"
        self._live.console.print(self._last_event, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()


def panel(view: ProgressView, last_event: str) -> Panel:
    """Return the panel."""
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
        "progress", _position(view),
        "center", Text(_center(view), style="bold green"),
        "comm.", _number(view.communication_share, ".1%"),
    )  # fmt: skip
    facts.add_row(
        "speed", _rate(view),
        "loss", _loss(view),
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
    workers = ", ".join(f"{number} {state}" for state, number in view.workers.items())
    lines.add_row("workers ", Text(workers or _DASH))
    lines.add_row("last", Text(last_event, style="dim"))
    return Panel(Group(bar, facts, lines), title=f"raydl · {view.state}", title_align="left")


class _RaisingConsole(Console):
    """A console that raises an error when its reader is closed; rich's own exits the process."""

    def on_broken_pipe(self) -> None:
        """Raise the error, for the caller to handle."""
        raise BrokenPipeError("the reader of the output is closed")


def make_reporter(kind: str, *, log_format: str = "text") -> ProgressReporter:
    """Return the progress display.

    Args:
        kind: ``auto`` (a panel on a terminal), ``panel``, ``plain`` or ``none``.
        log_format: ``text``, or ``json``, which takes the place of all but ``none``.
    """
    console = _RaisingConsole(stderr=False)
    if kind == "none":
        return Silent()
    if log_format == "json":
        return JsonLines(console)
    if kind == "panel" or (kind == "auto" and console.is_terminal):
        return LivePanel(console)
    return PlainLines(console)


def _position(view: ProgressView) -> str:
    if view.num_steps is not None:
        return f"step {view.progress.local_step:,}/{view.num_steps:,}"
    of_all = f"/{view.num_epochs}" if view.num_epochs is not None else ""
    return f"epoch {view.progress.epoch:.1f}{of_all}"


def _rate(view: ProgressView) -> str:
    return f"{_number(view.samples_per_s, ',.0f')}/s"


def _center(view: ProgressView) -> str:
    """Return the center's accuracy, or its loss if the task measures no accuracy."""
    if view.center_accuracy is None and view.center_loss is not None:
        return f"loss {loss_text(view.center_loss)}"
    return _number(view.center_accuracy, ".2%")


def _loss(view: ProgressView) -> str:
    return _DASH if view.train_loss is None else loss_text(view.train_loss)


def _number(value: float | None, form: str) -> str:
    return _DASH if value is None else format(value, form)


def _left(view: ProgressView) -> str:
    return _DASH if view.eta_s is None else clock_text(view.eta_s, is_short=True)
