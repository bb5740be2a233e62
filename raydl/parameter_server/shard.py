"""One shard of the center, in methods with messages.

With the async strategy a shard applies one message at a time, behind a lock. Hogwild is the same
code without the lock: torch's arithmetic releases Python's interpreter lock, so messages really are
added at the same time, and may overwrite parts of each other.
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
from raydl.core.codecs import Codec, side_by_side
from raydl.core.exchange import toward_center
from raydl.core.membership import Membership
from raydl.core.rules import Letter, Mail, Now, Rule, mix_buffers_
from raydl.data.ledger import Span
from raydl.parameter_server.protocol import (
    NOTHING,
    AppliedCalls,
    Assignment,
    CellAddress,
    MessageId,
    Request,
    Response,
    refusal_of,
)
from raydl.parameter_server.shared_memory import MappedCell

_NUM_FORMER = 1024
"""The number of former members of which a shard knows the newest message that it has applied."""


class CompletionHandler(Protocol):
    """Ends a worker's round and assigns the next one: the coordinator, at the home shard."""

    def settle(self, request: Request) -> Assignment | None:
        """Complete the round and return the next assignment, or None for a former member."""
        ...

    def repeat(self, request: Request) -> Assignment:
        """Return the assignment that answered an earlier copy of a message."""
        ...


@dataclass
class _CodecState:
    """The state that shard and worker share when messages are compressed."""

    mirror: Tensor
    """The worker's copy of the center."""
    entered: int
    """The generation that the worker entered."""
    answer: np.ndarray | None = None
    """The newest answer, for a repeated message."""
    answered: int = -1
    """The number of the message that it answers."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for a message, since with Hogwild the copies of a message may arrive at once."""
    is_closed: bool = False
    """Whether the worker was removed: a message that waited for the lock is refused."""


@dataclass
class _Cell:
    """A span of the center with its lock, if it has one."""

    center: Center
    lock: contextlib.AbstractContextManager[Any]
    mapped: MappedCell | None
    """The shared memory of the span, if workers may write it; it has its own lock."""
    scratch: list[Tensor] = field(default_factory=list)
    """Free memory for messages; as many tensors as there were messages at one time."""
    codec_states: dict[str, _CodecState] = field(default_factory=dict)
    """By worker; empty without a codec."""
    num_messages: int = 0
    """Messages that moved the center."""
    answered: dict[str, int] = field(default_factory=dict)
    """By worker, how many had moved it when the worker was last answered."""
    applied: dict[tuple[str, int], int] = field(default_factory=dict)
    """By worker and the generation that it entered, the number of its newest message that was
    applied; -1: none was. Also of former members, which may not have received the answer."""

    def held(self, message_id: MessageId) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock for a message.

        Raises:
            ExchangeTimeoutError: if a worker that maps the memory held it for too long.
        """
        if self.mapped:
            return self.mapped.held(message_id.sequence, message_id.generation)
        return self.lock

    def read(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock to copy the center."""
        return self.mapped.read() if self.mapped else self.lock

    def set_members(self, members: dict[str, int], center: Tensor) -> None:
        """Keep the codec states of these workers only.

        Args:
            members: by worker, the generation that it entered.
            center: the initial mirror of a newcomer.
        """
        states = {}
        for worker_id, state in self.codec_states.items():
            if state.entered == members.get(worker_id):
                states[worker_id] = state
                continue
            with state.lock:
                state.is_closed = True
        for worker_id, entered in members.items():
            if worker_id not in states:
                states[worker_id] = _CodecState(center.clone(), entered)
        self.codec_states = states  # in one assignment: Hogwild's threads read it without a lock

    def remember(self, members: dict[str, int]) -> None:
        """Begin to note which messages of newcomers are applied; forget long-gone workers."""
        present = dict.fromkeys(members.items())  # by rank: the oldest are forgotten first
        for key in present:
            self.applied.setdefault(key, -1)
        former = [key for key in list(self.applied) if key not in present]
        for key in former[:-_NUM_FORMER]:
            self.applied.pop(key, None)

    def note_applied(self, message_id: MessageId) -> None:
        """Note that a message is being applied."""
        key = message_id.worker_id, message_id.generation
        if key in self.applied:
            self.applied[key] = message_id.sequence

    @contextlib.contextmanager
    def copied(self, values: np.ndarray) -> Iterator[Tensor]:
        """Lend a copy of a message, which the update overwrites.

        A pool, not one copy per thread: a center has two threads for each worker, any of which may
        apply a message.
        """
        try:
            scratch = self.scratch.pop()  # atomic: no two threads get the same tensor
        except IndexError:
            scratch = torch.empty(values.size, dtype=self.center.weights.dtype)
        np.copyto(scratch.numpy(), values)
        yield scratch
        self.scratch.append(scratch)


