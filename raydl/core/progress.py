"""How far a run is, at one moment of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, at one moment of it, over all its starts."""

    round: int = 0
    """Rounds completed, or exchanges that the center has settled."""
    generation: int = 0
    """The newest membership."""
    epoch: float = 0.0
    """Samples trained, divided by those of the training set."""
    num_samples: int = 0
    """Samples trained by all workers together."""
    local_step: int = 0
    """Local steps of each worker; the mean where they differ."""
    seconds: float = 0.0
    """Seconds of training, by the clocks of the workers, or of the center."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress among other values of a file; what an older file lacks is 0."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
