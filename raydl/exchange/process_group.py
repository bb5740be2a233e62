"""A process group of torch that any thread can leave at once: gloo for CPU tensors, or NCCL.

torch bounds an operation by a time-out, but has no call to give one up before. Here a wait
goes in slices, between which the waiter looks around (:func:`is_done`), and leaving closes
the connections, so that peers that wait for this member fail at once too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from raydl.exchange.allreduce import ProcessGroupLink

# torch's stubs do not export what its documentation does: TCPStore, PrefixStore, options.
dist: Any = torch.distributed

_CUT_TAG = 1
"""Of messages that nobody sends."""
_MESH_UP_TO = 32
"""Members that connect each with every other while a gloo group forms. Of more, each connects with
two: a full mesh of 256 takes 32,640 connections and 5 to 6 s on two cores, a ring under 1 s."""
_SLICE = timedelta(seconds=0.1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3
"""Between two looks at a device."""


class TorchGroup:
    """One member's side of a process group; to be used once connected.

    Args:
        rank: this member's.
        num_workers: of all members.
        device: ``cpu`` or ``cuda``.
        timeout_s: bound of every operation.
    """

    def __init__(self, rank: int, num_workers: int, *, device: str, timeout_s: float) -> None:
        self.process_group: Any = None
        self.store: Any = None
        self.is_left = False
        self._rank = rank
        self._num_workers = num_workers
        self._is_cuda = device == "cuda"
        self._timeout = timedelta(seconds=timeout_s)
        self._is_ring = False
        self._peers: tuple[int, ...] = tuple(r for r in range(num_workers) if r != rank)

    def connect(self, store: Any, *, host: str, has_pairs: bool = False) -> None:
        """Meet the other members in a store.

        Args:
            store: where they meet.
            host: the address that they reach this one by.
            has_pairs: any two members will send to each other (:meth:`link`). Else a large gloo
                group connects as a ring, along which torch sums and gathers.

        Raises:
            RuntimeError: not all came in time, or this member left meanwhile.
        """
        self.store = store
        self._is_ring = not (self._is_cuda or has_pairs) and self._num_workers > _MESH_UP_TO
        if self._is_ring:
            self._peers = ()  # none before they have met
        # In no local variable: an error would keep it, and leave() could not let it go.
        self.process_group = (
            _make_nccl(store, self._rank, self._num_workers, self._timeout)
            if self._is_cuda
            else _make_gloo(
                store, self._rank, self._num_workers, self._timeout, host, lazy=self._is_ring
            )
        )
        if self._is_ring:
            self._meet_along_ring()
        # Another thread may leave at any moment. Each of both writes before it reads what
        # the other writes, so that one of them closes the connections.
        if self.is_left:
            self.leave()
            raise RuntimeError("the group was left while it was formed")

    def _meet_along_ring(self) -> None:
        """Sum something, for which each member connects with the one before and the one after it.

        gloo makes the connections of a lazy group when they are first used, and waits for one to a
        peer that went away meanwhile for five times the time-out (its issue 520). So all are made
        here, where the wait is bounded; none is made later.

        Raises:
            RuntimeError: not all came in time, or this member left meanwhile.
        """
        work = self.start_allreduce(torch.ones(1))
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not is_done(work, _SLICE):
            if self.is_left:
                raise RuntimeError("the group was left while it was formed")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"not all members came within {self._timeout.total_seconds()} s")
        work.wait()
        before, after = self._rank - 1, self._rank + 1
        self._peers = tuple({before % self._num_workers, after % self._num_workers})

    def cut(self) -> None:
        """Close the connections now; what is under way fails, here and at the peers."""
        process_group = self.process_group
        if process_group is not None and self._is_cuda:
            process_group.abort()
        elif process_group is not None:
            _close_connections(process_group, self._peers)

    def leave(self) -> None:
        """Leave, without waiting for what is under way."""
        self.is_left = True
        if not self._is_cuda:
            self.cut()
        # torch waits for its threads where the last reference goes: not here.
        kept = [self.process_group, self.store]
        self.process_group = self.store = None
        threading.Thread(target=kept.clear, daemon=True).start()

    def start_allreduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin an all-reduce in place; return torch's handle with ``wait()``."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.process_group.allreduce([tensor], options)

    def start_allgather(self, tensor: Tensor, out: list[Tensor]) -> Any:
        """Begin to collect every member's tensor into ``out``, by rank."""
        return self.process_group.allgather([out], [tensor])

    def link(self) -> ProcessGroupLink:
        """Return the way from this member to each other one."""
        return ProcessGroupLink(self.process_group, self._rank, self._num_workers)


def is_done(work: Any, within: timedelta) -> bool:
    """Return whether an operation comes to its end, good or bad, within a time.

    Not for a single message: gloo closes the connections if its receiver waits in vain.
    """
    try:
        work.wait(within)
    except RuntimeError:  # it failed, or goes on
        return bool(work.is_completed())
    return True


def is_done_on_device(work: Any, within: timedelta) -> bool:
    """Return whether an operation of NCCL comes to its end, good or bad, within a time.

    A wait of torch's that times out would end the operation, and looks less often.
    """
    deadline, pause_s = time.monotonic() + within.total_seconds(), _FIRST_PAUSE_S
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _make_gloo(
    store: Any, rank: int, num_workers: int, timeout: timedelta, host: str, *, lazy: bool
) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # Bound to the address that the others know: gloo's own guess takes a wrong interface on
    # some hosts.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=lazy)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, num_workers, options)


def _make_nccl(store: Any, rank: int, num_workers: int, timeout: timedelta) -> Any:
    # NCCL's default on a time-out is to end the process; blocking waits raise instead.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # A high-priority stream lets the reduction start while the gradient fills the device.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, num_workers, options)


def _close_connections(process_group: Any, peers: Iterable[int]) -> None:
    """Close all connections of a gloo group; what is under way fails, here and at the peers.

    gloo has no call for that, and its destructor waits for what is under way. But a receive
    that times out closes every connection of its group. From a peer that is gone already it
    fails at once and closes no other, so that each peer has its turn.

    Args:
        peers: those that this member is connected with; one that it is not it would wait for.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            receive = process_group.recv([torch.empty(1)], peer, _CUT_TAG)
            receive.wait(timedelta(milliseconds=1))
