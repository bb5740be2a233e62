"""The end of a run, by samples, steps, seconds or bytes, and evaluations that are due before."""

from __future__ import annotations

from dataclasses import dataclass

from raydl.config import EvaluationConfig, TrainConfig, TrainingConfig
from raydl.data.ledger import Ledger


@dataclass(frozen=True)
class StopCondition:
    """The end of a run; exactly one of the fields is set."""

    num_samples: int | None = None
    """Samples of all workers together."""
    num_steps: int | None = None
    """Local steps of each worker."""
    seconds: float | None = None
    """Seconds of training."""
    num_bytes: int | None = None
    """Bytes sent in exchanges; see ``raydl.core.progress.Progress``."""

    @classmethod
    def of(cls, training: TrainingConfig, *, epoch_samples: int) -> StopCondition:
        """Return the end from the settings, with ``epoch_samples`` samples per epoch."""
        if training.num_epochs is not None:
            return cls(num_samples=training.num_epochs * epoch_samples)
        return cls(training.samples, training.steps, training.seconds, training.num_bytes)

    def share_done(
        self, *, num_samples: float, num_steps: float, seconds: float, num_bytes: float
    ) -> float:
        """Return the share of the run that is done, 0..1, for the learning rate schedule."""
        if self.num_steps is not None:
            return min(1.0, num_steps / self.num_steps)
        if self.seconds is not None:
            return min(1.0, seconds / self.seconds)
        if self.num_bytes is not None:
            return min(1.0, num_bytes / self.num_bytes)
        assert self.num_samples is not None
        return min(1.0, num_samples / self.num_samples)

    def is_reached(
        self, *, num_samples: int, num_steps: int, seconds: float, num_bytes: int
    ) -> bool:
        """Whether the run is complete."""
        share = self.share_done(
            num_samples=num_samples, num_steps=num_steps, seconds=seconds, num_bytes=num_bytes
        )
        return share >= 1.0

    def samples_left(self, num_samples: int) -> int | None:
        """Return the samples until the end, or None if samples do not end the run."""
        return None if self.num_samples is None else max(0, self.num_samples - num_samples)

    def steps_left(self, num_steps: int) -> int | None:
        """Return a worker's local steps until the end, or None if steps do not end the run."""
        return None if self.num_steps is None else max(0, self.num_steps - num_steps)


def notes_on_period(config: TrainConfig, *, period: int, num_samples: int) -> list[str]:
    """Return a warning if the period is longer than an epoch, or than the run.

    Args:
        config: settings of the run.
        period: local steps between exchanges.
        num_samples: samples in the training set.
    """
    num_workers = max(1, config.scaling.max_workers)
    workers = "one worker" if num_workers == 1 else f"each of {num_workers} workers"
    per_step = config.training.batch_size * num_workers
    stop_condition = StopCondition.of(config.training, epoch_samples=num_samples)
    steps = stop_condition.num_steps
    if stop_condition.num_samples is not None:
        steps = -(-stop_condition.num_samples // per_step)
    if steps is not None and steps < period:
        return [
            f"the run has {steps:,} local steps for {workers}, fewer than method.period "
            f"{period:,}: the center is updated only once, at the end"
        ]
    num_epochs = period / -(-num_samples // per_step)
    if num_epochs <= 1:
        return []
    return [
        f"method.period {period:,} is {num_epochs:.1f} epochs for {workers}: the center is "
        f"updated, evaluated and checkpointed no more often than that"
    ]


def num_evaluations_due(evaluation: EvaluationConfig, ledger: Ledger) -> int:
    """Return the number of evaluations that are due by the samples done so far."""
    if evaluation.every_samples is not None:
        return ledger.num_done_ever // evaluation.every_samples
    return ledger.epoch // evaluation.every_epochs
