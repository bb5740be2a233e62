"""What a checkpoint costs: the memory of the driver, and a pause of the training.

Command:   python -m benchmarks.checkpoints         (--quick: two workers of 60 MB, once)

Workers train a network whose parameters are nearly all of it, with momentum, so that each one's
state (weights, gradients, momentum) is three times its replica; its size is ``--megabytes``. A
checkpoint is written every few seconds. Looked at from outside:

driver, private     the most private memory of the driver (RssAnon) while checkpoints are written,
                    less its most before the first one, in replicas: thirds of a state
driver, all         the same of all its memory (VmRSS), with what it shares with other processes
pause               the longest time between two steps of a worker around a checkpoint, less the
                    median over its rounds of the longest time in each: the notes of each step
                    (``watching.py``)
MB/s                bytes of a checkpoint's files over the time from its folder to its manifest

The memory is read every 10 ms from /proc. Workers, driver and disk share one machine, which has to
hold some twelve replicas for each worker. With ``--center-megabytes`` the weights are only so
large, and the rest of a state is what the optimizer remembers, which lies in memory but once, as
the copy to be written: for many workers with large files on one machine.
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
"""Of a worker's state."""
NUM_CHECKPOINTS, QUICK_CHECKPOINTS = 3, 1
PRIVATE_TARGET, PAUSE_TARGET_S = 1.2, 1.0
_EVERY_S = 8.0
_PERIOD = 4
_LOOK_EVERY_S = 0.01
_UP_S, _END_S = 240.0, 180.0
_ENDLESS = "1000000000"


@dataclass(frozen=True)
class Look:
    """The memory of the driver at one moment, in bytes."""

    at: float
    private: int
    all: int


class Looking(threading.Thread):
    """Looks at the memory of a process until it is told to stop.

    Args:
        pid: of the process.
        folder: of its run.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self.looks: list[Look] = []
        self.begun: dict[str, float] = {}
        """When each checkpoint's folder was first seen, by name, Unix time."""
        self.ended = threading.Event()
        self._status, self._folder = Path(f"/proc/{pid}/status"), folder / "checkpoints"

    def run(self) -> None:
        """Look."""
        while not self.ended.wait(_LOOK_EVERY_S):
            try:
                lines = self._status.read_text().splitlines()
                names = os.listdir(self._folder) if self._folder.exists() else []
            except OSError:
                return
            kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
            if "RssAnon" in kib:
                look = Look(time.time(), int(kib["RssAnon"]) << 10, int(kib["VmRSS"]) << 10)
                self.looks.append(look)
            for name in names:
                self.begun.setdefault(name.removeprefix(".partial-"), time.time())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What checkpoints cost."""

    private: float
    """In replicas."""
    private_megabytes: float
    all: float
    """In replicas."""
    pause_s: float
    step_s: float
    """Of a usual step."""
    megabytes_per_s: float
    megabytes: float
    """Of a checkpoint."""


def pause_of(
    steps: Sequence[Step], windows: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """Return (longest pause of a worker around checkpoints, its usual step), in seconds.

    None: it was gone before the first one.

    Args:
        steps: of the worker.
        windows: from the vote to the end of the write, by the clock of the steps.
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
    """Return what checkpoints cost in one run.

    Args:
        num_workers: how many.
        megabytes: of each worker's state.
        num_checkpoints: that are waited for.
        center_megabytes: of the weights; None: weights, gradients and momentum are the state.

    Raises:
        WatchError: the run did not do what was waited for.
    """
    state = megabytes * 1_000_000
    replica = state // 3 if center_megabytes is None else center_megabytes * 1_000_000
    os.environ.update(sizes(weights=replica, memory=state - 3 * replica))
    words = [
        "-m", "raydl", "train", "--data", "digits", "--model", MODEL, "--batch-size", "4",
        "--workers", str(num_workers), "--period", str(_PERIOD), "--samples", _ENDLESS,
        "--method", "sync-easgd", "--lr", "0.0001",
        "--cpus-per-worker", "0.1", "--evaluation.every-epochs", _ENDLESS,
        "--checkpoint.every-s", f"{_EVERY_S:g}",
        "--run-dir", "{folder}/run", "--run.progress", "plain",
    ]  # fmt: skip
    words += ["--momentum", "0.9"] if center_megabytes is None else ["--optimizer", LIGHT_OPTIMIZER]
    with Watched(words) as run:
        folder = run.folder / "run"
        looking = Looking(run.process.pid, folder)
        looking.start()
        run.wait_until(lambda: run.num_at_work() == num_workers, "all train", within_s=_UP_S)
        whole: dict[str, tuple[float, int]] = {}

        def are_enough() -> bool:
            for manifest in folder.glob("checkpoints/round-*/manifest.json"):
                files = manifest.parent.iterdir()
                size = sum(file.stat().st_size for file in files)
                whole.setdefault(manifest.parent.name, (manifest.stat().st_mtime, size))
            return len(whole) >= num_checkpoints

        run.wait_until(are_enough, f"{num_checkpoints} checkpoints", within_s=_UP_S)
        steps = run.steps()
        looking.ended.set()
        run.end(within_s=_END_S)
    return _cost(looking, whole, steps, state // 3)


def _cost(
    looking: Looking,
    whole: dict[str, tuple[float, int]],
    steps: dict[int, list[Step]],
    replica: int,
) -> Cost:
    first = min(looking.begun.values())
    # The states are collected a moment before the folder is there.
    before = [look for look in looking.looks if look.at < first - 3.0]
    after = [look for look in looking.looks if look.at >= first - 3.0]
    to_monotonic = time.monotonic() - time.time()
    windows = [
        (looking.begun[name] - 3.0 + to_monotonic, ended + 1.0 + to_monotonic)
        for name, (ended, _) in whole.items()
    ]
    pauses = [pause for one in steps.values() if (pause := pause_of(one, windows)) is not None]
    print(f"{len(pauses)} of {len(steps)} processes trained around a checkpoint")
    seconds = sum(ended - looking.begun[name] for name, (ended, _) in whole.items())
    num_bytes = sum(size for _, size in whole.values())
    private = max(x.private for x in after) - max(x.private for x in before)
    return Cost(
        private=private / replica,
        private_megabytes=private / 1e6,
        all=(max(x.all for x in after) - max(x.all for x in before)) / replica,
        pause_s=max(pause for pause, _ in pauses),
        step_s=median(step for _, step in pauses),
        megabytes_per_s=num_bytes / seconds / 1e6,
        megabytes=num_bytes / len(whole) / 1e6,
    )


def main() -> None:
    """Measure, judge and tell."""
    end_cleanly()
    parser = options_of(
        __doc__,
        workers={"type": int, "help": "how many"},
        megabytes={"type": int, "help": "of a worker's state"},
        center_megabytes={"type": int, "help": "of the weights; a third of the state"},
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
    report.table(
        ("driver, private", "in MB", "driver, all", "pause s", "usual step s", "MB/s", "MB"),
        [
            (f"{c.private:.2f}", f"{c.private_megabytes:.1f}", f"{c.all:.2f}",
             f"{c.pause_s:.2f}", f"{c.step_s:.2f}",
             f"{c.megabytes_per_s:.0f}", f"{c.megabytes:.0f}")
            for c in costs
        ],
    )  # fmt: skip
    case = f"checkpoints.{num_workers}x{megabytes}MB"
    report.judge(
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
