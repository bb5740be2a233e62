"""The cost of a message, and with it of each all-reduce algorithm.

A message of S bytes takes a + S b seconds, and a round of messages as long as its slowest one:

    ring                 2(p-1) (a + (S/p) b)
    recursive doubling   R(p) (a + S b)
    two-level            2 ceil(log2 m) (a' + S b') + the cheaper of both above, for L and p = L

    S, p    num_bytes of the tensor, num_workers (ranks)
    a, a'   latency_s, local_latency_s: the start of a message, across nodes or inside one
    b, b'   seconds_per_byte, local_seconds_per_byte: each byte of it, likewise
    L, m    nodes, each with a leader (its lowest rank), and ranks on the largest node
    q       the greatest power of two that is <= p
    R(p)    log2 p if p = q, else log2 q + 2 = ceil(log2 p) + 1

The model leaves out the additions, and that the ranks of a node share its network card. The
algorithms themselves are in ``collective/allreduce.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

Node = Hashable


@dataclass(frozen=True)
class Network:
    """Cost of a message. All ranks must hold the same one, since they choose by it."""

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


def doubling_steps(p: int) -> list[int]:
    """Return 1, 2, 4, ... below p: ceil(log2 p) of them."""
    return [1 << k for k in range((p - 1).bit_length())]


def _rounds(p: int) -> int:
    """Return R(p), the messages of recursive doubling that follow one another."""
    return len(doubling_steps(p)) + (1 if p & (p - 1) else 0)


def _ring_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    p = len(nodes)
    return 2 * (p - 1) * network.message_s(num_bytes / p, local=len(set(nodes)) == 1)


def _doubling_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    return _rounds(len(nodes)) * network.message_s(num_bytes, local=len(set(nodes)) == 1)


def _two_level_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    sizes = Counter(nodes)
    depth = len(doubling_steps(max(sizes.values())))
    _, across_s = choose(num_bytes, range(len(sizes)), network, among=FLAT)
    return 2 * depth * network.message_s(num_bytes, local=True) + across_s


FLAT = ("ring", "recursive-doubling")
"""The algorithms that do not look at the nodes."""

COSTS: dict[str, Callable[[float, Sequence[Node], Network], float]] = {
    "ring": _ring_s,
    "recursive-doubling": _doubling_s,
    "two-level": _two_level_s,
}
"""The seconds of each algorithm for (num_bytes, nodes, network)."""


def predict_s(algorithm: str, num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    """Return the seconds an algorithm should take, by the formulas at the top.

    The ring and doubling take a', b' for a and b where all ranks are on one node.
    """
    return COSTS[algorithm](num_bytes, nodes, network)


def choose(
    num_bytes: float, nodes: Sequence[Node], network: Network, *, among: Sequence[str] = ()
) -> tuple[str, float]:
    """Return (algorithm, predicted seconds) of the cheapest; of equals, the first.

    ``among`` holds the names to choose from, by default the whole table.
    """
    costs = {n: predict_s(n, num_bytes, nodes, network) for n in among or COSTS}
    best = min(costs, key=lambda name: costs[name])
    return best, costs[best]
