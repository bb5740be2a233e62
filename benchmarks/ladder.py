"""Measures SC17's ladder on thin links: Original EASGD, Sync EASGD 1 to 3, and raydl's additions.

Command:   python -m benchmarks.ladder               (--quick: two hosts and rungs, no accuracy)

Four hosts train, one worker in each; another host is SC17's master, with driver and center (network
namespaces, ``hosts.py``). The benchmark calibrates the link rate so that Original EASGD spends 87%
of its time in communication, as in SC17. In Original one worker is active at a time, so this is the
share of time in which no worker computes; waiting for the turns of other workers does not count.

LeNet on MNIST, 64 samples a step. A gradient takes ``--pause-s`` longer than its computation,
without using the CPU, as if a device computed it: otherwise four workers would slow down each other
on the cores of one machine.

A speed-up compares samples per second within one repeat, from a run's first record of a round to
the last one before the center is sent back. Faster rungs get more samples, so that all take about
the same time. Evaluations and checkpoints are off. The accuracy is that of the center after equally
many samples, without pauses and on unlimited links: with one seed the bits are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.hosts import why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import RunError, data_at
from benchmarks.runs_on_hosts import (
    PAUSING_MODEL,
    UNLIMITED_MBIT,
    Cluster,
    cluster,
    cut_set,
)

NUM_WORKERS, QUICK_WORKERS, BATCH_SIZE = 4, 2, 64
SHARE = 0.87
"""Share of its time in which Original EASGD communicates, in SC17 and here."""
_SYNC = ("--method", "sync-easgd")
_IN_PARTS = ("--fragments", "2", "--exchange-delay", "4", "--compression", "int8")
RUNGS: dict[str, tuple[str, ...]] = {
    "original": ("--method", "original-easgd", "--period", "1"),
    "easgd1": (*_SYNC, "--period", "1", "--exchange.overlap", "False", "--exchange.no-resident"),
    "easgd2": (*_SYNC, "--period", "1", "--exchange.overlap", "False"),
    "easgd3": (*_SYNC, "--period", "1"),
    "period": (*_SYNC, "--period", "10"),
    "delay": (*_SYNC, "--period", "10", "--exchange-delay", "9"),
    "ours": (*_SYNC, "--period", "10", *_IN_PARTS),
}
"""Options of ``raydl train`` on each rung."""
TARGETS = {"easgd3": 5.3, "ours": 20.0}
QUICK = {"original": 768, "easgd3": 2560}
"""Samples of each rung in the quick form."""
SCORED = ("original", "easgd1", "easgd3", "ours")
NUM_SAMPLES = {"original": 2560, "easgd": 10_240, "others": 51_200}
"""Samples of a run in the full form, by kind of rung."""
SCORED_SAMPLES = 120_000
CUT = 2560
"""Training samples of the runs for speed: few, since they are sent over the links once. An epoch is
a round of 10 steps."""
LENET_BYTES = 4 * 431_080
LENET_S = 0.02
"""Seconds of LeNet's computation in a step, for the first guess of the rate."""
COMPUTING = ("data_io", "forward_backward", "replica_update", "center_update")
NUM_TRIES = 2

Result = Mapping[str, Any]


def train(
    hosts: Cluster,
    data: str,
    rung: str,
    num_samples: int,
    *,
    model: str = PAUSING_MODEL,
    seed: int = 0,
) -> Result:
    """Return the figures of a run on a rung, at the current link rate."""
    return hosts.train(
        "--data", data, "--model", model, "--workers", str(hosts.num_workers), "--seed", str(seed),
        "--batch-size", str(BATCH_SIZE), "--samples", str(num_samples), *RUNGS[rung],
    )  # fmt: skip


def split(result: Result) -> tuple[float, float]:
    """Return a worker's (seconds of computation, all seconds) since initialization."""
    parts = result["time_parts"]
    total = sum(seconds for part, seconds in parts.items() if part != "initialization")
    return sum(parts[part] for part in COMPUTING), total


def share(rung: str, result: Result) -> float:
    """Return the communication share; in Original without the computation of other workers."""
    computed_s, total_s = split(result)
    return 1 - computed_s * (result["workers"] if rung == "original" else 1) / total_s


def first_rate(pause_s: float) -> float:
    """Return the estimated rate in Mbit/s at which Original communicates for 87% of its time.

    A worker's turn includes both of its transfers, to the master and back.
    """
    communicates_s = (pause_s + LENET_S) * SHARE / (1 - SHARE)
    return 2 * LENET_BYTES * 8e-6 * 1514 / 1448 / communicates_s


def next_rate(mbit: float, result: Result) -> float:
    """Return an improved rate, given the result of Original at a rate."""
    computed_s, total_s = split(result)
    computed_s *= int(result["workers"])
    return mbit * (total_s - computed_s) / (computed_s * SHARE / (1 - SHARE))


def calibrate(hosts: Cluster, report: Report, data: str, options: argparse.Namespace) -> None:
    """Set the link rate at which Original communicates for 87% of its time."""
    mbit = first_rate(options.pause_s)
    tries = 0 if options.quick else NUM_TRIES
    for number in range(tries):
        hosts.limit(mbit)
        result = train(hosts, data, "original", NUM_SAMPLES["original"])
        print(
            f"  try {number + 1}: {share('original', result):.1%} at {mbit:.1f} Mbit/s", flush=True
        )
        mbit = next_rate(mbit, result)
    hosts.limit(mbit)
    report.add_text(
        f"Links of {mbit:.1f} Mbit/s, after {tries} tries; a gradient pauses for "
        f"{options.pause_s * 1000:.0f} ms."
    )


