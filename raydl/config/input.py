"""Settings of the input: reading samples, and augmenting batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from raydl.config.checks import require
from raydl.errors import UnknownNameError

STREAMS = ("auto", "always", "never")
"""When a set is read as it is needed rather than at the start."""

AUGMENTATIONS = ("flip", "crop", "cutout")
"""Random changes of training pictures."""

ON_BAD_SAMPLE = ("stop", "skip")
"""The policies for a sample that can not be read."""


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """How samples are read."""

    augment: str = field(default="none", metadata={"flag": "augment"})
    """Random changes of training pictures, by comma: flip, crop, cutout; or none."""
    context: int = field(default=128, metadata={"flag": "context"})
    """Tokens in one sample of a text."""
    on_bad_sample: str = field(default="stop", metadata={"flag": "on-bad-sample"})
    """A sample that can not be read: stop the run and name it, or skip (Parquet) and count it."""
    columns: str = ""
    """Columns of a Parquet table to read, by comma; empty: all of them."""
    stream: str = "auto"
    """Read Parquet as it is needed: auto (sets beyond ``max_memory_bytes``, and where samples are
    skipped), always or never."""
    max_memory_bytes: int = 1 << 30
    """Sets that take more, decoded, are streamed with ``stream`` auto."""
    shuffle_samples: int = 4096
    """Row groups of a streamed set are mixed with one another until they hold so many samples."""
    num_threads: int = 2
    """Threads of a worker that decode pictures of a streamed set, those of 128x128 pixels or more;
    smaller ones are decoded sooner by one thread."""

    @property
    def columns_named(self) -> tuple[str, ...]:
        """The names in ``columns``."""
        return tuple(name.strip() for name in self.columns.split(",") if name.strip())

    def streams(self, decoded_bytes: Callable[[], int]) -> bool:
        """Return whether Parquet is streamed.

        Args:
            decoded_bytes: returns what its training set takes, decoded; asked where that matters.
        """
        if self.stream == "auto":
            return self.on_bad_sample == "skip" or decoded_bytes() > self.max_memory_bytes
        return self.stream == "always"

    def __post_init__(self) -> None:
        self._check_augment()
        for name, choices in (("stream", STREAMS), ("on_bad_sample", ON_BAD_SAMPLE)):
            if getattr(self, name) not in choices:
                raise UnknownNameError(f"input.{name}", getattr(self, name), choices)
        require(
            (self.stream, self.on_bad_sample) != ("never", "skip"),
            "input.stream",
            "auto or always for input.on_bad_sample skip, which streamed samples alone can be",
            self.stream,
        )
        for name in ("context", "max_memory_bytes", "shuffle_samples", "num_threads"):
            require(getattr(self, name) >= 1, f"input.{name}", "1 or more", getattr(self, name))

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names in ``augment``; () for none."""
        names = tuple(name.strip() for name in self.augment.split(","))
        return () if names == ("none",) else names

    def _check_augment(self) -> None:
        names = self.augmentations
        for name in names:
            if name not in ("none", *AUGMENTATIONS):
                raise UnknownNameError("input.augment", name, ("none", *AUGMENTATIONS))
        is_clear = "none" not in names and len(set(names)) == len(names)
        rule = f"none, or some of {', '.join(AUGMENTATIONS)}, each once"
        require(is_clear, "input.augment", rule, self.augment)
