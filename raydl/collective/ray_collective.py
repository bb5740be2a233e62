"""The collective among Ray actors: a backend of ours behind ``ray.util.collective``.

Ray's own gloo backend wraps the one process-wide group of torch.distributed: it fixes its
size for the life of the process and bounds no operation. This backend makes a fresh process
group of torch (``process_group.py``) per generation, with a time-out on every operation.

The members find each other by keys that an actor keeps (``store.py``), so that no member is needed
to meet. Ray carries the keys, and asks for the cluster's token.

Workers of a run call ``CollectiveGroup``, whose operations overlap with the gradient; a group can
be abandoned from another thread: who forms it or waits in it is free at once. Actors of the user
form theirs with ``raydl.init_collective_group`` and call ``ray.util.collective``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

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
from raydl.collective.process_group import TorchGroup, dist, is_done, is_done_on_device
from raydl.collective.roll_call import AGAIN, RollCall
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
_ASK_S = 2.0  # the longest that a thread of the center waits for keys
# Of two who wait for a third, one may give up by _ASK_S later: it learns only then that it waits.
_ROLL_CALL = timedelta(seconds=_ASK_S + 1)
_ANSWER_S = 20.0  # and how much longer a busy center may take to answer
_CHECK_S = 2.0  # the same where an answer is of no great worth
_SLICE = timedelta(seconds=0.1)  # of a wait: after each is seen whether it was abandoned
_ABANDONED = "it was abandoned: a worker was lost or left out"

T = TypeVar("T")


@dataclass(frozen=True)
class GroupAddress:
    """By what the members of one generation meet; its text is a name for their group."""

    run_id: str
    generation: int
    device: str
    """``cpu`` or ``cuda``."""
    timeout_s: float

    def __str__(self) -> str:
        return f"raydl:{self.run_id}/{self.generation}"


class CenterStore(dist.Store):  # type: ignore[misc]
    """torch's view of a generation's keys, which the actor ``center`` keeps.

    The center has the methods of a ``StoreServer``. Where torch's own stores raise a RuntimeError,
    so does this one.

    gloo asks for the key of one rank after the other, ``0/0``, ``0/1`` and so on. Here the first
    question waits for those of all ranks: a call for each would be num_workers**2 calls.
    """

    def __init__(self, center: ActorHandle, address: GroupAddress, num_workers: int) -> None:
        super().__init__()
        self._num_workers = num_workers
        self._center = center
        self._generation = address.run_id, address.generation
        self._timeout_s = address.timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a key, without a wait for it to arrive."""
        self._known[key] = value
        self._center.set_key.remote(*self._generation, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        self.wait([key])
        return self._known[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are there."""
        self.wait(keys)
        return [self._known[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are there.

        Raises:
            RuntimeError: they do not come in time, or the center can not be reached.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self._known.keys() >= set(keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"the other members did not come within {timeout_s:g} s")
            self._ask(self._of_all_ranks(keys), min(left_s, _ASK_S))

    def check(self, keys: list[str]) -> bool:
        """Return whether keys are there now; no, if the center can not be reached.

        NCCL asks this in a thread of its own, where an error would end the process.
        """
        try:
            return len(self.keys_present(keys, timedelta(0))) == len(keys)
        except RuntimeError:
            return False

    def keys_present(self, keys: Sequence[str], within: timedelta) -> list[str]:
        """Return which of some keys are there, once all are or a time is over.

        Raises:
            RuntimeError: the center can not be reached.
        """
        if not self._known.keys() >= set(keys):
            self._ask(list(keys), within.total_seconds(), answer_s=_CHECK_S)
        return [key for key in keys if key in self._known]

    def clone(self) -> CenterStore:
        """Return a store for another thread: this one."""
        return self

    def _of_all_ranks(self, keys: list[str]) -> list[str]:
        """Return the keys, for one that ends in a rank those of all ranks."""
        found = dict.fromkeys(keys)
        for stem, slash, rank in (key.rpartition("/") for key in keys):
            if slash and rank.isdecimal():
                found |= {f"{stem}/{each}": None for each in range(self._num_workers)}
        return list(found)

    def _ask(self, keys: list[str], timeout_s: float, *, answer_s: float = _ANSWER_S) -> None:
        """Learn what the center knows, after a wait for keys that it may not know yet."""
        try:
            asked = self._center.wait_for_keys.remote(*self._generation, keys, timeout_s)
            found = ray.get(asked, timeout=timeout_s + answer_s)
        except RayError as error:
            said = str(error).partition("\n")[0]
            raise RuntimeError(f"the center did not answer: {said}") from error
        if found is None:
            raise RuntimeError("a later generation has begun")
        self._known.update(found)


class RayGroup(BaseGroup):  # type: ignore[misc]
    """Ray's blocking operations on a group, which a ``CollectiveGroup`` connects.

    Each takes tensors of torch or arrays of NumPy, which all members give in the same order, and
    with the same shapes and dtypes. One that raises has changed none of them. Arguments and results
    are those of ``ray.util.collective``.

    Raises:
        ConfigError: a tensor can not be sent or written; nothing was sent.
        ExchangeTimeoutError: members did not come in time; the group is over.
        ExchangeError: members were lost or have left; the group is over.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        # Nothing is waited for here: Ray holds a lock of the whole process meanwhile, and
        # the next group must not wait for one that was abandoned.
        super().__init__(world_size, rank, group_name)
        self.group: CollectiveGroup | None = None
        self._failure: ExchangeError | None = None
        self._num_operations = 0

    @classmethod
    def backend(cls) -> str:
        """Return the backend's name."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return whether torch was built with process groups."""
        return bool(dist.is_available())

    def destroy_group(self) -> None:
        """Leave, without waiting for what is under way."""
        if self.group is not None:
            self.group.leave()

    def allreduce(self, tensor: list[Value], allreduce_options: Any = None) -> None:
        """Replace the tensor by its sum (or product, least, greatest) over the group."""
        total, op = copy_of(only(tensor), self._device), _reduce_op(allreduce_options)
        check_writable(tensor[0])
        self._run(lambda: self._torch.start_allreduce(total, op))
        fill(tensor[0], total)

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all members."""
        one = torch.ones(1, device=self._device)
        self._run(lambda: self._torch.start_allreduce(one))

    def broadcast(self, tensor: list[Value], broadcast_options: Any = None) -> None:
        """Replace the tensor by that of the root rank."""
        options = dist.BroadcastOptions()
        options.rootRank = _root(broadcast_options)
        options.rootTensor = 0
        is_root = self.rank == options.rootRank
        data = (flat if is_root else empty_for)(only(tensor), self._device)
        self._run(lambda: self._torch.process_group.broadcast([as_bytes(data)], options))
        if not is_root:
            fill(tensor[0], data)

    def reduce(self, tensor: list[Value], reduce_options: Any = None) -> None:
        """Sum into the tensor of the root rank; the others keep theirs."""
        options = dist.ReduceOptions()
        options.rootRank = _root(reduce_options)
        options.rootTensor = 0
        options.reduceOp = _reduce_op(reduce_options)
        total, is_root = copy_of(only(tensor), self._device), self.rank == options.rootRank
        if is_root:
            check_writable(tensor[0])
        # gloo leaves sums in the memory of other ranks, too.
        self._run(lambda: self._torch.process_group.reduce([total], options))
        if is_root:
            fill(tensor[0], total)

    def allgather(
        self, tensor_list: list[list[Value]], tensor: list[Value], allgather_options: Any = None
    ) -> None:
        """Collect every member's tensor into the list, by rank."""
        mine, found = flat(only(tensor), self._device), only(tensor_list)
        check_alike(tensor[0], found)
        data = [empty_for(each, self._device) for each in found]
        out = [as_bytes(each) for each in data]
        self._run(lambda: self._torch.start_allgather(as_bytes(mine), out))
        for each, result in zip(found, data, strict=True):
            fill(each, result)

    def reducescatter(
        self,
        tensor: list[Value],
        tensor_list: list[list[Value]],
        reducescatter_options: Any = None,
    ) -> None:
        """Sum a list over the group and keep this rank's element."""
        total, given = empty_for(only(tensor), self._device), only(tensor_list)
        check_reduced(total)
        check_alike(tensor[0], given)
        pieces = [flat(piece, self._device) for piece in given]
        options = dist.ReduceScatterOptions()
        options.reduceOp = _reduce_op(reducescatter_options)
        self._run(lambda: self._torch.process_group.reduce_scatter([total], [pieces], options))
        fill(tensor[0], total)

    def send(self, tensor: list[Value], send_options: Any) -> None:
        """Send the tensor to a rank."""
        _check_one_device(send_options)
        data, to = as_bytes(flat(only(tensor), self._device)), send_options.dst_rank
        self._run(lambda: self._torch.process_group.send([data], to, 0), peer=to)

    def recv(self, tensor: list[Value], recv_options: Any) -> None:
        """Receive the tensor from a rank."""
        _check_one_device(recv_options)
        data, source = empty_for(only(tensor), self._device), recv_options.src_rank
        self._run(lambda: self._torch.process_group.recv([as_bytes(data)], source, 0), peer=source)
        fill(tensor[0], data)

    @property
    def _device(self) -> str:
        return self._connected.address.device

    @property
    def _torch(self) -> TorchGroup:
        return self._connected.torch

    @property
    def _connected(self) -> CollectiveGroup:
        if self.group is None:
            raise ConfigError(
                "group_name",
                f"{self.group_name!r} is not connected: its members form it, each by a call of "
                f"raydl.init_collective_group",
            )
        return self.group

    def _run(self, start: Callable[[], Any], peer: int | None = None) -> None:
        """Run one operation among all members, or with one peer, to its end."""
        group, failure = self._connected, self._failure
        self._num_operations += 1
        if failure is not None:
            raise ExchangeError(
                self._num_operations,
                failure.generation,
                f"operation {failure.round} has failed before; {AGAIN}",
                failure.missing,
                failure.group,
            )
        began = time.monotonic()
        try:
            group.complete(start(), is_message=peer is not None)
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, AttributeError) and not group.torch.is_left:
                raise
            waited_s = time.monotonic() - began
            group.torch.cut()  # a member that waits for this one fails now, too
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
    """Refuse a part of a message, or one to a certain device of a member. Raises ConfigError."""
    gpu = getattr(options, "dst_gpu_index", 0) or getattr(options, "src_gpu_index", 0)
    if gpu or options.n_elements:
        raise ConfigError(
            "n_elements",
            "and GPU indices must be 0: raydl's groups have one device per member; send a slice, "
            "from an actor for each GPU",
        )


def register() -> None:
    """Make the backend known to ``ray.util.collective`` in this process."""
    if not collective.is_backend_available(BACKEND):
        register_collective_backend(BACKEND, RayGroup)


class CollectiveGroup:
    """The workers of one generation, as one Ray actor sees them.

    Args:
        address: where they meet.
        worker_ids: all members, by rank.
        rank: this one's.
        center: the actor that keeps the keys by which they meet; see ``CenterStore``.
        algorithm: of the sum: ``library`` (torch's own), a name of ``allreduce.ALGORITHMS``,
            or ``auto`` for what is predicted to be fastest on the network as measured now.
        abandoned: once it is set, forming the group and every wait in it raise at once.
        name: by which ``ray.util.collective`` knows it in this process; empty: the address.
        roll_call: explains failures to a user, whose operations Ray calls; None: a run's group.

    Raises:
        ExchangeTimeoutError: not all members came in time.
        ExchangeError: a member went away, or the group was abandoned.
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
        roll_call: RollCall | None = None,
    ) -> None:
        register()
        self.address = address
        self.num_workers = len(worker_ids)
        self.adaptive: AdaptiveAllreduce | None = None
        self._worker_ids = worker_ids
        self._rank = rank
        self._center = center
        self._name = name or str(address)
        self._roll_call = roll_call
        self._abandoned = abandoned or threading.Event()
        self.torch = TorchGroup(
            rank, self.num_workers, device=address.device, timeout_s=address.timeout_s
        )
        collective.init_collective_group(self.num_workers, rank, BACKEND, self._name)
        collective.get_group_handle(self._name).group = self
        self._form(algorithm)

    def _form(self, algorithm: str) -> None:
        """Meet the others; if the group is abandoned, the thread ends by its own time-out."""
        start = time.monotonic()
        met = _in_thread(lambda: self._meet(algorithm))
        try:
            while not met.done():
                futures.wait([met], _SLICE.total_seconds() / 2)
                self._check_abandoned()
            self.adaptive = met.result()
        except RuntimeError as error:
            explained = self.explain(error, round=0, waited_s=time.monotonic() - start)
            self.close()
            raise explained from error
        if self.address.device == "cuda":
            threading.Thread(target=self._cut_if_abandoned, daemon=True).start()

    def _meet(self, algorithm: str) -> AdaptiveAllreduce | None:
        store = CenterStore(self._center, self.address, self.num_workers)
        tls = tls_files(os.environ)  # what Ray's own connections go by
        is_library = algorithm == "library"
        host = ray.util.get_node_ip_address()
        # Ray's operations need more than sums and gatherings.
        has_pairs = not is_library or self._roll_call is not None
        self.torch.connect(store, host=host, tls=tls, has_pairs=has_pairs)
        if is_library:
            return None
        link, generation = self.torch.link(), self.address.generation
        return AdaptiveAllreduce(link, self._nodes(), algorithm, generation=generation)

    def _look_around(self, deadline: float) -> None:
        """Raise RuntimeError if there is a reason to wait no longer."""
        self._check_abandoned()
        if self._roll_call is not None:
            self._roll_call.watch()
            if time.monotonic() >= deadline:  # torch bounds each message of an operation
                raise RuntimeError("timed out")

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise RuntimeError(_ABANDONED)

    def _cut_if_abandoned(self) -> None:
        """Free the device of what NCCL waits for."""
        while not self.torch.is_left:
            if self._abandoned.wait(_SLICE.total_seconds()):
                return self.torch.cut()

    def _nodes(self) -> list[str]:
        """Return the node of each rank."""
        store = self.torch.store
        store.set(f"node/{self._rank}", ray.get_runtime_context().get_node_id().encode())
        keys = [f"node/{rank}" for rank in range(self.num_workers)]
        return [node.decode() for node in store.multi_get(keys)]

    def start_allreduce(self, tensor: Tensor, *, round: int) -> CollectiveWork:
        """Begin to replace ``tensor`` by its sum over the members, and return at once."""
        start = self.adaptive.start if self.adaptive else self.torch.start_allreduce
        return self._started(lambda: start(tensor), round)

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> CollectiveWork:
        """Begin to fill ``out``, shape [num_workers, n], with every member's ``tensor``, [n]."""
        return self._started(lambda: self.torch.start_allgather(tensor, list(out)), round)

    def _started(self, start: Callable[[], Any], round: int) -> CollectiveWork:
        try:
            # Where all go on as usual no wait is long enough to see it.
            self._check_abandoned()
            return CollectiveWork(self, start(), round)
        except RuntimeError as error:
            raise self.explain(error, round=round, waited_s=0.0) from error

    def report(self) -> AllreduceReport | None:
        """Return how large messages are summed; None with torch's own all-reduce."""
        return self.adaptive.report() if self.adaptive else None

    def wait_for(self, work: Any, round: int) -> None:
        """Wait for an operation of a round. Raises what ``CollectiveWork`` does."""
        start = time.monotonic()
        try:
            self.complete(work)
        except RuntimeError as error:
            raise self.explain(error, round=round, waited_s=time.monotonic() - start) from error

    def complete(self, work: Any, *, is_message: bool = False) -> None:
        """Wait for an operation.

        Args:
            work: torch's handle.
            is_message: it is one between two members.

        Raises:
            RuntimeError: it failed, took too long, or all was abandoned.
        """
        deadline = time.monotonic() + self.address.timeout_s
        if self.address.device == "cuda":
            self._wait_for_device(work, deadline)
        elif is_message:
            work.wait(timedelta(seconds=self.address.timeout_s))
        else:
            while not is_done(work, _SLICE):
                self._look_around(deadline)
            work.wait()

    def _wait_for_device(self, work: Any, deadline: float) -> None:
        while time.monotonic() < deadline and not is_done_on_device(work, _SLICE):
            self._look_around(deadline)
        work.wait()  # beyond the deadline this says which operation timed out
        self._check_abandoned()  # a sum that was cut may look as if it were complete

    def close(self) -> None:
        """Leave the group; what is under way in it fails, here and at the peers."""
        if self.adaptive:
            self.adaptive.close()
        if self._abandoned.is_set():
            self.torch.cut()
        collective.destroy_collective_group(self._name)

    def leave(self) -> None:
        """Leave at once, as Ray forgets the group's name."""
        if self._roll_call is not None:
            self._roll_call.leave()
        self.torch.abort()

    def explain(
        self,
        error: Exception,
        *,
        round: int,
        waited_s: float,
        ranks: Sequence[int] | None = None,
    ) -> ExchangeError:
        """Return what an error of torch means for a round, with the names of the missing.

        Args:
            error: of torch.
            round: or the number of an operation.
            waited_s: how long this member has waited.
            ranks: of the members that the operation needs; None: all.
        """
        generation, problem = self.address.generation, str(error).partition("\n")[0]
        is_late = waited_s >= 0.9 * self.address.timeout_s
        if self._abandoned.is_set():
            return ExchangeError(round, generation, _ABANDONED)
        if self._roll_call is not None:
            ranks = range(self.num_workers) if ranks is None else ranks
            return self._roll_call.explain(problem, operation=round, is_late=is_late, ranks=ranks)
        if not is_late:
            return ExchangeError(round, generation, problem)
        missing = self._late_workers(round)
        return ExchangeTimeoutError(round, generation, self.address.timeout_s, missing)

    def _late_workers(self, round: int) -> list[str]:
        """Return the workers that do not answer: each that timed out signs in the store."""
        store = self.torch.store
        if store is None:
            return []
        store.set(f"late/{round}/{self._rank}", b"here")
        keys = {w: f"late/{round}/{rank}" for rank, w in enumerate(self._worker_ids)}
        try:
            there = store.keys_present(list(keys.values()), _ROLL_CALL)
        except RuntimeError:  # the center is lost, too: who knows
            return []
        return [worker_id for worker_id, key in keys.items() if key not in there]


class CollectiveWork:
    """An all-reduce under way among Ray actors."""

    def __init__(self, group: CollectiveGroup, work: Any, round: int) -> None:
        self._group = group
        self._work = work
        self._round = round

    def wait(self) -> None:
        """Wait for the sum, bounded by the group's time-out.

        Raises:
            ExchangeError: a member left, or all was abandoned; the tensor may be half reduced.
        """
        self._group.wait_for(self._work, self._round)


def _in_thread(act: Callable[[], T]) -> futures.Future[T]:
    """Return the result to come of a function, in a thread that no process end waits for."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
