"""Measures how much of the speed of unequal workers remains when they train one model.

Command:   python -m benchmarks.mixed_speed         (--quick: two workers, three cases, once)

LeNet on MNIST, batch 64. Each worker's process has a quota of CPU time (``quotas.py``) from its
first step on; Ray's own processes, raydl's driver, center and evaluator have none.

slow           two workers with 0.9 and 0.3 of a core
slow-of-four   four workers with 0.4, 0.4, 0.4 and 0.133 of a core
changing       two workers with 0.6 of a core; the second has 0.2 in every second interval of 10 s

The limit is the total speed of plain PyTorch in as many independent, simultaneous processes with
the same quotas. The figure is the share of it that remains: samples per second over the same number
of seconds, without the first ones. Peers are DistributedDataParallel, started by torchrun, and Ray
Train's TorchTrainer, which computes the same. Two further columns say where speed is lost: a worker
that waits uses less of its quota; one that computes more per sample trains fewer per CPU second.

Then the time to 99.0% with two workers, one of them slow, as in ``time_to_accuracy.py``: raydl with
its defaults, the peers at the learning rate that is best for them there. The time of the peers does
not include their evaluations; that of raydl includes everything. A run that takes longer than 300 s
counts with these 300 s; a case of which a run crashes has no figures.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.efficiency import total_speed
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import RunError
from benchmarks.quotas import throttled
from benchmarks.runs import NO_SCORES, Point, Trained, Workplace, workplace
from benchmarks.time_to_accuracy import (
    Reached,
    failed,
    reached_by_peer,
    reached_by_raydl,
    seconds_of,
    without_crashes,
)
from benchmarks.watching import FOLDER, MODEL

LIMIT, DDP, RAY_TRAIN = "plain processes", "torchrun DDP", "Ray Train"
BY_SPEED = "sync-easgd by speed"
METHODS = {
    "sync-easgd": ("--method", "sync-easgd"),
    BY_SPEED: ("--method", "sync-easgd", "--steps-by-speed"),
    "async-easgd": ("--method", "async-easgd"),
    "hogwild-easgd": ("--method", "hogwild-easgd"),
    "async-diloco": ("--method", "async-diloco"),
}
"""Options of each case of raydl."""
TARGETS = {BY_SPEED: 0.9, "async-easgd": 0.97, "hogwild-easgd": 0.97, "async-diloco": 0.97}
"""Targets for the share of the limit."""
SOONER = 1.5
"""Target for the time of a peer to the accuracy over that of raydl."""
RATE = ("--lr", "0.05", "--momentum", "0.9")
"""Learning rate and momentum of the peers, as ``time_to_accuracy`` found them."""
ACCURACY, SAMPLES, SCORED_EVERY = 0.99, 300_000, 15_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The quotas of the workers."""

    shares: tuple[float, ...]
    """Cores of each worker."""
    slow_share: float | None = None
    """Cores of the last worker in every second interval, if it changes."""
    seconds: float = 24.0
    skipped: float = 6.0
    """Seconds at the start that are not measured."""

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.shares)


SLOW = Scenario(shares=(0.9, 0.3))
SCENARIOS = {
    "slow": SLOW,
    "slow-of-four": Scenario(shares=(0.4, 0.4, 0.4, 0.133)),
    "changing": Scenario(shares=(0.6, 0.6), slow_share=0.2, seconds=46.0),
}
QUICK = {"slow": replace(SLOW, seconds=7.0, skipped=2.0)}


@dataclass(frozen=True)
class Speed:
    """The speed of a case."""

    samples_per_s: float
    cores: float
    """How many cores the training processes used."""

    @property
    def samples_per_cpu_s(self) -> float:
        """Samples per second of CPU time of the training processes."""
        return self.samples_per_s / self.cores


