"""Repeats the experiments of SC17 as far as one small machine carries them.

Command:   python -m benchmarks.paper          (--quick: two tables, short; --only NAME,NAME)

- ``layers`` (SC17: packed layout): samples/s of sync-easgd with one message per exchange, over
  those with a message per tensor; LeNet has 8 tensors, ResNet-20 has 65.
- ``partition`` (SC17: divide and conquer inside a chip): samples/s of one machine divided into 1,
  2, 4 and 8 workers, which form one group with synchronous SGD (``--group-size``) and share the
  cores and a batch of 128 samples; so all train the same weights, up to rounding.
- ``batch`` (SC17: influence of the batch size): samples and seconds to 98.5% on MNIST by batch per
  worker, once with one learning rate and once in proportion to the batch.
- ``time`` (SC17: eight time parts): share of each part in a worker's time, for all methods.
- ``weak`` (SC17: weak scaling): efficiency of GoogLeNet and VGG-19 on 64 nodes of 68 cores, as
  ``raydl plan`` predicts it from a step that is measured on one core here: once with 8 samples in a
  step of each core, once with 8 in a step of each node, which then computes 68 times as fast as the
  core; the second is a lower bound. Beside it the efficiencies of SC17.

Compare the shapes of the tables with the paper, not their figures: the paper had 16 to 4,352 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.efficiency import total_speed
from benchmarks.ladder import add_time_parts
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import ROOT, RunError, data_at
from benchmarks.runs import NO_SCORES, Trained, Workplace, workplace
from benchmarks.time_to_accuracy import reached_by_raydl
from raydl.methods import METHODS

_SKIPPED_S = 2.0
"""Seconds at the start of a run that are not measured."""
_STEP_S = 600.0
"""Time-out for a measured step, in seconds."""
CORES_OF_NODE, NODES = 68, 64
"""SC17's machine: Knights Landing chips, 4,352 cores in all."""
PUBLISHED = {
    "googlenet": (0.915, "91.5% on 4,253 cores; Intel Caffe 87% on 2,176 (from memory)"),
    "vgg19": (0.802, "80.2% on 4,352 cores; Intel Caffe 62% on 2,176 (from memory)"),
}
"""Efficiencies of SC17: the target, and a sentence."""


@dataclass
class Setup:
    """The workplace of the experiments, their data and their lengths."""

    work: Workplace
    mnist: str
    cifar: str
    """Folders of Parquet."""
    seconds: float
    """Training time of a run whose speed is measured."""
    repeats: int
    is_quick: bool

    def data_for(self, model: str) -> str:
        """Return the data of a model: MNIST for LeNet, else CIFAR-10."""
        return self.mnist if model == "lenet" else self.cifar

    def speed(self, model: str, *arguments: str) -> float:
        """Return the samples per second of all workers of a run."""
        run = self.train(model, "--seconds", str(self.seconds), *NO_SCORES, *arguments)
        return total_speed([run.points], skipped=_SKIPPED_S)

    def train(self, model: str, *arguments: str) -> Trained:
        """Run ``raydl train`` on this machine."""
        return self.work.train("--model", model, "--data", self.data_for(model), *arguments)


def measure_layers(setup: Setup, report: Report) -> None:
    """Compare one message per exchange with a message per tensor."""
    arguments = ("--method", "sync-easgd", "--period", "1", "--workers", "2")
    for model in ("lenet",) if setup.is_quick else ("lenet", "resnet20"):
        cases = {
            "per tensor": partial(setup.speed, model, *arguments, "--exchange.no-packed"),
            "packed": partial(setup.speed, model, *arguments),
        }
        speeds = interleaved(cases, repeats=setup.repeats)
        report.add_speeds(f"messages, {model}", speeds, "per tensor")
        value = ratios(speeds["packed"], speeds["per tensor"])
        report.add_figures(Figure(name=f"paper.layers.{model}.packed", value=value, target=1.0))


