"""Predicts the step time, communication share and scaling of a run from formulas.

A worker repeats rounds of tau local steps and one exchange. With E the seconds of an exchange and
H its part that overlaps the last gradient, a round takes

    T = tau t + E - H          seconds
    H = min(E, t) or 0         0 where exchanges do not overlap

The communication share, all waiting included, is (T - tau t) / T. An exchange takes

    sync           E = A(S, p)                          the cheapest all-reduce
    sync, gathered E = (p - 1) (a + S b)                each rank receives all messages, as
                                                        compressed ones
    async, hogwild E = max(2 (a + S b), p S b / k - Q)  the round trip, or the center's full links
    round robin    E = p (tau t + 2 (a + S b)) - tau t  one worker is active, all others wait

    t, tau   step_s and period: seconds of a local step, local steps between exchanges
    S, p     num_bytes of a message, num_workers
    a, b     latency_s, seconds_per_byte of the network
    k        center_shards, each on its own node
    Q        seconds of a round in which a worker does not exchange: (tau - 1) t with overlap, else
             tau t. Each round brings the weights of all p workers into the center and the center
             back to each, so no round is shorter than p S b / k.
    A(S, p)  seconds of the all-reduce (``core/cost_model.py``); 0 for p = 1. The other strategies
             exchange with the center even if p = 1.

Efficiency is that of weak scaling (the batch per worker is constant): the samples per second of p
workers divided by p times those of one worker that does not communicate, which is tau t / T. The
model assumes one worker per node and equal speed of all workers. It leaves out the additions at
the center, the lock of ``async`` (so ``async`` costs as much as ``hogwild``), the start of workers,
the data, and Ray's overhead. With overlap, H may take all of t, although a real exchange overlaps
only forward and backward.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from raydl.config import STRATEGIES
from raydl.config.checks import require, require_positive
from raydl.core.cost_model import Network, choose
from raydl.errors import UnknownNameError

LONGEST_PERIOD = 1_000_000
"""The longest period that ``best_period`` tries, in local steps."""


@dataclass(frozen=True, kw_only=True)
class KnownNetwork:
    """One row of the table of networks."""

    latency_s: float
    """Seconds before the first byte of a message."""
    seconds_per_byte: float
    """Seconds per byte of a message."""
    sentence: str
    """A description of the hardware."""
    source: str
    """Where the two figures come from."""


def _ethernet(gigabits: float, latency_s: float, source: str) -> KnownNetwork:
    """Return TCP over Ethernet; 94.15% of the line rate is payload at MTU 1500."""
    return KnownNetwork(
        latency_s=latency_s,
        seconds_per_byte=8e-9 / (0.9415 * gigabits),
        sentence=f"Ethernet of {gigabits:g} Gbit/s, TCP",
        source=source,
    )


_SC17 = "SC17, Table 2 (from memory)"
_ASSUMED = "latency of 10gbe assumed, since TCP sets it; 94.15% of the line rate"
NETWORKS: dict[str, KnownNetwork] = {
    "fdr": KnownNetwork(
        latency_s=0.7e-6,
        seconds_per_byte=0.2e-9,
        sentence="Mellanox FDR InfiniBand of 56 Gbit/s",
        source=_SC17,
    ),
    "qdr": KnownNetwork(
        latency_s=1.2e-6,
        seconds_per_byte=0.3e-9,
        sentence="Intel QDR InfiniBand of 40 Gbit/s",
        source=_SC17,
    ),
    "10gbe-iwarp": KnownNetwork(
        latency_s=7.2e-6,
        seconds_per_byte=0.9e-9,
        sentence="Intel NetEffect NE020: Ethernet of 10 Gbit/s, RDMA",
        source=_SC17,
    ),
    "100mbe": _ethernet(0.1, 200e-6, "latency assumed; 94.15% of the line rate"),
    "1gbe": _ethernet(1, 50e-6, "latency assumed; 94.15% of the line rate"),
    "10gbe": _ethernet(10, 20e-6, "Hurwitz and Feng 2003 (20 us); 94.15% of the line rate"),
    "25gbe": _ethernet(25, 20e-6, _ASSUMED),
    "100gbe": _ethernet(100, 20e-6, _ASSUMED),
}
"""Networks by name; ``docs/planning_in_detail.md`` has the same table."""


def parse_network(text: str) -> Network:
    """Return the network with a name, or the one of "LATENCY_S,SECONDS_PER_BYTE".

    Raises:
        UnknownNameError: if no network has that name.
        ConfigError: if the text is not two finite numbers of 0 or more.
    """
    if "," not in text:
        if text not in NETWORKS:
            raise UnknownNameError("network", text, NETWORKS)
        known = NETWORKS[text]
        return flat_network(known.latency_s, known.seconds_per_byte)
    try:
        figures = [float(part) for part in text.split(",")]
    except ValueError:
        figures = []
    rule = "a name or LATENCY_S,SECONDS_PER_BYTE, two numbers of 0 or more as in 2e-5,8.5e-10"
    is_valid = len(figures) == 2 and all(0 <= figure < float("inf") for figure in figures)
    require(is_valid, "network", rule, text)
    return flat_network(*figures)


def flat_network(latency_s: float, seconds_per_byte: float) -> Network:
    """Return a network whose messages cost the same inside a node and between nodes."""
    return Network(latency_s, seconds_per_byte, latency_s, seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The inputs of the formulas.

    Raises:
        ConfigError: if a value is out of range.
        UnknownNameError: if no strategy has that name.
    """

    strategy: str
    """Which exchanges happen when: sync, async, hogwild or round_robin."""
    period: int
    """Local steps from one exchange to the next (tau)."""
    overlaps: bool
    """Whether an exchange overlaps the last gradient of its round."""
    step_s: float
    """Seconds of one local step of one worker, without an exchange (t)."""
    num_bytes: int
    """Bytes of one message: parameters and float buffers (S)."""
    batch_size: int = 64
    """Samples in one step of one worker."""
    center_shards: int = 1
    """Nodes that share the center; must be 1 for sync."""
    is_gathered: bool = False
    """Whether each rank of a synchronous method receives all messages."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UnknownNameError("strategy", self.strategy, STRATEGIES)
        require_positive("step_s", self.step_s, "a positive number of seconds")
        for name in ("period", "num_bytes", "batch_size", "center_shards"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        if self.strategy == "sync":
            rule = "1 with the strategy sync, where every rank keeps the center"
            require(self.center_shards == 1, "center_shards", rule, self.center_shards)
        if self.strategy == "round_robin":
            rule = "False with the strategy round_robin, where only one worker is active"
            require(not self.overlaps, "overlaps", rule, self.overlaps)

    @property
    def compute_s(self) -> float:
        """Seconds of the local steps of a round: tau t."""
        return self.period * self.step_s

    @property
    def hideable_s(self) -> float:
        """Seconds of an exchange that can overlap a gradient."""
        return self.step_s if self.overlaps else 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted cost for one number of workers."""

    num_workers: int
    algorithm: str
    """The cheapest all-reduce, ``gather``, or ``center`` if each worker exchanges with the center
    alone."""
    step_s: float
    """Seconds of a round divided by its local steps."""
    exchange_s: float
    """Seconds of one exchange, including the wait for other workers."""
    hidden_s: float
    """Seconds of an exchange that overlap a gradient."""
    communication_share: float
    """Share of a worker's time in which it does not compute, 0..1."""
    samples_per_s: float
    """Samples per second of all workers together."""
    efficiency: float
    """Weak-scaling efficiency, 0..1."""