class ThrottledRuns:
    """Runs programs whose training processes have the quotas of a scenario.

    Args:
        place: the workplace of the programs.
    """

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self._numbers = itertools.count()

    def train(
        self, scenario: Scenario, program: Callable[[], list[Trained]]
    ) -> tuple[list[Trained], float]:
        """Run programs, which train ``watching.MODEL``, under the quotas.

        Returns:
            What the programs return, and how many cores their training processes used in the
            measured time.
        """
        notes = self.place.folder / f"notes-{next(self._numbers)}"
        notes.mkdir()
        os.environ[FOLDER] = str(notes)
        with throttled(
            lambda: _pids(notes), scenario.shares, slow_share=scenario.slow_share
        ) as uses:
            trained = program()
        interval = scenario.skipped, scenario.seconds
        return trained, sum(use.cores(*interval) for use in uses)


def _pids(notes: Path) -> list[int]:
    """Return the processes that have begun a step, the first one first."""
    files = [path for path in notes.glob("*.steps") if path.stat().st_size]
    return [int(path.stem) for path in sorted(files, key=lambda path: path.stat().st_ctime)]


def mean_speed(points: Sequence[Point], *, start: float, stop: float) -> float:
    """Return samples per second between the first and the last point of an interval."""
    within = [point for point in points if start <= point[0] <= stop]
    (began, before), (ended, after) = within[0], within[-1]
    return (after - before) / (ended - began)


def speeds_of(
    runs: ThrottledRuns,
    scenario: Scenario,
    data: str,
    methods: Sequence[str],
    *,
    with_ray_train: bool,
) -> dict[str, Callable[[], Speed]]:
    """Return functions that measure the speed, by case, the limit first."""
    place, count = runs.place, scenario.num_workers
    common = ("--model", MODEL, "--data", data, "--seconds", str(scenario.seconds))

    def speed(program: Callable[[], list[Trained]]) -> Speed:
        trained, cores = runs.train(scenario, program)
        points = [run.points for run in trained]
        return Speed(total_speed(points, skipped=scenario.skipped, speed_of=mean_speed), cores)

    def raydl(name: str) -> list[Trained]:
        arguments = (*METHODS[name], "--workers", str(count), *NO_SCORES)
        cpus = ("--cpus-per-worker", f"{2 / count:g}")
        return [place.train(*common, *arguments, *cpus)]

    cases: dict[str, Callable[[], Speed]] = {
        LIMIT: lambda: speed(lambda: place.plain(*common, copies=count)),
        **{name: partial(speed, partial(raydl, name)) for name in methods},
        DDP: lambda: speed(lambda: [place.ddp(*common, num_workers=count)]),
    }
    if with_ray_train:
        cases[RAY_TRAIN] = lambda: speed(lambda: [place.ray_train(*common, num_workers=count)])
    return cases


def times_of(
    runs: ThrottledRuns, data: str, methods: Sequence[str]
) -> dict[str, Callable[[], Reached]]:
    """Return functions that train to the accuracy with the next seed at each call, by case."""
    place = runs.place
    length = ("--samples", str(SAMPLES), "--stop-at-accuracy", str(ACCURACY))
    common = ("--model", MODEL, "--data", data, "--batch-size", "64", *length)

    def raydl(name: str, seeds: Callable[[], int]) -> Reached:
        scores = ("--evaluation.every-samples", str(SCORED_EVERY))
        arguments = (*METHODS[name], "--workers", "2", *scores, "--seed", str(seeds()))
        try:
            [run], _ = runs.train(SLOW, lambda: [place.train(*common, *arguments)])
        except RunError as error:
            return failed(name, error)
        return reached_by_raydl(run, accuracy=ACCURACY)

    def peer(name: str, start: Callable[..., Trained], seeds: Callable[[], int]) -> Reached:
        arguments = ("--evaluate-every", str(SCORED_EVERY), *RATE, "--seed", str(seeds()))
        try:
            [run], _ = runs.train(SLOW, lambda: [start(*common, *arguments)])
        except RunError as error:
            return failed(name, error)
        return reached_by_peer(run, accuracy=ACCURACY)

    def count() -> Callable[[], int]:
        return itertools.count().__next__

    return {
        **{name: partial(raydl, name, count()) for name in methods},
        DDP: partial(peer, DDP, place.ddp, count()),
        RAY_TRAIN: partial(peer, RAY_TRAIN, place.ray_train, count()),
    }


