"""Compares the all-reduces on four networks, on one node and on several (Tianhe-3).

Command:   python -m benchmarks.allreduces     (--quick: LeNet on one node, two cases, once)
Needs:     Linux, root, iproute2 and util-linux for the part on several hosts.

Four workers train LeNet, AlexNet, ResNet-20 and VGG-11 with sync-sgd at period 1, whose all-reduce
is its whole exchange: on one node, on four hosts, and on two hosts with two workers each; the links
have 250 Mbit/s (``hosts.py``). The figure is samples/s with ``--allreduce auto``, the adaptive
choice, over those with torch's own all-reduce, ``library``; the target is 1. The runs of ``auto``
are longer, and what they train before the choice does not count. A run in which a worker was lost,
so that the others chose again, ends the comparison of its network.

The full form takes an hour on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.efficiency import total_speed
from benchmarks.hosts import why_not
from benchmarks.measure import Figure, Report, interleaved, options_of, ratios
from benchmarks.programs import RunError, data_at
from benchmarks.runs import NO_SCORES, Workplace, workplace
from benchmarks.runs_on_hosts import Cluster, cluster, cut_set
from raydl.config.cluster import ALLREDUCES

MBIT = 250.0
NUM_WORKERS = 4
_LIBRARY, _AUTO = "library", "auto"
MOST_SUMS = 20
"""Sums after which ``auto`` has chosen: five by each of four algorithms."""
_WARM_UP_SUMS = 3
"""Sums at the start of the other runs that do not count."""
_SKIPPED_S = 2.0
"""Further seconds on one node that do not count."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the workers train with a network, and how long on hosts."""

    batch_size: int
    """Samples in a worker's step."""
    data: str = "cifar"
    least_s: float = 0.0
    """Least seconds of training on hosts, where a step of VGG-11 takes up to 4 s."""
    choice_s: float = 5.0
    """Seconds by which the runs of ``auto`` are longer there."""


WORKLOADS = {
    "lenet": Workload(batch_size=64, data="mnist"),
    "alexnet-cifar": Workload(batch_size=64),
    "resnet20": Workload(batch_size=32),
    "vgg11-cifar": Workload(batch_size=16, least_s=40.0, choice_s=50.0),
}
_CHOICE_ON_ONE_NODE_S = 5.0
_FEWEST_POINTS = 2
SITES = {"4 hosts": (4, "1"), "2 hosts with 2 workers each": (2, "0.5")}
"""(Hosts with one CPU each, CPUs of a worker) by name."""


@dataclass(frozen=True)
class Measured:
    """A run's speed and its all-reduce."""

    speed: float
    """Samples/s of all workers, after the choice."""
    algorithm: str
    """How the gradients were summed."""

    @classmethod
    def of(cls, speed: float, allreduce: str, result: Mapping[str, Any]) -> Measured:
        """Return the outcome of a run with such a ``result.json``.

        Raises:
            RunError: if no algorithm was chosen, or a lost worker made the others choose again.
        """
        chosen = result["allreduce"]
        if allreduce != _LIBRARY and chosen is None:
            raise RunError(f"--allreduce {allreduce} has chosen no algorithm")
        if result["generations"] != 1:
            raise RunError(f"a run had {result['generations']} generations")
        return cls(speed, chosen["algorithm"] if chosen else _LIBRARY)


Measure = Callable[[str, str], Measured]
"""Trains a network, the first argument, with an all-reduce, the second one."""


def train_on_one_node(
    place: Workplace, data: Mapping[str, str], seconds: float, model: str, allreduce: str
) -> Measured:
    """Measure a run on this machine.

    Args:
        place: starts the run.
        data: folders of Parquet by name.
        seconds: training time, without that of the choice.
        model: a name in ``WORKLOADS``.
        allreduce: a name in ``ALLREDUCES``.

    Raises:
        RunError: if the run failed, took too long, or was too short for a speed.
    """
    length_s = seconds + (_CHOICE_ON_ONE_NODE_S if allreduce == _AUTO else 0.0)
    run = place.train(
        *_options(model, allreduce), "--data", data[WORKLOADS[model].data],
        "--seconds", str(length_s), "--cpus-per-worker", "0.5", *NO_SCORES,
    )  # fmt: skip
    skipped = _num_skipped(model, allreduce)
    points = [point for point in run.points if point[1] >= skipped]
    if len(points) < _FEWEST_POINTS:
        raise RunError(f"{len(points)} points after {skipped} samples are too few; train longer")
    return Measured.of(total_speed([points], skipped=_SKIPPED_S), allreduce, run.result)


