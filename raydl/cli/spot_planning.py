"""The part of ``raydl plan`` for machines that are preempted: ``--preemptions``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydl.cli.options import print_table
from raydl.config.checks import require
from raydl.core.cost_model import Network
from raydl.errors import ConfigError
from raydl.text.formatting import seconds_text
from raydl.tools.plan import Plan, Prediction, predict
from raydl.tools.spot import (
    Fleet,
    Restarts,
    SpotPrediction,
    draw_preemptions,
    predict_restarts,
    simulated_s,
)


@dataclasses.dataclass(frozen=True)
class SpotOptions:
    """Machines that are preempted, and what losses and restarts take."""

    min_workers: int = Fleet.min_workers
    """Fewest workers that train on when others are lost."""
    workers_per_machine: int = Fleet.workers_per_machine
    """Workers on one machine; a preemption loses them all."""
    replace_s: float = Fleet.replace_s
    """Seconds until a preempted machine is replaced; 0: the machine stays, a process is lost."""
    notice_s: float = Fleet.notice_s
    """Seconds of notice before a preemption."""
    start_s: float = Fleet.start_s
    """Seconds in which a worker starts on a machine that is up."""
    checkpoint_s: float | None = None
    """Seconds between two checkpoints of training that restarts; unset: the best interval."""
    write_s: float = Restarts.write_s
    """Seconds that training which restarts stands still for a checkpoint."""
    restart_s: float = Restarts.restart_s
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
class FleetPrediction:
    """The predictions for one number of workers on machines that are preempted."""

    num_workers: int
    hours: float
    """Simulated hours."""
    num_preemptions: int
    predictions: dict[str, SpotPrediction]
    """By kind of training: elastic, restarts, on demand."""


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
        options = self.options
        return Restarts(
            checkpoint_s=options.checkpoint_s, write_s=options.write_s, restart_s=options.restart_s
        )

    def predict(
        self, method: str, plan: Plan, network: Network, prediction: Prediction
    ) -> FleetPrediction:
        """Return the predictions for a method, with the number of workers of a prediction."""
        from raydl.tools.simulated_group import simulate  # imports torch

        num_workers = prediction.num_workers
        fleet = self.fleet(num_workers)
        until_s = simulated_s(fleet, self.preemptions)
        preemptions = draw_preemptions(
            fleet, self.preemptions, until_s=until_s, seed=self.options.seed
        )

        def speed(count: int) -> float:
            return predict(plan, network, count).samples_per_s

        elastic = simulate(
            fleet, preemptions, method=method, speed=speed,
            round_s=plan.period * prediction.step_s, until_s=until_s,
        )  # fmt: skip
        restarts = predict_restarts(
            fleet, preemptions, restarts=self.restarts(), speed=speed, until_s=until_s
        )
        quiet = SpotPrediction.of(
            prediction.samples_per_s,
            full_speed=prediction.samples_per_s,
            num_machines=float(fleet.num_machines),
        )
        return FleetPrediction(
            num_workers=num_workers,
            hours=until_s / 3600,
            num_preemptions=len(preemptions),
            predictions={"elastic": elastic.prediction, "restarts": restarts, "on demand": quiet},
        )

    def whole_run(
        self, training: str, prediction: SpotPrediction
    ) -> tuple[float | None, float | None]:
        """Return the hours and the cost of the whole run, each None if it is not known.

        Args:
            training: kind of training.
            prediction: the prediction for it.
        """
        if self.num_samples is None or not prediction.samples_per_s:
            return None, None
        hours = prediction.hours(self.num_samples)
        if self.prices is None:
            return hours, None
        is_spot = training != "on demand"
        price = self.prices.mean_spot(hours) if is_spot else self.prices.on_demand
        return hours, None if price is None else prediction.cost(self.num_samples, price)

    def as_dict(self, fleet: FleetPrediction) -> dict[str, Any]:
        """Return the predictions as nested plain values, for JSON."""
        rows = {}
        for training, prediction in fleet.predictions.items():
            hours, price = self.whole_run(training, prediction)
            rows[training] = {**dataclasses.asdict(prediction), "hours": hours, "cost": price}
        return {
            "num_workers": fleet.num_workers,
            "simulated_hours": fleet.hours,
            "num_preemptions": fleet.num_preemptions,
            "training": rows,
        }

    def print(self, fleets: Sequence[FleetPrediction]) -> None:
        """Print the predictions as a table."""
        options = self.options
        machine = (
            f"replaced after {seconds_text(options.replace_s)}"
            if options.replace_s
            else "which stays: one of its processes is lost"
        )
        simulated = ", ".join(
            f"{fleet.num_workers:,}: {fleet.num_preemptions} in {fleet.hours:,.3g} h"
            for fleet in fleets
        )
        print(
            f"\non machines with {self.preemptions:g} preemptions per hour each, {machine}\n"
            f"preemptions simulated, by workers: {simulated} (seed {options.seed})"
        )
        head = ["workers", "training", "goodput", "samples/s", "machines"]
        head += ["hours"] if self.num_samples is not None else []
        head += ["cost"] if self.prices is not None else []
        rows = [
            [f"{fleet.num_workers:,}", *self._row(training, prediction)]
            for fleet in fleets
            for training, prediction in fleet.predictions.items()
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

    def _row(self, training: str, prediction: SpotPrediction) -> list[str]:
        hours, cost = self.whole_run(training, prediction)
        row = [
            training, f"{prediction.goodput:.1%}", f"{prediction.samples_per_s:,.0f}",
            f"{prediction.num_machines:,.1f}",
        ]  # fmt: skip
        if self.num_samples is not None:
            row.append("never" if hours is None else f"{hours:,.1f}")
        if self.prices is not None:
            row.append("-" if cost is None else f"{cost:,.2f}")
        return row