def add_scenario(
    report: Report, name: str, scenario: Scenario, cases: Mapping[str, Sequence[Speed]]
) -> None:
    """Add the table and the figures of a scenario to a report."""
    shares = ", ".join(f"{share:g}" for share in scenario.shares)
    change = f", the last one {scenario.slow_share:g} in turn" if scenario.slow_share else ""
    report.add_text(f"{name}: workers with {shares} of a core{change}")
    speeds = {case: [run.samples_per_s for run in runs] for case, runs in cases.items()}
    per_cpu_s = {case: [run.samples_per_cpu_s for run in runs] for case, runs in cases.items()}
    report.add_table(
        ("case", "samples per second", "of the limit", "cores used",
         "samples per CPU second, of the limit"),
        [
            (
                case,
                Spread.of(speeds[case]).text(",.0f"),
                ratios(speeds[case], speeds[LIMIT]).text(".3f"),
                Spread.of([run.cores for run in runs]).text(".2f"),
                ratios(per_cpu_s[case], per_cpu_s[LIMIT]).text(".3f"),
            )
            for case, runs in cases.items()
        ],
    )  # fmt: skip
    for case in list(cases)[1:]:
        figure = f"mixed_speed.{name}.{case}".lower().replace(" ", "-")
        value, target = ratios(speeds[case], speeds[LIMIT]), TARGETS.get(case)
        report.add_figures(Figure(name=figure, value=value, target=target))


def add_times(report: Report, times: Mapping[str, Sequence[Reached]]) -> None:
    """Add the table and the figures of the times to the accuracy to a report."""
    report.add_text(f"seconds to {ACCURACY:.1%}, one worker slow")
    report.add_table(
        ("case", "seconds", "samples", "reached"),
        [
            (
                name,
                Spread.of([run.training_s for run in runs]).text(".1f"),
                Spread.of([run.samples for run in runs]).text(",.0f"),
                f"{sum(run.is_reached for run in runs)} of {len(runs)}",
            )
            for name, runs in times.items()
        ],
    )
    times = without_crashes(report, times)
    report.add_figures(
        *(
            seconds_of("mixed_speed", name, [run.training_s for run in runs])
            for name, runs in times.items()
        )
    )
    for name in [name for name in times if name in METHODS]:
        for peer in [peer for peer in times if peer in (DDP, RAY_TRAIN)]:
            figure = f"mixed_speed.{peer}_over_{name}".lower().replace(" ", "-")
            value = ratios(
                [run.training_s for run in times[peer]], [run.training_s for run in times[name]]
            )
            has_missed = not all(run.is_reached for run in times[name])
            value = Spread(0.0, 0.0, 0.0) if has_missed else value
            report.add_figures(Figure(name=figure, value=value, target=SOONER))


def _measure_speeds(
    report: Report,
    runs: ThrottledRuns,
    source: str,
    scenarios: Mapping[str, Scenario],
    repeats: int,
) -> None:
    data = runs.place.arrays(source, num_test=500)
    for name, scenario in scenarios.items():
        methods = [BY_SPEED] if report.is_quick else list(METHODS)
        has_ray_train = not report.is_quick and scenario.num_workers == 2
        cases = speeds_of(runs, scenario, data, methods, with_ray_train=has_ray_train)
        add_scenario(report, name, scenario, interleaved(cases, repeats=repeats))


def main() -> None:
    """Measure and report."""
    parser = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "data set; by default MNIST"},
        only={"choices": [*SCENARIOS, "time"], "help": "measure only this"},
    )
    options = parser.parse_args()
    repeats = options.repeats or (1 if options.quick else 3)
    report = Report.of_command("mixed_speed", options)
    scenarios = QUICK if options.quick else SCENARIOS
    if options.only:
        scenarios = {name: s for name, s in scenarios.items() if name == options.only}
    with workplace() as place:
        runs = ThrottledRuns(place)
        if scenarios:
            _measure_speeds(report, runs, options.data, scenarios, repeats)
        if options.only in (None, "time") and not options.quick:
            cases = times_of(runs, place.arrays(options.data), [BY_SPEED, "async-easgd"])
            add_times(report, interleaved(cases, repeats=repeats))
    report.close(options.out)


if __name__ == "__main__":
    main()
