"""Decides what follows from an error in a worker: it is replaced or rolled back, or the run stops.

Failures of a machine (memory, a disk, a device) are told apart from errors of the code that ran
on it. ``WorkerErrors`` holds the budget of replacements, ``RunFailure`` the error that a
run stops with and the replicas that were rolled back instead.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator

from raydl.config import ElasticConfig
from raydl.errors import InfrastructureError, NonFiniteCenterError, NonFiniteError, RaydlError

_KINDS = {"MemoryError", "OutOfMemoryError", "AcceleratorError", "DistBackendError"}
"""Names of types: torch's are not imported, since they differ between its versions."""
_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ENODEV", "ENXIO", "EREMOTEIO", "EUCLEAN",
        "ENOMEM", "EMFILE", "ENFILE", "ENOTCONN", "ENETDOWN", "ENETUNREACH", "ENETRESET",
        "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""Errors of a disk, a file server or a network that fails. A file that is missing, or may not
be read, is a mistake instead: a replacement would meet it again."""
_TEXTS = re.compile(
    r"can't allocate memory|not enough memory|CUDA error|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS"
    r"|NCCL error|uncorrectable ECC|hipError"
    r"|AWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTLING"
    r"|INTERNAL_FAILURE)|curlCode|Input/output error|Stale file handle|No space left on device",
)
"""In texts of errors that have no type or number of their own: torch's RuntimeError, PyArrow's."""


def failure_of_machine(error: BaseException) -> str:
    """Return in one line how a machine failed; empty: the code that ran there did.

    Args:
        error: with what it was raised from, in the process that raised it: between processes the
            causes are lost.
    """
    for cause in _causes(error):
        if _is_of_machine(cause):
            return str(error) if isinstance(error, RaydlError) else in_one_line(cause)
    return ""


def in_one_line(error: BaseException) -> str:
    """Return the type of an exception, and the first line of what it says.

    Args:
        error: one of raydl's own is a sentence already; one that Ray brings has the original as
            its ``cause``, and a traceback in its text.
    """
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RaydlError):
        return str(cause)
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])


def raise_if_of_machine(name: str, error: BaseException) -> None:
    """Raise an InfrastructureError in place of an exception that is a failure of the machine.

    Args:
        name: the process, as in ``raydl.errors.InfrastructureError``.
        error: what was raised there.
    """
    problem = failure_of_machine(error)
    if problem:
        raise InfrastructureError(name, problem) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on; each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _is_of_machine(error: BaseException) -> bool:
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return isinstance(error, (OSError, RuntimeError)) and bool(_TEXTS.search(str(error)))


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
            f"{worker_id}{place} failed for the {_ordinal(number)} time within an hour, more often "
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


class RunFailure:
    """The error that a run stops with after a checkpoint, and the rollbacks that avoid one.

    Args:
        config: how often a diverged replica or center may go back.
        log: takes one line on what happened.
    """

    def __init__(self, config: ElasticConfig, log: Callable[[str], None]) -> None:
        self.error: Exception | None = None
        """The exception of a worker or of the evaluator; None: the run goes on."""
        self.why = ""
        """Why the run stops with it."""
        self._raised: set[str] = set()
        self._config = config
        self._log = log
        self._num_rollbacks = 0
        self._rollback_epoch = -1
        self._bad_center_in = 0

    def stop_with(self, name: str, error: Exception, why: str) -> None:
        """Note the error that the run stops with, and the process that raised it."""
        self.error, self.why, self._raised = error, why, {name}

    def note_further(self, name: str) -> bool:
        """Note that a process raised while the run stops; return whether it is its first error."""
        is_first = name not in self._raised
        self._raised.add(name)
        return is_first

    def note_divergence(
        self, name: str, error: NonFiniteError, *, generation: int, epoch: int
    ) -> None:
        """Let a diverged replica go on from the center, a bounded number of times in an epoch.

        Where the center diverged itself, all go on from the newest one that was kept.

        Args:
            name: the worker, or ``center``.
            error: what it found.
            generation: the one that trains.
            epoch: epochs that are complete.
        """
        is_of_center = isinstance(error, NonFiniteCenterError)
        if is_of_center and generation == self._bad_center_in:  # in rounds each worker sees it
            return
        self._bad_center_in = generation if is_of_center else self._bad_center_in
        if epoch != self._rollback_epoch:
            self._rollback_epoch, self._num_rollbacks = epoch, 0
        self._num_rollbacks += 1
        limit, never = self._config.max_rollbacks, self._config.on_worker_error == "stop"
        if self._num_rollbacks <= limit and not never:
            who, where = ("all", "newest good center") if is_of_center else (name, "center")
            self._log(
                f"{error}; {who} {'go' if is_of_center else 'is rolled'} back to the {where} "
                f"({self._num_rollbacks} of {limit} times in this epoch)"
            )
        elif self.error is None:
            self.error = error
            self.why = f"{'the center' if is_of_center else name} diverged"
            if not never:
                self.why += (
                    f" for the {_ordinal(self._num_rollbacks)} time in this epoch, more often than "
                    f"elastic.max_rollbacks"
                )


def _ordinal(number: int) -> str:
    """Return 1 as first, 4 as 4th."""
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
