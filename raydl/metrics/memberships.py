"""Who trained when: the memberships of a run as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raydl.texts import markdown_table

_NEWEST = 100
"""Memberships in the table, so that one written again and again stays small."""


class MembershipTable:
    """The newest memberships, one row each."""

    def __init__(self) -> None:
        self._rows: deque[tuple[object, ...]] = deque(maxlen=_NEWEST)

    def add(
        self, generation: int, worker_ids: Sequence[str], reason: str, *, num_samples: int
    ) -> None:
        """Add a membership that trains from ``num_samples`` on."""
        who = f"{len(worker_ids)}: {', '.join(worker_ids)}"
        self._rows.append((generation, f"{num_samples:,}", who, reason))

    def markdown(self) -> str:
        """Return the table, the newest membership on top."""
        head = ("generation", "from sample", "workers", "why")
        return markdown_table(head, reversed(self._rows))
