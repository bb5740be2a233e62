"""Measures the cost of checkpoints: memory of the driver, and pauses of the training.

Command:   python -m benchmarks.checkpoints         (--quick: two workers of 60 MB, once)

Workers train a network of almost only parameters, with momentum, so that a worker's state (weights,
gradients, momentum) is three times its weights; its size is ``--megabytes``. A checkpoint is
written every few seconds. Measured from outside the run:

driver, private     peak of the driver's private memory (RssAnon) while checkpoints are written,
                    minus its peak before the first one, in replicas (thirds of a state)
driver, all         the same for all memory of the driver (VmRSS), including shared memory
pause               the longest time between two steps of a worker near a checkpoint, minus the
                    median over its rounds of the longest time within a round (``watching.py``)
MB/s                bytes of a checkpoint's files over the time from its folder to its manifest

The memory is sampled every 10 ms from /proc. Workers, driver and disk share one machine, which must
hold about twelve replicas per worker. ``--center-megabytes`` sets the size of the weights; the rest
of a state is then an optimizer state that is in memory only as the copy to be written. This permits
many workers with large files on one machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.large_replicas import LIGHT_OPTIMIZER, MODEL, sizes
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.programs import end_cleanly
from benchmarks.watching import Step, Watched

NUM_WORKERS, QUICK_WORKERS = 4, 2
MEGABYTES, QUICK_MEGABYTES = 500, 60
"""Size of a worker's state."""
NUM_CHECKPOINTS, QUICK_CHECKPOINTS = 3, 1
PRIVATE_TARGET, PAUSE_TARGET_S = 1.2, 1.0
_EVERY_S = 8.0
_PERIOD = 4
_SAMPLE_EVERY_S = 0.01
_UP_S, _END_S = 240.0, 180.0
_ENDLESS = "1000000000"


@dataclass(frozen=True)
class MemorySample:
    """The memory of the driver at one moment, in bytes."""

    at: float
    """Unix time."""
    private: int
    all: int


