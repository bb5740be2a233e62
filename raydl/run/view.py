"""Gathers a run's status for the control channel, from the controller and the recorder."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.reports import Outcome
from raydl.elastic.controller import Controller
from raydl.elastic.state import State
from raydl.elastic.worker_registry import Phase, WorkerEntry
from raydl.errors import RaydlError
from raydl.redaction import redact
from raydl.run.progress_reporter import ProgressReporter, ProgressView, Silent
from raydl.run.recorder import RunRecorder
from raydl.run.status import RunStatus, WorkerStatus
from raydl.text import clock_text, escape_controls

_NUM_EVENTS = 8
_NODE_DIGITS = 8
"""So much of the id of a Ray node, of 56 digits, tells nodes apart for a person: its last ones.

The ids of an autoscaler's nodes on one machine (`cluster_configs/local.yaml`) begin all the same.
"""
_WAITING = "device_device_parameters"


class EventLog:
    """A progress display that remembers the newest events, each with the time since the start.

    Args:
        progress: what a person looks at.
        clock: seconds, rising.
    """

    def __init__(
        self, progress: ProgressReporter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress: ProgressReporter = progress
        self._clock = clock
        self._began_at = clock()
        self._lines: deque[str] = deque(maxlen=_NUM_EVENTS)

    @property
    def lines(self) -> tuple[str, ...]:
        """The newest events, oldest first: ``0:01:05 w2 was removed``."""
        return tuple(self._lines)

    def update(self, view: ProgressView) -> None:
        """Show the state."""
        self._show(lambda progress: progress.update(view))

    def event(self, sentence: str) -> None:
        """Keep the sentence, and say it, without credentials of URIs."""
        sentence = escape_controls(redact(sentence))
        self._lines.append(f"{clock_text(self._clock() - self._began_at)} {sentence}")
        self._show(lambda progress: progress.event(sentence))

    def close(self) -> None:
        """Leave the terminal as it should stay."""
        self._show(lambda progress: progress.close())

    def _show(self, act: Callable[[ProgressReporter], None]) -> None:
        """Show something; an output that fails, on a full disk say, ends no run."""
        try:
            act(self._progress)
        except OSError:
            self._progress = Silent()


class RunView:
    """Facts about a run for its user, from the moment its folder is open.

    Args:
        config: the settings.
        start: the snapshot the run goes on from.
        seconds_before: training time of earlier starts, in seconds.
        center_accuracy: the newest score of earlier starts; None: there is none.
        clock: seconds, rising; the controller's.
    """

    def __init__(
        self,
        config: TrainConfig,
        start: Snapshot,
        *,
        seconds_before: float,
        center_accuracy: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = config.scaling.wanted() if config.scaling.max_workers else "1"  # itself
        self._start = start
        self._seconds_before = seconds_before
        self._accuracy_before = center_accuracy
        self._clock = clock
        self._log: EventLog | None = None
        self._recorder: RunRecorder | None = None
        self._controller: Controller | None = None

    def follow_recorder(self, recorder: RunRecorder, log: EventLog) -> None:
        """Tell from now on what was recorded."""
        self._recorder, self._log = recorder, log

    def follow(self, controller: Controller) -> None:
        """Tell from now on where the controller stands."""
        self._controller = controller

    def status(self) -> RunStatus:
        """Return how the run stands now."""
        controller = self._controller
        if controller is None:
            return self._status("starting")
        now = self._clock()
        is_done = controller.state is State.DONE  # the last files are still to be written
        return self._status(
            State.FINISHING.value if is_done else controller.state.value,
            num_workers=controller.num_workers,
            workers=tuple(worker_status(e, now) for e in controller.worker_registry.entries()),
        )

    def end(self, error: BaseException | None = None) -> RunStatus:
        """Return how the run ended, by itself or by an error; no worker is left then."""
        reason = self._controller.stop_reason if self._controller else ""
        if error is not None:
            return self._status(how_it_ended(error, stop_reason=reason))
        is_stopped = self._controller and self._controller.outcome is Outcome.STOPPED
        if is_stopped:
            return self._status(f"stopped by {reason}")
        why = self._controller.ended_because if self._controller else ""
        return self._status(f"finished: {why}" if why else "finished")

    def _status(
        self, state: str, *, num_workers: int = 0, workers: tuple[WorkerStatus, ...] = ()
    ) -> RunStatus:
        recorder, controller, start = self._recorder, self._controller, self._start
        newest = ((recorder and recorder.last) or start).progress
        accuracy = recorder.center_accuracy if recorder else self._accuracy_before
        progress = replace(
            newest,
            round=int(newest.round),  # counts may be NumPy's, which JSON can not hold
            num_samples=int(newest.num_samples),
            epoch=float(newest.epoch),
            generation=controller.generation if controller else start.progress.generation,
            # Before the first record, the recorder's clock has begun but not ended.
            seconds=max(self._seconds_before, recorder.seconds if recorder else 0.0),
        )
        return RunStatus(
            state=state,
            progress=progress,
            num_workers=num_workers,
            wanted=self._wanted,
            center_accuracy=_finite(accuracy),
            workers=workers,
            events=self._log.lines if self._log else (),
            checkpoint_at=recorder.checkpoint_at if recorder else None,
        )


def worker_status(entry: WorkerEntry, now: float) -> WorkerStatus:
    """Return how a worker stands; ``now`` is by the clock of its entry."""
    report = entry.report
    phase, since = entry.phase, entry.since
    if phase is Phase.TRAINING and not entry.in_loop:  # between two generations
        phase, since = Phase.READY, entry.moved_at
    return WorkerStatus(
        worker_id=entry.worker_id,
        state=phase.value,
        node=entry.node[-_NODE_DIGITS:],
        local_step=int(report.local_step) if report else 0,
        round=int(report.round) if report else 0,
        step_s=_finite(report.step_s) or 0.0 if report else 0.0,
        # In all, not in the newest round alone: of that, a person sees too little.
        waited_s=_finite(report.time_parts.get(_WAITING)) or 0.0 if report else 0.0,
        since_s=max(0.0, now - since),
    )


def how_it_ended(error: BaseException, *, stop_reason: str = "") -> str:
    """Return the last state of a run that an error ended, in one line."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        signal = "SIGTERM" if isinstance(error, SystemExit) else "SIGINT"
        return f"stopped by {stop_reason or signal} at once, without a last checkpoint"
    lines = str(error).strip().splitlines()
    if isinstance(error, RaydlError):
        return f"failed: {' '.join(lines)}"
    if len(lines) > 1:  # a traceback from a worker: what was raised comes last
        return f"failed: {lines[-1].strip()}"
    return f"failed: {': '.join([type(error).__name__, *lines])}"


def _finite(value: object) -> float | None:
    """Return a number as JSON can hold it, or None."""
    number = math.nan if value is None else float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None
