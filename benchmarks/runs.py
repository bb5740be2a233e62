"""Runs ``raydl train`` and its peers on this machine.

    with workplace() as place:
        data = place.arrays("../shared/data/mnist")
        run = place.train("--data", data, "--method", "sync-easgd", "--seconds", "10")

Each program has one thread, the same decoded pictures, and its own Ray, which ends with the
program. All programs write into one folder, which is deleted at the end. A program that takes too
long gets SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.programs import ROOT, end_cleanly, end_sessions, wait_for

BOUND_S = 300.0
"""Time-out of a run in seconds, including its start and end."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",  # the log of a killed program is complete
    "RAY_ADDRESS": "",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}

NO_SCORES = ("--evaluation.every-epochs", "100000")
"""Options without evaluations in the measured time; the end is evaluated."""

Point = tuple[float, int]
"""(Seconds, samples trained by all workers until then)."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a run."""

    result: dict[str, Any]
    """The content of raydl's ``result.json``, or the result of ``peers/loop.py``."""
    points: tuple[Point, ...]
    """Progress from the first step to the last, increasing."""
    folder: Path | None = None
    """Folder of a run of raydl; it exists as long as the workplace."""


@dataclass
class Workplace:
    """Starts programs that write into a folder."""

    folder: Path
    root: Path = ROOT
    """The folder whose raydl the programs import, Ray's workers included."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def arrays(self, data: str, *, num_test: int | None = None) -> str:
        """Write the decoded pictures of a data set to an .npz file and return its path.

        Args:
            data: the data set, as for ``raydl train``.
            num_test: samples of the test set to keep, from its start; None: all.
        """
        import numpy as np

        from raydl.data import ImageSet, load

        if "/" in data and not (ROOT / data).exists():
            sys.exit(f"--data must exist, got {data}")
        dataset = load(str(ROOT / data) if "/" in data else data)
        train, test = dataset.train, dataset.test
        assert isinstance(train, ImageSet)
        assert isinstance(test, ImageSet)
        path = self._new("data").with_suffix(".npz")
        np.savez(
            path, x_train=train.images, y_train=train.labels,
            x_test=test.images[:num_test], y_test=test.labels[:num_test],
        )  # fmt: skip
        return str(path)

    def train(self, *arguments: str, run_dir: Path | None = None) -> Trained:
        """Run ``raydl train``.

        Args:
            arguments: options.
            run_dir: folder of the run; None: a new one.

        Raises:
            RunError: if the run failed or took too long.
        """
        run_dir = run_dir or self._new("run")
        self._run([sys.executable, "-m", "raydl", "train", *arguments, "--run-dir", str(run_dir)])
        result = json.loads((run_dir / "result.json").read_text())
        return Trained(result=result, points=_points_of_run(run_dir), folder=run_dir)

    def plain(self, *arguments: str, copies: int = 1) -> list[Trained]:
        """Run plain PyTorch in independent, simultaneous processes.

        Raises:
            RunError: if a process failed or took too long.
        """
        names = [self._new("plain") for _ in range(copies)]
        module = [sys.executable, "-m", "benchmarks.peers.plain"]
        self._run(*([*module, *arguments, *_files(name)] for name in names))
        return [_read_peer(name) for name in names]

    def ddp(self, *arguments: str, num_workers: int = 2) -> Trained:
        """Run DistributedDataParallel.

        Raises:
            RunError: if the run failed or took too long.
        """
        name = self._new("ddp")
        start = ["-m", "torch.distributed.run", "--standalone"]
        module = [*start, "--nproc-per-node", str(num_workers), "-m", "benchmarks.peers.ddp"]
        self._run([sys.executable, *module, *arguments, *_files(name)])
        return _read_peer(name)

    def ray_train(self, *arguments: str, num_workers: int = 2) -> Trained:
        """Run Ray Train's TorchTrainer.

        Raises:
            RunError: if the run failed or took too long.
        """
        name = self._new("ray-train")
        module = ["-m", "benchmarks.peers.ray_train", "--workers", str(num_workers)]
        self._run([sys.executable, *module, *arguments, *_files(name)])
        return _read_peer(name)

    def _new(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"

    def _run(self, *programs: Sequence[str]) -> None:
        """Run programs side by side and wait for their ends."""
        folders = {"RAY_TMPDIR": str(self.folder), "TMPDIR": str(self.folder)}
        # Ray's workers inherit PYTHONPATH. A program of ``python -m`` also imports from its cwd.
        environment = {**os.environ, **_ENVIRONMENT, **folders, "PYTHONPATH": str(self.root)}
        logs = [self._new("log") for _ in programs]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for command, path in zip(programs, logs, strict=True):
                with path.open("w") as log:
                    started.append(
                        subprocess.Popen(
                            command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL,
                            stdout=log, stderr=log, start_new_session=True,
                        )
                    )  # fmt: skip
            wait_for(started, programs, logs, bound_s=BOUND_S)
        finally:
            end_sessions(started)


@contextmanager
def workplace() -> Iterator[Workplace]:
    """Yield a workplace; at its end, also by SIGTERM, end its programs and delete its folder."""
    end_cleanly()
    folder = Path(tempfile.mkdtemp(prefix="raydl-"))  # short: paths of Ray's sockets are limited
    try:
        yield Workplace(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(name: Path) -> tuple[str, ...]:
    return "--result", f"{name}.json", "--events", f"{name}.events"


def _read_peer(name: Path) -> Trained:
    """Return the result of a peer and the progress of its rank 0, in Unix time."""
    events = map(json.loads, Path(f"{name}.events").read_text().splitlines())
    points = tuple((event["time"], event["samples"]) for event in events if event["rank"] == 0)
    return Trained(result=json.loads(Path(f"{name}.json").read_text()), points=points)


def _points_of_run(run_dir: Path) -> tuple[Point, ...]:
    """Return the progress of a run from its curves, whose points have the driver's times.

    Of points that the driver received together only the last counts: the others are older than
    their times say.
    """
    from raydl.tools.report.events import read_history

    files = [path.read_bytes() for path in sorted(run_dir.glob("events.*"))]
    curve = read_history(files).curves["exchange/count"]
    points = list(zip(curve.seconds, curve.samples, strict=True))
    following = [*points[1:], (float("inf"), 0)]
    return tuple(
        point for point, after in zip(points, following, strict=True) if after[0] - point[0] > 0.05
    )
