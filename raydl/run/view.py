"""Gathers a run's status for the control channel, from the controller and the recorder."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from raydl.config import TrainConfig
from raydl.core.center import Snapshot
from raydl.core.reports import Outcome
from raydl.elastic.controller import Controller
from raydl.elastic.run_state import State
from raydl.elastic.state import Phase, Worker
from raydl.errors import STOPPED, RaydlError
from raydl.run.progress_reporter import LOGGER, ProgressReporter, ProgressView, Silent
from raydl.run.recorder import RunRecorder
from raydl.run.status import RunStatus, WorkerStatus
from raydl.text.formatting import clock_text, escape_controls
from raydl.text.redaction import redact

_NUM_EVENTS = 8
_NODE_DIGITS = 8
"""Number of last digits shown of a Ray node's id, which has 56.

The ids of an autoscaler's nodes on one machine (`cluster_configs/local.yaml`) begin alike.
"""
_WAITING = "device_device_parameters"


class EventLog:
    """A progress display that keeps the newest events, each with the time since the start.

    Args:
        progress: the display.
        clock: the time in seconds, from any origin.
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
        """Show and keep a sentence, without credentials of URIs."""
        sentence = escape_controls(redact(sentence))
        self._lines.append(f"{clock_text(self._clock() - self._began_at)} {sentence}")
        logging.getLogger(LOGGER).info("%s", sentence)
        self._show(lambda progress: progress.event(sentence))

    def close(self) -> None:
        """Leave the terminal as it should stay."""
        self._show(lambda progress: progress.close())

    def _show(self, act: Callable[[ProgressReporter], None]) -> None:
        """Use the display until its output fails, for example on a full disk; the run goes on."""
        try:
            act(self._progress)
        except OSError:
            self._progress = Silent()


class RunView:
    """Makes the status of a run, as soon as the run's folder is open.

    Args:
        config: the settings.
        start: the snapshot from which the run starts or resumes.
        seconds_before: training time of earlier starts, in seconds.
        center_accuracy: the newest accuracy of earlier starts, or None.
        clock: the controller's clock, in seconds.
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

    def start_again(self, start: Snapshot, *, seconds_before: float) -> None:
        """Show a new start of the same run, from a snapshot, until a controller is followed."""
        if self._recorder is not None:
            self._accuracy_before = self._recorder.center_accuracy
        self._start, self._seconds_before = start, seconds_before
        self._recorder = self._controller = None

    def follow_recorder(self, recorder: RunRecorder, log: EventLog) -> None:
        """Include the records and events from now on."""
        self._recorder, self._log = recorder, log

    def follow(self, controller: Controller) -> None:
        """Include the state of the controller from now on."""
        self._controller = controller

    def status(self) -> RunStatus:
        """Return the status of the run now."""
        controller = self._controller
        if controller is None:
            return self._status("starting")
        now = self._clock()
        is_done = controller.state is State.DONE  # the last files are not written yet
        return self._status(
            State.FINISHING.value if is_done else controller.state.value,
            num_workers=controller.num_workers,
            workers=tuple(worker_status(e, now) for e in controller.workers),
        )

    def end(self, error: BaseException | None = None) -> RunStatus:
        """Return the last status of the run, without workers.

        Args:
            error: the error that ended the run, or None.
        """
        controller = self._controller
        reason = controller.stop_reason if controller else ""
        if error is not None:
            return self._status(end_state(error, stop_reason=reason))
        if controller and controller.outcome is Outcome.STOPPED:
            return self._status(f"stopped by {reason}")
        why = controller.ended_because if controller else ""
        return self._status(f"finished: {why}" if why else "finished")

    def _status(
        self, state: str, *, num_workers: int = 0, workers: tuple[WorkerStatus, ...] = ()
    ) -> RunStatus:
        recorder, controller, start = self._recorder, self._controller, self._start
        newest = ((recorder and recorder.last) or start).progress
        accuracy = recorder.center_accuracy if recorder else self._accuracy_before
        progress = replace(
            newest,
            round=int(newest.round),  # JSON cannot hold numbers of NumPy
            num_samples=int(newest.num_samples),
            epoch=float(newest.epoch),
            generation=controller.generation if controller else start.progress.generation,
            seconds=recorder.seconds if recorder else self._seconds_before,
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
            center_loss=_finite(recorder.center_loss) if recorder else None,
        )


def worker_status(entry: Worker, now: float) -> WorkerStatus:
    """Return the status of a worker; ``now`` is by the clock of its entry."""
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
        # The total: the newest round alone says too little.
        waited_s=_finite(report.time_parts.get(_WAITING)) or 0.0 if report else 0.0,
        since_s=max(0.0, now - since),
    )


def end_state(error: BaseException, *, stop_reason: str = "") -> str:
    """Return the last state of a run that an error ended, in one line."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        code = error.code if isinstance(error, SystemExit) else STOPPED["SIGINT"]
        signal = next((name for name, status in STOPPED.items() if status == code), "SIGTERM")
        return f"stopped by {stop_reason or signal} at once, without a last checkpoint"
    lines = str(error).strip().splitlines()
    if isinstance(error, RaydlError):
        return f"failed: {' '.join(lines)}"
    if len(lines) > 1:  # a traceback of a worker: its last line is the error
        return f"failed: {lines[-1].strip()}"
    return f"failed: {': '.join([type(error).__name__, *lines])}"


def _finite(value: object) -> float | None:
    """Return a number that JSON can hold, or None."""
    number = math.nan if value is None else float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None
