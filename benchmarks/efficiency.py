"""Measures the share of two cores' speed that remains when two workers train one model on them.

Command:   python -m benchmarks.efficiency          (--quick: LeNet, three of the cases, once)

The limit is the total samples per second of two independent, simultaneous processes of plain
PyTorch, which keep freed memory as raydl's workers do. It is compared with raydl's methods,
DistributedDataParallel started by torchrun, and Ray Train's TorchTrainer: LeNet on MNIST and
ResNet-20 on CIFAR-10, batch 64, two workers with one thread each, float32 on the CPU, SGD without
momentum. raydl trains with its default settings, which clip gradients; the peers do not clip. All
sides read the same decoded pictures from memory and normalize each batch in the same way
(``peers/loop.py``).

The figure is steady speed. Each side trains for the same number of seconds and records its number
of samples: the peers every 0.1 s in their loop, raydl about every 0.25 s in its curves. The speed
is the slope of the least-squares line through these points, without the first seconds, so that
starting processes, rendezvous and first steps do not count. Of the two plain processes only the
time counts in which both train. No evaluation and no checkpoint falls into the measured time. The
CPU time of raydl's driver and center and of Ray's own processes is included.

The full form takes about three quarters of an hour on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.runs import NO_SCORES, Point, Workplace, workplace

NUM_WORKERS = 2
LIMIT, DDP, RAY_TRAIN = "two plain processes", "torchrun DDP", "Ray Train"
OVER_DDP = 1.25
"""Target for the speed of sync-easgd over that of either DDP, for LeNet."""


@dataclass(frozen=True)
class Setting:
    """A method with a period."""

    method: str
    period: int
    target: float
    """Target for the share of the limit."""

    @property
    def name(self) -> str:
        """METHOD-pPERIOD."""
        return f"{self.method}-p{self.period}"


SETTINGS = (
    Setting("sync-easgd", 10, 0.97),
    Setting("sync-easgd", 1, 0.88),
    Setting("async-easgd", 10, 0.95),
    Setting("hogwild-easgd", 10, 0.95),
)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Training time of each case."""

    seconds: float
    skipped: float
    """Seconds at the start that are not measured."""


FULL = {
    "lenet": Length(seconds=14.0, skipped=2.0),
    # Longer: ten steps take two seconds, and a raydl run notes its samples once a round.
    "resnet20": Length(seconds=44.0, skipped=4.0),
}
QUICK = Length(seconds=5.0, skipped=1.0)


def speed(points: Sequence[Point], *, start: float, stop: float) -> float:
    """Return samples per second: the slope of the line through the points of an interval.

    Args:
        points: progress, with at least two points in the interval.
        start, stop: the interval, on the clock of the points.
    """
    within = [(at, samples) for at, samples in points if start <= at <= stop]
    assert len(within) > 1, f"{len(within)} points from {start:.1f} s to {stop:.1f} s are too few"
    at, samples = np.array(within, np.float64).T
    return float(np.polyfit(at - at[0], samples, 1)[0])


def total_speed(
    runs: Sequence[Sequence[Point]], *, skipped: float, speed_of: Callable[..., float] = speed
) -> float:
    """Return the total speed of runs in the time in which all of them train.

    Args:
        runs: the points of each run, on one clock.
        skipped: seconds after the latest start that are not measured.
        speed_of: returns the speed of one run in an interval, as ``speed`` does.
    """
    start = max(points[0][0] for points in runs) + skipped
    stop = min(points[-1][0] for points in runs)
    return sum(speed_of(points, start=start, stop=stop) for points in runs)


def cases_of(
    place: Workplace, model: str, data: str, length: Length, settings: Sequence[Setting]
) -> dict[str, Callable[[], float]]:
    """Return functions that measure samples per second, by case, the limit first."""
    common = ("--model", model, "--data", data, "--seconds", str(length.seconds))
    skipped = length.skipped

    def limit() -> float:
        runs = place.plain(*common, copies=NUM_WORKERS)
        return total_speed([run.points for run in runs], skipped=skipped)

    def raydl(setting: Setting) -> float:
        arguments = ("--method", setting.method, "--period", str(setting.period), *NO_SCORES)
        run = place.train(*common, *arguments, "--workers", str(NUM_WORKERS))
        return total_speed([run.points], skipped=skipped)

    def ddp() -> float:
        return total_speed([place.ddp(*common).points], skipped=skipped)

    def ray_train() -> float:
        return total_speed([place.ray_train(*common).points], skipped=skipped)

    ours = {setting.name: partial(raydl, setting) for setting in settings}
    return {LIMIT: limit, **ours, DDP: ddp, RAY_TRAIN: ray_train}


def add_results(report: Report, model: str, speeds: Mapping[str, Sequence[float]]) -> None:
    """Add the table and the figures of a model to a report."""
    limit = speeds[LIMIT]
    rows = [
        (name, Spread.of(values).text(",.0f"), ratios(values, limit).text(".3f"))
        for name, values in speeds.items()
    ]
    report.add_text(f"{model}, {NUM_WORKERS} workers, {len(limit)} repeats")
    report.add_table(("case", "samples per second", "of the limit"), rows)
    targets = {setting.name: setting.target for setting in SETTINGS}
    for name in list(speeds)[1:]:
        figure = f"efficiency.{model}.{name.lower().replace(' ', '-')}"
        report.add_figures(
            Figure(name=figure, value=ratios(speeds[name], limit), target=targets.get(name))
        )
    best = SETTINGS[0].name
    for peer in (DDP, RAY_TRAIN):
        if peer in speeds:
            figure = f"efficiency.{model}.{best}_over_{peer.lower().replace(' ', '-')}"
            target = OVER_DDP if model == "lenet" else None
            value = ratios(speeds[best], speeds[peer])
            report.add_figures(Figure(name=figure, value=value, target=target))


def _parser() -> argparse.ArgumentParser:
    data = "../shared/data"
    return options_of(
        __doc__,
        models={"default": None, "help": "lenet, resnet20, or both with a comma"},
        data={"default": f"{data}/mnist", "help": "data for LeNet"},
        cifar={"default": f"{data}/cifar10", "help": "data for ResNet-20"},
        seconds={"type": float, "help": "seconds of training of each case"},
    )


def main() -> None:
    """Measure and report."""
    options = _parser().parse_args()
    models = (options.models or ("lenet" if options.quick else "lenet,resnet20")).split(",")
    repeats = options.repeats or (1 if options.quick else 5)
    report = Report.of_command("efficiency", options)
    with workplace() as place:
        for model in models:
            source = options.data if model == "lenet" else options.cifar
            length = QUICK if options.quick else FULL[model]
            if options.seconds:
                length = replace(length, seconds=options.seconds)
            # raydl evaluates the center at its end: a small test set shortens that.
            data = place.arrays(source, num_test=500)
            settings = SETTINGS[:1] if options.quick else SETTINGS
            cases = cases_of(place, model, data, length, settings)
            if options.quick:
                del cases[RAY_TRAIN]  # it starts slowly
            add_results(report, model, interleaved(cases, repeats=repeats))
    report.close(options.out)


if __name__ == "__main__":
    main()
