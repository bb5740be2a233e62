"""Callbacks: called in the driver after each evaluation of the center and at the end of the run.

``Callback`` is the protocol. ``StopAtAccuracy`` and ``Patience`` implement the settings
``training.stop_at_accuracy`` and ``training.patience``; they use nothing but that protocol::

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

from raydl.config import EvaluationConfig, TrainConfig
from raydl.core.scores import Evaluated, metric_of, score_of
from raydl.errors import ConfigError, RaydlError


@runtime_checkable
class Callback(Protocol):
    """Receives each score of the center and may end the run.

    The driver calls it between two polls of the cluster, so it should return soon. An exception
    ends the run; it is raised with its own traceback after all processes are closed.
    """

    def evaluated(self, evaluated: Evaluated) -> str | bool | None:
        """Handle a score of the center and return whether to end the run, preferably why.

        The workers are some rounds ahead of the score by then. They end after their next round,
        with a checkpoint. Evaluations that finish meanwhile, and the one of the last center, are
        reported, too.

        Args:
            evaluated: metrics of a snapshot of the center, with the progress of the run at the
                time of the snapshot.
        """
        ...

    def ended(self, figures: Mapping[str, Any]) -> None:
        """Handle the end of a run that no exception ended; the run folder is complete.

        Args:
            figures: contents of ``result.json``.
        """
        return None


class StopAtAccuracy(Callback):
    """Ends the run at the first score of the center that reaches an accuracy.

    Args:
        accuracy: lowest sufficient accuracy, in (0, 1].
    """

    def __init__(self, accuracy: float) -> None:
        self.name = f"training.stop_at_accuracy {accuracy}"
        """The setting, for ``result.json``."""
        self._accuracy = accuracy

    def evaluated(self, evaluated: Evaluated) -> str | None:
        """Return a reason if the accuracy is reached."""
        accuracy = evaluated.metrics.get("accuracy", -math.inf)
        return f"reached accuracy {accuracy:.4f}" if accuracy >= self._accuracy else None


class Patience(Callback):
    """Ends the run after some evaluations in a row without a better center (early stopping).

    Any improvement of the metric that compares centers counts.

    Args:
        num_evaluations: evaluations in a row that may be no better than the best, 1 or more.
        evaluation: settings, which name the metric.
    """

    def __init__(self, num_evaluations: int, evaluation: EvaluationConfig | None = None) -> None:
        self.name = f"training.patience {num_evaluations}"
        """The setting, for ``result.json``."""
        self._num_evaluations = num_evaluations
        self._evaluation = evaluation or EvaluationConfig()
        self._best, self._best_value = -math.inf, math.nan
        self._num_worse = 0

    def evaluated(self, evaluated: Evaluated) -> str | None:
        """Return a reason if the last evaluations were no better."""
        score = score_of(evaluated.metrics, self._evaluation)
        metric = metric_of(evaluated.metrics, self._evaluation)
        if score > self._best:
            self._best, self._best_value = score, evaluated.metrics[metric]
            self._num_worse = 0
            return None
        self._num_worse += 1
        if self._num_worse < self._num_evaluations:
            return None
        last = f"in the last {self._num_worse} evaluation{'s' if self._num_worse > 1 else ''}"
        if self._best == -math.inf:
            return f"no finite {metric} {last}"
        return f"no better {metric} than {self._best_value:.4f} {last}"


def callbacks_of(config: TrainConfig) -> list[StopAtAccuracy | Patience]:
    """Return the callbacks that the settings request."""
    training = config.training
    callbacks: list[StopAtAccuracy | Patience] = []
    if training.stop_at_accuracy is not None:
        callbacks.append(StopAtAccuracy(training.stop_at_accuracy))
    if training.patience is not None:
        callbacks.append(Patience(training.patience, config.evaluation))
    return callbacks


def checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return a user's callbacks as a tuple.

    Raises:
        ConfigError: if they are no list, or one of them is a class, lacks a method of
            ``Callback`` or has an async one.
    """
    if not isinstance(callbacks, Iterable):
        name = type(callbacks).__name__
        raise ConfigError("callbacks", f"must be a list, got a {name}; put it in brackets")
    checked = tuple(callbacks)
    for callback in checked:
        kind = callback if isinstance(callback, type) else type(callback)
        if kind is callback or not isinstance(callback, Callback):
            raise ConfigError(
                "callbacks",
                f"must be objects with the methods evaluated and ended, got {kind.__name__}; "
                f"derive it from raydl.Callback and pass an instance",
            )
        if any(map(inspect.iscoroutinefunction, (callback.evaluated, callback.ended))):
            raise ConfigError(
                "callbacks", f"must not have async methods, got {kind.__name__}; remove the async"
            )
    return checked


class Listeners:
    """The callbacks of a run, and the first request to end it.

    Args:
        callbacks: in calling order.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.ended_by = ""
        """Callback that requested the end, by its ``name`` or as module:Class; empty if none."""
        self.ended_because = ""
        """Its reason."""
        self._callbacks = tuple(callbacks)

    def note_score(self, evaluated: Evaluated) -> None:
        """Call each callback with its own copy of a score; exceptions propagate unchanged.

        Raises:
            RaydlError: if a callback called ``sys.exit``, which would look like a signal.
        """
        for callback in self._callbacks:
            kind = type(callback)
            name = str(getattr(callback, "name", "") or f"{kind.__module__}:{kind.__qualname__}")
            try:
                reason = callback.evaluated(replace(evaluated, metrics=dict(evaluated.metrics)))
            except SystemExit as error:
                raise RaydlError(
                    f"{name} called sys.exit({error.code!r}); return a reason instead, which ends "
                    f"the run with a checkpoint"
                ) from error
            if reason and not self.ended_by:
                self.ended_by = name
                self.ended_because = (
                    reason if isinstance(reason, str) else f"{name} requested the end of the run"
                )
