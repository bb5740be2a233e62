"""The collective among Ray actors: raydl's back end for ``ray.util.collective``.

Ray's own gloo back end wraps the one process-wide group of torch.distributed: its size is fixed
for the life of the process, and its operations have no time-out. This back end makes a fresh torch
process group (``process_group.py``) per generation, with a time-out on every operation.

An actor keeps the rendezvous keys (``key_store.py``), so the group depends on no single member. Ray
carries the keys, and requires the cluster's token.

Workers of a run call ``CollectiveGroup``, whose operations overlap with the gradient. Another
thread can abandon a group: a thread that forms it or waits in it then raises at once. A user's
actors form a group with ``raydl.init_collective_group`` and call ``ray.util.collective``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp
from torch import Tensor

from raydl.collective.allreduce import AdaptiveAllreduce
from raydl.collective.failure_diagnosis import AGAIN, FailureDiagnosis
from raydl.collective.process_group import (
    TorchGroup,
    dist,
    future_of,
    is_done,
    is_done_on_device,
)
from raydl.collective.user_tensors import (
    Value,
    as_bytes,
    check_alike,
    check_reduced,
    check_writable,
    copy_of,
    empty_for,
    fill,
    flat,
    only,
)
from raydl.config.tls import tls_files
from raydl.core.reports import AllreduceReport
from raydl.errors import ConfigError, ExchangeError, ExchangeTimeoutError

BACKEND = "RAYDL"

_REDUCE_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
_POLL_S = 2.0
"""The longest wait of a thread of the center for keys, in seconds."""
_PRESENCE_WAIT = timedelta(seconds=_POLL_S + 1)
"""The longest wait to find out which workers are late. Of two workers that wait for a third, one
may time out up to ``_POLL_S`` after the other."""
_ANSWER_S = 20.0
"""How much longer than a wait for keys a busy center may take to answer, in seconds."""
_CHECK_S = 2.0
"""The same for a check of keys, which may fail."""
_SLICE = timedelta(seconds=0.1)
"""A wait is cut into slices, to check in between whether the group was abandoned."""
_ABANDONED = "abandoned because a worker was lost or left out"


@dataclass(frozen=True)
class GroupAddress:
    """The rendezvous of one generation's members; its text is a name for their group."""

    run_id: str
    generation: int
    device: str
    """``cpu`` or ``cuda``."""
    timeout_s: float

    def __str__(self) -> str:
        return f"raydl:{self.run_id}/{self.generation}"


class CenterStore(dist.Store):  # type: ignore[misc]
    """A torch store of a generation's keys, which the actor ``center`` keeps.

    The center has the methods of a ``StoreServer``. This store raises RuntimeError where torch's
    own stores do.

    gloo reads the key of one rank after the other, ``0/0``, ``0/1`` and so on. Here the first read
    fetches the keys of all ranks: one call per key would make num_workers**2 calls.
    """

    def __init__(self, center: ActorHandle, address: GroupAddress, num_workers: int) -> None:
        super().__init__()
        self._num_workers = num_workers
        self._center = center
        self._generation = address.run_id, address.generation
        self._timeout_s = address.timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a key; return before it has arrived.

        Raises:
            RuntimeError: if this process has disconnected from Ray.
        """
        self._check_connected()
        self._known[key] = value
        self._center.set_key.remote(*self._generation, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        self.wait([key])
        return self._known[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        self.wait(keys)
        return [self._known[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            RuntimeError: if they are not set in time, or the center does not answer.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self._known.keys() >= set(keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"the other members did not join within {timeout_s:g} s")
            wanted = dict.fromkeys(keys)
            for stem, slash, rank in (key.rpartition("/") for key in keys):
                if slash and rank.isdecimal():
                    wanted |= {f"{stem}/{each}": None for each in range(self._num_workers)}
            self._fetch(list(wanted), min(left_s, _POLL_S))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set now; False if the center does not answer.

        NCCL calls this in its own thread, where an error would end the process.
        """
        try:
            return len(self.keys_present(keys, timedelta(0))) == len(keys)
        except RuntimeError:
            return False

    def keys_present(self, keys: Sequence[str], within: timedelta) -> list[str]:
        """Return the keys that are set, once all are or the time is up.

        Raises:
            RuntimeError: if the center does not answer.
        """
        if not self._known.keys() >= set(keys):
            self._fetch(list(keys), within.total_seconds(), answer_s=_CHECK_S)
        return [key for key in keys if key in self._known]

    def clone(self) -> CenterStore:
        """Return this store, which another thread may use as well."""
        return self

    def _fetch(self, keys: list[str], timeout_s: float, *, answer_s: float = _ANSWER_S) -> None:
        """Fetch all keys that the center has, after a wait for the given ones."""
        self._check_connected()
        try:
            call = self._center.wait_for_keys.remote(*self._generation, keys, timeout_s)
            known = ray.get(call, timeout=timeout_s + answer_s)
        except RayError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"the center did not answer: {reason}") from error
        if known is None:
            raise RuntimeError("a later generation has begun")
        self._known.update(known)

    def _check_connected(self) -> None:
        """Raise RuntimeError without a connection, since Ray would start a cluster for a call.

        The thread of an abandoned group may outlive the connection.
        """
        if not ray.is_initialized():
            raise RuntimeError("this process has disconnected from Ray")


