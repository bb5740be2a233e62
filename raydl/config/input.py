"""Settings of the input: reading samples and augmenting batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from raydl.config.checks import require, require_positive
from raydl.errors import UnknownNameError

STREAMS = ("auto", "always", "never")
"""Policies for streaming a set instead of reading it at the start."""

AUGMENTATIONS = ("flip", "crop", "cutout")
"""Augmentations of training images."""

MODES = ("L", "RGB")
"""Modes of images: grayscale and color."""

NULLS = ("refuse", "drop")
"""Policies for a row of a table in a text file that lacks a value."""

ON_BAD_SAMPLE = ("stop", "skip")
"""Policies for a sample that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Reading samples and augmenting batches."""

    augment: str = field(default="none", metadata={"flag": "augment"})
    """Augmentations of training images, separated by commas: flip, crop, cutout; or none."""
    skew: float | None = field(default=None, metadata={"flag": "skew"})
    """Let the data differ between workers: each trains first on a share of its own, whose classes
    are drawn from a Dirichlet distribution of this concentration; 0.1 differs much, 100 little."""
    context: int = field(default=128, metadata={"flag": "context"})
    """Tokens in one sample of a text."""
    vocabulary: str = ""
    """Number of different tokens in token files, or the folder of the tokenizer that wrote them;
    empty: the largest token and 1."""
    index_dir: str = ""
    """Folder for what is found once in large files and holds until they change: where the samples
    of tar files lie, and the largest token; empty: .index beside the folder of the run."""
    on_bad_sample: str = field(default="stop", metadata={"flag": "on-bad-sample"})
    """Policy for a sample that cannot be read: stop the run and name the sample, or skip it and
    count it (not of arrays and texts)."""
    columns: str = ""
    """Columns to read, separated by commas: those of a table, or those of images and labels; empty:
    all, or the usual ones."""
    image_size: int | None = None
    """Height and width of images in pixels: each is cut to a square around its center and resized;
    unset: all must have one size."""
    mode: str = ""
    """Mode of images: L (grayscale) or RGB; empty: that of the first image."""
    span: str = ""
    """LOW,HIGH: the values that become black and white in images of more than 8 bits, as 0,65535;
    empty: such images are refused."""
    target: str = field(default="", metadata={"flag": "target"})
    """Column to predict from the others of a table; of images, the column of their classes. Empty:
    a table is for a task of your own, and images have their usual column."""
    nulls: str = "refuse"
    """Policy for a row of CSV, TSV or JSON lines that lacks a value: refuse the file, or drop the
    row."""
    stream: str = "auto"
    """Stream data sets of files instead of reading them at the start: always, never, or
    auto (sets larger than max_memory_bytes, and runs that skip bad samples)."""
    max_memory_bytes: int = 1 << 30
    """Largest decoded size of a set that is read at the start, in bytes, if stream is auto."""
    samples_per_epoch: int | None = None
    """Samples of an epoch, for an iterable data set, whose length is not known; unset: its length
    if it has one."""
    shuffle_samples: int = 4096
    """Samples to shuffle together, on average: row groups of a streamed set are mixed in blocks of
    about this many."""
    num_threads: int = 2
    """Threads of a worker that decode streamed images of 128x128 pixels or more; one thread
    decodes smaller images faster."""

    @property
    def span_of_values(self) -> tuple[float, float] | None:
        """The two numbers of ``span``, or None if it is empty or misspelled."""
        try:
            low, high = map(float, self.span.split(","))
        except ValueError:
            return None
        return low, high

    @property
    def columns_named(self) -> tuple[str, ...]:
        """Names in ``columns``."""
        return tuple(name.strip() for name in self.columns.split(",") if name.strip())

    def streams(self, decoded_bytes: Callable[[], int]) -> bool:
        """Return whether to stream a set of files.

        Args:
            decoded_bytes: returns the decoded size of the training set; called only if needed.
        """
        if self.stream == "auto":
            return self.on_bad_sample == "skip" or decoded_bytes() > self.max_memory_bytes
        return self.stream == "always"

    def __post_init__(self) -> None:
        names = self.augmentations
        for name in names:
            if name not in ("none", *AUGMENTATIONS):
                raise UnknownNameError("input.augment", name, ("none", *AUGMENTATIONS))
        is_clear = "none" not in names and len(set(names)) == len(names)
        rule = f"none, or some of {', '.join(AUGMENTATIONS)}, each once"
        require(is_clear, "input.augment", rule, self.augment)
        policies = {"stream": STREAMS, "on_bad_sample": ON_BAD_SAMPLE, "nulls": NULLS}
        for name, choices in policies.items():
            if getattr(self, name) not in choices:
                raise UnknownNameError(f"input.{name}", getattr(self, name), choices)
        if self.mode not in ("", *MODES):
            raise UnknownNameError("input.mode", self.mode, MODES)
        values = self.span_of_values
        is_span = not self.span or (values is not None and values[0] < values[1])
        require(is_span, "input.span", "two numbers LOW,HIGH, the lower first", self.span)
        side = self.image_size
        require(side is None or side >= 1, "input.image_size", "1 or more", side)
        require(
            (self.stream, self.on_bad_sample) != ("never", "skip"),
            "input.stream",
            "auto or always with input.on_bad_sample skip, since only streamed samples are skipped",
            self.stream,
        )
        if self.skew is not None:
            require_positive("input.skew", self.skew)
        size = self.samples_per_epoch
        require(size is None or size >= 1, "input.samples_per_epoch", "1 or more", size)
        for name in ("context", "max_memory_bytes", "shuffle_samples", "num_threads"):
            require(getattr(self, name) >= 1, f"input.{name}", "1 or more", getattr(self, name))

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Names in ``augment``; () for none."""
        names = tuple(name.strip() for name in self.augment.split(","))
        return () if names == ("none",) else names
