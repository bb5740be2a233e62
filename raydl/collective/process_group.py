"""A process group of torch that any thread can leave at once: gloo for CPU tensors, or NCCL.

torch bounds an operation by a time-out, but has no call to give one up before. Here a wait
goes in slices, between which the waiter looks around (``is_done``), and leaving closes
the connections, so that peers that wait for this member fail at once too.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from raydl.collective.allreduce import ProcessGroupLink
from raydl.collective.key_store import PROOF_BYTES, SECRET, proof
from raydl.collective.tls_tunnel import GLOO_HOST, TOLD_S, TlsTunnel, hidden_port, seen_by
from raydl.config.tls import TlsFiles

# torch's stubs do not export what its documentation does: Store, options.
dist: Any = torch.distributed

_CUT_TAG = 1
"""Of messages that nobody sends."""
_PROOF_TAG = 2
"""Of the first message between two members."""
_MESH_UP_TO = 32
"""Members that connect each with every other while a gloo group forms. Of more, each connects with
two: a full mesh of 256 takes 32,640 connections and 5 to 6 s on two cores, a ring under 1 s."""
_SLICE = timedelta(seconds=0.1)
_STORE_SLICE = timedelta(seconds=1.0)
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
        self._tunnel: TlsTunnel | None = None
        self._timeout = timedelta(seconds=timeout_s)
        self._peers: tuple[int, ...] = tuple(r for r in range(num_workers) if r != rank)

    def connect(
        self, store: Any, *, host: str, tls: TlsFiles | None = None, has_pairs: bool = False
    ) -> None:
        """Meet the other members in a store.

        With certificates all that gloo sends to another host goes through TLS.

        Args:
            store: where they meet.
            host: the address that they reach this one by.
            tls: the certificates of this node; None: connections are in plain.
            has_pairs: any two members will send to each other (``link``). Else a large gloo
                group connects as a ring, along which torch sums and gathers.

        With certificates all that gloo sends to another host goes through TLS.

        Raises:
            RuntimeError: not all came in time, or this member left meanwhile.
        """
        try:
            self._connect(store, host, tls, has_pairs=has_pairs)
        except RuntimeError as error:
            problem = self._tunnel.problem(TOLD_S) if self._tunnel else ""
            if self.is_left:  # the thread that left may not have seen the tunnel yet
                self.abort()
            if problem:
                raise RuntimeError(f"no connection by TLS: {problem}") from error
            raise

    def _connect(self, store: Any, host: str, tls: TlsFiles | None, *, has_pairs: bool) -> None:
        if tls is not None and not self._is_cuda:
            store, host = self._through_tunnel(store, host, tls), GLOO_HOST
        self.store = store
        # The tunnel's ways are laid for a group that connects while it forms.
        can_be_ring = not (self._is_cuda or has_pairs or self._tunnel)
        self._is_ring = can_be_ring and self._num_workers > _MESH_UP_TO
        if self._is_ring:
            self._peers = ()  # none before they have met
        # In no local variable: an error would keep it, and leave() could not let it go.
        self.process_group = (
            _make_nccl(store, self._rank, self._num_workers, self._timeout)
            if self._is_cuda
            else make_gloo(
                store,
                self._rank,
                self._num_workers,
                timeout=self._timeout,
                host=host,
                lazy=self._is_ring,
            )
        )
        if self._tunnel is not None:
            store.is_forming = False
        if self._is_ring:
            self._meet_along_ring()
        # Another thread may leave at any moment. Each of both writes before it reads what
        # the other writes, so that one of them closes the connections.
        if self.is_left:
            self.abort()
            raise RuntimeError("the group was left while it was formed")
        if not self._is_cuda:
            self._check_peers(store.get(SECRET))

    def _check_peers(self, secret: bytes) -> None:
        """Let members that are connected prove that they know the generation's secret.

        gloo takes the process that connects first with a number, easy to guess, for a peer.
        So nothing of the run is sent before this. (Not with NCCL, whose connections are many and
        its own: docs/security.md.)

        Raises:
            RuntimeError: another process has taken a member's place, or a member went away.
        """
        process_group = self.process_group
        if process_group is None:
            raise RuntimeError("the group was left while it was formed")
        reasons = unproven_peers(process_group, secret, self._timeout, self._peers)
        del process_group  # an error would keep it
        if reasons:
            told = "; ".join(f"rank {peer}: {reason}" for peer, reason in reasons.items())
            raise RuntimeError(f"not proven to be members of this generation: {told}")

    def _through_tunnel(self, store: Any, host: str, tls: TlsFiles) -> TunnelStore:
        """Open a tunnel to the members on other hosts; return the store as gloo shall see it."""
        self._tunnel = tunnel = TlsTunnel(tls, host)
        store.set(f"tunnel/{self._rank}", json.dumps([host, tunnel.port]).encode())
        told = store.multi_get([f"tunnel/{rank}" for rank in range(self._num_workers)])
        places = {rank: json.loads(place) for rank, place in enumerate(told)}
        far = {rank: place for rank, place in places.items() if place[0] != host}
        below = {rank: place for rank, place in far.items() if rank < self._rank}
        return TunnelStore(
            store, tunnel, self._rank, {**dict.fromkeys(far, 0), **tunnel.open_ways(below)}
        )

    def _meet_along_ring(self) -> None:
        """Connect with the member before and the one after this one.

        A thread of gloo's reads the addresses of those two from the store, and an error of a store
        in Python would end the process there: this thread waits until they are there.

        Raises:
            RuntimeError: not all came in time, or this member left meanwhile.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        before, after = self._rank - 1, self._rank + 1
        peers = tuple({before % self._num_workers, after % self._num_workers})
        addresses = [f"0/{peer}" for peer in peers]  # the names that gloo gives them
        store = self.store  # which is gone once this member has left
        problem = self._why_give_up(deadline)
        while not (problem or store.check(addresses)):
            with contextlib.suppress(RuntimeError):
                store.wait(addresses, _STORE_SLICE)
            problem = self._why_give_up(deadline)
        problem = problem or self._sum_ones(deadline)
        if problem:
            raise RuntimeError(problem)
        self._peers = peers

    def _why_give_up(self, deadline: float) -> str:
        """Return why this member waits no longer for others; empty: it does."""
        if self.is_left:
            return "the group was left while it was formed"
        if time.monotonic() >= deadline:
            return f"not all members came within {self._timeout.total_seconds():g} s"
        return ""

    def _sum_ones(self, deadline: float) -> str:
        """Sum ones over all members; return what keeps them from it, in a sentence.

        gloo makes the connections of a lazy group when they are first used, and waits for one to a
        peer that went away meanwhile for five times the time-out (its issue 520). So all are made
        here, where the wait is bounded; none is made later. It raises nothing: an error would keep
        the process group, and its owner could not let it go.
        """
        try:
            work = self.start_allreduce(torch.ones(1))
            while not is_done(work, _SLICE):
                if problem := self._why_give_up(deadline):
                    return problem
            work.wait()
        except AttributeError:  # another thread has left a moment ago
            return "the group was left while it was formed"
        except RuntimeError as error:
            return str(error)
        return ""

    def cut(self) -> None:
        """Close the connections now; what is under way fails, here and at the peers."""
        process_group = self.process_group
        if process_group is not None and self._is_cuda:
            process_group.abort()
        elif process_group is not None:
            _close_connections(process_group, self._peers)

    def abort(self) -> None:
        """Leave, without waiting for what is under way."""
        self.is_left = True
        if not self._is_cuda:
            self.cut()
        if self._tunnel is not None:
            self._tunnel.close()
        # torch waits for its threads where the last reference goes: not here.
        kept = [self.store, self.process_group]  # cleared from its end: the group uses the store
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


