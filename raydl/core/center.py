"""The center variable: what remembers, while replicas explore.

``Center`` is the variable itself, or a span of it. In a synchronous method every rank
keeps the same one, moved by the same totals; otherwise it lives in the center's shards.
``SnapshotShelf`` holds committed copies for those who evaluate and write checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.core.autotune import ExchangeTuning
from raydl.core.flat import FlatModel, is_finite
from raydl.core.optimizers import parameters_of
from raydl.core.progress import Progress
from raydl.core.rules import Rule, Tally, mix_buffers_
from raydl.core.tensor_files import view_of
from raydl.data.ledger import Ledger

MakeOptimizer = Callable[[list[Tensor]], "Optimizer | None"]


@dataclass(frozen=True)
class Snapshot:
    """A committed copy of the center, as NumPy arrays so that it travels without a copy."""

    progress: Progress
    is_kept: bool
    """Whether the workers kept their states at this round for a checkpoint."""
    weights: np.ndarray
    """Shape [num_parameters]."""
    buffers: np.ndarray
    """Shape [num_buffers]."""
    optimizer: dict[str, Any]
    """State of the optimizer at the center; empty where the rule has none."""
    ledger: dict[str, Any]
    """State of the ``raydl.data.ledger.Ledger`` at this round."""
    num_cuts: int = 0
    """How often the learning rate was cut up to here, for the schedule ``plateau``."""
    tuning: ExchangeTuning | None = None
    """Exchange tuning that the workers chose, if they did."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """Differences from the non-trainable state at this start of the run, by name; see
    ``raydl.core.flat.NonTrainableState``."""

    def is_finite(self) -> bool:
        """Whether all values of the center are finite; see ``raydl.core.flat.is_finite``."""
        return is_finite(view_of(self.weights)) and is_finite(view_of(self.buffers))


class Center:
    """The center variable c, or one span of it, with its optimizer if it has any.

    Several threads may call ``apply_`` at once: they then add to the same memory with no
    order between them, as Hogwild does. Who wants an order holds a lock around it.

    Args:
        weights: initial values, shape [n]; kept, and moved in place.
        buffers: initial float buffers, shape [num_buffers]; kept, and moved in place.
        rule: what moves it.
        make_optimizer: builds the user's optimizer, for rules that let it step here.
    """

    def __init__(
        self, weights: Tensor, buffers: Tensor, *, rule: Rule, make_optimizer: MakeOptimizer
    ) -> None:
        self.weights = weights
        self.buffers = buffers
        self._rule = rule
        self._make = rule.make_center_optimizer if rule.steps_replica else make_optimizer
        # A torch optimizer reads the gradient off its tensor. So that threads do not take
        # each other's, each has an alias of the weights with an optimizer of its own; the
        # optimizer's state is one and the same.
        self._here = threading.local()
        self._states: dict[int, dict[str, Any]] = {}
        self._lr: float | None = None
        self._kept: tuple[Tensor, Tensor, dict[str, Any]] | None = None

    def apply_(self, total_weights: Tensor, total_buffers: Tensor, tally: Tally) -> None:
        """Move the center by a total of messages, which is used up.

        Args:
            total_weights: sum of what the rule sends, shape [n].
            total_buffers: sum of the replicas' float buffers, shape [num_buffers].
            tally: what the totals are made of.
        """
        weights, optimizer = self._handle()
        if optimizer is not None and self._lr is not None:
            set_lr(optimizer, self._lr)
        self._rule.update_center_(weights, total_weights, tally, optimizer)
        mix_buffers_(self.buffers, total_buffers, tally)

    def _handle(self) -> tuple[Tensor, Optimizer | None]:
        """Return this thread's alias of the weights, and its optimizer."""
        if not hasattr(self._here, "weights"):
            self._here.weights = self.weights.detach()
            self._here.optimizer = self._make([self._here.weights])
            if self._here.optimizer is not None:
                self._share_state(self._here.optimizer)
        return self._here.weights, self._here.optimizer

    def _share_state(self, optimizer: Optimizer) -> None:
        """Let an optimizer work on the one state there is, by the place of each parameter."""
        for place, tensor in enumerate(parameters_of(optimizer)):
            state = optimizer.state[tensor]  # some have one from the beginning
            optimizer.state[tensor] = self._states.setdefault(place, state)

    def keep(self) -> None:
        """Remember the state as it is now, for ``undo_``."""
        self._kept = self.weights.clone(), self.buffers.clone(), self.optimizer_state()

    def undo_(self) -> None:
        """Go back to what ``keep`` remembered."""
        assert self._kept is not None, "keep comes first"
        weights, buffers, state = self._kept
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.load_optimizer(state)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the user's optimizer, where it steps here."""
        if not self._rule.steps_replica:
            self._lr = lr

    def optimizer_state(self) -> dict[str, Any]:
        """Return a copy of the state of the optimizer at the center, or an empty dict."""
        _, optimizer = self._handle()
        return copied_to_cpu(optimizer.state_dict()) if optimizer else {}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take over what ``optimizer_state`` returned."""
        _, optimizer = self._handle()
        if optimizer is None or not state:
            return
        load_state(optimizer, state)
        for place, tensor in enumerate(parameters_of(optimizer)):
            shared = self._states[place]  # other threads have it too
            shared.clear()
            shared.update(optimizer.state[tensor])
        self._share_state(optimizer)


@dataclass(frozen=True)
class Mirror:
    """A worker's copy of a span of the center, as it last came to know it."""

    weights: Tensor
    """Shape [n]."""
    buffers: Tensor
    """Shape [num_buffers]."""


