"""The epochs of a user's loop, in step with the loops of the other workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Literal, Protocol, TypeVar

from raydl.errors import ConfigError
from raydl.worker.schedulers import advance, count_of, needs_scores, restart

Interval = Literal["step", "epoch"]
Item = TypeVar("Item")


class Handle(Protocol):
    """What the epochs need of ``raydl.worker.user_loop.Attached``."""

    epoch: int

    @property
    def local_step(self) -> int:
        """Local steps so far."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the training has ended."""
        ...

    def set_end(self, num_steps: int | None) -> None:
        """Set the number of steps of the training."""
        ...

    def join(self) -> None:
        """Join the others."""
        ...

    def pop_num_ahead(self) -> int:
        """Return how many steps the others were ahead, since the last call."""
        ...

    def finish(self) -> None:
        """Say that the training has reached its end."""
        ...


class Epochs(Generic[Item]):
    """The epochs of one loop; ``Attached.epochs`` has the arguments."""

    def __init__(
        self,
        handle: Handle,
        loader: Iterable[Item],
        num_epochs: int | None,
        *,
        num_steps: int | None,
        scheduler: Any,
        interval: Interval,
        batches_per_step: int,
    ) -> None:
        self._handle, self._loader, self._scheduler = handle, loader, scheduler
        self._num_epochs, self._num_steps, self._interval = num_epochs, num_steps, interval
        self._batches_per_step = batches_per_step
        self._num_batches = length_of(loader)
        self._check()
        self._index = 0
        """Batches of this epoch before the next one."""

    def _check(self) -> None:
        if (self._num_epochs is None) == (self._num_steps is None):
            raise ConfigError("num_epochs", "or num_steps must be given, and not both")
        for name, value, least in (
            ("num_epochs", self._num_epochs, 0),
            ("num_steps", self._num_steps, 0),
            ("batches_per_step", self._batches_per_step, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(name, f"must be {least} or more, got {value}")
        if self._num_batches is None and self._num_epochs is not None:
            raise ConfigError(
                "num_epochs", "cannot be used with a loader without a length; give num_steps"
            )
        if self._num_batches == 0:
            raise ConfigError("loader", "has no batches")
        if self._interval not in ("step", "epoch"):
            raise ConfigError("interval", f"must be 'step' or 'epoch', got {self._interval!r}")
        if self._scheduler is not None and needs_scores(self._scheduler):
            raise ConfigError(
                "scheduler",
                f"cannot be {type(self._scheduler).__name__}: its rate depends on all scores "
                f"before, so that it cannot be brought to a step; leave it out here",
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps in an epoch; None: the loader has no length."""
        if self._num_batches is None:
            return None
        return -(-self._num_batches // self._batches_per_step)

    def __iter__(self) -> Iterator[tuple[int, Iterator[Item]]]:
        handle, per_epoch = self._handle, self.steps_per_epoch
        num_steps = self._num_steps
        if self._num_epochs is not None and per_epoch is not None:
            num_steps = self._num_epochs * per_epoch
        handle.set_end(num_steps)
        handle.join()
        num_ahead = handle.pop_num_ahead()
        self._begin_at(handle.local_step, num_ahead)
        while not self._is_done():
            epoch = handle.epoch
            yield epoch, self._batches()
            if handle.epoch == epoch:
                handle.epoch, self._index = epoch + 1, 0
        handle.finish()

    def _batches(self) -> Iterator[Item]:
        """Yield the batches that are left of this epoch."""
        epoch, is_empty = self._handle.epoch, True
        for batch in self._loader:
            is_empty = False
            self._index += 1
            yield batch
            self._catch_up()
            if self._handle.epoch != epoch or self._index == self._num_batches or self._is_done():
                return
        if is_empty:
            raise ConfigError("loader", "has no batches")

    def _is_done(self) -> bool:
        # Skipped steps do not count as steps, but their batches do.
        has_passed_all = self._num_epochs is not None and self._handle.epoch >= self._num_epochs
        return has_passed_all or self._handle.is_over

    def _begin_at(self, step: int, num_ahead: int) -> None:
        """Begin at a step.

        Args:
            step: the step.
            num_ahead: how many steps of it are the others'; the rest are those of a loaded state.
        """
        self._handle.epoch, self._index = self._place_of(step)
        if self._scheduler is None or self._handle.is_over:
            return
        if count_of(self._scheduler) < self._count_at(step - num_ahead):
            restart(self._scheduler)  # the optimizer was loaded with a later rate
        advance(self._scheduler, self._count_at(step) - count_of(self._scheduler))

    def _count_at(self, step: int) -> int:
        """Return how often the scheduler has been stepped before a step."""
        return step if self._interval == "step" else self._place_of(step)[0]

    def _catch_up(self) -> None:
        """Move on by the steps that the others are ahead, if this worker has just entered."""
        num_ahead = self._handle.pop_num_ahead()
        if not num_ahead or self._handle.is_over:
            return
        num_passed = 0
        if self._num_batches is not None:
            place = self._place_of(self._handle.local_step)
            # Skipped steps have used up batches: it may be further than its steps say.
            epoch, index = max(place, (self._handle.epoch, self._index))
            num_passed = epoch - self._handle.epoch
            self._handle.epoch, self._index = epoch, index
        if self._scheduler is not None:
            # The user's loop takes the step of the epoch that it is in.
            advance(self._scheduler, num_ahead if self._interval == "step" else num_passed - 1)

    def _place_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, batches of it before this step)."""
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            return 0, 0
        return step // per_epoch, step % per_epoch * self._batches_per_step


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None if it has no length."""
    try:
        return len(loader)
    except TypeError:  # also of a DataLoader, if its data set has no length
        return None
