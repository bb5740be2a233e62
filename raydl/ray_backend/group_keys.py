"""The keys by which the groups of a job's own actors meet, in an actor of their own.

It outlives the member that made it, and ends by itself once the processes of all members have been
gone for a minute. It imports no torch, so that it starts soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from raydl.collective.key_store import StoreServer
from raydl.collective.roll_call import AGAIN
from raydl.errors import ConfigError, ExchangeError, RaydlError
from raydl.ray_backend.cluster import end_when_quiet, has_ended

Process = tuple[str, int]
"""An actor's id, and that of its process: Ray may start another process for the actor."""


def process_key(rank: int) -> str:
    """Return the key of a member's process, ``ACTOR PID``; it is there once the member has come."""
    return f"process/{rank}"


@dataclass
class _Generation:
    """The newest of a group."""

    number: int
    members: tuple[str, ...]
    processes: dict[int, Process] = field(default_factory=dict)


class GroupKeys(StoreServer):
    """The keys of each group's generations, and the members of its newest one.

    Args:
        has_ended: whether a process has ended.
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
        self._seen_at = clock()
        self._newest: dict[str, _Generation] = {}

    def enter(
        self, group: str, generation: int, members: tuple[str, ...], rank: int, process: Process
    ) -> RaydlError | None:
        """Let a member come to a generation; return why not, if it may not."""
        newest = self._newest.get(group)
        if newest is None or generation > newest.number:
            newest = self._newest[group] = _Generation(generation, members)
        refusal = _refusal(group, newest, generation, members, rank)
        if refusal is None:
            newest.processes[rank] = process
            actor_id, pid = process
            self.set_key(group, generation, process_key(rank), f"{actor_id} {pid}".encode())
        return refusal

    def quiet_s(self) -> float:
        """Return for how many seconds the processes of all members have been gone."""
        now = self._clock()
        processes = [p for newest in [*self._newest.values()] for p in [*newest.processes.values()]]
        if not all(self._has_ended(*process) for process in processes):
            self._seen_at = now
        return now - self._seen_at


def _refusal(
    group: str, newest: _Generation, generation: int, members: tuple[str, ...], rank: int
) -> RaydlError | None:
    if generation < newest.number:
        problem = f"generation {newest.number} has begun; {AGAIN}"
        return ExchangeError(0, generation, problem, group=group)
    if members != newest.members:
        return ConfigError(
            "members",
            f"must be the same for all in generation {generation} of group {group!r}: it was "
            f"begun with {list(newest.members)}, got {list(members)}",
        )
    if rank in newest.processes:
        return ConfigError(
            "generation",
            f"must be above {generation}: member {members[rank]!r} of group {group!r} has come to "
            f"that one already",
        )
    return None


@ray.remote(num_cpus=0, concurrency_groups={"rendezvous": 64})
class GroupKeysActor(GroupKeys):
    """Rendezvous of the groups of one job."""

    def __init__(self) -> None:
        super().__init__()
        end_when_quiet(self.quiet_s)

    # In threads of its own. More waiters than these wait for their turn; what they wait for is
    # written elsewhere.
    @ray.method(concurrency_group="rendezvous")
    def wait_for_keys(
        self, group: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Return the keys of a generation, once it has some of them or the time is up."""
        return super().wait_for_keys(group, generation, keys, timeout_s)
