"""Cost of a message, and of each all-reduce algorithm.

A message of S bytes takes a + S b seconds. A round of messages takes as long as its slowest one:

    ring                 2(p-1) (a + (S/p) b)
    recursive doubling   R(p) (a + S b)
    two-level            2 ceil(log2 m) (a' + S b') + the cheaper of the two above with p = L

    S, p    num_bytes of the tensor, num_workers (ranks)
    a, a'   latency_s, local_latency_s: latency of a message between nodes, within a node
    b, b'   seconds_per_byte, local_seconds_per_byte: time per byte between nodes, within a node
    L, m    nodes, each with a leader (its lowest rank), and ranks on the largest node
    q       largest power of two that is <= p
    R(p)    log2 p if p = q, else log2 q + 2 = ceil(log2 p) + 1

The model ignores the additions, and that the ranks of a node share its network card. The
algorithms are in ``collective/allreduce.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

Node = Hashable


@dataclass(frozen=True)
class Network:
    """Cost of a message. All ranks must hold the same values, so that they choose the same."""

    latency_s: float
    """Seconds before the first byte of a message between nodes: a."""
    seconds_per_byte: float
    """Seconds per byte of a message between nodes: b."""
    local_latency_s: float
    """Seconds before the first byte of a message within a node: a'."""
    local_seconds_per_byte: float
    """Seconds per byte of a message within a node: b'."""

    def message_s(self, num_bytes: float, *, local: bool) -> float:
        """Return a + S b, in seconds, for a message within a node or between two."""
        if local:
            return self.local_latency_s + num_bytes * self.local_seconds_per_byte
        return self.latency_s + num_bytes * self.seconds_per_byte


def doubling_steps(p: int) -> list[int]:
    """Return the ceil(log2 p) powers of two below p: 1, 2, 4, ..."""
    return [1 << k for k in range((p - 1).bit_length())]


def _ring_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    p = len(nodes)
    return 2 * (p - 1) * network.message_s(num_bytes / p, local=len(set(nodes)) == 1)


def _doubling_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    p = len(nodes)
    num_messages = len(doubling_steps(p)) + (1 if p & (p - 1) else 0)  # R(p)
    return num_messages * network.message_s(num_bytes, local=len(set(nodes)) == 1)


def _two_level_s(num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    sizes = Counter(nodes)
    depth = len(doubling_steps(max(sizes.values())))
    _, across_s = choose(num_bytes, range(len(sizes)), network, among=FLAT)
    return 2 * depth * network.message_s(num_bytes, local=True) + across_s


FLAT = ("ring", "recursive-doubling")
"""Algorithms that ignore the placement of ranks on nodes."""

COSTS: dict[str, Callable[[float, Sequence[Node], Network], float]] = {
    "ring": _ring_s,
    "recursive-doubling": _doubling_s,
    "two-level": _two_level_s,
}
"""Seconds that each algorithm takes, for (num_bytes, nodes, network)."""


def predict_s(algorithm: str, num_bytes: float, nodes: Sequence[Node], network: Network) -> float:
    """Return the seconds that an algorithm takes by the formulas of this module.

    If all ranks are on one node, the ring and recursive doubling use a', b' for a, b.
    """
    return COSTS[algorithm](num_bytes, nodes, network)


def choose(
    num_bytes: float, nodes: Sequence[Node], network: Network, *, among: Sequence[str] = ()
) -> tuple[str, float]:
    """Return the cheapest algorithm and its predicted seconds; the first of several equal ones.

    Args:
        num_bytes: bytes of the tensor.
        nodes: node of each rank.
        network: cost of a message.
        among: names to choose from, by default all.
    """
    costs = {n: predict_s(n, num_bytes, nodes, network) for n in among or COSTS}
    best = min(costs, key=lambda name: costs[name])
    return best, costs[best]
