"""One shard of the center, for the methods that exchange by messages.

Under the async schedule one message is applied at a time, behind a lock. Hogwild is the same
code without the lock: the arithmetic releases Python's interpreter lock, so messages are
then really added at the same time, and may overwrite parts of each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raydl.core.center import Center, MakeOptimizer
from raydl.core.compression import Codec
from raydl.core.membership import Membership
from raydl.core.rules import Rule, Sends, Tally, mix_buffers_
from raydl.data.ledger import Span
from raydl.parameter_server.protocol import (
    Assignment,
    CellAddress,
    MessageId,
    Request,
    Response,
    refusal_of,
)
from raydl.parameter_server.shared_memory import MappedCell


class Settles(Protocol):
    """Ends a worker's round and assigns the next one: the coordinator, at the home shard."""

    def settle(self, request: Request) -> Assignment | None:
        """Count the round's samples as done, and return what the worker does next.

        None: it is no member any more.
        """
        ...

    def repeat(self, request: Request) -> Assignment:
        """Return the response that an earlier copy of a message got."""
        ...


@dataclass
class _Letters:
    """The state that shard and worker share where messages are compressed."""

    mirror: Tensor
    """The center as the worker knows it."""
    entered: int
    """The generation that the worker entered with."""
    answer: np.ndarray | None = None
    """The newest answer, for a message that is repeated."""


