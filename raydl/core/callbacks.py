"""Callbacks: what is called in the driver whenever the center was scored, and at the end.

``Callback`` is what one looks like. ``StopAtAccuracy`` and ``Patience`` are the two
that settings ask for; they use nothing that one of your own could not::

    class UntilLunch(raydl.Callback):
        def evaluated(self, evaluated):
            return "it is noon" if time.localtime().tm_hour >= 12 else None

    raydl.Trainer("lenet", "digits", callbacks=[UntilLunch()]).fit()
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from raydl.config import TrainingConfig
from raydl.core.worker_group import Evaluated
from raydl.errors import ConfigError, RaydlError


@runtime_checkable
class Callback(Protocol):
    """Hears of each score of the center, and may end the run.

    It is called in the driver, between two looks at the cluster: return soon. What it raises ends
    the run and arrives with its own traceback, once all processes are closed.
    """

    def evaluated(self, evaluated: Evaluated) -> str | bool | None:
        """Take in a score of the center; return whether the run should end, best with a reason.

        The workers are some rounds further by then, and end after the next one, with a checkpoint.
        What is scored meanwhile, and the last center, is heard of as well.

        Args:
            evaluated: the metrics of a snapshot of the center, and the progress of the run then.
        """
        ...

    def ended(self, figures: Mapping[str, Any]) -> None:
        """Take in the end of a run that no exception ended; its folder is complete.

        Args:
            figures: those of ``result.json``.
        """
        return None


class StopAtAccuracy(Callback):
    """Ends the run at the first score of the center that reaches an accuracy.

    Args:
        accuracy: the lowest that will do, in (0, 1].
    """

    def __init__(self, accuracy: float) -> None:
        self.name = f"training.stop_at_accuracy {accuracy}"
        """The setting, for ``result.json``."""
        self._accuracy = accuracy

    def evaluated(self, evaluated: Evaluated) -> str | None:
        """Return that the accuracy is reached, or nothing."""
        accuracy = evaluated.metrics.get("accuracy", -math.inf)
        return f"reached accuracy {accuracy:.4f}" if accuracy >= self._accuracy else None


class Patience(Callback):
    """Ends the run when the center has not become better for some evaluations (early stopping).

    What counts is the accuracy, or the loss where there is none. Any better score counts.

    Args:
        num_evaluations: in a row, none of them better than the best before; 1 or more.
    """

    def __init__(self, num_evaluations: int) -> None:
        self.name = f"training.patience {num_evaluations}"
        """The setting, for ``result.json``."""
        self._num_evaluations = num_evaluations
        self._best = -math.inf
        self._num_worse = 0

    def evaluated(self, evaluated: Evaluated) -> str | None:
        """Return that patience is at its end, or nothing."""
        score = score_of(evaluated.metrics)
        self._num_worse = 0 if score > self._best else self._num_worse + 1
        self._best = max(self._best, score)
        if self._num_worse < self._num_evaluations:
            return None
        last = f"in the last {self._num_worse} evaluation{'s' if self._num_worse > 1 else ''}"
        what = "accuracy" if "accuracy" in evaluated.metrics else "loss"
        if self._best == -math.inf:
            return f"no {what} that is a number {last}"
        best = self._best if what == "accuracy" else -self._best
        return f"no better {what} than {best:.4f} {last}"


def score_of(metrics: Mapping[str, float]) -> float:
    """Return what centers are compared by, more is better: the accuracy, else minus the loss.

    What is not a number, or not there, is worse than anything.
    """
    score = metrics["accuracy"] if "accuracy" in metrics else -metrics.get("loss", math.inf)
    return -math.inf if math.isnan(score) else score


def callbacks_of(training: TrainingConfig) -> list[StopAtAccuracy | Patience]:
    """Return the callbacks that the settings ask for."""
    found: list[StopAtAccuracy | Patience] = []
    if training.stop_at_accuracy is not None:
        found.append(StopAtAccuracy(training.stop_at_accuracy))
    if training.patience is not None:
        found.append(Patience(training.patience))
    return found


def checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return a user's callbacks.

    Raises:
        ConfigError: they are no list, or one is a class, has not the methods of
            ``Callback``, or would have to be awaited.
    """
    if not isinstance(callbacks, Iterable):
        name = type(callbacks).__name__
        raise ConfigError("callbacks", f"must be a list, got a {name}; put it in brackets")
    found = tuple(callbacks)
    for callback in found:
        if isinstance(callback, type) or not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise ConfigError(
                "callbacks",
                f"must be objects with the methods evaluated and ended, got {name}; "
                f"derive it from raydl.Callback and pass an object of it",
            )
        if any(map(inspect.iscoroutinefunction, (callback.evaluated, callback.ended))):
            name = type(callback).__name__
            raise ConfigError("callbacks", f"are not awaited: leave out the async of {name}")
    return found


class Listeners:
    """The callbacks of a run, and what the first of them said that asked for its end.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.ended_by = ""
        """Origin of the request: the ``name`` of a callback, else module:Class; empty: none."""
        self.ended_because = ""
        """The reason it gave."""
        self._callbacks = tuple(callbacks)

    def note_score(self, evaluated: Evaluated) -> None:
        """Call all with a score, each with a copy; what one of them raises comes as it is.

        Raises:
            RaydlError: one of them called ``sys.exit``, which would look like a signal.
        """
        for callback in self._callbacks:
            own = replace(evaluated, metrics=dict(evaluated.metrics))
            try:
                answer = callback.evaluated(own)
            except SystemExit as error:
                raise RaydlError(
                    f"{_name_of(callback)} called sys.exit({error.code!r}); a callback ends the "
                    f"run with a checkpoint when it returns the reason"
                ) from error
            if answer and not self.ended_by:
                self.ended_by = _name_of(callback)
                asked = f"{self.ended_by} asked for the end"
                self.ended_because = answer if isinstance(answer, str) else asked


def _name_of(callback: Callback) -> str:
    kind = type(callback)
    return str(getattr(callback, "name", "") or f"{kind.__module__}:{kind.__qualname__}")
