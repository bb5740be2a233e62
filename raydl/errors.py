"""Every error that raydl raises on purpose, in one tree.

    RaydlError
    ├── ConfigError                 a setting is wrong: found before any actor starts
    │   └── UnknownNameError        an unknown name; the message lists the nearest ones
    ├── DataError                   the input is missing, empty, truncated or mislabeled
    ├── ShapeError                  the model and the data do not fit each other
    ├── UntrustedCodeError          a run's folder names code that the user has not trusted
    ├── ClusterError                no Ray cluster can be joined
    ├── ResourceError               the cluster cannot hold what was requested
    │   └── CapacityError           the cluster did not provide it in time
    ├── CheckpointError             a checkpoint is absent, damaged or of another model
    │   ├── StateLostError          a worker was lost before its state was written
    │   └── UnreadableCheckpointError  a machine or the storage failed while it was read
    ├── StorageSilentError          a run's storage does not answer
    ├── StepError                   a local step gave values that must not reach the center
    │   └── NonFiniteError          weights, gradients or buffers are NaN, infinite or too large
    │       ├── NonFiniteLossError  the loss is NaN or infinite
    │       └── NonFiniteCenterError  the center has such values
    ├── InfrastructureError         a machine failed: its memory, device, disk or network
    ├── ProcessLostError            a process of the run was lost
    ├── StalledError                the run waited too long for something that it needs
    ├── SupersededError             another driver has taken over the run
    ├── AttachError                 an attached training loop cannot start or continue
    └── ExchangeError               an exchange did not complete and changed nothing
        └── ExchangeTimeoutError    a member of the exchange was late

All of them travel between processes: ``args`` equals the signature, so that pickle calls the
constructor again, and the wording is in ``__str__``. No error holds the credentials of a URI: the
constructor redacts its texts, so that logs, tracebacks and pickles are free of them.

A command that ends with one of these errors exits with its status: 2 for a mistake of the user,
1 if training failed, 3 if another driver has the run, 75 if machines failed and the same command
with ``--resume`` may succeed. ``STOPPED`` has the statuses of a command that was stopped.

``failure_of_machine`` tells a failure of a machine (memory, a disk, a device, the network) from an
error of the code that ran on it.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable
from typing import ClassVar

from raydl.text.redaction import redact

WORTH_RETRYING = 75
"""Exit status of a run that failed because of its machines: EX_TEMPFAIL of sysexits.h."""
SUPERSEDED = 3
"""Exit status of a driver if another driver has taken over its run."""
STOP_COMMAND = "raydl stop"
"""What stopped a run that a user stopped by that command."""
STOPPED = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, STOP_COMMAND: 143}
"""Exit status by what stopped a command."""
_MOST_LISTED = 8
"""Number of choices up to which a message with near misses lists all of them, too."""

_LONGEST_PROBLEM = 600
"""Most characters about data in a sentence; of a longer text the beginning and the end are told."""


class RaydlError(Exception):
    """Base of all errors that are raised on purpose; the text is one sentence for the user.

    Args:
        args: the values of the message; texts are redacted.
    """

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this error."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(RaydlError):
    """A setting is out of range, or two settings contradict each other.

    Args:
        setting: the dotted name of the setting, for example ``method.beta``.
        problem: the rest of the sentence: the limit, the value, what to change. A sentence of its
            own, which begins with the value, follows a colon: ``: /runs/a is in use``.
    """

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(setting, problem)
        self.setting, self.problem = self.args

    def __str__(self) -> str:
        space = "" if self.problem.startswith(":") else " "
        return f"{self.setting}{space}{self.problem}"


class UnknownNameError(ConfigError):
    """A name is unknown; the message lists the nearest known ones.

    Args:
        setting: the dotted name of the setting.
        name: the name that the user wrote.
        choices: all valid names.
    """

    def __init__(self, setting: str, name: str, choices: Iterable[str]) -> None:
        self.choices = tuple(choices)
        near = difflib.get_close_matches(name, self.choices, n=3, cutoff=0.5)
        hints = [f"did you mean {' or '.join(near)}?"] if near else []
        if not near or len(self.choices) <= _MOST_LISTED:
            hints.append(f"known: {', '.join(self.choices)}")
        super().__init__(setting, f"has no {name!r}; {' '.join(hints)}")
        self.name = redact(name)
        self.args = (self.setting, self.name, self.choices)


class DataError(RaydlError):
    """The input cannot be read, or is not what it should be.

    Args:
        source: the path or URI of the file or folder.
        problem: what is wrong with it, and what was expected. What it quotes of the data may be of
            any length and in several lines: it becomes one line with the beginning and the end.
    """

    def __init__(self, source: str, problem: str) -> None:
        problem = " ".join(problem.splitlines())
        if len(problem) > _LONGEST_PROBLEM:
            problem = f"{problem[: _LONGEST_PROBLEM // 2]} … {problem[-_LONGEST_PROBLEM // 3 :]}"
        super().__init__(source, problem)
        self.source, self.problem = self.args

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


class UntrustedCodeError(RaydlError):
    """A run's folder names code that is not raydl's, and the user has not trusted it.

    Args:
        source: path or URI of the file that names the code.
        names: pairs of a setting and its ``module:name``: ``(("model", "nets:small"),)``.
    """

    def __init__(self, source: str, names: Iterable[tuple[str, str]]) -> None:
        self.names = tuple((setting, name) for setting, name in names)
        super().__init__(source, self.names)
        self.source, _ = self.args

    def __str__(self) -> str:
        return (
            f"{self.source} names code that is not raydl's: {self.listed()}; this command would "
            f"import and run it: add --trust (in Python trust=True) if you trust everyone who can "
            f"write to the run's folder"
        )

    def listed(self) -> str:
        """Return the names as text: ``model 'nets:small'``."""
        return ", ".join(f"{setting} {name!r}" for setting, name in self.names)


class ShapeError(RaydlError):
    """The model and the data do not fit each other.

    Args:
        model: the name of the model.
        problem: the shapes that do not fit, and what would fit.
    """

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(model, problem)
        self.model, self.problem = self.args

    def __str__(self) -> str:
        return f"model {self.model}: {self.problem}"


class ClusterError(RaydlError):
    """The Ray cluster cannot be joined.

    Args:
        address: the value of ``RAY_ADDRESS``; "local" for a cluster that this process starts.
        problem: what the cluster did, and what to change.
    """

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem)
        self.address, self.problem = self.args

    def __str__(self) -> str:
        if self.address == "local":
            return f"the Ray cluster of this run {self.problem}"
        return f"the Ray cluster at {self.address} (RAY_ADDRESS) {self.problem}"


class ResourceError(RaydlError):
    """The cluster cannot hold what was requested."""


class CapacityError(ResourceError):
    """The cluster did not provide the requested resources within the time limit."""

    exit_status = WORTH_RETRYING


class CheckpointError(RaydlError):
    """A checkpoint is absent, damaged, or belongs to another model.

    Args:
        path: the path or URI of the checkpoint.
        problem: what is wrong, and what to change.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = self.args

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.problem}"