class MemorySampler(threading.Thread):
    """Samples the memory of a driver, and notes new checkpoints, until ``ended`` is set.

    Args:
        pid: process id of the driver.
        folder: folder of its run.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self.samples: list[MemorySample] = []
        self.begun: dict[str, float] = {}
        """Unix time at which each checkpoint's folder appeared, by name."""
        self.ended = threading.Event()
        self._status, self._folder = Path(f"/proc/{pid}/status"), folder / "checkpoints"

    def run(self) -> None:
        """Sample until the end."""
        while not self.ended.wait(_SAMPLE_EVERY_S):
            try:
                lines = self._status.read_text().splitlines()
                names = os.listdir(self._folder) if self._folder.exists() else []
            except OSError:
                return
            kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
            if "RssAnon" in kib:
                private, everything = (int(kib[name]) << 10 for name in ("RssAnon", "VmRSS"))
                self.samples.append(MemorySample(time.time(), private, everything))
            for name in names:
                self.begun.setdefault(name.removeprefix(".partial-"), time.time())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of checkpoints."""

    private: float
    """Private memory of the driver, in replicas."""
    private_megabytes: float
    all: float
    """All memory of the driver, in replicas."""
    pause_s: float
    step_s: float
    """Median seconds of a step."""
    megabytes_per_s: float
    megabytes: float
    """Size of a checkpoint."""


def pause_of(
    steps: Sequence[Step], windows: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """Return (longest pause of a worker near checkpoints, its median step), in seconds.

    Return None if the worker did not train near a checkpoint.

    Args:
        steps: steps of the worker.
        windows: for each checkpoint (vote, end of the write), on the clock of the steps.
    """
    gaps = [(b.began_at, b.began_at - a.began_at) for a, b in pairwise(steps)]
    if len(gaps) < _PERIOD:
        return None
    rounds = [gaps[i : i + _PERIOD] for i in range(0, len(gaps) - _PERIOD + 1, _PERIOD)]
    usual = median(max(gap for _, gap in round) for round in rounds)
    near = [
        gap for at, gap in gaps if any(begin <= at and at - gap <= end for begin, end in windows)
    ]
    return (max(near) - usual, median(gap for _, gap in gaps)) if near else None


def cost_of(
    num_workers: int, megabytes: int, num_checkpoints: int, center_megabytes: int | None = None
) -> Cost:
    """Return the cost of checkpoints in one run.

    Args:
        num_workers: number of workers.
        megabytes: size of each worker's state.
        num_checkpoints: checkpoints to wait for.
        center_megabytes: size of the weights; None: a third of the state.

    Raises:
        WatchError: if the run timed out.
    """
    state = megabytes * 1_000_000
    replica = state // 3 if center_megabytes is None else center_megabytes * 1_000_000
    os.environ.update(sizes(weights=replica, state=state - 3 * replica))
    arguments = [
        "-m", "raydl", "train", "--data", "digits", "--model", MODEL, "--batch-size", "4",
        "--workers", str(num_workers), "--period", str(_PERIOD), "--samples", _ENDLESS,
        "--method", "sync-easgd", "--lr", "0.0001",
        "--cpus-per-worker", "0.1", "--evaluation.every-epochs", _ENDLESS,
        "--checkpoint.every-s", f"{_EVERY_S:g}",
        "--run-dir", "{folder}/run", "--run.progress", "plain",
    ]  # fmt: skip
    arguments += (
        ["--momentum", "0.9"] if center_megabytes is None else ["--optimizer", LIGHT_OPTIMIZER]
    )
    with Watched(arguments) as run:
        folder = run.folder / "run"
        sampler = MemorySampler(run.wait_for_driver(within_s=_UP_S), folder)
        sampler.start()
        all_train = "all workers train"
        run.wait_until(lambda: run.num_training() == num_workers, all_train, within_s=_UP_S)
        complete: dict[str, tuple[float, int]] = {}

        def are_enough() -> bool:
            for manifest in folder.glob("checkpoints/round-*/manifest.json"):
                files = manifest.parent.iterdir()
                size = sum(file.stat().st_size for file in files)
                complete.setdefault(manifest.parent.name, (manifest.stat().st_mtime, size))
            return len(complete) >= num_checkpoints

        run.wait_until(are_enough, f"{num_checkpoints} checkpoints", within_s=_UP_S)
        steps = run.steps()
        sampler.ended.set()
        run.end(within_s=_END_S)
    return _cost(sampler, complete, steps, state // 3)


def _cost(
    sampler: MemorySampler,
    complete: dict[str, tuple[float, int]],
    steps: dict[int, list[Step]],
    replica: int,
) -> Cost:
    first = min(sampler.begun.values())
    # The states are collected shortly before the folder appears.
    before = [sample for sample in sampler.samples if sample.at < first - 3.0]
    after = [sample for sample in sampler.samples if sample.at >= first - 3.0]
    to_monotonic = time.monotonic() - time.time()
    windows = [
        (sampler.begun[name] - 3.0 + to_monotonic, ended + 1.0 + to_monotonic)
        for name, (ended, _) in complete.items()
    ]
    pauses = [p for of_worker in steps.values() if (p := pause_of(of_worker, windows)) is not None]
    print(f"{len(pauses)} of {len(steps)} processes trained near a checkpoint")
    seconds = sum(ended - sampler.begun[name] for name, (ended, _) in complete.items())
    num_bytes = sum(size for _, size in complete.values())
    private = max(x.private for x in after) - max(x.private for x in before)
    return Cost(
        private=private / replica,
        private_megabytes=private / 1e6,
        all=(max(x.all for x in after) - max(x.all for x in before)) / replica,
        pause_s=max(pause for pause, _ in pauses),
        step_s=median(step for _, step in pauses),
        megabytes_per_s=num_bytes / seconds / 1e6,
        megabytes=num_bytes / len(complete) / 1e6,
    )


def main() -> None:
    """Measure and report."""
    end_cleanly()
    parser = options_of(
        __doc__,
        workers={"type": int, "help": "number of workers"},
        megabytes={"type": int, "help": "size of a worker's state"},
        center_megabytes={"type": int, "help": "size of the weights; a third of the state"},
    )
    options = parser.parse_args()
    quick = options.quick
    num_workers = options.workers or (QUICK_WORKERS if quick else NUM_WORKERS)
    megabytes = options.megabytes or (QUICK_MEGABYTES if quick else MEGABYTES)
    report = Report.of_command("checkpoints", options)
    costs = [
        cost_of(
            num_workers,
            megabytes,
            QUICK_CHECKPOINTS if quick else NUM_CHECKPOINTS,
            options.center_megabytes,
        )
        for _ in range(options.repeats or 1)
    ]
    report.add_table(
        ("driver, private", "in MB", "driver, all", "pause s", "median step s", "MB/s", "MB"),
        [
            (f"{c.private:.2f}", f"{c.private_megabytes:.1f}", f"{c.all:.2f}",
             f"{c.pause_s:.2f}", f"{c.step_s:.2f}",
             f"{c.megabytes_per_s:.0f}", f"{c.megabytes:.0f}")
            for c in costs
        ],
    )  # fmt: skip
    case = f"checkpoints.{num_workers}x{megabytes}MB"
    report.add_figures(
        Figure(
            name=f"{case}.driver-private-replicas",
            value=Spread.of([c.private for c in costs]), target=PRIVATE_TARGET, is_better="less",
        ),
        Figure(name=f"{case}.driver-all-replicas", value=Spread.of([c.all for c in costs])),
        Figure(
            name=f"{case}.pause-s",
            value=Spread.of([c.pause_s for c in costs]), target=PAUSE_TARGET_S, is_better="less",
        ),
        Figure(name=f"{case}.mb-per-s", value=Spread.of([c.megabytes_per_s for c in costs])),
    )  # fmt: skip
    report.close(options.out)


if __name__ == "__main__":
    main()
