"""Every error raydl raises on purpose, in one tree.

    RaydlError
    ├── ConfigError                 a setting is wrong: found before any actor starts
    │   └── UnknownNameError        a name that no table holds; lists the nearest
    ├── DataError                   the input is missing, empty, truncated or mislabelled
    ├── ShapeError                  the model and the data do not fit each other
    ├── ClusterError                no Ray cluster is there that would have us
    ├── ResourceError               the cluster can not hold what was asked for
    ├── CheckpointError             a checkpoint is absent, damaged or of another model
    ├── StepError                   a local step led to what must not reach the center
    │   └── NonFiniteLossError      the loss became NaN or infinite
    ├── ProcessLostError            a process of the run went away
    ├── SupersededError             another driver has taken the run over
    ├── AttachError                 an own loop could not go on together with the others
    └── ExchangeError               an exchange did not complete; nothing was changed by it
        └── ExchangeTimeoutError    somebody did not come in time

All of them travel between processes: ``args`` equals the signature, so that pickle calls
the constructor again, and the wording lives in ``__str__``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 8
"""The longest table that a message about a near miss lists in full."""
_ALIKE = 0.5
"""So alike, from 0 to 1, are two names of which one may be meant for the other."""


class RaydlError(Exception):
    """Base of every error raised on purpose; its text is one sentence for the user."""


class ConfigError(RaydlError):
    """A setting is out of range, or two settings contradict each other.

    Args:
        setting: the dotted name of the setting, for example ``method.beta``.
        problem: the rest of the sentence: the limit, the value, what to change.
    """

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(setting, problem)
        self.setting = setting
        self.problem = problem

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
        self.args = (setting, name, self.choices)
        self.name = name


class DataError(RaydlError):
    """The input can not be read as it should.

    Args:
        source: the path or URI of the file or folder.
        problem: what is wrong with it, and what was expected.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


class ShapeError(RaydlError):
    """The model and the data do not fit each other.

    Args:
        model: the name of the model.
        problem: which shapes met and what would fit.
    """

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(model, problem)
        self.model = model
        self.problem = problem

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
        self.address = address
        self.problem = problem

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address} (RAY_ADDRESS) {self.problem}"


class ResourceError(RaydlError):
    """The cluster can not hold what was asked for."""


class CheckpointError(RaydlError):
    """A checkpoint is absent, damaged, or belongs to another model.

    Args:
        path: where it was looked for.
        problem: what is wrong, and what to do.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.problem}"


class StepError(RaydlError):
    """A local step led to something that must not reach the center, and has not reached it.

    Args:
        worker_id: whose step.
        local_step: the step of that worker, counted from 0.
        problem: what it led to, and what to change.
    """

    def __init__(self, worker_id: str, local_step: int, problem: str) -> None:
        super().__init__(worker_id, local_step, problem)
        self.worker_id = worker_id
        self.local_step = local_step
        self.problem = problem

    def __str__(self) -> str:
        return f"local step {self.local_step} of worker {self.worker_id}: {self.problem}"


class NonFiniteLossError(StepError):
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


class ProcessLostError(RaydlError):
    """A process of the run went away.

    Args:
        name: whose: ``w3`` for a worker, ``center``, ``evaluator``.
        reason: what Ray said about it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the process of {self.name} was lost: {self.reason}; the same command with "
            f"--resume goes on from the last checkpoint, if one was written"
        )


class SupersededError(RaydlError):
    """Another driver has taken the run over: this one may not change its files any more.

    Args:
        place: where the run is kept.
        driver_epoch: of this driver.
        newer: the driver epoch of the other.
        holder: which process that is, and since when; empty: not known.
    """

    def __init__(self, place: str, driver_epoch: int, newer: int, holder: str = "") -> None:
        super().__init__(place, driver_epoch, newer, holder)
        self.place = place
        self.driver_epoch = driver_epoch
        self.newer = newer
        self.holder = holder

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
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"raydl.attach to {self.name!r}: {self.problem}"


class ExchangeError(RaydlError):
    """An exchange did not complete. No tensor was changed by it.

    Args:
        round: the number of the round.
        generation: the membership it belonged to.
        problem: what the transport said.
    """

    def __init__(self, round: int, generation: int, problem: str) -> None:
        super().__init__(round, generation, problem)
        self.round = round
        self.generation = generation
        self.problem = problem

    def __str__(self) -> str:
        return f"exchange round {self.round} (generation {self.generation}) failed: {self.problem}"


class ExchangeTimeoutError(ExchangeError):
    """Somebody did not come to an exchange in time.

    Args:
        round: the number of the round.
        generation: the membership it belonged to.
        timeout_s: how long was waited, in seconds.
        missing: the ids of the workers that did not come, where known.
    """

    def __init__(
        self, round: int, generation: int, timeout_s: float, missing: Iterable[str] = ()
    ) -> None:
        self.timeout_s = timeout_s
        self.missing = tuple(missing)
        who = f"workers {list(self.missing)}" if self.missing else "its peers"
        super().__init__(round, generation, f"timed out after {timeout_s} s waiting for {who}")
        self.args = (round, generation, timeout_s, self.missing)

    def __str__(self) -> str:
        return f"{super().__str__()}; raise exchange.timeout_s if they were only slow"
