"""What follows from an exception in one worker, and how often it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from raydl.config import ElasticConfig
from raydl.errors import InfrastructureError
from raydl.machine_failures import in_one_line

_WITHIN_S = 3600.0


class WorkerErrors:
    """The errors of the last hour, by worker and by node.

    A replacement inherits the errors of the worker that it replaces: one that runs out of memory
    would otherwise be replaced for ever.

    Args:
        config: the policy and the budget.
        clock: seconds, rising.
    """

    def __init__(self, config: ElasticConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._noted: list[tuple[float, str, str]] = []
        self._origins: dict[str, str] = {}

    def why_stop(self, worker_id: str, error: Exception) -> str:
        """Return why a run stops that a worker raised an exception in; empty: it is replaced."""
        policy, budget = self._config.on_worker_error, self._config.max_worker_errors
        if policy == "stop":
            return f"{worker_id} failed, and elastic.on_worker_error is stop"
        if policy == "auto" and not isinstance(error, InfrastructureError):
            return f"{worker_id} raised {in_one_line(error)}"
        self._forget_old()
        origin = self._origins.get(worker_id, worker_id)
        number = 1 + Counter(origin for _, origin, _ in self._noted)[origin]
        if number <= budget:
            return ""
        place = "" if origin == worker_id else f", which replaces {origin},"
        return (
            f"{worker_id}{place} failed for the {ordinal(number)} time within an hour, more often "
            f"than elastic.max_worker_errors"
        )

    def note(self, worker_id: str, node: str) -> bool:
        """Note an error; return whether its node has had more than it may."""
        self._noted.append((self._clock(), self._origins.get(worker_id, worker_id), node))
        on_node = Counter(node for _, _, node in self._noted)[node]
        return bool(node) and on_node > self._config.max_worker_errors

    def replace(self, worker_id: str, replacement: str) -> None:
        """Note by which worker one is replaced."""
        self._origins[replacement] = self._origins.pop(worker_id, worker_id)

    def _forget_old(self) -> None:
        since = self._clock() - _WITHIN_S
        self._noted = [noted for noted in self._noted if noted[0] > since]
        known = {origin for _, origin, _ in self._noted}
        self._origins = {w: origin for w, origin in self._origins.items() if origin in known}


def ordinal(number: int) -> str:
    """Return 1 as first, 4 as 4th."""
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