class StateLostError(CheckpointError):
    """A worker was lost, or did not answer, before its state was written.

    Args:
        worker_id: the worker.
        problem: what happened to it.
    """

    def __init__(self, worker_id: str, problem: str) -> None:
        super().__init__(f"of {worker_id}", problem)
        self.worker_id, self.args = worker_id, (worker_id, self.problem)

    def __str__(self) -> str:
        return f"the state of {self.worker_id} was not written: {self.problem}"


class UnreadableCheckpointError(CheckpointError):
    """A machine or the storage failed while a checkpoint was read; it may be whole."""

    exit_status = WORTH_RETRYING


class StorageSilentError(RaydlError):
    """A storage has not answered within the time limit; nothing waits for it any longer.

    Args:
        root: the path or URI of the storage.
        seconds: seconds without an answer.
        what: the call that has no answer: ``to write status.json``.
        then: what happens to the run; empty if the run has not begun.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, root: str, seconds: float, what: str, then: str = "") -> None:
        super().__init__(root, seconds, what, then)
        self.root, self.seconds, self.what, self.then = self.args

    def __str__(self) -> str:
        return (
            f"the storage {self.root} has not answered for {self.seconds:.0f} s ({self.what}); "
            f"check its server, its mount and the network{self.then and '; '}{self.then}"
        )


class StepError(RaydlError):
    """A local step gave values that must not reach the center; they have not reached it.

    Args:
        worker_id: the worker that took the step.
        local_step: the step of that worker, counted from 0.
        problem: what is wrong, and what to change.
    """

    exit_status = 1

    def __init__(self, worker_id: str, local_step: int, problem: str) -> None:
        super().__init__(worker_id, local_step, problem)
        self.worker_id, self.local_step, self.problem = self.args

    def __str__(self) -> str:
        return f"local step {self.local_step} of worker {self.worker_id}: {self.problem}"


class NonFiniteError(StepError):
    """A replica has diverged: it has values that are NaN, infinite or beyond 1e19."""


class NonFiniteLossError(NonFiniteError):
    """The loss of a batch is NaN or infinite.

    Args:
        worker_id: the worker that computed the loss.
        local_step: the step of that worker, counted from 0.
        loss: the value.
    """

    def __init__(self, worker_id: str, local_step: int, loss: float) -> None:
        super().__init__(worker_id, local_step, f"the loss became {loss}")
        self.args = (worker_id, local_step, loss)
        self.loss = loss

    def __str__(self) -> str:
        return (
            f"the loss became {self.loss} at local step {self.local_step} of worker "
            f"{self.worker_id}; lower optimizer.lr, or look at the data of that step"
        )


class NonFiniteCenterError(NonFiniteError):
    """The center has values that are NaN, infinite or beyond 1e19; it is not kept.

    Replicas send finite values only, so a step of the center itself was too large.

    Args:
        round: the round of the center.
    """

    def __init__(self, round: int) -> None:
        super().__init__("center", round, "it has values that are not finite")
        self.args = (round,)
        self.round = round

    def __str__(self) -> str:
        return (
            f"the center of round {self.round} has values that are not finite, or beyond 1e19; "
            f"lower optimizer.lr, or the method's outer rate and momentum"
        )


class InfrastructureError(RaydlError):
    """A machine failed, not the code that ran on it: memory, an accelerator, a disk, the network.

    Args:
        name: the process on that machine: ``w3`` for a worker, or ``evaluator``.
        problem: the message of the system or of the library.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = self.args

    def __str__(self) -> str:
        return f"the machine of {self.name} failed: {self.problem}"


