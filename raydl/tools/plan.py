"""Predicts a run before it runs: step time, communication and scaling, by formulas.

A worker repeats rounds of tau local steps and one exchange. It takes

    T = tau t + E - H          seconds for a round
    H = min(E, t) or 0         hidden behind the last gradient; 0 where nothing may overlap

and communication has the share (T - tau t) / T of its time, all waiting included. The exchange:

    sync           E = A(S, p)                          the cheapest all-reduce of ``network``
    async, hogwild E = max(2 (a + S b), p S b / k - Q)  to the center and back; its links are full
    round robin    E = p (tau t + 2 (a + S b)) - tau t  one active at a time; all others wait

    t, tau   step_s and period: seconds of a local step, local steps between exchanges
    S, p     num_bytes of a message, num_workers
    a, b     latency_s, seconds_per_byte of the network
    k        center_shards, each on a node of its own
    Q        the part of a round in which the exchange is not: (tau - 1) t where it overlaps, else
             tau t. So a round of all p workers is never shorter than p S b / k: every worker's
             weights enter the center once in it, and the center leaves once for each.
    A(S, p)  seconds of the sum; 0 for p = 1. One worker meets a center by messages all the same.

Weak scaling: the batch of each worker stays, so p workers alone would do p times the samples of
one. The efficiency is tau t / T, their share of that. Each worker is taken to be on a node of its
own, and as fast as all others. Left out: the additions at the center, the lock of ``async`` (which
is its only difference to ``hogwild``), the start of a worker, the data, and Ray's own time; and
that an exchange hides behind forward and backward alone, where H takes all of a step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from raydl.config import STRATEGIES
from raydl.config.checks import require, require_positive
from raydl.core.cost_model import Network, choose
from raydl.errors import ConfigError, UnknownNameError

LONGEST_PERIOD = 1_000_000
"""No longer period is looked for, in local steps."""


@dataclass(frozen=True, kw_only=True)
class KnownNetwork:
    """One row of the table of networks."""

    latency_s: float
    """Seconds before the first byte of a message."""
    seconds_per_byte: float
    """Seconds for each byte of it."""
    sentence: str
    """A description."""
    source: str
    """Source of the two figures."""


def _ethernet(gigabits: float, latency_s: float, source: str) -> KnownNetwork:
    """Return TCP over Ethernet: of the line's rate 94.15% are payload at MTU 1500."""
    return KnownNetwork(
        latency_s=latency_s,
        seconds_per_byte=8e-9 / (0.9415 * gigabits),
        sentence=f"Ethernet of {gigabits:g} Gbit/s, TCP",
        source=source,
    )


_SC17 = "SC17, Table 2 (from memory)"
_ASSUMED = "latency of 10gbe assumed, since TCP sets it; 94.15% of the line's rate"
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
    "1gbe": _ethernet(1, 50e-6, "latency assumed; 94.15% of the line's rate"),
    "10gbe": _ethernet(10, 20e-6, "Hurwitz and Feng 2003 (20 us); 94.15% of the line's rate"),
    "25gbe": _ethernet(25, 20e-6, _ASSUMED),
    "100gbe": _ethernet(100, 20e-6, _ASSUMED),
}
"""Networks by name; ``docs/planning.md`` says the same."""


def parse_network(text: str) -> Network:
    """Return the network of a name, or of "LATENCY_S,SECONDS_PER_BYTE".

    Raises:
        UnknownNameError: no network has that name.
        ConfigError: the two numbers are not 0 or more, or no numbers.
    """
    if "," not in text:
        if text not in NETWORKS:
            raise UnknownNameError("network", text, NETWORKS)
        known = NETWORKS[text]
        return flat_network(known.latency_s, known.seconds_per_byte)
    try:
        latency_s, seconds_per_byte = (float(part) for part in text.split(","))
    except ValueError:
        raise _bad_network(text) from None
    if not (0 <= latency_s < float("inf") and 0 <= seconds_per_byte < float("inf")):
        raise _bad_network(text)
    return flat_network(latency_s, seconds_per_byte)


def _bad_network(text: str) -> ConfigError:
    rule = "a name or LATENCY_S,SECONDS_PER_BYTE, two numbers of 0 or more as in 2e-5,8.5e-10"
    return ConfigError("network", f"must be {rule}, got {text}")


