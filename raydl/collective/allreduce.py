"""All-reduce by point-to-point messages, and the choice of the fastest algorithm.

This is our reading of Tianhe-3's *Dynamic Allreduce* (Wei et al., Sci. Rep. 11:20244, which gives
its name and purpose, not its definition): choose the algorithm at run time from message size,
number of workers and measured latency and bandwidth. ``raydl.core.cost_model`` predicts the costs
and so leaves out algorithms that are far too slow; the first sums of each size are timed with each
of the others and with torch's own, and the fastest one is kept. The prediction alone is not enough:
it does not know that the ranks of a node share its cores and its network card.
For CPU tensors only: NCCL chooses its own algorithms. An all-reduce that overlaps with the gradient
runs in its own thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from raydl.core.cost_model import FLAT, Network, Node, choose, doubling_steps, predict_s
from raydl.core.reports import AllreduceReport


class Handle(Protocol):
    """A message in transit."""

    def wait(self) -> object:
        """Wait until the message is sent or received; raise RuntimeError on failure or time-out."""


class Link(Protocol):
    """Point-to-point messages between one rank and the others.

    Both methods start a message and return at once; the caller must not touch the tensor until
    ``wait()`` returns. Messages between two ranks arrive in the order in which they were sent. A
    failed message raises RuntimeError, here or in ``wait()``, within the link's time-out.
    """

    rank: int
    num_workers: int

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Start to send a tensor to a rank."""

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """Start to receive a rank's message into a tensor."""


class ProcessGroupLink:
    """A link over a torch process group, whose time-out bounds every wait.

    ``tag`` separates its messages from others between the same ranks of the group.
    """

    def __init__(self, process_group: Any, rank: int, num_workers: int, tag: int = 0) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._process_group = process_group
        self._tag = tag

    def send(self, tensor: Tensor, to: int) -> Any:
        """Start to send a tensor to a rank."""
        return self._process_group.send([tensor], to, self._tag)

    def receive(self, tensor: Tensor, source: int) -> Any:
        """Start to receive a rank's message into a tensor."""
        return self._process_group.recv([tensor], source, self._tag)

    def allreduce(self, tensor: Tensor) -> Any:
        """Start to replace a tensor by its sum over the ranks, by torch's own algorithm."""
        return self._process_group.allreduce([tensor])