class ProcessLostError(RaydlError):
    """A process of the run was lost.

    Args:
        name: the process: ``w3`` for a worker, ``center``, or ``evaluator``.
        reason: Ray's message.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = self.args

    def __str__(self) -> str:
        return (
            f"the process of {self.name} was lost: {self.reason}; the same command with "
            f"--resume resumes from the last checkpoint, if one was written"
        )


class StalledError(RaydlError):
    """A run lacks something that it needs to go on, and its time limit has passed."""

    exit_status = WORTH_RETRYING


class SupersededError(RaydlError):
    """Another driver has taken over the run: this one must not change its files any longer.

    Args:
        place: the path or URI of the run.
        driver_epoch: the driver epoch of this driver.
        newer: the driver epoch of the other driver.
        holder: the process of the other driver, and since when it runs; empty if unknown.
    """

    exit_status = SUPERSEDED

    def __init__(self, place: str, driver_epoch: int, newer: int, holder: str = "") -> None:
        super().__init__(place, driver_epoch, newer, holder)
        self.place, self.driver_epoch, self.newer, self.holder = self.args

    def __str__(self) -> str:
        return (
            f"{self.place}: {self.holder or 'another driver'} has taken over the run as driver "
            f"epoch {self.newer}; this driver, of epoch {self.driver_epoch}, ends and changes "
            f"nothing there"
        )


class AttachError(RaydlError):
    """An attached training loop cannot start or continue.

    Args:
        name: the name of the run that the loop is attached to.
        problem: what is missing, how long the loop has waited, what to change.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = self.args

    def __str__(self) -> str:
        return f"raydl.attach to {self.name!r}: {self.problem}"


class ExchangeError(RaydlError):
    """An exchange did not complete. It has changed no tensor.

    Args:
        round: the number of the round; in a collective group the number of the operation, or 0
            while the group forms.
        generation: the membership of the exchange.
        problem: the message of the transport.
        missing: the ids of the workers that were lost or late, if known.
        group: the name of the collective group; empty for an exchange of a run.
    """

    exit_status = WORTH_RETRYING

    def __init__(
        self,
        round: int,
        generation: int,
        problem: str,
        missing: Iterable[str] = (),
        group: str = "",
    ) -> None:
        self.missing = tuple(missing)
        super().__init__(round, generation, problem, self.missing, group)
        self.round, self.generation, self.problem, _, self.group = self.args

    def __str__(self) -> str:
        name = f"exchange round {self.round}"
        if self.group:
            operation = f"operation {self.round} of" if self.round else "forming"
            name = f"{operation} group {self.group!r}"
        return f"{name} (generation {self.generation}) failed: {self.problem}"