class TunnelStore(dist.Store):  # type: ignore[misc]
    """A store in which gloo finds its peers at the near end of the tunnel to them.

    Args:
        store: of the generation.
        tunnel: of this member.
        rank: this member's.
        ways: see ``raydl.collective.tls_tunnel.seen_by``.
    """

    def __init__(self, store: Any, tunnel: TlsTunnel, rank: int, ways: dict[int, int]) -> None:
        super().__init__()
        self._store = store
        self._tunnel = tunnel
        self._rank = rank
        self._ways = ways
        self.is_forming = True
        """gloo writes its addresses, and nobody anything else."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key; the tunnel leads to where gloo listens before others read that.

        Raises:
            RuntimeError: gloo writes its address in a way that is not known here.
        """
        if self.is_forming:
            self._tunnel.forward_to(hidden_port(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        value: bytes = self._store.get(key)
        if not self.is_forming:
            return value
        peer = int(key.rpartition("/")[2])  # gloo's keys are 0/RANK
        return seen_by(value, rank=self._rank, peer=peer, ways=self._ways)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are there."""
        self._store.wait(keys)
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are there."""
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether keys are there now."""
        return bool(self._store.check(keys))

    def keys_present(self, keys: Sequence[str], within: timedelta) -> list[str]:
        """Return which of some keys are there, once all are or a time is over."""
        there: list[str] = self._store.keys_present(keys, within)
        return there


def unproven_peers(
    process_group: Any, secret: bytes, timeout: timedelta, peers: Sequence[int]
) -> dict[int, str]:
    """Exchange proofs with peers; return the ranks that sent a wrong one or none, and why.

    It raises nothing: an error would keep the process group, and its owner could not let it go.
    """
    rank, deadline = process_group.rank(), time.monotonic() + timeout.total_seconds()
    received = {peer: torch.zeros(PROOF_BYTES, dtype=torch.uint8) for peer in peers}
    sent = {peer: _as_tensor(proof(secret, source=rank, target=peer)) for peer in peers}
    reasons: dict[int, str] = {}
    works: dict[int, list[Any]] = {peer: [] for peer in peers}
    for peer in peers:
        try:
            works[peer].append(process_group.recv([received[peer]], peer, _PROOF_TAG))
            works[peer].append(process_group.send([sent[peer]], peer, _PROOF_TAG))
        except RuntimeError as error:
            reasons[peer] = str(error).partition("\n")[0]
    for peer, started in works.items():
        try:
            for work in started:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            reasons.setdefault(peer, str(error).partition("\n")[0])
            continue
        expected = proof(secret, source=peer, target=rank)
        if not hmac.compare_digest(received[peer].numpy().tobytes(), expected):
            reasons.setdefault(peer, "another process has taken its place")
    return reasons


def _as_tensor(value: bytes) -> Tensor:
    return torch.tensor(list(value), dtype=torch.uint8)


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


def make_gloo(
    store: Any, rank: int, num_workers: int, *, timeout: timedelta, host: str, lazy: bool = False
) -> Any:
    """Return a process group of gloo that listens on one address alone.

    Args:
        store: where its members meet.
        rank: this member's.
        num_workers: of all members.
        timeout: bound of every operation.
        host: the address that it listens on.
        lazy: connect with a member when something is first sent to it.
    """
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
