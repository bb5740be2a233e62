"""``raydl.attach_trainer``: a ``transformers.Trainer`` trains together with those of other workers.

The trainer's optimizer is attached when the trainer creates it. During the training the trainer
evaluates and saves the center; its replica is in the optimizer's part of a checkpoint, so that a
training that is resumed goes on with both. Step, epoch, learning rate and end are those of all
workers: a trainer that joins late moves on to their step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from raydl.core.state_names import own_keys
from raydl.errors import ConfigError
from raydl.ray_backend.attach import attach, seed_of_worker
from raydl.worker.epochs import length_of
from raydl.worker.schedulers import follow
from raydl.worker.user_loop import Attached


class ElasticCallback(TrainerCallback):  # type: ignore[misc]
    """Begins and ends the elastic training of a trainer; ``attach_trainer`` adds it.

    Args:
        trainer: the trainer.
    """

    elastic: Attached | None = None
    """The handle of ``raydl.attach``; None: the training has not begun, or has ended."""
    plain: Any = None
    """The optimizer that the handle stands in for; None: as for ``elastic``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._num_batches = self._batches_per_step = 1
        self._has_moved = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the others at their step, with a replica that the trainer may have loaded."""
        if self.elastic is None:
            return
        self._batches_per_step = args.gradient_accumulation_steps
        self._num_batches = length_of(kwargs["train_dataloader"]) or (
            state.max_steps * self._batches_per_step  # one long epoch
        )
        self._has_moved = False
        self.elastic.set_end(state.max_steps)
        self.elastic.begin_at(state.global_step)
        self.elastic.join()
        num_ahead = self.elastic.pop_num_ahead()
        if num_ahead and self.elastic.is_over:
            # The trainer takes a step even if none is left.
            self.elastic.takes_steps, num_ahead = False, num_ahead - 1
        self._move_on(num_ahead, state, kwargs["lr_scheduler"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on to the step of the others, if this worker has entered behind them."""
        if self.elastic is None:
            return
        epoch = self.elastic.epoch
        self._move_on(self.elastic.pop_num_ahead(), state, kwargs["lr_scheduler"])
        if self._has_moved:
            # The rest of the epoch that it entered in is shorter than the trainer's own epoch.
            control.should_epoch_stop |= self.elastic.epoch > epoch

    def _move_on(self, num_ahead: int, state: Any, scheduler: Any) -> None:
        """Move the trainer on by some steps, and note its epoch."""
        assert self.elastic is not None, "called during the training"
        if num_ahead:
            self._has_moved = True
            # It counts skipped steps, too.
            state.global_step = min(state.global_step + num_ahead, state.max_steps)
            # The means of losses and speeds are over the steps that this trainer takes.
            for name in ("_initial_global_step", "_globalstep_last_logged"):
                setattr(self._trainer, name, getattr(self._trainer, name, 0) + num_ahead)
            if not self.elastic.is_over:
                follow(scheduler, num_ahead)
        steps_per_epoch = -(-self._num_batches // self._batches_per_step)
        self.elastic.epoch, step = divmod(state.global_step, steps_per_epoch)
        if self._has_moved:
            num_batches = min(step * self._batches_per_step, self._num_batches)
            state.epoch = self.elastic.epoch + num_batches / self._num_batches

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the others; the model then holds the center, or the best checkpoint."""
        if self.elastic is None:
            return
        if state.global_step >= state.max_steps:
            self.elastic.finish()
        if state.best_model_checkpoint is None or not args.load_best_model_at_end:
            model = kwargs["model"]
            model.load_state_dict(own_keys(model, self.elastic.center_state_dict()))
        self.leave()

    def leave(self) -> None:
        """Leave the others, if the training is not over."""
        if self.elastic is not None:
            self.elastic.detach()
            self.elastic = None


def attach_trainer(trainer: Trainer, **options: Any) -> ElasticCallback:
    """Train a ``transformers.Trainer`` together with those of other workers, from its next train().

    Call it before ``trainer.train()``, in a Ray actor for each worker. If the arguments of the
    trainer have no ``data_seed``, each worker draws an order of the data of its own.

    Args:
        trainer: the trainer, on one device, without DeepSpeed and FSDP.
        options: method, name, number of workers and all other options of ``raydl.attach``.

    Returns:
        The callback with the handle of ``raydl.attach``, as ``elastic``, during the training.

    Raises:
        ConfigError: if the trainer cannot be attached.
    """
    _check(trainer)
    callback = ElasticCallback(trainer)

    create_optimizer, train = trainer.create_optimizer, trainer.train

    def create_attached(model: Any = None) -> Any:
        if callback.elastic is None:
            callback.plain = create_optimizer(model)
            callback.elastic = attach(trainer.model, callback.plain, **options)
            callback.elastic.saves_frozen = False  # the trainer saves the model
            trainer.optimizer = callback.elastic
        return trainer.optimizer

    def train_together(*arguments: Any, **named: Any) -> Any:
        try:
            return train(*arguments, **named)
        finally:
            callback.leave()
            if callback.plain is not None:  # else an error came before the optimizer was attached
                trainer.optimizer, callback.plain = callback.plain, None  # for another train()

    trainer.create_optimizer, trainer.train = create_attached, train_together
    trainer.evaluate = _of_center(trainer.evaluate, callback)
    trainer.save_model = _of_center(trainer.save_model, callback)
    trainer.add_callback(callback)
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())  # the others see the center at the end
    if trainer.args.data_seed is None:
        seed = (trainer.args.seed + seed_of_worker(options.get("worker_id"))) % 2**31
        trainer.args.data_seed = trainer.accelerator.dataloader_config.data_seed = seed
    return callback


def _check(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            "trainer", f"must be a transformers.Trainer, got a {type(trainer).__name__}"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError("trainer", "cannot use DeepSpeed or FSDP: a replica must fit one worker")
    if trainer.args.parallel_mode != ParallelMode.NOT_PARALLEL:
        raise ConfigError(
            "trainer",
            "is parallel already, and would sum each gradient; start each trainer in an actor of "
            "its own, which sees at most one GPU",
        )


def _of_center(method: Callable[..., Any], callback: ElasticCallback) -> Callable[..., Any]:
    """Return a method of the trainer during which the model holds the center."""

    def of_center(*arguments: Any, **named: Any) -> Any:
        if callback.elastic is None:
            return method(*arguments, **named)
        with callback.elastic.center():
            return method(*arguments, **named)

    return of_center
