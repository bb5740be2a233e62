"""A torch process group that any thread can leave at once: gloo for CPU tensors, or NCCL.

torch bounds an operation by a time-out, but has no call to cancel it earlier. Here a wait is cut
into slices, and between them the waiting thread checks whether to give up (``is_done``). Leaving
closes the connections, so that peers that wait for this member fail at once, too.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from raydl.collective.allreduce import ProcessGroupLink
from raydl.collective.key_store import PROOF_BYTES, SECRET, proof
from raydl.collective.tls_tunnel import (
    GLOO_HOST,
    REASON_WAIT_S,
    TlsTunnel,
    gloo_port,
    rewritten_address,
)
from raydl.config.tls import TlsFiles

# torch's stubs omit documented names: Store, options.
dist: Any = torch.distributed

_CUT_TAG = 1
"""Tag of messages that are received but never sent."""
_PROOF_TAG = 2
"""Tag of the first message between two members."""
_MESH_UP_TO = 32
"""The largest gloo group that connects as a full mesh while it forms. A larger one forms a ring: a
full mesh of 256 takes 32,640 connections and 5 to 6 s on two cores, a ring under 1 s."""
_SLICE = timedelta(seconds=0.1)
_STORE_SLICE = timedelta(seconds=1.0)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3
"""Pauses between two polls of a device, in seconds."""
_LEFT = "the group was left while it formed"

T = TypeVar("T")


class TorchGroup:
    """One member's side of a process group; usable once connected.

    Args:
        rank: of this member.
        num_workers: number of members.
        device: ``cpu`` or ``cuda``.
        timeout_s: bound of every operation, in seconds.
    """

    def __init__(self, rank: int, num_workers: int, *, device: str, timeout_s: float) -> None:
        self.process_group: Any = None
        self.store: Any = None
        self.is_left = False
        self._rank = rank
        self._num_workers = num_workers
        self._is_cuda = device == "cuda"
        self._device = torch.device(device)
        if self._is_cuda:  # another thread connects, and each thread has its own current device
            self._device = torch.device(device, torch.cuda.current_device())
        self._tunnel: TlsTunnel | None = None
        self._timeout = timedelta(seconds=timeout_s)
        self._peers: tuple[int, ...] = tuple(r for r in range(num_workers) if r != rank)

    def connect(
        self, store: Any, *, host: str, tls: TlsFiles | None = None, has_pairs: bool = False
    ) -> None:
        """Connect to the other members through a store.

        Args:
            store: a torch store that all members share.
            host: the address at which the others reach this member.
            tls: the certificates of this node, by which gloo's traffic to other hosts uses TLS;
                None: connections are unencrypted.
            has_pairs: whether any two members will exchange messages (``link``). Otherwise a large
                gloo group connects as a ring, along which torch sums and gathers.

        Raises:
            RuntimeError: if not all members joined in time, or this member left meanwhile.
        """
        try:
            self._connect(store, host, tls, has_pairs=has_pairs)
        except RuntimeError as error:
            problem = self._tunnel.problem(REASON_WAIT_S) if self._tunnel else ""
            if self.is_left:  # the leaving thread may have missed the tunnel
                self.abort()
            if problem:
                raise RuntimeError(f"no TLS connection: {problem}") from error
            raise

    def _connect(self, store: Any, host: str, tls: TlsFiles | None, *, has_pairs: bool) -> None:
        self.store = store  # at once: it tells which members are late
        if tls is not None and not self._is_cuda:
            self.store = store = self._through_tunnel(store, host, tls)
            host = GLOO_HOST
        # A tunnel needs all connections to be made while the group forms.
        can_be_ring = not (self._is_cuda or has_pairs or self._tunnel)
        is_ring = can_be_ring and self._num_workers > _MESH_UP_TO
        if is_ring:
            self._peers = ()  # not connected yet
        # No local variable holds it: a raised error would keep a reference, so that abort()
        # could not free it.
        try:
            self.process_group = (
                self._connected_nccl(store)
                if self._is_cuda
                else make_gloo(
                    store,
                    self._rank,
                    self._num_workers,
                    timeout=self._timeout,
                    host=host,
                    lazy=is_ring,
                )
            )
        finally:
            if self._tunnel is not None:
                store.is_forming = False
        if is_ring:
            self._connect_ring()
        # Another thread may leave at any moment: it sets is_left, then reads process_group. This
        # one sets process_group, then reads is_left. So one of them closes the connections.
        if self.is_left:
            self.abort()
            raise RuntimeError(_LEFT)
        if not self._is_cuda:
            self._check_peers(store.get(SECRET))

    def _connected_nccl(self, store: Any) -> Any:
        """Return an NCCL group after a first sum, for which its members connect.

        NCCL waits for a member that does not come, without a bound, and nothing interrupts it. So
        each member first announces itself in the store, and then another thread connects. A thread
        that is left behind keeps its connections and some memory until the process ends, or until
        all members have come.

        Raises:
            RuntimeError: if not all members joined in time, or this member left meanwhile.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        store.set(f"nccl/{self._rank}", b"here")
        store.wait([f"nccl/{rank}" for rank in range(self._num_workers)], self._timeout)
        make = functools.partial(_make_nccl, store, self._rank, self._num_workers, self._timeout)
        device = self._device
        connecting = future_of(lambda: _connected_or_problem(make, device))
        while not connecting.done():
            futures.wait([connecting], _SLICE.total_seconds())
            if not connecting.done() and (problem := self._why_give_up(deadline)):
                del connecting  # the error would keep it, and a group that connects after all
                raise RuntimeError(problem)
        found = connecting.result()
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def _check_peers(self, secret: bytes) -> None:
        """Let connected members prove to each other that they know the generation's secret.

        gloo accepts as a peer the first process that connects with a number, which is easy to
        guess. So no data of the run is sent before this check. NCCL makes its own connections, and
        is not checked: docs/security.md.

        Raises:
            RuntimeError: if another process has taken a member's place, or a member disconnected.
        """
        process_group = self.process_group
        if process_group is None:
            raise RuntimeError(_LEFT)
        reasons = unproven_peers(process_group, secret, self._timeout, self._peers)
        del process_group  # a raised error would keep a reference
        if reasons:
            listed = "; ".join(f"rank {peer}: {reason}" for peer, reason in reasons.items())
            raise RuntimeError(f"not proven to be members of this generation: {listed}")

    def _through_tunnel(self, store: Any, host: str, tls: TlsFiles) -> TunnelStore:
        """Open a tunnel to the members on other hosts; return the store for gloo to use."""
        self._tunnel = tunnel = TlsTunnel(tls, host)
        store.set(f"tunnel/{self._rank}", json.dumps([host, tunnel.port]).encode())
        values = store.multi_get([f"tunnel/{rank}" for rank in range(self._num_workers)])
        addresses = {rank: json.loads(value) for rank, value in enumerate(values)}
        remote = {rank: address for rank, address in addresses.items() if address[0] != host}
        lower = {rank: address for rank, address in remote.items() if rank < self._rank}
        ports = {**dict.fromkeys(remote, 0), **tunnel.open_ports(lower)}
        return TunnelStore(store, tunnel, self._rank, ports)

    def _connect_ring(self) -> None:
        """Connect to the previous and the next rank.

        A thread of gloo reads their addresses from the store, and an error of a Python store would
        end the process there. So this thread waits until the addresses are set.

        Raises:
            RuntimeError: if not all members joined in time, or this member left meanwhile.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        before, after = self._rank - 1, self._rank + 1
        peers = tuple(dict.fromkeys((before % self._num_workers, after % self._num_workers)))
        addresses = [f"0/{peer}" for peer in peers]  # gloo's names for them
        store = self.store  # abort() clears the attribute
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
        """Return why this member stops waiting for the others, or an empty text if it does not."""
        if self.is_left:
            return _LEFT
        if time.monotonic() >= deadline:
            return f"not all members joined within {self._timeout.total_seconds():g} s"
        return ""

    def _sum_ones(self, deadline: float) -> str:
        """Sum ones over all members; return why that failed, or an empty text.

        gloo makes the connections of a lazy group at their first use, and for a peer that has
        disconnected it waits five times the time-out (its issue 520). So this sum makes all
        connections, with a bounded wait; none is made later. It raises no error, which would keep
        a reference to the process group, so that abort() could not free it.
        """
        try:
            work = self.start_allreduce(torch.ones(1))
            while not is_done(work, _SLICE):
                if problem := self._why_give_up(deadline):
                    return problem
            work.wait()
        except AttributeError:  # another thread has just left the group
            return _LEFT
        except RuntimeError as error:
            return str(error)
        return ""

    def cut(self) -> None:
        """Close the connections now; operations in progress fail, here and at the peers."""
        process_group = self.process_group
        if process_group is not None and self._is_cuda:
            process_group.abort()
        elif process_group is not None:
            _close_connections(process_group, self._peers)

    def abort(self) -> None:
        """Leave without waiting for operations in progress."""
        self.is_left = True
        if not self._is_cuda:
            self.cut()
        if self._tunnel is not None:
            self._tunnel.close()
        # torch joins its threads where the last reference is dropped: do that in another thread.
        # The list is cleared from its end, since the group uses the store.
        references = [self.store, self.process_group]
        self.process_group = self.store = None
        threading.Thread(target=references.clear, daemon=True).start()

    def start_allreduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start an all-reduce in place; return torch's handle with ``wait()``."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.process_group.allreduce([tensor], options)

    def start_allgather(self, tensor: Tensor, out: list[Tensor]) -> Any:
        """Start to gather every member's tensor into ``out``, by rank."""
        return self.process_group.allgather([out], [tensor])

    def link(self) -> ProcessGroupLink:
        """Return a link between this member and each other one."""
        return ProcessGroupLink(self.process_group, self._rank, self._num_workers)


