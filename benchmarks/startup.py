"""Measures the time from the command to the first step, compared with Ray Train, and its parts.

Command:   python -m benchmarks.startup            (--quick: form "own" only, once)

Two workers train LeNet; each notes when it begins a step (``watching.py``). The first step is over
when the last worker begins its second. Both sides read the same pictures in their driver and train
the same network with the same batches and one thread per worker. If the repeats are more than one,
each side runs once before it is measured, so that its files are in the page cache. Two forms:

own        no Ray runs; the command starts Ray on this machine. Beside it torchrun with DDP, whose
           ranks each read the pictures, and torchft, whose launcher reads them for its replicas
cluster    a Ray cluster runs, and the command connects to it

For ``raydl without fork server`` Ray starts the processes in its own way, as it does in a version
that raydl was not tested with. The report also has intermediate moments, and the parts of the
driver's work: its imports, by package, and reading the pictures, each measured in its own process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import ROOT, data_at, end_cleanly
from benchmarks.watching import (
    MODEL,
    Cluster,
    Watched,
    WatchError,
    processes_of,
    started_at,
)

NUM_WORKERS = 2
BATCH_SIZE = 64
_ENDLESS = "1000000000"
_UP_S = 180.0
_PROBE_S = 120.0
_END_S = 30.0
_DRIVER, _RAY, _PROCESS, _MODEL, _FIRST, _END = MOMENTS = (
    "the driver has imported, read the pictures and checked the model",
    "the first process of Ray starts",
    "the last worker's process starts",
    "the last worker has imported torch and built its model",
    "the last worker begins its first step",
    "the first step is over",
)
"""Moments of a start, in seconds after the command."""
_RAYDL = (
    "-m", "raydl", "train", "--model", MODEL, "--workers", str(NUM_WORKERS),
    "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS, "--run-dir", "{folder}/run",
    "--run.progress", "plain",
)  # fmt: skip
_NO_FORKS = "raydl without fork server"
_PEER = (
    "-m", "benchmarks.peers.ray_train", "--model", MODEL, "--workers", str(NUM_WORKERS),
    "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS,
)  # fmt: skip
_WITHOUT_RAY = {
    "torchrun": (
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_WORKERS),
        "-m", "benchmarks.peers.ddp", "--model", MODEL, "--batch-size", str(BATCH_SIZE),
        "--samples", _ENDLESS,
    ),
    "torchft": (
        "-m", "benchmarks.peers.torchft_replicas", "--model", MODEL, "--workers", str(NUM_WORKERS),
        "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS,
    ),
}  # fmt: skip
_PARTS = {
    "import torch": "import torch",
    "import the rest of raydl.run.trainer": "import torch; {start}; import raydl.run.trainer",
    "reading the pictures": "import raydl.run.trainer as t; {start}; t.load({data!r})",
    "import ray": "import raydl.run.trainer; {start}; import ray",
}
"""Programs whose time counts from ``start`` on, or as a whole."""

Moments = dict[str, float]


def start(arguments: tuple[str, ...], data: str, cluster: Cluster | None = None) -> Moments:
    """Start a run, wait for its first step, end it, and return the observed moments.

    Args:
        arguments: arguments of the interpreter, without the data.
        data: folder of the data set.
        cluster: cluster of the run; None: the run starts its own Ray.

    Raises:
        WatchError: if the run took no step in time.
    """
    with Watched([*arguments, "--data", data], cluster) as run, ExitStack() as stack:
        if "torch.distributed.run" in arguments:  # its ranks have sessions of their own
            stack.callback(run.end, within_s=_END_S)
        first = f"{NUM_WORKERS} workers have taken a step"
        run.wait_until(lambda: run.num_training() >= NUM_WORKERS, first, within_s=_UP_S)
        steps, built = run.steps(), run.built()
        moments = {
            _PROCESS: max(started_at(pid) for pid in steps),
            _MODEL: max(built[pid] for pid in steps),
            _FIRST: max(of_worker[0].began_at for of_worker in steps.values()),
            _END: max(of_worker[1].began_at for of_worker in steps.values()),
        }
        if run.driver() in built:
            moments[_DRIVER] = built[run.driver()]
        if cluster is None:
            ray = [p for p, line in processes_of(run.process.pid).items() if "gcs_server" in line]
            moments |= {_RAY: min(map(started_at, ray))} if ray else {}
        return {name: moment - run.began_at for name, moment in moments.items()}


def seconds_of_parts(data: str) -> dict[str, float]:
    """Return the seconds of the parts of the driver's work, each measured in its own process."""
    seconds = {}
    for name, program in _PARTS.items():
        clock = "import time; began = time.perf_counter()"
        lines = program.format(start=clock, data=data)
        before = "" if "began" in lines else f"{clock}; "
        output = _run("-c", f"{before}{lines}; print('took', time.perf_counter() - began)").stdout
        seconds[name] = float(output.rpartition("took ")[2])
    return seconds


