"""The collective among Ray actors: a backend of ours behind ``ray.util.collective``.

Ray's own gloo backend wraps the one process-wide group of torch.distributed: it fixes its
size for the life of the process and bounds no operation. This backend makes a fresh process
group of torch (``process_group.py``) per generation, with a time-out on every operation. A
group's name is its address, since a name is all that Ray's constructor hands on:

    raydl:RUN/GENERATION?device=cpu&timeout_s=60.0

The members find each other by keys that the center's process keeps (``store.py``), so that no
worker is needed to meet. Ray carries the keys, and asks for the cluster's token.

A group can be abandoned from another thread: who forms it or waits in it is free at once.
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
from urllib.parse import parse_qs, urlencode, urlsplit

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp
from torch import Tensor

from raydl.collective.allreduce import AdaptiveAllreduce
from raydl.collective.process_group import TorchGroup, dist, is_done, is_done_on_device
from raydl.config.tls import tls_files
from raydl.core.reports import AllreduceReport
from raydl.errors import ExchangeError, ExchangeTimeoutError

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
    """By what the workers of one generation meet; its text is the group's name."""

    run_id: str
    generation: int
    device: str
    """``cpu`` or ``cuda``."""
    timeout_s: float

    def __str__(self) -> str:
        query = urlencode({"device": self.device, "timeout_s": self.timeout_s})
        return f"raydl:{self.run_id}/{self.generation}?{query}"

    @classmethod
    def parse(cls, name: str) -> GroupAddress:
        """Return the address that a group's name spells."""
        url = urlsplit(name)
        run_id, generation = url.path.split("/")
        query = parse_qs(url.query)
        return cls(
            run_id=run_id,
            generation=int(generation),
            device=query["device"][0],
            timeout_s=float(query["timeout_s"][0]),
        )


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
            return len(self.those_there(keys, timedelta(0))) == len(keys)
        except RuntimeError:
            return False

    def those_there(self, keys: Sequence[str], within: timedelta) -> list[str]:
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
    """A torch group behind Ray's blocking interface; to be used once it is connected."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        # Nothing is waited for here: Ray holds a lock of the whole process meanwhile, and
        # the next group must not wait for one that was abandoned.
        super().__init__(world_size, rank, group_name)
        address = GroupAddress.parse(group_name)
        self.torch = TorchGroup(
            rank, world_size, device=address.device, timeout_s=address.timeout_s
        )

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
        self.torch.abort()

    def allreduce(self, tensor: list[Tensor], allreduce_options: Any = None) -> None:
        """Replace the tensor by its sum (or product, least, greatest) over the group."""
        self.torch.start_allreduce(tensor[0], _reduce_op(allreduce_options)).wait()

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all members."""
        self.torch.process_group.barrier().wait()

    def broadcast(self, tensor: list[Tensor], broadcast_options: Any = None) -> None:
        """Replace the tensor by that of the root rank."""
        options = dist.BroadcastOptions()
        options.rootRank = broadcast_options.root_rank if broadcast_options else 0
        options.rootTensor = 0
        self.torch.process_group.broadcast(tensor, options).wait()

    def reduce(self, tensor: list[Tensor], reduce_options: Any = None) -> None:
        """Sum into the tensor of the root rank."""
        options = dist.ReduceOptions()
        options.rootRank = reduce_options.root_rank if reduce_options else 0
        options.rootTensor = 0
        options.reduceOp = _reduce_op(reduce_options)
        self.torch.process_group.reduce(tensor, options).wait()

    def allgather(
        self, tensor_list: list[list[Tensor]], tensor: list[Tensor], allgather_options: Any = None
    ) -> None:
        """Collect every member's tensor into the list, by rank."""
        self.torch.process_group.allgather(tensor_list, tensor).wait()

    def reducescatter(
        self,
        tensor: list[Tensor],
        tensor_list: list[list[Tensor]],
        reducescatter_options: Any = None,
    ) -> None:
        """Sum a list over the group and keep this rank's element."""
        for piece in tensor_list[0]:
            self.torch.start_allreduce(piece).wait()
        tensor[0].copy_(tensor_list[0][self.rank])

    def send(self, tensor: list[Tensor], send_options: Any) -> None:
        """Send the tensor to a rank."""
        self.torch.process_group.send(tensor, send_options.dst_rank, 0).wait()

    def recv(self, tensor: list[Tensor], recv_options: Any) -> None:
        """Receive the tensor from a rank."""
        self.torch.process_group.recv(tensor, recv_options.src_rank, 0).wait()


