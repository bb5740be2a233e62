"""Decides in a process of the run which faults are due, and fires each once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Protocol

from raydl.faults.plan import Fault

SENDS: dict[str, Callable[[Any], Any]] = {
    "send_nan": lambda message: message.new_full(message.shape, math.nan),
    "send_zeros": lambda message: message.new_zeros(message.shape),
    "send_reversed": lambda message: -message,
}
"""By kind of fault, what is sent instead of a message, a tensor."""


class Inflicts(Protocol):
    """Inflicts faults on a process; the injector itself slows it down and alters its messages."""

    def kill(self) -> None:
        """Kill the process at once."""

    def stop(self, for_s: float | None) -> None:
        """Halt the process for ``for_s`` seconds; None to halt it for good."""

    def partition(self, for_s: float) -> None:
        """Hold back its messages for ``for_s`` seconds. Returns at once."""

    def drain(self, for_s: float) -> None:
        """Give notice that its node will be preempted in ``for_s`` seconds. Returns at once."""


class Announced(Enum):
    """What became of the announcement of a fault."""

    FIRST = "received: the fault may fire"
    AGAIN = "received, and another process has announced the same fault before"
    LOST = "not received"


class Injector:
    """Fires the faults of one process.

    When a fault becomes due, it fires if this process is its target at that time, and never
    later. So a worker that takes over the rank of a lost worker does not get its fault, too.

    Args:
        faults: faults of the plan; may include those of other processes.
        inflict: inflicts the faults.
        announce: called before each fault, since a killed process reports nothing afterwards. A
            fault whose announcement is lost waits for a later step.
        clock: the time in seconds, from any origin.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        inflict: Inflicts,
        announce: Callable[[Fault], Announced],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.number)
        self._inflict = inflict
        self._announce = announce
        self._decided: set[int] = set()
        self._clock = clock
        self._sleep = sleep
        self._pending: list[Fault] = []
        self._before: dict[str, float] = {}
        self._slow: list[tuple[float, float]] = []  # (end, delay of each step in seconds)
        self._sends: list[tuple[float, str]] = []  # (end, kind of fault)

    def skip(self, fired: Iterable[int]) -> None:
        """Never fire these faults here: they fired in another process.

        Args:
            fired: their numbers.
        """
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
        """Fire the faults that are due, in the order of the plan; then sleep if slowed down.

        Args:
            worker_id: the id of the calling worker.
            rank: its present rank.
            num_workers: number of workers that train now.
            local_step: the next step of this worker, counted from 0.
            round: rounds completed, or exchanges that the center has settled.
            seconds: seconds of training.
        """
        now = {"step": local_step, "round": round, "second": seconds}
        for fault in self._faults:
            before = self._before.get(fault.when)
            if fault.number not in self._decided and fault.is_due(before, now[fault.when]):
                self._decided.add(fault.number)
                if fault.hits(worker_id, rank=rank, num_workers=num_workers):
                    self._pending.append(fault)
        self._pending = [fault for fault in self._pending if not self._fire(fault)]
        self._before.update(now)
        now_s = self._clock()
        self._slow = [(until, by_s) for until, by_s in self._slow if now_s < until]
        if self._slow:
            self._sleep(sum(by_s for _, by_s in self._slow))

    def _fire(self, fault: Fault) -> bool:
        """Announce a fault, and inflict it if it may fire; return whether it is done with."""
        announced = self._announce(fault)
        if announced is not Announced.FIRST:
            return announced is Announced.AGAIN
        if fault.kind == "kill":
            self._inflict.kill()
        elif fault.kind == "stop":
            self._inflict.stop(fault.for_s)
        elif fault.kind == "slow":
            self._slow.append((self._end_of(fault), fault.by_s or 0.0))
        elif fault.kind in SENDS:
            self._sends.append((self._end_of(fault), fault.kind))
        else:
            assert fault.for_s is not None, "the plan requires for_s for these kinds"
            inflict = {"partition": self._inflict.partition, "drain": self._inflict.drain}
            inflict[fault.kind](fault.for_s)
        return True

    def _end_of(self, fault: Fault) -> float:
        return self._clock() + (math.inf if fault.for_s is None else fault.for_s)

    def altered(self, message: Any) -> Any:
        """Return what this process sends instead of a message, a tensor; that itself if healthy."""
        now_s = self._clock()
        self._sends = [(until, kind) for until, kind in self._sends if now_s < until]
        return SENDS[self._sends[-1][1]](message) if self._sends else message