def measure_speed(hosts: Cluster, report: Report, data: str, options: argparse.Namespace) -> None:
    """Run all rungs, interleaved, and report speed-ups and the eight time parts."""
    num_samples = QUICK if options.quick else {rung: _num_samples(rung) for rung in RUNGS}
    rungs = tuple(num_samples)
    runs = interleaved(
        {rung: partial(train, hosts, data, rung, num_samples[rung]) for rung in rungs},
        repeats=options.repeats or (1 if options.quick else 3),
    )
    rates = {rung: [r["steady_samples_per_s"] for r in of] for rung, of in runs.items()}
    up = {rung: ratios(of, rates["original"]) for rung, of in rates.items()}
    shares = {rung: Spread.of([share(rung, r) for r in of]) for rung, of in runs.items()}
    report.add_table(
        ("rung", "speed-up", "samples/s", "communication", "settings"),
        [
            (rung, f"{up[rung].text()}", f"{Spread.of(rates[rung]).median:,.0f}",
             shares[rung].text(".1%"), f"`{' '.join(RUNGS[rung])}`")
            for rung in rungs
        ],
    )  # fmt: skip
    report.add_text("The time parts are those of the last repeat.")
    add_time_parts(report, "rung", {rung: of[-1] for rung, of in runs.items()})
    report.add_figures(Figure(name="ladder.original.communication", value=shares["original"]))
    report.add_figures(Figure(name="ladder.easgd3.communication", value=shares["easgd3"]))
    for rung in rungs[1:]:
        target = None if options.quick else TARGETS.get(rung)  # the targets are for four workers
        report.add_figures(Figure(name=f"ladder.{rung}.speedup", value=up[rung], target=target))


def _num_samples(rung: str) -> int:
    kind = rung if rung == "original" else "easgd" if rung.startswith("easgd") else "others"
    return NUM_SAMPLES[kind]


def add_time_parts(report: Report, kind: str, results: Mapping[str, Result]) -> None:
    """Add the eight time parts of a worker to a report.

    Args:
        report: the report.
        kind: title of the first column, for the property in which the runs differ.
        results: the figures of ``result.json``, by the name of a run.
    """
    rows = []
    for name, result in results.items():
        parts, (_, total_s) = result["time_parts"], split(result)
        cells = [
            f"{seconds:.1f} s" if part == "initialization" else f"{seconds / total_s:.1%}"
            for part, seconds in parts.items()
        ]
        rows.append((name, f"{total_s:.1f} s", *cells))
    parts = next(iter(results.values()))["time_parts"]
    report.add_text(
        "A worker's time by part, as shares of the time after initialization. With Original EASGD, "
        "device_device_parameters includes the wait for the turns of other workers."
    )
    report.add_table((kind, "time", *parts), rows)


def measure_accuracy(hosts: Cluster, report: Report, options: argparse.Namespace) -> None:
    """Measure and report the accuracy after equally many samples, with a seed per repeat."""
    hosts.limit(UNLIMITED_MBIT)
    seeds = range(options.repeats or 2)
    accuracies = {rung: [_accuracy(hosts, options.data, rung, s) for s in seeds] for rung in SCORED}
    report.add_table(
        (f"accuracy after {SCORED_SAMPLES:,} samples", *(f"seed {seed}" for seed in seeds)),
        [(rung, *(f"{accuracy:.2%}" for accuracy in of)) for rung, of in accuracies.items()],
    )
    for rung in SCORED[1:]:
        pairs = zip(accuracies["original"], accuracies[rung], strict=True)
        points = Spread.of([100 * (original - own) for original, own in pairs])
        name = f"ladder.{rung}.points_below_original"
        report.add_figures(Figure(name=name, value=points, target=1.0, is_better="less"))


def _accuracy(hosts: Cluster, data: str, rung: str, seed: int) -> float:
    result = train(hosts, data, rung, SCORED_SAMPLES, model="lenet", seed=seed)
    accuracy = float(result["center_accuracy"])
    print(f"  seed {seed} {rung}: {accuracy:.2%}", flush=True)
    return accuracy


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure and report; return the argument of ``sys.exit``."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "MNIST as a folder of Parquet"},
        pause_s={"type": float, "default": 0.06, "help": "pause of each gradient, in seconds"},
    ).parse_args(argv)
    if reason := why_not():
        return reason
    options.data = data_at(options.data)
    report = Report.of_command("ladder", options)
    num_workers = QUICK_WORKERS if options.quick else NUM_WORKERS
    report.add_text(f"LeNet on MNIST, {num_workers} hosts with one worker each, and a master.")
    try:
        with cluster(num_workers, pause_s=options.pause_s, has_master=True) as hosts:
            cut = cut_set(options.data, hosts.folder / "set", num_train=CUT)
            calibrate(hosts, report, cut, options)
            measure_speed(hosts, report, cut, options)
            if options.quick:
                report.add_text("Only the full form measures the accuracy.")
            else:
                measure_accuracy(hosts, report, options)
    except RunError as error:
        return f"{error}"
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
