"""Every error raydl raises on purpose, in one tree.

    RaydlError
    ├── ConfigError                 a setting is wrong: found before any actor starts
    │   └── UnknownNameError        a name that no table holds; lists the nearest
    ├── DataError                   the input is missing, empty, truncated or mislabelled
    ├── ShapeError                  the model and the data do not fit each other
    ├── UntrustedCodeError          a run's folder names code, and nobody said to run it
    ├── ClusterError                no Ray cluster is there that would have us
    ├── ResourceError               the cluster can not hold what was asked for
    │   └── CapacityError           it did not come to have it in time
    ├── CheckpointError             a checkpoint is absent, damaged or of another model
    │   └── StateLostError          a worker has gone before its state was written
    ├── StorageSilentError          a run's storage does not answer
    ├── StepError                   a local step led to what must not reach the center
    │   └── NonFiniteError          weights, gradients or buffers are NaN, infinite or too large
    │       ├── NonFiniteLossError  the loss became NaN or infinite
    │       └── NonFiniteCenterError  the center became so
    ├── InfrastructureError         a machine failed: its memory, its device, its disk, its network
    ├── ProcessLostError            a process of the run went away
    ├── StalledError                what the run waits for did not come in time
    ├── SupersededError             another driver has taken the run over
    ├── AttachError                 an own loop could not go on together with the others
    └── ExchangeError               an exchange did not complete; nothing was changed by it
        └── ExchangeTimeoutError    somebody did not come in time

All of them travel between processes: ``args`` equals the signature, so that pickle calls
the constructor again, and the wording lives in ``__str__``. None of them holds the credentials of
a URI: texts are redacted when the error is made, so that no log, traceback or pickle has them. A
command that ends with one of them has its exit status: 2 for a mistake in what was asked for, 1 for
a training that failed, 3 where another driver has the run, 75 where the machines failed and the
same command with ``--resume`` may succeed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

from raydl.redaction import redact

WORTH_RETRYING = 75
"""Exit status of a run that its machines ended: EX_TEMPFAIL of sysexits.h."""
SUPERSEDED = 3
"""Exit status of a driver whose run another one has taken over."""
_LISTED = 8
"""The longest table that a message about a near miss lists in full."""
_ALIKE = 0.5
"""So alike, from 0 to 1, are two names of which one may be meant for the other."""


class RaydlError(Exception):
    """Base of every error raised on purpose; its text is one sentence for the user.

    Args:
        args: texts are redacted.
    """

    exit_status: ClassVar[int] = 2
    """Of a command that ends with it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(RaydlError):
    """A setting is out of range, or two settings contradict each other.

    Args:
        setting: the dotted name of the setting, for example ``method.beta``.
        problem: the rest of the sentence: the limit, the value, what to change.
    """

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(setting, problem)
        self.setting, self.problem = self.args

    def __str__(self) -> str:
        return f"{self.setting} {self.problem}"


class UnknownNameError(ConfigError):
    """A name that is in no table; the message lists the nearest ones.

    Args:
        setting: the dotted name of the setting.
        name: what the user wrote.
        choices: every name that would have been accepted.
    """

    def __init__(self, setting: str, name: str, choices: Iterable[str]) -> None:
        self.choices = tuple(choices)
        near = difflib.get_close_matches(name, self.choices, n=3, cutoff=_ALIKE)
        hints = [f"did you mean {' or '.join(near)}?"] if near else []
        if not near or len(self.choices) <= _LISTED:
            hints.append(f"known: {', '.join(self.choices)}")
        super().__init__(setting, f"has no {name!r}; {' '.join(hints)}")
        self.name = redact(name)
        self.args = (self.setting, self.name, self.choices)


class DataError(RaydlError):
    """The input can not be read as it should.

    Args:
        source: the path or URI of the file or folder.
        problem: what is wrong with it, and what was expected.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source, self.problem = self.args

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


class UntrustedCodeError(RaydlError):
    """A run's folder names code that is not raydl's, and nobody said that it may run here.

    Args:
        source: the file that names it, a path or URI.
        names: for each setting the ``module:name`` that it has: ``(("model", "nets:small"),)``.
    """

    def __init__(self, source: str, names: Iterable[tuple[str, str]]) -> None:
        self.names = tuple((setting, name) for setting, name in names)
        super().__init__(source, self.names)
        self.source, _ = self.args

    def __str__(self) -> str:
        return (
            f"{self.source} names code that is not raydl's: {self.listed()}; it would be imported "
            f"and run here: add --trust (in Python trust=True) if you trust all its writers"
        )

    def listed(self) -> str:
        """Return the names for a person: ``model 'nets:small'``."""
        return ", ".join(f"{setting} {name!r}" for setting, name in self.names)


class ShapeError(RaydlError):
    """The model and the data do not fit each other.

    Args:
        model: the name of the model.
        problem: which shapes met and what would fit.
    """

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(model, problem)
        self.model, self.problem = self.args

    def __str__(self) -> str:
        return f"model {self.model}: {self.problem}"


class ClusterError(RaydlError):
    """The Ray cluster can not be joined.

    Args:
        address: what ``RAY_ADDRESS`` says.
        problem: what the cluster did, and what to do.
    """

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem)
        self.address, self.problem = self.args

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address} (RAY_ADDRESS) {self.problem}"


class ResourceError(RaydlError):
    """The cluster can not hold what was asked for."""


class CapacityError(ResourceError):
    """The cluster did not come to hold what was asked for in the time that was given."""

    exit_status = WORTH_RETRYING


class CheckpointError(RaydlError):
    """A checkpoint is absent, damaged, or belongs to another model.

    Args:
        path: where it was looked for.
        problem: what is wrong, and what to do.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = self.args

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.problem}"


