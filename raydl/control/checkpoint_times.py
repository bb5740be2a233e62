"""When a checkpoint is due."""

from __future__ import annotations

from raydl.config import TrainConfig


class CheckpointTimes:
    """When a checkpoint is due; one at a time."""

    def __init__(self, config: TrainConfig, now: float) -> None:
        self._config = config.checkpoint
        self._last_s = now
        self._last_epoch = self._epoch = 0
        self._before = now, 0
        self.voted = False
        self.collecting = False

    def saw_epoch(self, epoch: int) -> None:
        """Note how many epochs are complete."""
        self._epoch = epoch

    def due(self, now: float) -> bool:
        """Whether to vote for a checkpoint now."""
        if self.voted or self.collecting:
            return False
        every_s, every_epochs = self._config.every_s, self._config.every_epochs
        by_time = every_s is not None and now - self._last_s >= every_s
        by_epoch = every_epochs is not None and self._epoch - self._last_epoch >= every_epochs
        return by_time or by_epoch

    def give_up(self) -> None:
        """Note that a checkpoint will not come; the next vote begins anew."""
        self.voted = self.collecting = False

    def done(self, now: float, epoch: int) -> None:
        """Note that a checkpoint was collected."""
        self._before = self._last_s, self._last_epoch
        self._last_s, self._last_epoch = now, epoch
        self.voted = self.collecting = False

    def take_back(self) -> None:
        """Note that the checkpoint which was collected last will not be written."""
        self._last_s, self._last_epoch = self._before