class RayGroup(BaseGroup):  # type: ignore[misc]
    """Ray's blocking operations on a group, which a ``CollectiveGroup`` connects.

    Tensors may be torch tensors or NumPy arrays. All members call the operations in the same order,
    with the same shapes and dtypes. An operation that raises has changed no tensor. Arguments and
    results are those of ``ray.util.collective``.

    Raises:
        ConfigError: if a tensor cannot be sent or written; nothing was sent.
        ExchangeTimeoutError: if members did not join in time; the group is no longer usable.
        ExchangeError: if members were lost or left; the group is no longer usable.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        # Do not wait here: Ray holds a process-wide lock meanwhile, and the next group must not
        # wait for an abandoned one.
        super().__init__(world_size, rank, group_name)
        self.group: CollectiveGroup | None = None
        self._failure: ExchangeError | None = None
        self._num_operations = 0

    @classmethod
    def backend(cls) -> str:
        """Return the name of this back end."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return whether torch was built with process groups."""
        return bool(dist.is_available())

    def destroy_group(self) -> None:
        """Leave without waiting for operations in progress."""
        if self.group is not None:
            self.group.leave()

    def allreduce(self, tensor: list[Value], allreduce_options: Any = None) -> None:
        """Replace the tensor by its sum (or product, minimum, maximum) over the group."""
        total, op = copy_of(only(tensor), self._device), _reduce_op(allreduce_options)
        check_writable(tensor[0])
        self._run(lambda group: group.start_allreduce(total, op))
        fill(tensor[0], total)

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all members."""
        one = torch.ones(1, device=self._device)
        self._run(lambda group: group.start_allreduce(one))

    def broadcast(self, tensor: list[Value], broadcast_options: Any = None) -> None:
        """Replace the tensor by the root rank's."""
        options = dist.BroadcastOptions()
        options.rootRank = _root(broadcast_options)
        options.rootTensor = 0
        is_root = self.rank == options.rootRank
        data = (flat if is_root else empty_for)(only(tensor), self._device)
        self._run(lambda group: group.process_group.broadcast([as_bytes(data)], options))
        if not is_root:
            fill(tensor[0], data)

    def reduce(self, tensor: list[Value], reduce_options: Any = None) -> None:
        """Sum into the root rank's tensor; the others keep theirs."""
        options = dist.ReduceOptions()
        options.rootRank = _root(reduce_options)
        options.rootTensor = 0
        options.reduceOp = _reduce_op(reduce_options)
        total, is_root = copy_of(only(tensor), self._device), self.rank == options.rootRank
        if is_root:
            check_writable(tensor[0])
        # A copy on every rank: gloo writes sums to the memory of the other ranks, too.
        self._run(lambda group: group.process_group.reduce([total], options))
        if is_root:
            fill(tensor[0], total)

    def allgather(
        self, tensor_list: list[list[Value]], tensor: list[Value], allgather_options: Any = None
    ) -> None:
        """Gather every member's tensor into the list, by rank."""
        own, targets = flat(only(tensor), self._device), only(tensor_list)
        check_alike(tensor[0], targets)
        results = [empty_for(target, self._device) for target in targets]
        out = [as_bytes(result) for result in results]
        self._run(lambda group: group.start_allgather(as_bytes(own), out))
        for target, result in zip(targets, results, strict=True):
            fill(target, result)

    def reducescatter(
        self,
        tensor: list[Value],
        tensor_list: list[list[Value]],
        reducescatter_options: Any = None,
    ) -> None:
        """Sum a list over the group and keep this rank's element."""
        total, values = empty_for(only(tensor), self._device), only(tensor_list)
        check_reduced(total)
        check_alike(tensor[0], values)
        pieces = [flat(value, self._device) for value in values]
        options = dist.ReduceScatterOptions()
        options.reduceOp = _reduce_op(reducescatter_options)
        self._run(lambda group: group.process_group.reduce_scatter([total], [pieces], options))
        fill(tensor[0], total)

    def send(self, tensor: list[Value], send_options: Any) -> None:
        """Send the tensor to a rank."""
        _check_one_device(send_options)
        data, to = as_bytes(flat(only(tensor), self._device)), send_options.dst_rank
        self._run(lambda group: group.process_group.send([data], to, 0), peer=to)

    def recv(self, tensor: list[Value], recv_options: Any) -> None:
        """Receive the tensor from a rank."""
        _check_one_device(recv_options)
        data, source = empty_for(only(tensor), self._device), recv_options.src_rank
        self._run(lambda group: group.process_group.recv([as_bytes(data)], source, 0), peer=source)
        fill(tensor[0], data)

    @property
    def _device(self) -> str:
        return self._connected.address.device

    @property
    def _connected(self) -> CollectiveGroup:
        if self.group is None:
            raise ConfigError(
                "group_name",
                f"{self.group_name!r} is not connected; call raydl.init_collective_group in each "
                f"member",
            )
        return self.group

    def _run(self, start: Callable[[TorchGroup], Any], peer: int | None = None) -> None:
        """Start one operation among all members, or with one peer, and wait for it."""
        group, failure = self._connected, self._failure
        self._num_operations += 1
        if failure is not None:
            raise ExchangeError(
                self._num_operations,
                failure.generation,
                f"operation {failure.round} failed before; {AGAIN}",
                failure.missing,
                failure.group,
            )
        began = time.monotonic()
        try:
            group.complete(start(group.torch), is_message=peer is not None)
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, AttributeError) and not group.torch.is_left:
                raise
            waited_s = time.monotonic() - began
            group.torch.cut()  # members that wait for this one now fail, too
            ranks = range(self.world_size) if peer is None else (self.rank, peer)
            self._failure = group.explain(
                error, round=self._num_operations, waited_s=waited_s, ranks=ranks
            )
            raise self._failure from error


