"""Injects random faults into hosts with Ray, and records their outcome; see ``chaos.py``."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.outside import HEAD, Observed, Run
from benchmarks.ray_on_hosts import has_ray, join_ray
from benchmarks.runs_on_hosts import UNLIMITED_MBIT, Cluster

KINDS = {"cut": 3, "kill": 3, "halt": 3, "center": 2, "driver": 1, "node": 2, "thin": 1}
"""Relative frequency of each kind of fault."""
_CUT_S, _HALT_S, _DOWN_S, _THIN_S = (5.0, 60.0), (2.0, 20.0), (2.0, 20.0), (10.0, 40.0)
_THIN_MBIT = 1.0, 10.0
_NODE_EVERY_S = 3.0
_REFUSED = re.compile(r"refused (?:a|([\d,]+)) late (\w+?)s? from")


@dataclass
class Outcome(Observed):
    """Observations of a run in a storm."""

    hits: Counter[str] = field(default_factory=Counter)
    """Effective faults, by kind."""
    ended: list[str] = field(default_factory=list)
    """A sentence for each driver that ended without a fault, or did not recover all workers."""
    pause_s: float = 0.0
    """The longest time without a newly counted sample."""
    paused_by: str = ""
    """The faults during that time and shortly before."""
    growth: list[float] = field(default_factory=list)
    """For each long-lived driver, the growth of its memory after a third of its life."""
    num_out: int = 0
    """Samples counted too often plus samples counted too rarely."""
    num_epochs: int = 0
    num_left: int = 0
    """Halted processes that remain after the end of the run."""

    @property
    def num_losses(self) -> int:
        """Losses that may have changed the count of samples in flight, by messages."""
        return self.hits.total() + self.num_rejoined

    def add_refused(self, lines: list[str]) -> None:
        """Add the refusals in the log of a driver that was killed before it wrote a result."""
        matches = [match for line in lines if (match := _REFUSED.search(line))]
        newest = {m[2] + "s": int((m[1] or "1").replace(",", "")) for m in matches}
        self.refused.update(newest)


class Storm:
    """Injects random faults into hosts, and ends those that last for a limited time.

    Args:
        made: the cluster.
        outcome: records effective faults.
        chance: source of randomness.
        resume: starts the driver again.
    """

    def __init__(
        self, made: Cluster, outcome: Outcome, chance: random.Random, resume: Callable[[], None]
    ) -> None:
        self._made = made
        self._hosts = made.hosts
        self._outcome = outcome
        self._random = chance
        self._resume = resume
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._cut: set[int] = set()
        self._down: set[int] = set()
        self._is_thin = False
        self._starting: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes_at = 0.0
        self.run: Run

    def inject(self, *, kinds: dict[str, int]) -> str:
        """Inject a fault and return its description, or "" if there was no target."""
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        fault: str = getattr(self, f"_{kind}_one")()
        if fault:
            self._outcome.hits[kind] += 1
        return fault

    def tick(self) -> None:
        """End the faults that are due, and restart nodes that have ended."""
        now = time.monotonic()
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        if now >= self._nodes_at:
            self._nodes_at = now + _NODE_EVERY_S
            self._start_nodes()

    def end_all(self) -> None:
        """End all lasting faults."""
        self._due, due = [], self._due
        for _, action in due:
            action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _between(self, bounds: tuple[float, float]) -> float:
        """Return a random number between two bounds, log-uniformly distributed."""
        low, high = bounds
        return float(low * (high / low) ** self._random.random())

    def _signal(self, name: str, number: signal.Signals) -> int | None:
        """Send a signal to a random actor of a class and return its process id, or None."""
        processes = [self._hosts.processes(host).items() for host in range(self._hosts.number)]
        pids = [
            p for items in processes for p, command in items if command.startswith(f"ray::{name}")
        ]
        if not pids:
            return None
        pid = self._random.choice(sorted(pids))
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    def _kill_one(self) -> str:
        return "a worker is killed" if self._signal("WorkerActor", signal.SIGKILL) else ""

    def _center_one(self) -> str:
        return "the center is killed" if self._signal("CenterActor", signal.SIGKILL) else ""

    def _halt_one(self) -> str:
        pid = self._signal("WorkerActor", signal.SIGSTOP)
        if pid is None:
            return ""
        if self._random.random() < 0.5:
            return "a worker is halted for good"
        seconds = self._between(_HALT_S)

        def resume() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._after(seconds, resume)
        return f"a worker is halted for {seconds:.0f} s"

    def _driver_one(self) -> str:
        if not self._outcome.written:  # without a checkpoint the run cannot be resumed
            return ""
        self.run.process.kill()
        self._resume()
        return "the driver is killed and resumes"

    def _cut_one(self) -> str:
        host = self._random.randrange(self._hosts.number)
        if host in self._cut:
            return ""
        seconds = self._between(_CUT_S)

        def join() -> None:
            self._hosts.join(host)
            self._cut.discard(host)

        self._hosts.cut(host)
        self._cut.add(host)
        self._after(seconds, join)
        return f"host {host} is cut off for {seconds:.0f} s"

    def _node_one(self) -> str:
        host = self._random.randrange(HEAD + 1, self._hosts.number)
        if host in self._down or not has_ray(self._hosts, host):
            return ""
        seconds = self._between(_DOWN_S)
        self._down.add(host)
        for pid in self._hosts.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._after(seconds, lambda: self._down.discard(host))
        return f"all processes of host {host} are killed, its node is back in {seconds:.0f} s"

    def _thin_one(self) -> str:
        if self._is_thin:
            return ""
        mbit, seconds = self._between(_THIN_MBIT), self._between(_THIN_S)

        def widen() -> None:
            self._hosts.limit(UNLIMITED_MBIT)
            self._is_thin = False

        self._hosts.limit(mbit)
        self._is_thin = True
        self._after(seconds, widen)
        return f"all links have {mbit:.1f} Mbit/s for {seconds:.0f} s"

    def _start_nodes(self) -> None:
        """Begin to restart the ended nodes that can reach the head."""
        if HEAD in self._cut:
            return
        for host in range(HEAD + 1, self._hosts.number):
            starting = self._starting.get(host)
            if starting is not None and starting.poll() is None:
                continue
            if host in self._cut | self._down or has_ray(self._hosts, host):
                continue
            folder = Path(tempfile.mkdtemp(prefix="r", dir=self._made.folder))
            environment = self._made.environment
            self._starting[host] = join_ray(self._hosts, host, folder, environment)
            self._outcome.num_rejoined += 1


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] == "T"
    return False
