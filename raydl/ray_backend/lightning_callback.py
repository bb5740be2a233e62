"""``raydl.LightningCallback``: a Lightning trainer trains together with those of other workers.

Validation and checkpoints see the center; the replica is in the optimizer's part of a checkpoint,
so that a training that is resumed goes on with both.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.pytorch import Callback

from raydl.core.state_names import own_keys
from raydl.errors import ConfigError
from raydl.ray_backend.attach import attach, seed_of_worker
from raydl.worker.user_loop import Attached


class LightningCallback(Callback):  # type: ignore[misc]
    """Trains a Lightning module together with those of other workers.

    Pass it to ``lightning.Trainer``, in a Ray actor for each worker. It adds a number of each
    worker's own to torch's seed, so that each draws an order of the data of its own. At the end of
    the training the module holds the center.

    Args:
        options: method, name, number of workers and all other options of ``raydl.attach``.
    """

    elastic: Attached | None = None
    """The handle of ``raydl.attach``; None: the training has not begun, or has ended."""

    def __init__(self, **options: Any) -> None:
        self._options = options
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
        """Join the others, with a replica that the trainer may have loaded."""
        if self.elastic is not None:
            self.elastic.join()
            self._has_joined = True

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
