"""All-reduce by messages between pairs, and the choice of the cheapest way.

Our reading of Tianhe-3's *Dynamic Allreduce* (Wei et al., Sci. Rep. 11:20244, gives its name
and purpose, not its definition): the algorithm is chosen at run time, from message size,
number of workers and measured latency and bandwidth. A message of S bytes takes a + S b
seconds, and a round of messages as long as its slowest one:

    ring                 2(p-1) (a + (S/p) b)
    recursive doubling   R(p) (a + S b)
    two-level            2 ceil(log2 m) (a' + S b') + the cheaper of both above, for L and p = L

    S, p    num_bytes of the tensor, num_workers (ranks)
    a, a'   latency_s, local_latency_s: the start of a message, across nodes or inside one
    b, b'   seconds_per_byte, local_seconds_per_byte: each byte of it, likewise
    L, m    nodes, each with a leader (its lowest rank), and ranks on the largest node
    q       the greatest power of two that is <= p
    R(p)    log2 p if p = q, else log2 q + 2 = ceil(log2 p) + 1

The model leaves out the additions, and that the ranks of a node share its network card. For
CPU tensors: NCCL chooses among algorithms of its own.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Node = Hashable


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until it is done; raises RuntimeError if it failed or took too long."""


class Link(Protocol):
    """How one rank reaches the others.

    Both methods start a message and return at once; the tensor belongs to the message until
    its ``wait()`` returns. Messages between a pair arrive in the order they were sent. What
    fails raises RuntimeError, here or in ``wait()``, within a time the link bounds.
    """

    rank: int
    num_workers: int

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Begin to send a tensor to a rank."""

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """Begin to fill a tensor with what a rank sends."""


class ProcessGroupLink:
    """A link over a torch process group, whose time-out bounds every wait.

    ``tag`` keeps its messages apart from others between the same ranks of the group.
    """

    def __init__(self, process_group: Any, rank: int, num_workers: int, tag: int = 0) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._process_group = process_group
        self._tag = tag

    def send(self, tensor: Tensor, to: int) -> Any:
        """Begin to send a tensor to a rank."""
        return self._process_group.send([tensor], to, self._tag)

    def receive(self, tensor: Tensor, source: int) -> Any:
        """Begin to fill a tensor with what a rank sends."""
        return self._process_group.recv([tensor], source, self._tag)


class _Subset:
    """A link among some ranks, numbered anew by their place in ``ranks``."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(link.rank)
        self.num_workers = len(ranks)
        self._link = link
        self._ranks = ranks

    def send(self, tensor: Tensor, to: int) -> Handle:
        return self._link.send(tensor, self._ranks[to])

    def receive(self, tensor: Tensor, source: int) -> Handle:
        return self._link.receive(tensor, self._ranks[source])


@dataclass(frozen=True)
class Network:
    """What a message costs. All ranks must hold the same one, since they choose by it."""

    latency_s: float
    """Seconds before the first byte of a message between nodes: a."""
    seconds_per_byte: float
    """Seconds for each byte of it: b."""
    local_latency_s: float
    """The same inside a node: a'."""
    local_seconds_per_byte: float
    """The same inside a node: b'."""

    def message_s(self, num_bytes: float, *, local: bool) -> float:
        """Return a + S b, in seconds, for a message inside a node or between two."""
        if local:
            return self.local_latency_s + num_bytes * self.local_seconds_per_byte
        return self.latency_s + num_bytes * self.seconds_per_byte