class _Subset:
    """A link among some ranks, renumbered by their index in ``ranks``."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(link.rank)
        self.num_workers = len(ranks)
        self._link = link
        self._ranks = ranks

    def send(self, tensor: Tensor, to: int) -> Handle:
        return self._link.send(tensor, self._ranks[to])

    def receive(self, tensor: Tensor, source: int) -> Handle:
        return self._link.receive(tensor, self._ranks[source])


def _exchange(link: Link, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
    # Start both before waiting: a send may complete only once its receiver has started.
    # Both sides know the sizes, so neither sends or awaits an empty message.
    handles = [link.receive(incoming, source)] if incoming.numel() else []
    handles += [link.send(outgoing, to)] if outgoing.numel() else []
    for handle in handles:
        handle.wait()


def ring(
    link: Link, tensor: Tensor, scratch: Tensor, *, nodes: Sequence[Node], network: Network
) -> None:
    """Sum over all ranks by a chunked ring: reduce-scatter, then all-gather.

    All algorithms here have this signature. All ranks end with the same bits: each chunk is
    summed once, along the ring, and the result is copied.

    Args:
        link: reaches the other ranks.
        tensor: shape [n], contiguous, the same n and dtype on every rank; becomes the sum.
        scratch: overwritten; same dtype, at least n elements.
        nodes, network: the node of each rank and the cost of messages; only ``two_level`` uses
            them.

    Raises:
        RuntimeError: if a message failed; the tensor may be half reduced.
    """
    rank, p = link.rank, link.num_workers
    left, right = (rank - 1) % p, (rank + 1) % p
    chunks = torch.tensor_split(tensor, p)  # the last chunks are empty if n < p
    for step in range(p - 1):
        outgoing, incoming = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        received = scratch[: incoming.numel()]
        _exchange(link, outgoing, right, received, left)
        incoming.add_(received)
    for step in range(p - 1):
        outgoing, incoming = chunks[(rank + 1 - step) % p], chunks[(rank - step) % p]
        _exchange(link, outgoing, right, incoming, left)


def recursive_doubling(
    link: Link, tensor: Tensor, scratch: Tensor, *, nodes: Sequence[Node], network: Network
) -> None:
    """Sum over all ranks by exchanging whole tensors at distances 1, 2, 4, ...

    Let q be the largest power of two up to p. Each rank >= q sends its tensor to rank - q and
    receives the result at the end. All ranks end with the same bits, since x + y and y + x are the
    same bits (except for the payload of a NaN). Arguments and errors as in ``ring``.
    """
    rank, q = link.rank, 1 << (link.num_workers.bit_length() - 1)
    received = scratch[: tensor.numel()]
    if rank >= q:
        link.send(tensor, rank - q).wait()
        link.receive(tensor, rank - q).wait()
        return
    has_extra = rank + q < link.num_workers
    if has_extra:
        link.receive(received, rank + q).wait()
        tensor.add_(received)
    for step in doubling_steps(q):
        _exchange(link, tensor, rank ^ step, received, rank ^ step)
        tensor.add_(received)
    if has_extra:
        link.send(tensor, rank + q).wait()


def two_level(
    link: Link, tensor: Tensor, scratch: Tensor, *, nodes: Sequence[Node], network: Network
) -> None:
    """Sum onto each node's leader, all-reduce among the leaders, copy back within the nodes.

    Within a node by a binomial tree, among the leaders by the cheaper of the two flat algorithms.
    All ranks end with the same bits, since a node's ranks copy their leader. Arguments and errors
    as in ``ring``.
    """
    node, leaders = _Subset(link, _same_node(nodes, link.rank)), _leaders(nodes)
    _tree_reduce(node, tensor, scratch[: tensor.numel()], torch.add)
    if link.rank in leaders:
        separate = range(len(leaders))  # each leader is on its own node
        name, _ = choose(tensor.nbytes, separate, network, among=FLAT)
        across = _Subset(link, leaders)
        ALGORITHMS[name](across, tensor, scratch, nodes=separate, network=network)
    _tree_copy(node, tensor)


def _tree_reduce(link: Link, tensor: Tensor, scratch: Tensor, combine: Callable[..., Any]) -> None:
    """Combine the tensors of all ranks into rank 0's; the other ranks' are overwritten."""
    for step in doubling_steps(link.num_workers):
        if link.rank & step:
            link.send(tensor, link.rank - step).wait()
            return
        if link.rank + step < link.num_workers:
            link.receive(scratch, link.rank + step).wait()
            combine(tensor, scratch, out=tensor)


def _tree_copy(link: Link, tensor: Tensor) -> None:
    """Copy rank 0's tensor to all ranks."""
    for step in reversed(doubling_steps(link.num_workers)):
        place = link.rank % (2 * step)
        if place == step:
            link.receive(tensor, link.rank - step).wait()
        elif place == 0 and link.rank + step < link.num_workers:
            link.send(tensor, link.rank + step).wait()


def _same_node(nodes: Sequence[Node], rank: int) -> list[int]:
    return [r for r, node in enumerate(nodes) if node == nodes[rank]]


def _leaders(nodes: Sequence[Node]) -> list[int]:
    """Return the lowest rank of each node."""
    leaders: dict[Node, int] = {}
    for rank, node in enumerate(nodes):
        leaders.setdefault(node, rank)
    return list(leaders.values())


ALGORITHMS: dict[str, Callable[..., None]] = {
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "two-level": two_level,
}
"""All-reduce algorithms by name, with the signature of ``ring``. Their costs are in
``raydl.core.cost_model.COSTS``."""


_PING_BYTES, _LOAD_BYTES = 8, 1 << 19


def measure_network(link: Link, nodes: Sequence[Node]) -> Network:
    """Measure latency and bandwidth, and return the same figures on every rank.

    All ranks call this together. The ranks of a node form a chain, and so do the leaders. Each
    pair of neighbors in a chain exchanges small and large messages, as in one round of an
    algorithm. The best time of each pair counts, and the slowest pair sets the figure. With only
    one kind of chain (local or across nodes), its figures serve for both; for p = 1 all are 0.

    Raises:
        RuntimeError: if a message failed.
    """
    across = _measure_chain(link, _leaders(nodes))
    local = _measure_chain(link, _same_node(nodes, link.rank))
    figures = torch.tensor([*across, *local], dtype=torch.float64)
    _tree_reduce(link, figures, torch.empty_like(figures), torch.maximum)
    _tree_copy(link, figures)
    a, b, local_a, local_b = figures.tolist()
    return Network(a or local_a, b or local_b, local_a or a, local_b or b)


def _measure_chain(link: Link, ranks: Sequence[int]) -> tuple[float, float]:
    """Return the slower (latency, seconds per byte) to this rank's neighbors; (0, 0) for none."""
    if link.rank not in ranks:
        return 0.0, 0.0
    index, measured = ranks.index(link.rank), [(0.0, 0.0)]
    # Pairs 0-1, 2-3, ... before 1-2, 3-4, ...: no cycle of ranks waits for one another.
    for even in (True, False):
        other = index + 1 if (index % 2 == 0) == even else index - 1
        if 0 <= other < len(ranks):
            measured.append(_measure_pair(link, ranks[other]))
    return max(a for a, _ in measured), max(b for _, b in measured)


