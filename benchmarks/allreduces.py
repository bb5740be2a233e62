"""Compares the all-reduces on four networks, on one node and on several (Tianhe-3).

Command:   python -m benchmarks.allreduces     (--quick: LeNet, once, short runs)
Needs:     Linux, root, iproute2 and util-linux for the part on several hosts.

Four workers train LeNet, AlexNet, ResNet-20 and VGG-11 with sync-sgd at period 1, whose all-reduce
is its whole exchange: on one node, on four hosts, and on two hosts with two workers each; the links
have 250 Mbit/s (``hosts.py``). The figure is samples/s with ``--allreduce auto``, the adaptive
choice, over those with torch's own all-reduce, ``library``; the target is 1. The runs of ``auto``
are longer, and what they train before the choice does not count.

The full form takes an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.efficiency import total_speed
from benchmarks.hosts import why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import data_at
from benchmarks.runs import NO_SCORES, Workplace, workplace
from benchmarks.runs_on_hosts import Cluster, cluster, cut_set
from raydl.config.cluster import ALLREDUCES

MBIT = 250.0
NUM_WORKERS = 4
_LIBRARY, _AUTO = "library", "auto"
_MOST_TRIES = 20
"""``auto`` has chosen after so many sums: five by each of four algorithms."""
_SKIPPED_S = 2.0
"""Seconds at the start of a run on one node that are not measured."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, and how long it trains."""

    batch_size: int
    """Samples in a worker's step."""
    data: str = "cifar"
    on_hosts_s: float = 0.0
    """Least seconds of training on several hosts, where a step of VGG-11 takes up to 4 s."""
    tries_s: float = 5.0
    """Seconds by which the runs of ``auto`` are longer."""


NETWORKS = {
    "lenet": Network(batch_size=64, data="mnist"),
    "alexnet-cifar": Network(batch_size=64),
    "resnet20": Network(batch_size=32),
    "vgg11-cifar": Network(batch_size=16, on_hosts_s=40.0, tries_s=50.0),
}
SITES = {"4 hosts": (4, "1"), "2 hosts with 2 workers each": (2, "0.5")}
"""Number of hosts, which have one CPU each, and CPUs of a worker; by what the tables call it."""


@dataclass(frozen=True)
class Measured:
    """A run's speed and its all-reduce."""

    speed: float
    """Samples/s of all workers, after the choice."""
    algorithm: str | None
    """How the gradients were summed; None: by torch's own all-reduce, without a choice."""

    @classmethod
    def of(cls, speed: float, result: Mapping[str, Any]) -> Measured:
        """Return the outcome of a run with such a ``result.json``."""
        chosen = result["allreduce"]
        return cls(speed, chosen["algorithm"] if chosen else None)


Measure = Callable[[str, str], Measured]
"""Trains a network with an all-reduce."""


def train_on_one_node(
    place: Workplace, data: Mapping[str, str], seconds: float, model: str, allreduce: str
) -> Measured:
    """Measure a run on this machine.

    Args:
        place: starts the run.
        data: folders of Parquet by name.
        seconds: training time.
        model: a name in ``NETWORKS``.
        allreduce: a name in ``ALLREDUCES``.
    """
    run = place.train(
        *_options(model, allreduce), "--data", data[NETWORKS[model].data],
        "--seconds", str(seconds + _tries_s(model, allreduce)), "--cpus-per-worker", "0.5",
        *NO_SCORES,
    )  # fmt: skip
    first = _samples_before_choice(model, allreduce)
    points = [point for point in run.points if point[1] >= first]
    return Measured.of(total_speed([points], skipped=_SKIPPED_S), run.result)


def train_on_hosts(
    hosts: Cluster,
    cpus_per_worker: str,
    data: Mapping[str, str],
    seconds: float,
    model: str,
    allreduce: str,
) -> Measured:
    """Measure a run on hosts; arguments as for ``train_on_one_node``."""
    length_s = max(seconds, NETWORKS[model].on_hosts_s) + _tries_s(model, allreduce)
    result = hosts.train(
        *_options(model, allreduce), "--data", data[NETWORKS[model].data],
        "--seconds", str(length_s), "--cpus-per-worker", cpus_per_worker,
        num_skipped=_samples_before_choice(model, allreduce),
    )  # fmt: skip
    return Measured.of(result["steady_samples_per_s"], result)


def _options(model: str, allreduce: str) -> tuple[str, ...]:
    return (
        "--model", model, "--batch-size", str(NETWORKS[model].batch_size),
        "--method", "sync-sgd", "--period", "1", "--workers", str(NUM_WORKERS),
        "--allreduce", allreduce,
    )  # fmt: skip


def _tries_s(model: str, allreduce: str) -> float:
    return NETWORKS[model].tries_s if allreduce == _AUTO else 0.0


def _samples_before_choice(model: str, allreduce: str) -> int:
    if allreduce != _AUTO:
        return 0
    return _MOST_TRIES * NUM_WORKERS * NETWORKS[model].batch_size


def compare(
    measure: Measure, report: Report, site: str, models: Sequence[str], repeats: int
) -> None:
    """Add a table and a figure for each network."""
    for model in models:
        cases = {name: partial(measure, model, name) for name in ALLREDUCES}
        results = interleaved(cases, repeats=repeats)
        speeds = {name: [run.speed for run in runs] for name, runs in results.items()}
        over = {name: ratios(values, speeds[_LIBRARY]) for name, values in speeds.items()}
        rows = [
            (name, Spread.of(values).text(",.0f"), over[name].text(".2f"))
            for name, values in speeds.items()
        ]
        report.add_table((f"{model}, {site}", "samples/s", f"over {_LIBRARY}"), rows)
        chosen = ", ".join(run.algorithm or "nothing yet" for run in results[_AUTO])
        report.add_text(f"`{_AUTO}` chose: {chosen}")
        name = f"allreduces.{site.replace(' ', '-')}.{model}.{_AUTO}"
        report.add_figures(Figure(name=name, value=over[_AUTO], target=1.0))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    folder = "../shared/data"
    options = options_of(
        __doc__,
        data={"default": f"{folder}/mnist", "help": "MNIST as a folder of Parquet"},
        cifar={"default": f"{folder}/cifar10", "help": "CIFAR-10 as a folder of Parquet"},
        seconds={"type": float, "help": "seconds of training of each run, without the choice"},
    ).parse_args(argv)
    seconds = options.seconds or (5.0 if options.quick else 12.0)
    repeats = options.repeats or (1 if options.quick else 2)
    models = ("lenet",) if options.quick else tuple(NETWORKS)
    data = {"mnist": data_at(options.data), "cifar": data_at(options.cifar)}
    report = Report.of_command("allreduces", options)
    with workplace() as place:
        measure: Measure = partial(train_on_one_node, place, data, seconds)
        compare(measure, report, "one node", models, repeats)
    if reason := why_not():
        report.add_text(f"Not measured on several hosts: {reason}")
    for site, (number, share) in {} if reason else SITES.items():
        with cluster(number) as hosts:
            hosts.limit(MBIT)
            cut = {
                name: cut_set(path, hosts.folder / name, num_train=2560, num_test=100)
                for name, path in data.items()
            }
            measure = partial(train_on_hosts, hosts, share, cut, seconds)
            compare(measure, report, site, models, repeats)
    report.close(options.out)


if __name__ == "__main__":
    main()