def _exchange(link: Link, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
    # Both are started before either is waited for: a send may need its receiver to complete.
    # Both sides know the sizes, so that neither sends or waits for an empty message.
    handles = [link.receive(incoming, source)] if incoming.numel() else []
    handles += [link.send(outgoing, to)] if outgoing.numel() else []
    for handle in handles:
        handle.wait()


def ring(
    link: Link, tensor: Tensor, scratch: Tensor, *, nodes: Sequence[Node], network: Network
) -> None:
    """Sum over all ranks by a chunked ring: reduce-scatter, then all-gather.

    Every algorithm here has this signature. All ranks end with the same bits: each chunk is
    summed once, along the ring, and copied from there.

    Args:
        link: the way to the other ranks.
        tensor: shape [n], contiguous, the same n and dtype on every rank; becomes the sum.
        scratch: overwritten; same dtype, at least n elements.
        nodes, network: the node of each rank, what messages cost; only two-level looks.

    Raises:
        RuntimeError: a message failed; the tensor may be half reduced.
    """
    rank, p = link.rank, link.num_workers
    left, right = (rank - 1) % p, (rank + 1) % p
    chunks = torch.tensor_split(tensor, p)  # the last ones are empty if n < p
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

    If p is not a power of two, a rank from q on gives its tensor to rank - q and gets the
    result back at the end. The same bits everywhere, since x + y and y + x are the same bits
    (but for the payload of a NaN). Arguments and errors as in :func:`ring`.
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
    for step in _steps(q):
        _exchange(link, tensor, rank ^ step, received, rank ^ step)
        tensor.add_(received)
    if has_extra:
        link.send(tensor, rank + q).wait()


def two_level(
    link: Link, tensor: Tensor, scratch: Tensor, *, nodes: Sequence[Node], network: Network
) -> None:
    """Sum to each node's leader, all-reduce among the leaders, copy back inside the nodes.

    Inside a node by a binomial tree, among leaders by the cheaper of the other two. The same
    bits everywhere, since a node's ranks copy their leader. Arguments and errors as in
    :func:`ring`.
    """
    node, leaders = _Subset(link, _inside(nodes, link.rank)), _leaders(nodes)
    _tree_reduce(node, tensor, scratch[: tensor.numel()], torch.add)
    if link.rank in leaders:
        apart = range(len(leaders))  # to each leader a node of its own
        name, _ = choose(tensor.nbytes, apart, network, among=_FLAT)
        across = _Subset(link, leaders)
        ALGORITHMS[name].run(across, tensor, scratch, nodes=apart, network=network)
    _tree_copy(node, tensor)


def _tree_reduce(link: Link, tensor: Tensor, scratch: Tensor, combine: Callable[..., Any]) -> None:
    """Combine the tensors of all ranks into that of rank 0, spoiling those of others."""
    for step in _steps(link.num_workers):
        if link.rank & step:
            link.send(tensor, link.rank - step).wait()
            return
        if link.rank + step < link.num_workers:
            link.receive(scratch, link.rank + step).wait()
            combine(tensor, scratch, out=tensor)


def _tree_copy(link: Link, tensor: Tensor) -> None:
    """Copy the tensor of rank 0 to all ranks."""
    for step in reversed(_steps(link.num_workers)):
        place = link.rank % (2 * step)
        if place == step:
            link.receive(tensor, link.rank - step).wait()
        elif place == 0 and link.rank + step < link.num_workers:
            link.send(tensor, link.rank + step).wait()


def _steps(p: int) -> list[int]:
    """Return 1, 2, 4, ... below p: ceil(log2 p) of them."""
    return [1 << k for k in range((p - 1).bit_length())]


def _inside(nodes: Sequence[Node], rank: int) -> list[int]:
    return [r for r, node in enumerate(nodes) if node == nodes[rank]]


def _leaders(nodes: Sequence[Node]) -> list[int]:
    backwards = {node: len(nodes) - 1 - i for i, node in enumerate(reversed(nodes))}
    return sorted(backwards.values())  # of a node's ranks the lowest came last


def _rounds(p: int) -> int:
    """Return R(p), the messages of recursive doubling that follow one another."""
    return len(_steps(p)) + (1 if p & (p - 1) else 0)


def _ring_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    p = len(nodes)
    return 2 * (p - 1) * network.message_s(num_bytes / p, local=len(set(nodes)) == 1)


def _doubling_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    return _rounds(len(nodes)) * network.message_s(num_bytes, local=len(set(nodes)) == 1)


def _two_level_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    sizes = Counter(nodes)
    depth = len(_steps(max(sizes.values())))
    _, across_s = choose(num_bytes, range(len(sizes)), network, among=_FLAT)
    return 2 * depth * network.message_s(num_bytes, local=True) + across_s


@dataclass(frozen=True)
class Algorithm:
    """One row of the table: how to sum, and what it should cost."""

    run: Callable[..., None]
    """Called as :func:`ring` is."""
    predict_s: Callable[[float, Sequence[Node], Network], float]
    """The seconds for (num_bytes, nodes, network)."""


_FLAT = ("ring", "recursive-doubling")
ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(ring, _ring_s),
    "recursive-doubling": Algorithm(recursive_doubling, _doubling_s),
    "two-level": Algorithm(two_level, _two_level_s),
}


