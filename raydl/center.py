"""The center variable: what remembers, while replicas explore.

:class:`Center` is the variable itself. In a synchronous method every rank keeps the same
one, moved by the same totals. :class:`SnapshotShelf` holds committed copies of it for those
who evaluate and write checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.flat import FlatModel
from raydl.ledger import Ledger
from raydl.rules import Rule, Tally

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Snapshot:
    """A committed copy of the center, as NumPy arrays so that it travels without a copy."""

    round: int
    generation: int
    epoch: int
    """Epochs completed."""
    num_samples: int
    """Samples seen by all workers up to here."""
    local_step: int
    """Local steps of each worker up to here."""
    version: int
    is_kept: bool
    """Whether the workers kept their states at this round for a checkpoint."""
    weights: np.ndarray
    """Shape [num_parameters]."""
    buffers: np.ndarray
    """Shape [num_buffers]."""
    optimizer: dict[str, Any]
    """State of the optimizer at the center; empty where the rule has none."""
    ledger: dict[str, Any]
    """State of the :class:`raydl.ledger.Ledger` at this round."""


class Center:
    """The center variable c, its float buffers, its version, and its optimizer if any.

    Args:
        weights: initial values, shape [num_parameters]; copied.
        buffers: initial float buffers, shape [num_buffers]; copied.
        rule: what moves it.
        make_optimizer: builds the optimizer of rules that step at the center.
    """

    def __init__(
        self, weights: Tensor, buffers: Tensor, *, rule: Rule, make_optimizer: MakeOptimizer
    ) -> None:
        self.weights = weights.detach().clone()
        self.buffers = buffers.detach().clone()
        self.version = 0
        self._rule = rule
        self._optimizer = None if rule.steps_replica else make_optimizer([self.weights])

    def apply_(self, total_weights: Tensor, total_buffers: Tensor, tally: Tally) -> None:
        """Move the center by a total of messages, which is used up.

        The buffers become the mean of the replicas' buffers.

        Args:
            total_weights: sum of what the rule sends, shape [num_parameters].
            total_buffers: sum of the replicas' float buffers, shape [num_buffers].
            tally: what the totals are made of.
        """
        self._rule.update_center_(self.weights, total_weights, tally, self._optimizer)
        torch.div(total_buffers, tally.num_messages, out=self.buffers)
        self.version += 1

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the optimizer at the center, if there is one."""
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)

    def optimizer_state(self) -> dict[str, Any]:
        """Return a copy of the state of the optimizer at the center, or an empty dict."""
        return copied_to_cpu(self._optimizer.state_dict()) if self._optimizer else {}

    def load(
        self, weights: Tensor, buffers: Tensor, *, version: int, optimizer: dict[str, Any]
    ) -> None:
        """Take over the values of a snapshot."""
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.version = version
        if self._optimizer and optimizer:
            # torch keeps the tensors it is given; a snapshot is shared with others.
            self._optimizer.load_state_dict(copied_to_cpu(optimizer))


def first_snapshot(flat: FlatModel, num_samples: int) -> Snapshot:
    """Return where a new run starts: the weights of a model, and no sample seen.

    Args:
        flat: the initial model.
        num_samples: samples in the training set.
    """
    return Snapshot(
        round=0,
        generation=0,
        epoch=0,
        num_samples=0,
        local_step=0,
        version=0,
        is_kept=False,
        weights=flat.weights.detach().numpy().copy(),
        buffers=flat.buffers.detach().numpy().copy(),
        optimizer={},
        ledger=Ledger(num_samples).state_dict(),
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def copied_to_cpu(value: Any) -> Any:
    """Return nested dicts and lists with copies of all tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: copied_to_cpu(v) for k, v in value.items()}
    if isinstance(value, list):
        return [copied_to_cpu(v) for v in value]
    return value


class SnapshotShelf:
    """The newest committed snapshots, and the two newest that are kept for a checkpoint.

    Snapshots may come faster than anyone takes them; those that a checkpoint needs are held
    however many others come between. Two, since the last round of a run may follow at once
    on one that was voted for and is not collected yet.

    Args:
        num_newest: how many are held in any case.
    """

    def __init__(self, *, num_newest: int = 3) -> None:
        self._num_newest = num_newest
        self._by_round: dict[int, Snapshot] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Take in a snapshot; one of the same round is replaced by its equal."""
        self._by_round[snapshot.round] = snapshot
        rounds = sorted(self._by_round)
        held = set(rounds[-self._num_newest :])
        held.update([r for r in rounds if self._by_round[r].is_kept][-2:])
        self._by_round = {r: self._by_round[r] for r in rounds if r in held}

    def rounds(self) -> tuple[int, ...]:
        """Return the rounds held, oldest first."""
        return tuple(sorted(self._by_round))

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of that round, or None if it is not held (any more)."""
        return self._by_round.get(round)