def _reduce_op(options: Any) -> Any:
    return _REDUCE_OPS[options.reduceOp if options else ReduceOp.SUM]


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
    ) -> None:
        register()
        self.address = address
        self.num_workers = len(worker_ids)
        self.adaptive: AdaptiveAllreduce | None = None
        self._worker_ids = worker_ids
        self._rank = rank
        self._center = center
        self._name = str(address)
        self._abandoned = abandoned or threading.Event()
        collective.init_collective_group(self.num_workers, rank, BACKEND, self._name)
        self._group: TorchGroup = collective.get_group_handle(self._name).torch
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
        self._group.connect(store, host=host, tls=tls, has_pairs=not is_library)
        if is_library:
            return None
        link, generation = self._group.link(), self.address.generation
        return AdaptiveAllreduce(link, self._nodes(), algorithm, generation=generation)

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise RuntimeError(_ABANDONED)

    def _cut_if_abandoned(self) -> None:
        """Free the device of what NCCL waits for."""
        while not self._group.is_left:
            if self._abandoned.wait(_SLICE.total_seconds()):
                return self._group.cut()

    def _nodes(self) -> list[str]:
        """Return the node of each rank."""
        store = self._group.store
        store.set(f"node/{self._rank}", ray.get_runtime_context().get_node_id().encode())
        keys = [f"node/{rank}" for rank in range(self.num_workers)]
        return [node.decode() for node in store.multi_get(keys)]

    def start_allreduce(self, tensor: Tensor, *, round: int) -> CollectiveWork:
        """Begin to replace ``tensor`` by its sum over the members, and return at once."""
        start = self.adaptive.start if self.adaptive else self._group.start_allreduce
        return self._started(lambda: start(tensor), round)

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> CollectiveWork:
        """Begin to fill ``out``, shape [num_workers, n], with every member's ``tensor``, [n]."""
        return self._started(lambda: self._group.start_allgather(tensor, list(out)), round)

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
            if self.address.device == "cuda":
                self._wait_for_device(work, start + self.address.timeout_s)
            else:
                while not is_done(work, _SLICE):
                    self._check_abandoned()
                work.wait()
        except RuntimeError as error:
            raise self.explain(error, round=round, waited_s=time.monotonic() - start) from error

    def _wait_for_device(self, work: Any, deadline: float) -> None:
        while time.monotonic() < deadline and not is_done_on_device(work, _SLICE):
            self._check_abandoned()
        work.wait()  # beyond the deadline this says which operation timed out
        self._check_abandoned()  # a sum that was cut may look as if it were complete

    def close(self) -> None:
        """Leave the group; what is under way in it fails, here and at the peers."""
        if self.adaptive:
            self.adaptive.close()
        if self._abandoned.is_set():
            self._group.cut()
        collective.destroy_collective_group(self._name)

    def explain(self, error: RuntimeError, *, round: int, waited_s: float) -> ExchangeError:
        """Return what an error of torch means for a round, with the names of the missing."""
        generation = self.address.generation
        if self._abandoned.is_set():
            return ExchangeError(round, generation, _ABANDONED)
        if waited_s < 0.9 * self.address.timeout_s:
            return ExchangeError(round, generation, str(error).splitlines()[0])
        missing = self._roll_call(round)
        return ExchangeTimeoutError(round, generation, self.address.timeout_s, missing)

    def _roll_call(self, round: int) -> list[str]:
        """Return the workers that do not answer: each that timed out signs in the store."""
        store = self._group.store
        if store is None:
            return []
        store.set(f"late/{round}/{self._rank}", b"here")
        keys = {w: f"late/{round}/{rank}" for rank, w in enumerate(self._worker_ids)}
        try:
            there = store.those_there(list(keys.values()), _ROLL_CALL)
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