def train_on_hosts(
    hosts: Cluster,
    cpus_per_worker: str,
    data: Mapping[str, str],
    seconds: float,
    model: str,
    allreduce: str,
) -> Measured:
    """Measure a run on hosts.

    Args:
        hosts: start the run.
        cpus_per_worker: CPUs of a worker.
        data, seconds, model, allreduce: as for ``train_on_one_node``.

    Raises:
        RunError: as for ``train_on_one_node``.
    """
    workload = WORKLOADS[model]
    length_s = max(seconds, workload.least_s) + (workload.choice_s if allreduce == _AUTO else 0.0)
    result = hosts.train(
        *_options(model, allreduce), "--data", data[workload.data],
        "--seconds", str(length_s), "--cpus-per-worker", cpus_per_worker,
        num_skipped=_num_skipped(model, allreduce),
    )  # fmt: skip
    return Measured.of(result["steady_samples_per_s"], allreduce, result)


def _options(model: str, allreduce: str) -> tuple[str, ...]:
    return (
        "--model", model, "--batch-size", str(WORKLOADS[model].batch_size),
        "--method", "sync-sgd", "--period", "1", "--workers", str(NUM_WORKERS),
        "--allreduce", allreduce,
    )  # fmt: skip


def _num_skipped(model: str, allreduce: str) -> int:
    """Return the samples at the start that do not count."""
    num_sums = MOST_SUMS if allreduce == _AUTO else _WARM_UP_SUMS
    return num_sums * NUM_WORKERS * WORKLOADS[model].batch_size


@dataclass(frozen=True)
class Plan:
    """What is compared on each site."""

    models: Sequence[str]
    allreduces: Sequence[str]
    repeats: int


def compare(measure: Measure, report: Report, site: str, plan: Plan) -> None:
    """Add a table and a figure for each network; say which ones were not measured."""
    for model in plan.models:
        cases = {name: partial(measure, model, name) for name in plan.allreduces}
        try:
            results = interleaved(cases, repeats=plan.repeats)
        except (RunError, AssertionError) as error:  # the others take an hour
            report.add_text(f"{model} on {site} was not measured: {error}")
            continue
        speeds = {name: [run.speed for run in runs] for name, runs in results.items()}
        report.add_speeds(f"{model}, {site}", speeds, _LIBRARY)
        chosen = ", ".join(run.algorithm for run in results[_AUTO])
        report.add_text(f"`{_AUTO}` chose: {chosen}")
        name = f"allreduces.{site.replace(' ', '-')}.{model}.{_AUTO}"
        value = ratios(speeds[_AUTO], speeds[_LIBRARY])
        report.add_figures(Figure(name=name, value=value, target=1.0))


def compare_on_hosts(
    data: Mapping[str, str], seconds: float, report: Report, site: str, plan: Plan
) -> None:
    """Compare the all-reduces on the hosts of a site; data and seconds as for a run on one node."""
    number, cpus_per_worker = SITES[site]
    with cluster(number) as hosts:
        hosts.limit(MBIT)
        cut = {
            name: cut_set(path, hosts.folder / name, num_train=2560, num_test=100)
            for name, path in data.items()
        }
        compare(partial(train_on_hosts, hosts, cpus_per_worker, cut, seconds), report, site, plan)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    folder = "../shared/data"
    options = options_of(
        __doc__,
        data={"default": f"{folder}/mnist", "help": "MNIST as a folder of Parquet"},
        cifar={"default": f"{folder}/cifar10", "help": "CIFAR-10 as a folder of Parquet"},
        seconds={"type": float, "help": "seconds of a run without the choice, of VGG-11 at least"},
    ).parse_args(argv)
    if options.quick:
        plan = Plan(["lenet"], (_LIBRARY, _AUTO), options.repeats or 1)
    else:
        plan = Plan(list(WORKLOADS), ALLREDUCES, options.repeats or 2)
    seconds = options.seconds or (5.0 if options.quick else 12.0)
    sites = [] if options.quick else list(SITES)
    data = {"mnist": data_at(options.data), "cifar": data_at(options.cifar)}
    report = Report.of_command("allreduces", options)
    with workplace() as place:
        compare(partial(train_on_one_node, place, data, seconds), report, "one node", plan)
    if sites and (reason := why_not()):
        report.add_text(f"Not measured on several hosts: {reason}")
        sites = []
    for site in sites:
        try:
            compare_on_hosts(data, seconds, report, site, plan)
        except RunError as error:
            report.add_text(f"Not measured on {site}: {error}")
    report.close(options.out)
    sys.exit(len(report.figures) < len(plan.models) * (1 + len(sites)))


if __name__ == "__main__":
    main()
