"""Runs ``raydl train`` on hosts and checks from outside that it writes nothing stale.

These invariants must hold, whatever faults are injected into the hosts:

manifests       a checkpoint has at least the driver epoch and generation of all earlier ones, and a
                higher round than the earlier ones of its generation
samples         in each checkpoint, every sample of an open epoch is either done or free, once
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
"""Time-outs for the first rounds, and for the recovery of all workers, in seconds."""
_END_S, _SIGNAL_S = 120.0, 90.0
"""Time-outs for the end of a run, and for sending a signal to it, in seconds."""
_ROUNDS_BACK = 10
"""Rounds that all workers must train together to count as recovered."""
_POLL_EVERY_S = 0.1


@dataclass(frozen=True, order=True)
class Written:
    """The order of a checkpoint among the checkpoints of its run."""

    driver_epoch: int
    generation: int
    round: int


@dataclass
class Observed:
    """Observations of a run's folder from outside."""

    stale: list[str] = field(default_factory=list)
    """A sentence for each violated invariant."""
    written: list[Written] = field(default_factory=list)
    """Checkpoints, in the order of writing."""
    back_s: list[float] = field(default_factory=list)
    """Seconds from the end of each partition until both workers train again."""
    num_rejoined: int = 0
    """Number of restarts of Ray nodes."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused late arrivals, by kind."""
    _names: set[str] = field(default_factory=set)

    def read_manifests(self, run_dir: Path) -> None:
        """Read the new manifests in the order of writing.

        Several may be new, and a later one may be of an earlier round.
        """
        new: list[tuple[int, str, dict[str, Any]]] = []
        for path in (run_dir / "checkpoints").glob("round-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # deleted while it is read
                if path.parent.name not in self._names:
                    written_at = path.stat().st_mtime_ns
                    new.append((written_at, path.parent.name, json.loads(path.read_text())))
        for _, name, manifest in sorted(new, key=lambda entry: entry[:2]):
            self._names.add(name)
            self.add_manifest(name, manifest)

    def add_manifest(self, name: str, manifest: dict[str, Any]) -> None:
        """Add a checkpoint, and a sentence if it is stale."""
        now = Written(manifest["driver_epoch"], manifest["generation"], manifest["round"])
        before = max(self.written, default=now)
        if now < before and "copy_of" not in manifest:
            self.stale.append(f"{name} of {now} came after {before}")
        self.written.append(now)


class Run:
    """``raydl train`` in host 0 of a cluster, as long as this context is entered.

    Args:
        made: the cluster, on which one to all of its workers train.
        run_dir: folder of the run.
        arguments: further options of the command.
    """

    def __init__(self, made: Cluster, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self._made = made
        self._log = run_dir.with_suffix(".log")
        self._began_at = self._log.stat().st_size if self._log.exists() else 0
        pid_file = run_dir.with_suffix(".pid")
        command = [
            sys.executable, "-m", "raydl", "train", "--workers", f"1:{made.num_workers}",
            "--elastic.lease-s", str(LEASE_S), "--checkpoint.every-s", "1",
            "--run.progress", "plain", "--run-dir", str(run_dir), *arguments,
        ]  # fmt: skip
        with self._log.open("a") as log:
            self.process = made.hosts.popen(
                HEAD, ["sh", "-c", f'echo $$ > {pid_file}; exec "$@"', "sh", *command],
                env=made.environment, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        self._pid_file = pid_file
        self._num_printed = 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_until(
        self, holds: Callable[[], bool], bound_s: float, what: str, observed: Observed
    ) -> None:
        """Wait until a condition holds, and read new manifests meanwhile.

        Raises:
            RunError: if the run ended or the wait timed out.
        """
        deadline = time.monotonic() + bound_s
        while not holds():
            observed.read_manifests(self.run_dir)
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"the run ended or timed out before {what}:\n{end_of(self._log)}")
            time.sleep(_POLL_EVERY_S)

    def status(self) -> dict[str, Any]:
        """Return the content of ``status.json``, or placeholders if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            status: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
            return status
        return {"num_workers": 0, "round": -1, "state": ""}

    def wait_until_all_train(self, observed: Observed, bound_s: float) -> None:
        """Wait until all workers have trained some rounds together."""
        self.wait_until(self.all_train(), bound_s, "all workers train", observed)

    def all_train(self) -> Callable[[], bool]:
        """Return a condition: all workers have trained some rounds together since this call."""
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

    def stop(self, observed: Observed) -> None:
        """Stop the run by SIGTERM, which writes a checkpoint, and wait for its end."""
        pid = self._pid_file.read_text().strip()
        self._made.hosts.run(HEAD, ["kill", "-TERM", pid], timeout_s=_SIGNAL_S)
        self.end(observed)

    def end(self, observed: Observed) -> None:
        """Wait for the end, and collect refusals and violated invariants.

        Raises:
            RunError: if the run did not end in time.
        """
        deadline = time.monotonic() + _END_S
        while self.process.poll() is None:
            observed.read_manifests(self.run_dir)
            if time.monotonic() > deadline:
                raise RunError(f"the run did not end within {_END_S:g} s:\n{end_of(self._log)}")
            time.sleep(_POLL_EVERY_S)
        observed.read_manifests(self.run_dir)
        observed.refused.update(self.result()["refused"])
        observed.stale += miscounted(self.run_dir)

    @property
    def log_lines(self) -> list[str]:
        """The lines that this start of the run has printed."""
        return self._log.read_bytes()[self._began_at :].decode(errors="replace").splitlines()

    def print_refused(self) -> None:
        """Print new log lines about refused late arrivals."""
        for line in [line for line in self.log_lines if "refused" in line][self._num_printed :]:
            self._num_printed += 1
            print(f"    {line}", flush=True)

    def result(self) -> dict[str, Any]:
        """Return the content of ``result.json``.

        Raises:
            RunError: if it cannot be read.
        """
        with contextlib.suppress(OSError, ValueError):
            result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
            return result
        raise RunError(f"the run has no result:\n{end_of(self._log)}")


def miscounted(run_dir: Path) -> list[str]:
    """Return a sentence for each open epoch in which a sample is lost or counted twice."""
    from raydl.checkpoint.store import CheckpointStore  # imports torch
    from raydl.storage import Storage

    checkpoint, damage = CheckpointStore(Storage(str(run_dir))).read()
    ledger = checkpoint.state["ledger"]
    sentences = list(damage)
    for epoch, num_done, free in ledger["open"]:
        reserved = [tuple(span) for _, of_epoch, span in ledger["reserved"] if of_epoch == epoch]
        spans = sorted((*map(tuple, free), *reserved))
        num_free = sum(stop - start for start, stop in spans)
        overlaps = any(a[1] > b[0] for a, b in pairwise(spans))
        if overlaps or num_done + num_free != ledger["num_samples"]:
            sentences.append(f"epoch {epoch}: {num_done} done and {num_free} free, {spans}")
    return sentences


def falls(curve: Sequence[float]) -> list[str]:
    """Return a sentence for each fall of the curve of generations."""
    return [f"the curve of generations falls from {a} to {b}" for a, b in pairwise(curve) if b < a]