def measure_partition(setup: Setup, report: Report) -> None:
    """Divide the cores of this machine among 1, 2, 4 and 8 workers of one group."""
    num_cores, batch = os.cpu_count() or 1, 128

    def speed(parts: int) -> float:
        return setup.speed(
            "alexnet-cifar", "--method", "sync-easgd", "--workers", str(parts),
            "--group-size", str(parts), "--batch-size", str(batch // parts), "--period", "2",
            "--cpus-per-worker", f"{num_cores / parts:g}",
        )  # fmt: skip

    parts = (1, 2, 4, 8)
    names = {number: f"{number} of {max(1, num_cores // number)} threads" for number in parts}
    cases = {names[number]: partial(speed, number) for number in parts}
    speeds = interleaved(cases, repeats=setup.repeats)
    report.add_speeds("parts of the machine", speeds, names[1])
    for number in parts[1:]:
        value = ratios(speeds[names[number]], speeds[names[1]])
        report.add_figures(Figure(name=f"paper.partition.{number}-parts", value=value))


def measure_batch(setup: Setup, report: Report) -> None:
    """Vary the batch of a worker."""
    lr, base, goal = METHODS["sync-easgd"].local_step.lr, 64, 0.985
    sizes = (64, 256) if setup.is_quick else (16, 32, 64, 128, 256, 512)

    rows = []
    for size in sizes:
        cells = [str(size)]
        for rate in (lr, lr * size / base):
            run = setup.train(
                "lenet", "--workers", "2", "--batch-size", str(size), "--lr", f"{rate:g}",
                "--samples", "300000", "--evaluation.every-samples", "15000",
                "--stop-at-accuracy", str(goal),
            )  # fmt: skip
            reached = reached_by_raydl(run, accuracy=goal)
            end = f"{reached.samples:,}, {reached.seconds:.1f} s"
            cells += [
                f"{run.result['samples'] / run.result['seconds']:,.0f}",
                end if reached.is_reached else "never",
            ]
            print(f"  batch {size} at {rate:g}: {cells[-1]}", flush=True)
        rows.append(cells)
    report.add_text(
        f"Learning rate {lr:g}, and {lr:g} times the batch over {base}; of at most 300,000 samples"
    )
    columns = ("samples/s", f"to {goal:.1%}")
    report.add_table(
        ("batch", *columns, *(f"{name}, rate in proportion" for name in columns)), rows
    )


def measure_time(setup: Setup, report: Report) -> None:
    """List the eight time parts of all methods."""
    methods = ("sync-easgd", "async-easgd") if setup.is_quick else tuple(METHODS)
    length = ("--workers", "2", "--seconds", str(setup.seconds), *NO_SCORES)
    results = {}
    for method in methods:
        results[method] = setup.train("lenet", "--method", method, *length).result
        print(f"  {method}", flush=True)
    add_time_parts(report, "method", results)


def measure_weak(setup: Setup, report: Report) -> None:
    """Predict the weak scaling of SC17's networks on SC17's machine."""
    rows = []
    for model, (target, published) in PUBLISHED.items():
        here = _plan(
            "--model", model, "--data-shape", "3x224x224", "--classes", "1000",
            "--batch-size", "8", "--workers", "1",
        )  # fmt: skip
        step_s = here["workload"]["step_s"]
        size = str(here["workload"]["parameters"])
        # With the same samples for each core, a step of a node takes as long as one of a core.
        for divisor, batch in ((1, "8 for each core"), (CORES_OF_NODE, "8 for each node")):
            predicted = _plan(
                "--parameters", size, "--step-s", str(step_s / divisor), "--network", "fdr",
                "--method", "sync-sgd,sync-easgd", "--period", "1", "--workers", f"1:{NODES}",
            )  # fmt: skip
            ends = [cost["predictions"][-1]["efficiency"] for cost in predicted["methods"]]
            rows.append(
                (model, batch, f"{step_s / divisor:.2f} s", *(f"{end:.1%}" for end in ends),
                 published)
            )  # fmt: skip
            if divisor > 1:
                value = Spread.of([ends[-1]])
                report.add_figures(
                    Figure(name=f"paper.weak.{model}.predicted", value=value, target=target)
                )
    report.add_text(
        f"Predicted efficiency on {NODES} nodes of {CORES_OF_NODE} cores, FDR InfiniBand, period 1"
    )
    report.add_table(
        ("network", "samples in a step", "step", "sync-sgd", "sync-easgd", "SC17"), rows
    )


def _plan(*arguments: str) -> Any:
    """Return the predictions of ``raydl plan``."""
    command = [sys.executable, "-m", "raydl", "plan", *arguments, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_STEP_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunError(f"raydl plan: {done.stderr.strip()}")
    return json.loads(done.stdout)


EXPERIMENTS: dict[str, Callable[[Setup, Report], None]] = {
    "layers": measure_layers,
    "partition": measure_partition,
    "batch": measure_batch,
    "time": measure_time,
    "weak": measure_weak,
}
QUICK = ("layers", "time")


def _parser() -> argparse.ArgumentParser:
    data = "../shared/data"
    return options_of(
        __doc__,
        only={"help": f"experiments with commas: {', '.join(EXPERIMENTS)}; default: all"},
        data={"default": f"{data}/mnist", "help": "MNIST as a folder of Parquet"},
        cifar={"default": f"{data}/cifar10", "help": "CIFAR-10 as a folder of Parquet"},
        seconds={"type": float, "help": "seconds of training of each run"},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = _parser()
    options = parser.parse_args(argv)
    default = QUICK if options.quick else tuple(EXPERIMENTS)
    chosen = options.only.split(",") if options.only else default
    if unknown := [name for name in chosen if name not in EXPERIMENTS]:
        parser.error(f"--only: {', '.join(unknown)}: no such experiment")
    report = Report.of_command("paper", options)
    with workplace() as work:
        setup = Setup(
            work,
            data_at(options.data),
            data_at(options.cifar),
            seconds=options.seconds or (5.0 if options.quick else 12.0),
            repeats=options.repeats or (1 if options.quick else 3),
            is_quick=options.quick,
        )
        failed = []
        for name in chosen:
            try:
                EXPERIMENTS[name](setup, report)
            except (RunError, AssertionError) as error:  # the other experiments take an hour
                report.add_text(f"{name} was not measured: {error}")
                failed.append(name)
    report.close(options.out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
