"""Predicts goodput, time and cost of a run whose machines are preempted.

Preemptions are drawn at random, from a seed: each machine that is up is preempted at a constant
rate, and its replacement is up ``replace_s`` seconds later. Both kinds of training get the same
preemptions.

- **elastic**: the run's own controller decides, over simulated workers in simulated time
  (``tools/simulated_group.py``). Workers train on while others are lost or join.
- **restarts**: a fixed number of workers. A preemption stops them all. They continue from the
  newest checkpoint, ``restart_s`` after all machines are up again.

The goodput is the number of counted samples, relative to the same workers without preemptions.
Samples that are thrown away do not count. The model leaves out: the loss of the machine with the
driver and the center, which should not be a spot machine; losses without any sign, which are only
noticed after ``elastic.lease_s``; and the price of data transfer and of storage.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raydl.config.checks import require, require_positive

_NUM_PREEMPTIONS = 200
"""Preemptions of a simulation, on average: their spread is then 7% of the lost goodput."""
_SHORTEST_S, _LONGEST_S = 1800.0, 14 * 86400.0
"""Least and greatest simulated time, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The workers of a run and their machines, all of which are up at first.

    The defaults of the durations were measured on two cores with LeNet; see ``docs/planning.md``.

    Raises:
        ConfigError: if a value is out of range.
    """

    num_workers: int
    """The most workers that train."""
    min_workers: int = 1
    """The fewest workers that train."""
    spares: int = 0
    """Hot spares, which share the machines of the workers."""
    workers_per_machine: int = 1
    replace_s: float = 120.0
    """Seconds from a notice, or else from the preemption, until a machine is replaced; 0: the
    machine stays, and one process on it is lost."""
    notice_s: float = 0.0
    """Seconds of notice before a machine is preempted; its replacement is ordered then."""
    start_s: float = 4.0
    """Seconds from a free place on a machine until a worker has started."""
    start_load: float = 0.65
    """Share of a core that a worker uses while it starts."""
    join_s: float = 0.1
    """Seconds from a new membership until its members train."""
    detect_s: float = 0.1
    """Seconds until a loss is noticed, and until the survivors have left a failed exchange."""
    handover_s: float = 0.5
    """Seconds to save a leaver's replica, and to load it."""

    def __post_init__(self) -> None:
        low, high = self.min_workers, self.num_workers
        require(1 <= low <= high, "min_workers", f"in 1..{high}", low)
        require(self.spares >= 0, "spares", "0 or more", self.spares)
        per_machine = self.workers_per_machine
        require(per_machine >= 1, "workers_per_machine", "1 or more", per_machine)
        for name in ("replace_s", "notice_s", "join_s", "detect_s", "handover_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, "a number of seconds, 0 or more", value)
        require_positive("start_s", self.start_s, "a positive number of seconds")
        require(0 <= self.start_load <= 1, "start_load", "in 0..1", self.start_load)

    @property
    def absent_s(self) -> float:
        """Seconds that a preempted machine is missing."""
        return max(0.0, self.replace_s - self.notice_s)

    @property
    def num_machines(self) -> int:
        """The machines that the workers need."""
        return math.ceil(self.num_workers / self.workers_per_machine)


@dataclass(frozen=True, order=True)
class Preemption:
    """A machine is taken away, or loses a process if the machines of the fleet stay."""

    at_s: float
    machine: int
    """The machine, or the one that has replaced it since, by its place in the fleet."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """The durations of training that restarts from checkpoints.

    Raises:
        ConfigError: if a value is out of range.
    """

    checkpoint_s: float | None = None
    """Seconds of training between two checkpoints; None: the best, by Young (CACM 1974)."""
    write_s: float = 1.0
    """Seconds that the training stands still for a checkpoint."""
    restart_s: float = 10.0
    """Seconds from all machines being up until the workers train again."""

    def __post_init__(self) -> None:
        if self.checkpoint_s is not None:
            require_positive("checkpoint_s", self.checkpoint_s, "a positive number of seconds")
        require_positive("write_s", self.write_s, "a positive number of seconds")
        require(0 <= self.restart_s < math.inf, "restart_s", "0 or more", self.restart_s)

    def interval_s(self, between_s: float) -> float:
        """Return the seconds of training between two checkpoints.

        Args:
            between_s: mean seconds between two preemptions; infinite if there are none.
        """
        if self.checkpoint_s is not None:
            return self.checkpoint_s
        return math.sqrt(2 * self.write_s * between_s)


@dataclass(frozen=True, kw_only=True)
class SpotPrediction:
    """The prediction for one kind of training on machines that are preempted."""

    goodput: float
    """Counted samples, relative to the same workers without preemptions."""
    samples_per_s: float
    """Counted samples per second of all workers together."""
    num_machines: float
    """Machines that are up, and paid for, on average."""

    @classmethod
    def of(cls, samples_per_s: float, *, full_speed: float, num_machines: float) -> SpotPrediction:
        """Return a prediction.

        Args:
            samples_per_s: counted samples per second.
            full_speed: samples per second without preemptions.
            num_machines: machines that are up, on average.
        """
        goodput = samples_per_s / full_speed
        return cls(goodput=goodput, samples_per_s=samples_per_s, num_machines=num_machines)

    def hours(self, num_samples: int) -> float:
        """Return the hours until so many samples have counted; infinite if none do."""
        return num_samples / self.samples_per_s / 3600 if self.samples_per_s else math.inf

    def cost(self, num_samples: int, price: float) -> float:
        """Return the cost until so many samples have counted, at a price per machine-hour."""
        return self.hours(num_samples) * self.num_machines * price


def simulated_s(fleet: Fleet, preemptions_per_hour: float) -> float:
    """Return the seconds to simulate: long enough for 200 preemptions, if that is at most 14 days.

    Args:
        fleet: the machines.
        preemptions_per_hour: preemptions of one machine per hour that it is up.
    """
    per_s = preemptions_per_hour * fleet.num_machines / 3600
    wanted_s = _NUM_PREEMPTIONS / per_s if per_s > 0 else 0.0
    return min(max(wanted_s, _SHORTEST_S), _LONGEST_S)


def draw_preemptions(
    fleet: Fleet, preemptions_per_hour: float, *, until_s: float, seed: int
) -> list[Preemption]:
    """Return random preemptions in the order of time: in each hour that it is up, a machine has
    ``preemptions_per_hour`` of them on average.

    Raises:
        ConfigError: if the rate is negative or not finite.
    """
    is_rate = 0 <= preemptions_per_hour < math.inf
    require(is_rate, "preemptions", "0 or more per machine and hour", preemptions_per_hour)
    generator, drawn = random.Random(seed), []
    for machine in range(fleet.num_machines if preemptions_per_hour else 0):
        at_s = 0.0
        while (at_s := at_s + generator.expovariate(preemptions_per_hour / 3600)) < until_s:
            drawn.append(Preemption(at_s, machine))
            at_s += fleet.absent_s
    return sorted(drawn)


def predict_restarts(
    fleet: Fleet,
    preemptions: Sequence[Preemption],
    *,
    restarts: Restarts,
    speed: Callable[[int], float],
    until_s: float,
) -> SpotPrediction:
    """Return the prediction for training that restarts from checkpoints.

    Args:
        fleet: workers and machines.
        preemptions: preemptions in the order of time.
        restarts: durations of checkpoints and restarts.
        speed: samples per second by number of workers.
        until_s: seconds to predict.
    """
    interval_s = restarts.interval_s(until_s / len(preemptions) if preemptions else math.inf)
    cycle_s = interval_s + restarts.write_s
    trained_s, begun_s, absent_s = 0.0, 0.0, 0.0
    for preemption in preemptions:
        back_s = preemption.at_s + fleet.absent_s
        absent_s += min(back_s, until_s) - preemption.at_s
        if preemption.at_s > begun_s:
            trained_s += (preemption.at_s - begun_s) // cycle_s * interval_s
        begun_s = max(begun_s, back_s + restarts.restart_s)
    share = interval_s / cycle_s if interval_s < math.inf else 1.0
    trained_s += max(0.0, until_s - begun_s) * share
    full_speed = speed(fleet.num_workers)
    return SpotPrediction.of(
        trained_s / until_s * full_speed,
        full_speed=full_speed,
        num_machines=fleet.num_machines - absent_s / until_s,
    )
