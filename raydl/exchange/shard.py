"""One shard of the center, for the methods that exchange by messages.

Under the async schedule one message is applied at a time, behind a lock. Hogwild is the same
code without the lock: the arithmetic releases Python's interpreter lock, so messages are
then really added at the same time, and may overwrite parts of each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raydl.center import Center, MakeOptimizer
from raydl.compression import Codec
from raydl.exchange.messages import Orders, Push, Reply, Stamp
from raydl.ledger import Span
from raydl.rules import Rule, Sends, Tally, mix_buffers_


class Settles(Protocol):
    """Who ends a worker's round and gives it orders: the dispatcher, at the home shard."""

    def settle(self, push: Push) -> Orders:
        """Count the round's samples as done, and return what the worker does next."""
        ...

    def repeat(self, push: Push) -> Orders:
        """Return what a message that came before was answered with."""
        ...


@dataclass
class _Letters:
    """What shard and worker know of each other where messages are shortened."""

    mirror: Tensor
    """The center as the worker knows it."""
    answer: np.ndarray | None = None
    """The newest answer, for a message that is repeated."""


@dataclass
class _Cell:
    """A span of the center with its lock, if it has any."""

    center: Center
    lock: contextlib.AbstractContextManager[Any]
    scratch: Any
    """Room for a message: one behind a lock, one for each thread without."""
    letters: dict[str, _Letters] = field(default_factory=dict)
    """By worker, with a codec."""
    at_open: Tensor | None = None
    """With a codec: the center when the generation began, which every worker knows."""

    def letters_of(self, worker_id: str) -> _Letters:
        """Return the exchange of letters with a worker."""
        assert self.at_open is not None, "a generation is open"
        if worker_id not in self.letters:
            self.letters[worker_id] = _Letters(self.at_open.clone())
        return self.letters[worker_id]

    def scratch_of(self, values: np.ndarray) -> Tensor:
        """Return a copy of a message in this thread's scratch; the update uses it up."""
        if not hasattr(self.scratch, "weights"):
            self.scratch.weights = torch.empty_like(self.center.weights)
        scratch: Tensor = self.scratch.weights
        np.copyto(scratch.numpy(), values)
        return scratch


@dataclass(frozen=True)
class ShardState:
    """A copy of what a shard holds."""

    spans: list[Span]
    weights: list[np.ndarray]
    optimizers: list[dict[str, Any]]
    buffers: np.ndarray


