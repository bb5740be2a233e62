"""Measures the speed of sync-easgd on a thin link between two hosts, compared with torchrun's DDP.

Command:   python -m benchmarks.thin_link            (--quick: only 100 Mbit/s, and no accuracy)

Two hosts (network namespaces, ``hosts.py``), one worker in each, LeNet on MNIST, 64 samples a step:

- at 10 Gbit/s, sync-easgd with the defaults of ``raydl train``: the unlimited speed;
- at 100 and at 25 Mbit/s, sync-easgd with ``SETTINGS``, DDP by torchrun, and DDP with gradients
  compressed by PowerSGD of rank 1, torch's own hook, which compresses from the third step on.

The speed is samples per second of training: for raydl from the first record of a round to the last
one before the center is sent back, for DDP from the third step to the last. The link rate changes
between runs. Evaluations and checkpoints are off, and the cases are interleaved. Slower cases get
fewer samples, so that all take about the same time. ``--also`` measures further settings at each
rate.

The cost of the settings in samples to 98.5% is measured on unlimited links: with one seed a
synchronous method gives the same bits on any link. The center is evaluated at the first round after
every 2,500 samples, but not while it is still being evaluated: on fast cores that finds the
accuracy later, by up to some thousand samples. All runs have the same length, and so the same
learning-rate schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hosts import why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import RunError, data_at
from benchmarks.runs_on_hosts import UNLIMITED_MBIT, Cluster, cluster, cut_set

SETTINGS = (
    "--period", "30", "--fragments", "3", "--exchange-delay", "9", "--compression", "int8"
)  # fmt: skip
"""Options of ``raydl train``: a third of the weights every 10 steps, instead of all by default."""
MBITS = (100, 25)
KEPT = 0.95
OVER_DDP = {100: 6.0, 25: 20.0}
ACCURACY, MORE_SAMPLES = 0.985, 1.05
"""Accuracy of the center, and the target for the samples to it, over those of the defaults."""
BATCH_SIZE, SCORED_EVERY = 64, 2500
SCORED_SAMPLES = 180_000
CUT = 11_520
"""Training samples in the quick form: whole rounds of 10 and of 30 steps."""
NUM_SAMPLES = {
    "ours": (128_000, 23_040),
    "ddp.100": (12_800, 1280),
    "ddp.25": (5120, 1280),
    "powersgd": (64_000, 2560),
}
"""Samples of a run in the full and the quick form."""
UNCOMPRESSED_STEPS = 2
"""Steps of PowerSGD at the start that send the whole gradients. The speed leaves them out."""
MASTER_PORT = "29500"


def train(
    hosts: Cluster, mbit: float, data: str, num_samples: int, arguments: Sequence[str]
) -> float:
    """Return the samples per second of sync-easgd at a link rate."""
    hosts.limit(mbit)
    result = hosts.train(*_common(data, num_samples), *arguments)
    return float(result["steady_samples_per_s"])


def train_ddp(hosts: Cluster, mbit: float, data: str, num_samples: int, *arguments: str) -> float:
    """Return the samples per second of torchrun's DDP at a link rate, with further options."""
    hosts.limit(mbit)
    path = hosts.folder / "ddp.json"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    programs = [
        (
            torchrun, "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1",
            "--master-addr", hosts.hosts.address(0), "--master-port", MASTER_PORT,
            "-m", "benchmarks.peers.ddp", "--model", "lenet", "--data", data,
            "--batch-size", str(BATCH_SIZE), "--samples", str(num_samples), "--seed", "0",
            "--untimed-steps", str(UNCOMPRESSED_STEPS), "--result", str(path), *arguments,
        )
        for rank in range(2)
    ]  # fmt: skip
    hosts.run(programs, env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})
    result = json.loads(path.read_text())
    path.unlink()
    return float(result["samples_per_s"])


def samples_to(hosts: Cluster, data: str, seed: int, arguments: Sequence[str]) -> float:
    """Return the samples at the first evaluation with 98.5%, or infinity."""
    hosts.limit(UNLIMITED_MBIT)
    result = hosts.train(
        *_common(data, SCORED_SAMPLES), *arguments, "--seed", str(seed),
        "--evaluation.every-samples", str(SCORED_EVERY), "--stop-at-accuracy", str(ACCURACY),
        is_scored=True,
    )  # fmt: skip
    reached = [e["samples"] for e in result["evaluations"] if e["accuracy"] >= ACCURACY]
    return float(min(reached, default=math.inf))


def _common(data: str, num_samples: int) -> tuple[str, ...]:
    return (
        "--data", data, "--model", "lenet", "--method", "sync-easgd", "--workers", "2",
        "--batch-size", str(BATCH_SIZE), "--samples", str(num_samples),
    )  # fmt: skip


