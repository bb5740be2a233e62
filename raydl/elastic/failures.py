"""Decides the response to an error in a worker: replace it, roll it back, or stop the run.

``WorkerErrors`` has the budget of replacements. ``RunFailure`` has the error that stops the run,
and the budget of rollbacks. ``raydl.errors.failure_of_machine`` recognizes failures of machines.
"""

from __future__ import annotations

from collections.abc import Callable

from raydl.config import ElasticConfig
from raydl.errors import InfrastructureError, NonFiniteCenterError, NonFiniteError, in_one_line

_WITHIN_S = 3600.0


class WorkerErrors:
    """The errors of the last hour, by worker and by node.

    A replacement inherits the errors of the worker that it replaces. Otherwise a worker that runs
    out of memory would be replaced forever.

    Args:
        config: the policy and the budget.
        clock: seconds, rising.
    """

    def __init__(
        self, config: ElasticConfig, clock: Callable[[], float], *, is_in_process: bool = False
    ) -> None:
        self._config = config
        self._clock = clock
        self._is_in_process = is_in_process
        self._errors: list[tuple[float, str, str]] = []
        """(Time in seconds, origin, node)."""
        self._origins: dict[str, str] = {}
        """By worker, the first worker in its chain of replacements."""

    def why_stop(self, worker_id: str, error: Exception) -> str:
        """Return why the first such error in a worker stops the run, or "" if it does not."""
        policy = self._config.on_worker_error
        if self._is_in_process:
            return f"{worker_id} raised {in_one_line(error)}"
        if policy == "stop":
            return f"{worker_id} failed, and elastic.on_worker_error is stop"
        if policy == "auto" and not isinstance(error, InfrastructureError):
            return f"{worker_id} raised {in_one_line(error)}"
        return ""

    def why_not_replaced(self, worker_id: str) -> str:
        """Return why a worker with one more error is not replaced, or "" if it is."""
        self._forget_old()
        origin = self._origins.get(worker_id, worker_id)
        number = 1 + sum(other == origin for _, other, _ in self._errors)
        if number <= self._config.max_worker_errors:
            return ""
        place = "" if origin == worker_id else f", which replaces {origin},"
        return (
            f"{worker_id}{place} failed for the {_ordinal(number)} time within an hour, more often "
            f"than elastic.max_worker_errors"
        )

    def note(self, worker_id: str, node: str) -> bool:
        """Record an error; return whether its node has exceeded the budget of errors."""
        self._errors.append((self._clock(), self._origins.get(worker_id, worker_id), node))
        num_on_node = sum(other == node for _, _, other in self._errors)
        return bool(node) and num_on_node > self._config.max_worker_errors

    def replace(self, worker_id: str, replacement: str) -> None:
        """Let a replacement inherit the errors of a worker."""
        self._origins[replacement] = self._origins.pop(worker_id, worker_id)

    def _forget_old(self) -> None:
        since = self._clock() - _WITHIN_S
        self._errors = [error for error in self._errors if error[0] > since]
        known = {origin for _, origin, _ in self._errors}
        self._origins = {w: origin for w, origin in self._origins.items() if origin in known}


class RunFailure:
    """The error that stops the run after a last checkpoint, and the rollbacks after divergence.

    Args:
        config: the limit of rollbacks.
        log: logs one line.
    """

    def __init__(self, config: ElasticConfig, log: Callable[[str], None]) -> None:
        self.error: Exception | None = None
        """The exception that stops the run, or None while it continues."""
        self.why = ""
        """The reason that is logged for the stop."""
        self._raised: set[str] = set()
        self._config = config
        self._log = log
        self._num_rollbacks = 0
        self._rollback_epoch = -1
        """The furthest epoch with a rollback."""
        self._bad_center_in = 0

    def stop_with(self, name: str, error: Exception, why: str) -> None:
        """Record the error that stops the run, and the process that raised it."""
        self.error, self.why, self._raised = error, why, {name}

    def note_further(self, name: str) -> bool:
        """Record an error during the stop; return whether it is the first one of its process."""
        is_first = name not in self._raised
        self._raised.add(name)
        return is_first

    def note_divergence(
        self, name: str, error: NonFiniteError, *, generation: int, epoch: int
    ) -> None:
        """Count a rollback after divergence, or stop the run with the error at the limit.

        A diverged replica restarts from the center. If the center itself has diverged, all workers
        restart from its newest good snapshot.

        Args:
            name: the worker, or ``center``.
            error: what the process found.
            generation: the number of the current generation.
            epoch: completed epochs.
        """
        is_of_center = isinstance(error, NonFiniteCenterError)
        if is_of_center and generation == self._bad_center_in:  # in rounds each worker reports it
            return
        self._bad_center_in = generation if is_of_center else self._bad_center_in
        if epoch > self._rollback_epoch:  # an epoch that is trained again has no budget of its own
            self._rollback_epoch, self._num_rollbacks = epoch, 0
        self._num_rollbacks += 1
        limit, never = self._config.max_rollbacks, self._config.on_worker_error == "stop"
        if self._num_rollbacks <= limit and not never:
            rollback = f"{name} is rolled back to the center"
            if is_of_center:
                rollback = "all workers are rolled back to the newest good center"
            count = f"rollback {self._num_rollbacks} of {limit} in this epoch"
            self._log(f"{error}; {rollback} ({count})")
        elif self.error is None:
            self.error = error
            self.why = f"{'the center' if is_of_center else name} diverged"
            if not never:
                self.why += (
                    f" for the {_ordinal(self._num_rollbacks)} time in this epoch, more often than "
                    f"elastic.max_rollbacks"
                )


def _ordinal(number: int) -> str:
    """Return 1 as first, 4 as 4th, 21 as 21st."""
    if number <= 3:
        return ("first", "second", "third")[number - 1]
    is_teen = number % 100 in (11, 12, 13)
    suffix = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
