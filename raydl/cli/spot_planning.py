"""The part of ``raydl plan`` for machines that are preempted: ``--preemptions``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydl.cli.options import print_table
from raydl.config.checks import require
from raydl.core.cost_model import Network
from raydl.errors import ConfigError
from raydl.text import seconds_text
from raydl.tools.plan import Plan, Prediction, predict

if TYPE_CHECKING:
    from raydl.tools.simulated_group import Fleet
    from raydl.tools.spot import Outlook, Restarts


@dataclasses.dataclass(frozen=True)
class SpotOptions:
    """Machines that are preempted, and what losses and restarts take."""

    min_workers: int = 1
    """Fewest workers that train on when others are lost."""
    workers_per_machine: int = 1
    """Workers on one machine; a preemption loses them all."""
    replace_s: float = 120.0
    """Seconds until a preempted machine is replaced; 0: the machine stays, a process is lost."""
    notice_s: float = 0.0
    """Seconds of notice before a preemption."""
    start_s: float = 4.0
    """Seconds in which a worker starts on a machine that is up."""
    checkpoint_s: float | None = None
    """Seconds between two checkpoints of training that restarts; unset: the best interval."""
    write_s: float = 1.0
    """Seconds that training which restarts stands still for a checkpoint."""
    restart_s: float = 10.0
    """Seconds of such a restart, once all machines are up."""
    seed: int = 0
    """Seed of the preemptions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of one machine for an hour, in any currency.

    Args:
        spot: prices of a spot machine, one per hour of the run; they repeat in a longer run.
        on_demand: price of a machine that is not preempted; None: not known.
    """

    spot: tuple[float, ...]
    on_demand: float | None = None

    def mean_spot(self, hours: float) -> float:
        """Return the mean price of a spot machine over a number of hours."""
        if not 0 < hours < math.inf:
            return self.spot[0]
        rounds, rest = divmod(hours, len(self.spot))
        last = sum(price * min(1.0, max(0.0, rest - hour)) for hour, price in enumerate(self.spot))
        return (rounds * sum(self.spot) + last) / hours


def read_prices(path: str) -> Prices:
    """Return the prices of a JSON file: ``{"spot": 0.31, "on_demand": 1.01}``.

    ``spot`` may be a list of prices, one per hour.

    Raises:
        ConfigError: if the file cannot be read, or is not of this form.
    """
    try:
        given: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("price", f"{path} cannot be read as JSON: {error}") from error
    rule = 'must hold {"spot": PRICE, or a list of one per hour, "on_demand": PRICE}'
    if not isinstance(given, dict) or set(given) - {"on_demand"} != {"spot"}:
        raise ConfigError("price", f"{path} {rule}")
    spot = given["spot"] if isinstance(given["spot"], list) else [given["spot"]]
    on_demand = given.get("on_demand")
    prices = spot if on_demand is None else [*spot, on_demand]
    if not spot or not all(_is_price(price) for price in prices):
        raise ConfigError("price", f"{path} {rule}, each a number of 0 or more")
    return Prices(spot=tuple(map(float, spot)), on_demand=on_demand)


def _is_price(price: Any) -> bool:
    is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
    return is_number and 0 <= price < math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpotCost:
    """What to expect of one number of workers on machines that are preempted."""

    num_workers: int
    hours: float
    """Simulated hours."""
    num_preemptions: int
    outlooks: dict[str, Outlook]
    """By kind of training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The request: the rate of preemptions, and what the run is.

    Raises:
        ConfigError: if a value is out of range, or prices are given without a number of samples.
    """

    preemptions: float
    spares: int
    options: SpotOptions
    num_samples: int | None
    prices: Prices | None

    def __post_init__(self) -> None:
        is_rate = 0 <= self.preemptions < math.inf
        require(is_rate, "preemptions", "0 or more per machine and hour", self.preemptions)
        min_workers = self.options.min_workers
        require(min_workers >= 1, "min_workers", "1 or more", min_workers)
        self.fleet(min_workers)
        self.restarts()
        if self.num_samples is not None:
            require(self.num_samples >= 1, "samples", "1 or more", self.num_samples)
        elif self.prices is not None:
            raise ConfigError("price", "needs --samples: the cost is that of a whole run")

    def fleet(self, num_workers: int) -> Fleet:
        """Return the machines for a number of workers."""
        from raydl.tools.simulated_group import Fleet  # imports torch

        options = self.options
        return Fleet(
            num_workers=num_workers,
            min_workers=min(options.min_workers, num_workers),
            spares=self.spares,
            workers_per_machine=options.workers_per_machine,
            replace_s=options.replace_s,
            notice_s=options.notice_s,
            start_s=options.start_s,
        )

    def restarts(self) -> Restarts:
        """Return the durations of training that restarts."""
        from raydl.tools.spot import Restarts  # imports torch

        options = self.options
        return Restarts(
            checkpoint_s=options.checkpoint_s, write_s=options.write_s, restart_s=options.restart_s
        )

    def cost(self, method: str, plan: Plan, network: Network, prediction: Prediction) -> SpotCost:
        """Return what to expect of a method with the number of workers of a prediction."""
        from raydl.tools import spot  # imports torch

        num_workers = prediction.num_workers
        fleet = self.fleet(num_workers)
        until_s = spot.simulated_s(fleet, self.preemptions)
        preemptions = spot.draw_preemptions(
            fleet, self.preemptions, until_s=until_s, seed=self.options.seed
        )

        def speed(count: int) -> float:
            return predict(plan, network, count).samples_per_s

        elastic = spot.elastic_outlook(
            fleet, preemptions, method=method, speed=speed,
            round_s=plan.period * prediction.step_s, until_s=until_s,
        )  # fmt: skip
        restarts = spot.restarts_outlook(
            fleet, preemptions, restarts=self.restarts(), speed=speed, until_s=until_s
        )
        quiet = spot.Outlook(
            goodput=1.0,
            samples_per_s=prediction.samples_per_s,
            num_machines=float(fleet.num_machines),
        )
        return SpotCost(
            num_workers=num_workers,
            hours=until_s / 3600,
            num_preemptions=len(preemptions),
            outlooks={"elastic": elastic, "restarts": restarts, "on demand": quiet},
        )

    def whole_run(self, training: str, outlook: Outlook) -> tuple[float | None, float | None]:
        """Return the hours and the cost of the whole run, each None if it is not known.

        Args:
            training: kind of training.
            outlook: what to expect of it.
        """
        if self.num_samples is None or not outlook.samples_per_s:
            return None, None
        hours = outlook.hours(self.num_samples)
        if self.prices is None:
            return hours, None
        is_spot = training != "on demand"
        price = self.prices.mean_spot(hours) if is_spot else self.prices.on_demand
        return hours, None if price is None else outlook.cost(self.num_samples, price)

    def as_dict(self, cost: SpotCost) -> dict[str, Any]:
        """Return what to expect as nested plain values, for JSON."""
        rows = {}
        for training, outlook in cost.outlooks.items():
            hours, price = self.whole_run(training, outlook)
            rows[training] = {**dataclasses.asdict(outlook), "hours": hours, "cost": price}
        return {
            "num_workers": cost.num_workers,
            "simulated_hours": cost.hours,
            "num_preemptions": cost.num_preemptions,
            "training": rows,
        }

    def print(self, costs: Sequence[SpotCost]) -> None:
        """Print a table of what to expect."""
        options = self.options
        machine = (
            f"replaced after {seconds_text(options.replace_s)}"
            if options.replace_s
            else "which stays: one of its processes is lost"
        )
        simulated = ", ".join(
            f"{cost.num_workers:,}: {cost.num_preemptions} in {cost.hours:,.3g} h" for cost in costs
        )
        print(
            f"\non machines with {self.preemptions:g} preemptions per hour each, {machine}\n"
            f"preemptions simulated, by workers: {simulated} (seed {options.seed})"
        )
        head = ["workers", "training", "goodput", "samples/s", "machines"]
        head += ["hours"] if self.num_samples is not None else []
        head += ["cost"] if self.prices is not None else []
        rows = [
            [f"{cost.num_workers:,}", *self._row(training, outlook)]
            for cost in costs
            for training, outlook in cost.outlooks.items()
        ]
        print_table(head, rows, numbers=[name for name in head if name != "training"])
        at = "at the best interval"
        if options.checkpoint_s is not None:
            at = f"every {options.checkpoint_s:g} s"
        print(
            f"elastic: at least {options.min_workers} train on while others are replaced\n"
            f"restarts: all stop, and start again from a checkpoint ({at})\n"
            f"on demand: the same machines, not preempted"
        )

    def _row(self, training: str, outlook: Outlook) -> list[str]:
        hours, cost = self.whole_run(training, outlook)
        row = [
            training, f"{outlook.goodput:.1%}", f"{outlook.samples_per_s:,.0f}",
            f"{outlook.num_machines:,.1f}",
        ]  # fmt: skip
        if self.num_samples is not None:
            row.append("never" if hours is None else f"{hours:,.1f}")
        if self.prices is not None:
            row.append("-" if cost is None else f"{cost:,.2f}")
        return row
