"""A run on hosts, and what is seen of its folder from outside: is anything stale taken for new.

These must hold, whatever is done to the hosts meanwhile:

manifests       a checkpoint is of the newest driver epoch and generation of all before it, and of
                a higher round than those of its own generation
samples         in each checkpoint every sample of an epoch that is under way is either done or
                free, once
curves          the generation never falls
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.programs import ROOT, RunError, end_of
from benchmarks.runs_on_hosts import Cluster

HEAD = 0
"""The host of driver and center."""
LEASE_S = 6.0
UP_S, BACK_S = 180.0, 150.0
"""The longest waits: for the first rounds, and for all workers after what was done to them."""
_END_S, _SIGNAL_S = 120.0, 90.0
"""The longest waits for the end of a run, and for a signal to it."""
_ROUNDS_BACK = 10
"""So many rounds of all workers say that they train again."""
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, order=True)
class Written:
    """What orders a checkpoint among those of its run."""

    driver_epoch: int
    generation: int
    round: int


@dataclass
class Watched:
    """What was seen of a run's folder from outside."""

    stale: list[str] = field(default_factory=list)
    """A sentence for each thing that should not be there."""
    written: list[Written] = field(default_factory=list)
    """Checkpoints, in the order in which they came."""
    back_s: list[float] = field(default_factory=list)
    """From the end of each partition until both workers train again."""
    num_rejoined: int = 0
    """Hosts whose Ray node had to be started again."""
    refused: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)

    def look(self, run_dir: Path) -> None:
        """Read the manifests that are new, in the order in which they were written.

        Several may have come since the last look, and a later one may be of an earlier round.
        """
        found: list[tuple[int, str, dict[str, Any]]] = []
        for path in (run_dir / "checkpoints").glob("round-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # it is deleted while it is read
                if path.parent.name not in self._seen:
                    at = path.stat().st_mtime_ns
                    found.append((at, path.parent.name, json.loads(path.read_text())))
        for _, name, manifest in sorted(found, key=lambda one: one[:2]):
            self._seen.add(name)
            self.note_manifest(name, manifest)

    def note_manifest(self, name: str, manifest: dict[str, Any]) -> None:
        """Note a checkpoint, and whether it belongs after those before it."""
        now = Written(manifest["driver_epoch"], manifest["generation"], manifest["round"])
        before = max(self.written, default=now)
        if now < before and "copy_of" not in manifest:
            self.stale.append(f"{name} of {now} came after {before}")
        self.written.append(now)


class Run:
    """``raydl train`` in host 0 of a cluster, for as long as this context is entered.

    Args:
        made: the cluster; all its workers train, or one at least.
        run_dir: of the run.
        words: of its command line.
    """

    def __init__(self, made: Cluster, run_dir: Path, *words: str) -> None:
        self.run_dir = run_dir
        self._made = made
        self._log = run_dir.with_suffix(".log")
        self._began_at = self._log.stat().st_size if self._log.exists() else 0
        pid_file = run_dir.with_suffix(".pid")
        command = [
            sys.executable, "-m", "raydl", "train", "--workers", f"1:{made.num_workers}",
            "--elastic.lease-s", str(LEASE_S), "--checkpoint.every-s", "1",
            "--run.progress", "plain", "--run-dir", str(run_dir), *words,
        ]  # fmt: skip
        with self._log.open("a") as log:
            self.process = made.hosts.popen(
                HEAD, ["sh", "-c", f'echo $$ > {pid_file}; exec "$@"', "sh", *command],
                env=made.environment, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        self._pid_file = pid_file
        self._num_told = 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, holds: Callable[[], bool], bound_s: float, what: str, watched: Watched) -> None:
        """Wait until something holds; look into the folder meanwhile.

        Raises:
            RunError: the run ended, or it took too long.
        """
        deadline = time.monotonic() + bound_s
        while not holds():
            watched.look(self.run_dir)
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"waited in vain for {what}:\n{end_of(self._log)}")
            time.sleep(_LOOK_EVERY_S)

    def status(self) -> dict[str, Any]:
        """Return what the run tells of itself."""
        with contextlib.suppress(OSError, ValueError):
            status: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
            return status
        return {"num_workers": 0, "round": -1, "state": ""}

    def until_all_train(self, watched: Watched, bound_s: float) -> None:
        """Wait until all workers have trained some rounds together."""
        self.until(self.all_train(), bound_s, "all workers", watched)

    def all_train(self) -> Callable[[], bool]:
        """Return what says whether all workers have trained some rounds together since now."""
        since = math.inf

        def holds() -> bool:
            nonlocal since
            now = self.status()
            if (now["num_workers"], now["state"]) != (self._made.num_workers, "training"):
                since = math.inf
                return False
            since = min(since, now["round"])
            return bool(now["round"] >= since + _ROUNDS_BACK)

        return holds

    def stop(self, watched: Watched) -> None:
        """Let the run end after its round, with a checkpoint."""
        pid = self._pid_file.read_text().strip()
        self._made.hosts.run(HEAD, ["kill", "-TERM", pid], timeout_s=_SIGNAL_S)
        self.end(watched)

    def end(self, watched: Watched) -> None:
        """Wait for the end; note what was refused."""
        deadline = time.monotonic() + _END_S
        while self.process.poll() is None:
            watched.look(self.run_dir)
            if time.monotonic() > deadline:
                raise RunError(f"the run did not end:\n{end_of(self._log)}")
            time.sleep(_LOOK_EVERY_S)
        watched.look(self.run_dir)
        result = self.result()
        watched.refused.update(result["refused"])
        watched.stale += why_not_once(self.run_dir)

    @property
    def said(self) -> list[str]:
        """Lines that this start of the run has printed."""
        return self._log.read_bytes()[self._began_at :].decode(errors="replace").splitlines()

    def tell_refused(self) -> None:
        """Print what the run has said of things that came too late."""
        for line in [line for line in self.said if "refused" in line][self._num_told :]:
            self._num_told += 1
            print(f"    {line}", flush=True)

    def result(self) -> dict[str, Any]:
        """Return the run's figures.

        Raises:
            RunError: it wrote none.
        """
        with contextlib.suppress(OSError, ValueError):
            result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
            return result
        raise RunError(f"the run has no result:\n{end_of(self._log)}")


def why_not_once(run_dir: Path) -> list[str]:
    """Return a sentence for each epoch in which a sample is lost, or counted twice."""
    from raydl.checkpoint.store import CheckpointStore  # imports torch
    from raydl.storage import Storage

    checkpoint, damage = CheckpointStore(Storage(str(run_dir))).read()
    ledger = checkpoint.state["ledger"]
    found = list(damage)
    for epoch, num_done, free in ledger["open"]:
        spans = sorted((*map(tuple, free), *reserved_in(ledger, epoch)))
        num_free = sum(stop - start for start, stop in spans)
        overlaps = any(a[1] > b[0] for a, b in pairwise(spans))
        if overlaps or num_done + num_free != ledger["num_samples"]:
            found.append(f"epoch {epoch}: {num_done} done and {num_free} free, {spans}")
    return found


def reserved_in(ledger: dict[str, Any], epoch: int) -> list[tuple[int, int]]:
    """Return the positions of an epoch that workers have been promised, and have not begun."""
    return [tuple(span) for _, of_epoch, span in ledger["reserved"] if of_epoch == epoch]


def falls(curve: Sequence[float]) -> list[str]:
    """Return a sentence for each place where a curve that should rise falls."""
    return [f"the curve of generations falls from {a} to {b}" for a, b in pairwise(curve) if b < a]
