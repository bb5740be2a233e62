"""The rendezvous actor of a job's collective groups: it stores the keys by which groups form.

It outlives the member that started it, and ends once the processes of all members have been ended
for a minute. It does not import torch, and so starts fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from raydl.collective.failure_diagnosis import AGAIN
from raydl.collective.key_store import StoreServer
from raydl.errors import ConfigError, ExchangeError, RaydlError
from raydl.ray_backend.cluster import end_when_unused, has_ended

Process = tuple[str, int]
"""(Actor id, process id): Ray may restart an actor in another process."""


def process_key(rank: int) -> str:
    """Return the key under which a member stores its process, ``ACTOR PID``, when it enters."""
    return f"process/{rank}"


@dataclass
class _Generation:
    """The newest generation of a group."""

    number: int
    members: tuple[str, ...]
    processes: dict[int, Process] = field(default_factory=dict)


class GroupKeys(StoreServer):
    """The keys of each group's generations, and the members of its newest one.

    Args:
        has_ended: returns whether a process has ended.
        clock: seconds, rising.
    """

    def __init__(
        self,
        has_ended: Callable[[str, int], bool] = has_ended,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._has_ended = has_ended
        self._clock = clock
        self._alive_at = clock()
        self._newest: dict[str, _Generation] = {}

    def enter(
        self, group: str, generation: int, members: tuple[str, ...], rank: int, process: Process
    ) -> RaydlError | None:
        """Enter a member into a generation; return the error if it is refused."""
        newest = self._newest.get(group)
        if newest is None or generation > newest.number:
            newest = self._newest[group] = _Generation(generation, members)
        if generation < newest.number:
            problem = f"generation {newest.number} has begun; {AGAIN}"
            return ExchangeError(0, generation, problem, group=group)
        if members != newest.members:
            return ConfigError(
                "members",
                f"must be the same for all in generation {generation} of group {group!r}: the "
                f"first member gave {list(newest.members)}, got {list(members)}",
            )
        if rank in newest.processes:
            return ConfigError(
                "generation",
                f"must be above {generation}: member {members[rank]!r} of group {group!r} has "
                f"entered that one already",
            )
        newest.processes[rank] = process
        actor_id, pid = process
        self.set_key(group, generation, process_key(rank), f"{actor_id} {pid}".encode())
        return None

    def unused_s(self) -> float:
        """Return for how many seconds the processes of all members have been ended."""
        now = self._clock()
        processes = [p for newest in [*self._newest.values()] for p in [*newest.processes.values()]]
        if not all(self._has_ended(*process) for process in processes):
            self._alive_at = now
        return now - self._alive_at


@ray.remote(num_cpus=0, concurrency_groups={"rendezvous": 64})
class GroupKeysActor(GroupKeys):
    """The rendezvous actor of the groups of one job."""

    def __init__(self) -> None:
        super().__init__()
        end_when_unused(self.unused_s)

    # In its own threads; further waiters queue. ``set_key``, which they wait for, runs elsewhere.
    @ray.method(concurrency_group="rendezvous")
    def wait_for_keys(
        self, group: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Return the keys of a generation, once some are present or the time is up."""
        return super().wait_for_keys(group, generation, keys, timeout_s)
