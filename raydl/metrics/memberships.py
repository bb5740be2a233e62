"""The memberships of a run, as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raydl.text.formatting import markdown_table

_MAX_ROWS = 100
"""Most memberships in the table, which is written at each change of the membership."""
_MOST_NAMES = 32
"""Most names in a row; more workers are abbreviated."""


def in_short(worker_ids: Sequence[str]) -> list[str]:
    """Return ids, or of more than 32 at most 32 ranges (``w0 to w99``) and the number of others."""
    if len(worker_ids) <= _MOST_NAMES:
        return list(worker_ids)
    runs: list[list[str]] = []
    for worker_id in worker_ids:
        if runs and _number_of(worker_id) == _number_of(runs[-1][-1]) + 1:
            runs[-1].append(worker_id)
        else:
            runs.append([worker_id])
    names = [r[0] if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs[:_MOST_NAMES]]
    num_more = sum(map(len, runs[_MOST_NAMES:]))
    return [*names, f"{num_more} more"] if num_more else names


def _number_of(worker_id: str) -> int:
    return int(worker_id.lstrip("w"))


class MembershipTable:
    """The newest memberships, one row each."""

    def __init__(self) -> None:
        self._rows: deque[tuple[object, ...]] = deque(maxlen=_MAX_ROWS)

    def add(
        self, generation: int, worker_ids: Sequence[str], reason: str, *, num_samples: int
    ) -> None:
        """Add a membership that trains from sample ``num_samples`` on."""
        workers = f"{len(worker_ids)}: {', '.join(in_short(worker_ids))}"
        self._rows.append((generation, f"{num_samples:,}", workers, reason))

    def markdown(self) -> str:
        """Return the table in Markdown, the newest membership first."""
        head = ("generation", "from sample", "workers", "why")
        return markdown_table(head, reversed(self._rows))