@dataclass(frozen=True)
class ShardState:
    """A copy of a shard's state."""

    spans: list[Span]
    weights: list[np.ndarray]
    optimizers: list[dict[str, Any]]
    buffers: np.ndarray


class Shard:
    """Some spans of the center, and the rule that moves them.

    Args:
        spans: this shard's spans of the flat parameters.
        weights: the whole center, shape [num_parameters]; the spans are copied.
        buffers: float buffers, shape [num_buffers]; empty except at the home shard.
        rule: moves the center.
        make_optimizer: builds the user's optimizer, for rules that step it at the center.
        is_locked: one message at a time (async), or all at once (hogwild).
        codec: compresses messages and answers.
        coordinator: assigns work to workers; None except at the home shard.
        node: this process's node, whose workers may write the memory; None: all send messages.
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
        coordinator: CompletionHandler | None = None,
        node: str | None = None,
        lock_timeout_s: float = 0.0,
    ) -> None:
        self._node = node
        self._rule = rule
        self._codec = None if codec is None or codec.name == "none" else codec
        self._coordinator = coordinator
        self._buffers = buffers.clone()
        self._cells: dict[Span, _Cell] = {}
        for start, stop in spans:
            values, mapped = weights[start:stop].clone(), None
            if node is not None:
                mapped = MappedCell.create(values, is_locked=is_locked, timeout_s=lock_timeout_s)
                values = mapped.weights
            center = Center(values, self._buffers[:0], rule=rule, make_optimizer=make_optimizer)
            # Hogwild: no lock here, on purpose. A reader may see half of an update, and of two
            # updates of one value one may be lost.
            lock = threading.Lock() if is_locked else contextlib.nullcontext()
            self._cells[(start, stop)] = _Cell(center, lock, mapped)
        self._state_lock = threading.Lock()
        """For the members, the counters and the buffers; each cell has its own lock."""
        self._calls: dict[str, AppliedCalls] = {}
        """By member, its messages that were applied, by span."""
        self._generation = 0
        self._entered: dict[str, int] = {}
        self.num_refused = 0
        """Messages of workers that were no members, or had entered another generation."""
        self.num_repeated = 0
        """Messages that had been applied before."""

    def begin_generation(self, membership: Membership) -> None:
        """Accept messages of these workers only; all enter this generation."""
        with self._state_lock:
            self._entered = {}
        for cell in self._cells.values():
            cell.set_members({}, cell.center.weights)
        self.change(membership)

    def change(self, membership: Membership) -> ShardState:
        """Let workers join and leave; the messages of the others continue meanwhile.

        Returns:
            The state that newcomers start from: with a codec the very copies that their mirrors
            begin with, so that both sides hold the same bits, whatever arrives in between.
        """
        with self._state_lock:
            before, self._generation = self._entered, membership.generation
            self._entered = members = {
                worker_id: before.get(worker_id, membership.generation)
                for worker_id in membership.worker_ids
            }
            self._calls = {w: self._calls[w] if w in before else AppliedCalls() for w in members}
        for cell in self._cells.values():
            if not self._rule.ahead:  # else messages leave out nothing
                cell.remember(members)
            cell.answered = {w: n for w, n in cell.answered.items() if w in before and w in members}
            if cell.mapped:
                cell.mapped.admit(members)
        return self.state(members)

    def applied(self, worker_id: str, generation: int) -> dict[Span, int]:
        """Return which messages of a worker were applied, in a generation that it has left.

        No message of that generation is applied after the answer.

        Args:
            worker_id: the worker.
            generation: the generation that it had entered.

        Returns:
            By span, the number of the newest message that was applied; -1: none was. A span is
            missing if this shard does not know: it has started since, or messages leave out
            nothing.
        """
        key = worker_id, generation
        return {s: c.applied[key] for s, c in self._cells.items() if key in c.applied}

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the spans whose memory a member on a node may map."""
        if node != self._node:
            return {}
        cells = {s: c.mapped.address_for(worker_id) for s, c in self._cells.items() if c.mapped}
        return {span: address for span, address in cells.items() if address}

    def exchange(self, request: Request) -> Response:
        """Apply a message, once, and answer with the center.

        A repeated message is answered with the current center. A message is refused if its worker
        is no member, or has entered again since. Neither changes the center.
        """
        with self._state_lock:
            if self._refusal(request):
                return self._refuse(request)
            is_new = self._is_new(request)
        is_empty = request.span[0] == request.span[1]  # only a completion
        weights = request.weights if is_empty else self._move(request, is_new=is_new)
        if weights is None:
            with self._state_lock:
                return self._refuse(request)
        if request.completion is None or self._coordinator is None:
            return Response(weights, request.buffers)
        with self._state_lock:
            if is_new and request.buffers.size:
                mix_buffers_(
                    self._buffers,
                    torch.tensor(request.buffers),
                    num_messages=1,
                    num_workers=request.num_workers,
                )
            buffers = _copied(self._buffers)
        # The worker may have been removed since the check above. Then its message has moved the
        # center, although others train its samples: the same as one more message. If a message held
        # the membership, changes of it would wait for any message that is stuck.
        handle = self._coordinator.settle if is_new else self._coordinator.repeat
        assignment = handle(request)
        if assignment is None:
            with self._state_lock:
                return self._refuse(request, is_counted=True)
        return Response(weights, buffers, assignment)

    def _refusal(self, request: Request) -> str:
        entered = self._entered.get(request.message_id.worker_id)
        return refusal_of(request.message_id, entered, self._generation)

    def _refuse(self, request: Request, *, is_counted: bool = False) -> Response:
        """Answer a refused message. The caller holds the state lock.

        Args:
            request: the message.
            is_counted: whether the coordinator has counted it.
        """
        if not is_counted:
            self.num_refused += 1
        reason = self._refusal(request) or refusal_of(request.message_id, None, self._generation)
        return Response(NOTHING, NOTHING, refusal=reason)

    def _is_new(self, request: Request) -> bool:
        """Record the message; return whether it is the first copy. The caller holds the lock."""
        if not self._calls[request.message_id.worker_id].is_first(request.span, request.message_id):
            self.num_repeated += 1
            return False
        if not self._codec and request.span in self._cells:
            self._cells[request.span].note_applied(request.message_id)
        return True

    def _move(self, request: Request, *, is_new: bool) -> np.ndarray | None:
        """Move a span by a message, and return a copy of the span for the answer.

        Return None if there is a codec and the worker was removed meanwhile.
        """
        cell = self._cells[request.span]
        with cell.held(request.message_id):
            if self._codec:
                return self._move_compressed(cell, self._codec, request)
            before = _copied(cell.center.weights) if self._rule.ahead else None
            if is_new:
                with cell.copied(request.weights) as total:
                    self._apply(cell, total, request)
            return _copied(cell.center.weights) if before is None else before

    def _apply(self, cell: _Cell, total: Tensor, request: Request) -> None:
        center, worker_id = cell.center, request.message_id.worker_id
        center.set_lr(request.lr)
        total = toward_center(total, center.weights, request.distrust)
        numbers = {name: number * request.weight for name, number in request.numbers.items()}
        mail = Mail(self._rule.lanes_of(total), count=1, weight=request.weight, numbers=numbers)
        if not self._rule.sums:
            lanes = {name: lane / (request.weight or 1.0) for name, lane in mail.sums.items()}
            mail.letters = [Letter(lanes, request.weight)]
        staleness = cell.num_messages - cell.answered.get(worker_id, cell.num_messages)
        now = Now(request.num_workers, request.share_of_round, staleness)
        center.apply_(mail, center.buffers, now)
        cell.num_messages += 1
        cell.answered[worker_id] = cell.num_messages

    def _move_compressed(self, cell: _Cell, codec: Codec, request: Request) -> np.ndarray | None:
        """Move a span by an encoded message, and return the encoded answer.

        Both sides use only values that both can decode: the worker's pull is the difference between
        its weights as decoded here and its mirror after the answer.
        """
        state = cell.codec_states.get(request.message_id.worker_id)
        if state is None or state.entered != request.message_id.generation:
            return None  # removed since the first check; a newcomer may have its id by now
        with state.lock:
            # Decided here: a copy may overtake the first one on its way to the cell's lock, and all
            # copies need the answer to this message, whichever of them is applied.
            if state.is_closed:
                return None
            if state.answered < request.message_id.sequence:
                cell.note_applied(request.message_id)
                state.answer = self._answer(state, cell, codec, request)
                state.answered = request.message_id.sequence
            return state.answer

    def _answer(
        self, state: _CodecState, cell: _Cell, codec: Codec, request: Request
    ) -> np.ndarray:
        """Apply an encoded message, and return the encoded answer."""
        center, num_lanes = cell.center, len(self._rule.lanes)
        total = center.weights.new_empty(num_lanes * center.weights.numel())
        side_by_side(codec, num_lanes).decode(torch.tensor(request.weights), out=total)
        if not self._rule.ahead:
            total.mul_(request.weight)
            self._apply(cell, total, request)
            return _catch_up(state.mirror, center.weights, codec)
        total.add_(state.mirror)
        answer = _catch_up(state.mirror, center.weights, codec)
        # As if the center were where the worker's mirror is: c + (x - mirror).
        total.sub_(state.mirror).add_(center.weights)
        self._apply(cell, total, request)
        return answer

    def state(self, members: dict[str, int] | None = None) -> ShardState:
        """Return a copy of the shard; each span as it is between two messages.

        Args:
            members: by worker, the generation that it entered; with a codec, the copy becomes the
                mirror of each newcomer. None: the mirrors stay as they are.
        """
        weights, optimizers = [], []
        for cell in self._cells.values():
            with cell.read():
                copy = cell.center.weights.clone()
                optimizers.append(cell.center.optimizer_state())
                if self._codec and members is not None:
                    cell.set_members(members, copy)
            weights.append(copy.numpy())
        with self._state_lock:
            buffers = _copied(self._buffers)
        return ShardState(list(self._cells), weights, optimizers, buffers)

    def optimizer_states(self) -> dict[Span, dict[str, Any]]:
        """Return copies of the optimizers' states, by span."""
        states = {}
        for span, cell in self._cells.items():
            with cell.read():
                states[span] = cell.center.optimizer_state()
        return states

    def load_optimizers(self, states: dict[Span, dict[str, Any]]) -> None:
        """Load the states of the optimizers, by span."""
        for span, cell in self._cells.items():
            cell.center.load_optimizer(states[span])


def _catch_up(mirror: Tensor, center: Tensor, codec: Codec) -> np.ndarray:
    """Move a mirror closer to the center; return the encoded change for the worker's mirror."""
    change = torch.sub(center, mirror)
    message = codec.encode(change)
    mirror.add_(codec.decode(message, out=change))
    return _copied(message)


def _copied(values: Tensor) -> np.ndarray:
    return np.array(values.numpy())
