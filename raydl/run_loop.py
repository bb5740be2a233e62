"""Steps the controller until the run ends, serves its control channel, and handles signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from raydl.config import TrainConfig
from raydl.control import Controller
from raydl.control.state import State
from raydl.metrics import Forgiving, MetricsWriter, Queued, Tee, TensorBoardWriter, Thinned
from raydl.recorder import RunRecorder
from raydl.run_view import RunView
from raydl.runs.control_channel import ControlChannel
from raydl.runs.driver_epoch import DriverEpoch
from raydl.runs.folder import RunFolder
from raydl.storage import Storage


@contextmanager
def open_control_channel(storage: Storage, view: RunView) -> Iterator[ControlChannel]:
    """Open a run's control channel, and close it with how the run ended, whichever way that was."""
    control_channel = ControlChannel(storage)
    control_channel.tell(view.status(), at_once=True)
    try:
        yield control_channel
    except BaseException as error:
        control_channel.close(view.end(error))
        raise
    control_channel.close(view.end())


def run_to_end(
    controller: Controller,
    recorder: RunRecorder,
    control_channel: ControlChannel,
    view: RunView,
    *,
    config: TrainConfig,
    epoch: DriverEpoch,
) -> None:
    """Step the controller until the run is done; between two steps, see to the control channel.

    Raises:
        SupersededError: another driver has taken the run over.
        RaydlError: what ends the run; a user's own exception comes as it is.
    """
    view.follow(controller)
    with _stop_on_signal(controller):
        while not controller.step():
            epoch.raise_if_over()
            controller.note_refused("store", {"checkpoints": recorder.checkpoints.num_late})
            control_channel.tell(view.status)
            for request in control_channel.take_requests():
                ok, sentence = remove(controller, request.worker_id, config=config)
                control_channel.answer(request, sentence, ok=ok)
            trouble = control_channel.take_trouble()
            if trouble:
                recorder.event(trouble)
    control_channel.tell(view.status, at_once=True)


def remove(controller: Controller, worker_id: str, *, config: TrainConfig) -> tuple[bool, str]:
    """Take a worker out, if that can be; return (whether it goes, a sentence)."""
    if config.scaling.max_workers == 0:
        return False, (
            f"{worker_id} is the run's only process (--workers 0); to end the run, interrupt it"
        )
    if controller.state in (State.FINISHING, State.DONE):
        return False, f"the run is about to end, and {worker_id} with it"
    return controller.remove(worker_id)


@contextmanager
def _stop_on_signal(controller: Controller) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop with a checkpoint; the second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        signal.signal(number, signal.default_int_handler)
        controller.request_stop(name)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_writer(
    config: TrainConfig,
    folder: RunFolder,
    purge_after: int | None,
    tell: Callable[[str], None],
    *,
    seconds_before: float = 0.0,
) -> MetricsWriter:
    """Return what takes the measurements: event files, and Ray's metrics where Ray runs.

    Args:
        config: the settings.
        folder: of the event files.
        purge_after: in a resumed run, the samples at its checkpoint.
        tell: takes a sentence of what can not be written.
        seconds_before: seconds of training in earlier starts; an old run writes fewer points.
    """

    def make_events(is_first: bool) -> MetricsWriter:
        return TensorBoardWriter(str(folder.path), purge_after=purge_after, goes_on=not is_first)

    name = f"the curves in {folder.path}"
    events = Queued(lambda say: Forgiving(make_events, name, say), name, tell)
    tensorboard = Thinned(events, seconds_before=seconds_before)
    if config.scaling.max_workers == 0:
        return tensorboard
    from raydl.on_ray.metrics import RayMetrics  # imports Ray

    gauges = RayMetrics(folder.path.name, first_sample=purge_after or 0)
    return Tee(tensorboard, Forgiving(lambda _: gauges, "Ray's metrics", tell))
