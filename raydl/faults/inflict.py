"""Inflicts a fault on the present process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raydl.faults.plan import Fault


class Partition:
    """A gate in front of what a process sends, hears and answers; shut, it cuts the process off.

    Messages are held back, not lost, as a network does that comes back.

    Args:
        clock: seconds from any origin.
        sleep: waits, in seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._until = -math.inf

    def cut(self, for_s: float) -> None:
        """Shut the gate for so many seconds; one that is shut for longer stays so."""
        with self._lock:
            self._until = max(self._until, self._clock() + for_s)

    @property
    def is_cut(self) -> bool:
        """Whether the gate is shut."""
        return self._left_s() > 0

    def hold(self) -> None:
        """Return once the gate is open: at once, or after the seconds it was shut for."""
        while (left_s := self._left_s()) > 0:
            self._sleep(left_s)

    @contextmanager
    def both_ways(self) -> Iterator[None]:
        """Let a call come in, and its answer go out, only while the gate is open."""
        self.hold()
        try:
            yield
        finally:
            self.hold()

    def _left_s(self) -> float:
        with self._lock:
            return self._until - self._clock()


class ProcessInflicts:
    """Inflicts faults on the process it is called in.

    Args:
        partition: the gate that this process's messages pass.
        drain: gives notice that this process's node goes in so many seconds.
    """

    def __init__(self, partition: Partition, drain: Callable[[float], None]) -> None:
        self._partition = partition
        self._drain = drain

    def kill(self) -> None:
        """End this process with SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, for_s: float | None) -> None:
        """Halt this process with SIGSTOP; SIGCONT comes after so many seconds, if given."""
        if for_s is None:
            _stop_here()
            return
        # It says so again and again, since once might come before we have stopped.
        waker = subprocess.Popen(
            ["sh", "-c", f"sleep {for_s:.3f}; while kill -CONT {os.getpid()}; do sleep 0.1; done"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what stops or ends our process group leaves it alone
        )
        _stop_here()
        os.killpg(waker.pid, signal.SIGKILL)
        waker.wait()

    def partition(self, for_s: float) -> None:
        """Hold this process's messages back."""
        self._partition.cut(for_s)

    def drain(self, for_s: float) -> None:
        """Pass the notice on."""
        self._drain(for_s)


def _stop_here() -> None:
    """Halt the whole process; return once it goes on.

    To the calling thread: sent to the process, the main thread takes the signal, and this one
    would run on for a moment.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def inflict_here(fault: Fault) -> None:
    """Kill or stop the present process."""
    inflicts = ProcessInflicts(Partition(), lambda _: None)
    if fault.kind == "kill":
        inflicts.kill()
    else:
        inflicts.stop(fault.for_s)


class Held:
    """A road whose calls wait while its worker is cut off from the others.

    Args:
        road: a group, or a post.
        hold: waits.
    """

    def __init__(self, transport: Any, hold: Callable[[], None]) -> None:
        self._transport = transport
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if not callable(found):
            return found

        def held(*args: Any, **kwargs: Any) -> Any:
            self._hold()
            answer = found(*args, **kwargs)
            # Later answers take the same way.
            return Held(answer, self._hold) if hasattr(answer, "wait") else answer

        return held