def measure_rates(
    hosts: Cluster, report: Report, data: str, options: argparse.Namespace, mbits: Sequence[int]
) -> None:
    """Measure and report the speed of all cases, interleaved."""
    num = {name: counts[options.quick] for name, counts in NUM_SAMPLES.items()}
    cases: dict[str, Callable[[], float]] = {
        "unlimited": partial(train, hosts, UNLIMITED_MBIT, data, num["ours"], ())
    }
    settings: dict[str, Sequence[str]] = {"unlimited": ()}
    for mbit in mbits:
        for name, arguments in (("ours", SETTINGS), ("also", shlex.split(options.also))):
            if arguments:
                settings[f"{name}.{mbit}"] = arguments
                cases[f"{name}.{mbit}"] = partial(train, hosts, mbit, data, num["ours"], arguments)
        cases[f"ddp.{mbit}"] = partial(train_ddp, hosts, mbit, data, num[f"ddp.{mbit}"])
        cases[f"ddp-powersgd.{mbit}"] = partial(
            train_ddp, hosts, mbit, data, num["powersgd"], "--powersgd"
        )
    rates = interleaved(cases, repeats=options.repeats or (1 if options.quick else 5))
    report.add_table(
        ("case", "samples/s", "of the unlimited", "settings"),
        [
            (name, Spread.of(of).text(",.0f"), f"{ratios(of, rates['unlimited']).median:.1%}",
             f"`{shlex.join(settings.get(name, ())) or '-'}`")
            for name, of in rates.items()
        ],
    )  # fmt: skip
    report.add_figures(
        *(
            Figure(name=f"thin_link.{case}.samples_per_s", value=Spread.of(of))
            for case, of in rates.items()
        )
    )
    for mbit in mbits:
        report.add_figures(*_rate_figures(rates, mbit))


def _rate_figures(rates: Mapping[str, Sequence[float]], mbit: int) -> list[Figure]:
    figures = []
    for name in ("ours", "also"):
        if (case := f"{name}.{mbit}") not in rates:
            continue
        kept = ratios(rates[case], rates["unlimited"])
        figures.append(Figure(name=f"thin_link.{case}.kept", value=kept, target=KEPT))
        over = ratios(rates[case], rates[f"ddp.{mbit}"])
        figures.append(Figure(name=f"thin_link.{case}.over_ddp", value=over, target=OVER_DDP[mbit]))
        over = ratios(rates[case], rates[f"ddp-powersgd.{mbit}"])
        figures.append(Figure(name=f"thin_link.{case}.over_ddp_powersgd", value=over))
    return figures


def measure_accuracy(hosts: Cluster, report: Report, options: argparse.Namespace) -> None:
    """Measure and report the samples to 98.5%, with a seed per repeat."""
    seeds = range(options.repeats or 3)
    arguments_of: dict[str, Sequence[str]] = {"defaults": (), "ours": SETTINGS}
    samples: dict[str, list[float]] = {name: [] for name in arguments_of}
    for seed in seeds:
        for name, arguments in arguments_of.items():
            samples[name].append(samples_to(hosts, options.data, seed, arguments))
            print(f"  seed {seed} {name}: {samples[name][-1]:,.0f} samples", flush=True)
    report.add_table(
        (f"samples to {ACCURACY:.1%}", *(f"seed {seed}" for seed in seeds)),
        [(name, *(f"{count:,.0f}" for count in counts)) for name, counts in samples.items()],
    )
    name = "thin_link.ours.samples_to_98.5"
    if math.inf in samples["defaults"]:  # the ratio is undefined
        report.add_text(f"The defaults did not reach {ACCURACY:.1%} with each seed: no figure.")
        return
    more = ratios(samples["ours"], samples["defaults"])
    report.add_figures(Figure(name=name, value=more, target=MORE_SAMPLES, is_better="less"))


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure and report; return the argument of ``sys.exit``."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "MNIST as a folder of Parquet"},
        also={"default": "", "help": "further settings to measure, as one argument"},
    ).parse_args(argv)
    if reason := why_not():
        return reason
    options.data = data_at(options.data)
    mbits = MBITS[:1] if options.quick else MBITS
    report = Report.of_command("thin_link", options)
    report.add_text("LeNet on MNIST, two hosts with one worker each, 64 samples a step.")
    try:
        with cluster(2) as hosts:
            cut = partial(cut_set, options.data, hosts.folder / "set", num_train=CUT)
            measure_rates(hosts, report, cut() if options.quick else options.data, options, mbits)
            if options.quick:
                report.add_text(
                    "These short runs are dominated by their start and show little of the steady "
                    "speed. Only the full form measures the samples to 98.5%."
                )
            else:
                measure_accuracy(hosts, report, options)
    except RunError as error:
        return f"{error}"
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
