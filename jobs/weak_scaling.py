"""Measure weak scaling: the work per worker is constant, the number of workers grows.

Command:   python jobs/weak_scaling.py --workers 1,2 --data digits --steps 300 --out runs/weak
Expected:  a table with samples/s, efficiency and the time parts of a step, and the same figures in
           runs/weak/weak_scaling.json; 100% in the first row, less in the following ones
Time:      36 s, of which 7 s are training: every run starts its own workers
Hardware:  two shared CPU cores, busy with other work: 9,319 samples/s with one worker and 8,449
           with two, an efficiency of 45%, since each worker had less than one core

    --workers P,P,P   --out DIR    and every option of `raydl train`; --steps counts per worker

Efficiency is the samples/s per worker, divided by that of the first row. The batch per worker is
constant, so the total batch grows. For a Ray job, choose --out on a persistent disk.
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no install

import tyro

from raydl.cli import parse_train
from raydl.cli.options import STOPPED, print_table
from raydl.config import RunConfig, TrainConfig, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.redaction import redact_values
from raydl.tools.comparison.report import machine
from raydl.tools.comparison.runner import train

_STEPS = 300


@dataclass(frozen=True, kw_only=True)
class WeakScaling:
    """Train with growing numbers of workers, each with the same work, and report the efficiency.

    All options of `raydl train` are accepted, too, and apply to all runs.
    """

    workers: str = "1,2"
    """Numbers of workers, separated by commas; the first one has an efficiency of 100%."""
    out: str | None = None
    """Folder of all runs and of the figures; unset: runs/weak-scaling-DATE."""
    base: Annotated[TrainConfig, tyro.conf.Fixed, tyro.conf.Suppress] = TrainConfig()  # noqa: RUF009

    @property
    def counts(self) -> list[int]:
        """The numbers of workers without repetitions; 0 trains in this process, as one worker."""
        try:
            counts = [int(word) for word in self.workers.split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 0:
            raise ConfigError("workers", f"must be numbers as in 1,2,4, got {self.workers}")
        return list(dict.fromkeys(counts))


def parse(arguments: Sequence[str]) -> WeakScaling:
    """Return the settings for the script's own options and those of `raydl train`."""
    own, others = tyro.cli(
        WeakScaling, args=list(arguments), prog="weak_scaling.py", return_unknown_args=True
    )
    return dataclasses.replace(own, base=parse_train(others))


def plan(scaling: WeakScaling, out: Path) -> list[TrainConfig]:
    """Return the settings of all runs."""
    base, run = scaling.base, scaling.base.run
    if run.resume or run.run_dir is not None or run.storage_path is not None:
        settings = "run.run_dir, run.storage_path and run.resume"
        raise ConfigError(settings, "cannot be set in a measurement; use --out")
    ends = (base.training.epochs, base.training.samples, base.training.seconds)
    if any(end is not None for end in ends):
        settings = "training.epochs, training.samples and training.seconds"
        raise ConfigError(settings, "cannot be set, since the steps are constant; use --steps")
    progress = "none" if run.progress == "auto" else run.progress
    return [
        dataclasses.replace(
            base,
            training=dataclasses.replace(base.training, steps=base.training.steps or _STEPS),
            scaling=dataclasses.replace(base.scaling, num_workers=count),
            run=RunConfig(run_dir=str(out / f"workers-{count}"), progress=progress),
        )
        for count in scaling.counts
    ]


def row(
    config: TrainConfig, figures: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of one run.

    Args:
        config: settings of the run.
        figures: the content of its ``result.json``.
        first: the first row; empty if this is the first row.
    """
    num_workers = max(1, config.scaling.max_workers)
    speed = figures["samples_per_s"] / num_workers
    steps = config.training.steps or _STEPS
    return {
        "workers": num_workers,
        "samples_per_s": figures["samples_per_s"],
        "samples_per_s_and_worker": speed,
        "efficiency": speed / first.get("samples_per_s_and_worker", speed),
        "seconds": figures["seconds"],
        "samples": figures["samples"],
        "communication_share": figures["communication_share"],
        "center_loss": figures["center_loss"],
        "center_accuracy": figures["center_accuracy"],
        "ms_per_step": {
            part: 1e3 * seconds / steps
            for part, seconds in figures["time_parts"].items()
            if part != "initialization"
        },
    }


def measure(scaling: WeakScaling, *, command: str) -> int:
    """Execute the runs one after another, report them, and return the exit status."""
    out = Path(scaling.out or time.strftime("runs/weak-scaling-%Y%m%d-%H%M%S"))
    rows: list[dict[str, Any]] = []
    for config in plan(scaling, out):
        figures = train(config)
        if figures["stopped_by"]:
            return STOPPED.get(figures["stopped_by"], 1)
        rows.append(row(config, figures, rows[0] if rows else {}))
        print(f"{rows[-1]['workers']} worker(s): {rows[-1]['samples_per_s']:,.0f} samples/s")
        values = {
            "command": command,
            "machine": machine(),
            "settings": to_dict(scaling.base),
            "rows": rows,
        }
        (out / "weak_scaling.json").write_text(json.dumps(redact_values(values), indent=2))
    _print(rows)
    print(f"  figures:      {out}/weak_scaling.json")
    return 0


def _print(rows: list[dict[str, Any]]) -> None:
    parts = [part for part in rows[0]["ms_per_step"] if any(r["ms_per_step"][part] for r in rows)]
    head = ["workers", "samples/s", "efficiency", "communication"]
    table = [
        [
            str(r["workers"]),
            f"{r['samples_per_s']:,.0f}",
            f"{r['efficiency']:.0%}",
            f"{r['communication_share'] or 0:.0%}",
        ]
        for r in rows
    ]
    print_table(head, table, numbers=head)
    print("\nmilliseconds of a worker per local step")
    head = ["workers", *(part.replace("_", " ") for part in parts)]
    times = [[str(r["workers"]), *(f"{r['ms_per_step'][p]:.2f}" for p in parts)] for r in rows]
    print_table(head, times, numbers=head)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 after success, 2 for wrong options."""
    command = f"python jobs/weak_scaling.py {shlex.join(arguments)}"
    try:
        return measure(parse(arguments), command=command)
    except RaydlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED["SIGINT"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
