"""Runs of ``raydl train`` and of its peers on this machine, one after the other or side by side.

    with workplace() as place:
        data = place.arrays("../shared/data/mnist")
        run = place.train("--data", data, "--method", "sync-easgd", "--seconds", "10")

All of them get one thread, the same decoded pictures, and a Ray of their own on this machine, which
ends with them. What they write lies in one folder that goes at the end. A program that takes too
long is asked to end, then killed.
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
"""The longest run, its start and end counted in."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",  # what a program said before it was killed is in its log
    "RAY_ADDRESS": "",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}

Point = tuple[float, int]
"""(Seconds, samples by all workers until then)."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to."""

    result: dict[str, Any]
    """What it wrote: ``result.json`` of raydl, or that of ``peers/loop.py``."""
    points: tuple[Point, ...]
    """Its progress, from its first steps to its last, rising."""
    folder: Path | None = None
    """That of a run of raydl, as long as the workplace is there."""


@dataclass
class Workplace:
    """Where programs run and write."""

    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def arrays(self, data: str, *, num_test: int | None = None) -> str:
        """Return the path of an .npz file of a set, so that no program has to decode pictures.

        Args:
            data: the set, as ``raydl train`` takes it.
            num_test: samples of the test set that are kept, from its start; None: all.
        """
        import numpy as np

        from raydl.data import ImageSet, load

        if "/" in data and not (ROOT / data).exists():
            sys.exit(f"no data at {data}; name them with --data")
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

    def train(self, *words: str, run_dir: Path | None = None) -> Trained:
        """Run ``raydl train``.

        Args:
            words: its options.
            run_dir: the run's folder; None: a new one.

        Raises:
            RunError: it failed, or took too long.
        """
        run_dir = run_dir or self._new("run")
        self._run([sys.executable, "-m", "raydl", "train", *words, "--run-dir", str(run_dir)])
        result = json.loads((run_dir / "result.json").read_text())
        return Trained(result=result, points=_points_of_run(run_dir), folder=run_dir)

    def plain(self, *words: str, copies: int = 1) -> list[Trained]:
        """Run plain PyTorch in so many processes at once that know nothing of one another.

        Raises:
            RunError: one failed, or took too long.
        """
        names = [self._new("plain") for _ in range(copies)]
        module = [sys.executable, "-m", "benchmarks.peers.plain"]
        self._run(*([*module, *words, *_files(name)] for name in names))
        return [_read_peer(name) for name in names]

    def ddp(self, *words: str, num_workers: int = 2) -> Trained:
        """Run DistributedDataParallel.

        Raises:
            RunError: it failed, or took too long.
        """
        name = self._new("ddp")
        start = ["-m", "torch.distributed.run", "--standalone"]
        module = [*start, "--nproc-per-node", str(num_workers), "-m", "benchmarks.peers.ddp"]
        self._run([sys.executable, *module, *words, *_files(name)])
        return _read_peer(name)

    def ray_train(self, *words: str, num_workers: int = 2) -> Trained:
        """Run Ray Train's TorchTrainer.

        Raises:
            RunError: it failed, or took too long.
        """
        name = self._new("ray-train")
        module = ["-m", "benchmarks.peers.ray_train", "--workers", str(num_workers)]
        self._run([sys.executable, *module, *words, *_files(name)])
        return _read_peer(name)

    def _new(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"

    def _run(self, *programs: Sequence[str]) -> None:
        """Run programs side by side to their ends."""
        environment = {**os.environ, **_ENVIRONMENT, "RAY_TMPDIR": str(self.folder)}
        logs = [self._new("log") for _ in programs]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for words, path in zip(programs, logs, strict=True):
                with path.open("w") as log:
                    started.append(
                        subprocess.Popen(
                            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                            stdout=log, stderr=log, start_new_session=True,
                        )
                    )  # fmt: skip
            wait_for(started, programs, logs, bound_s=BOUND_S)
        finally:
            end_sessions(started)


@contextmanager
def workplace() -> Iterator[Workplace]:
    """Yield a workplace; its folder goes at the end, and what runs in it, on SIGTERM too."""
    end_cleanly()
    folder = Path(tempfile.mkdtemp(prefix="raydl-"))  # short: Ray's sockets lie deep below it
    try:
        yield Workplace(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(name: Path) -> tuple[str, ...]:
    return "--result", f"{name}.json", "--events", f"{name}.events"


def _read_peer(name: Path) -> Trained:
    """Return the result of a peer, and its progress as rank 0 tells it, in Unix time."""
    lines = Path(f"{name}.events").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    points = tuple((line["time"], line["samples"]) for line in told if line["rank"] == 0)
    return Trained(result=json.loads(Path(f"{name}.json").read_text()), points=points)


def _points_of_run(run_dir: Path) -> tuple[Point, ...]:
    """Return the progress of a run by its own curves; the driver notes a point as it hears of it.

    Of points that came together the last counts: the others are older than they seem.
    """
    from raydl.tools.report.events import read_history

    files = [path.read_bytes() for path in sorted(run_dir.glob("events.*"))]
    curve = read_history(files).curves["exchange/count"]
    points = list(zip(curve.seconds, curve.samples, strict=True))
    following = [*points[1:], (float("inf"), 0)]
    return tuple(
        point for point, after in zip(points, following, strict=True) if after[0] - point[0] > 0.05
    )