class ExchangeTimeoutError(ExchangeError):
    """A member of an exchange did not take part in time.

    Args:
        round: the number of the round.
        generation: the membership of the exchange.
        timeout_s: the time-out, in seconds.
        missing: the ids of the late workers, if known.
        group: the name of the collective group; empty for an exchange of a run.
        setting: the dotted name of the time-out.
    """

    def __init__(
        self,
        round: int,
        generation: int,
        timeout_s: float,
        missing: Iterable[str] = (),
        group: str = "",
        setting: str = "exchange.timeout_s",
    ) -> None:
        missing = tuple(missing)
        kind = "members " if group else ""
        late = f"{kind}{', '.join(missing)}" if missing else "its peers"
        problem = f"timed out after {timeout_s} s waiting for {late}"
        super().__init__(round, generation, problem, missing, group)
        self.timeout_s, self.setting = timeout_s, setting
        self.args = (round, generation, timeout_s, self.missing, self.group, setting)

    def __str__(self) -> str:
        return f"{super().__str__()}; raise {self.setting} if they were only slow"


_KINDS = {"MemoryError", "OutOfMemoryError", "AcceleratorError", "DistBackendError"}
"""Names of exception types. torch's are not imported: they differ between its versions."""
_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ENODEV", "ENXIO", "EREMOTEIO", "EUCLEAN",
        "ENOMEM", "EMFILE", "ENFILE", "ENOTCONN", "ENETDOWN", "ENETUNREACH", "ENETRESET",
        "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""Errors of a failing disk, file server or network. A missing or unreadable file is an error of the
user: a replacement would meet it again."""
_TEXTS = re.compile(
    r"can't allocate memory|not enough memory|CUDA error|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS"
    r"|NCCL error|uncorrectable ECC|hipError"
    r"|AWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTLING"
    r"|INTERNAL_FAILURE)|HTTP status 5\d\d|google::cloud::Status\((UNAVAILABLE|DEADLINE_EXCEEDED"
    r"|INTERNAL|RESOURCE_EXHAUSTED)|curlCode|Input/output error|Stale file handle"
    r"|No space left on device",
)
"""Matches errors without a type or number of their own, such as torch's RuntimeError."""


def failure_of_machine(error: BaseException) -> str:
    """Return one line about the machine's failure, or "" if the error is one of the code.

    Call it in the process that raised the error: between processes its causes are lost.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if _is_of_machine(cause):
            return str(error) if isinstance(error, RaydlError) else in_one_line(cause)
        seen.add(id(cause))
        cause = cause.__cause__
    return ""


def exit_status_of(error: RaydlError) -> int:
    """Return the exit status of a command that ends with an error.

    It tells a disk or a storage that failed, as the cause of an error about checkpoints, from
    checkpoints that are wrong. A storage that cannot be reached at the start is a setting to check.
    """
    has_failed = isinstance(error, CheckpointError) and bool(failure_of_machine(error))
    return WORTH_RETRYING if has_failed else error.exit_status


def how_to_install(extra: str) -> str:
    """Return the rest of a sentence: how to install an extra of raydl.

    The distribution is not on the package index yet.
    """
    return f"in a checkout of raydl, run pip install -e '.[{extra}]'"


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an exception; of raydl's own errors, the message.

    Args:
        error: the exception. One from Ray has the original as its ``cause``, and a traceback in its
            text.
    """
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RaydlError):
        return str(cause)
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])


def reading_error(path: str, problem: str, error: Exception) -> CheckpointError:
    """Return the error to raise if a checkpoint cannot be read.

    Args:
        path: the path or URI of the checkpoint.
        problem: what the message says.
        error: the exception; if it is of the machine, the checkpoint may be whole.
    """
    kind = UnreadableCheckpointError if failure_of_machine(error) else CheckpointError
    return kind(path, problem)


def raise_if_of_machine(name: str, error: BaseException) -> None:
    """Raise an InfrastructureError from an exception that is a failure of the machine.

    Args:
        name: the process, as in ``raydl.errors.InfrastructureError``.
        error: the exception that it raised.
    """
    if problem := failure_of_machine(error):
        raise InfrastructureError(name, problem) from error


def _is_of_machine(error: BaseException) -> bool:
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return isinstance(error, (OSError, RuntimeError)) and bool(_TEXTS.search(str(error)))
