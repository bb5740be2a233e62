"""``raydl.LightningCallback``: a Lightning trainer trains together with those of other workers.

Validation and checkpoints see the center; the replica is in the optimizer's part of a checkpoint,
so that a training that is resumed goes on with both. Step, epoch, learning rate and end are those
of all workers: a trainer that joins late moves on to their step.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from lightning.pytorch import Callback

from raydl.core.state_names import own_keys
from raydl.errors import ConfigError
from raydl.ray_backend.attach import attach, seed_of_worker
from raydl.worker.epochs import Interval
from raydl.worker.schedulers import follow
from raydl.worker.user_loop import Attached


class LightningCallback(Callback):  # type: ignore[misc]
    """Trains a Lightning module together with those of other workers.

    Pass it to ``lightning.Trainer``, in a Ray actor for each worker. It adds a number of each
    worker's own to torch's seed, so that each draws an order of the data of its own. At the end of
    the training the module holds the center.

    Args:
        manual_schedulers: with manual optimization, how often the module steps its schedulers:
            once per optimizer ``"step"`` or ``"epoch"``. A worker that joins late moves them on.
        options: method, name, number of workers and all other options of ``raydl.attach``.
    """

    elastic: Attached | None = None
    """The handle of ``raydl.attach``; None: the training has not begun, or has ended."""

    def __init__(self, *, manual_schedulers: Interval = "step", **options: Any) -> None:
        if manual_schedulers not in ("step", "epoch"):
            raise ConfigError(
                "manual_schedulers", f"must be 'step' or 'epoch', got {manual_schedulers!r}"
            )
        self._manual_schedulers = manual_schedulers
        self._options = options
        self._num_to_skip = 0
        """Batches of the next epoch that the others have taken before this worker came."""
        self._held, self._validation = contextlib.ExitStack(), contextlib.ExitStack()
        self._has_joined = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the optimizer.

        Raises:
            ConfigError: if the trainer or the module cannot be attached.
        """
        if trainer.world_size > 1:
            raise ConfigError(
                "trainer",
                "is distributed already, and would sum each gradient; start each trainer in an "
                "actor of its own, with devices=1",
            )
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                "optimizer",
                f"must be one, but configure_optimizers returned {len(trainer.optimizers)}",
            )
        self._held.close()  # after an exception it is still there
        self._has_joined = False
        self.elastic = attach(pl_module, trainer.optimizers[0], **self._options)
        self.elastic.saves_frozen = False  # the trainer saves the module
        trainer.strategy.optimizers = [self.elastic]
        # Checkpoints have the center as the module's weights, with and without an optimizer.
        elastic = self.elastic
        trainer.strategy.lightning_module_state_dict = lambda: own_keys(
            pl_module, elastic.center_state_dict()
        )
        self._held.callback(delattr, trainer.strategy, "lightning_module_state_dict")
        torch.manual_seed(torch.initial_seed() + seed_of_worker(self._options.get("worker_id")))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the others at their step, with a replica that the trainer may have loaded."""
        if self.elastic is None:
            return
        self._num_to_skip = 0
        self.elastic.set_end(_num_steps(trainer))
        self.elastic.begin_at(trainer.global_step)
        self.elastic.join()
        self._has_joined = True
        self.elastic.epoch = trainer.current_epoch
        if num_ahead := self._count_steps(trainer):
            epoch, self._num_to_skip = _place_of(trainer)
            self._step_schedulers(trainer, num_ahead, epoch - trainer.current_epoch)
            _set_all(trainer.fit_loop.epoch_progress.current, epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the epoch."""
        if self.elastic is not None:
            self.elastic.epoch = trainer.current_epoch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batches of this epoch that the others have taken before this worker came."""
        _add_batches(trainer, self._num_to_skip)
        self._num_to_skip = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on to the step of the others, if this worker has entered behind them."""
        if self.elastic is None or not (num_ahead := self._count_steps(trainer)):
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        epoch, num_batches = _place_of(trainer)
        num_epochs = epoch - trainer.current_epoch
        if num_epochs > 0:  # end this epoch here, and go on in a later one
            self._num_to_skip, num_batches = num_batches, trainer.num_training_batches
            _add(trainer.fit_loop.epoch_progress.current, num_epochs - 1)
        self._step_schedulers(trainer, num_ahead, num_epochs)
        _add_batches(trainer, num_batches - progress.current.ready)

    def _count_steps(self, trainer: Any) -> int:
        """Count the steps that the others are ahead as the trainer's; return their number."""
        assert self.elastic is not None, "called during the training"
        num_ahead = self.elastic.pop_num_ahead()
        loop = trainer.fit_loop.epoch_loop
        _add(loop.automatic_optimization.optim_progress.optimizer.step.total, num_ahead)
        _add(loop.manual_optimization.optim_step_progress.total, num_ahead)
        loop._batches_that_stepped += num_ahead  # the loggers' step
        return num_ahead

    def _step_schedulers(self, trainer: Any, num_steps: int, num_epochs: int) -> None:
        """Move the schedulers on by some steps and epochs."""
        assert self.elastic is not None, "called during the training"
        if self.elastic.is_over:
            return
        is_automatic = trainer.lightning_module.automatic_optimization
        for config in trainer.lr_scheduler_configs:
            interval = config.interval if is_automatic else self._manual_schedulers
            count = num_steps if interval == "step" else num_epochs
            if count := count // config.frequency:
                follow(config.scheduler, count)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the center into the module until the end of the validation."""
        if self.elastic is not None:
            self._validation.enter_context(self.elastic.center())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the module's own weights."""
        self._validation.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the others; the module then holds the center."""
        if self.elastic is not None:
            if _has_reached_end(trainer):
                self.elastic.finish()
            pl_module.load_state_dict(own_keys(pl_module, self.elastic.center_state_dict()))
            self._leave()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the others, also if there was nothing to train."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the others at once.

        Lightning calls the callbacks that write checkpoints last, so their checkpoints still have
        the center. Before this worker has joined there is none.
        """
        self._detach()
        if not self._has_joined:
            self._held.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the others, also if a tuner ended the training."""
        self._leave()

    def _leave(self) -> None:
        self._detach()
        self._held.close()

    def _detach(self) -> None:
        self._validation.close()
        if self.elastic is not None:
            self.elastic.detach()
            self.elastic = None


def _steps_per_epoch(trainer: Any) -> int | None:
    """Return the optimizer steps in an epoch, or None if the loader has no length."""
    if math.isinf(trainer.num_training_batches):
        return None
    num_steps: int = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    return max(1, num_steps)


def _num_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of the training, or None if it has no such limit."""
    limits: list[int] = [] if trainer.max_steps < 0 else [trainer.max_steps]
    per_epoch = _steps_per_epoch(trainer)
    if per_epoch is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * per_epoch)
    return min(limits, default=None)