def predict_s(algorithm: str, num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    """Return the seconds an algorithm should take, by the formulas at the top.

    The ring and doubling take a', b' for a and b where all ranks are on one node.
    """
    return ALGORITHMS[algorithm].predict_s(num_bytes, nodes, network)


def choose(
    num_bytes: float, nodes: Sequence[Node], network: Network, *, among: Sequence[str] = ()
) -> tuple[str, float]:
    """Return (algorithm, predicted seconds) of the cheapest; of equals, the first.

    ``among`` holds the names to choose from, by default the whole table.
    """
    costs = {n: predict_s(n, num_bytes, nodes, network) for n in among or ALGORITHMS}
    best = min(costs, key=lambda name: costs[name])
    return best, costs[best]


def crossover_bytes(num_workers: int, network: Network) -> float:
    """Return S*, the size from which the ring is cheaper than doubling, across nodes.

    S* = a (2(p-1) - R(p)) / (b (R(p) - 2(p-1)/p)), where R(p) = log2 p for powers of two.
    Infinite for p <= 2: doubling then sends no more bytes than the ring, in fewer messages.
    """
    p, rounds = num_workers, _rounds(num_workers)
    per_byte = network.seconds_per_byte * (rounds - 2 * (p - 1) / p)
    return network.latency_s * (2 * (p - 1) - rounds) / per_byte if per_byte > 0 else math.inf


_PING_BYTES, _LOAD_BYTES = 8, 1 << 19


def measure_network(link: Link, nodes: Sequence[Node]) -> Network:
    """Measure latency and bandwidth, and return the same figures on every rank.

    All ranks call this together. The ranks of a node are a chain, and so are the leaders; on
    every line of a chain a small and a large message are exchanged, as in a round of an
    algorithm. A line's best time counts, and of all lines the slowest, which sets the pace.
    A kind of line that does not exist takes the figures of the other; for p = 1 all are 0.

    Raises:
        RuntimeError: a message failed.
    """
    across = _measure_chain(link, _leaders(nodes))
    local = _measure_chain(link, _inside(nodes, link.rank))
    figures = torch.tensor([*across, *local], dtype=torch.float64)
    _tree_reduce(link, figures, torch.empty_like(figures), torch.maximum)
    _tree_copy(link, figures)
    a, b, local_a, local_b = figures.tolist()
    return Network(a or local_a, b or local_b, local_a or a, local_b or b)


def _measure_chain(link: Link, ranks: Sequence[int]) -> tuple[float, float]:
    """Return the slower (latency, seconds per byte) of this rank's lines; (0, 0) for none."""
    if link.rank not in ranks:
        return 0.0, 0.0
    index, found = ranks.index(link.rank), [(0.0, 0.0)]
    # Lines 0-1, 2-3, ... before 1-2, 3-4, ...: so no circle of ranks waits for one another.
    for even in (True, False):
        other = index + 1 if (index % 2 == 0) == even else index - 1
        if 0 <= other < len(ranks):
            found.append(_measure_line(link, ranks[other]))
    return max(a for a, _ in found), max(b for _, b in found)


def _measure_line(link: Link, peer: int) -> tuple[float, float]:
    """Return (latency, seconds per byte) of the line to a peer, from its best exchanges."""
    outgoing = torch.zeros(_LOAD_BYTES, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)

    def exchange_s(num_bytes: int) -> float:
        start = time.perf_counter()
        _exchange(link, outgoing[:num_bytes], peer, incoming[:num_bytes], peer)
        return time.perf_counter() - start

    exchange_s(_LOAD_BYTES)  # waits for the peer to come, and warms the line
    ping_s = load_s = math.inf
    for turn in range(40):  # both sizes in turns, so that a stall does not fall on one only
        if turn % 5:
            ping_s = min(ping_s, exchange_s(_PING_BYTES))
        else:
            load_s = min(load_s, exchange_s(_LOAD_BYTES))
    # Noise may hide the difference of both sizes; no line is faster than 1 TB/s.
    return ping_s, max((load_s - ping_s) / (_LOAD_BYTES - _PING_BYTES), 1e-12)


class Reducer:
    """All-reduce of one rank, each message by the cheapest algorithm.

    Its scratch is kept and only grows, so that a training loop allocates once.

    Args:
        link: the way to the other ranks.
        nodes, network: the node of each rank, what messages cost; the same on every rank.
    """

    def __init__(self, link: Link, nodes: Sequence[Node], network: Network) -> None:
        assert len(nodes) == link.num_workers
        self.link = link
        self.nodes = tuple(nodes)
        self.network = network
        self._scratch: dict[torch.dtype, Tensor] = {}

    def allreduce(self, tensor: Tensor, *, algorithm: str | None = None) -> str:
        """Replace ``tensor``, shape [n], by its sum over all ranks; return the algorithm.

        Args:
            tensor: contiguous, the same n and dtype on every rank.
            algorithm: a name of the table, the same on every rank; None for the cheapest.

        Raises:
            RuntimeError: a message failed; the tensor may be half reduced.
        """
        name = algorithm or choose(tensor.nbytes, self.nodes, self.network)[0]
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or scratch.numel() < tensor.numel():
            scratch = self._scratch[tensor.dtype] = torch.empty_like(tensor)
        run = ALGORITHMS[name].run
        run(self.link, tensor, scratch, nodes=self.nodes, network=self.network)
        return name