@dataclass
class _Cell:
    """A span of the center with its lock, if it has any."""

    center: Center
    lock: contextlib.AbstractContextManager[Any]
    mapped: MappedCell | None
    """The memory that the span lies in, where workers may write it; it has a lock of its own."""
    scratch: list[Tensor] = field(default_factory=list)
    """Room for messages that is free; as much as there were messages at one time."""
    letters: dict[str, _Letters] = field(default_factory=dict)
    """By worker, with a codec."""

    def held(self, message_id: MessageId) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock for a message.

        Raises:
            ExchangeTimeoutError: a worker that maps the memory held it for too long.
        """
        return (
            self.mapped.held(message_id.sequence, message_id.generation)
            if self.mapped
            else self.lock
        )

    def read(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock for a copy."""
        return self.mapped.read() if self.mapped else self.lock

    def write_to(self, members: dict[str, int], known: Tensor) -> None:
        """Exchange letters with these workers from now on.

        Args:
            members: by worker, the generation that it entered with.
            known: the center as those know it who are new.
        """
        letters = {w: x for w, x in self.letters.items() if x.entered == members.get(w)}
        for worker_id, entered in members.items():
            if worker_id not in letters:
                letters[worker_id] = _Letters(known.clone(), entered)
        self.letters = letters  # at once: hogwild's messages look here with no lock

    @contextlib.contextmanager
    def copied(self, values: np.ndarray) -> Iterator[Tensor]:
        """Lend a copy of a message; the update uses it up.

        Not one for each thread: a center has two for each worker, and each may take a message.
        """
        try:
            scratch = self.scratch.pop()  # one call, so that no two threads get the same
        except IndexError:
            scratch = torch.empty_like(self.center.weights)
        np.copyto(scratch.numpy(), values)
        yield scratch
        self.scratch.append(scratch)


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
        node: of its process, if workers there may write the memory; None: they send messages.
        lock_timeout_s: the longest wait of these workers for the memory's lock, in seconds.
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
        node: str | None = None,
        lock_timeout_s: float = 0.0,
    ) -> None:
        self._node = node
        self._rule = rule
        self._codec = None if codec is None or codec.name == "none" else codec
        self._settles = settles
        self._buffers = buffers.clone()
        self._cells: dict[Span, _Cell] = {}
        for start, stop in spans:
            values, mapped = weights[start:stop].clone(), None
            if node is not None:
                mapped = MappedCell.create(values, is_locked=is_locked, timeout_s=lock_timeout_s)
                values = mapped.weights
            center = Center(
                values,
                self._buffers[:0],
                rule=rule,
                make_optimizer=make_optimizer,
            )
            # Hogwild: no lock here, on purpose. A reader may see half of an update, and of
            # two updates at one place one may be lost.
            lock = threading.Lock() if is_locked else contextlib.nullcontext()
            self._cells[(start, stop)] = _Cell(center, lock, mapped)
        self._aggregator_lock = threading.Lock()
        self._newest: dict[str, dict[Span, tuple[int, int]]] = {}
        self._generation = 0
        self._entered: dict[str, int] = {}
        self.num_refused = 0
        """Messages of workers that are no members, or were others then."""
        self.num_repeated = 0
        """Messages that had been applied before."""

    def begin_generation(self, membership: Membership) -> None:
        """Take messages of these workers from now on, who all enter with this generation."""
        with self._aggregator_lock:
            self._entered = {}
        for cell in self._cells.values():
            cell.letters = {}
        self.change(membership)

    def change(self, membership: Membership) -> ShardState:
        """Let workers join and leave; the messages of those who stay go on meanwhile.

        Returns:
            What newcomers start from: with a codec the very copies that their letters begin
            with, so that both sides hold the same bits, whatever comes in between.
        """
        with self._aggregator_lock:
            before, self._generation = self._entered, membership.generation
            self._entered = members = {
                worker_id: before.get(worker_id, membership.generation)
                for worker_id in membership.worker_ids
            }
            self._newest = {w: self._newest[w] if w in before else {} for w in members}
        for cell in self._cells.values():
            if cell.mapped:
                cell.mapped.admit(members)
        return self._state(members)

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the spans whose memory a member may map, from a process of a node."""
        if node != self._node:
            return {}
        found = {s: c.mapped.address_for(worker_id) for s, c in self._cells.items() if c.mapped}
        return {span: address for span, address in found.items() if address}

    def exchange(self, request: Request) -> Response:
        """Apply a message, once, and answer with the center.

        A repeated message is answered with the center as it is now; one of a worker that is
        no member, or has entered anew since, is refused. Both leave the center as it was.
        """
        with self._aggregator_lock:
            if self._refusal(request):
                return self._refuse(request)
            is_new = self._is_new(request)
        is_empty = request.span[0] == request.span[1]  # it only settles
        weights = request.weights if is_empty else self._move(request, is_new=is_new)
        if weights is None:
            with self._aggregator_lock:
                return self._refuse(request)
        if request.completion is None or self._settles is None:
            return Response(weights, request.buffers)
        with self._aggregator_lock:
            buffers = self._mix_buffers(request) if is_new else _copied(self._buffers)
        # The worker may have been removed since the check above. Its message has moved the
        # center then, while its samples are trained by others: as if it were one message more.
        # To hold the membership for the time of a message would let changes wait for any
        # message that is stuck.
        assignment = self._settles.settle(request) if is_new else self._settles.repeat(request)
        if assignment is None:
            with self._aggregator_lock:
                return self._refused(request)  # the call that settles it has counted it
        return Response(weights, buffers, assignment)

    def _refusal(self, request: Request) -> str:
        entered = self._entered.get(request.message_id.worker_id)
        return refusal_of(request.message_id, entered, self._generation)

    def _refuse(self, request: Request) -> Response:
        """Count a message that is not taken, and answer it. Needs the books' lock."""
        self.num_refused += 1
        return self._refused(request)

    def _refused(self, request: Request) -> Response:
        """Return the answer to a message that is not taken. Needs the books' lock."""
        nothing = np.empty(0, np.float32)
        reason = self._refusal(request) or refusal_of(request.message_id, None, self._generation)
        return Response(nothing, nothing, refusal=reason)

    def _is_new(self, request: Request) -> bool:
        """Note the message; return whether it has not come before. Needs the books' lock."""
        newest = self._newest[request.message_id.worker_id]
        number = (request.message_id.incarnation, request.message_id.sequence)
        if number <= newest.get(request.span, (-1, -1)):
            self.num_repeated += 1
            return False
        newest[request.span] = number
        return True

    def _move(self, request: Request, *, is_new: bool) -> np.ndarray | None:
        """Move a span by a message, and return a copy of it for the answer.

        None: with a codec, if the worker was removed meanwhile.
        """
        cell = self._cells[request.span]
        with cell.held(request.message_id):
            if self._codec:
                return self._move_shortened(cell, self._codec, request, is_new=is_new)
            is_before = self._rule.sends is Sends.WEIGHTS
            before = _copied(cell.center.weights) if is_before else None
            if is_new:
                with cell.copied(request.weights) as total:
                    self._apply(cell.center, total, request)
            return _copied(cell.center.weights) if before is None else before

    def _apply(self, center: Center, total: Tensor, request: Request) -> None:
        center.set_lr(request.lr)
        center.apply_(total, center.buffers, _tally(request))

    def _move_shortened(
        self, cell: _Cell, codec: Codec, request: Request, *, is_new: bool
    ) -> np.ndarray | None:
        """Move a span by an encoded message, and return the encoded answer.

        Both sides use only what both can decode: the worker's pull is the difference between
        its weights as they are seen here and the mirror as it will be there.
        """
        letters, center = cell.letters.get(request.message_id.worker_id), cell.center
        if letters is None or letters.entered != request.message_id.generation:
            return None  # removed since the message was let in; others may have its name by now
        if not is_new and letters.answer is not None:
            return letters.answer
        total = torch.empty_like(center.weights)
        codec.decode(torch.tensor(request.weights), out=total)
        if self._rule.sends is Sends.WEIGHTS:
            total.add_(letters.mirror)
            letters.answer = _catch_up(letters.mirror, center.weights, codec)
            # As if the center were where the worker believes it: c + (x - mirror).
            total.sub_(letters.mirror).add_(center.weights)
            self._apply(center, total, request)
        else:
            self._apply(center, total, request)
            letters.answer = _catch_up(letters.mirror, center.weights, codec)
        return letters.answer

    def _mix_buffers(self, request: Request) -> np.ndarray:
        """Move the float buffers towards a worker's, by its share of the workers."""
        if request.buffers.size:
            mix_buffers_(self._buffers, torch.tensor(request.buffers), _tally(request))
        return _copied(self._buffers)

    def state(self) -> ShardState:
        """Return a copy of what is here; of each span as it is between two messages."""
        return self._state()

    def _state(self, members: dict[str, int] | None = None) -> ShardState:
        """Return a copy of what is here; let the letters of new members begin with it."""
        weights, optimizers = [], []
        for cell in self._cells.values():
            with cell.read():
                copy = cell.center.weights.clone()
                optimizers.append(cell.center.optimizer_state())
                if self._codec and members is not None:
                    cell.write_to(members, copy)
            weights.append(copy.numpy())
        with self._aggregator_lock:
            buffers = _copied(self._buffers)
        return ShardState(list(self._cells), weights, optimizers, buffers)

    def optimizer_states(self) -> dict[Span, dict[str, Any]]:
        """Return copies of what the optimizers remember, by span."""
        states = {}
        for span, cell in self._cells.items():
            with cell.read():
                states[span] = cell.center.optimizer_state()
        return states

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


def _tally(request: Request) -> Tally:
    return Tally(request.num_workers, num_messages=1, num_samples=request.num_samples)


def _copied(values: Tensor) -> np.ndarray:
    return np.array(values.numpy())
