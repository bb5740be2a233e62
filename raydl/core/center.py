"""The center variable of elastic averaging, and snapshots of it.

``Center`` is the variable itself, or one span of it. In synchronous methods every rank has a copy
and applies the same sums to it; otherwise the center lives in shards. ``SnapshotCache`` holds
committed copies for evaluation and checkpoints.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from raydl.core.autotune import ExchangeTuning
from raydl.core.copy_buffers import map_nested
from raydl.core.flat import FlatModel, is_finite
from raydl.core.optimizers import parameters_of
from raydl.core.progress import Progress
from raydl.core.rules import Mail, Now, Rule, State, mix_buffers_, with_equal_arrivals
from raydl.core.tensor_files import view_of
from raydl.data.ledger import Ledger

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Snapshot:
    """A committed copy of the center, as NumPy arrays, which Ray shares without copying them."""

    progress: Progress
    is_kept: bool
    """Whether the workers kept their states of this round for a checkpoint."""
    weights: np.ndarray
    """Shape [num_parameters]."""
    buffers: np.ndarray
    """Shape [num_buffers]."""
    optimizer: dict[str, Any]
    """What the rule keeps beside the center, as the state of a torch optimizer; or empty."""
    ledger: dict[str, Any]
    """State of the ``raydl.data.ledger.Ledger`` at this round."""
    num_cuts: int = 0
    """Cuts of the learning rate so far, for the schedule ``plateau``."""
    tuning: ExchangeTuning | None = None
    """Exchange tuning that the workers chose, or None."""
    non_trainable: dict[str, np.ndarray] = field(default_factory=dict)
    """Non-trainable tensors, by name, that differ from those at this start of the run; see
    ``raydl.core.non_trainable.NonTrainableState``."""

    def is_finite(self) -> bool:
        """Whether all values of the center are finite; see ``raydl.core.flat.is_finite``."""
        return is_finite(view_of(self.weights)) and is_finite(view_of(self.buffers))


class Center:
    """The center variable c, or one span of it, with what the rule keeps beside it.

    Several threads may call ``apply_`` at once. They then add to the same memory in no order, as
    in Hogwild; for an order the caller holds a lock (``parameter_server/shard.py``).

    Args:
        weights: initial values, shape [n]; updated in place.
        buffers: initial float buffers, shape [num_buffers]; updated in place.
        rule: update rule.
        make_optimizer: builds the user's optimizer, for rules with that optimizer at the center.
    """

    def __init__(
        self, weights: Tensor, buffers: Tensor, *, rule: Rule, make_optimizer: MakeOptimizer
    ) -> None:
        self.weights = weights
        self.buffers = buffers
        self.rule = rule
        self._own = (
            _OwnState(weights, rule)
            if rule.takes_steps
            else _OptimizerState(weights, make_optimizer)
        )
        self._kept: tuple[Tensor, Tensor, dict[str, Any]] | None = None

    @property
    def state(self) -> State:
        """What the rule keeps beside the center, as this thread may use it."""
        return self._own.state()

    def apply_(self, mail: Mail, total_buffers: Tensor, now: Now) -> None:
        """Update the center with the sums of messages, which are overwritten.

        Args:
            mail: the messages. If they weigh nothing they have no mean, and the weights stay as
                they are.
            total_buffers: sum of the replicas' float buffers, shape [num_buffers].
            now: of the exchange.
        """
        if mail.weight:
            self.rule.merge_(self.weights.detach(), mail, self.state, now)
        mix_buffers_(
            self.buffers, total_buffers, num_messages=mail.count, num_workers=now.num_workers
        )

    def keep(self) -> None:
        """Save the present state for ``undo_``."""
        self._kept = self.weights.clone(), self.buffers.clone(), self.optimizer_state()

    def undo_(self) -> None:
        """Restore the state of the last ``keep``."""
        assert self._kept is not None, "call keep first"
        weights, buffers, state = self._kept
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.load_optimizer(state)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the user's optimizer, if it is at the center."""
        self._own.lr = lr

    def optimizer_state(self) -> dict[str, Any]:
        """Return a copy of what is beside the center, as a torch optimizer's; empty if nothing."""
        return copied_to_cpu(self._own.state_dict())  # type: ignore[no-any-return]

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load a state that ``optimizer_state`` returned."""
        if state:
            self._own.load_state_dict(state)


class _OwnState:
    """The named vectors and numbers of a rule, beside the center.

    Args:
        weights: the center, shape [n].
        rule: names them.
    """

    def __init__(self, weights: Tensor, rule: Rule) -> None:
        self.lr: float | None = None
        self._state = State(
            {name: torch.zeros_like(weights) for name in rule.shared},
            dict.fromkeys(rule.shared_numbers, 0.0),
        )

    def state(self) -> State:
        return self._state

    def state_dict(self) -> dict[str, Any]:
        values = {**self._state.vectors, **self._state.numbers}
        return {"state": {0: values}, "param_groups": []} if values else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; what it lacks is zero, as before the first exchange."""
        values = state["state"].get(0, {})
        for name, vector in self._state.vectors.items():
            vector.copy_(values[name]) if name in values else vector.zero_()
        for name in self._state.numbers:
            self._state.numbers[name] = float(values.get(name, 0.0))


