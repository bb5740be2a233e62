"""Strikes at random on hosts with Ray, and what is seen of a run meanwhile; see ``chaos.py``."""

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

from benchmarks.outside import HEAD, Run, Watched
from benchmarks.ray_on_hosts import has_ray, join_ray
from benchmarks.runs_on_hosts import UNLIMITED_MBIT, Cluster

KINDS = {"cut": 3, "kill": 3, "halt": 3, "center": 2, "driver": 1, "node": 2, "thin": 1}
"""How often each is chosen, in proportion."""
_CUT_S, _HALT_S, _DOWN_S, _THIN_S = (5.0, 60.0), (2.0, 20.0), (2.0, 20.0), (10.0, 40.0)
_THIN_MBIT = 1.0, 10.0
_NODE_EVERY_S = 3.0
_REFUSED = re.compile(r"refused (?:a|([\d,]+)) late (\w+?)s? from")


@dataclass
class Seen(Watched):
    """What was seen of a run in a storm."""

    hits: Counter[str] = field(default_factory=Counter)
    """Strikes that hit something, by kind."""
    ended: list[str] = field(default_factory=list)
    """A sentence for each driver that ended without a strike, or did not get all workers back."""
    pause_s: float = 0.0
    """The longest time in which no sample was counted."""
    paused_by: str = ""
    """The strikes in it, and just before."""
    growth: list[float] = field(default_factory=list)
    """Of each driver that lived for long enough: its most memory after a third, over that then."""
    num_out: int = 0
    """Samples that count too often or too rarely, in all."""
    num_epochs: int = 0
    num_left: int = 0
    """Processes that are halted after the end."""

    @property
    def num_losses(self) -> int:
        """What may have changed the count of what is under way, by messages."""
        return self.hits.total() + self.num_rejoined

    def take_refused(self, lines: list[str]) -> None:
        """Count what a driver has refused that did not live to tell all of it."""
        told = [match for line in lines if (match := _REFUSED.search(line))]
        newest = {m[2] + "s": int((m[1] or "1").replace(",", "")) for m in told}
        self.refused.update(newest)


class Storm:
    """Strikes hosts at random, and puts right again what lasts for a while.

    Args:
        made: the hosts.
        seen: takes what hit.
        chance: chooses.
        resume: starts the driver again.
    """

    def __init__(
        self, made: Cluster, seen: Seen, chance: random.Random, resume: Callable[[], None]
    ) -> None:
        self._made = made
        self._hosts = made.hosts
        self._seen = seen
        self._random = chance
        self._resume = resume
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._cut: set[int] = set()
        self._down: set[int] = set()
        self._is_thin = False
        self._starting: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes_at = 0.0
        self.run: Run

    def strike(self, *, kinds: dict[str, int]) -> str:
        """Strike once; return what was done, in some words, empty if nothing was there to hit."""
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        done: str = getattr(self, f"_{kind}_one")()
        if done:
            self._seen.hits[kind] += 1
        return done

    def tick(self) -> None:
        """End what has lasted long enough, and start nodes that have ended."""
        now = time.monotonic()
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        if now >= self._nodes_at:
            self._nodes_at = now + _NODE_EVERY_S
            self._start_nodes()

    def calm(self) -> None:
        """End all that lasts."""
        self._due, due = [], self._due
        for _, action in due:
            action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _between(self, bounds: tuple[float, float]) -> float:
        """Return a number between two, spread evenly by ratio."""
        low, high = bounds
        return float(low * (high / low) ** self._random.random())

    def _actors(self, name: str) -> list[int]:
        hosts = range(self._hosts.number)
        found = [self._hosts.processes(host).items() for host in hosts]
        return [p for items in found for p, words in items if words.startswith(f"ray::{name}")]

    def _signal(self, name: str, number: signal.Signals) -> int | None:
        """Send a signal to one of the actors of a class; return its process, if there is one."""
        pids = self._actors(name)
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

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._after(seconds, go_on)
        return f"a worker is halted for {seconds:.0f} s"

    def _driver_one(self) -> str:
        if not self._seen.written:  # without a checkpoint there is nothing to go on from
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
        """Begin to start the nodes that have ended, where they can reach the head."""
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
            self._seen.num_rejoined += 1


def is_halted(pid: int) -> bool:
    """Return whether a process is halted by a signal."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] == "T"
    return False