class Shard:
    """Some spans of the center and the rule that moves them.

    Args:
        spans: which of the flat parameters live here.
        weights: the whole center, shape [num_parameters]; the spans are copied.
        buffers: float buffers that live here, shape [num_buffers]; empty away from home.
        rule: what moves the center.
        make_optimizer: builds the user's optimizer, for rules that let it step here.
        codec: shortens messages and answers.
        is_locked: one message at a time (async), or all at once (hogwild).
        settles: at the home shard, who gives orders.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        weights: Tensor,
        buffers: Tensor,
        *,
        rule: Rule,
        make_optimizer: MakeOptimizer,
        is_locked: bool,
        codec: Codec | None = None,
        settles: Settles | None = None,
    ) -> None:
        self._rule = rule
        self._codec = None if codec is None or codec.name == "none" else codec
        self._settles = settles
        self._buffers = buffers.clone()
        self._cells: dict[Span, _Cell] = {}
        for start, stop in spans:
            center = Center(
                weights[start:stop].clone(),
                self._buffers[:0],
                rule=rule,
                make_optimizer=make_optimizer,
            )
            # Hogwild: no lock here, on purpose. A reader may see half of an update, and of
            # two updates at one place one may be lost.
            lock = threading.Lock() if is_locked else contextlib.nullcontext()
            scratch = SimpleNamespace() if is_locked else threading.local()
            self._cells[(start, stop)] = _Cell(center, lock, scratch)
        self._books_lock = threading.Lock()
        self._newest: dict[tuple[str, Span], tuple[int, int]] = {}
        self._generation = 0
        self.num_refused = 0
        """Messages of a generation that has passed."""
        self.num_repeated = 0
        """Messages that had been applied before."""

    def open(self, generation: int) -> None:
        """Take messages of this generation from now on, and of no earlier one."""
        with self._books_lock:
            self._generation = generation
        if self._codec:
            for cell in self._cells.values():
                cell.letters.clear()
                cell.at_open = cell.center.weights.clone()

    def exchange(self, push: Push) -> Reply:
        """Apply a message, once, and answer with the center.

        A repeated message is answered with the center as it is now; one of an earlier
        generation is refused. Both leave the center as it was.
        """
        with self._books_lock:
            if push.stamp.generation != self._generation:
                self.num_refused += 1
                return _refusal(push.stamp, self._generation)
            is_new = self._is_new(push)
        is_empty = push.span[0] == push.span[1]  # it only settles
        weights = push.weights if is_empty else self._move(push, is_new=is_new)
        if push.settlement is None or self._settles is None:
            return Reply(weights, push.buffers)
        with self._books_lock:
            buffers = self._mix_buffers(push) if is_new else _copied(self._buffers)
        answer = self._settles.settle if is_new else self._settles.repeat
        return Reply(weights, buffers, answer(push))

    def _is_new(self, push: Push) -> bool:
        """Note the message; return whether it has not come before. Needs the books' lock."""
        key = (push.stamp.worker_id, push.span)
        number = (push.stamp.incarnation, push.stamp.sequence)
        if number <= self._newest.get(key, (-1, -1)):
            self.num_repeated += 1
            return False
        self._newest[key] = number
        return True

    def _move(self, push: Push, *, is_new: bool) -> np.ndarray:
        """Move a span by a message, and return a copy of it for the answer."""
        cell = self._cells[push.span]
        with cell.lock:
            if self._codec:
                return self._move_shortened(cell, self._codec, push, is_new=is_new)
            is_before = self._rule.sends is Sends.WEIGHTS
            before = _copied(cell.center.weights) if is_before else None
            if is_new:
                self._apply(cell.center, cell.scratch_of(push.weights), push)
            return _copied(cell.center.weights) if before is None else before

    def _apply(self, center: Center, total: Tensor, push: Push) -> None:
        center.set_lr(push.lr)
        center.apply_(total, center.buffers, _tally(push))

    def _move_shortened(self, cell: _Cell, codec: Codec, push: Push, *, is_new: bool) -> np.ndarray:
        """Move a span by an encoded message, and return the encoded answer.

        Both sides use only what both can decode: the worker's pull is the difference between
        its weights as they are seen here and the mirror as it will be there.
        """
        letters, center = cell.letters_of(push.stamp.worker_id), cell.center
        if not is_new and letters.answer is not None:
            return letters.answer
        total = torch.empty_like(center.weights)
        codec.decode(torch.tensor(push.weights), out=total)
        if self._rule.sends is Sends.WEIGHTS:
            total.add_(letters.mirror)
            letters.answer = _catch_up(letters.mirror, center.weights, codec)
            # As if the center were where the worker believes it: c + (x - mirror).
            total.sub_(letters.mirror).add_(center.weights)
            self._apply(center, total, push)
        else:
            self._apply(center, total, push)
            letters.answer = _catch_up(letters.mirror, center.weights, codec)
        return letters.answer

    def _mix_buffers(self, push: Push) -> np.ndarray:
        """Move the float buffers towards a worker's, by its share of the workers."""
        if push.buffers.size:
            mix_buffers_(self._buffers, torch.tensor(push.buffers), _tally(push))
        return _copied(self._buffers)

    def state(self) -> ShardState:
        """Return a copy of what is here; of each span as it is between two messages."""
        weights, optimizers = [], []
        for cell in self._cells.values():
            with cell.lock:
                weights.append(_copied(cell.center.weights))
                optimizers.append(cell.center.optimizer_state())
        with self._books_lock:
            buffers = _copied(self._buffers)
        return ShardState(list(self._cells), weights, optimizers, buffers)

    def load_optimizers(self, states: dict[Span, dict[str, Any]]) -> None:
        """Take over the states of the optimizers, by span."""
        for span, cell in self._cells.items():
            cell.center.load_optimizer(states[span])


def _catch_up(mirror: Tensor, center: Tensor, codec: Codec) -> np.ndarray:
    """Bring a mirror closer to the center, and return the message that does so elsewhere."""
    change = torch.sub(center, mirror)
    message = codec.encode(change)
    mirror.add_(codec.decode(message, out=change))
    return _copied(message)


def _tally(push: Push) -> Tally:
    return Tally(push.num_workers, num_messages=1, num_samples=push.num_samples)


def _copied(values: Tensor) -> np.ndarray:
    return np.array(values.numpy())


def _refusal(stamp: Stamp, generation: int) -> Reply:
    nothing = np.empty(0, np.float32)
    reason = (
        f"the center refused {stamp.worker_id}: it trains generation {generation}, "
        f"the message is of generation {stamp.generation}"
    )
    return Reply(nothing, nothing, refusal=reason)