def joined_states(states: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Return the optimizer state of the whole center from those of its spans, in order.

    What has the shape of its span is laid end to end; anything else (a step count) is that of
    the first one that has been exchanged.
    """
    if len(states) == 1 or not states[0]:
        return states[0]
    merged = {}
    known = [
        (state["state"][0], n) for state, n in zip(states, sizes, strict=True) if state["state"]
    ]
    first, size = known[0] if known else ({}, 0)
    for key, value in first.items():
        if isinstance(value, Tensor) and value.shape == (size,):
            # A span that has not been exchanged yet has no state: as good as zeros.
            parts = [
                state["state"].get(0, {}).get(key, value.new_zeros(size))
                for state, size in zip(states, sizes, strict=True)
            ]
            merged[key] = torch.cat(parts)
        else:
            merged[key] = value
    return {**states[0], "state": {0: merged} if merged else {}}


def split_states(state: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Return the optimizer states of the spans of a center from that of the whole."""
    if len(sizes) == 1 or not state:
        return [state] * len(sizes)
    whole = state["state"].get(0, {})
    split: list[dict[str, Any]] = [{} for _ in sizes]
    for key, value in whole.items():
        is_flat = isinstance(value, Tensor) and value.shape == (sum(sizes),)
        parts = torch.split(value, sizes) if is_flat else [value] * len(sizes)
        for part, piece in zip(split, parts, strict=True):
            part[key] = piece
    return [{**state, "state": {0: part} if part else {}} for part in split]


def first_snapshot(flat: FlatModel, num_samples: int) -> Snapshot:
    """Return where a new run starts: the weights of a model, and no sample seen.

    Args:
        flat: the initial model.
        num_samples: samples in the training set.
    """
    return Snapshot(
        progress=Progress(),
        is_kept=False,
        weights=flat.weights.detach().cpu().numpy().copy(),
        buffers=flat.buffers.detach().cpu().numpy().copy(),
        optimizer={},
        ledger=Ledger(num_samples).state_dict(),
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters; groups with a share of it get that."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_share", 1.0)


def load_state(optimizer: Optimizer, state: dict[str, Any], *, copies: bool = True) -> None:
    """Load what an optimizer remembers; its settings stay those of now.

    torch keeps the tensors that it is given, so they are copied, for a snapshot is shared with
    others; without ``copies`` they are the optimizer's from here on.
    """
    settings = [{**group} for group in optimizer.param_groups]
    optimizer.load_state_dict(copied_to_cpu(state) if copies else state)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)


