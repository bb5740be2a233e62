"""The run around the training: its folder, its checkpoints, its evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field

from raydl.config.checks import is_positive, require
from raydl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives."""

    run_dir: str | None = field(default=None, metadata={"flag": "run-dir"})
    """Folder of the run (config, events, checkpoints, result); unset: runs/METHOD-MODEL-DATE."""
    resume: bool = field(default=False, metadata={"flag": "resume"})
    """Go on from the newest checkpoint in the run's folder."""
    storage_path: str | None = field(default=None, metadata={"flag": "storage-path"})
    """Folder or URI (s3://, gs://, …) that keeps the run, below it NAME of runs/NAME."""
    progress: str = "auto"
    """The output in the terminal: auto, panel, plain or none."""
    fault_plan: str | None = field(default=None, metadata={"flag": "fault-plan"})
    """A YAML file of faults to inflict on this run, for chaos testing; see docs/faults.md."""

    def __post_init__(self) -> None:
        choices = ("auto", "panel", "plain", "none")
        require(
            self.progress in choices, "run.progress", f"one of {', '.join(choices)}", self.progress
        )
        require(self.run_dir != "", "run.run_dir", "the name of a folder", "an empty one")
        if "://" in str(self.run_dir):
            raise ConfigError(
                "run.run_dir", f"names a folder; a URI goes into --storage-path: {self.run_dir}"
            )
        if self.resume and self.run_dir is None:
            raise ConfigError("run.resume", "needs run.run_dir: the run to go on with")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written. The last state of a run always is."""

    every_s: float | None = 60.0
    """Seconds from one checkpoint to the next; None: not by time."""
    every_epochs: int | None = None
    """Epochs from one checkpoint to the next; None: not by epochs."""
    keep: int = 2
    """How many checkpoints are kept; older ones are deleted."""
    keep_best: bool = False
    """Keep the center with the best score as best.safetensors, beside the checkpoints."""

    def __post_init__(self) -> None:
        require(
            self.every_s is None or is_positive(self.every_s),
            "checkpoint.every_s",
            "a positive number of seconds",
            self.every_s,
        )
        require(
            self.every_epochs is None or self.every_epochs >= 1,
            "checkpoint.every_epochs",
            "1 or more",
            self.every_epochs,
        )
        require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the center is scored on the test set. No worker waits for it."""

    every_epochs: int = 1
    """Epochs from one evaluation to the next; a center kept for a checkpoint is scored as well."""
    every_samples: int | None = None
    """Samples, by all workers, from one evaluation to the next, instead of epochs."""
    batch_size: int = 128
    """Samples in one evaluation step. With many more, activations leave the cache."""

    def __post_init__(self) -> None:
        require(self.every_epochs >= 1, "evaluation.every_epochs", "1 or more", self.every_epochs)
        every = self.every_samples
        require(every is None or every >= 1, "evaluation.every_samples", "1 or more", every)
        require(self.batch_size >= 1, "evaluation.batch_size", "1 or more", self.batch_size)
