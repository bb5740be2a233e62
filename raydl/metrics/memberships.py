"""Who trained when: the memberships of a run as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_NEWEST = 100
"""Memberships in the table, so that one written again and again stays small."""


class MembershipTable:
    """The newest memberships, one row each."""

    def __init__(self) -> None:
        self._rows: deque[str] = deque(maxlen=_NEWEST)

    def add(
        self, generation: int, worker_ids: Sequence[str], reason: str, *, num_samples: int
    ) -> None:
        """Add a membership that trains from ``num_samples`` on."""
        who = f"{len(worker_ids)}: {', '.join(worker_ids)}"
        safe = reason.replace("|", "\\|").replace("\n", " ")
        self._rows.append(f"| {generation} | {num_samples:,} | {who} | {safe} |")

    def markdown(self) -> str:
        """Return the table, the newest membership on top."""
        head = ["| generation | from sample | workers | why |", "|---|---|---|---|"]
        return "\n".join([*head, *reversed(self._rows)])