def copied_to_cpu(value: Any) -> Any:
    """Return nested dicts and lists with copies of all tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: copied_to_cpu(v) for k, v in value.items()}
    if isinstance(value, list):
        return [copied_to_cpu(v) for v in value]
    return value


def as_arrays(value: Any) -> Any:
    """Return nested dicts and lists with arrays on the memory of their tensors.

    Ray shares arrays with a process of the same node; tensors it copies, twice. Of a dtype that
    NumPy lacks they stay tensors.
    """
    if isinstance(value, Tensor):
        try:
            return value.detach().cpu().numpy()
        except TypeError:
            return value
    if isinstance(value, dict):
        return {k: as_arrays(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_arrays(v) for v in value]
    return value


def as_tensors(value: Any) -> Any:
    """Return nested dicts and lists with copies of their arrays as tensors again."""
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    if isinstance(value, dict):
        return {k: as_tensors(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_tensors(v) for v in value]
    return value


class SnapshotShelf:
    """The newest committed snapshots, and the two newest that are kept for a checkpoint.

    Snapshots may come faster than anyone takes them; those that a checkpoint needs are held
    however many others come between. Two, since the last round of a run may follow at once
    on one that was voted for and is not collected yet.

    A worker's snapshot may be held up on its way while the others go on without it, and its
    round may be one that they train anew. So each generation begins here: from then on a
    snapshot that a member of an earlier one made is refused, whatever its round.

    Args:
        num_newest: how many are held in any case.
    """

    def __init__(self, *, num_newest: int = 3) -> None:
        self._num_newest = num_newest
        self._by_round: dict[int, Snapshot] = {}
        self.generation = 0
        """The newest that has begun."""
        self.num_refused = 0
        """Snapshots that came too late: an earlier generation made them."""

    def begin(self, generation: int, round: int) -> Snapshot | None:
        """Begin a generation; return the snapshot of the round that it starts from, if held.

        What lies beyond that round is dropped: nobody goes on from it, and this generation will
        make snapshots with the same numbers.
        """
        self.generation = max(self.generation, generation)
        if round in self._by_round:
            self._by_round = {r: s for r, s in self._by_round.items() if r <= round}
        return self.get(round)

    def put(self, snapshot: Snapshot) -> bool:
        """Take in a snapshot; return whether it counts.

        One of the same round and generation is replaced by its equal.
        """
        before = self._by_round.get(snapshot.progress.round)
        newest = max(self.generation, before.progress.generation if before else 0)
        if snapshot.progress.generation < newest:
            self.num_refused += 1
            return False
        self._take_in(snapshot)
        return True

    def adopt(self, snapshot: Snapshot) -> None:
        """Take in a copy that the controller has chosen to go on from, of any generation.

        Between two generations that of a member of the last one is the newest there is, and if
        all of these are lost, that of a worker which was left out before. One of the same round
        that a later generation made stays.
        """
        before = self._by_round.get(snapshot.progress.round)
        if before is None or before.progress.generation <= snapshot.progress.generation:
            self._take_in(snapshot)

    def _take_in(self, snapshot: Snapshot) -> None:
        before = self._by_round.get(snapshot.progress.round)
        if before is not None and before.is_kept:
            is_same = before.progress.generation == snapshot.progress.generation
            snapshot = replace(snapshot, is_kept=snapshot.is_kept or is_same)
        self._by_round[snapshot.progress.round] = snapshot
        rounds = sorted(self._by_round)
        held = set(rounds[-self._num_newest :])
        held.update([r for r in rounds if self._by_round[r].is_kept][-2:])
        self._by_round = {r: self._by_round[r] for r in rounds if r in held}

    def rounds(self) -> tuple[int, ...]:
        """Return the rounds held, oldest first."""
        return tuple(sorted(self._by_round))

    def num_changes(self) -> int:
        """Return the changes of the ledger in the newest one."""
        return int(self.newest().ledger.get("num_changes", 0))

    def newest(self) -> Snapshot:
        """Return the newest snapshot; there is one as soon as a run begins."""
        return self._by_round[max(self._by_round)]

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of that round, or None if it is not held (any more)."""
        return self._by_round.get(round)
