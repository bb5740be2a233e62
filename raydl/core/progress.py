"""Progress of a run: rounds, samples, local steps and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run at one moment, over all its starts."""

    round: int = 0
    """Rounds completed; with messages, exchanges that the center has settled."""
    generation: int = 0
    """Newest membership."""
    epoch: float = 0.0
    """Samples trained, divided by the samples in the training set."""
    num_samples: int = 0
    """Samples trained by all workers together."""
    local_step: int = 0
    """Local steps of each worker; the mean if they differ."""
    seconds: float = 0.0
    """Seconds of training, by the clocks of the workers or of the center."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the values of a file; fields missing in older files are 0."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
