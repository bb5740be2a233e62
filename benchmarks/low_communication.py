"""Compares the methods that send little, with equal trials and equal samples.

Command:   python -m benchmarks.low_communication EXPERIMENT    (--quick: one trial, 3,000 samples)

- ``defaults``: `diloco` and `sync-easgd` as they are without any setting, on MNIST; samples to 99%.
- ``images``: `sync-easgd`, `local-sgd`, `diloco`, `sparse-loco` and `muloco`, tuned, on MNIST.
- ``four``: the same with four workers, and the settings that ``images`` chose.
- ``skew``: `local-sgd` and `scaffold`, tuned, where the classes of the workers differ.
- ``speeds``: `local-sgd` and `fednova`, tuned, on the same data, where one of the workers is slow.
- ``text``: `diloco`, `sparse-loco` and `muloco`, tuned, with a small GPT over the bytes of the
  topics of Python's own help.

A method has twelve trials with the first seed, of rates of its own, and three seeds with the best
of them. Complete runs in the folder of ``--runs`` are kept, so an experiment may be interrupted.
Each experiment has a report of its own; all of them take hours.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.programs import ROOT, data_at

_TRIALS, _SEEDS = 12, 3
_TARGET = 0.99
_SAMPLES_OVER_EASGD = 1.5
"""How many times the samples of sync-easgd the default of diloco may need."""
_PERIOD = "30"
_FLAGS = {
    "optimizer.lr": "--lr",
    "method.period": "--period",
    "method.outer_lr": "--method.outer-lr",
}
"""Options of the settings that are chosen."""


@dataclass(frozen=True)
class Contender:
    """A method with its fixed settings and those to choose."""

    method: str
    tune: str = ""
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """Methods that train on the same data, for equally many samples."""

    contenders: tuple[Contender, ...]
    samples: int = 180_000
    workers: int = 2
    words: tuple[str, ...] = ()
    """Further options of all runs."""
    like: str = ""
    """The experiment whose chosen settings are taken; empty: this one chooses."""
    is_text: bool = False
    slow_by_s: float = 0.0
    """Seconds that each step of one worker takes longer."""
    evaluations: int = 6


@dataclass
class Scored:
    """The runs of a method with the chosen settings, one for each seed."""

    method: str
    chosen: Mapping[str, Any]
    runs: list[Mapping[str, Any]] = field(default_factory=list)

    def spread(self, name: str) -> Spread:
        """Return the spread of a figure over the seeds; one that is missing is infinite."""
        known = (run.get(name) for run in self.runs)
        return Spread.of([float("inf") if value is None else float(value) for value in known])


_OF_EASGD = "lr=0.1:0.2:0.4:0.8,period=4:10:30"
_OF_MEAN = "lr=0.1:0.2:0.4:0.8,method.outer_lr=0.7:1.0:1.3"
_OF_DILOCO = "lr=0.05:0.1:0.2:0.4,method.outer_lr=0.4:0.7:1.0"
_OF_MUON = "lr=0.003:0.01:0.02:0.05,method.outer_lr=0.5:0.7:0.9"
_OF_SPARSE = "lr=0.2:0.4:0.8,method.outer_lr=0.7:1.0:1.3:1.6"
_IMAGES = (
    Contender("sync-easgd", _OF_EASGD),
    Contender("local-sgd", _OF_MEAN, ("--period", _PERIOD)),
    Contender("diloco", _OF_DILOCO, ("--period", _PERIOD)),
    Contender("sparse-loco", _OF_SPARSE, ("--period", _PERIOD)),
    Contender("muloco", _OF_MUON, ("--period", _PERIOD)),
)
_ADAMW = ("--optimizer", "adamw")
EXPERIMENTS = {
    "defaults": Experiment((Contender("sync-easgd"), Contender("diloco")), evaluations=12),
    "images": Experiment(_IMAGES),
    "four": Experiment(_IMAGES, workers=4, like="images"),
    "skew": Experiment(
        (
            Contender("local-sgd", _OF_MEAN, ("--period", _PERIOD)),
            Contender("scaffold", _OF_MEAN, ("--period", _PERIOD)),
        ),
        words=("--skew", "0.1"),
    ),
    "speeds": Experiment(
        (
            Contender("local-sgd", _OF_MEAN, ("--period", _PERIOD)),
            Contender("fednova", _OF_MEAN, ("--period", _PERIOD)),
        ),
        words=("--skew", "0.1", "--steps-by-speed"),
        slow_by_s=0.035,
    ),
    "text": Experiment(
        (
            Contender("diloco", "lr=0.001:0.002:0.004:0.008,method.outer_lr=0.4:0.7:1.0",
                      ("--period", _PERIOD, *_ADAMW)),
            Contender("sparse-loco", "lr=0.001:0.002:0.004:0.008,method.outer_lr=0.4:0.7:1.0",
                      ("--period", _PERIOD, *_ADAMW)),
            Contender("muloco", "lr=0.001:0.002:0.004:0.008,method.outer_lr=0.5:0.7:0.9",
                      ("--period", _PERIOD)),
        ),
        samples=96_000,
        words=("--model", "gpt-nano", "--context", "64", "--batch-size", "16"),
        is_text=True,
    ),
}  # fmt: skip


def main() -> int:
    """Run an experiment and report it."""
    parser = options_of(
        __doc__,
        runs={"type": Path, "help": "folder of the runs; complete ones are kept"},
        data={"default": "../shared/data/mnist", "help": "MNIST in Parquet"},
    )
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    options = parser.parse_args()
    if (other := EXPERIMENTS[options.experiment].like) and options.runs is None:
        parser.error(f"--runs must be the folder of {other}, whose settings it takes")
    with tempfile.TemporaryDirectory() as folder:
        place = options.runs or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        _report(options, _scores(options, place))
    return 0


def _scores(options: argparse.Namespace, place: Path) -> list[Scored]:
    experiment = EXPERIMENTS[options.experiment]
    shared = [
        *_data_of(experiment, options, place),
        *experiment.words,
        *_slowness(experiment, place),
    ]
    samples = 3000 if options.quick else experiment.samples
    shared += ["--samples", str(samples)]
    shared += ["--evaluation.every-samples", str(samples // experiment.evaluations)]
    shared += ["--workers", str(experiment.workers), "--cpus-per-worker", "0.5"]
    scores = []
    for contender in experiment.contenders:
        out = place / options.experiment / contender.method
        words = [*shared, *contender.words]
        if experiment.like:
            chosen = chosen_of(place / experiment.like / contender.method, contender.method)
            words += [w for n, v in chosen.chosen.items() for w in (_FLAGS[n], str(v))]
        elif contender.tune:
            words += ["--tune", contender.tune, "--trials", str(1 if options.quick else _TRIALS)]
        seeds = str(1 if options.quick else _SEEDS)
        command = ["--methods", contender.method, "--seeds", seeds, "--target", str(_TARGET)]
        command += ["--out", str(out), "--run.progress", "none", *words]
        subprocess.run([sys.executable, "-m", "raydl", "compare", *command], check=True, cwd=ROOT)
        scores.append(chosen_of(out, contender.method))
    return scores


def _data_of(experiment: Experiment, options: argparse.Namespace, place: Path) -> list[str]:
    if not experiment.is_text:
        return ["--data", data_at(options.data), "--model", "lenet"]
    text = place / "topics.txt"
    topics = pydoc_data.topics.topics
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return ["--data", str(text)]


def _slowness(experiment: Experiment, place: Path) -> list[str]:
    """Return the option by which one worker is slow, if one is."""
    if not experiment.slow_by_s:
        return []
    plan = place / "slow.yaml"
    plan.write_text(
        f"faults:\n  - {{fault: slow, target: w1, at: step 0, by_s: {experiment.slow_by_s}}}\n"
    )
    return ["--fault-plan", str(plan)]


def chosen_of(out: Path, method: str) -> Scored:
    """Return the runs of a comparison of one method that have the chosen settings."""
    runs = [r for r in json.loads((out / "comparison.json").read_text())["runs"] if not r["reason"]]
    by_trial: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_trial.setdefault(json.dumps(run["trial"], sort_keys=True), []).append(run)
    trial, of_trial = max(by_trial.items(), key=lambda item: len(item[1]))
    return Scored(method, json.loads(trial), of_trial)


def _report(options: argparse.Namespace, scores: Sequence[Scored]) -> None:
    name = f"low_communication_{options.experiment}"
    report = Report(
        name, f"python -m benchmarks.low_communication {options.experiment}", options.quick
    )
    experiment = EXPERIMENTS[options.experiment]
    is_text = experiment.is_text
    report.add_table(
        ("method", "chosen", "center loss" if is_text else "center accuracy",
         *(() if is_text else (f"samples to {_TARGET:.0%}",)),
         "steps a round", "bytes", "bytes a message"),
        [_row(scored, is_text=is_text) for scored in scores],
    )  # fmt: skip
    report.add_figures(*_figures(options.experiment, scores))
    report.close(options.out)


def _row(scored: Scored, *, is_text: bool) -> tuple[str, ...]:
    settings = ", ".join(f"{n.rpartition('.')[2]} {v:g}" for n, v in scored.chosen.items())
    sent, messages = scored.spread("bytes").median, scored.spread("messages").median
    return (
        f"`{scored.method}`",
        settings or "defaults",
        scored.spread("center_loss" if is_text else "center_accuracy").text(".4f"),
        *(() if is_text else (_samples_to_target(scored),)),
        scored.spread("period").text(".3g"),
        f"{sent / 1e6:,.2f} MB",
        f"{sent / messages:,.0f}" if messages else "",
    )


def _samples_to_target(scored: Scored) -> str:
    return scored.spread("samples_to_target").text(",.0f").replace("inf", "never")


def _figures(experiment: str, scores: Sequence[Scored]) -> list[Figure]:
    by = {scored.method: scored for scored in scores}

    def points_below(one: str, other: str, name: str, target: float = 0.0) -> Figure:
        gap = [
            100 * (b["center_accuracy"] - a["center_accuracy"])
            for a, b in zip(by[one].runs, by[other].runs, strict=True)
        ]
        return Figure(
            name=f"{experiment}.{name}", value=Spread.of(gap), target=target, is_better="less"
        )

    def loss_over(one: str, other: str, target: float) -> Figure:
        ratio = [
            a["center_loss"] / b["center_loss"]
            for a, b in zip(by[one].runs, by[other].runs, strict=True)
        ]
        name = f"{experiment}.loss_of_{one}_over_{other}"
        return Figure(name=name, value=Spread.of(ratio), target=target, is_better="less")

    def bytes_over(one: str, other: str) -> Figure:
        sent = [
            by[m].spread("bytes").median / by[m].spread("messages").median for m in (one, other)
        ]
        value = Spread.of([sent[1] / sent[0]])
        return Figure(name=f"{experiment}.wire_of_{other}_over_{one}", value=value)

    match experiment:
        case "defaults":
            easgd, diloco = (by[m].spread("samples_to_target") for m in ("sync-easgd", "diloco"))
            # Where sync-easgd does not get there, it needs at least all samples.
            least = min(easgd.median, EXPERIMENTS["defaults"].samples)
            value = Spread.of([diloco.median / least])
            name = "defaults.samples_of_diloco_over_sync_easgd"
            return [Figure(name=name, value=value, target=_SAMPLES_OVER_EASGD, is_better="less")]
        case "images" | "four":
            return [
                points_below("sparse-loco", "diloco", "points_of_sparse_loco_below_diloco", 0.2),
                points_below("muloco", "diloco", "points_of_muloco_below_diloco"),
                bytes_over("sparse-loco", "diloco"),
            ]
        case "skew":
            return [points_below("scaffold", "local-sgd", "points_of_scaffold_below_local_sgd")]
        case "speeds":
            return [points_below("fednova", "local-sgd", "points_of_fednova_below_local_sgd")]
        case _:
            return [
                loss_over("sparse-loco", "diloco", 1.01),
                loss_over("muloco", "diloco", 1.0),
                bytes_over("sparse-loco", "diloco"),
            ]


if __name__ == "__main__":
    sys.exit(main())