def _reduce_op(options: Any) -> Any:
    return _REDUCE_OPS[options.reduceOp if options else ReduceOp.SUM]


def _root(options: Any) -> int:
    return options.root_rank if options else 0


def _check_one_device(options: Any) -> None:
    """Raise ConfigError for a part of a tensor, or for one of a member's several devices."""
    gpu = getattr(options, "dst_gpu_index", 0) or getattr(options, "src_gpu_index", 0)
    if gpu or options.n_elements:
        raise ConfigError(
            "n_elements",
            "and GPU indices must be 0: raydl's groups have one device per member; send a slice, "
            "and use one actor per GPU",
        )


def register() -> None:
    """Register the back end with ``ray.util.collective`` in this process."""
    if not collective.is_backend_available(BACKEND):
        register_collective_backend(BACKEND, RayGroup)


class CollectiveGroup:
    """The workers of one generation, as seen by one Ray actor.

    Args:
        address: the rendezvous of the members.
        worker_ids: the ids of all members, by rank.
        rank: of this member.
        center: the actor that keeps the rendezvous keys; see ``CenterStore``.
        algorithm: of the sum: ``library`` (torch's own), a name in ``allreduce.ALGORITHMS``, or
            ``auto`` for the fastest of all of them.
        abandoned: once it is set, forming the group and every wait in it raise at once.
        name: the group's name in ``ray.util.collective``; empty: the address.
        diagnosis: explains failed operations of a user's group; None: a run's group.

    Raises:
        ExchangeTimeoutError: if not all members joined in time.
        ExchangeError: if a member disconnected, or the group was abandoned.
    """

    def __init__(
        self,
        address: GroupAddress,
        worker_ids: tuple[str, ...],
        rank: int,
        *,
        center: ActorHandle,
        algorithm: str = "library",
        abandoned: threading.Event | None = None,
        name: str = "",
        diagnosis: FailureDiagnosis | None = None,
    ) -> None:
        register()
        self.address = address
        self.num_workers = len(worker_ids)
        self.adaptive: AdaptiveAllreduce | None = None
        self._worker_ids = worker_ids
        self._rank = rank
        self._center = center
        self._name = name or str(address)
        self._diagnosis = diagnosis
        self._abandoned = abandoned or threading.Event()
        self.torch = TorchGroup(
            rank, self.num_workers, device=address.device, timeout_s=address.timeout_s
        )
        collective.init_collective_group(self.num_workers, rank, BACKEND, self._name)
        collective.get_group_handle(self._name).group = self
        self._form(algorithm)

    def _form(self, algorithm: str) -> None:
        """Form the group in a thread, which ends by its own time-out if the group is abandoned."""
        start = time.monotonic()
        connecting = future_of(lambda: self._connect(algorithm))
        try:
            while not connecting.done():
                futures.wait([connecting], _SLICE.total_seconds() / 2)
                self._check_abandoned()
            self.adaptive = connecting.result()
        except RuntimeError as error:
            explained = self.explain(error, round=0, waited_s=time.monotonic() - start)
            self.close()
            raise explained from error
        if self.address.device == "cuda":
            threading.Thread(target=self._cut_if_abandoned, daemon=True).start()

    def _connect(self, algorithm: str) -> AdaptiveAllreduce | None:
        store = CenterStore(self._center, self.address, self.num_workers)
        tls = tls_files(os.environ)  # the certificates of Ray's own connections
        # Before the waits: Ray might be disconnected after them, and would start a cluster.
        host, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        is_library = algorithm == "library"
        # Ray's operations need more than sums and gathers.
        has_pairs = not is_library or self._diagnosis is not None
        self.torch.connect(store, host=host, tls=tls, has_pairs=has_pairs)
        if is_library:
            return None
        store = self.torch.store
        store.set(f"node/{self._rank}", node_id.encode())
        values = store.multi_get([f"node/{rank}" for rank in range(self.num_workers)])
        nodes, generation = [value.decode() for value in values], self.address.generation
        link = self.torch.link()
        return AdaptiveAllreduce(
            link, nodes, algorithm, library=link.allreduce, generation=generation
        )

    def _check_wait(self, deadline: float) -> None:
        """Raise RuntimeError if there is a reason to stop waiting."""
        self._check_abandoned()
        if self._diagnosis is not None:
            self._diagnosis.watch()
            if time.monotonic() >= deadline:  # torch bounds each message of an operation
                raise RuntimeError("timed out")

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise RuntimeError(_ABANDONED)

    def _cut_if_abandoned(self) -> None:
        """End NCCL's waits on the device once the group is abandoned."""
        while not self.torch.is_left:
            if self._abandoned.wait(_SLICE.total_seconds()):
                return self.torch.cut()

    def start_allreduce(self, tensor: Tensor, *, round: int) -> CollectiveWork:
        """Start to replace ``tensor`` by its sum over the members, and return at once."""
        start = self.adaptive.start if self.adaptive else self.torch.start_allreduce
        return self._started(lambda: start(tensor), round)

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> CollectiveWork:
        """Start to fill ``out``, shape [num_workers, n], with every member's ``tensor``, [n]."""
        return self._started(lambda: self.torch.start_allgather(tensor, list(out)), round)

    def _started(self, start: Callable[[], Any], round: int) -> CollectiveWork:
        # Waits may all end before their first slice, so that none of them would notice.
        self.raise_if_abandoned(round=round)
        try:
            return CollectiveWork(self, start(), round)
        except RuntimeError as error:
            raise self.explain(error, round=round, waited_s=0.0) from error

    def raise_if_abandoned(self, *, round: int) -> None:
        """Raise an ExchangeError if this member is to leave the group at once."""
        try:
            self._check_abandoned()
        except RuntimeError as error:
            raise self.explain(error, round=round, waited_s=0.0) from error

    def report(self) -> AllreduceReport | None:
        """Return how large messages are summed; None with torch's own, or before a choice."""
        return self.adaptive.report() if self.adaptive else None

    def complete(self, work: Any, *, is_message: bool = False) -> None:
        """Wait for an operation.

        Args:
            work: torch's handle.
            is_message: whether it is a message between two members.

        Raises:
            RuntimeError: if it failed or timed out, or the group was abandoned.
        """
        deadline = time.monotonic() + self.address.timeout_s
        if self.address.device == "cuda":
            while time.monotonic() < deadline and not is_done_on_device(work, _SLICE):
                self._check_wait(deadline)
            work.wait()  # past the deadline, its error names the operation that timed out
            self._check_abandoned()  # a sum that was cut may look complete
        elif is_message:
            work.wait(timedelta(seconds=self.address.timeout_s))
        else:
            while not is_done(work, _SLICE):
                self._check_wait(deadline)
            work.wait()

    def close(self) -> None:
        """Leave the group; its operations in progress fail, here and at the peers."""
        if self.adaptive:
            self.adaptive.close()
        if self._abandoned.is_set():
            self.torch.cut()
        collective.destroy_collective_group(self._name)

    def leave(self) -> None:
        """Leave at once; Ray calls this as it removes the group's name."""
        if self._diagnosis is not None:
            self._diagnosis.leave()
        self.torch.abort()

    def explain(
        self,
        error: Exception,
        *,
        round: int,
        waited_s: float,
        ranks: Sequence[int] | None = None,
    ) -> ExchangeError:
        """Return the ExchangeError for an error of torch, with the names of the missing workers.

        Args:
            error: of torch.
            round: number of the round, or of the operation in a user's group.
            waited_s: how long this member has waited, in seconds.
            ranks: of the members that take part in the operation; None: all.
        """
        generation, problem = self.address.generation, str(error).partition("\n")[0]
        is_late = waited_s >= 0.9 * self.address.timeout_s
        if self._abandoned.is_set():
            return ExchangeError(round, generation, _ABANDONED)
        if self._diagnosis is not None:
            ranks = range(self.num_workers) if ranks is None else ranks
            return self._diagnosis.explain(problem, operation=round, is_late=is_late, ranks=ranks)
        if not is_late:
            return ExchangeError(round, generation, problem)
        missing = self._late_workers(round)
        return ExchangeTimeoutError(round, generation, self.address.timeout_s, missing)

    def _late_workers(self, round: int) -> list[str]:
        """Return the workers that are late: each worker that timed out sets a key."""
        store = self.torch.store
        if store is None:
            return []
        store.set(f"late/{round}/{self._rank}", b"here")
        keys = {w: f"late/{round}/{rank}" for rank, w in enumerate(self._worker_ids)}
        try:
            present = store.keys_present(list(keys.values()), _PRESENCE_WAIT)
        except RuntimeError:  # the center is lost, too: the late workers are unknown
            return []
        return [worker_id for worker_id, key in keys.items() if key not in present]


class CollectiveWork:
    """An all-reduce in progress among Ray actors."""

    def __init__(self, group: CollectiveGroup, work: Any, round: int) -> None:
        self._group = group
        self._work = work
        self._round = round

    def wait(self) -> None:
        """Wait for the sum, bounded by the group's time-out.

        Raises:
            ExchangeError: if a member left, or the group was abandoned; the tensor may be half
                reduced.
        """
        start = time.monotonic()
        try:
            self._group.complete(self._work)
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            raise self._group.explain(error, round=self._round, waited_s=waited_s) from error