class _OptimizerState:
    """The user's optimizer at the center.

    A torch optimizer reads the gradient from its tensor. So each thread has its own alias of the
    weights, with its own gradient and optimizer; all optimizers share one state.

    Args:
        weights: the center, shape [n].
        make_optimizer: builds the optimizer.
    """

    def __init__(self, weights: Tensor, make_optimizer: MakeOptimizer) -> None:
        self.lr: float | None = None
        self._weights = weights
        self._make = make_optimizer
        self._local = threading.local()
        self._states: dict[int, dict[str, Any]] = {}

    def state(self) -> State:
        return State(step_along_=self._step_along_)

    def _step_along_(self, gradient: Tensor) -> None:
        weights, optimizer = self._handle()
        if self.lr is not None:
            set_lr(optimizer, self.lr)
        weights.grad = gradient
        optimizer.step()
        weights.grad = None

    def _handle(self) -> tuple[Tensor, Optimizer]:
        """Return this thread's alias of the weights and its optimizer."""
        if not hasattr(self._local, "weights"):
            self._local.weights = self._weights.detach()
            self._local.optimizer = self._make([self._local.weights])
            self._share_state(self._local.optimizer)
        return self._local.weights, self._local.optimizer

    def _share_state(self, optimizer: Optimizer) -> None:
        """Let an optimizer use the shared state, by the index of each parameter."""
        for index, tensor in enumerate(parameters_of(optimizer)):
            state = optimizer.state[tensor]  # some optimizers have one from the beginning
            optimizer.state[tensor] = self._states.setdefault(index, state)

    def state_dict(self) -> dict[str, Any]:
        return self._handle()[1].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _, optimizer = self._handle()
        load_state(optimizer, state)
        for index, tensor in enumerate(parameters_of(optimizer)):
            shared = self._states[index]  # the optimizers of other threads hold it, too
            shared.clear()
            shared.update(optimizer.state[tensor])
        self._share_state(optimizer)


@dataclass(frozen=True)
class Mirror:
    """A worker's copy of a span of the center, from its last exchange."""

    weights: Tensor
    """Shape [n]."""
    buffers: Tensor
    """Shape [num_buffers]."""
    state: State = field(default_factory=State)
    """Empty: what a rule keeps beside the center is elsewhere."""


