"""Times, tables and control characters as readable text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, except the line feed."""


def escape_controls(text: str) -> str:
    """Return a text with its control characters as Python escapes; line feeds stay.

    Text from files (names of classes and columns) or from other machines must not control the
    user's terminal.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def clock_text(seconds: float, *, is_short: bool = False) -> str:
    """Return a duration as ``h:mm:ss``: ``0:01:05``; a day is ``24:00:00``.

    Args:
        seconds: the duration, 0 or more.
        is_short: omit the hours if they are 0: ``1:05``.
    """
    minutes, rest = divmod(round(seconds), 60)
    if is_short and minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def loss_text(loss: float) -> str:
    """Return a loss with four decimals, or, from 10,000 on, with three digits: ``4.17e+20``."""
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3g}"


def seconds_text(seconds: float) -> str:
    """Return a duration with three significant digits, in us, ms or s: ``3.35 ms``."""
    rounded = float(f"{seconds:.3g}")  # before choosing the unit: 999.9 us are 1 ms
    if rounded >= 1000:
        return f"{seconds:,.0f} s"
    units = (("s", 1.0), ("ms", 1e-3))
    unit, size = next((u for u in units if rounded >= u[1]), ("us", 1e-6))
    return f"{rounded / size:.3g} {unit}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table.

    Bars in a cell are escaped, its lines joined; short rows are padded with empty cells.
    """
    lines = [_markdown_row(header), _markdown_row(["---"] * len(header))]
    lines += [_markdown_row([*row, *[""] * (len(header) - len(row))]) for row in rows]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[object]) -> str:
    safe = (" ".join(str(cell).splitlines()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(safe)} |"


def settings_table(settings: Mapping[str, object]) -> str:
    """Return settings by their dotted names as a Markdown table."""
    rows = ((f"`{name}`", value) for name, value in settings.items())
    return markdown_table(("setting", "value"), rows)