def _has_reached_end(trainer: Any) -> bool:
    """Return whether the trainer has taken all its steps or epochs."""
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    num_epochs = trainer.fit_loop.epoch_progress.current.processed
    return bool(has_all_steps or 0 <= trainer.max_epochs <= num_epochs)


def _place_of(trainer: Any) -> tuple[int, int]:
    """Return (epoch, batches of it that are done) of the trainer's step."""
    per_epoch = _steps_per_epoch(trainer)
    if per_epoch is None:
        return trainer.current_epoch, 0
    epoch, step = divmod(trainer.global_step, per_epoch)
    return epoch, step * trainer.accumulate_grad_batches


def _add(counts: Any, number: int) -> None:
    """Add a number to counts of Lightning, of what is ready up to what is completed."""
    for name in vars(counts):
        setattr(counts, name, getattr(counts, name) + number)


def _set_all(counts: Any, number: int) -> None:
    """Set counts of Lightning to a number."""
    for name in vars(counts):
        setattr(counts, name, number)


def _add_batches(trainer: Any, number: int) -> None:
    """Count some batches of the epoch in progress as done."""
    if number == 0:
        return
    progress, fetcher = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop._data_fetcher
    _add(progress.current, number)
    _add(progress.total, number)
    fetcher.fetched += number
    if not math.isinf(trainer.num_training_batches):
        fetcher.done = fetcher.fetched >= trainer.num_training_batches
        progress.is_last_batch = fetcher.done