def joined_states(states: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Return the optimizer state of the whole center from the states of its spans, in order.

    The states are listed, not merged: spans are exchanged one by one, so a value of a span, such as
    its number of steps, holds for that span only. A center of one span has that span's state.
    """
    if len(states) == 1 or not states[0]:
        return states[0]
    return {"spans": [[size, state] for size, state in zip(sizes, states, strict=True)]}


def split_states(state: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Return the optimizer state of each span of a center from the state of the whole.

    The whole may have been joined from other spans, or be of one span, as in all checkpoints of
    earlier versions. Vectors then move with their elements. Of all other values a new span has
    those of the old span with which it shares the most elements. Old spans that have not been
    exchanged have no state, which equals zeros; a new span of such elements only has none either.
    """
    if not state:
        return [state] * len(sizes)
    spans = state.get("spans", [[sum(sizes), state]])
    if [size for size, _ in spans] == sizes:
        return [of_span for _, of_span in spans]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return [
        _state_at(start, start + size, spans) for start, size in zip(starts, sizes, strict=True)
    ]


def _state_at(start: int, stop: int, spans: list[Any]) -> dict[str, Any]:
    """Return the state of one span of the center, from the (size, state) of all old spans."""
    parts, before = [], 0
    for size, state in spans:
        shared = slice(max(start - before, 0), min(stop - before, size))
        if shared.start < shared.stop:
            parts.append((size, shared, state))
        before += size
    values = with_equal_arrivals([state["state"].get(0, {}) for *_, state in parts])
    lengths = [shared.stop - shared.start for _, shared, _ in parts]
    of_most = max(range(len(parts)), key=lambda i: (bool(values[i]), lengths[i]))
    merged = {}
    for key, value in values[of_most].items():
        if not _is_vector(value, parts[of_most][0]):
            merged[key] = value
            continue
        merged[key] = torch.cat([
            own[key][shared] if _is_vector(own.get(key), size) else value.new_zeros(length)
            for own, (size, shared, _), length in zip(values, parts, lengths, strict=True)
        ])  # fmt: skip
    return {**parts[of_most][2], "state": {0: merged} if merged else {}}


def _is_vector(value: Any, size: int) -> bool:
    """Whether a value has an element for each parameter of a span."""
    return isinstance(value, Tensor) and value.shape == (size,)


def extended_state(
    state: dict[str, Any],
    weights: Tensor,
    num_elements: int,
    make_optimizer: MakeOptimizer | None,
) -> dict[str, Any]:
    """Return the state beside a center from the state beside its first elements.

    The other elements have no state, which equals zeros.

    Args:
        state: the state of the first elements.
        weights: the weights of the whole center, shape [n]; they do not change.
        num_elements: number of the first elements.
        make_optimizer: builds the user's optimizer at the center; None: the rule keeps its own
            vectors there.
    """
    if not state or num_elements == weights.numel():
        return state
    if "spans" in state or make_optimizer is None:
        spans = state.get("spans", [[num_elements, state]])
        further = {**spans[-1][1], "state": {}}
        return {"spans": [*spans, [weights.numel() - num_elements, further]]}
    earlier, optimizer = make_optimizer([weights[:num_elements]]), make_optimizer([weights])
    load_state(earlier, state)
    by_start = {tensor.data_ptr(): tensor for tensor in parameters_of(earlier)}
    for tensor in parameters_of(optimizer):
        if (first := by_start.get(tensor.data_ptr())) is not None:
            for key, value in earlier.state[first].items():
                optimizer.state[tensor][key] = _padded(value, first, tensor)
    return copied_to_cpu(optimizer.state_dict())  # type: ignore[no-any-return]


def _padded(value: Any, first: Tensor, tensor: Tensor) -> Any:
    """Return a value of an optimizer's state with zeros for further elements of its tensor."""
    if not isinstance(value, Tensor) or value.shape != first.shape:
        return value
    return torch.cat([value, value.new_zeros(tensor.numel() - first.numel())])


def first_snapshot(flat: FlatModel, num_samples: int) -> Snapshot:
    """Return the snapshot that a new run starts from.

    Args:
        flat: initial model.
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
    """Set the learning rate of all groups; a group with ``lr_share`` gets that share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_share", 1.0)


def load_state(optimizer: Optimizer, state: dict[str, Any], *, copies: bool = True) -> None:
    """Load the state of an optimizer and keep its present settings.

    torch keeps the tensors that it loads. They are copied, because a snapshot is shared with
    others; without ``copies`` the optimizer owns them from now on.
    """
    settings = [{**group} for group in optimizer.param_groups]
    optimizer.load_state_dict(copied_to_cpu(state) if copies else state)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)


