"""Measures the handover of a leaving worker's replica to its replacement.

Command:   python -m benchmarks.handover           (--quick: 60 MB instead of 4 GB)

Two workers train on a node each, with the default lease. One node drains, and a replacement takes
over the replica of its worker. With ``--remove`` the worker is removed by ``raydl remove`` and two
workers are the minimum: a checkpoint is written, and training waits for the replacement. Nearly all
of a replica is the state of its optimizer (``large_replicas.py``), so that three replicas fit into
24 GB. Each of Ray's object stores has 200 MB. Measured from outside the run:

driver, private     peak of the driver's private memory (RssAnon) from the drain until two workers
                    train again, minus its peak before, in replicas
driver, all         the same for all memory of the driver (VmRSS)
handed over MB      peak size of the run's folder ``handovers``
to join s           from the drain to the first step of the replacement
pause s             the longest time between two steps of the worker that stays
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.checkpoints import MemorySampler
from benchmarks.large_replicas import MODEL, OPTIMIZER, sizes
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.programs import ROOT, end_cleanly
from benchmarks.watching import Cluster, Watched, WatchError

MEGABYTES, QUICK_MEGABYTES = 4000, 60
CENTER_MEGABYTES = 20
TARGET = 1.2
_UP_S, _JOIN_S = 120.0, 300.0
_STEPS = 40
_ENDLESS = "1000000000"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a handover."""

    private: float
    """Private memory of the driver, in replicas."""
    all: float
    """All memory of the driver, in replicas."""
    megabytes: float
    join_s: float
    pause_s: float


def cost_of(method: str, megabytes: int, *, removes: bool) -> Cost:
    """Return the cost of one handover.

    Args:
        method: training method.
        megabytes: size of a replica.
        removes: whether the worker is removed; else its node drains.

    Raises:
        WatchError: if the run timed out, a worker was lost, or the replacement did not get the
            replica.
    """
    replica, center = megabytes * 1_000_000, CENTER_MEGABYTES * 1_000_000
    os.environ.update(sizes(weights=center, state=max(4, replica - 3 * center)))
    arguments = [
        "-m", "raydl", "train", "--data", "digits", "--model", MODEL, "--optimizer", OPTIMIZER,
        "--batch-size", "4", "--workers", "2" if removes else "1:2", "--period", "4",
        "--samples", _ENDLESS, "--method", method, "--lr", "0.0001",
        "--evaluation.every-epochs", _ENDLESS, "--checkpoint.every-s", "None",
        "--run-dir", "{folder}/run", "--run.progress", "plain",
    ]  # fmt: skip
    with Cluster(num_nodes=3) as cluster, Watched(arguments, cluster) as run:
        folder = run.folder / "run"
        sampler = MemorySampler(run.wait_for_driver(within_s=_UP_S), folder)
        sampler.start()

        def have_stepped(num_workers: int) -> bool:
            steps = run.steps().values()
            return sum(len(of_worker) >= _STEPS for of_worker in steps) == num_workers

        run.wait_until(lambda: have_stepped(2), "both workers train", within_s=_UP_S)
        removed_at, wall = time.monotonic(), time.time()
        if removes:
            _remove(folder)
        else:
            _drain(cluster, folder)
        sizes_seen = [0]

        def has_joined() -> bool:
            sizes_seen.append(_bytes_in(folder / "handovers"))
            return have_stepped(3)

        run.wait_until(has_joined, "the replacement trains", within_s=_JOIN_S)
        sampler.ended.set()
        steps, log = run.steps(), run.log()
    if "was lost" in log or "starts from the center" in log or "not handed over" in log:
        raise WatchError(log)
    newcomer = max(steps.values(), key=lambda of_worker: of_worker[0].began_at)
    stays = max(steps.values(), key=len)
    gaps = [b.began_at - a.began_at for a, b in pairwise(stays) if b.began_at > removed_at]
    before = [sample for sample in sampler.samples if sample.at < wall]
    after = [sample for sample in sampler.samples if sample.at >= wall]
    return Cost(
        private=(max(x.private for x in after) - max(x.private for x in before)) / replica,
        all=(max(x.all for x in after) - max(x.all for x in before)) / replica,
        megabytes=max(sizes_seen) / 1e6,
        join_s=newcomer[0].began_at - removed_at,
        pause_s=max(gaps),
    )


def _remove(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "raydl", "remove", str(folder), "w1"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60,
        capture_output=True,
    )  # fmt: skip


def _drain(cluster: Cluster, folder: Path) -> None:
    """Drain the node of the last worker, as an operator would."""
    workers = json.loads((folder / "status.json").read_text())["workers"]
    nodes = re.findall(r"^node (\w+)$", cluster.log(), re.MULTILINE)
    (node,) = [node for node in nodes if node.endswith(workers[-1]["node"])]
    command = [
        str(Path(sys.executable).with_name("ray")), "drain-node",
        "--address", cluster.environment["RAY_ADDRESS"], "--node-id", node,
        "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
        "--deadline-remaining-seconds", "600",
    ]  # fmt: skip
    environment = {**os.environ, **cluster.environment}
    subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)


def _bytes_in(folder: Path) -> int:
    num_bytes = 0
    for entry in os.scandir(folder) if folder.exists() else ():
        try:
            num_bytes += entry.stat().st_size
        except FileNotFoundError:  # a temporary file that has been renamed
            continue
    return num_bytes


def main() -> None:
    """Measure and report."""
    end_cleanly()
    parser = options_of(
        __doc__,
        megabytes={"type": int, "help": "size of a replica"},
        method={"default": "sync-easgd", "help": "training method"},
        remove={"action": "store_true", "help": "remove the worker, instead of draining its node"},
    )
    options = parser.parse_args()
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else MEGABYTES)
    report = Report.of_command("handover", options)
    costs = [
        cost_of(options.method, megabytes, removes=options.remove)
        for _ in range(options.repeats or 1)
    ]
    report.add_table(
        ("driver, private", "driver, all", "handed over MB", "to join s", "pause s"),
        [
            (f"{c.private:.3f}", f"{c.all:.3f}", f"{c.megabytes:.0f}", f"{c.join_s:.1f}",
             f"{c.pause_s:.1f}")
            for c in costs
        ],
    )  # fmt: skip
    case = f"handover.{megabytes}MB.{options.method}{'.remove' if options.remove else ''}"
    report.add_figures(
        Figure(
            name=f"{case}.driver-private-replicas",
            value=Spread.of([c.private for c in costs]), target=TARGET, is_better="less",
        ),
        Figure(name=f"{case}.driver-all-replicas", value=Spread.of([c.all for c in costs])),
        Figure(name=f"{case}.to-join-s", value=Spread.of([c.join_s for c in costs])),
        Figure(name=f"{case}.pause-s", value=Spread.of([c.pause_s for c in costs])),
    )  # fmt: skip
    report.close(options.out)


if __name__ == "__main__":
    main()