def predict(plan: Plan, network: Network, num_workers: int) -> Prediction:
    """Return the expected cost of a plan, by the formulas of the module's docstring.

    Raises:
        ConfigError: if ``num_workers`` is less than 1.
    """
    require(num_workers >= 1, "workers", "1 or more", num_workers)
    algorithm, exchange_s = _exchange_s(plan, network, num_workers)
    hidden_s = min(exchange_s, plan.hideable_s)
    waited_s = exchange_s - hidden_s
    round_s = plan.compute_s + waited_s
    return Prediction(
        num_workers=num_workers,
        algorithm=algorithm,
        step_s=round_s / plan.period,
        exchange_s=exchange_s,
        hidden_s=hidden_s,
        communication_share=waited_s / round_s,
        samples_per_s=num_workers * plan.batch_size * plan.period / round_s,
        efficiency=plan.compute_s / round_s,
    )


def _exchange_s(plan: Plan, network: Network, num_workers: int) -> tuple[str, float]:
    """Return (algorithm, E)."""
    if plan.strategy == "sync" and plan.is_gathered:
        return "gather", (num_workers - 1) * network.message_s(plan.num_bytes, local=False)
    if plan.strategy == "sync":
        return choose(plan.num_bytes, range(num_workers), network)
    round_trip_s = 2 * network.message_s(plan.num_bytes, local=False)
    if plan.strategy == "round_robin":
        turn_s = plan.compute_s + round_trip_s
        return "center", num_workers * turn_s - plan.compute_s
    links_s = num_workers * plan.num_bytes * network.seconds_per_byte / plan.center_shards
    return "center", max(round_trip_s, links_s - (plan.compute_s - plan.hideable_s))


def best_period(
    plan: Plan, network: Network, num_workers: int, *, target: float = 0.05
) -> int | None:
    """Return the shortest period whose communication share is at most ``target``.

    Return None if no period up to a million is long enough: in round robin the turns of the other
    workers grow with the period.

    Raises:
        ConfigError: if the target is not in (0, 1), or ``num_workers`` is less than 1.
    """
    require(0 < target < 1, "target", "in (0, 1)", target)

    def is_enough(period: int) -> bool:
        longer = dataclasses.replace(plan, period=period)
        return predict(longer, network, num_workers).communication_share <= target

    if not is_enough(LONGEST_PERIOD):
        return None
    low, high = 0, LONGEST_PERIOD  # the share falls with the period: low is too short, high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def doublings(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low, ... below high, and high itself.

    Raises:
        ConfigError: if not 1 <= low <= high.
    """
    require(1 <= low <= high, "workers", "FROM:TO with 1 <= FROM <= TO", f"{low}:{high}")
    counts = [low << k for k in range((high // low).bit_length()) if low << k < high]
    return [*counts, high]
