"""The memberships of a run as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raydl.text import markdown_table

_NEWEST = 100
"""Memberships in the table, so that one written again and again stays small."""


_MOST_NAMES = 32
"""A membership of more workers is told in short: its table is written at each change."""


def in_short(worker_ids: Sequence[str]) -> list[str]:
    """Return the ids; of many, neighbours as one (``w0 to w99``), and so many of these at most."""
    if len(worker_ids) <= _MOST_NAMES:
        return list(worker_ids)
    runs: list[list[str]] = []
    for worker_id in worker_ids:
        if runs and _number_of(worker_id) == _number_of(runs[-1][-1]) + 1:
            runs[-1].append(worker_id)
        else:
            runs.append([worker_id])
    named = [r[0] if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs[:_MOST_NAMES]]
    num_more = sum(map(len, runs[_MOST_NAMES:]))
    return [*named, f"{num_more} more"] if num_more else named


def _number_of(worker_id: str) -> int:
    return int(worker_id.lstrip("w"))


class MembershipTable:
    """The newest memberships, one row each."""

    def __init__(self) -> None:
        self._rows: deque[tuple[object, ...]] = deque(maxlen=_NEWEST)

    def add(
        self, generation: int, worker_ids: Sequence[str], reason: str, *, num_samples: int
    ) -> None:
        """Add a membership that trains from ``num_samples`` on."""
        who = f"{len(worker_ids)}: {', '.join(in_short(worker_ids))}"
        self._rows.append((generation, f"{num_samples:,}", who, reason))

    def markdown(self) -> str:
        """Return the table, the newest membership on top."""
        head = ("generation", "from sample", "workers", "why")
        return markdown_table(head, reversed(self._rows))