def _measure_pair(link: Link, peer: int) -> tuple[float, float]:
    """Return (latency, seconds per byte) of the best exchanges with a peer."""
    outgoing = torch.zeros(_LOAD_BYTES, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)

    def exchange_s(num_bytes: int) -> float:
        start = time.perf_counter()
        _exchange(link, outgoing[:num_bytes], peer, incoming[:num_bytes], peer)
        return time.perf_counter() - start

    exchange_s(_LOAD_BYTES)  # waits for the peer to start, and warms up the connection
    ping_s = load_s = math.inf
    for turn in range(40):  # alternate the sizes, so that a stall does not hit only one of them
        if turn % 5:
            ping_s = min(ping_s, exchange_s(_PING_BYTES))
        else:
            load_s = min(load_s, exchange_s(_LOAD_BYTES))
    # Noise may hide the difference between the sizes; no connection is faster than 1 TB/s.
    return ping_s, max((load_s - ping_s) / (_LOAD_BYTES - _PING_BYTES), 1e-12)


class Reducer:
    """One rank's all-reduce by the algorithms of this module.

    It keeps its scratch memory, which only grows: a training loop allocates once.

    Args:
        link: reaches the other ranks.
        nodes, network: the node of each rank and the cost of messages; the same on every rank.
    """

    def __init__(self, link: Link, nodes: Sequence[Node], network: Network) -> None:
        assert len(nodes) == link.num_workers
        self.link = link
        self.nodes = tuple(nodes)
        self.network = network
        self._scratch: dict[torch.dtype, Tensor] = {}

    def allreduce(self, tensor: Tensor, algorithm: str) -> None:
        """Replace ``tensor``, shape [n], by its sum over all ranks.

        Args:
            tensor: contiguous, the same n and dtype on every rank.
            algorithm: a name in ``ALGORITHMS``, the same on every rank.

        Raises:
            RuntimeError: if a message failed; the tensor may be half reduced.
        """
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or scratch.numel() < tensor.numel():
            scratch = self._scratch[tensor.dtype] = torch.empty_like(tensor)
        ALGORITHMS[algorithm](self.link, tensor, scratch, nodes=self.nodes, network=self.network)


LIBRARY = "library"
"""Name of torch's own all-reduce."""
_LIMITS = (3.0, 1.5, 1.3, 1.2, 1.0)
"""``auto`` drops algorithms whose median time is more than this many times the least: after one try
of each, two, ... The slow ones go first, since a sum over a thin link may take seconds."""
_FAR_TOO_SLOW = 3.0
"""``auto`` does not try algorithms whose predicted time is more than this many times the least."""
_NUM_TIMES = 101


