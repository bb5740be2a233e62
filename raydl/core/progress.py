"""Progress of a run: rounds, samples, local steps and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydl.config.typed import Amount, Count, Seconds, typed


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the values of a file; fields missing in older files are 0.

        Raises:
            ValueError: a value is wrong.
        """
        return typed(cls, values)
