"""``raydl.attach_trainer``: a ``transformers.Trainer`` trains together with those of other workers.

The trainer's optimizer is attached when the trainer creates it. During the training the trainer
evaluates and saves the center; its replica is in the optimizer's part of a checkpoint, so that a
training that is resumed goes on with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from raydl.errors import ConfigError
from raydl.ray_backend.attach import attach, seed_of_worker
from raydl.worker.user_loop import Attached


class ElasticCallback(TrainerCallback):  # type: ignore[misc]
    """Ends the elastic training of a trainer; ``attach_trainer`` adds it."""

    elastic: Attached | None = None
    """The handle of ``raydl.attach``; None: the training has not begun, or has ended."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the others, with a replica that the trainer may have loaded."""
        if self.elastic is not None:
            self.elastic.join()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the others; the model then holds the center, or the best checkpoint."""
        if self.elastic is None:
            return
        if state.best_model_checkpoint is None or not args.load_best_model_at_end:
            kwargs["model"].load_state_dict(self.elastic.center_state_dict())
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
    callback = ElasticCallback()

    def attached(model: Any, optimizer: Any) -> Attached:
        callback.elastic = attach(model, optimizer, **options)
        return callback.elastic

    create_optimizer = trainer.create_optimizer

    def create_attached(model: Any = None) -> Any:
        if callback.elastic is None:
            trainer.optimizer = attached(trainer.model, create_optimizer(model))
        return trainer.optimizer

    trainer.create_optimizer = create_attached
    trainer.evaluate = _of_center(trainer.evaluate, callback)
    trainer.save_model = _of_center(trainer.save_model, callback)
    trainer.add_callback(callback)
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
    if trainer.args.parallel_mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED):
        raise ConfigError(
            "trainer",
            "is distributed already, and would sum each gradient; start each trainer in an actor "
            "of its own, with at most one GPU",
        )


def _of_center(method: Callable[..., Any], callback: ElasticCallback) -> Callable[..., Any]:
    """Return a method of the trainer during which the model holds the center."""

    def of_center(*arguments: Any, **named: Any) -> Any:
        if callback.elastic is None:
            return method(*arguments, **named)
        with callback.elastic.center():
            return method(*arguments, **named)

    return of_center