class StateLostError(CheckpointError):
    """A worker has gone, or fell silent, before its own state was written.

    Args:
        worker_id: which one.
        problem: what became of it.
    """

    def __init__(self, worker_id: str, problem: str) -> None:
        super().__init__(f"of {worker_id}", problem)
        self.worker_id, self.args = worker_id, (worker_id, self.problem)

    def __str__(self) -> str:
        return f"the state of {self.worker_id} was not written: {self.problem}"


class StorageSilentError(RaydlError):
    """A storage has not answered for so long that nothing waits for it any more.

    Args:
        root: where it is.
        seconds: for how long.
        what: the call that has no answer.
        then: what becomes of the run; empty: it has not begun.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, root: str, seconds: float, what: str, then: str = "") -> None:
        super().__init__(root, seconds, what, then)
        self.root, self.seconds, self.what, self.then = self.args

    def __str__(self) -> str:
        return (
            f"the storage {self.root} has not answered for {self.seconds:.0f} s ({self.what}); see "
            f"to its server, its mount and the network{self.then and '; '}{self.then}"
        )


class StepError(RaydlError):
    """A local step led to something that must not reach the center, and has not reached it.

    Args:
        worker_id: whose step.
        local_step: the step of that worker, counted from 0.
        problem: what it led to, and what to change.
    """

    exit_status = 1

    def __init__(self, worker_id: str, local_step: int, problem: str) -> None:
        super().__init__(worker_id, local_step, problem)
        self.worker_id, self.local_step, self.problem = self.args

    def __str__(self) -> str:
        return f"local step {self.local_step} of worker {self.worker_id}: {self.problem}"


class NonFiniteError(StepError):
    """A replica has values that are NaN, infinite or beyond 1e19: it has diverged."""


class NonFiniteLossError(NonFiniteError):
    """The loss of a batch became NaN or infinite.

    Args:
        worker_id: the worker that saw it.
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
    """The center has values that are NaN, infinite or beyond 1e19: it is not kept.

    Replicas send finite values alone, so a step of the center itself was too long.

    Args:
        round: of the center.
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
        name: the process that it happened to: ``w3`` for a worker, ``evaluator``.
        problem: what the machine, or the library that speaks to it, said.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = self.args

    def __str__(self) -> str:
        return f"the machine of {self.name} failed: {self.problem}"


class ProcessLostError(RaydlError):
    """A process of the run went away.

    Args:
        name: whose: ``w3`` for a worker, ``center``, ``evaluator``.
        reason: what Ray said about it.
    """

    exit_status = WORTH_RETRYING

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = self.args

    def __str__(self) -> str:
        return (
            f"the process of {self.name} was lost: {self.reason}; the same command with "
            f"--resume goes on from the last checkpoint, if one was written"
        )


class StalledError(RaydlError):
    """A run lacks something that it needs to go on, and its time limit has passed."""

    exit_status = WORTH_RETRYING


class SupersededError(RaydlError):
    """Another driver has taken the run over: this one may not change its files any more.

    Args:
        place: where the run is kept.
        driver_epoch: of this driver.
        newer: the driver epoch of the other.
        holder: which process that is, and since when; empty: not known.
    """

    exit_status = SUPERSEDED

    def __init__(self, place: str, driver_epoch: int, newer: int, holder: str = "") -> None:
        super().__init__(place, driver_epoch, newer, holder)
        self.place, self.driver_epoch, self.newer, self.holder = self.args

    def __str__(self) -> str:
        who = f"{self.holder} has" if self.holder else "another driver has"
        return (
            f"{self.place}: this driver's epoch {self.driver_epoch} is over: {who} taken the run "
            f"over as driver epoch {self.newer}; this driver ends and changes nothing there"
        )


class AttachError(RaydlError):
    """A loop of one's own can not begin, or go on, together with the others.

    Args:
        name: of the run that it was attached to.
        problem: what is missing, how long was waited, what to change.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = self.args

    def __str__(self) -> str:
        return f"raydl.attach to {self.name!r}: {self.problem}"


class ExchangeError(RaydlError):
    """An exchange did not complete. No tensor was changed by it.

    Args:
        round: the number of the round; of a collective group that of the operation, and 0 while
            the group forms.
        generation: the membership it belonged to.
        problem: what the transport said.
        missing: the ids of the workers that were lost or did not come, where known.
        group: the name of the collective group; empty: it was an exchange of a run.
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
        return f"{self._which()} (generation {self.generation}) failed: {self.problem}"

    def _which(self) -> str:
        if not self.group:
            return f"exchange round {self.round}"
        return f"{f'operation {self.round} of' if self.round else 'forming'} group {self.group!r}"


class ExchangeTimeoutError(ExchangeError):
    """Somebody did not come to an exchange in time.

    Args:
        round: the number of the round.
        generation: the membership it belonged to.
        timeout_s: how long was waited, in seconds.
        missing: the ids of the workers that did not come, where known.
        group: the name of the collective group; empty: it was an exchange of a run.
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
        who = f"{'members' if group else 'workers'} {list(missing)}" if missing else "its peers"
        problem = f"timed out after {timeout_s} s waiting for {who}"
        super().__init__(round, generation, problem, missing, group)
        self.timeout_s, self.setting = timeout_s, setting
        self.args = (round, generation, timeout_s, self.missing, self.group, setting)

    def __str__(self) -> str:
        return f"{super().__str__()}; raise {self.setting} if they were only slow"
