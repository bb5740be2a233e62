"""Two hosts on a thin link: what sync-easgd keeps of its rate, beside torchrun's DDP.

Command:   python -m benchmarks.thin_link            (--quick: at 100 Mbit/s alone, and no accuracy)

Two hosts (network namespaces, ``hosts.py``), one worker in each, LeNet on MNIST, 64 samples a step:

- at 10 Gbit/s, sync-easgd with the defaults of ``raydl train``: the unlimited rate;
- at 100 and at 25 Mbit/s, sync-easgd with ``SETTINGS``, and DDP by torchrun.

A rate is samples over seconds of training: for raydl from its first record of a round to the last
one before the center goes back, for DDP from the first step to the last. Links are changed between
runs; scores and checkpoints are off, and the cases interleaved. A case with fewer samples per
second gets fewer samples, that all may take as long. ``--also`` measures further settings at each
rate.

What the settings cost in samples to 98.5% is taken on links that limit nothing: with one seed a
synchronous method gives the same bits on any link. A center is scored at the first round after
every 2,500 samples; all runs are as long, so that the learning rate takes the same course.
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
"""What ``raydl train`` is told: as many steps between messages as by default, each a third."""
MBITS = (100, 25)
KEPT = 0.95
OVER_DDP = {100: 6.0, 25: 20.0}
ACCURACY, MORE_SAMPLES = 0.985, 1.05
"""What the center should reach, and the samples that may take, in those of the defaults."""
BATCH_SIZE, SCORED_EVERY = 64, 2500
SCORED_SAMPLES = 180_000
CUT = 11_520
"""Training samples in the quick form: whole rounds of 10 and of 30 steps."""
NUM_SAMPLES = {"ours": (128_000, 23_040), "ddp.100": (12_800, 1280), "ddp.25": (5120, 1280)}
"""Of a run, in the full and the quick form."""
MASTER_PORT = "29500"


def train(hosts: Cluster, mbit: float, data: str, num_samples: int, words: Sequence[str]) -> float:
    """Return the samples per second of sync-easgd on links of a rate."""
    hosts.limit(mbit)
    result = hosts.train(*_common(data, num_samples), *words)
    return float(result["steady_samples_per_s"])


def train_ddp(hosts: Cluster, mbit: float, data: str, num_samples: int) -> float:
    """Return the samples per second of DDP by torchrun on links of a rate."""
    hosts.limit(mbit)
    told = hosts.folder / "ddp.json"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    programs = [
        (
            torchrun, "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1",
            "--master-addr", hosts.hosts.address(0), "--master-port", MASTER_PORT,
            "-m", "benchmarks.peers.ddp", "--model", "lenet", "--data", data,
            "--batch-size", str(BATCH_SIZE), "--samples", str(num_samples), "--seed", "0",
            "--result", str(told),
        )
        for rank in range(2)
    ]  # fmt: skip
    hosts.run(programs, env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})
    result = json.loads(told.read_text())
    told.unlink()
    return float(result["samples"]) / float(result["seconds"])


def samples_to(hosts: Cluster, data: str, seed: int, words: Sequence[str]) -> float:
    """Return the samples of the first score of 98.5%; infinity: there was none."""
    hosts.limit(UNLIMITED_MBIT)
    result = hosts.train(
        *_common(data, SCORED_SAMPLES), *words, "--seed", str(seed),
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
    """Take all rates, interleaved, and report them."""
    num = {name: counts[options.quick] for name, counts in NUM_SAMPLES.items()}
    cases: dict[str, Callable[[], float]] = {
        "unlimited": partial(train, hosts, UNLIMITED_MBIT, data, num["ours"], ())
    }
    told: dict[str, Sequence[str]] = {"unlimited": ()}
    for mbit in mbits:
        for name, words in (("ours", SETTINGS), ("also", shlex.split(options.also))):
            if words:
                told[f"{name}.{mbit}"] = words
                cases[f"{name}.{mbit}"] = partial(train, hosts, mbit, data, num["ours"], words)
        cases[f"ddp.{mbit}"] = partial(train_ddp, hosts, mbit, data, num[f"ddp.{mbit}"])
    rates = interleaved(cases, repeats=options.repeats or (1 if options.quick else 5))
    report.add_table(
        ("case", "samples/s", "of the unlimited", "settings"),
        [
            (name, Spread.of(of).text(",.0f"), f"{ratios(of, rates['unlimited']).median:.1%}",
             f"`{shlex.join(told.get(name, ())) or '-'}`")
            for name, of in rates.items()
        ],
    )  # fmt: skip
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
    return figures


def measure_accuracy(hosts: Cluster, report: Report, options: argparse.Namespace) -> None:
    """Take the samples to 98.5%, a seed per repeat, and report them."""
    seeds = range(options.repeats or 3)
    words_of: dict[str, Sequence[str]] = {"defaults": (), "ours": SETTINGS}
    found: dict[str, list[float]] = {name: [] for name in words_of}
    for seed in seeds:
        for name, words in words_of.items():
            found[name].append(samples_to(hosts, options.data, seed, words))
            print(f"  seed {seed} {name}: {found[name][-1]:,.0f} samples", flush=True)
    report.add_table(
        (f"samples to {ACCURACY:.1%}", *(f"seed {seed}" for seed in seeds)),
        [(name, *(f"{count:,.0f}" for count in counts)) for name, counts in found.items()],
    )
    name = "thin_link.ours.samples_to_98.5"
    if math.inf in found["defaults"]:  # no ratio to that says anything
        report.add_text(f"The defaults did not come to {ACCURACY:.1%} with each seed: no figure.")
        return
    more = ratios(found["ours"], found["defaults"])
    report.add_figures(Figure(name=name, value=more, target=MORE_SAMPLES, is_better="less"))


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure, and report; the return value is what ``sys.exit`` takes."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "MNIST as a folder of Parquet"},
        also={"default": "", "help": "settings to measure as well, as one word"},
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
                    "Runs of seconds, in which processes warm up and connections open, tell little "
                    "of what is kept. Samples to 98.5% are measured in the full form alone."
                )
            else:
                measure_accuracy(hosts, report, options)
    except RunError as error:
        return f"{error}"
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