class TunnelStore(dist.Store):  # type: ignore[misc]
    """A store that shows gloo each remote peer at this end of the tunnel to it.

    Args:
        store: of the generation.
        tunnel: of this member.
        rank: of this member.
        ports: see ``raydl.collective.tls_tunnel.rewritten_address``.
    """

    def __init__(self, store: Any, tunnel: TlsTunnel, rank: int, ports: dict[int, int]) -> None:
        super().__init__()
        self._store = store
        self._tunnel = tunnel
        self._rank = rank
        self._ports = ports
        self.is_forming = True
        """While it is true, gloo writes and reads addresses, and nothing else is stored."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key; route the tunnel to gloo's port before others read its address.

        Raises:
            RuntimeError: if the format of gloo's address is unknown.
        """
        if self.is_forming:
            self._tunnel.forward_to(gloo_port(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        value: bytes = self._store.get(key)
        if not self.is_forming:
            return value
        peer = int(key.rpartition("/")[2])  # gloo's keys are 0/RANK
        return rewritten_address(value, rank=self._rank, peer=peer, ports=self._ports)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        self._store.wait(keys)
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set now."""
        return bool(self._store.check(keys))

    def keys_present(self, keys: Sequence[str], within: timedelta) -> list[str]:
        """Return the keys that are set, once all are or the time is up."""
        present: list[str] = self._store.keys_present(keys, within)
        return present


def unproven_peers(
    process_group: Any, secret: bytes, timeout: timedelta, peers: Sequence[int]
) -> dict[int, str]:
    """Exchange proofs with peers; return the reason for each rank with a wrong or missing one.

    It raises no error, which would keep a reference to the process group, so that its owner could
    not free it.
    """
    rank, deadline = process_group.rank(), time.monotonic() + timeout.total_seconds()
    received = {peer: torch.zeros(PROOF_BYTES, dtype=torch.uint8) for peer in peers}
    proofs = {peer: list(proof(secret, source=rank, target=peer)) for peer in peers}
    sent = {peer: torch.tensor(value, dtype=torch.uint8) for peer, value in proofs.items()}
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


def is_done(work: Any, within: timedelta) -> bool:
    """Return whether an operation succeeds or fails within a time.

    Not for a single message: gloo closes the connections when a receive times out.
    """
    try:
        work.wait(within)
    except RuntimeError:  # it failed, or continues
        return bool(work.is_completed())
    return True


def is_done_on_device(work: Any, within: timedelta) -> bool:
    """Return whether an operation of NCCL succeeds or fails within a time.

    torch's own wait would end the operation on time-out, and polls less often.
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
    """Return a gloo process group that listens on one address only.

    Args:
        store: a torch store that all members share.
        rank: of this member.
        num_workers: number of members.
        timeout: bound of every operation.
        host: the address to listen on.
        lazy: whether to connect to a member only when something is first sent to it.
    """
    options = dist.ProcessGroupGloo._Options()
    # The address that the others know: gloo's own guess picks a wrong interface on some hosts.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=lazy)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, num_workers, options)


def _make_nccl(store: Any, rank: int, num_workers: int, timeout: timedelta) -> Any:
    # NCCL's default on a time-out is to end the process; blocking waits raise instead.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    # By default the first sum connects only what a sum of its size needs.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # A high-priority stream lets the reduction start while the gradient fills the device.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, num_workers, options)


def _connected_or_problem(make: Callable[[], Any], device: torch.device) -> Any:
    """Return a group after a first sum on a device, which connects its members; or why that failed.

    An error would keep a reference to the group, so that its connections would stay open.
    """
    try:
        process_group = make()
        process_group.allreduce([torch.ones(1, device=device)], dist.AllreduceOptions()).wait()
    except RuntimeError as error:
        return str(error)
    return process_group


def _close_connections(process_group: Any, peers: Iterable[int]) -> None:
    """Close all connections of a gloo group; operations in progress fail, here and at the peers.

    gloo has no call for that, and its destructor waits for operations in progress. But a receive
    that times out closes every connection of its group. A receive from a peer that has already
    disconnected fails at once and closes no other connection, so each peer is tried in turn.

    Args:
        peers: the ranks that this member is connected to; for any other rank gloo would wait.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            receive = process_group.recv([torch.empty(1)], peer, _CUT_TAG)
            receive.wait(timedelta(milliseconds=1))


def future_of(act: Callable[[], T]) -> futures.Future[T]:
    """Run a function in a daemon thread; return its future. The process can end without it."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