def copied_to_cpu(value: Any) -> Any:
    """Return nested dicts, lists and tuples with copies of all tensors on the CPU."""
    return map_nested(value, lambda v: v.detach().cpu().clone() if isinstance(v, Tensor) else v)


def as_arrays(value: Any) -> Any:
    """Return nested dicts, lists and tuples with tensors as arrays on the same memory.

    Ray shares arrays with processes on the same node, but copies tensors twice. Tensors of a dtype
    that NumPy lacks stay tensors.
    """

    def as_array(v: Any) -> Any:
        try:
            return v.detach().cpu().numpy() if isinstance(v, Tensor) else v
        except TypeError:
            return v

    return map_nested(value, as_array)


def as_tensors(value: Any) -> Any:
    """Return nested dicts, lists and tuples with arrays copied to tensors."""
    return map_nested(value, lambda v: torch.tensor(v) if isinstance(v, np.ndarray) else v)


class SnapshotCache:
    """The newest committed snapshots, and the two newest that belong to a checkpoint.

    Snapshots may arrive faster than they are read. Snapshots for a checkpoint are held however
    many others follow: two of them, since the last round of a run may directly follow a
    checkpoint's round that has not been collected yet.

    A worker's snapshot may be delayed while the other workers go on without it, and they may train
    its round again. So each generation begins here: from then on snapshots from members of earlier
    generations are refused, whatever their round.

    Args:
        num_newest: number of newest snapshots to hold.
    """

    def __init__(self, *, num_newest: int = 3) -> None:
        self._num_newest = num_newest
        self._by_round: dict[int, Snapshot] = {}
        self.generation = 0
        """Newest generation that has begun."""
        self.num_refused = 0
        """Snapshots of earlier generations that arrived too late."""

    def begin(self, generation: int, round: int) -> Snapshot | None:
        """Begin a generation and return the snapshot of the round it starts from, if held.

        Snapshots beyond that round are dropped: no worker goes on from them, and this generation
        will make snapshots of the same rounds.
        """
        self.generation = max(self.generation, generation)
        if round in self._by_round:
            self._by_round = {r: s for r, s in self._by_round.items() if r <= round}
        return self.get(round)

    def put(self, snapshot: Snapshot) -> bool:
        """Store a snapshot, or refuse one of an earlier generation; return whether it is stored.

        It replaces a snapshot of the same round and generation, which is equal.
        """
        before = self._by_round.get(snapshot.progress.round)
        newest = max(self.generation, before.progress.generation if before else 0)
        if snapshot.progress.generation < newest:
            self.num_refused += 1
            return False
        self._store(snapshot)
        return True

    def adopt(self, snapshot: Snapshot) -> None:
        """Store a copy, of any generation, that the controller chose to go on from.

        Between two generations the newest copy belongs to a member of the last generation. If all
        of these members are lost, it belongs to a worker that was left out before. A snapshot of
        the same round from a later generation is not replaced.
        """
        before = self._by_round.get(snapshot.progress.round)
        if before is None or before.progress.generation <= snapshot.progress.generation:
            self._store(snapshot)

    def _store(self, snapshot: Snapshot) -> None:
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
        """Return the number of ledger changes in the newest snapshot."""
        return int(self.newest().ledger.get("num_changes", 0))

    def newest(self) -> Snapshot:
        """Return the newest snapshot; a run stores one when it begins."""
        return self._by_round[max(self._by_round)]

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round, or None if it is not held."""
        return self._by_round.get(round)
