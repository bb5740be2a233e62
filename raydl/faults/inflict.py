"""Inflicts faults on the process that calls it."""

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
    """Cuts a process off by holding back all messages that it sends and receives.

    Messages are delayed, not lost, as by a network that recovers.

    Args:
        clock: the time in seconds, from any origin.
        sleep: waits for a number of seconds.
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
        """Cut the process off for ``for_s`` seconds, or until an earlier cut ends if later."""
        with self._lock:
            self._until = max(self._until, self._clock() + for_s)

    def hold(self) -> None:
        """Wait while the process is cut off."""
        while (left_s := self._left_s()) > 0:
            self._sleep(left_s)

    @contextmanager
    def both_ways(self) -> Iterator[None]:
        """Hold back a call that the process receives, and its answer."""
        self.hold()
        try:
            yield
        finally:
            self.hold()

    def _left_s(self) -> float:
        with self._lock:
            return self._until - self._clock()


class ProcessInflicts:
    """Inflicts faults on the process that calls it.

    Args:
        partition: holds back the messages of this process.
        drain: gives notice that this process's node will be preempted in a number of seconds.
    """

    def __init__(self, partition: Partition, drain: Callable[[float], None]) -> None:
        self._partition = partition
        self._drain = drain

    def kill(self) -> None:
        """End this process with SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, for_s: float | None) -> None:
        """Halt this process with SIGSTOP; SIGCONT follows after ``for_s`` seconds, if given."""
        if for_s is None:
            _stop_here()
            return
        # It sends SIGCONT repeatedly, since the first one may arrive before we have stopped.
        waker = subprocess.Popen(
            ["sh", "-c", f"sleep {for_s:.3f}; while kill -CONT {os.getpid()}; do sleep 0.1; done"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of signals to our process group
        )
        _stop_here()
        os.killpg(waker.pid, signal.SIGKILL)
        waker.wait()

    def partition(self, for_s: float) -> None:
        """Hold back this process's messages for ``for_s`` seconds."""
        self._partition.cut(for_s)

    def drain(self, for_s: float) -> None:
        """Give notice that this process's node will be preempted in ``for_s`` seconds."""
        self._drain(for_s)


def _stop_here() -> None:
    """Halt the whole process; return once it continues.

    The signal is sent to the calling thread: sent to the process, it would go to the main thread,
    and the calling thread would run on for a moment.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def inflict_here(fault: Fault) -> None:
    """Kill or stop the process that calls this."""
    inflicts = ProcessInflicts(Partition(), lambda _: None)
    if fault.kind == "kill":
        inflicts.kill()
    else:
        inflicts.stop(fault.for_s)


class Held:
    """A transport whose calls wait while its worker is cut off.

    Args:
        transport: a collective group, or a client of the center.
        hold: returns when the worker is no longer cut off.
    """

    def __init__(self, transport: Any, hold: Callable[[], None]) -> None:
        self._transport = transport
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._transport, name)
        if not callable(attribute):
            return attribute

        def held(*args: Any, **kwargs: Any) -> Any:
            self._hold()
            answer = attribute(*args, **kwargs)
            # The wait for a pending result is held as well.
            return Held(answer, self._hold) if hasattr(answer, "wait") else answer

        return held
