"""Settings of the run: its folder, checkpoints and evaluations."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from raydl.config.checks import require, require_name, require_positive
from raydl.errors import ConfigError, UnknownNameError

RUNS = "runs"
"""Folder of the runs that are given no other folder."""
LOWER_IS_BETTER = ("loss", "perplexity", "averaged_loss", "averaged_perplexity")
"""Metrics that are better if they are lower."""
_MODES = ("auto", "max", "min")
_SCORED_BY = ("evaluator", "workers")
BAD_MESSAGES = ("nan", "zeros", "reversed")
"""What a bad worker may send instead of its messages."""
TRACKER_STATES, METRIC_LINES = "tracker-", "metrics.jsonl"
"""In the run's folder: beginning of the names of the trackers' states, and the JSON lines."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Folder, output and faults of the run."""

    name: str | None = field(default=None, metadata={"flag": "name"})
    """Name of the run, whose folder is runs/NAME, or NAME below run.storage_path; unset: the last
    part of run.run_dir, or METHOD-MODEL-DATE."""
    run_dir: str | None = field(default=None, metadata={"flag": "run-dir"})
    """Folder of the run (config, events, checkpoints, result); unset: runs/NAME."""
    resume: bool = field(default=False, metadata={"flag": "resume"})
    """Resume from the newest checkpoint in the run's folder."""
    storage_path: str | None = field(default=None, metadata={"flag": "storage-path"})
    """Folder or URI (s3://, gs://, …) that keeps the run; a run in runs/NAME is kept as NAME."""
    progress: str = "auto"
    """Output in the terminal: auto, panel, plain or none."""
    log_format: str = field(default="text", metadata={"flag": "log-format"})
    """Form of the output: text, or json: a line of JSON for each event and every few seconds."""
    tracker: str = field(default="none", metadata={"flag": "tracker"})
    """Experiment trackers beside TensorBoard, separated by commas: jsonl, mlflow, wandb; or none.
    Servers and credentials come from their own environment variables."""
    fault_plan: str | None = field(default=None, metadata={"flag": "fault-plan"})
    """YAML file of faults to inflict on the run, for chaos testing; see docs/faults.md."""
    bad_workers: str | None = field(default=None, metadata={"flag": "bad-workers"})
    """Let a share of the workers send bad messages, SHARE:KIND as 0.25:reversed; nan, zeros, or
    reversed (all signs)."""

    def __post_init__(self) -> None:
        choices = ("auto", "panel", "plain", "none")
        require(
            self.progress in choices, "run.progress", f"one of {', '.join(choices)}", self.progress
        )
        formats = ("text", "json")
        require(self.log_format in formats, "run.log_format", "text or json", self.log_format)
        require(
            self.log_format == "text" or self.progress != "panel",
            "run.log_format",
            "text with run.progress panel",
            self.log_format,
        )
        require(self.run_dir != "", "run.run_dir", "the name of a folder", "an empty one")
        if "://" in str(self.run_dir):
            raise ConfigError(
                "run.run_dir",
                f"must be a folder, got {self.run_dir}; give a URI as run.storage_path",
            )
        if self.name is not None:
            require_name("run.name", self.name)
        if self.name and self.run_dir and Path(self.run_dir).name != self.name:
            raise ConfigError(
                "run.name",
                f"must be the last part of run.run_dir, got {self.name} and {self.run_dir}; give "
                f"one of them",
            )
        if self.bad_workers is not None and self.bad_share is None:
            rule = f"SHARE:KIND with a share in (0, 1] and one of {', '.join(BAD_MESSAGES)}"
            problem = f"must be {rule}, as 0.25:reversed, got {self.bad_workers}"
            raise ConfigError("run.bad_workers", problem)
        if self.resume and self.folder is None:
            raise ConfigError("run.resume", "needs run.name or run.run_dir, the run to resume")

    @property
    def bad_share(self) -> tuple[float, str] | None:
        """The share and the kind in ``bad_workers``; None: it is unset, or has another form."""
        share, _, kind = (self.bad_workers or "").partition(":")
        try:
            is_valid = 0 < float(share) <= 1 and kind in BAD_MESSAGES
        except ValueError:
            is_valid = False
        return (float(share), kind) if is_valid else None

    def refuse_folder(self, where: str) -> None:
        """Raise a ConfigError if a run that another command places has a place or resumes.

        Args:
            where: the command's work, for the sentence: "in a comparison".
        """
        if self.resume or self.folder is not None or self.storage_path is not None:
            raise ConfigError(
                "run.name, run.run_dir, run.storage_path and run.resume",
                f"cannot be set {where}; use --out",
            )

    @property
    def folder(self) -> str | None:
        """Local folder of the run, or None if the settings do not name one."""
        return f"{RUNS}/{self.name}" if self.name and not self.run_dir else self.run_dir


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints. The last state of a run is always written."""

    every_s: float | None = 60.0
    """Seconds between two checkpoints; None: not by time."""
    every_epochs: int | None = None
    """Epochs between two checkpoints; None: not by epochs."""
    num_to_keep: int = 2
    """Checkpoints to keep; older ones are deleted."""
    keep_best: bool = False
    """Keep the center with the best score as best.safetensors, beside the checkpoints."""

    def __post_init__(self) -> None:
        if self.every_s is not None:
            require_positive("checkpoint.every_s", self.every_s, "a positive number of seconds")
        every = self.every_epochs
        require(every is None or every >= 1, "checkpoint.every_epochs", "1 or more", every)
        require(self.num_to_keep >= 1, "checkpoint.num_to_keep", "1 or more", self.num_to_keep)


def parse_average(text: str) -> tuple[int | None, float]:
    """Return (K, 0) of ``lawa:K``, or (None, B) of ``ema:B``.

    Raises:
        ConfigError: if it is neither, K is below 2, or B is not in (0, 1).
    """
    kind, _, value = text.partition(":")
    with contextlib.suppress(ValueError):
        if kind == "lawa" and int(value) >= 2:
            return int(value), 0.0
        if kind == "ema" and 0 < float(value) < 1:
            return None, float(value)
    rule = "must be lawa:K with K of 2 or more, or ema:B with B in (0, 1), as in lawa:10 or ema:0.9"
    raise ConfigError("evaluation.average", f"{rule}, got {text!r}")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When to score the center on the test set, and which processes do it."""

    every_epochs: int = 1
    """Epochs between two evaluations; an evaluator scores the center of each checkpoint, too."""
    every_samples: int | None = None
    """Samples of all workers between two evaluations, instead of epochs."""
    num_samples: int | None = None
    """Test samples to score, drawn once by the seed; unset: all."""
    metric: str = ""
    """Metric of the task that compares centers; empty: accuracy, or loss without accuracy."""
    mode: str = "auto"
    """Whether the higher or the lower value of the metric is better: max or min; auto: max for
    accuracy, min for loss and perplexity."""
    batch_size: int = 128
    """Samples in one evaluation step; with many more, the activations no longer fit in the
    cache."""
    average: str | None = None
    """Score and keep a mean of the scored centers, too: lawa:K as in lawa:10 (of the K newest), or
    ema:B as in ema:0.9 (exponential)."""
    by: str = "evaluator"
    """Which processes score: evaluator, a process beside the workers, for which no worker waits; or
    workers: all workers of a synchronous method pause and score a part of the test set each."""

    def __post_init__(self) -> None:
        if self.by not in _SCORED_BY:
            raise UnknownNameError("evaluation.by", self.by, _SCORED_BY)
        number = self.num_samples
        require(number is None or number >= 1, "evaluation.num_samples", "1 or more", number)
        require(self.every_epochs >= 1, "evaluation.every_epochs", "1 or more", self.every_epochs)
        every = self.every_samples
        require(every is None or every >= 1, "evaluation.every_samples", "1 or more", every)
        require(self.batch_size >= 1, "evaluation.batch_size", "1 or more", self.batch_size)
        if self.mode not in _MODES:
            raise UnknownNameError("evaluation.mode", self.mode, _MODES)
        if self.average is not None:
            parse_average(self.average)
            rule = "evaluator with evaluation.average, which one process computes"
            require(self.by == "evaluator", "evaluation.by", rule, self.by)
        if not self.metric:
            rule = "auto without evaluation.metric"
            require(self.mode == "auto", "evaluation.mode", rule, self.mode)
        is_known = self.metric in ("", "accuracy", "averaged_accuracy", *LOWER_IS_BETTER)
        rule = f"max or min, the better direction of {self.metric}"
        require(is_known or self.mode != "auto", "evaluation.mode", rule, self.mode)

    @property
    def is_by_workers(self) -> bool:
        """Whether the workers score the center."""
        return self.by == "workers"