def flat_network(latency_s: float, seconds_per_byte: float) -> Network:
    """Return a network on which a message inside a node costs as much as one between two."""
    return Network(latency_s, seconds_per_byte, latency_s, seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The workload, as far as the cost depends on it.

    Raises:
        ConfigError: a value is out of range, or the schedule unknown.
    """

    strategy: str
    """Which exchanges happen when: sync, async, hogwild or round_robin."""
    period: int
    """Local steps from one exchange to the next (tau)."""
    overlaps: bool
    """An exchange is under way while the last gradient of a round is computed."""
    step_s: float
    """Seconds of one local step of one worker, no exchange in it (t)."""
    num_bytes: int
    """Bytes of one message: parameters and float buffers (S)."""
    batch_size: int = 64
    """Samples in one step of one worker."""
    center_shards: int = 1
    """Nodes that the center is spread over, for the schedules that are not sync."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UnknownNameError("strategy", self.strategy, STRATEGIES)
        require_positive("step_s", self.step_s, "a positive number of seconds")
        for name in ("period", "num_bytes", "batch_size", "center_shards"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        if self.strategy == "sync" and self.center_shards > 1:
            raise ConfigError(
                "center_shards", "has no meaning where all exchange at once: every rank keeps "
                f"the center; it must be 1, got {self.center_shards}"
            )  # fmt: skip
        if self.strategy == "round_robin" and self.overlaps:
            raise ConfigError(
                "overlaps", "has no meaning in round_robin: an exchange of the one worker that is "
                "active has no gradient to pass behind; it must be False"
            )  # fmt: skip

    @property
    def compute_s(self) -> float:
        """Seconds of the local steps of a round: tau t."""
        return self.period * self.step_s

    @property
    def hideable_s(self) -> float:
        """Seconds of an exchange that may pass behind a gradient."""
        return self.step_s if self.overlaps else 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted cost with some number of workers."""

    num_workers: int
    algorithm: str
    """The all-reduce that is cheapest, or ``center`` where workers meet the center alone."""
    step_s: float
    """Seconds from one local step to the next, exchanges spread over the steps of a round."""
    exchange_s: float
    """Seconds of one exchange, what a worker waits for others in it."""
    hidden_s: float
    """Seconds of it behind a gradient."""
    communication_share: float
    """Share of a worker's time that it does not compute, 0..1."""
    samples_per_s: float
    """Samples per second, all workers together."""
    efficiency: float
    """Weak scaling: samples per second over those of as many workers alone, 0..1."""


def predict(plan: Plan, network: Network, num_workers: int) -> Prediction:
    """Return the expected cost of a plan with p workers, by the formulas at the top.

    Raises:
        ConfigError: there is no worker.
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
    if plan.strategy == "sync":
        return choose(plan.num_bytes, range(num_workers), network)
    there_and_back_s = 2 * network.message_s(plan.num_bytes, local=False)
    if plan.strategy == "round_robin":
        turn_s = plan.compute_s + there_and_back_s
        return "center", num_workers * turn_s - plan.compute_s
    links_s = num_workers * plan.num_bytes * network.seconds_per_byte / plan.center_shards
    return "center", max(there_and_back_s, links_s - (plan.compute_s - plan.hideable_s))


def best_period(
    plan: Plan, network: Network, num_workers: int, *, target: float = 0.05
) -> int | None:
    """Return the shortest period whose communication share is at most ``target``.

    None: no period up to a million is long enough; in round robin the others' turns grow with it.

    Raises:
        ConfigError: the target is not in (0, 1), or there is no worker.
    """
    require(0 < target < 1, "target", "in (0, 1)", target)

    def is_enough(period: int) -> bool:
        longer = dataclasses.replace(plan, period=period)
        return predict(longer, network, num_workers).communication_share <= target

    if not is_enough(LONGEST_PERIOD):
        return None
    low, high = 0, LONGEST_PERIOD  # the share falls with the period: not enough, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def doublings(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low, ... below high, and high.

    Raises:
        ConfigError: they are not 1 <= low <= high.
    """
    require(1 <= low <= high, "workers", "FROM:TO with 1 <= FROM <= TO", f"{low}:{high}")
    counts = [low << k for k in range((high // low).bit_length()) if low << k < high]
    return [*counts, high]