def seconds_by_package() -> list[tuple[str, float]]:
    """Return the seconds of a driver's slowest imports by package, in descending order."""
    log = _run("-X", "importtime", "-c", "import raydl.run.trainer, ray").stderr
    by_package: Counter[str] = Counter()
    for micros, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", log, re.M):
        by_package[name.partition(".")[0]] += int(micros)
    return [(name, micros / 1e6) for name, micros in by_package.most_common(8)]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True,
        timeout=_PROBE_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def measure(report: Report, form: str, data: str, cluster: Cluster | None, *, repeats: int) -> None:
    """Measure one form and add it to the report."""
    cases: dict[str, Callable[[], Moments]] = {
        "raydl": partial(start, _RAYDL, data, cluster),
        _NO_FORKS: partial(start, (*_RAYDL, "--scaling.no-fork-server"), data, cluster),
        "Ray Train": partial(start, _PEER, data, cluster),
    }
    if cluster is None:
        cases |= {name: partial(start, arguments, data) for name, arguments in _WITHOUT_RAY.items()}
    for name, case in cases.items() if repeats > 1 else ():
        case()
        print(f"  {form}: {name}, not measured", flush=True)
    results = interleaved(cases, repeats=repeats)
    report.add_table(
        (f"{form}: seconds from the command until …", *results),
        [(moment, *(_cell(runs, moment) for runs in results.values())) for moment in MOMENTS],
    )
    totals = {name: [run[_END] for run in runs] for name, runs in results.items()}
    report.add_figures(
        Figure(
            name=f"startup.{form}.of_ray_train",
            value=ratios(totals["raydl"], totals["Ray Train"]),
            target=0.5,
            is_better="less",
        ),
        *(
            Figure(
                name=f"startup.{form}.{name.replace(' ', '-').lower()}_s",
                value=Spread.of(seconds),
                is_better="less",
            )
            for name, seconds in totals.items()
        ),
    )
    if cluster is None:
        slower = [max(pair) for pair in zip(*(totals[n] for n in _WITHOUT_RAY), strict=True)]
        report.add_figures(
            Figure(
                name=f"startup.{form}.of_slower_of_torchrun_and_torchft",
                value=ratios(totals["raydl"], slower),
                target=1.5,
                is_better="less",
            )
        )


def _cell(runs: list[Moments], moment: str) -> str:
    """Return the text of a moment over the runs; below 0 it precedes the command."""
    seconds = [run[moment] for run in runs if moment in run]
    if not seconds:
        return ""
    return "before it" if median(seconds) < 0 else Spread.of(seconds).text()


def main() -> None:
    """Measure and report."""
    data_option = {"default": "../shared/data/mnist", "help": "folder of MNIST"}
    parser = options_of(__doc__, data=data_option)
    options = parser.parse_args()
    end_cleanly()
    data, repeats = data_at(options.data), options.repeats or (1 if options.quick else 5)
    report = Report.of_command("startup", options)
    try:
        measure(report, "own", data, None, repeats=repeats)
        if not options.quick:
            with Cluster(NUM_WORKERS) as cluster:
                time.sleep(5.0)  # until Ray has prestarted a worker per CPU
                measure(report, "cluster", data, cluster, repeats=repeats)
    except WatchError as error:
        sys.exit(f"the start was not measured: {error}")
    parts = [(name, f"{s:.2f}") for name, s in seconds_of_parts(data).items()]
    report.add_table(("part of raydl's driver", "s"), parts)
    packages = [(name, f"{s:.2f}") for name, s in seconds_by_package()]
    report.add_table(("imports by package, without nested imports", "s"), packages)
    report.close(options.out)


if __name__ == "__main__":
    main()
