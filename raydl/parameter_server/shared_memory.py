"""The center in shared memory that all processes of its node may write: an exchange without a copy.

A worker on the center's node maps the center's memory and moves it directly. The rest of a message
- completed samples, loss, float buffers - follows as a completion, once the center has moved.

Async: the process that moves the center, worker or shard, holds a lock meanwhile. Hogwild: no lock;
``MappedExchange`` adds to the center while others do (the sum itself is ``Elastic.exchange_``).
The lock ends with the process that holds it (and with the children that it forked since it joined,
which hold the same open file). A process that is killed half-way leaves some parameters moved and
others not, which a worker cannot distinguish from an exchange with fragments.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from raydl.config import TrainConfig
from raydl.core.center import Mirror
from raydl.core.exchange import Arrival, Header
from raydl.core.method import Method
from raydl.core.rules import Message, Now, Rule
from raydl.data.ledger import Span
from raydl.errors import ExchangeTimeoutError
from raydl.parameter_server.client import ClientSession
from raydl.parameter_server.protocol import (
    HOME,
    NOTHING,
    CellAddress,
    CenterClient,
    MessageId,
    PendingResponse,
    Response,
    refusal_of,
)

_PAGE = 4096
_TOKEN, _HOLDER, _SLOTS = 0, 1, 2
"""Indices of int64 values in the first page: the memory's token, the process that holds the lock,
and the first member."""
_READ_S = 1.0
"""Lock time-out for readers, in seconds."""
_PAUSES_S = (50e-6, 5e-3)
"""The first and the longest pause between two attempts to take the lock, in seconds."""


def can_be_shared(config: TrainConfig, method: Method) -> bool:
    """Return whether workers on the center's node may write its memory.

    They may if messages carry uncompressed weights only, and nothing beside the center must change
    together with it.
    """
    rule = method.rule
    return (
        hasattr(os, "memfd_create")  # Linux
        and method.strategy in ("async", "hogwild")
        and rule.sends_weights_alone
        and not config.method.dynamic_weights
        and method.compression == "none"
        and config.scaling.device == "cpu"
    )


class MappedCell:
    """A span of the center in a memory file; see ``create`` and ``open_address``.

    Args:
        file: descriptor of the memory file, owned by this object.
        size: number of parameters.
        is_locked: one process moves it at a time (async), or all at once (hogwild).
        timeout_s: the longest wait for the lock, in seconds.
    """

    def __init__(self, file: int, size: int, *, is_locked: bool, timeout_s: float) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)
        self._is_locked = is_locked
        self._timeout_s = timeout_s
        memory = mmap.mmap(file, _length(size))
        self._words = np.frombuffer(memory, np.int64, count=_PAGE // 8)
        self.weights: Tensor = torch.frombuffer(
            memory, dtype=torch.float32, count=size, offset=_PAGE
        )
        # The file's lock excludes other processes; the threads of a process share it.
        self._threads = threading.Lock()
        self._slots: dict[str, int] = {}

    @classmethod
    def create(cls, weights: Tensor, *, is_locked: bool, timeout_s: float) -> MappedCell:
        """Return new memory with these values, freed with the last process that maps it."""
        file = os.memfd_create("raydl-center")
        os.truncate(file, _length(weights.numel()))
        cell = cls(file, weights.numel(), is_locked=is_locked, timeout_s=timeout_s)
        cell.weights.copy_(weights)
        cell._words[_TOKEN] = random.SystemRandom().getrandbits(62)
        return cell

    @classmethod
    def open_address(
        cls, address: CellAddress, size: int, *, is_locked: bool, timeout_s: float
    ) -> MappedCell | None:
        """Return the memory at an address, or None if this process cannot open it."""
        try:
            file = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, in another container, or deleted
            return None
        if os.fstat(file).st_size != _length(size):
            os.close(file)
            return None
        cell = cls(file, size, is_locked=is_locked, timeout_s=timeout_s)
        return cell if cell._words[_TOKEN] == address.token else None

    # members

    def admit(self, entered: Mapping[str, int]) -> None:
        """Let these workers, and no others, move the center from now on.

        Without the lock, which a stopped worker may hold: a worker that is moving the center right
        now finishes, like a message that was accepted before.

        Args:
            entered: by worker, the generation that it entered.
        """
        for worker_id in [w for w in self._slots if w not in entered]:
            self._words[self._slots.pop(worker_id)] = 0
        free = iter(sorted({*range(_SLOTS, self._words.size)} - {*self._slots.values()}))
        for worker_id, generation in entered.items():
            slot = self._slots[worker_id] if worker_id in self._slots else next(free, None)
            if slot is not None:  # otherwise there are too many: it sends messages
                self._slots[worker_id] = slot
                self._words[slot] = generation + 1

    def address_for(self, worker_id: str) -> CellAddress | None:
        """Return the address of this memory for a member, or None if it has no slot."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return None
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return CellAddress(path, int(self._words[_TOKEN]), slot)

    def entered(self, slot: int) -> int | None:
        """Return the generation that the member in a slot entered, or None for a free slot."""
        return int(self._words[slot]) - 1 if self._words[slot] else None

    # the lock

    @contextlib.contextmanager
    def held(self, number: int, generation: int) -> Iterator[None]:
        """Hold the lock, if there is one.

        Args:
            number: of the exchange, for the error.
            generation: the membership, for the error.

        Raises:
            ExchangeTimeoutError: if another process or thread held it for too long.
        """
        if self._is_locked and not self._acquire(self._timeout_s):
            holder = f"process {self._words[_HOLDER]}, which holds the center"
            raise ExchangeTimeoutError(number, generation, self._timeout_s, [holder])
        try:
            yield
        finally:
            if self._is_locked:
                self._release()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Hold the lock, if it is free soon.

        A reader answers for the whole center, and must not wait for a worker that was stopped while
        it held the lock. It then reads as all readers do with Hogwild: some blocks have moved.
        """
        is_held = self._is_locked and self._acquire(_READ_S)
        try:
            yield
        finally:
            if is_held:
                self._release()

    def _acquire(self, timeout_s: float) -> bool:
        """Try to take the lock; return whether that succeeded in time."""
        deadline = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            return False
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._threads.release()
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                self._words[_HOLDER] = os.getpid()
                return True

    def _release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()


def _length(size: int) -> int:
    return _PAGE + 4 * size


class MappedExchange:
    """One worker's exchange of one fragment with a center whose memory it maps.

    ``begin`` moves the center and computes the replica's pull, both from the current weights;
    ``wait`` only waits for the assignment, which arrives while the gradient is computed.

    Args:
        cell: the fragment of the center.
        slot: this worker's slot in the cell's table of members.
        span: the fragment's span.
        buffers: this worker's copy of the center's float buffers; moved in place.
        rule: moves replica and center.
        client: sends the completion.
        is_last: whether a round ends with this exchange.
        session: makes the completions.
    """

    def __init__(
        self,
        cell: MappedCell,
        slot: int,
        *,
        span: slice,
        buffers: Tensor,
        rule: Rule,
        client: CenterClient,
        is_last: bool,
        session: ClientSession,
    ) -> None:
        self.span = span
        self.center = Mirror(cell.weights, buffers)
        self._cell = cell
        self._slot = slot
        self._rule = rule
        self._client = client
        self._is_last = is_last
        self._session = session
        self._pull = torch.empty_like(cell.weights)
        self._distance_squared = 0.0
        self._now = Now(1)
        self._pending: PendingResponse | None = None
        self._response: Response | None = None

    def begin(
        self, message: Message, buffers: Tensor, header: Header, distrust: float = 0.0
    ) -> None:
        """Move the center, then send the completion if a round ends.

        Raises:
            ExchangeError: if the lock was not free in time, or this worker is no longer a member;
                the center has not moved.
        """
        assert self._pending is None, "an exchange is in progress"
        assert not distrust, "can_be_shared excludes dynamic weights"
        session = self._session
        self._now = session.now()
        [weights] = message.lanes.values()
        with self._cell.held(session.version, session.generation):
            entered = self._cell.entered(self._slot)
            session.raise_if(refusal_of(session.next_message_id(), entered, session.generation))
            self._distance_squared = self._rule.exchange_(
                weights.detach(), self.center.weights, self._now, out=self._pull
            )
        session.num_bytes += 2 * self._pull.nbytes
        session.num_messages += 1
        if self._is_last:  # only after the center has moved: completed samples count as done
            request = session.make_request(header, (0, 0), NOTHING, buffers)
            self._pending = self._client.request(HOME, request)

    def wait(self) -> Arrival:
        """Wait for the assignment, if a round ends.

        Raises:
            ExchangeError: if it did not arrive, or the worker was removed. The center has moved.
        """
        pending, self._pending = self._pending, None
        self._response = pending.wait() if pending else None
        if self._response:
            self._session.raise_if(self._response.refusal)
        return Arrival(self._now, pull=self._pull, distance_squared=self._distance_squared)

    def commit(self) -> None:
        """Accept the assignment; the center itself has moved."""
        if self._response and self._response.assignment:
            if self._response.buffers.size and self.center.buffers.numel():
                np.copyto(self.center.buffers.numpy(), self._response.buffers)
            self._session.set_assignment(self._response.assignment)
        self._response = None


def open_cells(
    client: CenterClient, message_id: MessageId, *, is_locked: bool, timeout_s: float
) -> dict[Span, tuple[MappedCell, int]]:
    """Return the cells of the center that this process can map, each with the worker's slot.

    Raises:
        ExchangeError: if the center did not answer.
    """
    cells = {}
    for span, address in client.shared_cells(message_id).items():
        size = span[1] - span[0]
        cell = MappedCell.open_address(address, size, is_locked=is_locked, timeout_s=timeout_s)
        if cell is not None:
            cells[span] = cell, address.slot
    return cells
