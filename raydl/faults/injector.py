"""Decides, inside a process of the run, which faults are due, and fires each once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from raydl.faults.plan import Fault


class Inflicts(Protocol):
    """Inflicts a fault on a process; the injector itself slows a process down."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self, for_s: float | None) -> None:
        """Halt it for so many seconds; None: nothing here lets it go on."""

    def partition(self, for_s: float) -> None:
        """Hold its messages back for so many seconds. Returns at once."""

    def drain(self, for_s: float) -> None:
        """Give notice that its node goes in so many seconds. Returns at once."""


class Injector:
    """Fires the faults of one process.

    A fault is decided when its moment comes: it fires if this process is its target then, and
    never after. So a worker that takes over a lost one's rank does not take its fault, too.

    Args:
        faults: those of the plan, perhaps of other processes as well.
        inflict: does them.
        announce: is called before each, for a killed process tells nothing more; returns whether
            somebody heard. A fault of which nobody hears waits for a later step.
        fired: numbers of those that fired before this process was started.
        clock: seconds from any origin, for what lasts a while.
        sleep: waits, in seconds.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        inflict: Inflicts,
        announce: Callable[[Fault], bool],
        fired: Iterable[int] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.number)
        self._inflict = inflict
        self._announce = announce
        self._decided = set(fired)
        self._clock = clock
        self._sleep = sleep
        self._held: list[Fault] = []
        self._before: dict[str, float] = {}
        self._slow: list[tuple[float, float]] = []  # (until, seconds longer)

    def skip(self, fired: Iterable[int]) -> None:
        """Take in the numbers of faults that fired elsewhere: they never fire here."""
        self._decided.update(fired)

    def before_step(
        self,
        worker_id: str,
        *,
        rank: int,
        num_workers: int,
        local_step: int,
        round: int,
        seconds: float,
    ) -> None:
        """Fire what is due, in the order of the plan; then be slow, if that is on.

        The center and its shards may call it as well, as ``center`` or ``shard 1``, with rank
        and local step -1.

        Args:
            worker_id: who calls.
            rank: of the worker, now.
            num_workers: how many train now.
            local_step: the step that comes, of this worker, counted from 0.
            round: rounds completed, or exchanges that the center has settled.
            seconds: seconds of training.
        """
        now = {"step": local_step, "round": round, "second": seconds}
        for fault in self._due(now):
            self._decided.add(fault.number)
            if fault.hits(worker_id, rank=rank, num_workers=num_workers):
                self._held.append(fault)
        self._held = [fault for fault in self._held if not self._fire(fault)]
        self._before.update(now)
        self._be_slow()

    def _due(self, now: dict[str, float]) -> list[Fault]:
        return [
            fault
            for fault in self._faults
            if fault.number not in self._decided
            and fault.is_due(self._before.get(fault.when), now[fault.when])
        ]

    def _fire(self, fault: Fault) -> bool:
        """Inflict a fault, if somebody hears of it; return whether that was so."""
        if not self._announce(fault):
            return False
        if fault.kind == "kill":
            self._inflict.kill()
        elif fault.kind == "stop":
            self._inflict.stop(fault.for_s)
        elif fault.kind == "slow":
            lasts_s = math.inf if fault.for_s is None else fault.for_s
            self._slow.append((self._clock() + lasts_s, fault.by_s or 0.0))
        else:
            assert fault.for_s is not None, "the plan holds none without"
            lasting = {"partition": self._inflict.partition, "drain": self._inflict.drain}
            lasting[fault.kind](fault.for_s)
        return True

    def _be_slow(self) -> None:
        """Make this step longer by all that slows it down now."""
        now = self._clock()
        self._slow = [(until, by_s) for until, by_s in self._slow if now < until]
        if self._slow:
            self._sleep(sum(by_s for _, by_s in self._slow))
