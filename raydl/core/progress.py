"""Progress of a run: rounds, samples, local steps, seconds, and what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydl.config.typed import Amount, Count, Seconds, typed

AXES = {
    "round": "round",
    "samples": "num_samples",
    "seconds": "seconds",
    "bytes": "num_bytes",
    "messages": "num_messages",
}
"""Names in ``result.json`` of what a score is drawn over, with the fields of ``Progress``."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run at one moment, over all its starts."""

    round: Count = 0
    """Rounds completed; with messages, exchanges that the center has settled."""
    generation: Count = 0
    """Newest membership."""
    epoch: Amount = 0.0
    """Samples trained, divided by the samples in the training set."""
    num_samples: Count = 0
    """Samples trained by all workers together."""
    local_step: Count = 0
    """Local steps of each worker; the mean if they differ."""
    seconds: Seconds = 0.0
    """Seconds of training, by the clocks of the workers or of the center."""
    num_bytes: Count = 0
    """Bytes of the completed exchanges, each counted once, as it is sent by a worker or the
    center. A sum over p workers counts as 2 (p - 1) messages, the least that any all-reduce
    sends. The center's answer counts with the worker's next message."""
    num_messages: Count = 0
    """What the workers have sent in completed exchanges: a message of each worker for each sum, or
    for each shard of the center; answers are not counted."""

    def of_score(self) -> dict[str, float]:
        """Return the entries of a score in ``result.json`` that say when it was."""
        return {name: getattr(self, field) for name, field in AXES.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the values of a file; fields missing in older files are 0.

        Raises:
            ValueError: a value is wrong.
        """
        return typed(cls, values)