class AllreduceProfiler:
    """Times the sums of one size, the first ones with each algorithm in turn; keeps the fastest.

    Args:
        names: the algorithms; with a single one there is nothing to choose.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.chosen = names[0] if len(names) == 1 else ""
        """The fastest algorithm, or an empty text before all have been tried."""
        self.tried: dict[str, float] = {}
        """Median seconds of the sums by each algorithm before it was chosen or dropped."""
        self._left = list(names)
        self._seconds: dict[str, list[float]] = {name: [] for name in names}

    def next_algorithm(self) -> str:
        """Return the algorithm of the next sum: the chosen one, or the least tried one."""
        return self.chosen or min(self._left, key=lambda name: len(self._seconds[name]))

    def add(self, algorithm: str, seconds: float) -> None:
        """Add the time of a sum."""
        times = self._seconds[algorithm]
        times.append(seconds)
        del times[:-_NUM_TIMES]

    def agree(self, link: Link) -> None:
        """Drop the slow algorithms once all have been tried once more, the same on every rank.

        All ranks call this after each of their sums. The time of a sum is that of the rank with
        the least, since the others include a wait for late ranks; the median of the tries counts.

        Raises:
            RuntimeError: if a message failed.
        """
        if self.chosen:
            return
        number, *others = {len(self._seconds[name]) for name in self._left}
        if others:  # some have been tried once less
            return
        times = torch.tensor([self._seconds[name] for name in self._left], dtype=torch.float64)
        _tree_reduce(link, times, torch.empty_like(times), torch.minimum)
        _tree_copy(link, times)
        medians = dict(zip(self._left, times.median(dim=1).values.tolist(), strict=True))
        self.tried.update(medians)
        limit_s = _LIMITS[number - 1] * min(medians.values())
        self._left = [name for name, seconds in medians.items() if seconds <= limit_s]
        if len(self._left) == 1 or number == len(_LIMITS):
            self.chosen = self._left[0]

    @property
    def measured_s(self) -> float | None:
        """Least seconds of the newest sums of the chosen algorithm; None before there is one.

        The least: the others include waits for late ranks. torch's own sums are timed before the
        choice only.
        """
        return min(self._seconds[self.chosen], default=None) if self.chosen else None


class AdaptiveAllreduce:
    """Sums tensors over the ranks in a thread, in the order in which they are submitted.

    The constructor measures latency and bandwidth; all ranks must construct it together.

    Args:
        link: reaches the other ranks.
        nodes: the node of each rank.
        algorithm: a name in ``ALGORITHMS``, or ``auto``: the fastest one for each size of message.
        library: starts torch's own all-reduce between the same ranks, and returns torch's handle;
            None: ``auto`` does not try it.
        generation: the membership, for the report.

    Raises:
        RuntimeError: if a message of the measurement failed.
    """

    def __init__(
        self,
        link: Link,
        nodes: Sequence[Node],
        algorithm: str,
        *,
        library: Callable[[Tensor], Any] | None = None,
        generation: int = 0,
    ) -> None:
        self._generation = generation
        self._reducer = Reducer(link, nodes, measure_network(link, nodes))
        self._algorithm = algorithm
        self._library = library
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="allreduce")
        self._lock = threading.Lock()
        self._profilers: dict[int, AllreduceProfiler] = {}
        self._newest: Future[None] | None = None

    def start(self, tensor: Tensor) -> Any:
        """Start to replace ``tensor`` by its sum over the ranks; return a handle like torch's."""
        is_idle = self._newest is None or self._newest.done()
        # torch's sums begin in the same order on all ranks: none overtakes one in the thread.
        if is_idle and self._library and self._profiler_of(tensor.nbytes).chosen == LIBRARY:
            return self._library(tensor)
        self._newest = self._pool.submit(self._reduce, tensor)
        return AdaptiveWork(self._newest)

    def _reduce(self, tensor: Tensor) -> None:
        torch.set_num_threads(1)  # OpenMP keeps a thread count for each calling thread
        profiler = self._profiler_of(tensor.nbytes)
        algorithm = profiler.next_algorithm()
        start = time.perf_counter()
        if algorithm == LIBRARY and self._library is not None:
            self._library(tensor).wait()
        else:
            self._reducer.allreduce(tensor, algorithm)
        seconds = time.perf_counter() - start
        with self._lock:
            profiler.add(algorithm, seconds)
        profiler.agree(self._reducer.link)

    def _profiler_of(self, num_bytes: int) -> AllreduceProfiler:
        with self._lock:
            if num_bytes not in self._profilers:
                self._profilers[num_bytes] = AllreduceProfiler(self._candidates(num_bytes))
            return self._profilers[num_bytes]

    def _candidates(self, num_bytes: int) -> list[str]:
        if self._algorithm != "auto":
            return [self._algorithm]
        nodes, network = self._reducer.nodes, self._reducer.network
        predicted = {name: predict_s(name, num_bytes, nodes, network) for name in ALGORITHMS}
        if len(set(nodes)) == len(nodes):  # it would be the same as the cheaper of the others
            del predicted["two-level"]
        enough_s = _FAR_TOO_SLOW * min(predicted.values())
        names = [name for name, seconds in predicted.items() if seconds <= enough_s]
        return names if self._library is None else [LIBRARY, *names]

    def report(self) -> AllreduceReport | None:
        """Return how the largest messages so far are summed, or None before that is chosen."""
        with self._lock:
            measured = {
                num_bytes: (profiler, seconds)
                for num_bytes, profiler in self._profilers.items()
                if (seconds := profiler.measured_s) is not None
            }
        if not measured:
            return None
        num_bytes = max(measured)
        profiler, measured_s = measured[num_bytes]
        return AllreduceReport(
            generation=self._generation,
            algorithm=profiler.chosen,
            num_bytes=num_bytes,
            predicted_s=self._predicted_s(profiler.chosen, num_bytes),
            measured_s=measured_s,
            tried=profiler.tried,
        )

    def _predicted_s(self, algorithm: str, num_bytes: int) -> float | None:
        if algorithm == LIBRARY:
            return None
        return predict_s(algorithm, num_bytes, self._reducer.nodes, self._reducer.network)

    def close(self) -> None:
        """Accept no more tensors; a sum in progress ends with its link, or by its time-out."""
        self._pool.shutdown(wait=False)


class AdaptiveWork:
    """A sum in progress in the thread, with the methods of torch's work handle."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Return whether the sum has succeeded or failed."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the sum.

        Raises:
            RuntimeError: if a message failed, or the sum is not complete within ``timeout``; it
                then continues.
        """
        seconds = None if timeout is None else timeout.total_seconds()
        if not wait([self._future], seconds).done:
            raise RuntimeError(f"the sum was not complete within {seconds} s")
        self._future.result()
